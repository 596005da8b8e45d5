"""The fp8_gemm_decode kernel's own source in the simulator: every tile and split, ragged edges, seeds, schedules."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import assert_same_bits_by, run_simulated, some, with_other_strides
from thorough import one_in

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.core.check.recipes import BLOCKS_OF_32, E2M1, MX, PER_ROW, Scales
from deep_gemm.core.check.ue8m0 import Words, words_of
from deep_gemm.gemm import reference
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.config.decode import BLOCK_TOKENS, DecodeConfig, decode_config
from deep_gemm.gemm.kinds.output import FINE_OPERANDS
from lab.sim.dense import random_problem
from lab.sim.fp8_gemm_decode import DecodeTrial
from lab.sim.fp8_gemm_decode import random_problem as fine_problem

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]


def check(config: DecodeConfig, m: int, n: int, k: int, seed: int, schedule: str | None = None, **how: Any) -> None:
    DecodeTrial(config, m, n, k, seed, schedule, **how).run()


@pytest.mark.parametrize("num_math_warpgroups", [1, 2])
@pytest.mark.parametrize("block_tokens", BLOCK_TOKENS)
def test_every_tile_on_ragged_problems(block_tokens: int, num_math_warpgroups: int) -> None:
    for cluster_k in one_in(3, (1, 2, 5, 8)):
        config = DecodeConfig(block_tokens, 4, num_math_warpgroups, cluster_k)
        assert config.why_illegal() is None
        check(config, block_tokens - 3, config.block_n + 24, 1200, seed=cluster_k)
        check(config, block_tokens + 5, config.block_n + 8, 400, seed=cluster_k + 1)


@pytest.mark.parametrize("cluster_k", one_in(3, range(1, 9)))
def test_every_cluster_whatever_the_number_of_k_blocks(cluster_k: int) -> None:
    """Test fewer k-blocks than CTAs, one k-block for each CTA, and slightly more; and rings that wrap."""
    config = DecodeConfig(16, 2, 1, cluster_k, is_fp32=True)
    for num_k_blocks in {1, cluster_k - 1, cluster_k, cluster_k + 1, 6 * cluster_k - 1} - {0}:
        check(config, 13, 72, 128 * num_k_blocks - 48, seed=num_k_blocks)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("is_fp32", [False, True])
@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.parametrize("tile", [(8, 1, 1), (8, 1, 8), (24, 2, 3), (64, 1, 2), (128, 2, 1)])
def test_every_kind_of_output(tile: tuple[int, int, int], with_c: bool, is_fp32: bool, seed: int) -> None:
    config = DecodeConfig(tile[0], 4, *tile[1:], is_fp32=is_fp32, with_c=with_c)
    check(config, tile[0] + 3, 136 + 4 * is_fp32, 528, seed)


def test_c_may_be_d() -> None:
    for is_fp32 in (False, True):
        config = DecodeConfig(16, 4, 2, 3, is_fp32=is_fp32, with_c=True)
        p = random_problem(config, 11, 200, 720, seed=1, in_place=True)
        assert p.c is p.d
        run_simulated(config, p, seed=1).checked()


@pytest.mark.parametrize("k", [16, 128, 4080, 4224, 8208, 12304])
def test_any_depth(k: int) -> None:
    """Test less than one k-block, and past 32, 64 and 96: shared memory holds the scales of 32 k-blocks at a time."""
    check(DecodeConfig(16, 5, 1, 1), 5, 72, k, seed=k)
    check(DecodeConfig(8, 5, 2, 3), 5, 72, k, seed=k)


@pytest.mark.parametrize("m", [1, 2, 8, 9, 15, 17, 33])
@pytest.mark.parametrize("n", [8, 56, 64, 72, 120, 136, 200])
def test_any_rows_and_columns(m: int, n: int) -> None:
    """Test boxes of A and B with fewer rows than the tile, and boxes that reach past the last row."""
    check(DecodeConfig(16, 3, 2, 2), m, n, 272, seed=m * n)


@pytest.mark.parametrize(
    "schedule", ["slow_cta", "slow_warps", "slow_producer", "slow_math", "late_loads", "late_stores", "slow_lanes"]
)
@pytest.mark.parametrize("tile", [(8, 1, 1), (8, 1, 8), (16, 2, 3), (64, 1, 2)])
def test_biased_schedules(tile: tuple[int, int, int], schedule: str) -> None:
    config = DecodeConfig(tile[0], 3, *tile[1:])
    for seed in one_in(2, (1, 2)):
        check(config, tile[0] + 1, 200, 1296, seed=seed, schedule=schedule)


def test_the_kernel_ahead_may_still_be_at_work() -> None:
    config = DecodeConfig(8, 4, 1, 2, with_c=True)
    check(config, 5, 72, 1296, 1, is_dependent=True)


def test_the_weight_may_be_loaded_while_the_kernel_ahead_is_at_work() -> None:
    """Test fewer k-blocks than slots, an equal number, and more; and CTAs without a k-block."""
    for cluster_k, k_blocks, schedule in itertools.product((1, 3), (1, 4, 13), (None, "slow_math", "slow_producer")):
        config = DecodeConfig(8, 4, 1, cluster_k, with_c=True)
        check(config, 5, 136, 128 * k_blocks - 16, 1, schedule, is_dependent=True, weight_is_ready=True)


def test_c_may_be_one_row_for_all() -> None:
    """C is a bias: one row that is added to every row."""
    for cluster_k in (1, 2):
        config = DecodeConfig(16, 4, 1, cluster_k, with_c=True)
        p = random_problem(config, 19, 136, 400, seed=2)
        p = p._replace(c=some(p.c)[0].clone().expand_as(p.d))
        run_simulated(config, p, seed=2).checked()


def test_scales_may_have_any_strides() -> None:
    config = DecodeConfig(16, 4, 1, 2)
    p = random_problem(config, 11, 264, 720, seed=3)
    padded = torch.empty(11, 16)
    padded[:, : p.sfa.shape[1]] = p.sfa
    for problem in (*with_other_strides(p), p._replace(sfa=padded[:, : p.sfa.shape[1]])):
        run_simulated(config, problem, seed=3).checked()


def test_a_cta_that_is_alone_gives_the_references_bits() -> None:
    """The CTA adds the k-blocks' sums in one chain, in order. Operands are small integers, so these sums are exact."""
    g = torch.Generator().manual_seed(1)
    for tokens, warpgroups in ((8, 1), (48, 2)):
        config = DecodeConfig(tokens, 4, warpgroups, 1, is_fp32=True)
        a, b = (torch.randint(-2, 3, (rows, 4240), generator=g).to(torch.float8_e4m3fn) for rows in (7, 136))
        sfa, sfb = torch.rand(7, 34, generator=g), torch.rand(2, 34, generator=g)
        outcome = run_simulated(config, dense_problem((a, sfa), (b, sfb), torch.empty(7, 136), None))
        assert torch.equal(outcome.d, outcome.right)


def test_a_row_gives_the_same_bits_among_any_others() -> None:
    """A token's result does not depend on its neighbours, as long as the configuration is the same."""
    config = DecodeConfig(16, 4, 1, 3)
    g = torch.Generator().manual_seed(5)
    a, sfa = per_token_cast_to_fp8(torch.randn(13, 900, generator=g)[:, :896])
    b = per_block_cast_to_fp8(torch.randn(72, 896, generator=g))
    whole = run_simulated(config, dense_problem((a, sfa), b, torch.empty(13, 72, dtype=torch.bfloat16), None))
    for row in (0, 12):
        alone = dense_problem((a[row:][:1], sfa[row:][:1]), b, torch.empty(1, 72, dtype=torch.bfloat16), None)
        assert torch.equal(run_simulated(config, alone).d[0], whole.d[row])


def test_few_configurations_cannot_be_built() -> None:
    assert decode_config(8, 1, 8, 2) is not None
    assert decode_config(128, 2, 1, 2) is None
    assert "clusters of 1 to 8" in (DecodeConfig(8, 4, 1, 9).why_illegal() or "")


# Fine scales of E4M3 weights in the decode kernel, in the simulator: every kind of scales, ragged edges, any values.


KINDS = [(sfa, sfb) for _, sfa, sfb in FINE_OPERANDS]
WORDS = list(Words.__members__.values())
BOTH = Words.A | Words.B
TILES = [(8, 3, 1, 4), (16, 2, 2, 1), (24, 3, 1, 2), (32, 3, 2, 1), (48, 2, 1, 3), (64, 4, 1, 1)]


def config(tokens: int, stages: int, warpgroups: int, split: int, kind: Any = (MX, MX), **more: Any) -> DecodeConfig:
    sfa, sfb = kind
    return DecodeConfig(tokens, stages, warpgroups, split, sfa=sfa, sfb=sfb, **more)


@pytest.mark.parametrize(("kind", "tile"), one_in(4, [(kind, tile) for kind in KINDS for tile in TILES]))
def test_every_kind_in_every_tile_on_ragged_problems(kind: Any, tile: tuple[int, int, int, int]) -> None:
    of = config(*tile, kind=kind, is_fp32=True)
    for m, n, k in ((tile[0] - 3, of.block_n + 24, 1312), (tile[0] + 5, of.block_n + 8, 288)):
        for words in one_in(2, (WORDS[1 + k % 3], Words.NONE)):
            DecodeTrial(of, m, n, k, k, any_scales=True, words=words).run()


@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_sides_scales_in_words(kind: Any, words: Words) -> None:
    """CTAs that split k may begin at any exponent of a word."""
    of = config(16, 3, 1, 5, kind=kind, is_fp32=True)
    DecodeTrial(of, 21, 136, 1312, 3, any_scales=True, words=words).run()


@pytest.mark.parametrize("k", one_in(3, [16, 32, 48, 128, 144, 288, 576, 1024, 1040, 2880]))
def test_any_depth_of_fine_scales(k: int) -> None:
    """Test k below a k-block, past multiples of the 4 or 8 whose scales shared memory holds, CTAs without k-blocks."""
    DecodeTrial(config(16, 3, 1, 1), 5, 72, k, k, any_scales=True, words=BOTH).run()
    DecodeTrial(config(32, 3, 1, 3), 5, 72, k, k).run()


@pytest.mark.parametrize("n", [8, 24, 40, 64, 72, 104, 136, 568])
def test_any_columns(n: int) -> None:
    DecodeTrial(config(8, 3, 2, 1, kind=(PER_ROW, BLOCKS_OF_32)), 3, n, 288, n).run()
    DecodeTrial(config(16, 3, 1, 2, with_c=True), 17, n, 288, n, in_place=True, words=BOTH).run()


@pytest.mark.parametrize("weight_is_ready", [False, True])
def test_the_kernel_ahead_may_still_be_at_work_of_fine_scales(weight_is_ready: bool) -> None:
    of = config(8, 4, 1, 2, kind=(MX, BLOCKS_OF_32))
    DecodeTrial(of, 5, 72, 1296, 1, is_dependent=True, weight_is_ready=weight_is_ready).run()


@pytest.mark.parametrize("words", [Words.NONE, BOTH])
@pytest.mark.parametrize("kind", [(PER_ROW, BLOCKS_OF_32), (MX, MX)])
def test_scales_may_have_any_strides_of_fine_scales(kind: Any, words: Words) -> None:
    of = config(16, 4, 1, 2, kind=kind)
    p = fine_problem(of, 11, 264, 720, seed=3, words=words)
    for problem in with_other_strides(p):
        run_simulated(of, problem, seed=3).checked()


@pytest.mark.parametrize(("kind", "words"), one_in(4, [(kind, words) for kind in KINDS for words in WORDS]))
def test_a_cta_that_is_alone_gives_the_references_bits_of_fine_scales(kind: Any, words: Words) -> None:
    """With any scales the CTA adds its partial sums in one chain, in order. Small integers make partial sums exact."""
    of = config(16, 3, 2, 1, kind=kind, is_fp32=True)
    p = fine_problem(of, 13, 136, 1200, seed=1, any_scales=True, words=words)
    g = torch.Generator().manual_seed(2)
    a, b = (torch.randint(-2, 3, x.shape, generator=g).to(torch.float8_e4m3fn) for x in (p.a, p.b))
    found = run_simulated(of, p._replace(a=a, b=b))
    assert torch.equal(found.d.nan_to_num(7.25), found.right.nan_to_num(7.25))
    assert found.d.isfinite().any()


def test_scales_that_are_infinite_are_so_in_their_own_columns_alone() -> None:
    """Nothing behind the end of k may be multiplied: zero times infinity would give NaN."""
    of = config(16, 3, 1, 1, kind=(PER_ROW, BLOCKS_OF_32), is_fp32=True)
    p = fine_problem(of, 13, 72, 288, seed=4)
    p.a[:, 256:], p.b[:, 256:] = (torch.ones(x.shape[0], 32).to(x.dtype) for x in (p.a, p.b))
    p.sfa[:, 2] = torch.inf
    found = run_simulated(of, p)
    assert bool((found.d == torch.inf).all())
    assert torch.equal(found.d, found.right)


def test_bits_do_not_depend_on_the_tile() -> None:
    configs = [config(*of) for of in ((8, 3, 1, 1), (8, 2, 2, 1), (32, 2, 1, 1), (64, 4, 2, 1))]
    assert_same_bits_by(configs, fine_problem(configs[0], 8, 136, 1312, 5, words=BOTH))


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


# FP4 weights in the decode kernel, in the simulator: every tile, ragged edges, scales that fold and do not.


def fp4_config(tokens: int, stages: int = 3, warpgroups: int = 1, cluster_k: int = 1, **more: Any) -> DecodeConfig:
    return DecodeConfig(tokens, stages, warpgroups, cluster_k, b=E2M1, sfb=MX, **more)


@pytest.mark.parametrize("any_scales", [False, True])
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.parametrize("block_tokens", [8, 16, 24, 32, 48, 64])
def test_every_tile_on_ragged_problems_of_fp4_weights(block_tokens: int, warpgroups: int, any_scales: bool) -> None:
    for cluster_k in one_in(2, (3, 1)):
        of = fp4_config(block_tokens, 3, warpgroups, cluster_k)
        if of.why_illegal() is None:
            for m, n, k in ((block_tokens - 3, 64 * warpgroups + 24, 1312), (block_tokens + 5, 72, 288)):
                DecodeTrial(of, m, n, k, cluster_k, any_scales=any_scales).run()


@pytest.mark.parametrize("k", one_in(2, [32, 64, 96, 128, 160, 2048, 2080, 4160]))
def test_any_depth_of_fp4_weights(k: int) -> None:
    """Test k below a k-block, odd k-blocks, past multiples of the 16 whose scales are held, CTAs without k-blocks."""
    DecodeTrial(fp4_config(16), 5, 72, k, k).run()
    DecodeTrial(fp4_config(8, 2, 2, 4), 5, 136, k, k, any_scales=True).run()


@pytest.mark.parametrize("schedule", ["slow_warps", "slow_producer", "slow_math", "late_loads", "slow_lanes"])
def test_biased_schedules_of_fp4_weights(schedule: str) -> None:
    for seed in one_in(2, (1, 2)):
        DecodeTrial(fp4_config(16, 2, 2), 13, 200, 1312, seed, schedule, any_scales=seed == 2).run()


@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.parametrize("is_fp32", [False, True])
def test_every_kind_of_output_of_fp4_weights(is_fp32: bool, with_c: bool) -> None:
    of = fp4_config(16, 3, 1, 2, is_fp32=is_fp32, with_c=with_c)
    DecodeTrial(of, 19, 72, 544, 1, is_dependent=True, in_place=with_c, weight_is_ready=True).run()


SCALES = {
    "zero": lambda s: s.fill_(0),
    "the largest": lambda s: s.fill_(254),
    "2^30 apart": lambda s: s.copy_(torch.tensor([100, 130]).repeat(s.numel() // 2).view(s.shape)),
    "2^11 apart": lambda s: s.copy_(torch.tensor([120, 131]).repeat(s.numel() // 2).view(s.shape)),
    "2^12 apart": lambda s: s.copy_(torch.tensor([120, 132]).repeat(s.numel() // 2).view(s.shape)),
    "one row of zeros": lambda s: s[3].fill_(0),
    "low": lambda s: s.copy_(torch.arange(s.numel()).view(s.shape) % 9),
}


@pytest.mark.parametrize("name", SCALES)
def test_any_scales_give_what_the_reference_gives(name: str) -> None:
    """The bits must be equal: in a k-block each token has one number that is not zero, so no sum is rounded."""
    of = fp4_config(16, 3, 2, is_fp32=True)
    generator = torch.Generator().manual_seed(1)
    a = torch.zeros(13, 4, 128)
    a.scatter_(2, torch.randint(0, 128, (13, 4, 1), generator=generator), 1.5)
    values = torch.randint(0, 256, (136, 256), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 130, (136, 16), generator=generator, dtype=torch.uint8)
    SCALES[name](scales)
    sfa = torch.full((13, 4), 2.0**-60)
    a, nothing = a.view(13, 512).to(torch.float8_e4m3fn), torch.full((13, 136), torch.nan)
    p = dense_problem((a, sfa), (values, scales), nothing, None)
    d, right = run_simulated(of, p).d, torch.empty_like(p.d)
    reference.compute(p._replace(d=right))
    assert torch.equal(d.nan_to_num(7.25), right.nan_to_num(7.25))
    assert bool(d.isfinite().all()) == (name != "the largest")


def test_a_scale_that_is_no_number_makes_its_row_none() -> None:
    of = fp4_config(16, 3)
    for others in (125, 60):  # the row's other scales fold, then do not
        p = random_problem(of, 13, 72, 544, 3)
        scales = torch.full((72, 17), others, dtype=torch.uint8)
        scales[:, 3::4] = 125
        scales[5, 6] = 255
        p = p._replace(sfb=words_of(scales))
        right = torch.empty_like(p.d)
        reference.compute(p._replace(d=right))
        d = run_simulated(of, p).d
        assert d[:, 5].isnan().all()
        assert right[:, 5].isnan().all()
        assert int(d.isnan().sum()) == 13


def test_scales_may_have_any_strides_of_fp4_weights() -> None:
    of = fp4_config(16, 4, 1, 2)
    for problem in with_other_strides(random_problem(of, 11, 264, 736, 3)):
        run_simulated(of, problem).checked()


def test_bits_do_not_depend_on_the_tile_of_fp4_weights() -> None:
    configs = *(fp4_config(*of) for of in ((8,), (8, 2, 2), (16, 2))), replace(fp4_config(64, 2), ctas_per_sm=1)
    assert_same_bits_by(configs, random_problem(configs[0], 8, 136, 1312, 5))
