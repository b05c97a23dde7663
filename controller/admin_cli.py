"""`parlay admin`: look at, and change, what decides in a running controller."""

from __future__ import annotations

import contextlib
import getpass
import json
import math
import socket
from typing import Annotated, Any, NoReturn

import grpc
import typer

from parlay.controller.admin import SAYS
from parlay.controller.config_kinds import parse_settings
from parlay.protos.credentials import from_environment
from parlay.v1 import admin_pb2 as pb
from parlay.v1 import admin_pb2_grpc

WAIT_S = 60.0
Address = Annotated[
    str, typer.Option(help="Where `parlay serve --admin` listens: unix:/path or host:port.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Why = Annotated[str, typer.Option("--reason", help="For the audit trail.")]
Name = Annotated[str, typer.Argument(help="A policy's name.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of the policy, key=value.")
]
Engine = Annotated[str | None, typer.Option(help="Only this engine; else all.")]


def admin_list(address: Address, as_json: Json = False) -> None:
    """List the policies and where they stand."""
    answer = _ask(address, "ListPolicies", pb.ListPoliciesRequest())
    _show(answer, as_json, "\n".join(_status(status) for status in answer.policies))


def admin_describe(name: Name, address: Address, as_json: Json = False) -> None:
    """Say where a policy stands, what was measured of it, and what can be set."""
    answer = _ask(address, "DescribePolicy", pb.DescribePolicyRequest(name=name))
    lines = [_status(answer.status)]
    if answer.status.HasField("evidence"):
        lines += _evidence(answer.status.evidence)
    lines += [f"  {setting.name} = {setting.default_value}" for setting in answer.settings]
    if answer.settings:
        lines.append(f"settings: {answer.settings[0].help}")
    _show(answer, as_json, "\n".join(lines))


def admin_activate(
    name: Name,
    address: Address,
    settings: Settings = None,
    engine: Engine = None,
    reason: Why = "",
    as_json: Json = False,
) -> None:
    """Make a policy the active one at once."""
    request = pb.ActivatePolicyRequest(spec=_spec(name, settings), reason=reason, engine_id=engine)
    answer = _ask(address, "ActivatePolicy", request)
    text = f"{answer.active.spec.name} is active, before: {answer.previous.spec.name}"
    _show(answer, as_json, text)


def admin_shadow(
    name: Name,
    address: Address,
    settings: Settings = None,
    stop: Annotated[bool, typer.Option("--stop", help="End its shadowing.")] = False,
    reason: Why = "",
    as_json: Json = False,
) -> None:
    """Let a policy decide beside the active one, without being applied."""
    request = pb.ShadowPolicyRequest(spec=_spec(name, settings), enabled=not stop, reason=reason)
    answer = _ask(address, "ShadowPolicy", request)
    _show(answer, as_json, _status(answer.status))


def admin_canary(
    name: Name,
    address: Address,
    share: Annotated[float, typer.Option(help="Share of requests, 0 to 1.")] = 0.0,
    switch_back: Annotated[
        bool, typer.Option("--switch-back", help="Compare its speed in blocks of steps.")
    ] = False,
    settings: Settings = None,
    reason: Why = "",
    as_json: Json = False,
) -> None:
    """Let a policy decide for a share of the requests; 0 without --switch-back ends it."""
    spec = _spec(name, settings)
    request = pb.CanaryPolicyRequest(spec=spec, share=share, switch_back=switch_back, reason=reason)
    answer = _ask(address, "CanaryPolicy", request)
    _show(answer, as_json, _status(answer.status))


def admin_promote(
    name: Name,
    address: Address,
    force: Annotated[bool, typer.Option("--force", help="Whatever was measured.")] = False,
    reason: Why = "",
    as_json: Json = False,
) -> None:
    """Make a candidate active if it is measured to be faster; exit status 1 where it is not."""
    request = pb.PromotePolicyRequest(name=name, force=force, reason=reason)
    answer = _ask(address, "PromotePolicy", request)
    _show(answer, as_json, f"{name}: {answer.explanation}")
    if not answer.promoted:
        raise typer.Exit(1)


def admin_rollback(address: Address, reason: Why = "", as_json: Json = False) -> None:
    """Take out the policy on canary, else go back to the one that was active before."""
    answer = _ask(address, "RollBackPolicy", pb.RollBackPolicyRequest(reason=reason))
    text = f"{answer.active.spec.name} is active, taken out: {answer.taken_out.spec.name}"
    _show(answer, as_json, text)


def admin_snapshot(address: Address, engine: Engine = None, as_json: Json = False) -> None:
    """Write down what was learned, to warm-start a replica with."""
    answer = _ask(address, "CreateSnapshot", pb.CreateSnapshotRequest(engine_id=engine))
    _show(answer, as_json, f"{answer.snapshot_id}: {answer.size_bytes:,} bytes")


def admin_drain(
    address: Address,
    grace_ms: Annotated[int, typer.Option(min=0, help="Open streams are cut after it.")] = 5000,
    as_json: Json = False,
) -> None:
    """Take no new streams, and ask the open ones to leave."""
    answer = _ask(address, "Drain", pb.DrainRequest(grace_ms=grace_ms))
    _show(answer, as_json, f"draining, streams open: {answer.open_streams}")


def _ask(address: str, method: str, request: Any) -> Any:
    """Return the answer, or end with the one line that says why there is none."""
    try:
        credentials = from_environment("PARLAY_ADMIN")
        said = ((SAYS, _user()), *credentials.metadata())
        opened = credentials.channel(address)
    except (OSError, ValueError) as error:
        _fail(address, grpc.StatusCode.UNAUTHENTICATED, str(error))
    with opened as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            return getattr(stub, method)(request, timeout=WAIT_S, metadata=said)
        except grpc.RpcError as error:
            failed: Any = error
            _fail(address, failed.code(), failed.details() or "")


def _fail(address: str, code: grpc.StatusCode, details: str) -> NoReturn:
    text = " ".join(details.split())
    unreached = code is grpc.StatusCode.UNAVAILABLE and "onnect" in text
    if unreached or "DNS" in text:
        text = f"nobody answers at {address}: is parlay serve --admin running there? ({text})"
    typer.echo(f"parlay admin: {code.name}: {text}", err=True)
    raise typer.Exit(1)


def _user() -> str:
    """Return who runs this, as it is told to the controller; metadata is ASCII."""
    name = "unknown"
    with contextlib.suppress(OSError, KeyError, ImportError):
        name = getpass.getuser()
    return f"{name}@{socket.gethostname()}".encode("ascii", "replace").decode()


def _spec(name: str, settings: list[str] | None) -> pb.PolicySpec:
    return pb.PolicySpec(name=name, settings=parse_settings(settings or []))


def _show(answer: Any, as_json: bool, text: str) -> None:
    typer.echo(json.dumps(plain(answer), indent=1, allow_nan=False) if as_json else text)


def plain(message: Any) -> dict[str, Any]:
    """Return a message as plain values: nan and infinity None, stages by name, unset parts None."""
    return {field.name: _plain_field(message, field) for field in message.DESCRIPTOR.fields}


def _plain_field(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if hasattr(value, "DESCRIPTOR"):
        return plain(value) if message.HasField(field.name) else None
    if hasattr(value, "items"):
        return dict(value)
    if field.enum_type is not None:
        return _stage(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | int):
        return value
    return [plain(item) for item in value]


def _stage(number: int) -> str:
    return {0: "idle"}.get(number, pb.Stage.Name(number).removeprefix("STAGE_").lower())  # type: ignore[arg-type]


def _status(status: pb.PolicyStatus) -> str:
    settings = "".join(f" {key}={value}" for key, value in sorted(status.spec.settings.items()))
    parts = [f"{status.spec.name + settings:24} {_stage(status.stage):7}"]
    if status.stage == pb.STAGE_CANARY:
        parts.append(f"share {status.share:g}{', switch-back' if status.switch_back else ''}")
    if status.decisions:
        parts.append(f"{status.decisions:,} steps")
    if status.ended:
        parts.append(f"ended: {status.ended}")
    return "  ".join(parts).rstrip()


def _evidence(evidence: pb.TrialEvidence) -> list[str]:
    lines = []
    if evidence.compared_rows:
        lines.append(
            f"agrees in {evidence.agreement:.1%} of {evidence.compared_rows:,} rows,"
            f" mean k {evidence.candidate_mean_k:.2f} against {evidence.active_mean_k:.2f}"
        )
    for what, found in (("speed", evidence.speed), ("requests", evidence.requests)):
        if found.pairs:
            lines.append(
                f"{what}: {found.ratio:.3f} of the active policy's"
                f" [{found.ratio_low:.3f}, {found.ratio_high:.3f}], {found.pairs} pairs"
            )
    if evidence.HasField("value"):
        value = evidence.value
        lines.append(
            f"value ({value.estimator}): {value.goodput:,.1f} tokens/s"
            f" [{value.goodput_low:,.1f}, {value.goodput_high:,.1f}],"
            f" the active policy {value.active_goodput:,.1f}"
        )
    elif evidence.no_value:
        lines.append(f"no estimate of its value: {evidence.no_value}")
    return lines
