from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.sim import report
from parlay.sim.report import COLUMNS, DASH, Result, best_policy, cell, headline, write_report
from parlay.sim.report_dots import dots, spread
from parlay.sim.report_heat_map import heat_map
from parlay.sim.report_rank import loses, oracle, rank
from parlay.sim.report_run import over_run, per_bucket, stage_starts
from parlay.sim.rows import Row
from parlay.sim.scenario import Scenario, Stage, load_scenario
from parlay.sim.tally import Episode

NAN = float("nan")
NASTY = '<b onclick="x">&$k_1$'
RATIOS = {
    "none": 1.0,
    "best_static": 1.3,
    "best_ngram_gate": 1.2,
    "quick": 1.4,
    "slow": 0.8,
    NASTY: NAN,
    "hazard_oracle": 1.6,
    "filtering_oracle": 1.5,
    "clairvoyant": 1.9,
}
VOID = {"meta", "br", "hr", "img", "link", "input"}


def row(scenario: str, policy: str, ratio: float) -> Row:
    return Row(
        scenario=scenario,
        policy=policy,
        goodput=1234.5 * ratio,
        ratio_to_none=ratio,
        ratio_to_best_static=ratio / 1.3,
        ratio_to_best_ngram_gate=ratio / 1.2,
        share_of_hazard_oracle=ratio / 1.6,
        share_of_filtering_oracle=NAN,
        ratio_to_best_published=ratio / 1.1,
        ci95=(ratio - 0.05, ratio + 0.04),
        published_ci95=(NAN, NAN),
        mean_k=2.345,
        drafting=0.123,
        catching_up=0.0,
        trying=0.02,
        slo_kept=0.91,
        tpot_p50_ms=8.1234,
        tpot_p99_ms=20.0,
        ttft_p50_s=0.0312,
        ttft_p99_s=NAN,
        what="fixed:k=3" if policy == "best_static" else "",
    )


def rows(scenario: str, scale: float = 1.0) -> list[Row]:
    return [row(scenario, p, r if p == "none" else r * scale) for p, r in RATIOS.items()]


def episode(seed: int, tokens_per_s: float, steps: int = 400) -> Episode:
    rng = np.random.default_rng(seed)
    time_s = rng.uniform(0.01, 0.02, 200)
    shares = rng.uniform(0, 5, (200, 4))
    return Episode(
        tokens=int(tokens_per_s * time_s.sum()),
        step_s=float(time_s.sum()),
        steps=steps,
        bucket_tokens=tokens_per_s * time_s,
        bucket_s=time_s,
        bucket_k=2.0 * shares.sum(1),
        bucket_rows=shares,
    )


def result(scenario: Scenario, seeds: int, scale: float = 1.0) -> Result:
    episodes = {
        p: [episode(s, 1000 * (1.0 if math.isnan(r) else r)) for s in range(seeds)]
        for p, r in RATIOS.items()
    }
    return Result(scenario, rows(scenario.name, scale), episodes)


@pytest.fixture
def quick_page(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """Results whose page needs no pictures."""
    monkeypatch.setattr(report, "_page", lambda results: f"<p>{len(results)}")
    return [Result(load_scenario("mixed"), rows("mixed"), {})]


class Page(HTMLParser):
    """Notes what is open, every attribute, and the text of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report") / "made" / "here"
    results = [
        result(load_scenario("phase_shift"), seeds=2),
        result(load_scenario("mixed"), seeds=1, scale=0.7),
    ]
    path = write_report(folder, results)
    assert path == folder / "index.html"
    assert [p.name for p in folder.iterdir()] == ["index.html"]
    return path.read_text(encoding="utf-8")


def svgs(text: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", text, re.DOTALL)


def test_page_is_whole_and_needs_nothing_else(text: str) -> None:
    page = Page(text)
    assert page.open == []
    assert not {tag for tag, _ in page.seen} & {"script", "link", "iframe", "img"}
    targets = [v for _, a in page.seen for k, v in a.items() if k in ("href", "src", "xlink:href")]
    assert targets
    assert not [target for target in targets if not (target or "").startswith(("#", "data:"))]
    assert "@import" not in text
    assert not re.findall(r"url\((?!#)", text)
    ids = Counter(a["id"] for _, a in page.seen if "id" in a)
    assert max(ids.values()) == 1
    assert {t[1:] for t in targets if t and t[0] == "#"} <= set(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)


def test_every_picture_is_sound_xml_and_says_what_it_shows(text: str) -> None:
    pictures = svgs(text)
    assert len(pictures) == 1 + 2 * 2
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.get("role") == "img"
        assert len(root.get("aria-label") or "") > 60
    assert "quick 1.40" in pictures[1]


def test_names_are_escaped(text: str) -> None:
    assert NASTY not in text
    assert "<b" not in text.replace("<body", "")
    cells = [data for _, data in Page(text).texts]
    assert any(NASTY in data for data in cells)
    assert sum(NASTY in t for t in ElementTree.fromstring(svgs(text)[0]).itertext()) == 1


def test_parts_come_in_order(text: str) -> None:
    marks = ["How the policies did", "headline-figure", 'id="s1"', "dots-phase_shift", "run-phase"]
    marks += ["<table>", 'id="s2"', "dots-mixed", "run-mixed", 'id="how"', "other seeds"]
    places = [text.index(mark) if mark != "<table>" else text.find(mark) for mark in marks]
    assert places == sorted(places)


def test_unknown_numbers_are_dashes(text: str) -> None:
    assert "nan" not in "".join(data for tag, data in Page(text).texts if tag == "td")
    tables = re.findall(r"<table>.*?</table>", text, re.DOTALL)
    line = next(part for part in tables[0].split("<tr") if "onclick" in part)
    found = re.findall(r"<td[^>]*>(.*?)</td>", line)
    known = ["2.35", "12.3%", "0.0%", "2.0%", "91%", "8.12", "20.00", "0.031"]
    assert found == [DASH] * 9 + known + [DASH]


def test_slower_than_none_is_marked_in_the_table(text: str) -> None:
    table = re.findall(r"<table>.*?</table>", text, re.DOTALL)[0]
    line = next(part for part in table.split("<tr") if ">slow<" in part)
    assert '<td class="slower">0.800</td>' in line
    line = next(part for part in table.split("<tr") if ">quick<" in part)
    assert "slower" not in line


def test_table_has_every_field_of_a_row() -> None:
    fields = {f.name for f in dataclasses.fields(Row)}
    assert {field for field, *_ in COLUMNS} | {"scenario", "policy", "what"} == fields
    groups = [group for _, group, _, _ in COLUMNS]
    assert groups == sorted(groups, key=groups.index)


def test_same_rows_make_the_same_picture() -> None:
    assert dots("mixed", rows("mixed")) == dots("mixed", rows("mixed"))


def test_without_episodes_there_is_nothing_over_the_run(tmp_path: Path) -> None:
    page = write_report(tmp_path, [Result(load_scenario("mixed"), rows("mixed"), {})]).read_text()
    assert "Over the run" not in page
    assert len(svgs(page)) == 2


def test_folder_that_cannot_be_written(tmp_path: Path, quick_page: list[Result]) -> None:
    (tmp_path / "file").write_text("here first")
    with pytest.raises(ValueError, match=r"\Acannot write the report into .*file: [^\n]+\Z"):
        write_report(tmp_path / "file", quick_page)
    with pytest.raises(ValueError, match=r"\Acannot write the report into .*below: [^\n]+\Z"):
        write_report(tmp_path / "file" / "below", quick_page)
    assert (tmp_path / "file").read_text() == "here first"


def test_nothing_half_written_stays(tmp_path: Path, quick_page: list[Result]) -> None:
    taken = tmp_path / "index.html"
    taken.mkdir()
    with pytest.raises(ValueError, match="cannot write the report"):
        write_report(tmp_path, quick_page)
    assert list(tmp_path.iterdir()) == [taken]


def test_a_failed_report_leaves_the_last_one(
    tmp_path: Path, quick_page: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(tmp_path, quick_page)

    def fails(self: Path, *_: object, **__: object) -> None:
        self.write_bytes(b"half a pa")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fails)
    with pytest.raises(ValueError, match="No space left"):
        write_report(tmp_path, quick_page * 2)
    assert [p.name for p in tmp_path.iterdir()] == ["index.html"]
    assert (tmp_path / "index.html").read_text() == "<p>1"


@pytest.mark.parametrize("results", [[], [Result(load_scenario("mixed"), [], {})]])
def test_nothing_to_report(results: Sequence[Result], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to report"):
        write_report(tmp_path / "new", results)
    assert not (tmp_path / "new").exists()


def test_rank_is_by_the_geometric_mean() -> None:
    ranked = rank(
        [
            *(row(s, "even", 1.2) for s in "ab"),
            row("a", "uneven", 2.0),
            row("b", "uneven", 0.5),
            row("a", "partly", 9.0),
            row("b", "partly", NAN),
            row("a", "absent", 9.0),
        ]
    )
    assert [r.policy for r in ranked] == ["even", "uneven", "absent", "partly"]
    assert [r.mean for r in ranked[:2]] == pytest.approx([1.2, 1.0])
    assert all(math.isnan(r.mean) for r in ranked[2:])


def test_heat_map_marks_what_is_slower_and_puts_oracles_last() -> None:
    every = rows("mixed") + rows("moe", 0.7)
    ranked = rank(every)
    found = list(ElementTree.fromstring(heat_map(ranked, ["mixed", "moe"])).itertext())
    shown = [t.strip() for t in found if t.strip()]
    means = [r.mean for r in ranked]
    assert sum(t.startswith("▼") for t in shown) == sum(
        loses(v) for v in [*means, *(r.ratio_to_none for r in every)]
    )
    names = [t for t in shown if t in RATIOS]
    assert names[-3:] == ["clairvoyant", "hazard_oracle", "filtering_oracle"]
    assert not any(map(oracle, names[:-3]))
    assert shown.count("–") == 3  # noqa: RUF001


@pytest.mark.parametrize(
    ("ratio", "slower"), [(0.99, True), (0.994, True), (0.996, False), (1.2, False), (NAN, False)]
)
def test_what_shows_as_one_does_not_lose(ratio: float, slower: bool) -> None:
    assert loses(ratio) is slower


def test_best_policy_is_one_that_was_asked_for() -> None:
    every = rows("mixed")
    assert best_policy(every) == "quick"
    assert best_policy([r for r in every if r.policy in ("none", "best_static")]) == "best_static"
    assert best_policy([row("mixed", "lone", NAN)]) == "lone"


def test_headline_says_where_it_was_slower() -> None:
    assert "quick, with 1.40 times" in headline(rank(rows("mixed")), 1)
    assert "nowhere slower" in headline(rank(rows("mixed")), 1)
    both = headline(rank(rows("mixed") + rows("moe", 0.7)), 2)
    assert "slower than none in moe (0.98)" in both
    assert "the best static reached 1.09" in both
    assert headline(rank([row("mixed", "none", 1.0)]), 1) == "No policy was asked for."
    assert "in every scenario" in headline(rank([row("mixed", "lone", NAN)]), 1)


def test_cells() -> None:
    assert cell(1234.5, "{:,.0f}") == "1,234"
    assert cell((1.0, 1.25), "{:.3f}") == "1.000 to 1.250"
    assert cell((1.0, NAN), "{:.3f}") == cell(math.inf, "{:.3f}") == report.DASH


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(0.01, 3)), min_size=1, max_size=8))
def test_labels_are_spread_without_overlap(labels: list[tuple[float, float]]) -> None:
    labels.sort()
    at, halves = [x for x, _ in labels], [half for _, half in labels]
    centres = spread(at, halves)
    gaps = np.diff(centres) - (np.array(halves[1:]) + np.array(halves[:-1]))
    assert (gaps > -1e-9).all()
    apart = np.diff(at) >= np.array(halves[1:]) + np.array(halves[:-1])
    if apart.all():
        assert centres == pytest.approx(at)


def test_stages_are_as_much_shorter_as_the_run() -> None:
    starts = stage_starts(load_scenario("phase_shift"), 2000)
    assert [at for at, _ in starts[:4]] == [0, 100, 250, 400]
    assert [stage.concurrency for _, stage in starts[:4]] == [128, 24, 4, 128]
    assert len(stage_starts(load_scenario("mixed"), 50)) == 1


@pytest.mark.parametrize("window", [1, 7, 200])
def test_a_steady_ratio_stays_steady_where_anything_ran(window: int) -> None:
    own = [episode(seed, 500.0) for seed in range(2)]
    for one in own:
        one.bucket_tokens[::4] = one.bucket_s[::4] = 0.0
    line = per_bucket(own, "bucket_tokens", "bucket_s", window)
    ran = np.isfinite(line)
    assert line.shape == (200,)
    assert line[ran] == pytest.approx(500.0)
    assert ran.all() == (window > 1)
    assert per_bucket(own, "bucket_k", "bucket_rows", window) == pytest.approx(2.0)


def test_lines_over_the_run_keep_their_times() -> None:
    own = episode(0, 500.0)
    own.bucket_tokens[120:] *= 3.0
    line = per_bucket([own], "bucket_tokens", "bucket_s", 7)
    assert line[:117] == pytest.approx(500.0)
    assert line[123:] == pytest.approx(1500.0)
    assert (np.diff(line[116:124]) > 0).all()


def test_over_run_of_a_run_of_few_steps_and_of_one_that_did_nothing() -> None:
    scenario = Scenario("tiny", "Tiny", "", (Stage({"chat": 1.0}, 2),), runs=20)
    for own in (episode(0, 10.0, steps=20), Episode(steps=20)):
        picture = over_run(scenario, {"none": [own], "quick": [own]}, "quick")
        assert "measured step of each start" in picture
