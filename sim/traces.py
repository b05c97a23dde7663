"""Public traces of arrivals, read a row at a time however long they are.

Known by their columns: Azure LLM inference (CSV; Splitwise, Patel et al., ISCA'24), BurstGPT (CSV;
Wang et al., arXiv 2401.17644), Mooncake (JSON lines; Qin et al., arXiv 2407.00079), and any CSV or
JSON lines whose columns are called as an arrival's fields are, or are named. Times count from the
first row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from parlay.sim.trace_rows import (
    Lines,
    Row,
    csv_records,
    csv_rows,
    hashes,
    instant,
    json_records,
    milliseconds,
    open_text,
    seconds,
    tokens,
)
from parlay.sim.workload import BLOCK_TOKENS, Arrival

_HASHES = 1 << 18
_NEEDED = ("arrival_s", "prompt_tokens", "output_tokens")
_OPTIONAL = ("task", "shared_prefix_tokens")


@dataclass(slots=True, frozen=True)
class Format:
    """A kind of trace: the column of each field of an arrival, and how a time is read, in s.

    hashes: the column of the hashes of a prompt's blocks, if there is one.
    """

    columns: Mapping[str, str]
    time_s: Callable[[Row, str], float]
    in_json: bool = False
    hashes: str = ""

    def missing(self, names: list[str]) -> list[str]:
        """Return which columns a file with these would lack."""
        optional = {f for f in _OPTIONAL if self.columns.get(f) == f}
        needed = [column for f, column in self.columns.items() if f not in optional]
        return [c for c in (*needed, self.hashes) if c and c not in names]


def _columns(*names: str) -> dict[str, str]:
    return dict(zip(_NEEDED, names, strict=True))


_PLAIN = {f: f for f in (*_NEEDED, *_OPTIONAL)}
FORMATS: Mapping[str, Format] = {
    "azure": Format(_columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"), instant),
    "burstgpt": Format(_columns("Timestamp", "Request tokens", "Response tokens"), seconds),
    "mooncake": Format(
        _columns("timestamp", "input_length", "output_length"), milliseconds, True, "hash_ids"
    ),
    "csv": Format(_PLAIN, seconds),
    "jsonl": Format(_PLAIN, seconds, True),
}


@dataclass(slots=True)
class SeenBlocks:
    """Which blocks of prompts were seen: of the last ones `most` at least, twice that at most."""

    most: int = _HASHES
    young: set[int] = field(default_factory=set)
    old: set[int] = field(default_factory=set)

    def prefix(self, blocks: list[int]) -> int:
        """Return how many of the first blocks were seen before; all are from now on."""
        seen = (block in self.young or block in self.old for block in blocks)
        found = next((i for i, known in enumerate(seen) if not known), len(blocks))
        for block in blocks:
            if len(self.young) >= self.most:
                self.old, self.young = self.young, set()
            self.young.add(block)
        return found


@dataclass(slots=True)
class ArrivalTrace:
    """The arrivals of a file, an iterator; skipped: rows so far of requests that put out nothing.

    Made by `open_trace`.
    """

    path: Path
    kind: str
    known: Format
    skipped: int = 0
    _arrivals: Iterator[Arrival] = field(init=False)

    def __post_init__(self) -> None:
        self._arrivals = self._read()

    def __iter__(self) -> Iterator[Arrival]:
        return self

    def __next__(self) -> Arrival:
        return next(self._arrivals)

    def _read(self) -> Iterator[Arrival]:
        seen = SeenBlocks()
        start_s, last_s = None, 0.0
        with open_text(self.path) as file:
            lines = Lines(self.path, file)
            for row in json_records(lines) if self.known.in_json else csv_records(lines):
                try:
                    found = _arrival(row, self.known, seen)
                except ValueError as error:
                    raise lines.wrong(str(error)) from None
                start_s = found.arrival_s if start_s is None else start_s
                if found.arrival_s - start_s < last_s:
                    raise lines.wrong("earlier than the row before", "sort the rows by time")
                last_s = found.arrival_s - start_s
                if found.output_tokens:
                    yield replace(found, arrival_s=last_s)
                else:
                    self.skipped += 1
            if start_s is None:
                raise lines.wrong("no row follows the header", "fetch the file again")


def _arrival(row: Row, known: Format, seen: SeenBlocks) -> Arrival:
    """Return a row's arrival, at the file's own time; raises ValueError if it is none."""
    columns = known.columns
    time_s = known.time_s(row, columns["arrival_s"])
    prompt = tokens(row, columns["prompt_tokens"], least=1)
    output = tokens(row, columns["output_tokens"], least=0)
    task, shared = str(row.get(columns.get("task", "")) or ""), 0
    blocks: tuple[int, ...] = ()
    if known.hashes:
        blocks = tuple(hashes(row, known.hashes))
        shared = min(prompt, BLOCK_TOKENS * seen.prefix(list(blocks)))
    elif (column := columns.get("shared_prefix_tokens")) in row:
        shared = tokens(row, str(column), least=0)
    if shared > prompt:
        raise ValueError(f"{shared} tokens are shared of a prompt of {prompt}")
    return Arrival(time_s, task, prompt, output, shared, blocks)


def open_trace(
    path: str | Path, kind: str = "auto", columns: Mapping[str, str] | None = None
) -> ArrivalTrace:
    """Return the arrivals of a trace, in order of time.

    kind: azure, burstgpt, mooncake, csv, jsonl, or auto, by the first row. columns: how the file
    calls a field of an arrival, for csv and jsonl; the task and the shared prefix may be missing.
    Raises ValueError "PATH:LINE: what is wrong; how to mend it": for the first row from here, for
    the others as they are read.
    """
    if kind not in ("auto", *FORMATS):
        raise ValueError(f"there is no kind of trace {kind!r}; take auto, {', '.join(FORMATS)}")
    if not set(columns or {}) <= set(_PLAIN):
        raise ValueError(f"columns {sorted(columns or {})}: an arrival has {', '.join(_PLAIN)}")
    lines, in_json, names = _first_row(Path(path))
    choice = _formats(kind, in_json, columns)
    for name, known in choice.items():
        if known.in_json == in_json and not known.missing(names):
            return ArrivalTrace(Path(path), name, known)
    lacking = " or ".join(
        f"{name} ({', '.join(known.missing(names)) or 'the other file format'})"
        for name, known in choice.items()
    )
    raise lines.wrong(
        f"the columns {', '.join(names)[:200]} lack what makes {lacking}",
        "name the columns, or fetch the file again",
    )


def _formats(kind: str, in_json: bool, columns: Mapping[str, str] | None) -> dict[str, Format]:
    """Return what a file may be."""
    plain = "jsonl" if in_json else "csv"
    if columns and kind not in ("auto", plain):
        raise ValueError(f"the columns of a trace of kind {kind} have names; leave out `columns`")
    if columns:
        return {plain: Format({**_PLAIN, **columns}, seconds, in_json)}
    if kind != "auto":
        return {kind: FORMATS[kind]}
    return {name: known for name, known in FORMATS.items() if known.in_json == in_json}


def _first_row(path: Path) -> tuple[Lines, bool, list[str]]:
    """Return where a file's first row is, whether that is JSON, and its columns."""
    with open_text(path) as file:
        lines = Lines(path, file)
        line = next((line for line in lines if line.strip()), None)
        if line is None:
            raise ValueError(f"{path}:1: the file is empty; fetch it again")
        file.seek(0)
        lines, in_json = Lines(path, file), line.lstrip().startswith("{")
        if in_json:
            return lines, True, list(next(json_records(lines)))
        return lines, False, [name.strip() for name in next(csv_rows(lines))]
