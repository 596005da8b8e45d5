"""Experts of few tokens with BF16 weights on a GPU: the bits of their parts, in graphs and on several streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import captured, same_bits, some
from torch import Tensor

import deep_gemm
from deep_gemm.casts.gating import Gating, gating_of
from deep_gemm.moe.api import activate_rows
from deep_gemm.moe.experts_few import COLUMNS

pytestmark = pytest.mark.gpu
SIZES = [(16, 4, 272, 200), (512, 10, 2048, 256), (6, 2, 1040, 72)]
SAID: list[dict[str, Any]] = [{}, {"limit": 0.5}, {"activation": "situ", "alpha": 1.5, "beta": 2.0}]


def weights(experts: int, hidden: int, inter: int) -> tuple[Tensor, Tensor]:
    shapes = (experts, 2 * inter, hidden), (experts, hidden, inter)
    w1, w2 = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5 for shape in shapes)
    return w1, w2


def tokens_of(tokens: int, experts: int, topk: int, hidden: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Some routes without an expert, one token without any, and one that names an expert several times."""
    g = torch.Generator("cuda").manual_seed(seed)
    ids = torch.randint(-1, experts, (tokens, topk), generator=g, device="cuda")
    ids[0], ids[-1] = ids[0, 0], -1
    ids[tokens // 2] = experts - 1
    x = torch.randn(tokens, hidden, generator=g, device="cuda", dtype=torch.float32).bfloat16()
    return x, ids, torch.rand(tokens, topk, generator=g, device="cuda", dtype=torch.float32)


def by_parts(x: Tensor, ids: Tensor, p: Tensor, w1: Tensor, w2: Tensor, gating: Gating) -> Tensor:
    rows = deep_gemm.expert_rows(ids, len(w1))
    a = x[rows.token_of.clamp_min(0)]
    h = some(deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, w1, grouped_layout=rows.ids))
    middle = activate_rows(h, rows, gating, None)[0]
    y = some(deep_gemm.m_grouped_bf16_gemm_nt_contiguous(middle, w2, grouped_layout=rows.ids))
    return some(deep_gemm.gather_weighted(y, rows, p))


@pytest.mark.parametrize("said", SAID, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, *COLUMNS, 11])
def test_it_has_the_bits_of_its_parts_each_time(tokens: int, sizes: tuple[int, ...], said: dict[str, Any]) -> None:
    experts, topk, hidden, inter = sizes
    both = weights(experts, hidden, inter)
    gating = gating_of(said.get("activation", "swiglu"), *(said.get(name) for name in ("alpha", "beta", "limit")))
    for seed in range(3):
        one = tokens_of(tokens, experts, topk, hidden, seed)
        right = by_parts(*one, *both, gating)
        for _ in range(3):
            out = torch.full_like(right, torch.nan)
            deep_gemm.experts(*one, *both, out=out, **said)
            assert same_bits(out, right)


def test_a_graph_is_replayed_with_other_routes() -> None:
    experts, topk, hidden, inter = SIZES[1]
    both, (x, ids, p) = weights(experts, hidden, inter), tokens_of(8, experts, topk, hidden)
    deep_gemm.experts(x, ids, p, *both)
    graph, out = captured(deep_gemm.experts, x, ids, p, *both)
    for seed in range(4):
        for to, other in zip((x, ids, p), tokens_of(8, experts, topk, hidden, seed), strict=True):
            to.copy_(other)
        graph.replay()
        assert same_bits(out, by_parts(x, ids, p, *both, Gating()))


def test_calls_of_several_streams_do_not_disturb_each_other() -> None:
    experts, topk, hidden, inter = SIZES[1]
    both = weights(experts, hidden, inter)
    streams = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]
    given = [tokens_of(8, experts, topk, hidden, seed) for seed in range(3)]
    right = [by_parts(*one, *both, Gating()) for one in given]
    torch.cuda.synchronize()
    made = []
    for _ in range(10):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                made.append((which, some(deep_gemm.experts(*given[which], *both))))
    torch.cuda.synchronize()
    assert all(same_bits(out, right[which]) for which, out in made)
