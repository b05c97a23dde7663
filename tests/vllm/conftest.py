"""Tests that run vLLM itself; it has an environment of its own (`make venv-vllm`)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

# Before vLLM is imported: in one process, one thread, without a hub.
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    NUMBA_NUM_THREADS="1",
)
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None
    skip = pytest.mark.skip(reason="vllm is not installed here: make test-vllm")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM's, and its libraries'
            if missing:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a draft and Medusa heads, all tiny and with random weights."""
    from tests.tiny_vllm import make_checkpoints

    folder = tmp_path_factory.mktemp("checkpoints")
    make_checkpoints(folder)
    return folder


@pytest.fixture(scope="session")
def plain_answers(checkpoints: Path) -> list[list[int]]:
    """What vLLM answers to `prompts(50)` without speculation."""
    from tests.tiny_vllm import answers, engine, prompts

    with engine(checkpoints, None, steered=False) as llm:
        return answers(llm, prompts(50))
