"""Every cast on a GPU, bit for bit as on the CPU: sizes, types, strides, what lies around outputs, streams, graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

import deep_gemm
from deep_gemm.casts import fp4
from deep_gemm.casts.by_kernels import can_turn_blocks
from deep_gemm.casts.by_torch import cast_by_torch
from deep_gemm.casts.cast_rows import FP4_BLOCKS, CastConfig, Groups, cast_config
from deep_gemm.casts.config import INPUTS
from deep_gemm.casts.rules import Quantized
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.linear.backward import cast_transposed, transposed
from lab.casts import assert_same_bits, hard_quotients, wild
from lab.sim.cast_rows import RowTrial

pytestmark = pytest.mark.gpu

CASTS: dict[str, Callable[..., Quantized]] = {
    "per token": deep_gemm.per_token_cast_to_fp8,
    "per channel": deep_gemm.per_channel_cast_to_fp8,
    "per block": deep_gemm.per_block_cast_to_fp8,
}
every_cast = pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
every_type = pytest.mark.parametrize("dtype", INPUTS, ids=lambda dtype: str(dtype).removeprefix("torch."))
SHAPES = [(1, 1), (1, 128), (128, 1), (5, 300), (129, 127), (130, 264), (384, 2048), (1008, 4104), (4100, 1111)]


def random_shapes(count: int) -> list[tuple[int, int]]:
    rng = random.Random(0)
    return [(rng.randint(1, 700), rng.randint(1, 1500) * rng.choice([1, 8])) for _ in range(count)]


@every_cast
@every_type
@pytest.mark.parametrize("use_ue8m0", [False, True], ids=["FP32", "UE8M0"])
def test_casts_are_the_references(cast: Callable[..., Quantized], dtype: torch.dtype, use_ue8m0: bool) -> None:
    for seed, shape in enumerate([*SHAPES, *random_shapes(10)]):
        x = wild(*shape, dtype, seed, block_rows=1 if seed % 2 else 128)
        assert_same_bits(cast(x.cuda(), use_ue8m0), cast(x, use_ue8m0))


@every_type
@pytest.mark.parametrize("shape", [(16, 8), (144, 136), (2048, 1536), (3, 144, 136), (128, 256, 768), (1, 16, 8)])
def test_blocks_that_are_transposed_are_the_references(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = wild(prod(shape[:-1]), shape[-1], dtype, 0, block_rows=32).view(shape)
    values, scales = cast_transposed(x.cuda())
    right, right_scales = transposed(deep_gemm.per_block_cast_to_fp8(x))
    assert can_turn_blocks(x.cuda())
    assert scales.stride() == right_scales.stride()
    assert_same_bits((values, scales.contiguous()), (right, right_scales))


@every_cast
@every_type
@pytest.mark.parametrize("use_ue8m0", [False, True], ids=["FP32", "UE8M0"])
@pytest.mark.parametrize("gran_k", [32, 64])
def test_casts_with_finer_scales_are_the_references(
    cast: Callable[..., Quantized], dtype: torch.dtype, use_ue8m0: bool, gran_k: int
) -> None:
    for seed, shape in enumerate([*SHAPES, *random_shapes(10)]):
        x = wild(*shape, dtype, seed, block_rows=1 if seed % 2 else 32)
        right = cast(x, use_ue8m0, gran_k)
        for same in (x.cuda(), x.cuda().t().contiguous().t()):
            assert_same_bits(cast(same, use_ue8m0, gran_k), right)


@every_type
@pytest.mark.parametrize("gran_k", [32, 64, 128])
@pytest.mark.parametrize("mn_major", [False, True])
def test_casts_with_packed_scales_are_the_references(dtype: torch.dtype, gran_k: int, mn_major: bool) -> None:
    said: dict[str, Any] = {"gran_k": gran_k, "mn_major": mn_major, "use_packed_ue8m0": True}
    for seed, shape in enumerate([*SHAPES, *random_shapes(10)]):
        x = wild(*shape, dtype, seed)
        found, right = (deep_gemm.per_token_cast_to_fp8(each, True, **said) for each in (x.cuda(), x))
        assert_same_bits(found, right)
        assert found[1].stride() == right[1].stride()


@every_type
@pytest.mark.parametrize("use_ue8m0", [False, True], ids=["FP32", "UE8M0"])
@pytest.mark.parametrize("gran_k", FP4_BLOCKS)
def test_casts_to_fp4_are_the_references(dtype: torch.dtype, use_ue8m0: bool, gran_k: int) -> None:
    for seed, (m, k) in enumerate([*SHAPES, *random_shapes(10)]):
        x = wild(m, k + k % 2, dtype, seed)
        right = deep_gemm.per_token_cast_to_fp4(x, use_ue8m0, gran_k)
        for same in (x.cuda(), x.cuda().t().contiguous().t(), torch.cat([x, x], 1).cuda()[:, k + k % 2 :]):
            assert_same_bits(deep_gemm.per_token_cast_to_fp4(same, use_ue8m0, gran_k), right)


@every_type
def test_weights_in_mxfp4_are_the_references(dtype: torch.dtype) -> None:
    for seed, (n, k) in enumerate([(1, 32), (130, 288), (576, 7168), (4096, 4096)]):
        w = wild(n, k, dtype, seed)
        right = deep_gemm.quantize_mxfp4(w)
        for same in (w.cuda(), w.cuda().view(1, n, k), w.cuda().t().contiguous().t()):
            for found, its in zip(deep_gemm.quantize_mxfp4(same), right, strict=True):
                assert torch.equal(found.view(its.shape).cpu(), its)


@pytest.mark.parametrize("exponent", [1, 36, 37, 60, 127, 254])
@pytest.mark.parametrize("gran_k", FP4_BLOCKS)
def test_quotients_of_every_mantissa_in_fp4(exponent: int, gran_k: int) -> None:
    bits = torch.arange(2**23, dtype=torch.int32, device="cuda") | exponent << 23
    x = bits.view(torch.float32).view(-1, 128)
    for factor in (1.0, 1 / 3, 0.7):
        part = x * factor
        part[:, 0] *= torch.linspace(0.5, 1.0, len(part), device="cuda") * (1.9 if exponent < 254 else 1.0)
        for found, right in zip(
            deep_gemm.per_token_cast_to_fp4(part, gran_k=gran_k), fp4.cast_by_torch(part, False, gran_k), strict=True
        ):
            assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))


@every_type
@pytest.mark.parametrize("min_amax", [0.0, 1e-4, 1e30])
def test_both_are_the_references(dtype: torch.dtype, min_amax: float) -> None:
    for seed, shape in enumerate([*SHAPES, *random_shapes(10)]):
        x = wild(*shape, dtype, seed, block_rows=1 if seed % 2 else 128)
        right = deep_gemm.cast_both_to_fp8(x, min_amax=min_amax)
        for same in (x.cuda(), x.cuda().t().contiguous().t()):
            for found, expected in zip(deep_gemm.cast_both_to_fp8(same, min_amax=min_amax), right, strict=True):
                assert_same_bits(found, expected)
                assert found[0].is_contiguous()
                assert get_mn_major_tma_aligned_tensor(found[1]) is found[1]


@every_type
@pytest.mark.parametrize("ks", [[128, 128], [16, 144, 0, 272], [0, 16], [300], [5, 130], [4096, 0, 1040]], ids=str)
@pytest.mark.parametrize("mn_major", [False, True])
def test_groups_along_k_are_the_references(dtype: torch.dtype, ks: list[int], mn_major: bool) -> None:
    for seed, m in enumerate((1, 5, 130, 768)):
        x = wild(m, sum(ks), dtype, seed)
        right = deep_gemm.k_grouped_cast_to_fp8(x, ks, min_amax=1e-3, mn_major=mn_major)
        wider = torch.cat([x, x], 1).cuda()
        for same in (
            x.cuda(),
            x.cuda().t().contiguous().t(),
            wider[:, sum(ks) :],
            wider.t().contiguous().t()[:, : sum(ks)],
        ):
            found = deep_gemm.k_grouped_cast_to_fp8(same, ks, min_amax=1e-3, mn_major=mn_major)
            assert_same_bits(found, right)
            assert get_mn_major_tma_aligned_tensor(found[1]) is found[1] if mn_major else found[1].is_contiguous()
    for empty in (x[:, :0].cuda(), x[:0].cuda()):
        none = [0] if empty.shape[1] == 0 else ks
        assert_same_bits(
            deep_gemm.k_grouped_cast_to_fp8(empty, none), deep_gemm.k_grouped_cast_to_fp8(empty.cpu(), none)
        )


def test_every_number_of_16_bits() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(512, 128)
        for same in (x, x.t().contiguous().view(512, 128)):
            for cast in CASTS.values():
                assert_same_bits(cast(same.cuda()), cast(same))


@every_cast
def test_quotients_beside_where_fp8_rounds_the_other_way(cast: Callable[..., Quantized]) -> None:
    x = hard_quotients()
    for same in (x, x.t().contiguous(), *(x[i : i + 1] for i in range(0, len(x), 7))):
        assert_same_bits(cast(same.cuda()), cast(same))


@every_cast
@every_type
def test_batches_and_strides(cast: Callable[..., Quantized], dtype: torch.dtype) -> None:
    x = torch.stack([wild(256, 400, dtype, seed) for seed in range(3)]).cuda()
    parts = [x[:, :130], x[:, 1:130, 3:], x[:, ::2, ::2], x[2, :, 8:72]]
    views = [x, *parts, x.transpose(1, 2), x.transpose(0, 1), x[1].t()]
    for view in views:
        assert_same_bits(cast(view), cast(view.cpu()))
    for empty in (x[:0], x[:, :0], x[:, :, :0]):
        assert_same_bits(cast(empty), cast(empty.cpu()))


# All kinds of casts of rows


def kind(
    groups: Groups = Groups.NONE, *, activates: bool = False, to_routes: bool = False, block: int = 128
) -> CastConfig:
    return cast_config(torch.bfloat16, True, False, activates, groups, to_routes, block=block)


def test_large_casts_of_rows_of_all_kinds() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = tuple(torch.randint(0, 33, (64,), generator=generator).tolist())
    ends = tuple(torch.randint(0, 120, (64,), generator=generator).cumsum(0).tolist())
    for case in (
        RowTrial(kind(), 4100, 4104, 1, data="mixed"),
        RowTrial(kind(activates=True), 2050, 2056, 2, data="ordinary"),
        RowTrial(kind(Groups.COUNTS), 64 * 32, 7168, 3, data="mixed", sizes=counts),
        RowTrial(kind(Groups.COUNTS, activates=True), 64 * 32, 2048, 4, data="ordinary", sizes=counts),
        RowTrial(kind(Groups.ENDS, activates=True), 8192, 2048, 5, data="ordinary", sizes=ends),
        RowTrial(kind(to_routes=True), 520, 7168, 6, data="mixed", topk=8),
        RowTrial(kind(to_routes=True), 70, 520, 7, data="mixed", topk=40),
        RowTrial(kind(block=32), 4100, 4104, 8, data="mixed"),
        RowTrial(kind(Groups.COUNTS, block=32), 64 * 32, 7168, 9, data="mixed", sizes=counts),
        RowTrial(kind(Groups.ENDS, activates=True, block=32), 8192, 2048, 10, data="ordinary", sizes=ends),
        RowTrial(kind(to_routes=True, block=32), 520, 7168, 11, data="mixed", topk=8),
    ):
        case.on("cuda").run()


def test_sizes_out_of_range_reach_nothing_outside() -> None:
    for activates in (False, True):
        trial = RowTrial(
            kind(Groups.COUNTS, activates=activates), 64, 136, data="ordinary", sizes=(-5, 17, 2**31 - 1, 3)
        )
        trial.on("cuda").run()
    for sizes in ((), (-3, 20, 100), (30, 5, 40), (2**31 - 1, -(2**31))):
        RowTrial(kind(Groups.ENDS, activates=True), 48, 136, data="ordinary", sizes=sizes, alignment=8).on("cuda").run()
    for groups in (Groups.COUNTS, Groups.ENDS):
        many = tuple(range(1, 1025)) if groups == Groups.ENDS else (1, 0) * 512
        RowTrial(kind(groups, activates=True), 2048, 136, data="ordinary", sizes=many).on("cuda").run()


@every_type
@pytest.mark.parametrize("mn_major", [False, True])
def test_masked_rows_are_those_of_a_cast_of_all(dtype: torch.dtype, mn_major: bool) -> None:
    x, counts = wild(36, 264, dtype, 9).view(4, 9, 264).cuda(), torch.tensor([0, 9, 4, 1], dtype=torch.int32).cuda()
    is_there = torch.arange(9, device="cuda") < counts[:, None]
    found = deep_gemm.per_token_cast_to_fp8(x, masked_m=counts, mn_major=mn_major)
    right = deep_gemm.per_token_cast_to_fp8(x.cpu(), mn_major=mn_major)
    is_there_too = is_there.cpu()
    assert_same_bits((found[0][is_there], found[1][is_there]), (right[0][is_there_too], right[1][is_there_too]))
    assert found[1].stride() == right[1].stride()


@every_type
def test_gathered_casts_are_casts_that_are_gathered(dtype: torch.dtype) -> None:
    for seed, (tokens, topk, k) in enumerate([(1, 1, 16), (57, 8, 264), (300, 3, 4104), (1000, 8, 7168), (9, 40, 133)]):
        ids = torch.randint(-1, 64, (tokens, topk), generator=torch.Generator().manual_seed(seed)).cuda()
        x, rows = wild(tokens, k, dtype, seed).cuda(), deep_gemm.expert_rows(ids, 64)
        used = rows.token_of >= 0
        token = rows.token_of[used].long()
        values, scales = deep_gemm.per_token_cast_to_fp8(x)
        for mn_major in (False, True):
            found = deep_gemm.gather_cast_to_fp8(x, rows, mn_major=mn_major)
            right = values.view(torch.uint8)[token].view(values.dtype).cpu(), scales[token].cpu()
            assert_same_bits((found[0][used].contiguous(), found[1][used].contiguous()), right)


# Whether reciprocals and quotients are exact, the hardware's approximation at their beginning


@pytest.mark.parametrize("exponent", [1, 20, 36, 37, 38, 40, 60, 127, 140, 200, 254])
def test_scales_of_every_mantissa(exponent: int) -> None:
    """A row for each FP32 number with this biased exponent. Its quotient is 448, or just beside it."""
    bits = torch.arange(2**23, dtype=torch.int32, device="cuda") | exponent << 23
    x = bits.view(torch.float32).view(-1, 1)
    for same in (x, -x):
        values, scales = deep_gemm.per_token_cast_to_fp8(same)
        right_values, right_scales = cast_by_torch(same, 1, 1)
        assert torch.equal(scales.view(torch.int32), right_scales.view(torch.int32))
        assert torch.equal(values.view(torch.uint8), right_values.view(torch.uint8))


@pytest.mark.parametrize("exponent", [1, 36, 37, 60, 127, 254])
def test_quotients_of_every_mantissa(exponent: int) -> None:
    """65536 rows of 128 elements that follow each other, then multiplied so that other scales divide them."""
    bits = torch.arange(2**23, dtype=torch.int32, device="cuda") | exponent << 23
    x = bits.view(torch.float32).view(-1, 128)
    for factor in (1.0, 1 / 3, 0.7):
        part = x * factor
        part[:, 0] = part[:, 0] * torch.linspace(0.5, 1.0, len(part), device="cuda") * (1.9 if exponent < 254 else 1.0)
        values, scales = deep_gemm.per_token_cast_to_fp8(part)
        right_values, right_scales = cast_by_torch(part, 1, 128)
        assert torch.equal(scales.view(torch.int32), right_scales.view(torch.int32))
        assert torch.equal(values.view(torch.uint8), right_values.view(torch.uint8))


def test_activations_follow_their_stream() -> None:
    x = torch.zeros(2048, 2048, device="cuda")
    right = deep_gemm.silu_mul_cast_to_fp8(torch.full_like(x, 3.0))
    rows = deep_gemm.expert_rows(torch.arange(2048, device="cuda")[:, None] % 7, 7)
    right_rows = deep_gemm.gather_cast_to_fp8(torch.full_like(x, 3.0), rows)
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            x.fill_(1.0)
            torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call]
            x.fill_(3.0)
            found, found_rows = deep_gemm.silu_mul_cast_to_fp8(x), deep_gemm.gather_cast_to_fp8(x, rows)
            x.fill_(2.0)
    stream.synchronize()
    for one, its in ((found, right), (found_rows, right_rows)):
        assert_same_bits(one, (its[0].cpu(), its[1].cpu()))


def test_casts_follow_their_stream() -> None:
    right = deep_gemm.cast_both_to_fp8(torch.full((2048, 2048), 3.0))
    x = torch.zeros(2048, 2048, device="cuda")
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            x.fill_(1.0)
            torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call]
            x.fill_(3.0)
            both, blocks = deep_gemm.cast_both_to_fp8(x), deep_gemm.per_block_cast_to_fp8(x)
            x.fill_(2.0)
    stream.synchronize()
    for found, expected in zip(both, right, strict=True):
        assert_same_bits(found, expected)
    assert_same_bits(blocks, deep_gemm.per_block_cast_to_fp8(torch.full((2048, 2048), 3.0)))


def test_a_captured_graph_replays_with_changed_inputs() -> None:
    x = wild(272, 528, torch.bfloat16, 0).cuda()

    def all_casts(x: Tensor) -> list[Quantized]:
        along_k = [deep_gemm.k_grouped_cast_to_fp8(same, [16, 0, 256, 256]) for same in (x, x.t().contiguous().t())]
        return [*deep_gemm.cast_both_to_fp8(x), *(cast(x) for cast in CASTS.values()), *along_k]

    all_casts(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = all_casts(x)
    for seed in (1, 2):
        other = wild(272, 528, torch.bfloat16, seed)
        x.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        for one, expected in zip(found, all_casts(other), strict=True):
            assert_same_bits(one, expected)


def test_what_both_casts_give_is_what_products_take() -> None:
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(384, 256, device="cuda", dtype=torch.bfloat16)
    _, columns = deep_gemm.cast_both_to_fp8(x)
    found = torch.empty(512, 384, device="cuda", dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(columns, deep_gemm.per_block_cast_to_fp8(y), found)
    right = x.float().t() @ y.float().t()
    assert deep_gemm.calc_diff(found.float(), right) < 1e-3
