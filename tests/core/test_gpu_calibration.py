"""Compare the simulator with a GPU: the same kernel, operands and parameters give the same bits (docs/simulator.md)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import random_fp8, random_scales, run_simulated
from torch import Tensor

from deep_gemm.gemm import launch
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kinds.output import Output

pytestmark = [pytest.mark.gpu, pytest.mark.host_compiler]

Shape = tuple[int, int]


def patterns(low: int, high: int, shape: Shape, g: torch.Generator, zeros: float = 0) -> Tensor:
    """Draw E4M3 numbers of either sign with bit patterns from `low` to `high` - 1; a fraction `zeros` is 0."""
    bits = torch.randint(low, high, shape, generator=g) | torch.randint(0, 2, shape, generator=g) << 7
    bits = torch.where(torch.rand(shape, generator=g) < zeros, 0, bits)
    return bits.to(torch.uint8).view(torch.float8_e4m3fn)


OPERANDS: dict[str, Callable[[Shape, torch.Generator], Tensor]] = {
    "normally distributed": lambda shape, g: torch.randn(shape, generator=g).to(torch.float8_e4m3fn),
    "all magnitudes": random_fp8,
    "large": lambda shape, g: patterns(100, 127, shape, g),
    "subnormal": lambda shape, g: patterns(1, 8, shape, g),
    "nearly subnormal": lambda shape, g: patterns(1, 24, shape, g),
    "sparse": lambda shape, g: patterns(1, 127, shape, g, zeros=0.8),
    "sparse and subnormal": lambda shape, g: patterns(1, 12, shape, g, zeros=0.7),
}


@pytest.mark.parametrize("output", [Output(), Output(is_fp32=True)], ids=["bf16", "fp32"])
@pytest.mark.parametrize("tile", [(64, 64), (128, 112), (256, 128), (192, 128)])
@pytest.mark.parametrize("kind", OPERANDS)
def test_simulator_and_gpu_give_the_same_bits(kind: str, tile: tuple[int, int], output: Output) -> None:
    config = tile_config(*tile, output)
    g = torch.Generator().manual_seed(len(kind))
    m, n, k = 200, 136, 400
    a, b = OPERANDS[kind]((m, k), g), OPERANDS[kind]((n, k), g)
    sfa, sfb = random_scales((m, 4), g), random_scales((2, 4), g)
    d = torch.full((m, n), float("nan"), dtype=torch.float32 if output.is_fp32 else torch.bfloat16)
    p = dense_problem((a, sfa), (b, sfb), d, None)
    by_simulator = run_simulated(config, p, seed=1, truncate=True).d
    on_gpu = dense_problem((a.cuda(), sfa.cuda()), (b.cuda(), sfb.cuda()), d.cuda(), None)
    launch.run(on_gpu, config)
    assert torch.equal(on_gpu.d.cpu(), by_simulator)
