"""The error of products whose scales do not change along k, by how often sums are promoted: in the simulator, on a CPU.

python -m lab.bench.promotion    the table of docs/numerics.md
"""

from __future__ import annotations

from dataclasses import replace

import torch

from deep_gemm.core.check.recipes import RUN_COLUMNS, WHOLE
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import BLOCK_K
from deep_gemm.gemm.kinds.output import Output

from ..casts import cast_by_torch
from ..sim.product import run
from .numerics import OPERANDS


def error_by_interval(numbers: str, k: int, interval: int) -> tuple[float, float]:
    """Give a product's relative error and bias beside FP64, its sums promoted every `interval` columns of k."""
    output = Output(is_fp32=True, sfa=WHOLE, sfb=WHOLE)
    config = replace(tile_config(64, 64, output), run_k_blocks=interval // BLOCK_K, has_tail=interval > BLOCK_K)
    torch.manual_seed(0)
    (a, sfa), (b, sfb) = (cast_by_torch(x.float(), 1, k) for x in OPERANDS[numbers](64, 64, k))
    d = torch.empty(64, 64, dtype=torch.float32)
    p = dense_problem((a, sfa), (b, sfb), d, None, recipes=(None, WHOLE, WHOLE))
    got = run(None, config, p, truncate=True, num_sms=1).d.double()
    right = (a.double() * sfa.double()) @ (b.double() * sfb.double()).mT
    return float((got - right).norm() / right.norm()), float((got - right).mean() / right.abs().mean())


if __name__ == "__main__":
    for numbers in OPERANDS:
        for k in (1024, 4096):
            found = [error_by_interval(numbers, k, min(interval, k)) for interval in (128, RUN_COLUMNS, 2048, k)]
            print(f"| {numbers} | {k} |", " | ".join(f"{error:.1e}" for error, _ in found), f"| {found[1][1]:.1e} |")
