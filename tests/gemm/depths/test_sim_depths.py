"""The kernels of k-grouped products in the simulator: one makes maps on the GPU, and fp8_gemm reads these maps.

D is NaN before each product unless D is also C. All of D is compared. Nothing may touch operands or maps before
griddepcontrol_wait, because the second kernel begins while the first kernel still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from helpers import some
from thorough import one_in

from deep_gemm.core.check.layout import align
from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.gemm.choose.tiles import DEPTHS_TILES as TILES
from deep_gemm.gemm.choose.tiles import SHARING_A, Tile
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM, MAX_INLINE_KS
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from lab.sim import SimulationError
from lab.sim import depths as sim
from lab.sim import product as simulated
from lab.sim.depths import DepthsTrial
from lab.sim.product import Outcome

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

KS = [16, 0, 144, 128, 656, 0, 32]
M, N = 100, 72
ADDITIONS = {"fresh": {}, "bf16": {"is_fp32": False}, "c": {"with_c": True}, "in place": {"adds_to_d": True}}
EVERY_TILE = (*TILES, SHARING_A)


def config_for(tile: Tile = TILES[0], /, **output: Any) -> GemmConfig:
    kind = Output(**{"is_fp32": True, **output}, sfb=PER_ROW, work=works.DEPTHS)
    return tile_config(tile.block_m, tile.block_n, kind, cluster_n=tile.cluster_n, k=128)


def check(config: GemmConfig, ks: Sequence[int], m: int = M, n: int = N, seed: int = 1, **how: Any) -> Outcome:
    n = n if config.is_fp32 else align(n, 8)
    return DepthsTrial(config, tuple(ks), seed, m=m, n=n, **{"on_gpu_alone": bool(seed % 2), **how}).passed()


@pytest.mark.parametrize("addition", ADDITIONS)
@pytest.mark.parametrize("tile", EVERY_TILE, ids=lambda tile: tile.name)
def test_every_tile_and_every_c(tile: Tile, addition: str) -> None:
    config = config_for(tile, **ADDITIONS[addition])
    m, n, num_sms = config.block_m + 12, config.block_n + 8, 3 * config.cluster_size
    for on_gpu_alone in (False, True):
        check(config, KS, m, n, on_gpu_alone=on_gpu_alone, num_sms=num_sms)


@pytest.mark.parametrize("addition", ADDITIONS)
@pytest.mark.parametrize(
    "schedule", ["slow_cta", "slow_warps", "slow_producer", "slow_math", "slow_warpgroup", "slow_lanes", "late_loads"]
)
def test_biased_schedules(schedule: str, addition: str) -> None:
    for seed in one_in(2, (1, 2)):
        check(config_for(**ADDITIONS[addition]), [272, 0, 16, 1040], 130, 200, seed, schedule=schedule)


@pytest.mark.parametrize("addition", ADDITIONS)
@pytest.mark.parametrize("ks", [[0, 0], [0], [16], [0, 16], [128] * 9, [2064]], ids=str)
def test_groups_without_depth_and_others(ks: list[int], addition: str) -> None:
    if sum(ks):
        check(config_for(**ADDITIONS[addition]), ks)
    else:  # the host launches nothing if all depths are 0, but depths on the GPU may be 0 beside longer operands
        config = config_for(**ADDITIONS[addition])
        problem = sim.random_problem(config, [128, *ks[1:]], M, N, on_gpu_alone=True)
        outcome = sim.run(sim.compile_both(config), config, problem, ks=torch.tensor(ks, dtype=torch.int32))
        assert torch.equal(outcome.d, torch.zeros_like(outcome.d) if problem.c is None else problem.c)
        assert outcome.result.loads == 0


@pytest.mark.parametrize("k", [16, 384, 2048, 2560])
@pytest.mark.parametrize("tile", EVERY_TILE, ids=lambda tile: tile.name)
def test_all_of_d_is_asked_for_while_a_tile_is_multiplied(tile: Tile, k: int) -> None:
    config = config_for(tile, adds_to_d=True)
    m, n = config.block_m, config.block_n * config.cluster_n
    outcome = check(config, [k, 0], m, n)
    assert outcome.result.prefetches == m // 64 * n // config.panel_columns
    assert check(config_for(tile), [k], m, n).result.prefetches == 0


def test_more_groups_than_one_block_of_threads_makes_maps_for() -> None:
    ks = [16 * (index * 7 % 13) for index in range(70)]
    for on_gpu_alone in (False, True):
        check(config_for(), ks, 20, 24, on_gpu_alone=on_gpu_alone, num_sms=5)


def test_more_groups_than_parameters_hold() -> None:
    ks = torch.zeros(MAX_INLINE_KS + 1, dtype=torch.int32)
    ks[0] = ks[-1] = 32
    check(config_for(), ks.tolist(), 4, 8, on_gpu_alone=True)


@pytest.mark.parametrize(("m", "n"), [(1, 4), (63, 4), (65, 196), (192, 68)])
def test_ragged_sides(m: int, n: int) -> None:
    for addition in ADDITIONS.values():
        check(config_for(**addition), [48, 256], m, n)


def test_one_cta_for_a_tile_and_one_for_all() -> None:
    for num_sms in (1, 2, 3, 50):
        check(config_for(), [144, 0, 400], 130, 132, num_sms=num_sms)


def test_the_same_call_gives_the_same_bits() -> None:
    for addition in one_in(3, list(ADDITIONS.values())):
        config = config_for(**addition)
        first = check(config, KS).d
        problem = sim.random_problem(config, KS, M, N, 1)
        for seed, schedule, num_sms in ((2, "slow_cta", 2), (3, "slow_warps", 7)):
            again = sim.run(sim.compile_both(config), config, problem, seed=seed, schedule=schedule, num_sms=num_sms)
            assert torch.equal(again.d, first)


def test_a_tile_gives_the_same_bits_as_any_other() -> None:
    results = [check(config_for(tile), [144, 656], 130, 132).d for tile in EVERY_TILE]
    assert all(torch.equal(d, results[0]) for d in results)


def test_a_c_with_strides_of_its_own() -> None:
    config = config_for(with_c=True)
    p = sim.random_problem(config, KS, M, N)
    wide = torch.full((len(KS), M + 8, N + 4), float("nan"))
    wide[:, :M, :N] = some(p.c)
    outcome = sim.run(sim.compile_both(config), config, p._replace(c=wide[:, :M, :N]))
    assert outcome.mistakes is None


@pytest.mark.parametrize("wrong", [[1 << 30] * 4, [-16, -1, 272, 1 << 20], [17, 15, 100, 31], [0, 0, 0, 0x7FFFFFFF]])
def test_depths_that_no_caller_may_pass_lead_nowhere(wrong: list[int]) -> None:
    """The host cannot check depths on a GPU. If they are wrong, D may hold anything, but no other memory is touched."""
    for tile, addition in one_in(3, list(product((TILES[0], SHARING_A), ADDITIONS.values()))):
        config = config_for(tile, **addition)
        problem = sim.random_problem(config, [16, 144, 256, 400], M, N, on_gpu_alone=True)
        sim.run(sim.compile_both(config), config, problem, ks=torch.tensor(wrong, dtype=torch.int32))


def test_other_depths_in_the_same_memory() -> None:
    """Depths may have changed when a graph is replayed: the groups' values and scales then begin elsewhere."""
    config = config_for()
    problem = sim.random_problem(config, [256, 128, 384], M, N, on_gpu_alone=True)
    changed = torch.tensor([0, 512, 256], dtype=torch.int32)
    right, _ = simulated.right_and_allowed(problem._replace(ks_tensor=changed), {})
    outcome = sim.run(sim.compile_both(config), config, problem, ks=changed)
    assert torch.allclose(outcome.d, right, rtol=1e-4, atol=1e-3)


# ---- pairs of CTAs that share A


@pytest.mark.parametrize("addition", ADDITIONS)
@pytest.mark.parametrize("schedule", ["slow_cta", "slow_warps", "slow_producer", "slow_math", "late_loads"])
def test_pairs_under_biased_schedules(schedule: str, addition: str) -> None:
    for seed, n in one_in(2, ((1, 252), (2, 300))):
        config = config_for(SHARING_A, **ADDITIONS[addition])
        check(config, [272, 0, 16, 1040], 260, n, seed, schedule=schedule, num_sms=4)


@pytest.mark.parametrize("addition", ADDITIONS)
@pytest.mark.parametrize(("m", "n"), [(1, 4), (100, 128), (128, 132), (300, 256), (260, 300), (20, 420), (600, 520)])
def test_pairs_with_and_without_a_second_tile(m: int, n: int, addition: str) -> None:
    """With an odd number of columns of tiles, the second tile of the last pair is outside of D."""
    check(config_for(SHARING_A, **ADDITIONS[addition]), [48, 256], m, n, num_sms=4)


@pytest.mark.parametrize("addition", one_in(4, list(ADDITIONS)))
def test_one_pair_for_a_tile_and_one_for_all(addition: str) -> None:
    config = config_for(SHARING_A, **ADDITIONS[addition])
    results = [check(config, KS, 300, 300, num_sms=num_sms).d for num_sms in one_in(3, (2, 3, 6, 50))]
    assert all(torch.equal(d, results[0]) for d in results)


@pytest.mark.parametrize("addition", one_in(3, list(ADDITIONS)))
def test_no_cluster_straddles_two_groups(addition: str) -> None:
    """If a group has an odd number of tiles, no CTA may pair its last tile with a tile of the next group."""
    config = config_for(SHARING_A, **ADDITIONS[addition])
    for ks in ([128, 256], [256, 128, 0, 16, 1040]):
        for n in (72, 300):
            check(config, ks, 192, n, num_sms=4)


@pytest.mark.parametrize("ks", [[0, 0], [0, 128]], ids=str)
def test_pairs_where_groups_have_no_depth(ks: list[int]) -> None:
    for addition in ADDITIONS.values():
        config = config_for(SHARING_A, **addition)
        problem = sim.random_problem(config, [128, 0], 300, 256, on_gpu_alone=True)
        right, _ = simulated.right_and_allowed(problem._replace(ks_tensor=torch.tensor(ks, dtype=torch.int32)), {})
        outcome = sim.run(sim.compile_both(config), config, problem, num_sms=4, ks=torch.tensor(ks, dtype=torch.int32))
        assert torch.allclose(outcome.d, right, rtol=1e-4, atol=1e-3)


# ---- missing steps that would cause errors on a GPU


@pytest.mark.parametrize(
    ("header", "line", "message"),
    [
        ("k_group_maps.cuh", "  ptx::fence_tensormap_release();\n", "fence_tensormap_release has not shown it to TMA"),
        (
            "work/k_scheduler.cuh",
            "      ptx::fence_tensormap_acquire(&next.k_group->map_b);\n",
            "prefetch_tensormap uses a tensor map that a kernel made, byte 128 of `k_groups` .*, "
            "without fence_tensormap_acquire",
        ),
        ("k_group_maps.cuh", "  ptx::griddepcontrol_wait();\n", "the kernel before may still be using"),
        ("fp8_gemm.cuh", "  ptx::griddepcontrol_wait();\n", "the kernel before may still be using"),
    ],
)
def test_a_missing_step_is_noticed(header: str, line: str, message: str) -> None:
    config = config_for()
    text = FP8_GEMM.headers(config)[header]
    assert text.count(line) == 1
    edits = {header: text.replace(line, "")}
    kernels = sim.compile_both(config, edits)
    problem = sim.random_problem(config, KS, M, N, on_gpu_alone=True)
    with pytest.raises(SimulationError, match=message):
        sim.run(kernels, config, problem)
