"""Readers of public traces: what they make of rows, good and bad, and how much they hold."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.sim.traces import SeenBlocks, open_trace
from parlay.sim.workload import BLOCK_TOKENS, Arrival

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_2 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)
PLAIN = "arrival_s,prompt_tokens,output_tokens\n"
MOONCAKE = Path(os.environ.get("PARLAY_DATA", "../shared/data")) / "mooncake"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def mooncake(ms: int, prompt: int, hashes: list[int]) -> str:
    row = {"timestamp": ms, "input_length": prompt, "output_length": 9, "hash_ids": hashes}
    return json.dumps(row) + "\n"


def test_azure_counts_from_its_first_row_and_needs_no_last_line_end(path: Path) -> None:
    path.write_text(
        AZURE
        + "2023-11-16 18:17:03.9799600,4808,10\r\n"
        + "2023-11-16 18:17:04.0319610,3180,8\r\n\r\n"
        + "2024-01-01 00:00:00+00:00,7,3",
        newline="",
    )
    trace = open_trace(path)
    first, second, third = trace
    assert trace.kind == "azure"
    assert first == Arrival(0.0, "", 4808, 10)
    assert (second.prompt_tokens, second.output_tokens) == (3180, 8)
    assert second.arrival_s == pytest.approx(0.052001, abs=1e-7)
    assert third.arrival_s == pytest.approx(45 * 86400 + 20576.02004, abs=1e-6)


@pytest.mark.parametrize("header", [BURST, BURST_2])
def test_burstgpt_skips_failures_and_counts_them(path: Path, header: str) -> None:
    more = "a-b,3," if header is BURST_2 else ""
    path.write_text(
        header
        + f"19440110.0,{more}GPT-4,906,446,1352,Conversation log\n"
        + f"19440112.5,{more}ChatGPT,417,0,417,API log\n"
        + f"19440113,{more}ChatGPT,36,29,65,Conversation log\n"
    )
    trace = open_trace(path)
    assert list(trace) == [Arrival(0.0, "", 906, 446), Arrival(3.0, "", 36, 29)]
    assert (trace.kind, trace.skipped) == ("burstgpt", 1)


def test_mooncake_shares_the_blocks_up_to_the_first_new_one(path: Path) -> None:
    path.write_text(
        mooncake(0, 1000, [0, 1])
        + mooncake(500, 2000, [0, 1, 2, 3])
        + mooncake(3000, 1500, [0, 7, 2])
        + mooncake(3000, 1030, [0, 1, 2])
        + mooncake(3000, 400, [9])
    )
    trace = open_trace(path)
    found = list(trace)
    assert trace.kind == "mooncake"
    assert [a.arrival_s for a in found] == [0.0, 0.5, 3.0, 3.0, 3.0]
    assert [a.shared_prefix_tokens for a in found] == [0, 1024, 512, 1030, 0]


def test_plain_files_have_the_fields_of_an_arrival(path: Path) -> None:
    want = [Arrival(0.0, "chat", 8, 2, 4), Arrival(1.5, "edit", 9, 3, 0)]
    path.write_text(
        "task,arrival_s,prompt_tokens,output_tokens,shared_prefix_tokens\n"
        "chat,10,8,2,4\nedit,11.5,9,3,0\n"
    )
    assert list(open_trace(path)) == want
    fields = ("arrival_s", "task", "prompt_tokens", "output_tokens", "shared_prefix_tokens")
    rows = [{f: getattr(a, f) for f in fields} for a in want]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(open_trace(path)) == want
    assert open_trace(path).kind == "jsonl"


def test_columns_may_be_named(path: Path) -> None:
    path.write_text("\ufeffwhen,in,out,who\n3,8,2,code\n", encoding="utf-8")
    columns = {"arrival_s": "when", "prompt_tokens": "in", "output_tokens": "out", "task": "who"}
    assert list(open_trace(path, columns=columns)) == [Arrival(0.0, "code", 8, 2)]
    with pytest.raises(ValueError, match=r"trace:1: .* lack what makes csv \(nobody\)"):
        open_trace(path, columns={**columns, "task": "nobody"})
    with pytest.raises(ValueError, match="an arrival has arrival_s"):
        open_trace(path, columns={"tokens": "in"})
    with pytest.raises(ValueError, match="leave out `columns`"):
        open_trace(path, "azure", columns)


GOOD = "2023-11-16 18:17:03.9,48,10\r\n"


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (AZURE + GOOD + "2023-11-16 18:17,4x,10\r\n" + GOOD, 3, "ContextTokens .* '4x'; mend"),
        (AZURE + GOOD * 3 + "2023-11-16 18:18,0,10\r\n", 5, "ContextTokens .* from 1, not '0'"),
        (AZURE + GOOD + "2023-11-16 18:18,4,-1\r\n", 3, "GeneratedTokens .* from 0"),
        (AZURE + GOOD + "2023-11-16 18:18,4,1.5\r\n", 3, "GeneratedTokens"),
        (AZURE + GOOD + "2023-11-16 18:18,4,1e300\r\n", 3, "GeneratedTokens"),
        (AZURE + GOOD + "\r\n\r\nnoon,4,1\r\n", 5, "TIMESTAMP must be a time like 2023.* 'noon'"),
        (PLAIN + "1,5,5\n9,5,5\n8,5,5\n", 4, "earlier than the row before; sort"),
        (AZURE + GOOD + "2023-11-16 18:17:02,4,1\r\n", 3, "earlier than the row before; sort"),
        (AZURE + GOOD + "2023-11-16 18:18,4,1,9\r\n", 3, "4 fields where the header has 3; mend"),
        (AZURE + GOOD + "2023-11-16 18:1", 3, "1 fields .*; the file seems cut off here: fetch"),
        (AZURE + GOOD + '2023-11-16 18:18,4,"1\n2\n', 3, "not a CSV row"),
        (AZURE, 2, "no row follows the header; fetch"),
        (BURST + "nan,GPT-4,1,2,3,API log\n", 2, "Timestamp must be a time in numbers"),
        (BURST + '1,GPT-4,1,2,3,"a\nb"\n2,GPT-4,?,2,3,x\n', 4, "Request tokens"),
        (mooncake(0, 9, [1]) + '{"timestamp": 1, "input_le', 2, "not a JSON .* cut off here"),
        (mooncake(0, 9, [1]) + "[1, 2]\n", 2, r"not a JSON object \(list\); mend"),
        (mooncake(0, 9, [1]) + "[" * 200_000 + "\n", 2, "not a JSON object"),
        (mooncake(0, 9, [1]) + '{"timestamp": 1}\n', 2, "there is no input_length"),
        (mooncake(0, 9, [1]) + "\n" + mooncake(1, 9, [1]).replace("[1]", '"x"'), 3, "hash_ids"),
        (mooncake(0, 9, [1]).replace("9,", "true,"), 1, "input_length .* not 'True'"),
        (PLAIN.replace("s\n", "s,shared_prefix_tokens\n") + "0,5,5,6\n", 2, "6 tokens are shared"),
        (PLAIN + "0,5,5\n1," + "9" * (1 << 20) + ",5\n", 3, "the line has 1048576 characters"),
        (PLAIN + "0,5,\x00\n", 2, "output_tokens"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(path: Path, text: str, line: int, what: str) -> None:
    path.write_text(text, newline="")
    with pytest.raises(ValueError, match=rf"(?s)^{path}:{line}: .*{what}"):
        list(open_trace(path))


@pytest.mark.parametrize(
    ("content", "kind", "what"),
    [
        (b"", "auto", ":1: the file is empty; fetch it again"),
        (b"\n  \n", "auto", ":1: the file is empty; fetch it again"),
        (b"a,b\n1,2\n", "auto", ":1: the columns a, b lack what makes azure .* burstgpt .* csv"),
        (b'\n{"a": 1}\n', "auto", ":2: the columns a lack what makes mooncake .* or jsonl"),
        (b'{"a": \n', "auto", ":1: not a JSON object"),
        (AZURE.encode(), "burstgpt", r":1: .* lack what makes burstgpt \(Timestamp, Request"),
        (AZURE.encode("utf-16"), "auto", ":1: the columns"),
        (b"\x1f\x8b\x08\x00\xff\xfe", "auto", ":1: the columns"),
        (PLAIN.encode(), "jsonl", "the other file format"),
        (PLAIN.encode(), "parquet", "no kind of trace 'parquet'; take auto, azure"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_at_once(
    path: Path, content: bytes, kind: str, what: str
) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=what):
        open_trace(path, kind)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: cannot be read .No such file"):
        open_trace(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="cannot be read"):
        open_trace(tmp_path)


@given(st.lists(st.lists(st.integers(0, 12), max_size=5), max_size=60), st.integers(1, 6))
def test_blocks_are_remembered_for_a_while_and_never_invented(
    prompts: list[list[int]], most: int
) -> None:
    table, past = SeenBlocks(most), list[int]()
    for prompt in prompts:
        found = table.prefix(prompt)
        assert len(table.young) <= most
        assert len(table.old) <= most
        recent = set(past[len(past) - most :] if most < len(past) else past)
        surely = next((i for i, b in enumerate(prompt) if b not in recent), len(prompt))
        at_most = next((i for i, b in enumerate(prompt) if b not in past), len(prompt))
        assert surely <= found <= at_most
        past += prompt


def azure_rows(count: int) -> Iterable[str]:
    yield AZURE
    for i in range(count):
        yield f"2023-11-16 {i // 3600_000:02}:{i // 60_000 % 60:02}:{i / 1000 % 60:09.6f},9,{i}\r\n"


def mooncake_rows(count: int) -> Iterable[str]:
    return (mooncake(i, 4 * BLOCK_TOKENS, [0, *range(3 * i, 3 * i + 3)]) for i in range(count))


def peak_bytes(path: Path, rows: Iterable[str]) -> int:
    with path.open("w", newline="") as file:
        file.writelines(rows)
    tracemalloc.start()
    try:
        for _ in open_trace(path):
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_more_than_a_row_is_held(path: Path) -> None:
    assert peak_bytes(path, azure_rows(8_000)) < path.stat().st_size / 2 < 200_000


@pytest.mark.slow
def test_a_million_rows_take_no_more_memory_than_a_thousand(path: Path) -> None:
    peak = peak_bytes(path, azure_rows(1_000_000))
    assert path.stat().st_size > 30_000_000
    assert peak < 200_000


@pytest.mark.slow
def test_the_table_of_hashes_does_not_grow_with_the_trace(path: Path) -> None:
    # 600,000 hashes: more than both halves of the table hold.
    assert peak_bytes(path, mooncake_rows(200_000)) < 64 << 20


@pytest.mark.skipif(not MOONCAKE.exists(), reason="set PARLAY_DATA to the folder of public data")
def test_mooncakes_conversations_share_as_much_as_without_a_bound() -> None:
    path, seen, blocks, tokens = MOONCAKE / "conversation_trace.jsonl", set[int](), 0, 0
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            hashes = row["hash_ids"]
            run = next((i for i, h in enumerate(hashes) if h not in seen), len(hashes))
            seen.update(hashes)
            blocks += len(hashes)
            tokens += min(row["input_length"], run * BLOCK_TOKENS)
    found = sum(a.shared_prefix_tokens for a in open_trace(path))
    assert (found, blocks) == (tokens, 288_500)
