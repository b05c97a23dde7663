"""`parlay engine`: serve a model to OpenAI's clients until told to stop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer

from parlay.engine.cli import one_line
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
from parlay.policies.policy import make_policy


def engine(
    model: ModelFolder = None,
    draft: Annotated[
        str | None, typer.Option(help="a draft model's file or folder, or none")
    ] = None,
    medusa: Annotated[
        Path | None, typer.Option(help="Medusa heads: a file or a public checkpoint's folder")
    ] = None,
    policy: PolicyName = None,
    settings: Settings = None,
    sidecar: Sidecar = None,
    stats: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET", help="where `parlay stats` may watch (unix:/path, host:port)"
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    draft_dtype: OfDraft = None,
    draft_device: OfDraft = None,
    batch_invariant: BatchInvariant = False,
    tensor_parallel: TensorParallel = 1,
    draft_tensor_parallel: DraftTensorParallel = 1,
    overlap: Overlap = None,
    host: Annotated[str, typer.Option(help="the address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="the port to listen on; 0: any")] = 8000,
    max_running: Annotated[int, typer.Option(help="requests that run at once")] = 16,
    context: Annotated[
        int | None, typer.Option(help="tokens of prompt and output [default: the model's]")
    ] = None,
    corpus: CorpusFiles = None,
) -> None:
    """Serve a model over HTTP as OpenAI's API; SIGTERM drains and ends."""
    logging.basicConfig(format="level=%(levelname)s logger=%(name)s %(message)s")
    with one_line("engine"):
        chosen = chosen_policy(policy, settings, sidecar)
        make_policy(*chosen)  # neither a wrong name nor a taken port waits for the model
        from parlay.engine.server.bind import bind, url_of

        with closing(bind(host, port)) as bound, ExitStack() as stack:
            from parlay.engine.generate import Placement
            from parlay.engine.server.launch import Model, engine_name, open_service, open_stats
            from parlay.engine.server.serve import HttpServer

            runs = Placement(
                dtype, device, draft_dtype, draft_device, batch_invariant,
                tensor_parallel, draft_tensor_parallel, overlap,
            )  # fmt: skip
            load = Model(model, draft, max_running, context, medusa, corpus or (), runs)
            known_as = engine_name(bound.getsockname()[1])
            watched = None if stats is None else stack.enter_context(open_stats(stats, known_as))
            with open_service(load, *chosen, sidecar, known_as) as service:
                if watched is not None:
                    watched.attach(service.worker.engine)

                def ready() -> None:
                    who = f"{service.model} ({runs})" if str(runs) else service.model
                    typer.echo(f"parlay engine: {who} on {url_of(bound)}")

                asyncio.run(HttpServer(service, bound, ready).run_until_ended())
                if service.worker.crashed:
                    raise ValueError("the engine failed; the log says why")
