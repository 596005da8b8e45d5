"""Experts of few tokens on a GPU: the bits of their parts, in graphs and on several streams."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers import captured, same_bits, some
from torch import Tensor
from torch.nn.functional import pad

import deep_gemm
from deep_gemm.moe.experts_few import MOST_TOKENS

pytestmark = pytest.mark.gpu
SIZES = [(16, 4, 272, 208), (512, 10, 2048, 256), (6, 2, 1040, 80)]
SAID: list[dict[str, Any]] = [{}, {"limit": 0.5}, {"activation": "situ", "alpha": 1.5, "beta": 2.0}]
FORMS = [("BF16", "BF16"), ("blocks", "blocks"), ("rows", "rows"), ("blocks", "rows")]


def weights(forms: tuple[str, str], experts: int, hidden: int, inter: int) -> list[Any]:
    """Make w1 and w2 in BF16, or in FP8 with scales of these forms."""
    casts: Any = {"blocks": deep_gemm.per_block_cast_to_fp8, "rows": partial(deep_gemm.per_token_cast_to_fp8, gran_k=0)}
    casts["BF16"] = torch.clone
    shapes = (experts, 2 * inter, hidden), (experts, hidden, inter)
    both = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5 for shape in shapes]
    return [casts[form](w) for form, w in zip(forms, both, strict=True)]


def tokens_of(tokens: int, experts: int, topk: int, hidden: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens: some routes have no expert, one token has none at all, and one names an expert several times."""
    g = torch.Generator("cuda").manual_seed(seed)
    ids = torch.randint(-1, experts, (tokens, topk), generator=g, device="cuda")
    ids[0], ids[-1] = ids[0, 0], -1
    ids[tokens // 2] = experts - 1
    x = torch.randn(tokens, hidden, generator=g, device="cuda", dtype=torch.float32).bfloat16()
    return x, ids, torch.rand(tokens, topk, generator=g, device="cuda", dtype=torch.float32)


def by_six_launches(x: Tensor, ids: Tensor, p: Tensor, *both: Any, **said: Any) -> Tensor:
    """Append tokens without an expert until there are too many tokens for the kernel."""
    more = 0, 0, 0, MOST_TOKENS
    given = pad(x, more), pad(ids, more, value=-1), pad(p, more)
    return some(deep_gemm.experts(*given, *both, **said))[: len(x)]


@pytest.mark.parametrize("said", SAID, ids=str)
@pytest.mark.parametrize("forms", FORMS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, MOST_TOKENS])
def test_it_has_the_bits_of_six_launches_each_time(
    tokens: int, sizes: tuple[int, ...], forms: tuple[str, str], said: dict[str, Any]
) -> None:
    experts, topk, hidden, inter = sizes
    both = weights(forms, experts, hidden, inter)
    for seed in range(3):
        one = tokens_of(tokens, experts, topk, hidden, seed)
        right = by_six_launches(*one, *both, **said)
        for _ in range(3):
            out = torch.full_like(right, torch.nan)
            deep_gemm.experts(*one, *both, out=out, **said)
            assert same_bits(out, right)


@pytest.mark.parametrize("forms", FORMS, ids=str)
def test_a_graph_is_replayed_with_other_routes(forms: tuple[str, str]) -> None:
    experts, topk, hidden, inter = SIZES[1]
    both, (x, ids, p) = weights(forms, experts, hidden, inter), tokens_of(4, experts, topk, hidden)
    deep_gemm.experts(x, ids, p, *both)
    graph, out = captured(deep_gemm.experts, x, ids, p, *both)
    for seed in range(4):
        for to, other in zip((x, ids, p), tokens_of(4, experts, topk, hidden, seed), strict=True):
            to.copy_(other)
        graph.replay()
        assert same_bits(out, by_six_launches(x, ids, p, *both))


@pytest.mark.parametrize("forms", FORMS, ids=str)
def test_calls_of_several_streams_do_not_disturb_each_other(forms: tuple[str, str]) -> None:
    experts, topk, hidden, inter = SIZES[1]
    both = weights(forms, experts, hidden, inter)
    streams = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]
    given = [tokens_of(4, experts, topk, hidden, seed) for seed in range(3)]
    right = [by_six_launches(*one, *both) for one in given]
    torch.cuda.synchronize()
    made = []
    for _ in range(10):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                made.append((which, some(deep_gemm.experts(*given[which], *both))))
    torch.cuda.synchronize()
    assert all(same_bits(out, right[which]) for which, out in made)
