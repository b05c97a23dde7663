"""`parlay demo`, put together: load, run, judge, report."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from parlay.engine.demo.budget import FULL, QUICK
from parlay.engine.demo.logits import TorchOracle, float32_copy
from parlay.engine.demo.modes import demo_modes, open_lanes, sidecar_figures
from parlay.engine.demo.plot import plot
from parlay.engine.demo.prompts import demo_prompts
from parlay.engine.demo.report import print_report, report_of
from parlay.engine.demo.run import run_demo
from parlay.engine.demo.soundness import compare, judge
from parlay.engine.llm import load_backend
from parlay.engine.weights import default_model_dir
from parlay.policies.files import check_writable, write_json
from parlay.policies.policy import make_policy


def demo_main(policy: str, quick: bool, json_file: Path | None, console: Console) -> bool:
    """Run the demo on the default model; say whether outputs agree. Raises ValueError in one line.

    The plot goes beside the JSON file, else into the working folder.
    """
    started_s = time.monotonic()
    make_policy(policy)  # a wrong name should not wait for the model
    picture = picture_beside(json_file)
    checkpoint = default_model_dir()
    backend, tokenizer = load_backend()
    prompts = demo_prompts()
    prompt_ids = [tokenizer.chat([{"role": "user", "content": p.text}]) for p in prompts]
    plan = QUICK if quick else FULL
    minutes = plan.deadline_s / 60
    console.print(
        f"parlay demo: {checkpoint.name}, {len(prompts)} prompts, ends within {minutes:.0f} minutes"
    )
    with ExitStack() as stack:
        lanes = open_lanes(stack, demo_modes(policy), backend, backend.config, tokenizer.eos_ids)
        run = run_demo(lanes, prompts, prompt_ids, plan, console, started_s)
        figures = sidecar_figures(lanes)
    found = compare(run)
    if found.divergences:
        console.print(f"{len(found.divergences)} outputs diverge: recomputing them in float32")
    exact = float32_copy(checkpoint, backend.target.device)
    verdict = judge(found, TorchOracle(backend.target, exact, prompt_ids))
    report = report_of(run, policy, verdict)
    report["sidecar"] = figures
    report["seconds"] = time.monotonic() - started_s
    try:
        if json_file:
            write_json(json_file, report)
    finally:
        print_report(report, console)
    console.print(
        f"sidecar: {100 * figures['fresh_share']:.1f}% of steps followed its plan of the newest "
        f"report or the one before; asking it cost {figures['engine_thread_us_p50']:.0f} us a step",
        highlight=False,
    )
    plot(run, picture)
    console.print(
        f"k and proposer over time: {picture}; {report['seconds']:.0f} s in all", highlight=False
    )
    return bool(report["identical"])


def picture_beside(json_file: Path | None) -> Path:
    """Return where the plot goes; raises ValueError where it or the JSON cannot be written."""
    if json_file is not None and json_file.suffix.lower() == ".png":
        raise ValueError(
            f"--json {json_file}: the plot goes beside the JSON file under that name;"
            " let FILE end in .json"
        )
    picture = json_file.with_suffix(".png") if json_file else Path("parlay-demo.png")
    for file in (json_file, picture):
        if file is not None:
            check_writable(file)
    return picture
