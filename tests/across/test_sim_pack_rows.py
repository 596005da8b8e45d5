"""The pack_rows kernel's own source in the simulator: the bits of a cast and of torch's copies."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from deep_gemm.across.message import pack, row_bytes
from deep_gemm.across.pack_rows import PackConfig, config_of, reachable_pack
from lab.sim import HostKernel
from lab.sim import pack_rows as sim

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]
EXPERTS = 12


@cache
def compiled(config: PackConfig) -> HostKernel:
    return sim.compile_config(config)


def drawn(tokens: int, hidden: int, topk: int, config: PackConfig, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of all magnitudes in a wider matrix; ids that no expert has among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden + 32, generator=g) * 2.0 ** torch.randint(-100, 20, (tokens, 1), generator=g)
    ids = torch.randint(-2, EXPERTS + 2, (tokens, topk), generator=g)
    if config.id_bytes == 8:
        ids[0, 0] = (1 << 32) + 1
    x = x.to(config.dtype)[:, 16 : 16 + hidden]
    return x, ids.to(torch.int64 if config.id_bytes == 8 else torch.int32), torch.randn(tokens, topk, generator=g)


def right_of(x: Tensor, ids: Tensor, p: Tensor) -> Tensor:
    ids = ids.long()
    return pack(x, torch.where((ids >= 0) & (ids < 2**31), ids, -1), p)


@pytest.mark.parametrize("sizes", [(1, 16, 1), (5, 144, 3), (3, 1024, 8), (2, 2080, 9)])
@pytest.mark.parametrize("config", reachable_pack(), ids=lambda config: config.name)
def test_each_token_is_written_into_its_rows(config: PackConfig, sizes: tuple[int, int, int]) -> None:
    tokens, hidden, topk = sizes
    x, ids, p = drawn(tokens, hidden, topk, config, seed=hidden)
    g = torch.Generator().manual_seed(hidden)
    row_of = torch.full((tokens, topk), -1, dtype=torch.int32)
    free = torch.randperm(tokens * topk, generator=g).tolist()
    for token in range(tokens):
        for column in range(int(torch.randint(0, topk + 1, (1,), generator=g))):
            row_of[token, column] = free.pop()
    found = sim.run(compiled(config), config, x, ids, p, row_of, (tokens * topk, row_bytes(hidden, topk) // 4))
    right = torch.full_like(found, sim.POISON)
    of_tokens = right_of(x, ids, p)
    for token, rows in enumerate(row_of.tolist()):
        for row in rows:
            if row >= 0:
                right[row] = of_tokens[token]
    assert torch.equal(found, right)


def test_without_places_each_token_has_its_own_row_and_rows_behind_have_no_routes() -> None:
    config = config_of(torch.bfloat16, 4)
    x, ids, p = drawn(3, 272, 3, config, seed=1)
    found = sim.run(compiled(config), config, x, ids, p, None, (5, row_bytes(272, 3) // 4))
    assert torch.equal(found[:3], right_of(x, ids, p))
    ids_at = 272 // 4 + 3
    assert found[3:, ids_at : ids_at + 3].tolist() == [[-1] * 3] * 2
    assert (found[3:, :ids_at] == sim.POISON).all()
