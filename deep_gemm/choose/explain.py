"""Why a kernel was chosen: every candidate for a product, its cost, and why it lost."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..gpus import GPUS, H200, Gpu, gpu_named, gpu_of
from .config import GemmConfig, Output
from .config_decode import DecodeConfig
from .cost import Fit
from .dense import chosen_tile, menu, tuned_tile
from .tiles import Tile, tiles_for


@dataclass(frozen=True)
class Candidate:
    """One configuration for a product: its cost, and where it goes."""

    tile: Tile
    config: GemmConfig | DecodeConfig
    waves: int
    compute_us: float
    memory_us: float
    cost_us: float
    why_not: str | None = None
    """Why it cannot run this product; None if it can."""


def candidates(m: int, n: int, k: int, output: Output, gpu: Gpu) -> list[Candidate]:
    """Every configuration with its cost for this product, best first; those that cannot run it last."""
    fits = [Fit.of(tile, n, k, output, gpu) for tile in tiles_for(output)]
    found = [
        Candidate(
            fit.tile,
            fit.tile.config(output, k),
            fit.waves(m),
            fit.compute_us(m),
            fit.memory_us(m),
            fit.cost_us(m),
            fit.why_not(m),
        )
        for fit in fits
    ]
    return sorted(found, key=lambda candidate: candidate.cost_us)


def explain(
    m: int,
    n: int,
    k: int,
    d_dtype: torch.dtype = torch.bfloat16,
    *,
    with_c: bool = False,
    accumulate: bool = False,
    gpu: str | None = None,
) -> list[Candidate]:
    """Print and return every candidate for a dense product with its cost, best first, and why it lost.

    `with_c`: C is another tensor, added; `accumulate`: C is D itself. `gpu` is "H200", "H100" or "H20"; None means the
    current GPU, or an H200 where there is none.

    >>> explain(4096, 7168, 2048)[0].config.name  # doctest: +SKIP
    '256x128 bf16'
    """
    if d_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"d_dtype: expected torch.bfloat16 or torch.float32, got {d_dtype}")
    for name, size in (("m", m), ("n", n), ("k", k)):
        if size < 1:
            raise ValueError(f"{name}: expected a positive size, got {size}")
    is_fp32 = d_dtype == torch.float32
    output = Output(is_fp32, with_c=with_c or (accumulate and not is_fp32), adds_to_d=accumulate and is_fp32)
    facts = _gpu_asked_for(gpu)
    found = candidates(m, n, k, output, facts)
    on_menu = [fit.tile for fit in menu(n, k, output, facts)]
    choice, is_tuned = chosen_tile(m, n, k, output, facts), tuned_tile(m, n, k, output, facts) is not None
    chosen = next(candidate for candidate in found if candidate.tile == choice)
    from rich import box  # here, because importing deep_gemm must stay cheap
    from rich.console import Console
    from rich.table import Table

    title = f"{m} x {n} x {k} on {facts.name}, {facts.num_sms} SMs"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("configuration")
    for heading in ("waves", "compute us", "memory us", "cost us"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for candidate in found:
        lost = candidate.cost_us / chosen.cost_us - 1
        if candidate is chosen:
            verdict = "chosen, tuned" if is_tuned else "chosen"
        elif candidate.why_not or candidate.tile not in on_menu:
            verdict = candidate.why_not or "not on the menu of this weight"
        else:
            verdict = f"{lost:.0%} slower" if lost >= 0 else "cheaper by cost"
        table.add_row(
            candidate.config.name,
            str(candidate.waves),
            f"{candidate.compute_us:.1f}",
            f"{candidate.memory_us:.1f}",
            "-" if candidate.why_not else f"{candidate.cost_us:.1f}",
            verdict,
        )
    Console(highlight=False).print(table)
    return found


def _gpu_asked_for(name: str | None) -> Gpu:
    if name is None:
        return gpu_of(torch.cuda.current_device()) if torch.cuda.is_available() else H200
    gpu = gpu_named(name)
    if gpu is None:
        raise ValueError(f"gpu: expected {', '.join(gpu.name for gpu in GPUS)} or None, got {name!r}")
    return gpu
