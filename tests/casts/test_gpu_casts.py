"""Casts on a GPU give the CPU's bits: all numbers, large sizes, bytes around outputs, streams, graphs.

test_by_kernels.py tests sizes, types and strides of each cast.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import captured, host_never_waits, some
from test_by_kernels import of_used
from test_sim_lay_scales import layouts_of, words
from torch import Tensor

import deep_gemm
from deep_gemm import k_grouped_fp8_gemm_nt_contiguous
from deep_gemm.casts import lay_scales
from deep_gemm.casts.by_torch import cast_blocks
from deep_gemm.casts.cast_rows import Groups, cast_config
from deep_gemm.casts.depths import GroupedRows, SiluCasts, cast_along_groups, cast_silu_gradient
from deep_gemm.casts.fp8 import cast_checked
from deep_gemm.casts.rules import AMAX_OF_TENSOR, FP4, PER_ROW, PER_TENSOR, Quantized, Target
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.layout import empty_mn_major, is_mn_major_tma_aligned
from deep_gemm.moe.routing import expert_rows
from lab.casts import MOST_OTHERS, assert_near, assert_same_bits, cast_by_torch, hard_quotients, wild
from lab.sim.cast_depths import OF_BF16
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


BY_32, BY_ALL = Target(columns=32), Target(columns=0)
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
        RowTrial(kind(to=BY_ALL, lanes=256), 4100, 7168, 12, data="mixed"),
        RowTrial(kind(to=BY_ALL, lanes=512), 300, 28672, 13, data="mixed"),
        RowTrial(kind(activates=True, to=BY_ALL, lanes=128), 2050, 2056, 14, data="ordinary"),
        RowTrial(kind(groups=Groups.COUNTS, to=BY_ALL, lanes=256), 64 * 32, 7168, 15, data="mixed", sizes=counts),
        RowTrial(
            kind(groups=Groups.ENDS, activates=True, to=BY_ALL, lanes=128), 8192, 2048, 16, sizes=ends, data="mixed"
        ),
        RowTrial(kind(to_routes=True, to=BY_ALL, lanes=256), 520, 7168, 17, data="mixed", topk=8),
        RowTrial(kind(to=PER_TENSOR, lanes=256), 4100, 7168, 18, data="mixed"),
        RowTrial(kind(to=AMAX_OF_TENSOR, lanes=256), 4100, 7168, 19, data="mixed"),
    ):
        case.on("cuda").run()


def test_sizes_out_of_range_reach_nothing_outside() -> None:
    for activates in (False, True):
        counted = kind(groups=Groups.COUNTS, activates=activates)
        RowTrial(counted, 64, 136, data="ordinary", sizes=(-5, 17, 2**31 - 1, 3)).on("cuda").run()
    for sizes in ((), (-3, 20, 100), (30, 5, 40), (2**31 - 1, -(2**31))):
        of_ends = kind(groups=Groups.ENDS, activates=True)
        RowTrial(of_ends, 48, 136, data="ordinary", sizes=sizes, alignment=8).on("cuda").run()
    for groups in (Groups.COUNTS, Groups.ENDS):
        many = tuple(range(1, 1025)) if groups == Groups.ENDS else (1, 0) * 512
        RowTrial(kind(groups=groups, activates=True), 2048, 136, data="ordinary", sizes=many).on("cuda").run()


# Reciprocals and quotients are exact, although the hardware's approximation is their first step.


@pytest.mark.parametrize("exponent", [1, 20, 36, 37, 38, 40, 60, 127, 140, 200, 254])
def test_scales_of_every_mantissa(exponent: int) -> None:
    """Cast each FP32 number with this biased exponent as a row of its own. The quotient is 448 or next to 448."""
    bits = torch.arange(2**23, dtype=torch.int32, device="cuda") | exponent << 23
    x = bits.view(torch.float32).view(-1, 1)
    for same in (x, -x):
        for found, right in zip(deep_gemm.per_token_cast_to_fp8(same), cast_by_torch(same, 1, 1), strict=True):
            assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("exponent", [1, 36, 37, 60, 127, 254])
@pytest.mark.parametrize("to", [PER_ROW, *(Target(columns=columns, format=FP4) for columns in FP4.blocks)], ids=str)
def test_quotients_of_every_mantissa(to: Target, exponent: int) -> None:
    """Cast all FP32 numbers with this exponent, 65536 rows of 128, times 1, 1/3 and 0.7; column 0 varies the scales."""
    bits = torch.arange(2**23, dtype=torch.int32, device="cuda") | exponent << 23
    x = bits.view(torch.float32).view(-1, 128)
    for factor in (1.0, 1 / 3, 0.7):
        part = x * factor
        part[:, 0] *= torch.linspace(0.5, 1.0, len(part), device="cuda") * (1.9 if exponent < 254 else 1.0)
        for found, right in zip(cast_checked(part, to), cast_blocks(part, to), strict=True):
            assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("exponent", [1, 36, 37, 60, 127, 216, 217, 254])
@pytest.mark.parametrize("scale", [1.0, 1 / 3, 0.7, 2.0**-100, 2.0**100, 1e-40])
def test_quotients_by_given_scales(scale: float, exponent: int) -> None:
    """Cast each FP32 number with this exponent. torch divides on the GPU too."""
    x = (torch.arange(2**23, dtype=torch.int32, device="cuda") | exponent << 23).view(torch.float32).view(-1, 512)
    for given in (torch.tensor([scale], device="cuda"), torch.tensor([-scale], device="cuda")):
        found, _ = deep_gemm.per_tensor_cast_to_fp8(x, given)
        right, _ = cast_blocks(x, PER_TENSOR, given)
        assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))


def test_casts_follow_their_stream() -> None:
    x = torch.zeros(2048, 2048, device="cuda")
    rows = deep_gemm.expert_rows(torch.arange(2048, device="cuda")[:, None] % 7, 7)

    def casts(x: Tensor) -> list[Quantized]:
        of_rows = [deep_gemm.silu_mul_cast_to_fp8(x), deep_gemm.gather_cast_to_fp8(x, rows)]
        of_rows += [deep_gemm.per_token_cast_to_fp8(x, gran_k=0), deep_gemm.per_tensor_cast_to_fp8(x)]
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
        whole = deep_gemm.per_token_cast_to_fp8(x, gran_k=0), deep_gemm.per_tensor_cast_to_fp8(x)
        return [*deep_gemm.cast_both_to_fp8(x), *(cast(x) for cast in CASTS.values()), *along_k, *whole]

    all_casts(x)
    graph, found = captured(all_casts, x)
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


# Casts of groups along their rows on a GPU: the references' results, the same bits each time, graphs, no waits.


SIZES = [(1, 1, 16, 16), (40, 5, 144, 80), (700, 128, 256, 208), (3000, 7, 2048, 768), (20, 1000, 64, 64)]
"""Tokens, experts, hidden size, intermediate size."""


def problem(tokens: int, num: int, hidden: int, i: int, seed: int = 0) -> tuple[GroupedRows, Tensor, Tensor, Tensor]:
    """Draw groups, tokens, gate and up, and the gradient of the activation, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    rows = expert_rows(torch.randint(-1, num, (tokens, 4), generator=generator), num)
    shapes = (tokens, hidden), (4 * tokens, 2 * i), (4 * tokens, i)
    x, h, ds = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return GroupedRows(rows.counts, rows.ends, rows.token_of), x, h, ds


def weights_of(groups: GroupedRows) -> Tensor:
    return torch.rand(len(groups.token_of), generator=torch.Generator().manual_seed(3))


def on_gpu(groups: GroupedRows) -> GroupedRows:
    return GroupedRows(*(each.cuda() for each in groups))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_the_references(size: tuple[int, int, int, int], weighted: bool, dtype: torch.dtype) -> None:
    groups, x, _, _ = problem(*size)
    p, x = weights_of(groups) if weighted else None, x.to(dtype)
    for lies in (x.cuda(), torch.cat([x, x], 1).cuda()[:, : x.shape[1]], torch.cat([x[:, :1], x], 1).cuda()[:, 1:]):
        found = cast_along_groups(lies, on_gpu(groups), None if p is None else p.cuda())
        assert_same_bits(of_used(found, groups), cast_along_groups(x, groups, p))


def all_of(found: SiluCasts, groups: GroupedRows) -> list[Tensor]:
    end = int(groups.ends[-1])
    assert found.rows is not None and found.columns is not None
    assert found.activated is not None and found.of_weights is not None
    columns = (*of_used(found.columns, groups), *of_used(found.activated, groups))
    return [*(each[:end].cpu() for each in found.rows), *columns, found.of_weights.sum(0)[:end].cpu()]


def bytes_of(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_of_silu_is_the_references(size: tuple[int, int, int, int], limit: float | None) -> None:
    groups, _, h, ds = problem(*size)
    p, there = weights_of(groups), on_gpu(groups)
    right = all_of(cast_silu_gradient(h, ds, groups, p, limit), groups)
    found = all_of(cast_silu_gradient(h.cuda(), ds.cuda(), there, p.cuda(), limit), groups)
    for at in (0, 2, 4):
        if right[at].numel():
            assert assert_near((found[at], found[at + 1]), (right[at], right[at + 1]), OF_BF16) < MOST_OTHERS
    torch.testing.assert_close(found[6], right[6], rtol=1e-4, atol=1e-3)
    again = all_of(cast_silu_gradient(h.cuda(), ds.cuda(), there, p.cuda(), limit), groups)
    assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(found, again, strict=True))


def test_operands_with_room_behind_them_give_the_products_of_each_group_and_nobody_waits() -> None:
    """Capture the product in a graph, and replay it with other groups."""
    groups, x, h, ds = problem(700, 16, 256, 208)
    others, *_ = problem(700, 16, 256, 208, seed=1)
    now, x, h, ds, p = on_gpu(groups), x.cuda(), h.cuda(), ds.cuda(), weights_of(groups).cuda()
    d = torch.empty(16, 416, 256, dtype=torch.float32, device="cuda")

    def product() -> None:
        of_gates = some(cast_silu_gradient(h, ds, now, p).columns)
        k_grouped_fp8_gemm_nt_contiguous(of_gates, cast_along_groups(x, now), d, None, now.depths)

    product()
    with host_never_waits():
        product()
    graph, _ = captured(product)
    for these in (groups, others):
        for to, made in zip(now, these, strict=True):
            to.copy_(made)
        graph.replay()
        of_gates = some(cast_silu_gradient(h.cpu(), ds.cpu(), these, p.cpu()).columns)
        right = torch.empty(d.shape)
        k_grouped_fp8_gemm_nt_contiguous(of_gates, cast_along_groups(x.cpu(), these), right, None, these.depths)
        assert float((d.cpu() - right).norm() / right.norm()) < 2e-2


# Scales laid out by their kernel on a GPU: the bits that torch's copy gives, in all layouts, streams and graphs.


POISON = -0x5A5A5A5A
SHAPES = [(2, 2), (5, 3), (64, 32), (65, 33), (129, 56), (4096, 56), (8191, 129), (3, 70, 5), (8, 130, 16), (2, 1, 35)]


def assert_laid(sf: Tensor) -> None:
    """Check that the kernel writes what torch would, and writes nothing between rows or behind the last row."""
    out = empty_mn_major(sf)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(out.shape, out.stride(), strict=True))
    memory = torch.full((extent + 64,), POISON, dtype=torch.int32, device="cuda")
    right = memory.clone()
    right.as_strided(out.shape, out.stride()).copy_(sf.view(torch.int32))
    lay_scales.run(sf, memory.view(torch.float32).as_strided(out.shape, out.stride()))
    assert torch.equal(memory, right)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_in_every_layout(shape: tuple[int, ...]) -> None:
    for layout in layouts_of(words(*shape).cuda()):
        assert_laid(layout)
        out = get_mn_major_tma_aligned_tensor(layout)
        assert is_mn_major_tma_aligned(out)
        assert torch.equal(out.view(torch.int32), layout.view(torch.int32))
        assert get_mn_major_tma_aligned_tensor(out) is out


def test_any_strides() -> None:
    rng = random.Random(0)
    numbers = words(2_000_000).cuda()
    for _ in range(200):
        shape = rng.randint(1, 4), rng.randint(1, 300), rng.randint(1, 150)
        assert_laid(numbers.as_strided(shape, (rng.randint(0, 9000), rng.randint(0, 999), rng.randint(0, 999))))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 5, 3), (2, 0, 3), (2, 3, 0)])
def test_no_scales_are_laid_too(shape: tuple[int, ...]) -> None:
    sf = torch.empty(shape, device="cuda")
    assert get_mn_major_tma_aligned_tensor(sf).shape == shape


def test_scales_that_require_a_gradient_give_no_graph() -> None:
    assert not get_mn_major_tma_aligned_tensor(words(5, 3).cuda().requires_grad_()).requires_grad


def test_copies_follow_their_stream() -> None:
    sf = torch.zeros(2048, 56, device="cuda")
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(20):
            torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call]
            sf.fill_(float(number))
            out = get_mn_major_tma_aligned_tensor(sf)
            sf.fill_(-1.0)
            assert bool((out == number).all())


@pytest.mark.parametrize("pdl", [False, True])
def test_products_in_a_captured_graph_lay_changed_scales(pdl: bool) -> None:
    """Products by scales of A's rows, of both operands' rows, and of groups all run the kernel that lays out scales."""
    m, n, k, groups = 512, 256, 1024, 2
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16)
    (a, sfa), (b, sfb) = deep_gemm.per_token_cast_to_fp8(x), deep_gemm.per_block_cast_to_fp8(w)
    by_row = deep_gemm.per_token_cast_to_fp8(w[0])
    flat = deep_gemm.k_grouped_cast_to_fp8(x, [768, 256])
    assert not is_mn_major_tma_aligned(sfa)
    assert not is_mn_major_tma_aligned(flat[1])
    ids = torch.arange(groups, device="cuda", dtype=torch.int32).repeat_interleave(m // groups)
    counts = torch.full((groups,), m // groups, device="cuda", dtype=torch.int32)

    def products(lay: bool) -> list[Tensor]:
        """Run the products with scales that torch has laid out, or that the products lay out themselves."""

        def laid(sf: Tensor) -> Tensor:
            return empty_mn_major(sf).copy_(sf) if lay else sf

        outs = [torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        outs += [torch.empty(m, n, device="cuda"), torch.empty(groups, m // groups, n, device="cuda").bfloat16()]
        outs.append(torch.zeros(groups, m, m, device="cuda"))
        deep_gemm.fp8_gemm_nt((a, laid(sfa)), (b[0], sfb[0]), outs[0])
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, laid(sfa)), (b, sfb), outs[1], ids)
        one = by_row[0], laid(by_row[1])
        deep_gemm.fp8_gemm_nt((a, laid(sfa)), one, outs[2], recipe=(1, 1, 128))
        planes, sf_planes = a.view(groups, -1, k), sfa.view(groups, m // groups, -1)
        deep_gemm.fp8_m_grouped_gemm_nt_masked((planes, laid(sf_planes)), (b, sfb), outs[3], counts, m // groups)
        along_k = flat[0], laid(flat[1])
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(along_k, along_k, outs[4], [768, 256], c=outs[4])
        return outs

    deep_gemm.set_pdl(pdl)
    products(False)
    graph, found = captured(products, False)
    for factor in (0.5, 3.0):
        for sf in (sfa, by_row[1], flat[1]):
            sf.mul_(factor)
        graph.replay()
        torch.cuda.synchronize()
        for one, right in zip(found, products(True), strict=True):
            assert torch.equal(one, right)
