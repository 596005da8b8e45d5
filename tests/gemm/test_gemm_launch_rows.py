"""The host's decisions for grouped products on a GPU, tested without a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, on_gpu, recorded_alike
from helpers import some
from torch import Tensor

import deep_gemm
from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.recipes import PER_64, PER_ROW
from deep_gemm.core.gpu import H200
from deep_gemm.core.params import Params
from deep_gemm.gemm import launch, reference
from deep_gemm.gemm.api.grouped import product_of_rows_by_64
from deep_gemm.gemm.choose.fp8 import select
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kernel import params_of
from deep_gemm.gemm.kinds import epilogues, works
from deep_gemm.gemm.kinds.output import Output, Sizes
from deep_gemm.gemm.problem import Problem, write_without_depth
from deep_gemm.moe import activation
from deep_gemm.moe.activation import activated_product_of_rows
from lab.configs import reachable_grouped, reachable_grouped_decode, reachable_silu
from lab.sim import rows as sim
from lab.sim import rows_silu as activated
from lab.sim.product import tile_of

BY_IDS, BY_COUNTS = Output(work=works.IDS), Output(work=works.COUNTS)
ROWS_PARAMS = params_of(tile_config(64, 64, BY_IDS))
DECODE_PARAMS = params_of(reachable_grouped_decode()[0])


def test_tiles_are_as_high_as_groups_need() -> None:
    heights = [tile_of(select(Sizes(rows, 4096, 7168, 4), BY_IDS, H200))[0] for rows in (2, 64, 256, 1024, 8192)]
    assert heights == sorted(heights)
    assert heights[:2] == [8, 64]
    assert heights[-1] == 128


def test_masked_groups_of_about_192_rows_are_one_tile_and_larger_ones_none_of_256() -> None:
    assert tile_of(select(Sizes(192, 4096, 7168, 32), BY_COUNTS, H200))[0] == 256
    assert tile_of(select(Sizes(384, 4096, 7168, 12), BY_COUNTS, H200))[0] == 128
    assert tile_of(select(Sizes(192, 4096, 7168, 32), BY_IDS, H200))[0] == 128


@pytest.mark.parametrize("rows", [0, 0.01, 1, 20, 1e6])
@pytest.mark.parametrize("output", [BY_IDS, BY_COUNTS, Output(is_fp32=True, sfb=PER_ROW, work=works.ENDS)])
def test_what_is_chosen_is_reachable(rows: float, output: Output) -> None:
    reached = {*reachable_grouped(), *reachable_grouped_decode()}
    for num_groups in (1, 256):
        for k in (16, 512, 7168):
            assert select(Sizes(rows, 576, k, num_groups), output, H200) in reached


def test_a_configuration_for_other_groups_is_refused(gpu: FakeGpu) -> None:
    p = sim.random_problem(tile_config(64, 64, BY_IDS), [0, 0, 1], 64, 128)
    with pytest.raises(ValueError, match="is for another output: work"):
        launch.run(p, tile_config(64, 64, BY_COUNTS))
    with pytest.raises(ValueError, match="is for another output: "):
        launch.run(p, tile_config(64, 64, Output(is_fp32=True, work=works.IDS)))


# Records


def operands(m: int, layout: list[int]) -> tuple[Any, Any, Tensor, Tensor]:
    a, b = per_token_cast_to_fp8(torch.zeros(m, 512)), per_block_cast_to_fp8(torch.zeros(3, 256, 512))
    a = on_gpu(a[0]), get_mn_major_tma_aligned_tensor(a[1])
    return a, b, on_gpu(torch.zeros(m, 256, dtype=torch.bfloat16)), torch.tensor(layout, dtype=torch.int32)


@pytest.mark.parametrize("is_ends", [False, True])
@pytest.mark.parametrize(
    ("ms", "params"), [((600, 601, 61, 63, 604, 600, 700), ROWS_PARAMS), ((20, 21, 1, 3, 24, 20, 28), DECODE_PARAMS)]
)
def test_a_record_of_other_rows_launches_what_a_call_without_any_does(
    gpu: FakeGpu, ms: tuple[int, ...], params: Params, is_ends: bool
) -> None:
    calls: list[Any] = []
    product: Any = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    for m in ms:
        a, b, d, layout = operands(m, [0, 0, m] if is_ends else [0] * m)
        calls.append(partial(product, a, b, d, layout, use_psum_layout=is_ends))
    assert recorded_alike(gpu, calls) < len({*ms})
    assert gpu.last.words[params.offset("groups.layout") // 8] == layout.data_ptr()
    assert gpu.last.words[params.offset("d") // 8] == d.data_ptr()


def test_groups_that_share_a_weight_share_it_in_the_map_too(gpu: FakeGpu) -> None:
    a, (b, sfb), d, layout = operands(600, [0] * 300 + [1] * 200 + [2] * 100)
    shared = on_gpu(b[:1].expand(b.shape)), sfb[:1].expand(sfb.shape)
    for _ in range(2):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, shared, d, layout)
        assert gpu.last.words[ROWS_PARAMS.offset("map_b") // 8] == b.data_ptr()
    of_b = next(x for x in gpu.launches[0].maps if x.sizes == (512, 256, 3))
    assert of_b.strides == (512, 0)
    assert gpu.records == 1


def test_a_layout_that_was_left_out_is_made_for_each_call(gpu: FakeGpu) -> None:
    a, b, d, _ = operands(600, [0] * 600)
    for _ in range(2):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, num_groups=3)
        assert gpu.last.words[ROWS_PARAMS.offset("groups.layout") // 8] != 0


def test_a_layout_inside_of_the_output_is_looked_at_closely(gpu: FakeGpu) -> None:
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


# The host's decisions for the two products of an expert on a GPU, tested without a GPU.


SILU, BY_64 = Output(work=works.ENDS, epilogue=epilogues.SILU), Output(work=works.IDS, sfa=PER_64)
ROWS_PARAMS_SILU, ROWS_SILU_PARAMS = (params_of(tile_config(128, 128, output)) for output in (BY_64, SILU))


def problem(m: int = 300, limit: float | None = None, has_weights: bool = True) -> Problem:
    p = activated.random_problem([m - 3, 3], 512, 256, behind=0, limit=limit, has_weights=has_weights)
    return p._replace(a=on_gpu(p.a), d=on_gpu(p.d), sfa=get_mn_major_tma_aligned_tensor(p.sfa))


def call(p: Problem) -> None:
    d = p.d, p.scales
    activated_product_of_rows((p.a, p.sfa), (p.b, p.sfb), d, p.c, p.row_weights, limit=p.limit)


@pytest.mark.parametrize("rows", [0, 0.01, 1, 20, 1e6])
def test_what_is_chosen_for_activated_rows_is_reachable(rows: float) -> None:
    for num_groups in (1, 256):
        for k in (128, 512, 7168):
            assert select(Sizes(rows, 4096, k, num_groups), SILU, H200) in reachable_silu()
            assert select(Sizes(rows, 4096, k, num_groups), BY_64, H200) in reachable_grouped()


def test_everything_has_an_address_of_its_own(gpu: FakeGpu) -> None:
    for _ in range(2):
        p = problem()
        call(p)
        named: dict[str, Tensor | None] = {
            "sfb": p.sfb,
            "d": p.d,
            "groups.layout": p.c,
            "activation.row_weights": p.row_weights,
            "activation.scales": p.scales,
            "map_b": p.b,
        }
        for name, x in named.items():
            assert gpu.last.words[ROWS_SILU_PARAMS.offset(name) // 8] == some(x).data_ptr(), name
    assert gpu.last.kernel == "fp8_gemm_m_grouped_contiguous_silu"
    assert gpu.records == 1, "the second call is like the first"
    call(problem(has_weights=False))
    assert gpu.last.words[ROWS_SILU_PARAMS.offset("activation.row_weights") // 8] == 0


def test_a_call_like_one_before_is_not_checked_again(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    call(problem())
    with monkeypatch.context() as patched:
        patched.setattr(activation, "silu_rows_problem", None)
        call(problem())
    assert len(gpu.launches) == 2
    call(problem(301))
    assert len(gpu.launches) == 3


@pytest.mark.parametrize("out", ["d", "sfd"])
@pytest.mark.parametrize("other", ["a", "sfa", "b", "sfb", "ends", "row_weights"])
def test_outputs_that_lie_over_an_input_are_looked_at_closely(gpu: FakeGpu, out: str, other: str) -> None:
    """The second call differs only in addresses, but the record of the first call must not serve it."""
    p = problem()
    call(p)
    name, member = {"d": "d", "sfd": "scales"}[out], {"ends": "c"}.get(other, other)
    room = torch.empty(1 << 20, dtype=torch.uint8)
    room = room[-room.data_ptr() % 16 :]

    def placed(x: Tensor) -> Tensor:
        of_type = room[: len(room) // 4 * 4].view(x.dtype)
        there = of_type.as_strided(x.shape, x.stride())
        return on_gpu(there) if x.is_cuda else there

    inside: Any = {name: placed(getattr(p, name)), member: placed(getattr(p, member))}
    with pytest.raises(ValueError, match=f"{out}: expected memory that does not overlap {other}|ends: expected values"):
        call(p._replace(**inside))
    assert len(gpu.launches) == 1


def test_malformed_calls_get_words(gpu: FakeGpu) -> None:
    p = problem()
    for a in (p.a, [1, 2, 3], None):
        with pytest.raises(TypeError, match="a: expected a pair"):
            activated_product_of_rows(a, (p.b, p.sfb), (p.d, p.scales), p.c)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ends: expected a tensor"):
        activated_product_of_rows((p.a, p.sfa), (p.b, p.sfb), (p.d, p.scales), [0])  # type: ignore[arg-type]


def test_what_is_launched_depends_on_the_limit_and_the_settings(gpu: FakeGpu) -> None:
    limits: list[Any] = [None, 1.0, 2.0, None]
    for limit in limits:
        call(problem(limit=limit))
    assert gpu.records == 3
    word = ROWS_SILU_PARAMS.offset("activation.scales_pitch") // 8  # the limit is in the upper half
    assert len({each.words[word] for each in gpu.launches}) == 3
    deep_gemm.set_pdl(True)
    call(problem())
    assert gpu.last.is_dependent


def test_no_rows_launch_nothing(gpu: FakeGpu) -> None:
    p = problem()
    launch.run(p._replace(a=p.a[:0], sfa=p.sfa[:0], d=p.d[:0], scales=p.scales[:0]))
    assert gpu.launches == []


def test_ends_may_begin_at_any_integer(gpu: FakeGpu) -> None:
    p = problem()
    for _ in range(2):
        call(p._replace(c=torch.cat([p.c[:1], p.c])[1:]))
    assert (gpu.records, len(gpu.launches)) == (1, 2)


def test_scales_that_lie_otherwise_are_copied(gpu: FakeGpu) -> None:
    p = problem()
    for _ in range(2):
        call(p._replace(sfa=p.sfa.contiguous()))
        assert gpu.last.words[ROWS_SILU_PARAMS.offset("map_sfa") // 8] % 16 == 0


def test_a_configuration_for_something_else_is_refused(gpu: FakeGpu) -> None:
    for output in (BY_64, Output(work=works.IDS)):
        with pytest.raises(ValueError, match=r"is for another output: .*(sfa|epilogue)"):
            launch.run(problem(), tile_config(128, 128, output))
    plain = sim.random_problem(tile_config(64, 128, BY_64), [0, 0, 1], 128, 128)
    for output in (SILU, Output(work=works.IDS)):
        with pytest.raises(ValueError, match=r"is for another output: .*(sfa|epilogue)"):
            launch.run(plain, tile_config(64, 128, output))


@pytest.mark.parametrize(
    ("output", "tile", "rule"),
    [
        (Output(work=works.COUNTS, epilogue=epilogues.SILU), (128, 128), "work and operands"),
        (Output(epilogue=epilogues.SILU), (128, 128), "work and operands"),
        (Output(is_fp32=True, work=works.ENDS, epilogue=epilogues.SILU), (128, 128), "work and operands"),
        (SILU, (128, 192), "units of 128 columns"),
        (SILU, (128, 64), "units of 128 columns"),
    ],
)
def test_what_cannot_be_built_says_why(output: Output, tile: tuple[int, int], rule: str) -> None:
    assert rule in str(tile_config(*tile, output).why_illegal())


def test_scales_by_64_go_to_the_map(gpu: FakeGpu) -> None:
    p = sim.random_problem(tile_config(128, 128, BY_64), [0] * 300, 256, 512, zero_padding=False)
    sfa = torch.empty_strided((300, 8), (1, 300)).copy_(p.sfa)
    for _ in range(2):
        product_of_rows_by_64((on_gpu(p.a), sfa), (p.b, p.sfb), on_gpu(p.d), p.c)
        assert gpu.last.words[ROWS_PARAMS_SILU.offset("map_sfa") // 8] == sfa.data_ptr()
    assert gpu.records == 1
    of_scales = next(x for x in gpu.launches[0].maps if x.sizes == (300, 8, 1))
    assert of_scales.box[1] == 2
    assert gpu.last.kernel == "fp8_gemm_m_grouped_contiguous_by_64"
