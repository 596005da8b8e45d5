"""Casts on a GPU, bit for bit as on the CPU: all numbers, large sizes, what lies around outputs, streams, graphs.

Sizes, types and strides of each cast are in test_by_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import deep_gemm
from deep_gemm.casts.by_torch import cast_blocks, cast_by_torch
from deep_gemm.casts.cast_rows import Groups, cast_config
from deep_gemm.casts.fp8 import cast_checked
from deep_gemm.casts.rules import FP4, PER_ROW, Quantized, Target
from lab.casts import assert_same_bits, hard_quotients, wild
from lab.sim.cast_rows import RowTrial

pytestmark = pytest.mark.gpu

CASTS: dict[str, Callable[..., Quantized]] = {
    "per token": deep_gemm.per_token_cast_to_fp8,
    "per channel": deep_gemm.per_channel_cast_to_fp8,
    "per block": deep_gemm.per_block_cast_to_fp8,
}
every_cast = pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)


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


# All kinds of casts of rows


BY_32 = Target(columns=32)
kind = partial(cast_config, torch.bfloat16, True, False)


def test_large_casts_of_rows_of_all_kinds() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = tuple(torch.randint(0, 33, (64,), generator=generator).tolist())
    ends = tuple(torch.randint(0, 120, (64,), generator=generator).cumsum(0).tolist())
    for case in (
        RowTrial(kind(), 4100, 4104, 1, data="mixed"),
        RowTrial(kind(activates=True), 2050, 2056, 2, data="ordinary"),
        RowTrial(kind(groups=Groups.COUNTS), 64 * 32, 7168, 3, data="mixed", sizes=counts),
        RowTrial(kind(groups=Groups.COUNTS, activates=True), 64 * 32, 2048, 4, data="ordinary", sizes=counts),
        RowTrial(kind(groups=Groups.ENDS, activates=True), 8192, 2048, 5, data="ordinary", sizes=ends),
        RowTrial(kind(to_routes=True), 520, 7168, 6, data="mixed", topk=8),
        RowTrial(kind(to_routes=True), 70, 520, 7, data="mixed", topk=40),
        RowTrial(kind(to=BY_32), 4100, 4104, 8, data="mixed"),
        RowTrial(kind(groups=Groups.COUNTS, to=BY_32), 64 * 32, 7168, 9, data="mixed", sizes=counts),
        RowTrial(kind(groups=Groups.ENDS, activates=True, to=BY_32), 8192, 2048, 10, data="ordinary", sizes=ends),
        RowTrial(kind(to_routes=True, to=BY_32), 520, 7168, 11, data="mixed", topk=8),
    ):
        case.on("cuda").run()


def test_sizes_out_of_range_reach_nothing_outside() -> None:
    for activates in (False, True):
        trial = RowTrial(
            kind(groups=Groups.COUNTS, activates=activates), 64, 136, data="ordinary", sizes=(-5, 17, 2**31 - 1, 3)
        )
        trial.on("cuda").run()
    for sizes in ((), (-3, 20, 100), (30, 5, 40), (2**31 - 1, -(2**31))):
        of_ends = kind(groups=Groups.ENDS, activates=True)
        RowTrial(of_ends, 48, 136, data="ordinary", sizes=sizes, alignment=8).on("cuda").run()
    for groups in (Groups.COUNTS, Groups.ENDS):
        many = tuple(range(1, 1025)) if groups == Groups.ENDS else (1, 0) * 512
        RowTrial(kind(groups=groups, activates=True), 2048, 136, data="ordinary", sizes=many).on("cuda").run()


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
@pytest.mark.parametrize("to", [PER_ROW, *(Target(columns=columns, format=FP4) for columns in FP4.blocks)], ids=str)
def test_quotients_of_every_mantissa(to: Target, exponent: int) -> None:
    """65536 rows of 128 elements that follow each other, then multiplied so that other scales divide them."""
    bits = torch.arange(2**23, dtype=torch.int32, device="cuda") | exponent << 23
    x = bits.view(torch.float32).view(-1, 128)
    for factor in (1.0, 1 / 3, 0.7):
        part = x * factor
        part[:, 0] *= torch.linspace(0.5, 1.0, len(part), device="cuda") * (1.9 if exponent < 254 else 1.0)
        for found, right in zip(cast_checked(part, to)[0], cast_blocks(part, to), strict=True):
            assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))


def test_casts_follow_their_stream() -> None:
    x = torch.zeros(2048, 2048, device="cuda")
    rows = deep_gemm.expert_rows(torch.arange(2048, device="cuda")[:, None] % 7, 7)

    def casts(x: Tensor) -> list[Quantized]:
        of_rows = deep_gemm.silu_mul_cast_to_fp8(x), deep_gemm.gather_cast_to_fp8(x, rows)
        return [*of_rows, *deep_gemm.cast_both_to_fp8(x), deep_gemm.per_block_cast_to_fp8(x)]

    rights = casts(torch.full_like(x, 3.0))
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            x.fill_(1.0)
            torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call]
            x.fill_(3.0)
            made = casts(x)
            x.fill_(2.0)
    stream.synchronize()
    for found, right in zip(made, rights, strict=True):
        assert_same_bits(found, (right[0].cpu(), right[1].cpu()))


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
