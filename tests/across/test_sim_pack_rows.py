"""The pack_rows kernel's own source in the simulator: the bits of a cast and of torch's copies."""

from __future__ import annotations

import pytest
import torch

from deep_gemm.across.pack_rows import KERNEL, PackConfig, config_of
from lab.sim.pack_rows import PackTrial

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]


@pytest.mark.parametrize("sizes", [(1, 16, 1), (5, 144, 3), (3, 1024, 8), (2, 2080, 9)])
@pytest.mark.parametrize("config", KERNEL.configs(), ids=lambda config: config.name)
def test_each_token_is_written_into_its_rows(config: PackConfig, sizes: tuple[int, int, int]) -> None:
    PackTrial(config, *sizes, seed=sizes[1]).run()


def test_without_places_each_token_has_its_own_row_and_rows_behind_have_no_routes() -> None:
    PackTrial(config_of(torch.bfloat16, 4), 3, 272, 3, behind=2).run()
