"""The gather_weighted kernel's own source in the simulator gives the bits of a loop over columns."""

from __future__ import annotations

import pytest
import torch

from deep_gemm.moe.gather_weighted import KERNEL, MANY, WEIGHTS, GatherConfig, ManyConfig, config_of
from lab.sim import gather_weighted as sim
from lab.sim.library import compiled

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]
CONFIGS: list[GatherConfig | ManyConfig] = [*KERNEL.configs(), *MANY.configs()]
IDS = [f"{type(config).__name__} {config.name}" for config in CONFIGS]


@pytest.mark.parametrize("sizes", [(1, 1, 8), (5, 8, 24), (3, 9, 2056), (7, 2, 4096), (2, 17, 16), (5, 40, 4200)])
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_sums_have_the_bits_of_a_plain_loop(config: GatherConfig | ManyConfig, sizes: tuple[int, int, int]) -> None:
    trial = sim.ManyTrial if isinstance(config, ManyConfig) else sim.GatherTrial
    trial(config, *sizes, seed=sizes[1]).run()


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_a_token_without_rows_is_zero(config: GatherConfig | ManyConfig) -> None:
    y, row_of = torch.full((2, 16), float("nan")).bfloat16(), torch.full((2, 3), -1, dtype=torch.int32)
    weights = None if config.weights is None else torch.full((2, 3), float("inf"), dtype=config.weights)
    found = sim.run(compiled(sim.kernel_of(config), config), config, y, row_of, weights)
    assert torch.equal(found, torch.zeros(2, 16).bfloat16())


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_the_ring_is_for_many_tokens(dtype: torch.dtype | None) -> None:
    kinds = {tokens: type(config_of(dtype, tokens, 4096, 132)) for tokens in (1, 128, 8192)}
    assert kinds == {1: GatherConfig, 128: GatherConfig, 8192: ManyConfig}
    assert config_of(dtype, 1 << 20, 8, 132) in MANY.configs()
    assert config_of(dtype, 1, 1 << 20, 132) in KERNEL.configs()
