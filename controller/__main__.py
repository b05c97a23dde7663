"""`python -m parlay.controller` is `parlay serve`."""

import typer

from parlay.controller.cli import serve

if __name__ == "__main__":
    typer.run(serve)
