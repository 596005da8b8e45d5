"""What the host decides of grouped products on a GPU, as far as a machine without one can tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_gpu import install, on_gpu
from helpers import pointer_members
from torch import Tensor

import deep_gemm
from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.core.gpu import H200
from deep_gemm.core.params import Params
from deep_gemm.gemm import launch as kernels
from deep_gemm.gemm import reference
from deep_gemm.gemm.api import grouped
from deep_gemm.gemm.choose.fp8 import select
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kernel import params_of
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output, Sizes
from deep_gemm.gemm.plan import PLANS
from deep_gemm.gemm.problem import write_without_depth
from lab.configs import reachable_grouped, reachable_grouped_decode
from lab.sim import rows as sim

BY_IDS, BY_COUNTS = Output(work=works.IDS), Output(work=works.COUNTS)
ROWS_PARAMS = params_of(tile_config(64, 64, BY_IDS))
DECODE_PARAMS = params_of(reachable_grouped_decode()[0])


def test_tiles_are_as_high_as_groups_need() -> None:
    heights = [select(Sizes(rows, 4096, 7168, 4), BY_IDS, H200).rows_of_tile for rows in (2, 64, 256, 1024, 8192)]
    assert heights == sorted(heights)
    assert heights[:2] == [8, 64]
    assert heights[-1] == 128


def test_masked_groups_of_about_192_rows_are_one_tile_and_larger_ones_none_of_256() -> None:
    assert select(Sizes(192, 4096, 7168, 32), BY_COUNTS, H200).rows_of_tile == 256
    assert select(Sizes(384, 4096, 7168, 12), BY_COUNTS, H200).rows_of_tile == 128
    assert select(Sizes(192, 4096, 7168, 32), BY_IDS, H200).rows_of_tile == 128


@pytest.mark.parametrize("rows", [0, 0.01, 1, 20, 1e6])
@pytest.mark.parametrize("output", [BY_IDS, BY_COUNTS, Output(is_fp32=True, sfb=PER_ROW, work=works.ENDS)])
def test_what_is_chosen_is_reachable(rows: float, output: Output) -> None:
    reached = {*reachable_grouped(), *reachable_grouped_decode()}
    for num_groups in (1, 256):
        for k in (16, 512, 7168):
            assert select(Sizes(rows, 576, k, num_groups), output, H200) in reached


def test_a_configuration_for_other_groups_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    p = sim.random_problem(tile_config(64, 64, BY_IDS), [0, 0, 1], 64, 128)
    with pytest.raises(ValueError, match="is for another output: work"):
        kernels.run(p, tile_config(64, 64, BY_COUNTS))
    with pytest.raises(ValueError, match="is for another output: "):
        kernels.run(p, tile_config(64, 64, Output(is_fp32=True, work=works.IDS)))


# Plans


def operands(m: int, layout: list[int]) -> tuple[Any, Any, Tensor, Tensor]:
    a, b = per_token_cast_to_fp8(torch.zeros(m, 512)), per_block_cast_to_fp8(torch.zeros(3, 256, 512))
    a = on_gpu(a[0]), get_mn_major_tma_aligned_tensor(a[1])
    return a, b, on_gpu(torch.zeros(m, 256, dtype=torch.bfloat16)), torch.tensor(layout, dtype=torch.int32)


@pytest.mark.parametrize("is_ends", [False, True])
@pytest.mark.parametrize(
    ("ms", "params"),
    [
        ((600, 601, 61, 63, 604, 600, 700), ROWS_PARAMS),
        ((20, 21, 1, 3, 24, 20, 28), DECODE_PARAMS),
    ],
)
def test_a_plan_of_other_rows_is_what_would_be_made_anew(
    monkeypatch: pytest.MonkeyPatch, ms: tuple[int, ...], params: Params, is_ends: bool
) -> None:
    gpu = install(monkeypatch)
    launched = []
    for is_derived in (True, False):
        PLANS.clear()
        gpu.launches.clear()
        if not is_derived:
            monkeypatch.setattr(grouped.CONTIGUOUS_NT, "derive", None)
        for m in ms:
            a, b, d, layout = operands(m, [0, 0, m] if is_ends else [0] * m)
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, use_psum_layout=is_ends)
            assert gpu.last.words[params.word("groups.layout")] == layout.data_ptr()
            assert gpu.last.words[params.word("d")] == d.data_ptr()
        zeros = {params.word(name): 0 for name in pointer_members(params)}
        launched.append([(x.grid, {**dict(enumerate(x.words)), **zeros}, bool(x.maps)) for x in gpu.launches])
    derived, anew = ([launch[:2] for launch in each] for each in launched)
    assert derived == anew
    are_encoded = [launch[2] for launch in launched[0]]
    assert are_encoded[0]
    assert not are_encoded[1]
    assert not are_encoded[5]
    assert sum(launch[2] for launch in launched[1]) == 6, "one call is like the first"


def test_groups_that_share_a_weight_share_it_in_the_map_too(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch)
    a, (b, sfb), d, layout = operands(600, [0] * 300 + [1] * 200 + [2] * 100)
    shared = on_gpu(b[:1].expand(b.shape)), sfb[:1].expand(sfb.shape)
    for _ in range(2):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, shared, d, layout)
        assert gpu.last.words[ROWS_PARAMS.word("map_b")] == b.data_ptr()
    of_b = next(x for x in gpu.launches[0].maps if x.sizes == (512, 256, 3))
    assert of_b.strides == (512, 0)
    assert gpu.plans == 1


def test_a_layout_that_was_left_out_is_made_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch)
    a, b, d, _ = operands(600, [0] * 600)
    for _ in range(2):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, num_groups=3)
        assert gpu.last.words[ROWS_PARAMS.word("groups.layout")] != 0
    assert gpu.plans == 0


def test_a_layout_inside_of_the_output_is_looked_at_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    a, b, d, layout = operands(600, [0] * 600)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)
    inside = d.view(torch.int32).flatten()[:600]
    with pytest.raises(ValueError, match="d: expected memory that does not overlap grouped_layout"):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, inside)


@pytest.mark.parametrize("zero_padding", [False, True])
@pytest.mark.parametrize(
    ("kind", "layout", "rows"),
    [
        (works.IDS, [0, 0, -1, 1] + [-1] * 300 + [1], None),
        (works.ENDS, [3, 3, 130, 384], 400),
        (works.ENDS, [0, 300], 310),
        (works.COUNTS, [0, 3, 7], 7),
    ],
)
def test_a_product_of_depth_zero_writes_the_rows_that_any_product_writes(
    kind: works.Work, layout: list[int], rows: int | None, zero_padding: bool
) -> None:
    config = tile_config(64, 64, Output(work=kind))
    p = sim.random_problem(config, layout, 64, 128, rows=rows, zero_padding=zero_padding)
    p = p._replace(a=p.a[..., :0], sfa=p.sfa[..., :0], b=p.b[..., :0], sfb=p.sfb[..., :0])
    right = p._replace(d=p.d.clone())
    reference.compute(right)
    write_without_depth(p)
    assert torch.equal(p.d, right.d)
