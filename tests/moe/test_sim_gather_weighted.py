"""The gather_weighted kernel's own source in the simulator, bit for bit as a loop over columns."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from deep_gemm.moe.gather_weighted import (
    WEIGHTS,
    GatherConfig,
    ManyConfig,
    config_of,
    reachable_gather,
    reachable_many,
)
from lab.sim import HostKernel
from lab.sim import gather_weighted as sim

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]
CONFIGS: list[GatherConfig | ManyConfig] = [*reachable_gather(), *reachable_many()]
IDS = [f"{type(config).__name__} {config.name}" for config in CONFIGS]


@cache
def compiled(config: GatherConfig | ManyConfig) -> HostKernel:
    return sim.compile_config(config)


def right(y: Tensor, row_of: Tensor, weights: Tensor | None) -> Tensor:
    total = torch.zeros(row_of.shape[0], y.shape[1])
    for token, rows in enumerate(row_of.tolist()):
        for column, row in enumerate(rows):
            if row >= 0:
                weight = 1.0 if weights is None else weights[token, column].float()
                total[token] = total[token] + y[row].float() * weight
    return total.bfloat16()


@pytest.mark.parametrize("sizes", [(1, 1, 8), (5, 8, 24), (3, 9, 2056), (7, 2, 4096), (2, 17, 16), (5, 40, 4200)])
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_sums_have_the_bits_of_a_plain_loop(config: GatherConfig | ManyConfig, sizes: tuple[int, int, int]) -> None:
    tokens, topk, n = sizes
    generator = torch.Generator().manual_seed(n)
    rows = tokens * topk
    y = torch.randn(rows + 1, n, generator=generator).bfloat16()
    row_of = torch.randperm(rows, generator=generator).int().view(tokens, topk)
    row_of[torch.rand(tokens, topk, generator=generator) < 0.2] = -1
    y[rows] = float("nan")  # no route has it
    y[(~torch.isin(torch.arange(rows + 1), row_of)).nonzero().flatten()] = float("nan")
    weights = None
    if config.weights is not None:  # in wider rows, as in a message
        weights = torch.full((tokens, topk + 5), float("nan"), dtype=config.weights)[:, 3 : 3 + topk]
        weights[row_of >= 0] = torch.rand(int((row_of >= 0).sum()), generator=generator).to(config.weights)
    found = sim.run(compiled(config), config, y, row_of, weights, seed=topk)
    assert torch.equal(found, right(y, row_of, weights))


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_a_token_without_rows_is_zero(config: GatherConfig | ManyConfig) -> None:
    y, row_of = torch.full((2, 16), float("nan")).bfloat16(), torch.full((2, 3), -1, dtype=torch.int32)
    weights = None if config.weights is None else torch.full((2, 3), float("inf"), dtype=config.weights)
    found = sim.run(compiled(config), config, y, row_of, weights)
    assert torch.equal(found, torch.zeros(2, 16).bfloat16())


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_the_ring_is_for_many_tokens(dtype: torch.dtype | None) -> None:
    kinds = {tokens: type(config_of(dtype, tokens, 4096, 132)) for tokens in (1, 128, 8192)}
    assert kinds == {1: GatherConfig, 128: GatherConfig, 8192: ManyConfig}
    assert config_of(dtype, 1 << 20, 8, 132) in reachable_many()
    assert config_of(dtype, 1, 1 << 20, 132) in reachable_gather()
