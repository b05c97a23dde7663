"""`python -m parlay.engine.gpu_check`, for machines where parlay is not installed."""

import typer

from parlay.engine.gpu_check.cli import gpu_check

if __name__ == "__main__":
    typer.run(gpu_check)
