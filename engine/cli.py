"""Commands of the engine, thin: options in, one clear line where something is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from parlay.engine.options import (
    BatchInvariant,
    CorpusFiles,
    Device,
    DraftTensorParallel,
    Dtype,
    ModelFolder,
    OfDraft,
    Overlap,
    PolicyName,
    Settings,
    Sidecar,
    TensorParallel,
    chosen_policy,
)
from parlay.policies import DEFAULT_POLICY
from parlay.policies.files import check_writable

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="write the figures here")
]


@contextlib.contextmanager
def one_line(command: str) -> Iterator[None]:
    """Turn what is wrong with the input into one line and exit code 1."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        typer.echo(f"parlay {command}: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None


def demo(
    policy: Annotated[str, typer.Option(help="the sidecar's policy")] = DEFAULT_POLICY,
    quick: Annotated[bool, typer.Option("--quick", help="10 minutes at most, not 44")] = False,
    json_file: JsonFile = None,
) -> None:
    """Decode a mixed workload with and without speculation, and under a sidecar that steers it."""
    with one_line("demo"):
        if json_file is not None:
            check_writable(json_file)
        from rich.console import Console

        from parlay.engine.demo.main import demo_main

        sound = demo_main(policy, quick, json_file, Console())
    if not sound:
        typer.echo("parlay demo: outputs diverge beyond numerical noise", err=True)
        raise typer.Exit(1)


def generate(
    prompt: Annotated[str, typer.Argument(help="what to say to the model; - reads standard input")],
    model: ModelFolder = None,
    policy: PolicyName = None,
    settings: Settings = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    draft_dtype: OfDraft = None,
    draft_device: OfDraft = None,
    batch_invariant: BatchInvariant = False,
    tensor_parallel: TensorParallel = 1,
    draft_tensor_parallel: DraftTensorParallel = 1,
    overlap: Overlap = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="apply the chat template")] = True,
    max_tokens: Annotated[int, typer.Option(help="end after so many tokens")] = 256,
    temperature: Annotated[float, typer.Option(help="0: greedy")] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(help="of draws at a temperature; in float32 no policy changes the text"),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text")] = None,
    sidecar: Sidecar = None,
    corpus: CorpusFiles = None,
    stats: Annotated[bool, typer.Option("--stats", help="say what speculation did")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead")] = False,
) -> None:
    """Generate text for one prompt."""
    with one_line("generate"):
        from parlay.engine.generate import Placement, open_engine, unheard
        from parlay.engine.generate import generate as run
        from parlay.engine.request import SamplingParams

        text = _text(prompt)
        sampling = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=max_tokens, stop=tuple(stop or ())
        )
        chosen = chosen_policy(policy, settings, sidecar)
        runs = Placement(
            dtype, device, draft_dtype, draft_device, batch_invariant,
            tensor_parallel, draft_tensor_parallel, overlap,
        )  # fmt: skip
        with open_engine(model, *chosen, sidecar, runs, corpus or ()) as (engine, tokenizer):
            ids = (
                tokenizer.chat([{"role": "user", "content": text}])
                if chat
                else tokenizer.encode(text)
            )
            done = run(engine, tokenizer, ids, sampling, _ignore if as_json else _stream)
            silence = unheard(engine.planner)
    typer.echo(json.dumps(dataclasses.asdict(done)) if as_json else "")
    if stats and not as_json:
        typer.echo(done.stats(), err=True)
    if silence is not None:
        typer.echo(f"parlay generate: no plan from {sidecar} ({silence}); decided here", err=True)


def bench_engine(
    json_file: JsonFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="10 minutes, fewer tokens")] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="PEER", help="hf, hf_assisted, hf_prompt_lookup or vllm"),
    ] = None,
    vllm_python: Annotated[
        Path, typer.Option(help="the Python of an environment with vLLM")
    ] = Path(".venv-vllm/bin/python"),
) -> None:
    """Compare our engine with Hugging Face's generate, with vLLM, and with memory's floor."""
    with one_line("bench engine"):
        if json_file is not None:
            check_writable(json_file)
        from rich.console import Console

        from parlay.engine.bench_main import FULL, QUICK, bench_main

        bench_main(QUICK if quick else FULL, without or (), vllm_python, json_file, Console())


def _text(prompt: str) -> str:
    """Return the prompt, standard input for -; raises ValueError where it is no text."""
    if prompt == "-" and sys.stdin is None:
        raise ValueError("the prompt is -, but standard input is closed")
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError:
        raise ValueError("the prompt is no UTF-8 text") from None
    if not text:
        raise ValueError("the prompt is empty: say something to the model")
    return text


def _stream(text: str) -> None:
    typer.echo(text, nl=False)
    sys.stdout.flush()


def _ignore(_: Any) -> None:
    pass
