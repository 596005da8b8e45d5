"""Grouped BF16 products in the simulator: groups of rows of each kind, and groups along k."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep_gemm.gemm.bf16_depths import parts_of
from deep_gemm.gemm.choose.bf16 import ACTIVATED
from deep_gemm.gemm.config.bf16 import bf16_config
from deep_gemm.gemm.config.tall import Majors
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from deep_gemm.gemm.kinds.works import MOST_COUNTED
from lab.sim.bf16_counted import Bf16CountedTrial
from lab.sim.bf16_depths import Bf16DepthsTrial
from lab.sim.bf16_rows import Bf16RowsTrial
from lab.sim.rows import CANARY

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

NT, NN, TN = Majors(), Majors(b_is_mn=True), Majors(True, True)
IDS = (*[0] * 70, *[-1] * 58, *[1] * 200, *[-1] * 3, *[3] * 5)
LAYOUTS = {works.IDS: IDS, works.ENDS: (70, 128, 333), works.COUNTS: (70, 0, 200)}


@pytest.mark.parametrize("groups", LAYOUTS, ids=lambda groups: groups.name)
@pytest.mark.parametrize("majors", [NT, NN], ids=lambda majors: majors.name)
@pytest.mark.parametrize("tile", [(64, 64), (128, 64), (128, 256), (256, 128)])
@pytest.mark.parametrize("schedule", [None, "slow_math", "late_loads"])
def test_groups_of_rows(tile: tuple[int, int], majors: Majors, groups: works.Work, schedule: str | None) -> None:
    config = bf16_config(*tile, Output(work=groups), majors)
    Bf16RowsTrial(config, LAYOUTS[groups], 1, schedule, n=136, k=200).run()


@pytest.mark.parametrize("majors", [NT, NN], ids=lambda majors: majors.name)
@pytest.mark.parametrize("tile", [(64, 128), (128, 256)])
@pytest.mark.parametrize("schedule", [None, "slow_math", "late_loads", "slow_lanes"])
def test_activated_rows(tile: tuple[int, int], majors: Majors, schedule: str | None) -> None:
    config = bf16_config(*tile, ACTIVATED, majors)
    Bf16RowsTrial(config, LAYOUTS[works.ENDS], 1, schedule, n=136, k=200, limit=0.5).run()


@pytest.mark.parametrize("groups", [works.IDS, works.ENDS], ids=lambda groups: groups.name)
def test_padding_is_zeroed_where_asked(groups: works.Work) -> None:
    config = bf16_config(64, 64, Output(is_fp32=True, work=groups))
    Bf16RowsTrial(config, LAYOUTS[groups], n=72, k=72, zero_padding=True).run()


@pytest.mark.parametrize("tile", [(64, 64), (128, 128)])
def test_rows_without_a_group_cost_nothing(tile: tuple[int, int]) -> None:
    """Rows without a group are neither loaded nor multiplied. A block that holds only such rows is not written."""
    config, found = bf16_config(*tile, Output(work=works.IDS)), []
    for none in (0, 58, 700):
        layout = (*[-1] * none, *[0] * 70, *[-1] * none, *[1] * 100, *[-1] * none)
        outcome = Bf16RowsTrial(config, layout, n=72, k=200, zero_padding=True, num_sms=3).passed()
        found.append((outcome.result.loads, outcome.result.products))
        assert (none == 700) == bool((outcome.d == CANARY).all(-1).any())
    assert len(set(found)) == 1


OUTPUTS = (
    Output(work=works.PARTS),
    Output(is_fp32=True, with_c=True, work=works.PARTS),
    Output(is_fp32=True, adds_to_d=True, work=works.PARTS),
)


@pytest.mark.parametrize("ks", [(128, 0, 320, 64), (0, 64), (64,) * 5])
@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.name)
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2)])
def test_groups_along_k(cluster: tuple[int, int], output: Output, ks: tuple[int, ...]) -> None:
    config = bf16_config(128, 128, output, TN, *cluster)
    Bf16DepthsTrial(config, ks, 264, 136, 2).run()


def test_more_groups_along_k_than_a_launch_takes() -> None:
    config = bf16_config(64, 64, OUTPUTS[0], TN)
    Bf16DepthsTrial(config, tuple(64 * (i % 2) for i in range(130)), 8, 8).run()


def test_the_deepest_parts_come_first() -> None:
    assert parts_of((64, 0, 192)) == [(1, 3, 2), (0, 1, 0), (1, 0, 1)]


@pytest.mark.parametrize("cluster", [(2, 1), (1, 2)])
def test_no_cluster_straddles_two_groups(cluster: tuple[int, int]) -> None:
    """If a group has an odd number of tiles, no CTA may pair its last tile with a tile of the next group."""
    config = bf16_config(128, 128, Output(is_fp32=True, adds_to_d=True, work=works.PARTS), TN, *cluster)
    Bf16DepthsTrial(config, (384, 256), 296, 296, 3, num_sms=4).run()


# Groups along k of BF16 whose depths are on the GPU: edges within k-blocks, orders, clusters.


OF_COUNTED = [replace(output, work=works.COUNTED) for output in OUTPUTS]


@pytest.mark.parametrize("ks", [(128, 0, 3, 200), (0, 1), (64, 65, 63, 64, 64), (0, 0)])
@pytest.mark.parametrize(
    ("output", "cluster"),
    [*((output, (1, 1)) for output in OF_COUNTED), (OF_COUNTED[1], (2, 1)), (OF_COUNTED[2], (1, 2))],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.parametrize("on_gpu_alone", [True, False])
@pytest.mark.parametrize("schedule", [None, "late_loads"])
def test_groups_along_k_of_any_depth(
    ks: tuple[int, ...], output: Output, cluster: tuple[int, int], on_gpu_alone: bool, schedule: str | None
) -> None:
    """Rows behind the last group are NaN, so the test shows that the last k-block ends exactly with its group."""
    config = bf16_config(128, 128, output, TN, *cluster)
    Bf16CountedTrial(config, ks, 264, 136, 2, schedule, on_gpu_alone).run()


@pytest.mark.parametrize("cluster", [(2, 1), (1, 2)])
@pytest.mark.parametrize("on_gpu_alone", [True, False])
def test_no_cluster_straddles_two_counted_groups(cluster: tuple[int, int], on_gpu_alone: bool) -> None:
    """If a group has an odd number of tiles, no CTA may pair its last tile with a tile of the next group."""
    config = bf16_config(128, 128, OF_COUNTED[2], TN, *cluster)
    Bf16CountedTrial(config, (384, 256), 296, 296, 3, on_gpu_alone=on_gpu_alone, more_rows=0, num_sms=4).run()


def test_more_groups_than_a_launch_takes() -> None:
    config = bf16_config(64, 64, OF_COUNTED[0], TN)
    Bf16CountedTrial(config, tuple(i % 3 for i in range(MOST_COUNTED + 5)), 8, 8, more_rows=0).run()


def test_depths_that_are_wrong_lead_nowhere_outside() -> None:
    """No check can read depths on a GPU. Depths past the operands' end are cut off, and other groups stay correct."""
    config = bf16_config(64, 64, OF_COUNTED[1], TN)
    Bf16CountedTrial(config, (70, 0, 30, 0), 72, 72, 3, told=(70, -5, 1000, 2**31 - 1)).run()
