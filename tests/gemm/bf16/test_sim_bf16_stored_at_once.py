"""BF16 kernels as NVRTC 12.8 compiles them, in the simulator: each tile is stored before the next one is looked for."""

from __future__ import annotations

import pytest
from thorough import ends

from deep_gemm.gemm.choose.bf16 import SUM_OUTPUT
from deep_gemm.gemm.config.bf16 import bf16_config
from deep_gemm.gemm.config.tall import Majors
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from lab.sim.bf16 import Bf16Trial
from lab.sim.bf16_counted import Bf16CountedTrial
from lab.sim.bf16_depths import Bf16DepthsTrial
from lab.sim.bf16_rows import Bf16RowsTrial
from lab.sim.bf16_sums import SumTrial
from lab.sim.product import ProductTrial

pytestmark = pytest.mark.host_compiler
TN = Majors(True, True)
FILE, CHOICE = "tile.cuh", "!kHasScales && kCudaRelease < 1209"


def run(trial: ProductTrial) -> None:
    text = trial.headers()[FILE]
    assert text.count(CHOICE) == 1
    trial.run({FILE: text.replace(CHOICE, "true")})


PRODUCTS = {
    "dense": bf16_config(128, 64, Output(with_c=True)),
    "several units": bf16_config(256, 128, Output(is_fp32=True)),
    "a cluster that shares B": bf16_config(128, 128, Output(), TN, cluster_m=2),
    "slices in turn": bf16_config(64, 64, Output(), slices=3),
    "a CTA for each slice": bf16_config(64, 32, Output(), cluster_k=3, slices=3),
    "heads": bf16_config(64, 64, Output(is_fp32=True, adds_to_d=True, work=works.HEADS)),
}


@pytest.mark.parametrize("name", ends(list(PRODUCTS)))
@pytest.mark.parametrize("schedule", [None, "slow_math", "late_loads"])
def test_products(name: str, schedule: str | None) -> None:
    run(Bf16Trial(PRODUCTS[name], 264, 136, 456, 1, schedule))


@pytest.mark.parametrize("tile", [(64, 64), (256, 128)])
@pytest.mark.parametrize(
    ("groups", "layout"),
    [(works.IDS, (-1, *[0] * 300, *[1] * 5)), (works.COUNTS, (70, 0, 200))],
    ids=["ids", "counts"],
)
def test_rows_of_groups(tile: tuple[int, int], groups: works.Work, layout: tuple[int, ...]) -> None:
    run(Bf16RowsTrial(bf16_config(*tile, Output(work=groups)), layout, 136, 200, 2))


def test_groups_along_k() -> None:
    config = bf16_config(64, 64, Output(is_fp32=True, with_c=True, work=works.PARTS), TN)
    run(Bf16DepthsTrial(config, (64, 0, 192)))
    config = bf16_config(64, 64, Output(is_fp32=True, work=works.COUNTED), TN)
    run(Bf16CountedTrial(config, (3, 0, 100)))


def test_a_sum_over_products() -> None:
    run(SumTrial(bf16_config(64, 64, SUM_OUTPUT), 4, 5, 72, 136, 192))
