"""`parlay serve`: run the sidecar in this process until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from parlay.controller.audit import Audit
from parlay.controller.config import FIELDS, Config, flag, load, said_of_file, variable
from parlay.controller.host import Host
from parlay.controller.learned_states import read_snapshot
from parlay.controller.listener import Claim, bind, claim
from parlay.controller.log import StepLog
from parlay.controller.observatory import Observatory
from parlay.controller.reflection import check_reflection
from parlay.controller.running import Running, doors, set_level
from parlay.controller.seldom import StrangersText
from parlay.controller.service import serve as serve_host
from parlay.controller.sharing import Sharing
from parlay.controller.store import open_store
from parlay.controller.tls import PageTls
from parlay.controller.tokens import Tokens
from parlay.controller.tracing import Tracing, exporting
from parlay.policies.decision_log import LogSettings
from parlay.protos.credentials import is_private

if TYPE_CHECKING:
    from parlay.controller.metrics import Metrics
    from parlay.controller.web import Page

GC_OBJECTS = 50_000
SWITCH_S = 5e-4
"""How long a thread that saves or writes may keep a plan waiting."""
log = logging.getLogger("parlay.controller")


def serve(config: Path | None, **flags: Any) -> None:
    """Serve speculation plans to engines; SIGTERM drains and ends, SIGHUP reads --config anew.

    Each flag can stand in the file of --config (TOML; tls_cert for --tls-cert) or in the
    environment (PARLAY_TLS_CERT); a flag beats the environment, which beats the file.
    """
    logging.basicConfig(format="level=%(levelname)s logger=%(name)s %(message)s")
    logging.getLogger("grpc._cython.cygrpc").addFilter(StrangersText())
    told: Config | None = None
    try:
        told = load(flags, config)
        set_level(told.log_level)
        _serve(Running(told, lambda: load(flags, config), *doors(told)))
    except (OSError, ValueError) as error:
        _fail(said_of_file(error, told))


def _flags() -> inspect.Signature:
    """Return the schema as flags: texts, which `load` understands, so that all sources agree."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    file = typer.Option(help="read what is not given here from this file", envvar="PARLAY_CONFIG")
    found = [
        inspect.Parameter("config", keyword, default=None, annotation=Annotated[Path | None, file])
    ]
    for key, field in FIELDS.items():
        switch = field.metadata["kind"] == "switch"
        option = typer.Option(
            flag(key) + (f"/--no-{flag(key)[2:]}" if switch else ""),
            help=f"{field.metadata['help']} [{variable(key)}]",
            show_default=_shown(field.default),
        )
        kind = bool if switch else list[str] if key == "set" else str
        found.append(
            inspect.Parameter(key, keyword, default=None, annotation=Annotated[kind | None, option])
        )
    return inspect.Signature(found)


def _shown(default: Any) -> str | bool:
    if isinstance(default, int) and not isinstance(default, bool):
        return f"{default:04o}"
    return str(default) if default and isinstance(default, str | float) else False


cast(Any, serve).__signature__ = _flags()


def _serve(running: Running) -> None:
    told = running.config
    warm = None if told.warm_start is None else read_snapshot(told.warm_start)
    host = Host(told.policy, told.set, warm=warm, late=True)
    store = open_store(told.state)
    if told.reflection:
        check_reflection()
    with contextlib.ExitStack() as stack:
        claims = []
        for target, door, what in (
            (told.admin, running.admin_door, "admin"),
            (told.listen, running.door, "the sidecar"),
        ):
            if target:
                claims.append(claim(target))
                stack.callback(claims[-1].release)
                door.check(target, what)
        audit = Audit(told.audit)
        tracing = None
        if told.otel:
            tracing, leave = exporting()
            stack.callback(leave)
        page = _page(host, running) if told.http else None
        if told.log is not None:
            kept = StepLog(told.log, told.policy, LogSettings(sample_rate=told.log_sample))
            host.keep = stack.enter_context(kept).put
            running.steps = kept
        sharing = Sharing(store, told.tenant, told.model, ask=told.state.startswith("redis"))
        stack.callback(sharing.close)
        if page is not None:
            _counted(page[0].metrics, host, running, sharing, audit)
        asyncio.run(_run(host, running, claims, sharing, audit, page, tracing))


async def _run(
    host: Host,
    running: Running,
    claims: list[Claim],
    sharing: Sharing,
    audit: Audit,
    page: tuple[Page, socket.socket] | None,
    tracing: Tracing | None,
) -> None:
    told = running.config
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, running.reload)
    # Whatever stands now stays: a collection that walks through all of it would hold up a plan.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)
    sys.setswitchinterval(SWITCH_S)

    def ready(address: str) -> None:
        for one in claims:
            one.bound()
        line = f"parlay: serving on {address} policy={host.policy} pid={os.getpid()}\n"
        # Unbuffered: what could not be written must not be tried again, and complained of, at exit.
        os.write(sys.stdout.fileno(), line.encode())

    shares = asyncio.create_task(sharing.run(host.sessions))
    try:
        async with contextlib.AsyncExitStack() as stack:
            if page is not None:
                from parlay.controller.web import listening

                url = await stack.enter_async_context(listening(*page))
                os.write(sys.stdout.fileno(), f"parlay: page on {url}\n".encode())
            await serve_host(
                host,
                told.listen,
                ready,
                stop,
                admin_target=told.admin or None,
                audit=audit,
                snapshots=told.snapshots,
                door=running.door,
                admin_door=running.admin_door,
                tracing=tracing,
                reflection=told.reflection,
            )
    finally:
        shares.cancel()


def _page(host: Host, running: Running) -> tuple[Page, socket.socket]:
    """Let the host be watched; return the page about it and the socket it will be served on."""
    try:
        from parlay.controller.metrics import Metrics
        from parlay.controller.page_door import check_page
        from parlay.controller.web import Page
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("parlay"):
            raise
        raise ValueError(f"--http needs {error.name}: pip install 'parlay[web]'") from None
    told = running.config
    tokens = None if told.http_tokens is None else Tokens(told.http_tokens)
    check_page(told.http, tokens)
    running.page_tokens, tls = tokens, None
    if not is_private(told.http):
        if told.tls_cert is not None and told.tls_key is not None:
            tls = PageTls(told.tls_cert, told.tls_key)
        else:
            log.warning("the page's tokens travel as plain text: tls_cert and tls_key mend that")
    host.watch = Observatory()
    metrics = Metrics(host.watch, lambda: host.policy)
    page = Page(host.watch, metrics, tokens, tls, told.listen)
    return page, bind(told.http, "--http")


def _counted(
    metrics: Metrics, host: Host, running: Running, sharing: Sharing, audit: Audit
) -> None:
    """Let the metrics count what happens beside the decisions."""
    metrics.log = running.steps
    if running.config.state.startswith("redis"):
        metrics.redis_lag_s = lambda: sharing.lag_s
    metrics.refused |= {
        "policy": lambda: running.door.refused,
        "admin": lambda: running.admin_door.refused,
    }
    metrics.counts |= {
        "parlay_automatic_rollbacks": lambda: host.lifecycle.automatic,
        "parlay_audit_failed_writes": lambda: audit.failed_writes,
        "parlay_state_failed_exchanges": lambda: sharing.counts.failures,
    }


def _fail(text: str) -> NoReturn:
    typer.echo(f"parlay serve: {text}", err=True)
    raise typer.Exit(1)
