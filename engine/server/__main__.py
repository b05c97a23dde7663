"""`python -m parlay.engine.server` is `parlay engine`."""

import typer

from parlay.engine.server.cli import engine

if __name__ == "__main__":
    typer.run(engine)
