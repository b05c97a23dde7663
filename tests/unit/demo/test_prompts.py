from __future__ import annotations

import re
from collections import Counter

import pytest

from parlay.engine.demo.prompts import TASKS, demo_prompts, parse_prompts
from parlay.engine.demo.workload import MIXED, Shape, cells_of
from parlay.engine.distill.prompts import training_prompts
from parlay.engine.distill.words import ASKS, CODE_TASKS


def test_enough_prompts_of_every_task_and_none_twice() -> None:
    prompts = demo_prompts()
    assert len(prompts) >= 24
    assert set(Counter(p.task for p in prompts)) == set(TASKS)
    assert min(Counter(p.task for p in prompts).values()) >= 4
    assert len({p.text for p in prompts}) == len({p.name for p in prompts}) == len(prompts)


def test_tasks_that_work_on_a_text_bring_one() -> None:
    for prompt in demo_prompts():
        if prompt.task not in ("chat", "code"):
            assert len(prompt.text) > 400, prompt.name


def test_no_prompt_is_made_as_the_training_prompts_are() -> None:
    shapes = [re.sub(r"\\\{.*?\\\}", ".+", re.escape(ask)) for ask in ASKS]
    for prompt in demo_prompts():
        assert not any(re.fullmatch(shape, prompt.text) for shape in shapes), prompt.name
        assert not any(task in prompt.text for task in CODE_TASKS), prompt.name


@pytest.mark.slow
def test_no_prompt_was_trained_on() -> None:
    words = [set(p.text.lower().split()) for p in demo_prompts()]
    for trained in training_prompts(2000, seed=0):
        other = set(trained.text.lower().split())
        overlap = max(len(w & other) / len(w | other) for w in words)
        assert overlap < 0.5, trained.text


@pytest.mark.parametrize(
    "source", ["", "hello", "=== chat\ntext", "=== cooking pie\ntext", "=== chat a\n\n"]
)
def test_malformed_prompts(source: str) -> None:
    with pytest.raises(ValueError, match="demo"):
        parse_prompts(source)


def test_text_may_hold_what_looks_almost_like_a_heading() -> None:
    (one, two) = parse_prompts("=== chat a\nx = 1\n====\n=== code b\ny")
    assert (one.text, two.task, two.text) == ("x = 1\n====", "code", "y")


def test_cells_cover_every_task_and_phase() -> None:
    prompts = demo_prompts()
    shape = Shape(1, 8, {1: 4, 4: 8, 16: 16}, {1: 6, 4: 12, 16: 24})
    cells = cells_of(prompts, shape)
    assert [c.label for c in cells[:8]] == [*(f"{t}@1" for t in TASKS), "mixed@1", "chat@4"]
    assert len(cells) == 21
    for cell in cells:
        tasks = {prompts[i].task for i in cell.prompts}
        assert tasks == (set(TASKS) if cell.task == MIXED else {cell.task})
        assert len(cell.prompts) >= cell.concurrency
    assert sorted(cells[-1].prompts) == list(range(24))
