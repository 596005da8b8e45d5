"""The command line: `python -m deep_gemm`."""

from __future__ import annotations

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


def main() -> None:
    """Run the command line."""
    app(prog_name="deep_gemm")


if __name__ == "__main__":
    main()
