"""Every cast on a GPU, bit for bit as on the CPU: sizes, types, strides, what lies around outputs, streams, graphs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from casts import assert_same_bits, hard_quotients, wild
from torch import Tensor

import deep_gemm
from deep_gemm.choose.config_cast import INPUTS, Grain
from deep_gemm.kernels import cast_rows, cast_tiles
from deep_gemm.kernels.cast_rows import RowCast
from deep_gemm.kernels.cast_tiles import TileCast
from deep_gemm.problem.layout import align, ceil_div, get_mn_major_tma_aligned_tensor
from deep_gemm.quantize import Quantized

pytestmark = pytest.mark.gpu

CASTS: dict[str, Callable[..., Quantized]] = {
    "per token": deep_gemm.per_token_cast_to_fp8,
    "per channel": deep_gemm.per_channel_cast_to_fp8,
    "per block": deep_gemm.per_block_cast_to_fp8,
}
every_cast = pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
every_type = pytest.mark.parametrize("dtype", INPUTS, ids=lambda dtype: str(dtype).removeprefix("torch."))
SHAPES = [(1, 1), (1, 128), (128, 1), (5, 300), (129, 127), (130, 264), (384, 2048), (1008, 4104), (4100, 1111)]
POISON = 0xA5


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


def poisoned(rows: int, columns: int, pitch: int, offset: int) -> tuple[Tensor, Tensor]:
    memory = torch.full((offset + rows * pitch + 64,), POISON, dtype=torch.uint8, device="cuda")
    return memory, memory[offset:].view(torch.float8_e4m3fn).as_strided((rows, columns), (pitch, 1))


def assert_poison_around(memory: Tensor, view: Tensor) -> None:
    inside = torch.zeros_like(memory, dtype=torch.bool)
    inside.as_strided(view.shape, view.stride(), view.data_ptr() - memory.data_ptr()).fill_(True)
    assert bool((memory[~inside] == POISON).all()), "a write outside of the values"


@every_type
@pytest.mark.parametrize("offset", [0, 16, 5])
def test_nothing_is_written_around_the_outputs(dtype: torch.dtype, offset: int) -> None:
    for m, k in [(144, 264), (131, 77), (16, 8), (1, 1), (400, 1040)]:
        x = wild(m, k, dtype, m)
        memory, values = poisoned(m, k, align(k, 16) + 16, offset)
        memory_t, columns = poisoned(k, m, align(m, 16) + 16, offset)
        room, room_t = (
            torch.full((rows + 2, blocks + 2), 42.0, device="cuda")
            for rows, blocks in ((m, ceil_div(k, 128)), (k, ceil_div(m, 128)))
        )
        scales, scales_t = room[1:-1, 1:-1], room_t[1:-1, 1:-1]
        right = deep_gemm.cast_both_to_fp8(x)
        cast_tiles.run(TileCast(x.cuda(), Grain.ROWS, values, scales, columns, scales_t))
        assert_same_bits((values.contiguous(), scales.contiguous()), right[0])
        assert_same_bits((columns.contiguous(), scales_t.contiguous()), right[1])
        values.view(torch.uint8).fill_(POISON)
        scales.fill_(0)
        cast_rows.run(RowCast(x.cuda(), values, scales))
        assert_same_bits((values.contiguous(), scales.contiguous()), right[0])
        assert_poison_around(memory, values)
        assert_poison_around(memory_t, columns)
        for outside in (room, room_t):
            outside[1:-1, 1:-1] = 42.0
            assert bool((outside == 42.0).all()), "a write outside of the scales"


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
        return [*deep_gemm.cast_both_to_fp8(x), *(cast(x) for cast in CASTS.values())]

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
