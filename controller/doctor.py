"""What `parlay doctor` looks at in a sidecar: its configuration, files, listeners and store."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from parlay.controller import tls
from parlay.controller.config import Config, load
from parlay.controller.fetch import fetch
from parlay.controller.learned_states import read_snapshot
from parlay.controller.observatory import PROBE
from parlay.controller.store import Scope, StoreError, open_store
from parlay.controller.tokens import Tokens
from parlay.policies.doctor import Asked, Finding, Verdict
from parlay.policies.synthetic import LIMITS, History
from parlay.protos import codec
from parlay.protos.credentials import Credentials, from_environment, is_private
from parlay.v1 import admin_pb2, admin_pb2_grpc

SOON = timedelta(days=14)
"""A certificate that ends sooner is worth a warning."""
WAIT_S = 5.0
DECIDE = "/parlay.v1.PolicyService/Decide"
OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL
_WRITABLE = "make it, owned by the sidecar's user (and run this as that user)"
_MEND = {
    grpc.StatusCode.UNAVAILABLE: "start it there, with parlay serve; its log says why it ended;"
    " with TLS, PARLAY_{}_CA_FILE names who signed its certificate",
    grpc.StatusCode.UNAUTHENTICATED: "let PARLAY_{}_TOKEN_FILE name a file with a valid token",
    grpc.StatusCode.PERMISSION_DENIED: "use a token and certificate of this listener's own"
    " (PARLAY_{}_TOKEN_FILE, _CERT_FILE)",
    grpc.StatusCode.DEADLINE_EXCEEDED: "it hangs: restart it, and look at its log",
}


def checks(asked: Asked) -> Iterator[Finding]:
    """Check what `parlay serve` would be told, and the sidecar that runs by it."""
    try:
        config = load({}, asked.config)
    except (OSError, ValueError) as error:
        mend = "mend it: parlay serve --help says the keys"
        if asked.config is not None and not asked.config.exists():
            mend = "write it: controller/deploy/parlay.toml is an example to copy"
        yield Finding(FAIL, "config", str(error), mend)
        return
    told = asked.config or "the defaults and PARLAY_*"
    yield Finding(OK, "config", f"{told}: policy {config.policy}, listens on {config.listen}")
    yield from _secrets(asked.config, config)
    yield from _files(config)
    yield from _store(config)
    yield _sidecar(asked, config)
    if config.admin:
        yield _admin(config.admin)
    if config.http:
        yield _http(asked, config)


def _secrets(file: Path | None, config: Config) -> Iterator[Finding]:
    """Check tokens and certificates: readable, whole, private, and not about to end."""
    if file is not None and "@" in config.state and file.stat().st_mode & 0o004:
        text = f"{file} holds the store's password, and everybody can read it"
        yield Finding(WARN, "config", text, f"chmod o-r {file}, or use PARLAY_STATE")
    for tokens in (config.tokens, config.admin_tokens, config.http_tokens):
        if tokens is not None:
            mend = (
                "a token a line, of openssl rand -hex 32; chmod 0640, owned by the sidecar's user"
            )
            yield _tried("tokens", partial(_tokens, tokens), mend)
    if config.tls_cert is not None and config.tls_key is not None:
        yield _lasts(config.tls_cert, config.tls_key)
    for authority in (config.client_ca, config.admin_client_ca):
        if authority is not None:
            yield _lasts(authority)


def _lasts(cert: Path, key: Path | None = None) -> Finding:
    try:
        end = tls.authority_ends_at(cert) if key is None else tls.ends_at(cert, key)
    except (OSError, ValueError) as error:
        return Finding(FAIL, "certificate", _line(error), "put another into its place")
    left, text = end - datetime.now(UTC), f"{cert} is valid until {end:%Y-%m-%d}"
    if left < timedelta(0):
        return Finding(FAIL, "certificate", f"{cert} ended on {end:%Y-%m-%d}", "renew it")
    if left < SOON:
        mend = "renew it: the sidecar follows the file"
        return Finding(WARN, "certificate", f"{text}: {left.days} days", mend)
    return Finding(OK, "certificate", text)


def _files(config: Config) -> Iterator[Finding]:
    folders = {"log": config.log, "snapshots": config.snapshots}
    if config.audit is not None:
        folders["audit"] = config.audit.parent
    for what, folder in folders.items():
        if folder is not None:
            yield _tried(what, partial(_written, folder), _WRITABLE)
    if config.warm_start is not None:
        mend = "parlay admin snapshot makes one"
        yield _tried("warm_start", partial(_read, config.warm_start), mend)


def _tokens(file: Path) -> str:
    Tokens(file)
    return f"{file} can be used"


def _read(file: Path) -> str:
    read_snapshot(file)
    return f"{file} can be used"


def _written(folder: Path) -> str:
    """Write to the folder, else to the one that it would be made in."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        return f"{folder} can be written"


def _store(config: Config) -> Iterator[Finding]:
    """Check that the store takes a slot and gives it back."""
    if config.state == "memory":
        return
    kind = config.state.partition(":")[0]
    if kind == "file":
        # The file itself is the sidecar's that runs.
        at = Path(config.state.partition(":")[2].removeprefix("//"))
        yield _tried("state", partial(_written, at.parent), _WRITABLE)
        return
    scope, begin = Scope(config.tenant, "parlay-doctor", 0, "none", 1), time.perf_counter()
    mend = "is it up, and may this user do what controller/redis_store.py lists?"
    try:
        store = open_store(config.state)
        try:
            store.exchange({(scope, f"doctor-{os.getpid()}"): b"doctor"})
            held = store.exchange({(scope, f"doctor-{os.getpid()}"): b"doctor"})[scope]
        finally:
            store.close()
    except (StoreError, ValueError) as error:
        yield Finding(FAIL, "state", str(error), mend)
        return
    took_ms = 1e3 * (time.perf_counter() - begin)
    if any(one.data == b"doctor" for one in held.values()):
        yield Finding(OK, "state", f"{kind} keeps what it is told ({took_ms:.0f} ms)")
    else:
        yield Finding(FAIL, "state", f"{kind} does not give back what it was told", mend)


def _target(asked: Asked, config: Config) -> str:
    return asked.sidecar or os.environ.get("PARLAY_SIDECAR") or config.listen


def _sidecar(asked: Asked, config: Config) -> Finding:
    """Ask for a plan as an engine does."""
    target = _target(asked, config)
    view, run = History(4).view(), int.from_bytes(os.urandom(7), "little")
    request = codec.encode_decide(codec.Hello(PROBE, LIMITS, run), view)

    def ask(channel: grpc.Channel, said: Any) -> str:
        begin = time.perf_counter()
        method: Any = channel.unary_unary(DECIDE)
        plan = codec.decode_decision(method(request, timeout=WAIT_S, metadata=said))
        took_ms = 1e3 * (time.perf_counter() - begin)
        return f"{target} decides for {len(plan.request_id)} requests in {took_ms:.1f} ms"

    found = _asked("sidecar", target, "SIDECAR", ask)
    if found.verdict is FAIL and target == Config().listen and asked == Asked(model=asked.model):
        # Nobody said that there is one.
        return Finding(WARN, found.what, found.text, "parlay serve starts one")
    return found


def _admin(target: str) -> Finding:
    def ask(channel: grpc.Channel, said: Any) -> str:
        stub = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        answer = stub.ListPolicies(admin_pb2.ListPoliciesRequest(), timeout=WAIT_S, metadata=said)
        return f"{target} lists {len(answer.policies)} policies"

    return _asked("admin", target, "ADMIN", ask)


def _asked(what: str, target: str, who: str, ask: Callable[[grpc.Channel, Any], str]) -> Finding:
    try:
        credentials: Credentials = from_environment(f"PARLAY_{who}")
        with credentials.channel(target) as channel:
            return Finding(OK, what, ask(channel, credentials.metadata()))
    except grpc.RpcError as error:
        failed: Any = error
        code, details = failed.code(), " ".join((failed.details() or "").split())
        # gRPC's own words about a dial end with the reason.
        text = f"{target}: {code.name}: {details.rpartition('last error: ')[2]}"
        return Finding(FAIL, what, text, _MEND.get(code, "").format(who))
    except (OSError, ValueError) as error:
        return Finding(FAIL, what, _line(error), f"see PARLAY_{who}_*_FILE")


def _http(asked: Asked, config: Config) -> Finding:
    """Ask the page whether it is there, and of which sidecar it is."""
    host, _, port = config.http.rpartition(":")
    reached = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    secure = config.tls_cert is not None and not is_private(config.http)
    try:
        # Asked at an address of its own: its certificate is of the name that others know it by.
        found = fetch(f"http{'s' * secure}://{reached}:{port}", "/health", any_name=True)
    except (OSError, ValueError) as error:
        mend = "start it: parlay serve --http host:port; PARLAY_HTTP_CA_FILE: who signed its own"
        return Finding(FAIL, "http", str(error), mend)
    other = found.get("listen", config.listen)
    if other not in (config.listen, _target(asked, config)):
        text = f"{config.http} is the page of another sidecar, which listens on {other}"
        return Finding(FAIL, "http", text, "end that one, or give this one another http address")
    seen = found.get("engines", "for whoever shows a token")
    return Finding(OK, "http", f"{config.http}: {found.get('status')}, engines {seen}")


def _tried(what: str, look: Callable[[], str], mend: str) -> Finding:
    try:
        return Finding(OK, what, look())
    except (OSError, ValueError) as error:
        return Finding(FAIL, what, _line(error), mend)


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
