"""What the host decides of grouped products on a GPU, as far as a machine without one can tell."""

from __future__ import annotations

import pytest
import torch

from deep_gemm import reference
from deep_gemm.choose.config import Groups, Output, tile_config
from deep_gemm.choose.rows import reachable_grouped, select_grouped
from deep_gemm.gpus import H200
from deep_gemm.kernels import fp8_gemm_grouped
from deep_gemm.kernels import rows as grouped
from deep_gemm.sim import rows as sim

BY_IDS, BY_COUNTS = Output(groups=Groups.IDS), Output(groups=Groups.COUNTS)


def test_tiles_are_as_high_as_groups_need() -> None:
    heights = [select_grouped(4, rows, 4096, 7168, BY_IDS, H200).block_m for rows in (2, 64, 256, 1024, 8192)]
    assert heights == sorted(heights)
    assert heights[0] == 64
    assert heights[-1] == 128


def test_masked_groups_of_about_192_rows_are_one_tile() -> None:
    assert select_grouped(32, 192, 4096, 7168, BY_COUNTS, H200).block_m == 256
    assert select_grouped(32, 192, 4096, 7168, BY_IDS, H200).block_m == 128


@pytest.mark.parametrize("rows", [0, 0.01, 1, 20, 1e6])
@pytest.mark.parametrize("output", [BY_IDS, BY_COUNTS, Output(True, sfb_is_per_row=True, groups=Groups.ENDS)])
def test_what_is_chosen_is_reachable(rows: float, output: Output) -> None:
    for num_groups in (1, 256):
        for k in (16, 512, 7168):
            assert select_grouped(num_groups, rows, 576, k, output, H200) in reachable_grouped()


def test_a_configuration_for_other_groups_is_refused() -> None:
    p = fp8_gemm_grouped.grouped_problem(sim.random_problem(tile_config(64, 64, BY_IDS), [0, 0, 1], 64, 128))
    with pytest.raises(ValueError, match="is for rows that are grouped otherwise"):
        grouped._plan(p, 1.0, tile_config(64, 64, BY_COUNTS))
    with pytest.raises(ValueError, match="is for another type of D"):
        grouped._plan(p, 1.0, tile_config(64, 64, Output(True, groups=Groups.IDS)))


@pytest.mark.parametrize("zero_padding", [False, True])
@pytest.mark.parametrize(
    ("kind", "layout", "rows"),
    [
        (Groups.IDS, [0, 0, -1, 1] + [-1] * 300 + [1], None),
        (Groups.ENDS, [3, 3, 130, 384], 400),
        (Groups.ENDS, [0, 300], 310),
        (Groups.COUNTS, [0, 3, 7], 7),
    ],
)
def test_a_product_of_depth_zero_writes_the_rows_that_any_product_writes(
    kind: Groups, layout: list[int], rows: int | None, zero_padding: bool
) -> None:
    config = tile_config(64, 64, Output(groups=kind))
    p = sim.random_problem(config, layout, 64, 128, rows=rows, zero_padding=zero_padding)
    p = p._replace(a=p.a[..., :0], sfa=p.sfa[..., :0], b=p.b[..., :0], sfb=p.sfb[..., :0], k=0)
    right = p._replace(d=p.d.clone())
    run = reference.masked if kind == Groups.COUNTS else reference.contiguous
    run(right)  # type: ignore[arg-type]
    grouped._write_zeros(p)
    assert torch.equal(p.d, right.d)
