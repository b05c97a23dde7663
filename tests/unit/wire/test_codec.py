"""What is encoded comes back the same; what is hostile is refused in one line; nothing crashes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.policies.policy import EngineLimits
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import (
    MATCH_EDGES,
    NO_BUDGET,
    PROPOSERS,
    BatchView,
    Plan,
    Proposer,
    Reason,
    ShadowRows,
    StepOutcome,
    StopKind,
    StopRule,
    TaskDefaults,
    no_shadows,
)
from parlay.protos import codec, columns, messages
from parlay.v1 import policy_pb2 as typed
from parlay.wire.v1 import policy_pb2 as raw

Rng = np.random.Generator
K = 5


def random_columns(rng: Rng, table: columns.Table, rows: int) -> dict[str, Any]:
    return {c.name: random_column(rng, c, rows) for c in table.columns}


def written(message: Any, what: BatchView | StepOutcome | Plan) -> Any:
    """Return a message of the twin schema, filled."""
    if isinstance(what, BatchView):
        messages.write_view(message, what)
    elif isinstance(what, StepOutcome):
        messages.write_outcome(message, what)
    else:
        messages.write_plan(message, what)
    return message


def random_column(rng: Rng, column: columns.Column, count: int) -> Any:
    """Draw from the whole range that the table allows, its ends included."""
    low = int(column.low or 0)
    if column.wire.kind == "f":
        high = min(column.high or 1.0, 1e30)
        values = rng.uniform(max(low, -1e30), high, count).astype(column.memory)
        values[rng.random(count) < 0.1] = low if low >= 0 else 0
        if column.nan:
            values[rng.random(count) < 0.2] = np.nan
        return values
    high = int(column.high) if column.high is not None else 2 ** (8 * column.wire.itemsize) - 1
    if column.memory == np.dtype(bool):
        high = 1
    values = rng.integers(low, high, count, dtype=np.uint64, endpoint=True)
    values[rng.random(count) < 0.1] = high
    return values.astype(column.memory)


def random_ids(rng: Rng, rows: int) -> Any:
    high = rng.integers(0, 2**50, dtype=np.uint64)
    return rng.permutation(np.arange(rows, dtype=np.uint64)) * np.uint64(8191) + high


def random_view(rng: Rng, rows: int) -> BatchView:
    fields = random_columns(rng, columns.VIEW, rows) | {"request_id": random_ids(rng, rows)}
    edges = np.unique(rng.integers(1, 2**31 - 1, rng.integers(0, 9))).astype(np.int32)
    return BatchView(
        **fields,
        step_id=int(rng.integers(0, 2**63 - 1)),
        running=rows,
        waiting=int(rng.integers(0, 2**32)),
        free_blocks=3,
        total_blocks=7,
        kv_tokens=int(rng.integers(0, 2**63)),
        bucket_edges=edges,
    )


def random_outcome(rng: Rng, rows: int) -> StepOutcome:
    fields = random_columns(rng, columns.OUTCOME, rows) | {"request_id": random_ids(rng, rows)}
    ks = np.sort([fields[n] for n in ("accepted", "verified_k", "drafted_k")], axis=0)
    fields["accepted"], fields["verified_k"], fields["drafted_k"] = ks
    depth, shadows = int(rng.integers(0, K)), int(rng.integers(0, 3))
    shadow = ShadowRows(**random_columns(rng, columns.SHADOW, shadows)) if shadows else no_shadows()
    return StepOutcome(
        **fields,
        confidences=random_column(rng, columns.CONFIDENCES, rows * depth).reshape(rows, depth),
        shadow=shadow,
        step_id=int(rng.integers(0, 2**63 - 1)),
        padded_tokens=rows,
        prefill_tokens=int(rng.integers(0, 100)),
        kv_tokens=int(rng.integers(0, 2**63)),
        draft_ms=rng.random(PROPOSERS).astype(np.float32),
        draft_depth=depth,
        verify_ms=float(rng.random()),
        step_ms=float(rng.random() * 1e6),
    )


def random_report(rng: Rng, rows: int, outcome: bool = True, view: bool = True) -> codec.StepReport:
    """Return what ended and what starts, of which the first comes first."""
    ended, starts = random_outcome(rng, rows), random_view(rng, rows)
    ended.step_id = min(ended.step_id, starts.step_id - 1)
    return codec.StepReport(ended if outcome else None, starts if view else None)


def random_plan(rng: Rng, rows: int) -> Plan:
    plan = Plan(
        **random_columns(rng, columns.PLAN, rows) | {"request_id": random_ids(rng, rows)},
        token_value_ms=float(np.float32(rng.random())),
        draft_token_price_ms=random_column(rng, columns.PRICES, PROPOSERS),
        step_id=int(rng.integers(0, 2**63 - 1)),
        state_version=int(rng.integers(0, 2**63)),
        policy_version="goodput/1 é",
        expires_after_steps=int(rng.integers(0, 2**32)),
    )
    if rng.random() < 0.7:
        plan.survival = rng.random((rows, PROPOSERS, K)).astype(np.float32)
        plan.survival[:, rng.random(PROPOSERS) < 0.5] = 0.0
        plan.marginal_token_price_ms = float(np.float32(rng.random()))
    if rng.random() < 0.5:
        plan.match_hazard = rng.random((len(MATCH_EDGES) + 1, K)).astype(np.float32)
        plan.match_frailty = random_column(rng, columns.FRAILTY, rows)
    if rng.random() < 0.5:
        count = int(rng.integers(0, 4))
        plan.defaults = TaskDefaults(**random_columns(rng, columns.DEFAULTS, count))
    if rng.random() < 0.5:
        plan.budget_tokens = int(rng.integers(0, 1000))
        shape = (PROPOSERS, 2, K)[: 2 + int(rng.integers(2))]
        plan.calibration = rng.normal(size=shape).astype(np.float32)
        plan.stop_rule = StopRule(StopKind(int(rng.integers(0, 4))), float(rng.random()))
    return plan


def assert_same(left: Any, right: Any) -> None:
    """Compare two structs field by field: values, shapes, types; nan equals nan."""
    assert type(left) is type(right)
    for item in dataclasses.fields(left):
        a, b = getattr(left, item.name), getattr(right, item.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, item.name
            np.testing.assert_array_equal(a, b, err_msg=item.name)
        elif dataclasses.is_dataclass(a):
            assert_same(a, b)
        else:
            assert a == b or (a != a and b != b), item.name


seeds = st.integers(0, 2**32 - 1)
row_counts = st.sampled_from([0, 1, 2, 3, 17, 256])


@given(seeds, row_counts, st.booleans(), st.booleans())
def test_a_report_comes_back_the_same(seed: int, rows: int, outcome: bool, view: bool) -> None:
    rng = np.random.default_rng(seed)
    report = random_report(rng, rows, outcome, view)
    back = codec.decode_request(codec.encode_request(report))
    assert isinstance(back, codec.StepReport)
    assert (back.outcome is not None, back.view is not None) == (outcome, view)
    if report.outcome is not None:
        assert_same(report.outcome, back.outcome)
    if report.view is not None:
        assert_same(report.view, back.view)


@given(seeds, row_counts)
def test_a_plan_comes_back_the_same(seed: int, rows: int) -> None:
    plan = random_plan(np.random.default_rng(seed), rows)
    assert_same(plan, codec.decode_response(codec.encode_response(plan)))
    assert_same(plan, codec.decode_decision(codec.encode_decision(plan)))


@given(seeds, row_counts)
def test_both_schemas_say_the_same(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    plan, view, outcome = random_plan(rng, rows), random_view(rng, rows), random_outcome(rng, rows)
    again = typed.Plan.FromString(written(raw.Plan(), plan).SerializeToString())
    assert_same(plan, messages.read_plan(again, columns.read_typed))
    seen = typed.BatchView.FromString(written(raw.BatchView(), view).SerializeToString())
    assert_same(view, messages.read_view(seen, columns.read_typed))
    told = typed.StepOutcome.FromString(written(raw.StepOutcome(), outcome).SerializeToString())
    assert_same(outcome, messages.read_outcome(told, columns.read_typed))
    # What a client of the typed schema sends is what the twin reads.
    assert_same(
        view,
        messages.read_view(raw.BatchView.FromString(seen.SerializeToString()), columns.read_raw),
    )


@given(seeds, row_counts, st.booleans(), st.booleans())
def test_a_report_opened_is_the_report_decoded(
    seed: int, rows: int, outcome: bool, view: bool
) -> None:
    report = random_report(np.random.default_rng(seed), rows, outcome, view)
    found = codec.open_request(codec.encode_request(report))
    assert isinstance(found, codec.HalfReport) == (outcome and view)
    if isinstance(found, codec.HalfReport):
        assert report.outcome is not None
        assert found.outcome.step_id == report.outcome.step_id
        found = codec.StepReport(found.outcome.read(), found.view)
    assert_same(report, found)


def test_negative_zeros_are_no_negative_numbers() -> None:
    def edit(view: Any) -> None:
        view.temperature[:] = [-0.0, 0.0, -0.0]

    back = codec.decode_request(view_request(edit))
    assert isinstance(back, codec.StepReport)
    assert back.view is not None
    assert not back.view.temperature.any()


def test_the_twin_has_the_same_fields_and_only_its_columns_are_bytes() -> None:
    for name, twin in raw.DESCRIPTOR.message_types_by_name.items():
        original = typed.DESCRIPTOR.message_types_by_name[name]
        assert twin.fields_by_name.keys() == original.fields_by_name.keys(), name
        for field, theirs in original.fields_by_name.items():
            ours = twin.fields_by_name[field]
            assert ours.number == theirs.number, f"{name}.{field}"
            expected = ours.TYPE_BYTES if theirs.is_repeated else theirs.type
            assert ours.type == expected, f"{name}.{field}"
            assert theirs.type == theirs.TYPE_MESSAGE or not theirs.is_repeated or theirs.is_packed


def test_every_message_with_columns_has_its_twin() -> None:
    described_only = {"Hello", "Welcome", "Bye", "Config", "StopRule"}
    assert set(typed.DESCRIPTOR.message_types_by_name) == described_only | set(
        raw.DESCRIPTOR.message_types_by_name
    )


def test_wire_codes_are_the_numbers_of_types() -> None:
    pairs = [
        (typed.Proposer, PROPOSERS),
        (typed.Reason, len(Reason)),
        (typed.StopKind, len(StopKind)),
    ]
    for enum, count in pairs:
        assert sorted(enum.values()) == list(range(count))
    assert typed.Proposer.Value("PROPOSER_DRAFT_MODEL") == int(Proposer.DRAFT_MODEL)


# --- What other senders may do -------------------------------------------------------------------


def view_request(edit: Callable[[Any], None] = lambda message: None) -> bytes:
    view = typed.BatchView.FromString(
        written(raw.BatchView(), History(3).view()).SerializeToString()
    )
    edit(view)
    return typed.SteerRequest(step_report=typed.StepReport(view=view)).SerializeToString()


def tag(number: int, wire_type: int) -> bytes:
    key = number << 3 | wire_type
    return bytes([key]) if key < 128 else bytes([key & 127 | 128, key >> 7])


def as_request(view: bytes) -> bytes:
    def wrapped(number: int, body: bytes) -> bytes:
        length = len(body)
        assert length < 2**14
        return tag(number, 2) + bytes([length & 127 | 128, length >> 7]) + body

    return wrapped(2, wrapped(2, view))


@pytest.mark.parametrize("pieces", ["unpacked", "split"])
def test_a_column_sent_unpacked_or_in_pieces_is_read_through_the_typed_schema(pieces: str) -> None:
    view = History(3).view()
    message = written(raw.BatchView(), view)
    column = message.task
    message.ClearField("task")
    cells = [column[i : i + 4] for i in range(0, 12, 4)]
    if pieces == "unpacked":
        extra = b"".join(tag(11, 5) + cell for cell in cells)
    else:
        extra = tag(11, 2) + bytes([8]) + column[:8] + tag(11, 2) + bytes([4]) + column[8:]
    back = codec.decode_request(as_request(message.SerializeToString() + extra))
    assert isinstance(back, codec.StepReport)
    assert_same(view, back.view)


def test_unknown_fields_and_proposers_of_a_later_version_are_passed_over() -> None:
    hello = typed.Hello(protocol_version=1, engine_id="e", k_max=4, token_budget=8)
    data = hello.SerializeToString() + tag(4, 2) + bytes([2, 2, 9]) + tag(200, 0) + b"\x01"
    back = codec.decode_request(tag(1, 2) + bytes([len(data)]) + data)
    assert back == codec.Hello("e", EngineLimits(0b101, 4, (), 8))


@pytest.mark.parametrize("limits", [LIMITS, EngineLimits(0b1111, 64, (1, 2, 8), 1)])
def test_hello_welcome_bye_and_config_come_back_the_same(limits: EngineLimits) -> None:
    for request in (codec.Hello("replica/0", limits, 2**60), codec.Bye("done")):
        assert codec.decode_request(codec.encode_request(request)) == request
    for response in (
        codec.Welcome("goodput", True),
        codec.Welcome("none", False, 0),
        codec.Config(draining=True),
    ):
        assert codec.decode_response(codec.encode_response(response)) == response
    view = random_view(np.random.default_rng(0), 3)
    hello, back = codec.decode_decide(codec.encode_decide(codec.Hello("e", limits), view))
    assert hello == codec.Hello("e", limits)
    assert_same(view, back)


# --- Hostile input -------------------------------------------------------------------------------


def refused(data: bytes, decode: Callable[[bytes], Any] = codec.decode_request) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        decode(data)
    text = str(caught.value)
    assert "\n" not in text
    return text


def set_cell(name: str, value: float) -> Callable[[Any], None]:
    def edit(message: Any) -> None:
        getattr(message, name)[1] = value

    return edit


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_tokens", -1),
        ("output_tokens", -(2**31)),
        ("prefill_tokens", -1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -0.5),
        ("max_k", 65),
        ("max_k", -1),
        ("proposer_mask", 16),
        ("tpot_target_ms", -1.0),
        ("tpot_target_ms", float("inf")),
        ("recent_accept", float("nan")),
        ("match_tokens", -3),
        ("draft_kv_lag", -1),
    ],
)
def test_an_impossible_cell_of_a_view_is_named(name: str, value: float) -> None:
    assert refused(view_request(set_cell(name, value))).startswith(f"{name} must be ")


@pytest.mark.parametrize("name", [c.name for c in columns.VIEW.columns])
def test_a_short_or_missing_column_is_named(name: str) -> None:
    assert name in refused(view_request(lambda message: getattr(message, name).pop()))
    assert name in refused(view_request(lambda message: message.ClearField(name)))


def test_too_many_rows_duplicates_and_falling_edges_are_refused() -> None:
    def rows(message: Any) -> None:
        message.rows = 4097

    def edges(message: Any) -> None:
        message.bucket_edges.extend([4, 2])
        message.bucket_edge_count = 2

    assert "at most 4096" in refused(view_request(rows))
    assert "rise" in refused(view_request(edges))
    assert "twice" in refused(view_request(set_cell("request_id", 1)))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("proposer", 4, "proposer must be between 0 and 3"),
        ("accepted", 64, "accepted must not be above verified_k"),
        ("verified_k", 64, "verified_k must not be above drafted_k"),
        ("emitted", 66, "emitted must be between 0 and 65"),
        ("truncated_by", 4, "truncated_by must be between 0 and 3"),
        ("plan_source", 3, "plan_source must be between 0 and 2"),
        ("confidences", 1.5, "confidences must be between 0 and 1, or nan"),
        ("draft_ms", -1.0, "draft_ms must be between 0 and 1e+07"),
    ],
)
def test_an_impossible_outcome_is_refused(name: str, value: float, text: str) -> None:
    outcome = written(raw.StepOutcome(), History(3).step(None)).SerializeToString()
    message = typed.StepOutcome.FromString(outcome)
    set_cell(name, value)(message)
    request = typed.ReportRequest(engine_id="e", outcome=message).SerializeToString()
    assert refused(request, codec.decode_report) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("step_ms", float("nan"), "step_ms must be between 0 and 1e+07, not nan"),
        ("step_ms", 1e9, "step_ms must be between 0 and 1e+07, not 1000000000.0"),
        ("verify_ms", -1.0, "verify_ms must be between 0 and 1e+07, not -1.0"),
        ("k_columns", 65, "k_columns must be at most 64"),
        ("step_id", 2**63, "step_id must be at most"),
        ("rows", 2**32 - 1, "rows must be at most"),
    ],
)
def test_an_impossible_number_of_an_outcome_is_refused(name: str, value: float, text: str) -> None:
    outcome = written(raw.StepOutcome(), History(3).step(None)).SerializeToString()
    message = typed.StepOutcome.FromString(outcome)
    setattr(message, name, value)
    request = typed.ReportRequest(engine_id="e", outcome=message).SerializeToString()
    assert refused(request, codec.decode_report).startswith(text)


@pytest.mark.parametrize(
    "hello",
    [
        typed.Hello(protocol_version=1, token_budget=8),
        typed.Hello(protocol_version=1, engine_id="e" * 129, token_budget=8),
        typed.Hello(protocol_version=1, engine_id="e", token_budget=8, k_max=65),
        typed.Hello(protocol_version=1, engine_id="e"),
        typed.Hello(protocol_version=1, engine_id="e", token_budget=8, bucket_edges=[2, 1]),
        typed.Hello(protocol_version=1, engine_id="e", token_budget=8, bucket_edges=[0]),
    ],
)
def test_an_impossible_hello_is_refused(hello: typed.Hello) -> None:
    refused(typed.SteerRequest(hello=hello).SerializeToString())


def test_a_plan_that_would_hurt_the_engine_is_refused() -> None:
    plan = random_plan(np.random.default_rng(1), 4)
    plan.k = plan.k.astype(np.int32)
    plan.k[2] = 65
    assert "k must be between 0 and 64" in refused(
        codec.encode_decision(plan), codec.decode_decision
    )
    plan.k[2] = 2**40 % 2**31
    plan.proposer = plan.proposer.astype(np.int64) + 2**33
    with pytest.raises(ValueError, match="does not fit"):
        codec.encode_response(plan)


def test_a_plan_whose_depths_do_not_fit_is_refused() -> None:
    plan = random_plan(np.random.default_rng(1), 4)
    plan.survival = np.full((4, PROPOSERS, 6), 0.5, np.float32)
    plan.match_hazard = np.full((len(MATCH_EDGES) + 1, 5), 0.5, np.float32)
    plan.match_frailty = np.ones(4, np.float32)
    refusal = refused(codec.encode_decision(plan), codec.decode_decision)
    assert refusal == "match_model has 5 k_columns, but survival has 6"
    for depths in ((0, 6), (6, 0), (0, 0)):
        plan.survival = np.ones((4, PROPOSERS, depths[0]), np.float32)
        plan.match_hazard = np.ones((len(MATCH_EDGES) + 1, depths[1]), np.float32)
        refusal = refused(codec.encode_decision(plan), codec.decode_decision)
        assert "k_columns" in refusal


def test_budget_zero_is_not_no_budget() -> None:
    plan = random_plan(np.random.default_rng(1), 4)
    for budget in (0, NO_BUDGET, 7):
        plan.budget_tokens = budget
        assert codec.decode_decision(codec.encode_decision(plan)).budget_tokens == budget


def survive(decode: Callable[[bytes], Any], data: bytes) -> None:
    """Anything but a ValueError of one line fails the test."""
    text = ""
    try:
        decode(data)
    except ValueError as error:
        text = str(error)
    assert "\n" not in text


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_or_read(data: bytes) -> None:
    for decode in DECODERS:
        survive(decode, data)


DECODERS: tuple[Callable[[bytes], Any], ...] = (
    codec.decode_request,
    codec.decode_response,
    codec.decode_decide,
    codec.decode_decision,
    codec.decode_report,
)


@given(
    seeds, st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), max_size=4), st.data()
)
def test_a_damaged_message_is_refused_or_read(
    seed: int, damage: list[tuple[int, int]], data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    report = random_report(rng, 3)
    for sound in (codec.encode_request(report), codec.encode_response(random_plan(rng, 3))):
        broken = bytearray(sound)
        for place, byte in damage:
            broken[place % len(broken)] = byte
        cut = data.draw(st.integers(0, len(broken)))
        for message in (bytes(broken), bytes(broken[:cut]), bytes(broken) + bytes(broken[:cut])):
            for decode in DECODERS:
                survive(decode, message)
