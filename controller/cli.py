"""`parlay serve`: run the sidecar in this process until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from parlay.controller.audit import Audit
from parlay.controller.host import Host
from parlay.controller.learned_states import read_snapshot
from parlay.controller.log import StepLog
from parlay.controller.observatory import Observatory
from parlay.controller.service import check_private
from parlay.controller.service import serve as serve_host
from parlay.controller.sharing import Sharing
from parlay.controller.store import open_store
from parlay.policies.decision_log import LogSettings

if TYPE_CHECKING:
    from parlay.controller.web import Page

PROBE_S = 1.0
MAX_PATH_BYTES = 107
MAX_PORT = 65535


def serve(
    listen: Annotated[
        str, typer.Option(help="unix:/path or host:port (port 0: any)")
    ] = "127.0.0.1:50051",
    policy: Annotated[str, typer.Option(help="the policy that decides")] = "goodput",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="a setting of the policy, key=value")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="write the decision log into this folder")
    ] = None,
    log_sample: Annotated[float, typer.Option(help="share of requests to log, 0 to 1")] = 1.0,
    admin: Annotated[
        str | None, typer.Option(help="where parlay admin is served: unix:/path or 127.0.0.1:port")
    ] = None,
    audit: Annotated[
        Path | None, typer.Option(help="write who changed what into this file, JSON lines")
    ] = None,
    snapshots: Annotated[
        Path | None, typer.Option(help="the folder for parlay admin snapshot")
    ] = None,
    warm_start: Annotated[
        Path | None, typer.Option(help="let new engines start from this snapshot")
    ] = None,
    state: Annotated[
        str,
        typer.Option(
            envvar="PARLAY_STATE",
            help="where what is learned is kept and shared: memory, file:PATH, redis://, rediss://,"
            " redis+sentinel:// or redis+cluster://",
        ),
    ] = "memory",
    tenant: Annotated[str, typer.Option(help="replicas of one tenant learn together")] = "default",
    model: Annotated[str, typer.Option(help="replicas of one model learn together")] = "default",
    http: Annotated[
        str | None, typer.Option(help="where the page, /metrics and /health are served: host:port")
    ] = None,
) -> None:
    """Serve speculation plans to engines; SIGTERM drains and ends."""
    logging.basicConfig(format="level=%(levelname)s logger=%(name)s %(message)s")
    try:
        warm = None if warm_start is None else read_snapshot(warm_start)
        host = Host(policy, parse_settings(settings or []), warm=warm)
        store = open_store(state)
        if admin is not None:
            check_private(admin)
            claim(admin)
        claim(listen)
        page = None if http is None else _page(host, http)
        with contextlib.ExitStack() as stack:
            if log is not None:
                kept = StepLog(log, policy, LogSettings(sample_rate=log_sample))
                host.keep = stack.enter_context(kept).put
                if page is not None:
                    page[0].metrics.log = kept
            sharing = Sharing(store, tenant, model)
            stack.callback(sharing.close)
            if page is not None and state.startswith("redis"):
                page[0].metrics.redis_lag_s = lambda: sharing.lag_s
            asyncio.run(_run(host, listen, sharing, page, admin, Audit(audit), snapshots))
    except (OSError, ValueError) as error:
        _fail(str(error))
    release(listen)
    if admin is not None:
        release(admin)


def parse_settings(pairs: list[str]) -> dict[str, str]:
    """Split key=value pairs; raises ValueError for anything else."""
    for pair in pairs:
        if not pair.partition("=")[0] or "=" not in pair:
            raise ValueError(f"--set {pair}: write it as key=value")
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


def claim(listen: str) -> None:
    """Check an address and remove a socket that nobody listens on; raises OSError or ValueError."""
    path = socket_path(listen)
    if path is None:
        _try_port(listen)
    else:
        _claim_path(path)


def release(listen: str) -> None:
    """Remove our socket."""
    path = socket_path(listen)
    if path is not None:
        path.unlink(missing_ok=True)


def socket_path(listen: str) -> Path | None:
    """Return the path of a unix: address, None for any other."""
    if not listen.startswith("unix:"):
        return None
    return Path(listen.removeprefix("unix://").removeprefix("unix:"))


def _try_port(listen: str) -> None:
    """Bind and let go: what gRPC says about a port that is taken is long and unclear."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > MAX_PORT:
        raise ValueError(f"--listen {listen}: write it as unix:/path or host:port")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen on {listen}: {error.strerror}") from None


def _claim_path(path: Path) -> None:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise OSError(
            f"cannot listen on {path}: a socket's path has at most {MAX_PATH_BYTES} bytes"
        )
    if not path.parent.is_dir():
        raise OSError(f"cannot listen on {path}: its folder does not exist")
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise OSError(f"cannot listen on {path}: a file of that name is there and is no socket")
    if _listens(path):
        raise OSError(f"cannot listen on {path}: another process does")
    path.unlink(missing_ok=True)


def _listens(path: Path) -> bool:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except TimeoutError:
            return True
        return True


async def _run(
    host: Host,
    listen: str,
    sharing: Sharing,
    page: tuple[Page, socket.socket] | None,
    admin: str | None,
    audit: Audit,
    snapshots: Path | None,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def ready(address: str) -> None:
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
                host, listen, ready, stop, admin_target=admin, audit=audit, snapshots=snapshots
            )
    finally:
        shares.cancel()


def _page(host: Host, address: str) -> tuple[Page, socket.socket]:
    """Let the host be watched; return the page about it and the socket it will be served on."""
    try:
        from parlay.controller.metrics import Metrics
        from parlay.controller.web import Page, bind
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("parlay"):
            raise
        raise ValueError(f"--http needs {error.name}: pip install 'parlay[web]'") from None
    host.watch = Observatory()
    return Page(host.watch, Metrics(host.watch, lambda: host.policy)), bind(address)


def _fail(text: str) -> NoReturn:
    typer.echo(f"parlay serve: {text}", err=True)
    raise typer.Exit(1)
