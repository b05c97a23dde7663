"""A sidecar that freezes or dies under vLLM changes no answer and holds nothing up."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from parlay.policies.types import PlanSource


@pytest.fixture
def service() -> Iterator[Any]:
    from tests.sidecars import FIXED, running

    with (
        tempfile.TemporaryDirectory(prefix="parlay-") as folder,
        running(f"unix:{folder}/sidecar.sock", *FIXED) as sidecar,
    ):
        yield sidecar


def test_faults_of_the_sidecar_change_no_answer(
    checkpoints: Path, plain_answers: list[list[int]], service: Any
) -> None:
    from tests.tiny_vllm import answers, engine, prompts, scheduler_of

    with (
        mock.patch.dict(os.environ, {"PARLAY_SIDECAR": service.target}),
        engine(checkpoints, "draft_model") as llm,
    ):
        counters = scheduler_of(llm).parlay.adapter.counters

        def all_the_same() -> None:
            assert answers(llm, prompts(50)[:20]) == plain_answers[:20]

        for _ in range(100):
            all_the_same()
            if counters.plans[PlanSource.REMOTE]:
                break
        assert counters.plans[PlanSource.REMOTE] > 0
        service.freeze()
        before = counters.plans[PlanSource.LOCAL]
        all_the_same()
        all_the_same()
        assert counters.plans[PlanSource.LOCAL] > before
        service.thaw()
        service.kill()
        all_the_same()
        service.start()
        all_the_same()
        assert counters.errors == 0
        assert scheduler_of(llm).parlay is not None
