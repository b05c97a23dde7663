"""The sidecar's HTTP side: metrics, health, a page to look at, and the JSON that commands read.

It runs on the loop that decides, so everything here is short, and what a page asks for every other
second is made once a second at most. Nothing is loaded from outside: plotly.js is the installed
package's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Generator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import uvicorn
from jinja2 import Environment, FileSystemLoader
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from parlay.controller.explain import explained
from parlay.controller.figures import INK, LABEL, figures
from parlay.controller.metrics import CONTENT_TYPE, Metrics
from parlay.controller.observatory import Observatory, Unknown
from parlay.controller.overview import overview
from parlay.controller.page_door import PageDoor
from parlay.controller.tls import PageTls
from parlay.controller.tokens import Tokens
from parlay.controller.wording import gain, number, share

FOLD_S = 0.25
"""How often what was put aside is added up."""
FRESH_S = 1.0
"""How long what was made for a page serves others."""
RENEW_S = 5.0
"""How often the page looks whether its certificate was replaced."""
MOST_READERS = 64
"""Connections at a time; whoever comes then is told to come back (503)."""
_PAGE = Path(__file__).parent / "page"
_PLOTLY = "plotly.min.js"
_KINDS = {".js": "text/javascript", ".css": "text/css"}
_POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:"


class Page:
    """Answers requests about an observatory.

    tokens: who may ask, None: whoever reaches it; tls: what it is served with, None: plain HTTP;
    listen: where the sidecar it is of serves engines.
    """

    def __init__(
        self,
        observatory: Observatory,
        metrics: Metrics,
        tokens: Tokens | None = None,
        tls: PageTls | None = None,
        listen: str = "",
    ) -> None:
        self.observatory, self.metrics, self.listen = observatory, metrics, listen
        self.tokens, self.tls = tokens, tls
        self._made: dict[str | None, tuple[float, bytes]] = {}

    def served(self) -> Any:
        """Return the application behind its door."""
        if self.tokens is None:
            return self.app()
        door = PageDoor(self.app(), self.tokens)
        self.metrics.refused["page"] = lambda: door.refused
        return door

    def app(self) -> Starlette:
        """Return the application."""
        return Starlette(
            routes=[
                Route("/", self.page),
                Route("/live.json", self.live),
                Route("/overview.json", self.overview),
                Route("/explain/{request_id:int}.json", self.explain_json),
                Route("/explain/{request_id:int}", self.explain_page),
                Route("/metrics", self.prometheus),
                Route("/health", self.health),
                Route("/assets/{name}", asset),
            ],
            exception_handlers={Unknown: _not_found},
        )

    async def page(self, request: Request) -> Response:
        """Serve the page, which then asks for live.json by itself."""
        return _html("page.html", policy=self.metrics.policy())

    async def live(self, request: Request) -> Response:
        """Serve what the page shows: pieces of HTML and plots, by the id of their element."""
        engine = request.query_params.get("engine")
        now_s = time.monotonic()
        made_s, body = self._made.get(engine, (-FRESH_S, b""))
        if now_s - made_s >= FRESH_S:
            body = json.dumps(_live(overview(self.observatory, engine))).encode()
            self._made = {e: m for e, m in self._made.items() if now_s - m[0] < FRESH_S}
            self._made[engine] = (now_s, body)
        return Response(body, media_type="application/json")

    async def overview(self, request: Request) -> Response:
        """Serve the figures as JSON."""
        return JSONResponse(
            overview(self.observatory, request.query_params.get("engine"))
            | {"policy": self.metrics.policy()}
        )

    async def explain_json(self, request: Request) -> Response:
        """Serve why a request got its plan."""
        return JSONResponse(self._explained(request))

    async def explain_page(self, request: Request) -> Response:
        """Serve why a request got its plan, as a page."""
        return _html("explain.html", policy=self.metrics.policy(), e=self._explained(request))

    async def prometheus(self, request: Request) -> Response:
        """Serve the metrics."""
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def health(self, request: Request) -> Response:
        """Say that the process answers, and which it is."""
        said = {"status": "ok", "policy": self.metrics.policy(), "listen": self.listen}
        return JSONResponse(said | {"engines": len(self.observatory.engines)})

    def _explained(self, request: Request) -> dict[str, Any]:
        engine = request.query_params.get("engine")
        return explained(self.observatory, int(request.path_params["request_id"]), engine)


async def asset(request: Request) -> Response:
    """Serve a file of the page."""
    name = request.path_params["name"]
    if name not in {_PLOTLY, "page.js", "page.css"}:
        return Response("no such file\n", 404)
    content = _asset(name)
    headers = {"cache-control": "max-age=3600" if name == _PLOTLY else "no-cache"}
    return Response(content, media_type=_KINDS[Path(name).suffix], headers=headers)


@contextlib.asynccontextmanager
async def listening(page: Page, bound: socket.socket) -> AsyncIterator[str]:
    """Serve the page on a bound socket, and add up what was seen, for as long as the block runs.

    Yields the URL. Runs on the caller's loop and leaves the process's signals alone.
    """
    config = uvicorn.Config(
        page.served(),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        limit_concurrency=MOST_READERS,
        ssl_certfile=None if page.tls is None else page.tls.files.cert,
        ssl_keyfile=None if page.tls is None else page.tls.files.key,
    )
    config.load()
    if page.tls is not None:
        config.ssl = page.tls.context
    server = _Server(config)
    tasks = [asyncio.create_task(_every(FOLD_S, page.observatory.fold))]
    if page.tls is not None:
        tasks.append(asyncio.create_task(_every(RENEW_S, page.tls.refresh)))
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        host, port = bound.getsockname()[:2]
        scheme = "http" if page.tls is None else "https"
        yield f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        for task in tasks:
            task.cancel()
        server.should_exit = server.force_exit = True
        await serving
        bound.close()


class _Server(uvicorn.Server):
    """Signals are the sidecar's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _every(seconds: float, work: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        work()


def _live(view: dict[str, Any]) -> dict[str, Any]:
    pieces = {name: _template(f"{name}.html").render(view) for name in ("tiles", "tables")}
    return {"html": pieces, "figures": figures(view)}


def _html(name: str, **values: Any) -> Response:
    headers = {"content-security-policy": _POLICY, "cache-control": "no-cache"}
    return HTMLResponse(_template(name).render(**values), headers=headers)


async def _not_found(request: Request, error: Exception) -> Response:
    if request.url.path.endswith(".json"):
        return JSONResponse({"error": str(error)}, 404)
    response = _html("error.html", error=str(error))
    response.status_code = 404
    return response


@cache
def _asset(name: str) -> bytes:
    if name == _PLOTLY:
        return (resources.files("plotly") / "package_data" / name).read_bytes()
    return (_PAGE / name).read_bytes()


@cache
def _environment() -> Environment:
    environment = Environment(loader=FileSystemLoader(_PAGE), autoescape=True, trim_blocks=True)
    environment.filters |= {"number": number, "share": share, "gain": gain}
    environment.globals |= {"INK": INK, "LABEL": LABEL}
    return environment


def _template(name: str) -> Any:
    return _environment().get_template(name)
