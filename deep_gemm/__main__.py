"""The command line: `python -m deep_gemm`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """FP8 matrix products with fine-grained scaling for NVIDIA Hopper."""


@app.command()
def demo() -> None:
    """Quantize random data, run every kind of product, and check each against FP64."""
    from .demo import run

    raise typer.Exit(0 if run() else 1)


@app.command()
def bench(
    kind: Annotated[str, typer.Argument(help="dense, grouped, host or compile")],
    quick: Annotated[bool, typer.Option("--quick", help="a few cases that stand for all")] = False,
    sustained: Annotated[bool, typer.Option("--sustained", help="also calls back to back, after all others")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw the result into this file")] = None,
    out: Annotated[Path | None, typer.Option(help="result file, else benchmarks/results/kind-date-commit.json")] = None,
    shapes: Annotated[str | None, typer.Option(help="only these, such as '64,2112,7168;4096,7168,2048'")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit to record where git cannot tell")] = None,
) -> None:
    """Measure products beside cuBLASLt, host time of calls, or compile times; write a JSON file, print tables."""
    from .bench.command import UsageError, run

    try:
        right = run(kind, quick=quick, with_sustained=sustained, plot=plot, out=out, shapes=shapes, commit=commit)
    except UsageError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if right else 1)


@app.command()
def plot(file: Path, out: Path) -> None:
    """Draw the result FILE of a benchmark into the picture OUT."""
    from .bench.command import UsageError, plot_file

    try:
        plot_file(file, out)
    except UsageError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def main() -> None:
    """Run the command line."""
    app(prog_name="deep_gemm")


if __name__ == "__main__":
    main()
