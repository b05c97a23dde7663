"""What `parlay doctor` looks at in the engine: torch, the kernels, the model, and a few tokens."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from parlay.policies import DEFAULT_POLICY
from parlay.policies.doctor import Asked, Finding, Verdict, missing

PROMPT, TOKENS = "The capital of France is", 8


def checks(asked: Asked) -> Iterator[Finding]:
    """Check that a model is there and decodes; without torch there is no engine to check."""
    try:
        import torch
    except ModuleNotFoundError as error:
        yield missing("engine", error)
        return
    places = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    text = f"torch {torch.__version__}, {', '.join(places) or 'no GPU'}"
    yield Finding(Verdict.OK, "engine", text)
    yield _kernels()
    yield _decodes(asked)


def _kernels() -> Finding:
    from parlay.engine.kernels.build import NEEDS, OFF, cpu_flags, load

    if os.environ.get(OFF) == "off":
        return Finding(Verdict.WARN, "kernels", f"switched off by {OFF}", f"unset {OFF}")
    lacking = NEEDS - cpu_flags()
    if lacking:
        text = f"this processor lacks {', '.join(sorted(lacking))}: torch decodes alone, slower"
        return Finding(Verdict.WARN, "kernels", text)
    if load() is not None:
        return Finding(Verdict.OK, "kernels", "compiled for this processor")
    if not (os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")):
        mend = "install gcc, or set CC"
        return Finding(Verdict.WARN, "kernels", "no C compiler: torch decodes alone, slower", mend)
    return Finding(Verdict.WARN, "kernels", "do not compile: the warning in the log says why")


def _decodes(asked: Asked) -> Finding:
    from parlay.engine.generate import generate, open_engine
    from parlay.engine.request import SamplingParams

    name = "the default model" if asked.model is None else str(asked.model)
    mend = "name another folder with --model" if asked.model else "pip install 'parlay[engine]'"
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    try:
        with open_engine(asked.model, DEFAULT_POLICY, {}, None) as (engine, tokenizer):
            done = generate(engine, tokenizer, tokenizer.encode(PROMPT), sampling, lambda _: None)
    except (OSError, ValueError) as error:
        return Finding(Verdict.FAIL, "model", f"{name}: {' '.join(str(error).split())}", mend)
    text = f"{name} decodes {done.output_tokens} tokens, {done.tokens_per_s:.0f} a second"
    return Finding(Verdict.OK, "model", text)
