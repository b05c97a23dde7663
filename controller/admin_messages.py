"""Messages of AdminService: where policies stand and what was measured of them."""

from __future__ import annotations

from typing import Any

from parlay.controller.candidate import Candidate, Ratio, ratio_of
from parlay.controller.lifecycle import Lifecycle
from parlay.controller.session import Spec, spec_of
from parlay.policies.evaluate import Estimate
from parlay.v1 import admin_pb2 as pb


def active(cycle: Lifecycle, spec: Spec) -> pb.PolicyStatus:
    """Return the status of an active policy."""
    steps, version = cycle.decided(spec)
    return pb.PolicyStatus(
        spec=message(spec),
        stage=pb.STAGE_ACTIVE,
        share=1.0,
        decisions=steps,
        state_version=version,
    )


def idle(cycle: Lifecycle, name: str) -> pb.PolicyStatus:
    """Return the status of a policy that is not in use, with why its last trial ended."""
    return pb.PolicyStatus(spec=pb.PolicySpec(name=name), ended=cycle.ended.get(name, ""))


def status(cycle: Lifecycle, candidate: Candidate) -> pb.PolicyStatus:
    """Return where a candidate stands; one whose trial is over, with why."""
    name = candidate.spec.name
    on_trial = cycle.candidates.get(name) is candidate
    stage: Any = int(candidate.stage) if on_trial else pb.STAGE_UNSPECIFIED
    return pb.PolicyStatus(
        spec=message(candidate.spec),
        stage=stage,
        share=candidate.share if on_trial else 0.0,
        state_version=candidate.state_version,
        decisions=candidate.decisions,
        switch_back=on_trial and candidate.switch_back,
        evidence=evidence(candidate),
        ended="" if on_trial else cycle.ended.get(name, ""),
    )


def evidence(candidate: Candidate) -> pb.TrialEvidence:
    """Return what was measured of a candidate, its value left out."""
    rows = candidate.rows
    return pb.TrialEvidence(
        compared_rows=rows,
        agreement=candidate.agreed / rows if rows else float("nan"),
        active_mean_k=candidate.their_k / rows if rows else float("nan"),
        candidate_mean_k=candidate.our_k / rows if rows else float("nan"),
        speed=comparison(ratio_of(candidate.speed)),
        requests=comparison(ratio_of(candidate.requests)),
        lost_ms=candidate.lost_ms,
    )


def comparison(found: Ratio) -> pb.Comparison:
    """Return a ratio with its bounds."""
    return pb.Comparison(
        ratio=found.ratio, ratio_low=found.low, ratio_high=found.high, pairs=found.pairs
    )


def value(found: Estimate) -> pb.ValueEstimate:
    """Return an off-policy estimate."""
    return pb.ValueEstimate(
        estimator=found.estimator,
        goodput=found.goodput,
        goodput_low=found.low,
        goodput_high=found.high,
        active_goodput=found.logged_goodput,
        effective_requests=found.effective_requests,
        unsupported=found.unsupported,
    )


def spec_in(found: pb.PolicySpec) -> Spec:
    """Return the spec in a message."""
    return spec_of(found.name, found.settings)


def message(spec: Spec) -> pb.PolicySpec:
    """Return a spec as a message."""
    return pb.PolicySpec(name=spec.name, settings=dict(spec.settings))


def arguments(spec: Spec) -> dict[str, Any]:
    """Return a spec as the audit trail has it."""
    return {"policy": spec.name, "settings": dict(spec.settings)}


def written(default: Any) -> str:
    """Return a setting's default as it would be written on the command line."""
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
