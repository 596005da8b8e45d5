"""The heuristics beside a GPU: what they choose is about as fast as the best that they could have chosen."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deep_gemm.benchmark.timing import L2Flush, cold
from deep_gemm.config import GemmConfig, Output
from deep_gemm.config_decode import DecodeConfig
from deep_gemm.heuristics import candidates, gpu_of, select
from deep_gemm.kernels import dense, fp8_gemm, fp8_gemm_decode
from deep_gemm.layout import get_mn_major_tma_aligned_tensor
from deep_gemm.problem import DenseProblem, dense_problem
from deep_gemm.quantize import per_block_cast_to_fp8, per_token_cast_to_fp8

pytestmark = pytest.mark.gpu

SHAPES = 20
REPEATS = 9
MOST = 1.15
MOST_OPERATIONS = 1e12
"""Of a product, so that the slowest of some forty candidates takes milliseconds."""


def shapes() -> list[tuple[int, int, int]]:
    """Sizes at random, as likely between 16 and 32 as between 2048 and 4096; n and k as weights have them."""
    rng = random.Random(0)
    found: list[tuple[int, int, int]] = []

    def size(least: int, most: int, multiple: int) -> int:
        return max(round(math.exp(rng.uniform(math.log(least), math.log(most))) / multiple), 1) * multiple

    while len(found) < SHAPES:
        m, n, k = size(1, 8192, 1), size(512, 16384, 64), size(512, 16384, 128)
        if 2 * m * n * k <= MOST_OPERATIONS:
            found.append((m, n, k))
    return found


def build(config: GemmConfig | DecodeConfig) -> None:
    if isinstance(config, DecodeConfig):
        fp8_gemm_decode.build(config)
    else:
        fp8_gemm.build(config)


def problem(m: int, n: int, k: int) -> DenseProblem:
    a, sfa = per_token_cast_to_fp8(torch.randn(m, k, device="cuda"))
    b = per_block_cast_to_fp8(torch.randn(n, k, device="cuda"))
    d = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return dense_problem((a, get_mn_major_tma_aligned_tensor(sfa)), b, d, None)


def times_us(p: DenseProblem, configs: list[GemmConfig | DecodeConfig], flush: L2Flush) -> dict[str, float]:
    def call(config: GemmConfig | DecodeConfig) -> Callable[[], object]:
        return lambda: dense.run(p, config)

    timed = cold({config.name: call(config) for config in configs}, flush, REPEATS)
    return {name: spread.us for name, (spread, _) in timed.items()}


def test_the_chosen_configuration_is_within_15_percent_of_the_best() -> None:
    torch.manual_seed(0)
    gpu, output = gpu_of(torch.cuda.current_device()), Output()
    found = {
        shape: [one.config for one in candidates(*shape, output, gpu) if one.why_not is None] for shape in shapes()
    }
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(build, {config for configs in found.values() for config in configs}))
    flush, told, too_slow = L2Flush(), [], []
    for shape, configs in found.items():
        times = times_us(problem(*shape), configs, flush)
        chosen, best = select(*shape, output, gpu).name, min(times, key=lambda name: times[name])
        ratio = times[chosen] / times[best]
        line = f"{shape}: {chosen} {times[chosen]:.1f} us, {best} {times[best]:.1f} us, {ratio:.3f}"
        told.append(line)
        if ratio > MOST:
            too_slow.append(line)
    print(*told, sep="\n")
    assert not too_slow, "\n" + "\n".join(too_slow)
