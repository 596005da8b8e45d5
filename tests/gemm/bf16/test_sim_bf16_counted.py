"""Groups along k of BF16 of depths that the GPU counts, in the simulator: edges within k-blocks, orders, clusters."""

from __future__ import annotations

import pytest

from deep_gemm.gemm.config.bf16 import bf16_config
from deep_gemm.gemm.config.tall import Majors
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from deep_gemm.gemm.kinds.works import MOST_COUNTED
from lab.sim.bf16_counted import Bf16CountedTrial

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]
TN = Majors(True, True)
OUTPUTS = (
    Output(work=works.COUNTED),
    Output(is_fp32=True, with_c=True, work=works.COUNTED),
    Output(is_fp32=True, adds_to_d=True, work=works.COUNTED),
)


@pytest.mark.parametrize("ks", [(128, 0, 3, 200), (0, 1), (64, 65, 63, 64, 64), (0, 0)])
@pytest.mark.parametrize(
    ("output", "cluster"),
    [*((output, (1, 1)) for output in OUTPUTS), (OUTPUTS[1], (2, 1)), (OUTPUTS[2], (1, 2))],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.parametrize("on_gpu_alone", [True, False])
@pytest.mark.parametrize("schedule", [None, "late_loads"])
def test_groups_along_k_of_any_depth(
    ks: tuple[int, ...], output: Output, cluster: tuple[int, int], on_gpu_alone: bool, schedule: str | None
) -> None:
    """Rows behind the last group are NaN: that a k-block ends with its group is checked to the last row."""
    config = bf16_config(128, 128, output, TN, *cluster)
    Bf16CountedTrial(config, ks, 264, 136, 2, schedule, on_gpu_alone).run()


@pytest.mark.parametrize("cluster", [(2, 1), (1, 2)])
@pytest.mark.parametrize("on_gpu_alone", [True, False])
def test_no_cluster_straddles_two_groups(cluster: tuple[int, int], on_gpu_alone: bool) -> None:
    """Where a group has an odd number of tiles, its last one has no neighbour, and takes none of the next group."""
    config = bf16_config(128, 128, OUTPUTS[2], TN, *cluster)
    Bf16CountedTrial(config, (384, 256), 296, 296, 3, on_gpu_alone=on_gpu_alone, more_rows=0, num_sms=4).run()


def test_more_groups_than_a_launch_takes() -> None:
    config = bf16_config(64, 64, OUTPUTS[0], TN)
    Bf16CountedTrial(config, tuple(i % 3 for i in range(MOST_COUNTED + 5)), 8, 8, more_rows=0).run()


def test_depths_that_are_wrong_lead_nowhere_outside() -> None:
    """Nobody can check them. What they say too much is cut off, and the others are what they would be."""
    config = bf16_config(64, 64, OUTPUTS[1], TN)
    Bf16CountedTrial(config, (70, 0, 30, 0), 72, 72, 3, told=(70, -5, 1000, 2**31 - 1)).run()
