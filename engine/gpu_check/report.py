"""What each section found, as a table and a line for each bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from parlay.engine.gpu_check.shape_check import speedups
from parlay.engine.gpu_check.sweep import BAR_BATCH

Json = Mapping[str, Any]
CORRECTNESS = ("attention", "tokens")


def verdict(sections: Mapping[str, Json]) -> tuple[bool, list[str]]:
    """Return whether all is right and nothing broke down, and a line for each thing that is not."""
    lines = [f"{name} broke down: {s['failed']}" for name, s in sections.items() if "failed" in s]
    wrong = [n for n in CORRECTNESS if not sections.get(n, {}).get("passed", False)]
    lines += [f"{name} is not right on this device" for name in wrong]
    for name, section in sections.items():
        lines += [
            f"{name}: batch {row['batch']}, width {row['width']}: a graph's logits are "
            f"{row['logit_error']:.2g} of the largest off those of its kernels one by one"
            for row in section.get("rows", ())
            if row.get("agrees") is False
        ]
    return not lines, lines


def print_section(name: str, found: Json, console: Console) -> None:
    """Print one section, or the line that says why it is not there."""
    console.print(f"[bold]{name}[/bold] ({found['seconds']:.1f} s)", highlight=False)
    if "failed" in found:
        console.print(f"FAILED: {found['failed']}", highlight=False, markup=False)
        return
    if "skipped" in found:
        console.print(f"left out: {found['skipped']}", highlight=False, markup=False)
    kind = name.rpartition(" ")[2]
    for table in _TABLES.get(kind, lambda _: [])(found):
        console.print(table)
    for line in _lines(kind, found):
        console.print(line, highlight=False, markup=False)


def table_of(title: str, rows: Sequence[Json], columns: Mapping[str, str]) -> Table:
    """Return rows as a table; columns: heading by key."""
    table = Table(title=title)
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in columns))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "pass" if value else "FAIL"
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1e3 else _whole(value)


def _whole(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def _attention(found: Json) -> list[Table]:
    keys = ("backend", "dtype", "cases", "worst_error", "bound", "passed")
    return [table_of("attention against float32 on the CPU", found["rows"], _named(keys))]


def _tokens(found: Json) -> list[Table]:
    keys = ("mode", "outputs", "tokens", "identical", "passed")
    return [table_of("float32 against the CPU, token for token", found["float32"], _named(keys))]


def _verify(found: Json) -> list[Table]:
    """Return a table of ratios, batch by width, for each context."""
    tables = []
    for context in sorted({row["context_tokens"] for row in found["rows"]}):
        here = [row for row in found["rows"] if row["context_tokens"] == context]
        widths = sorted({row["width"] for row in here})
        table = Table(title=f"ms (times its byte floor) behind {context} tokens; *: arithmetic")
        table.add_column("batch", justify="right")
        for width in widths:
            table.add_column(f"{width} wide", justify="right")
        for batch in sorted({row["batch"] for row in here}):
            cells = {row["width"]: _timed(row) for row in here if row["batch"] == batch}
            table.add_row(str(batch), *(cells.get(width, "-") for width in widths))
        tables.append(table)
    return tables


def _timed(row: Json) -> str:
    return f"{row['ms']:.2f} ({row['ratio']:.2f}{'' if row['read_bound'] else '*'})"


def _graphs(found: Json) -> list[Table]:
    tables = []
    if found["rows"]:
        keys = ("batch", "width", "graph_ms", "eager_ms", "speedup", "logit_error")
        tables.append(
            table_of("graphs against one kernel after another", found["rows"], _named(keys))
        )
    waits = _named(("mode", "batch", "gap_us", "idle_us", "passed"))
    return [*tables, table_of("the device waits for the host", found["gaps"], waits)]


def _engine(found: Json) -> list[Table]:
    columns = {
        "batch": "batch", "mode": "mode", "tokens_per_s": "tokens/s", "emitted_per_step": "emitted",
        "drafted_per_step": "drafted", "step_ms": "step ms", "host_ms": "host ms",
    }  # fmt: skip
    rows, summed = found["rows"], speedups(found["rows"])
    title = "the engine, a request's step: real passes, synthetic verdicts"
    tables = [table_of(title, rows, columns)]
    if summed:
        tables.append(table_of("against the best static", summed, _named(tuple(summed[0]))))
    return tables


_TABLES = {
    "attention": _attention,
    "tokens": _tokens,
    "verify": _verify,
    "drafting": _verify,
    "graphs": _graphs,
    "engine": _engine,
}


def _named(keys: Sequence[str]) -> dict[str, str]:
    return {key: key.replace("_", " ") for key in keys}


def _lines(kind: str, found: Json) -> list[str]:
    """Return what a section says besides its tables, bars first."""
    lines = []
    if found.get("bar") is not None:
        lines.append(bar_line(found["bar"]))
    if kind == "tokens":
        lines.append(soundness_line(found["bfloat16"]))
    elif kind == "graphs" and found["gaps"]:
        bar = found["gap_bar"]
        line = f"{_word(bar['passed'])}: {bar['bar']}: {bar['gap_us']:.0f} us ({bar['how']})"
        lines.append(line)
    elif kind == "drafting":
        for name in ("medusa", "ngram"):
            line = found[name]
            lines.append(f"{name}: {line['fixed_ms']:.3f} ms and {line['row_ms']:.4f} ms a row")
    if isinstance(found.get("left_out"), int) and found["left_out"]:
        lines.append(f"{found['left_out']} cells left out for time or memory")
    elif found.get("left_out"):
        lines += [f"left out: {left}" for left in found["left_out"]]
    return lines


def bar_line(bar: Json) -> str:
    """Return a bar and whether it is met."""
    line = f"{_word(bar['passed'])}: {bar['bar']}"
    if "worst" in bar:
        return (
            f"{line}: worst {bar['worst']:.2f}x, {bar['within']} of {bar['read_bound']} cells that "
            f"reading bounds, {bar['within_of_all']} of all {bar['cells']} at batch <= {BAR_BATCH}"
        )
    return f"{line}: {bar['speedup']:.2f}x" if bar["speedup"] is not None else line


def soundness_line(judged: Json) -> str:
    """Return what became of bfloat16's outputs."""
    return (
        f"{_word(bool(judged['identical']))}: bfloat16: {judged['divergent_outputs']} of "
        f"{judged['outputs_compared']} outputs leave the plain one, "
        f"{judged['sound_divergences']} of them at a near-tie"
    )


def _word(passed: bool) -> str:
    return "pass" if passed else "FAIL"
