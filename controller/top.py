"""`parlay top`: the sidecar's engines, live in the terminal."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from parlay.controller.fetch import fetch
from parlay.controller.wording import gain, number, share

REFRESH_S = 1.0
_BARS = "▁▂▃▄▅▆▇█"
_SPARK = 60
_WIDE = 120
"""Terminals with so many columns show all there is."""
_PLACES, _FEW_PLACES = 8, 4
_SILENT_S = 10.0
_NAME = 12
"""Longest name of an engine or a task where there is little room."""


@dataclass(slots=True, frozen=True)
class Cell:
    """One figure of a row: its column's name, its text, whether it is made of words (else a
    number), only for wide terminals, may be cut at its end, or in the middle where there is little
    room.
    """  # noqa: D205

    name: str
    text: str
    words: bool = False
    wide: bool = False
    cut: bool = False
    elided: bool = False
    style: str = ""

    def fitted(self, wide: bool) -> str:
        """Return the text; of a long name its start and its end, which tells it from others."""
        if wide or not self.elided or len(self.text) <= _NAME:
            return self.text
        return f"{self.text[: _NAME // 2 - 1]}…{self.text[-(_NAME // 2) :]}"


def top(
    address: Annotated[
        str, typer.Option(help="where the sidecar serves HTTP (parlay serve --http)")
    ] = "http://127.0.0.1:9090",
    engine: Annotated[str | None, typer.Option(help="show this engine only")] = None,
) -> None:
    """Show engines, load, proposers, k, gain and newest decisions, live; Ctrl-C ends.

    Where the output is no terminal, it is shown once.
    """
    query = {} if engine is None else {"engine": engine}
    console = Console()
    try:
        found = fetch(address, "/overview.json", query)
        if not console.is_terminal:
            console.print(screen(found, console.width))
            return
        with Live(
            screen(found, console.width), console=console, screen=True, auto_refresh=False
        ) as live:
            while True:
                time.sleep(REFRESH_S)
                live.update(_next(address, query, console.width), refresh=True)
    except KeyboardInterrupt:
        return
    except (OSError, ValueError) as error:
        typer.echo(f"parlay top: {error}", err=True)
        raise typer.Exit(1) from None


def _next(address: str, query: dict[str, str], columns: int) -> RenderableType:
    """Return the next screen; a sidecar that is away for a while is waited for."""
    try:
        return screen(fetch(address, "/overview.json", query), columns)
    except (OSError, ValueError) as error:
        return Text(f"{error}\n\nwaiting for it to come back; Ctrl-C ends", "red")


def screen(found: dict[str, Any], columns: int = 200) -> RenderableType:
    """Return an overview as it is shown in a terminal so many columns wide."""
    parts: list[RenderableType] = [_head(found), Text()]
    if not found["engines"]:
        return Group(*parts, Text("no engine has said hello yet"))
    wide = columns >= _WIDE
    parts += [_sparks(found, columns), Text(), _table([_engine(e) for e in found["engines"]], wide)]
    for rows, cells in (
        (found["tasks"], _task),
        (found["proposers"], _proposer),
        (found["decisions"], _decision),
    ):
        if rows:
            parts += [Text(), _table([cells(row) for row in rows], wide)]
    return Group(*parts)


def spark(values: list[float | None]) -> str:
    """Return values as bars of eighths from 0 to the largest, a dot where unknown."""
    most = max((v for v in values if v is not None), default=0.0)
    if most <= 0.0:
        return "·" * len(values)
    top_bar = len(_BARS) - 1
    return "".join("·" if v is None else _BARS[round(v / most * top_bar)] for v in values)


def _head(found: dict[str, Any]) -> Text:
    totals, text = found["totals"], Text()
    text.append("parlay", "bold")
    text.append(f"  policy {found['policy']}  up {_span(found['uptime_s'])}")
    text.append(f"  {totals['engines']} engine{'s' * (totals['engines'] != 1)}")
    text.append(f"  {totals['running']} running, {totals['waiting']} waiting\n")
    text.append(f"{number(totals['tokens_per_s'])} tokens/s", "bold green")
    text.append(f"  gain {gain(totals['expected_gain'])} by the cost model")
    if totals["guards"]:
        text.append(f", {gain(totals['guard_gain'])} measured")
        text.append(f"  guards on {totals['guards_on']}/{totals['guards']}")
    text.append(f"  k {number(totals['mean_k'], 2)}  fallback {share(totals['fallback_share'])}")
    return text


def _sparks(found: dict[str, Any], columns: int) -> Table:
    history, width = found["history"], min(_SPARK, max(columns - 32, 10))
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, key, how in (
        ("tokens/s", "tokens_per_s", number),
        ("gain", "expected_gain", gain),
        ("running", "running", number),
    ):
        values = history[key][-width:]
        most = max((v for v in values if v is not None), default=None)
        span = f"{len(values) * history['bucket_s']:.0f} s, up to {how(most)}"
        table.add_row(name, Text(spark(values), "green"), Text(span, "dim"))
    return table


def _engine(row: dict[str, Any]) -> list[Cell]:
    guard, live = row["guard"] or {}, row["heard_ago_s"] < _SILENT_S and not row["ended"]
    state, style = "live", "green"
    if not live:
        ended = row["ended"]
        state = f"{'ended' if ended else 'silent'} {_span(row['heard_ago_s']).split()[0]}"
        style = "dim" if ended else "red"
    return [
        Cell("engine", row["engine"], words=True, elided=True),
        Cell("state", state, words=True, style=style),
        Cell("running", str(row["running"])),
        Cell("waiting", str(row["waiting"])),
        Cell("tokens/s", number(row["tokens_per_s"])),
        Cell("step ms", number(row["step_ms"], 2), wide=True),
        Cell("k", number(row["mean_k"], 2), wide=True),
        Cell("gain", gain(row["expected_gain"])),
        Cell("measured", gain(guard.get("gain"))),
        Cell("guard", "-" if not guard else ("on" if guard["on"] else "off"), words=True),
        Cell("n-gram", share(row["shares"]["ngram"]), wide=True),
        Cell("draft", share(row["shares"]["draft_model"]), wide=True),
        Cell("Medusa", share(row["shares"]["medusa"]), wide=True),
        Cell("none", share(row["shares"]["none"]), wide=True),
        Cell("fallback", share(row["fallback_share"]), wide=True),
        Cell("age", number(row["plan_age_steps"], 1), wide=True),
    ]


def _task(row: dict[str, Any]) -> list[Cell]:
    return [
        Cell("task", row["task"], words=True, elided=True),
        Cell("n-gram", share(row["shares"]["ngram"])),
        Cell("k", number(row["k"]["ngram"], 1)),
        Cell("draft model", share(row["shares"]["draft_model"])),
        Cell("k", number(row["k"]["draft_model"], 1)),
        Cell("Medusa", share(row["shares"]["medusa"])),
        Cell("k", number(row["k"]["medusa"], 1)),
        Cell("accepted", share(row["accepted"])),
        Cell("tokens a row", number(row["tokens_per_row"], 2)),
    ]


def _proposer(row: dict[str, Any]) -> list[Cell]:
    places = [share(value) for value in row["by_position"]][:_PLACES]
    places += ["-"] * (_PLACES - len(places))
    return [
        Cell("proposer", row["proposer"], words=True),
        Cell("share", share(row["share"])),
        Cell("k", number(row["mean_k"], 1)),
        Cell("accepted", share(row["accepted"])),
        *(Cell(f"at {j}", of, wide=j > _FEW_PLACES) for j, of in enumerate(places, 1)),
        Cell("calibration error", number(row["calibration_error"], 3), wide=True),
    ]


def _decision(row: dict[str, Any]) -> list[Cell]:
    return [
        Cell("engine", row["engine"], words=True, elided=True),
        Cell("request", str(row["request_id"])),
        Cell("task", row["task"], words=True, elided=True),
        Cell("proposer", row["proposer"], words=True),
        Cell("k", str(row["k"]) if row["k"] else "-"),
        Cell("expected", number(row["tokens"], 2), wide=True),
        Cell("worth ms", number(row["worth_ms"], 3), wide=True),
        Cell("cost ms", number(row["cost_ms"], 3), wide=True),
        Cell("because", row["why"], words=True, cut=True),
    ]


def _table(rows: list[list[Cell]], wide: bool) -> Table:
    """Return a table; its widest columns only where there is room for them."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = [place for place, cell in enumerate(rows[0]) if wide or not cell.wide]
    for place in shown:
        cell = rows[0][place]
        longest = max(len(row[place].fitted(wide)) for row in rows)
        least = None if cell.cut else max(longest, len(cell.name))
        justify: Any = "left" if cell.words else "right"
        table.add_column(cell.name, justify=justify, no_wrap=True, min_width=least)
    for row in rows:
        table.add_row(*(Text(row[place].fitted(wide), row[place].style) for place in shown))
    return table


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
