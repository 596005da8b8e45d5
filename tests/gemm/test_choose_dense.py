"""The configuration that runs a product: always a legal one, the same each time, with reasons."""

from __future__ import annotations

import cProfile
import itertools
import os
import pstats
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.core.gpu import GPUS, H20, H200, Gpu
from deep_gemm.gemm.choose.cost import BANDS, on_weight
from deep_gemm.gemm.choose.fp8 import chosen_tile, menu_of, select
from deep_gemm.gemm.choose.tiles import tiles_for
from deep_gemm.gemm.choose.timings import timings_of
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.explain import Question
from deep_gemm.gemm.kinds.output import OUTPUTS_OF, USUAL_OPERANDS, Output, Sizes
from lab.configs import reachable_decode
from lab.configs import reachable_dense as reachable

OUTPUTS = [*OUTPUTS_OF[USUAL_OPERANDS], Output(sfb=PER_ROW), Output(is_fp32=True, adds_to_d=True, sfb=PER_ROW)]
MAX_KERNELS = 12
WEIGHTS = [(2112, 7168), (4096, 7168), (7168, 2048), (576, 7168), (24576, 1536)]
REACHABLE = {*reachable(), *reachable_decode()}

rows = st.one_of(st.integers(1, 8192), st.sampled_from([1, 63, 64, 65, 127, 128, 129, 8191, 8192]))
columns = st.integers(1, 8192).map(lambda i: 4 * i)
depths = st.integers(1, 1024).map(lambda i: 16 * i)
gpus = st.builds(lambda gpu, num_sms: replace(gpu, num_sms=num_sms), st.sampled_from(GPUS), st.integers(2, 132))


@settings(max_examples=300)
@given(rows, columns, depths, st.sampled_from(OUTPUTS), st.one_of(st.sampled_from(GPUS), gpus))
def test_the_choice_is_legal_and_reachable(m: int, n: int, k: int, output: Output, gpu: Gpu) -> None:
    config = select(Sizes(m, n, k), output, gpu)
    assert config.why_illegal() is None
    assert config in REACHABLE
    assert config.is_fp32 == output.is_fp32
    takes_c = config.with_c if isinstance(config, DecodeConfig) else config.with_c or config.adds_to_d
    assert takes_c == (output.with_c or output.adds_to_d)
    assert config.cluster_k == 1 or k > 128 * config.cluster_k, "more CTAs than blocks of k"
    if isinstance(config, GemmConfig):
        assert config.sfb == output.sfb
        assert config.has_tail or ceil_div(k, 128) % config.run_k_blocks == 0, "no code for this number of k-blocks"
        assert config.cluster_size <= gpu.num_sms
        assert m > config.block_m or config.cluster_m == 1, "a cluster along m for a single row of tiles"
        assert n > config.block_n or config.cluster_n == 1, "a cluster along n for a single column of tiles"


@settings(max_examples=100)
@given(rows, columns, depths, st.sampled_from(OUTPUTS), st.sampled_from(GPUS))
def test_k_is_not_split_where_bits_must_not_depend_on_m(m: int, n: int, k: int, output: Output, gpu: Gpu) -> None:
    assert select(Sizes(m, n, k), output, gpu, split_k=False).cluster_k == 1


@settings(max_examples=100)
@given(rows, columns, depths, st.sampled_from(OUTPUTS))
def test_some_of_the_sms_are_given_a_kernel_whose_grid_follows(m: int, n: int, k: int, output: Output) -> None:
    config = select(Sizes(m, n, k), output, H200, whole_gpu=False)
    assert isinstance(config, GemmConfig)
    if isinstance(select(Sizes(m, n, k), output, H200), GemmConfig):
        assert config == select(Sizes(m, n, k), output, H200), "another configuration must be compiled"


def test_another_process_with_other_hashes_chooses_the_same() -> None:
    chosen = (
        "[select(Sizes(m, n, k), Output(with_c=with_c), H200).name for with_c in (False, True)"
        " for n, k in ((2112, 7168), (576, 7168), (7168, 2048)) for m in (1, 17, 64, 200, 777, 4096)]"
    )
    code = (
        "from deep_gemm.gemm.kinds.output import Output; from deep_gemm.core.gpu import H200;"
        "from deep_gemm.gemm.choose.fp8 import select; from deep_gemm.gemm.kinds.output import Sizes;"
        f"print({chosen})"
    )
    seed, root = str(1 + (os.environ.get("PYTHONHASHSEED") == "1")), Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    told = subprocess.check_output([sys.executable, "-c", code], env=environment, cwd=root, text=True)
    here = eval(chosen)
    assert told == f"{here}\n"
    assert len(here) == 36


@settings(max_examples=50)
@given(rows, columns, depths, st.sampled_from(OUTPUTS), gpus)
def test_the_same_question_has_the_same_answer(m: int, n: int, k: int, output: Output, gpu: Gpu) -> None:
    first = select(Sizes(m, n, k), output, gpu)
    assert Question(m, n, k, output, 1, gpu).candidates() == Question(m, n, k, output, 1, gpu).candidates()
    menu_of.cache_clear()
    assert select(Sizes(m, n, k), output, gpu) == first


@settings(max_examples=100)
@given(rows, columns, depths, st.sampled_from(OUTPUTS), st.one_of(st.sampled_from(GPUS), gpus))
def test_candidates_are_all_tiles_with_reasons_against_some(m: int, n: int, k: int, output: Output, gpu: Gpu) -> None:
    found = Question(m, n, k, output, 1, gpu).candidates()
    assert {candidate.tile for candidate in found} == set(tiles_for(output))
    assert found[0].why_not is None
    assert found[0].cost_us < float("inf")
    for candidate in found:
        assert (candidate.why_not is None) == (candidate.cost_us < float("inf"))
        assert candidate.why_not != ""
        assert candidate.rounds >= 1


@pytest.mark.parametrize(
    ("shape", "tile", "reason"),
    [
        ((64, 4096, 7168), "128x256/m2", "m is one tile"),
        ((129, 4096, 7168), "64x8 2/SM", "too many rows"),
        ((8, 4096, 512), "64x8/k8 2/SM", "k too short to split"),
    ],
)
def test_a_rejection_says_why(shape: tuple[int, int, int], tile: str, reason: str) -> None:
    (found,) = [one for one in Question(*shape, Output(), 1, H200).candidates() if one.tile.name == tile]
    assert found.why_not == reason


def test_a_cluster_needs_as_many_sms() -> None:
    found = Question(8, 4096, 7168, Output(), 1, replace(H200, num_sms=4)).candidates()
    assert {one.why_not for one in found if one.tile.cluster_k == 5} == {"too few SMs for a cluster"}


@pytest.mark.parametrize("m", [512, 1024, 4095])
def test_rows_that_straddle_lines_of_the_l2_are_loaded_once_for_two_ctas(m: int) -> None:
    straddling, aligned = (select(Sizes(m, 7184, k), Output(), H200) for k in (2064, 2048))
    assert isinstance(straddling, GemmConfig)
    assert isinstance(aligned, GemmConfig)
    assert straddling.cluster_m * straddling.cluster_n == 2
    assert straddling.block_m * straddling.block_n >= aligned.block_m * aligned.block_n


def test_fewer_sms_cost_time() -> None:
    gpus_by_size = [replace(H200, num_sms=num_sms) for num_sms in (132, 64, 16, 2)]
    times = [Question(4096, 4096, 4096, Output(), 1, gpu).candidates()[0].multiply_us for gpu in gpus_by_size]
    assert times == sorted(times)


def test_a_gpu_with_slower_tensor_cores_costs_more() -> None:
    fast, slow = (Question(4096, 4096, 4096, Output(), 1, gpu).candidates()[0].cost_us for gpu in (H200, H20))
    assert slow > 3 * fast


@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_few_kernels_serve_one_weight_whatever_m(n: int, k: int) -> None:
    chosen = {select(Sizes(m, n, k), Output(), H200).name for m in range(1, 8193)}
    assert len(chosen) <= MAX_KERNELS, f"{len(chosen)} kernels to compile for one weight: {sorted(chosen)}"


@settings(max_examples=50)
@given(rows, columns, depths, st.sampled_from(OUTPUTS))
def test_the_choice_has_the_lowest_cost_on_its_menu(m: int, n: int, k: int, output: Output) -> None:
    """Costs are compared at the largest m of a band. The next test shows that the whole band has this choice."""
    end = min((end for end in BANDS if end >= m), default=BANDS[-1])
    on_menu = {offer.tile for offer in menu_of(n, k, output, H200).offers}
    costs = {one.tile: one.cost_us for one in Question(end, n, k, output, 1, H200).candidates() if one.tile in on_menu}
    assert costs[chosen_tile(Sizes(m, n, k), output, H200)] == min(costs.values())


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.name)
def test_multiplying_takes_the_same_for_each_m_of_a_band(output: Output) -> None:
    for tile in tiles_for(output):
        offer = on_weight(tile, 2112, 7168, output, H200, timings_of(H200))
        first, last = (offer.multiply_us(ms) for ms in ([end + 1 for end in (0, *BANDS[:-1])], BANDS))
        assert first == last


@settings(max_examples=50)
@given(columns, depths, st.sampled_from(OUTPUTS))
def test_the_tile_that_multiplies_fastest_costs_least(n: int, k: int, output: Output) -> None:
    found = [one for one in Question(1000, n, k, output, 1, H200).candidates() if one.why_not is None]
    costs = [one.cost_us for one in sorted(found, key=lambda one: one.multiply_us)]
    assert all(later > 0.999999 * before for before, later in itertools.pairwise(costs)), "but for rounding"


def test_a_menu_costs_little_more_than_all_tiles() -> None:
    lost = []
    for n, k in WEIGHTS:
        on_menu = {offer.tile for offer in menu_of(n, k, Output(), H200).offers}
        for m in (1, 5, 17, 40, 100, 200, 500, 900, 1500, 3000, 6000):
            costs = {one.tile: one.cost_us for one in Question(m, n, k, Output(), 1, H200).candidates()}
            lost.append(min(us for tile, us in costs.items() if tile in on_menu) / min(costs.values()) - 1)
    assert sum(lost) / len(lost) < 0.01
    assert max(lost) < 0.25


def test_a_weight_that_is_new_is_chosen_for_within_milliseconds() -> None:
    """The choice makes no tensors, which break compilers and fake modes, and needs few function calls."""
    menu_of.cache_clear()
    with cProfile.Profile() as profile:
        select(Sizes(100, 4104, 7168), Output(), H200)
    calls = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    assert calls < 8000, "an earlier version needed 87,000"
