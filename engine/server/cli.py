"""`parlay engine`: serve a model to OpenAI's clients until told to stop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer

from parlay.engine.cli import CorpusFiles, key_values, one_line
from parlay.policies.policy import make_policy


def engine(
    model: Annotated[Path | None, typer.Option(help="a Hugging Face checkpoint's folder")] = None,
    draft: Annotated[
        str | None, typer.Option(help="a draft model's file or folder, or none")
    ] = None,
    medusa: Annotated[
        Path | None, typer.Option(help="Medusa heads: a file or a public checkpoint's folder")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="what decides on speculation [default: goodput]")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a policy's setting")
    ] = None,
    sidecar: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="let a `parlay serve` decide (unix:/path, host:port), and us where it is silent",
        ),
    ] = None,
    stats: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET", help="where `parlay stats` may watch (unix:/path, host:port)"
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    draft_dtype: Annotated[
        str | None, typer.Option(help="the draft model's [default: the model's]")
    ] = None,
    draft_device: Annotated[
        str | None, typer.Option(help="the draft model's [default: the model's]")
    ] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="same bits alone, batched, among drafts")
    ] = False,
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
        if sidecar is not None and (policy is not None or settings):
            raise ValueError("--sidecar decides by its own policy: leave out --policy and --set")
        chosen, values = policy or "goodput", key_values(settings or [])
        make_policy(chosen, values)  # neither a wrong name nor a taken port waits for the model
        from parlay.engine.server.bind import bind, url_of

        with closing(bind(host, port)) as bound, ExitStack() as stack:
            from parlay.engine.generate import Placement
            from parlay.engine.server.launch import Model, engine_name, open_service, open_stats
            from parlay.engine.server.serve import HttpServer

            load = Model(
                model,
                draft,
                max_running,
                context,
                medusa,
                corpus or (),
                Placement(dtype, device, draft_dtype, draft_device, batch_invariant),
            )
            known_as = engine_name(bound.getsockname()[1])
            watched = None if stats is None else stack.enter_context(open_stats(stats, known_as))
            with open_service(load, chosen, values, sidecar, known_as) as service:
                if watched is not None:
                    watched.attach(service.worker.engine)

                def ready() -> None:
                    typer.echo(f"parlay engine: {service.model} on {url_of(bound)}")

                asyncio.run(HttpServer(service, bound, ready).run_until_ended())
                if service.worker.crashed:
                    raise ValueError("the engine failed; the log says why")
