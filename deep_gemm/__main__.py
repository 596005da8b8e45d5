"""The command line: `python -m deep_gemm`."""

from __future__ import annotations

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
def sim(
    kernel: Annotated[str, typer.Argument(help="the kernel: fp8_gemm")] = "fp8_gemm",
    m: Annotated[int, typer.Option("--m", help="rows of D")] = 200,
    n: Annotated[int, typer.Option("--n", help="columns of D")] = 336,
    k: Annotated[int, typer.Option("--k", help="depth")] = 896,
    seeds: Annotated[int, typer.Option(help="how many schedules to try")] = 8,
    first_seed: Annotated[int, typer.Option(help="the first of them")] = 0,
    num_sms: Annotated[int, typer.Option(help="SMs to simulate")] = 2,
    block_m: Annotated[int, typer.Option(help="rows of a tile")] = 128,
    block_n: Annotated[int, typer.Option(help="columns of a tile")] = 128,
    cluster_m: Annotated[int, typer.Option(help="2: pairs of CTAs share B")] = 1,
    cluster_n: Annotated[int, typer.Option(help="2: pairs of CTAs share A")] = 1,
    fp32: Annotated[bool, typer.Option(help="FP32 output")] = False,
) -> None:
    """Run a kernel's own source on a simulated GPU, under many schedules (needs g++)."""
    from .config import Output, tile_config
    from .sim.command import run

    if kernel != "fp8_gemm":
        raise typer.BadParameter(f"expected fp8_gemm, got {kernel}", param_hint="kernel")
    config = tile_config(block_m, block_n, Output(is_fp32=fp32), cluster_m, cluster_n)
    raise typer.Exit(0 if run(config, m, n, k, seeds, first_seed, num_sms) else 1)


def main() -> None:
    """Run the command line."""
    app(prog_name="deep_gemm")


if __name__ == "__main__":
    main()
