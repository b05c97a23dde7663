from pathlib import Path

import pytest

from parlay.sim.laws import tasks
from parlay.sim.scenario import load_scenario, scenario_names

FROZEN = {
    "chat_low", "chat_high", "code_burst", "mixed", "phase_shift", "long_context", "hostile",
    "edit_high", "stale", "moe", "small_gpu", "cold_start",
}  # fmt: skip


def test_every_frozen_scenario_is_there() -> None:
    assert set(scenario_names()) >= FROZEN
    for name in FROZEN:
        scenario = load_scenario(name)
        assert scenario.name == name
        assert set(scenario.tasks) <= set(tasks())


def test_stages_follow_one_another_and_begin_again() -> None:
    scenario = load_scenario("phase_shift")
    assert [scenario.stage_at(s).concurrency for s in (0, 1499, 1500, 3000, 4500)] == [
        4, 4, 128, 24, 4,
    ]  # fmt: skip
    short = scenario.shortened(2000)
    assert [short.stage_at(s).concurrency for s in (0, 150, 300, 450)] == [4, 128, 24, 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("costs = 'h200_8b'\ntitle = 'x'\n", "stage is missing"),
        ("title = 'x'\ncosts = 'h200_8b'\n[[stage]]\nmix = { chat = 1 }\n", "needs a concurrency"),
        (
            "title = 'x'\ncosts = 'h'\n[[stage]]\nconcurrency = 2\nmix = { poems = 1 }\n",
            "no task poems",
        ),
        (
            "title = 'x'\ncosts = 'h'\nspeed = 3\n[[stage]]\nconcurrency = 2\nmix = { chat = 1 }\n",
            "speed",
        ),
        ("title = ", "cannot be read"),
        (
            "title = 'x'\ncosts = 'h'\n[[stage]]\nconcurrency = 2\nmix = { chat = 0 }\n",
            "shares above 0",
        ),
    ],
)
def test_a_faulty_file_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        load_scenario(str(path))
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match="chat_low"):
        load_scenario("chatty")
