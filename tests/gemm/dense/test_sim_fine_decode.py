"""Fine scales of E4M3 weights in the decode kernel, in the simulator: every kind of them, ragged edges, any values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from thorough import one_in

from deep_gemm.core.check.recipes import BLOCKS_OF_32, MX, PER_ROW, Scales
from deep_gemm.core.check.ue8m0 import Words
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.kinds.output import FINE_OPERANDS
from lab.sim import product as simulated
from lab.sim.fine_decode import random_problem
from lab.sim.fp8_gemm_decode import DecodeTrial
from lab.sim.product import compile_config

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

KINDS = [(sfa, sfb) for _, sfa, sfb in FINE_OPERANDS]
WORDS = list(Words.__members__.values())
BOTH = Words.A | Words.B
TILES = [(8, 3, 1, 4), (16, 2, 2, 1), (24, 3, 1, 2), (32, 3, 2, 1), (48, 2, 1, 3), (64, 4, 1, 1)]


def config(
    block_tokens: int, num_stages: int, warpgroups: int, cluster_k: int, kind: Any = (MX, MX), **more: Any
) -> DecodeConfig:
    sfa, sfb = kind
    return DecodeConfig(block_tokens, num_stages, warpgroups, cluster_k, sfa=sfa, sfb=sfb, **more)


@pytest.mark.parametrize(("kind", "tile"), one_in(4, [(kind, tile) for kind in KINDS for tile in TILES]))
def test_every_kind_in_every_tile_on_ragged_problems(kind: Any, tile: tuple[int, int, int, int]) -> None:
    of = config(*tile, kind=kind, is_fp32=True)
    for m, n, k in ((tile[0] - 3, of.block_n + 24, 1312), (tile[0] + 5, of.block_n + 8, 288)):
        for words in (Words.NONE, WORDS[1 + k % 3]):
            DecodeTrial(of, m, n, k, k, any_scales=True, words=words).run()


@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_sides_scales_in_words(kind: Any, words: Words) -> None:
    """CTAs that split k begin at any exponent of a word."""
    of = config(16, 3, 1, 5, kind=kind, is_fp32=True)
    DecodeTrial(of, 21, 136, 1312, 3, any_scales=True, words=words).run()


@pytest.mark.parametrize("k", [16, 32, 48, 128, 144, 288, 576, 1024, 1040, 2880])
def test_any_depth(k: int) -> None:
    """Below one k-block, and past each 4 or 8 whose scales are in shared memory; CTAs without any."""
    DecodeTrial(config(16, 3, 1, 1), 5, 72, k, k, any_scales=True, words=BOTH).run()
    DecodeTrial(config(32, 3, 1, 3), 5, 72, k, k).run()


@pytest.mark.parametrize("n", [8, 24, 40, 64, 72, 104, 136, 568])
def test_any_columns(n: int) -> None:
    DecodeTrial(config(8, 3, 2, 1, kind=(PER_ROW, BLOCKS_OF_32)), 3, n, 288, n).run()
    DecodeTrial(config(16, 3, 1, 2, with_c=True), 17, n, 288, n, in_place=True, words=BOTH).run()


@pytest.mark.parametrize("weight_is_ready", [False, True])
def test_the_kernel_ahead_may_still_be_at_work(weight_is_ready: bool) -> None:
    of = config(8, 4, 1, 2, kind=(MX, BLOCKS_OF_32))
    DecodeTrial(of, 5, 72, 1296, 1, is_dependent=True, weight_is_ready=weight_is_ready).run()


@pytest.mark.parametrize("words", [Words.NONE, BOTH])
@pytest.mark.parametrize("kind", [(PER_ROW, BLOCKS_OF_32), (MX, MX)])
def test_scales_may_have_any_strides(kind: Any, words: Words) -> None:
    of = config(16, 4, 1, 2, kind=kind)
    p = random_problem(of, 11, 264, 720, seed=3, words=words)
    wide = torch.full((p.sfb.shape[0], p.sfb.shape[1] + 3), -1, dtype=p.sfb.dtype)
    wide[:, : p.sfb.shape[1]] = p.sfb
    for sfb in (p.sfb.t().contiguous().t(), wide[:, : p.sfb.shape[1]]):
        simulated.run(compile_config(of), of, p._replace(sfb=sfb, sfa=p.sfa.t().contiguous().t()), seed=3).checked()


@pytest.mark.parametrize(("kind", "words"), one_in(4, [(kind, words) for kind in KINDS for words in WORDS]))
def test_a_cta_that_is_alone_gives_the_references_bits(kind: Any, words: Words) -> None:
    """One chain over all parts in order, with any scales. Small integers, whose sums of a part are exact."""
    of = config(16, 3, 2, 1, kind=kind, is_fp32=True)
    p = random_problem(of, 13, 136, 1200, seed=1, any_scales=True, words=words)
    g = torch.Generator().manual_seed(2)
    a, b = (torch.randint(-2, 3, x.shape, generator=g).to(torch.float8_e4m3fn) for x in (p.a, p.b))
    found = simulated.run(compile_config(of), of, p._replace(a=a, b=b))
    assert torch.equal(found.d.nan_to_num(7.25), found.right.nan_to_num(7.25))
    assert found.d.isfinite().any()


def test_scales_that_are_infinite_are_so_in_their_own_columns_alone() -> None:
    """Nothing behind the end of k is multiplied: zero times infinity would be no number."""
    of = config(16, 3, 1, 1, kind=(PER_ROW, BLOCKS_OF_32), is_fp32=True)
    p = random_problem(of, 13, 72, 288, seed=4)
    p.a[:, 256:], p.b[:, 256:] = (torch.ones(x.shape[0], 32).to(x.dtype) for x in (p.a, p.b))
    p.sfa[:, 2] = torch.inf
    found = simulated.run(compile_config(of), of, p)
    assert bool((found.d == torch.inf).all())
    assert torch.equal(found.d, found.right)


def test_bits_do_not_depend_on_the_tile() -> None:
    of = config(8, 3, 1, 1)
    p = random_problem(of, 8, 136, 1312, 5, words=BOTH)
    found = [
        simulated.run(compile_config(each), each, p._replace(d=torch.empty_like(p.d)), truncate=True).d
        for each in (of, config(8, 2, 2, 1), config(32, 2, 1, 1), config(64, 4, 2, 1))
    ]
    assert all(torch.equal(d, found[0]) for d in found)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_tokens": 96}, "at most 64 tokens"),
        ({"sfa": BLOCKS_OF_32}, "scales of A for a row"),
        ({"sfb": Scales(16, 32)}, "scales of B for one of (1, 32, 64, 128) rows"),
    ],
)
def test_what_cannot_be_built_is_refused_in_words(change: dict[str, Any], reason: str) -> None:
    assert reason in (replace(config(16, 3, 1, 1), **change).why_illegal() or "")
