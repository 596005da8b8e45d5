"""Products whose scales cover all of k, for rows, columns or tensors, and biases: definition, mixtures, mistakes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers import refused, some
from torch import Tensor

import deep_gemm
from deep_gemm.casts.fp4 import quantize_mxfp4
from deep_gemm.core.check.layout import SCALE_BLOCK
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.ask.rows import contiguous_problem
from lab.casts import cast_by_torch

FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
Operand = tuple[Tensor, Tensor]
WHOLE: Any = {"recipe_a": (1, 0), "recipe_b": (1, 0)}
M, N, K, GROUPS = 21, 72, 1168, 3


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP32)


def by_rows(x: Tensor) -> Operand:
    return cast_by_torch(x, 1, x.shape[-1])


def by_tensor(x: Tensor) -> Operand:
    scale = x.abs().amax() / 448
    return (x / scale).to(FP8), scale


A, B = by_rows(numbers(M, K)), by_rows(numbers(GROUPS, N, K, seed=1))
B0 = B[0][0], B[1][0]
IDS = torch.tensor([0] * 5 + [2] * 9 + [-1] * 3 + [2] * 4, dtype=torch.int32)
COUNTS = torch.tensor([M, 0, 7], dtype=torch.int32)


def promoted(a: Tensor, b: Tensor) -> Tensor:
    """Add sums of 128 columns in FP32; each of these sums is exact."""
    total = torch.zeros(len(a), len(b), dtype=FP32)
    for first in range(0, a.shape[1], SCALE_BLOCK):
        ks = slice(first, first + SCALE_BLOCK)
        total += (a[:, ks].double() @ b[:, ks].double().T).float()
    return total


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_sums_of_128_are_added_in_fp32_and_scaled_once(dtype: torch.dtype) -> None:
    c = numbers(M, N, seed=2).to(dtype)
    d = torch.empty(M, N, dtype=dtype)
    deep_gemm.fp8_gemm_nt(A, B0, d, c, **WHOLE)
    right = promoted(A[0], B0[0]) * (A[1] * B0[1].T) + c.float()
    assert torch.equal(d, right.to(dtype))


def test_a_d_that_is_made_is_bf16() -> None:
    assert some(deep_gemm.fp8_gemm_nt(A, B0, **WHOLE)).dtype == BF16
    made = deep_gemm.m_grouped_fp8_gemm_nt_contiguous(A, B, grouped_layout=IDS, **WHOLE)
    assert some(made).dtype == BF16


@pytest.mark.parametrize("form", [(), (1,), (1, 1)])
def test_a_tensors_scale_is_that_of_each_row(form: tuple[int, ...]) -> None:
    (a, of_a), (b, of_b) = by_tensor(numbers(M, K)), by_tensor(numbers(N, K, seed=1))
    d = deep_gemm.fp8_gemm_nt((a, of_a.reshape(form)), (b, of_b.reshape(form)), recipe_a=(0, 0), recipe_b=(0, 0))
    rows = (a, of_a.expand(M, 1)), (b, of_b.expand(N, 1).contiguous())
    assert torch.equal(some(d), some(deep_gemm.fp8_gemm_nt(*rows, **WHOLE)))


USUAL = {
    "a": {(1, columns): cast_by_torch(numbers(M, K), 1, columns) for columns in (128, 64, 32)},
    "b": {rows: cast_by_torch(numbers(N, K, seed=1), *rows) for rows in ((128, 128), (1, 128), (64, 64), (1, 32))},
}


@pytest.mark.parametrize(("side", "other"), [(side, of) for side, other in ("ab", "ba") for of in USUAL[other]])
@pytest.mark.parametrize("of", [(1, 0), (0, 0)])
def test_beside_others_they_are_repeated_along_k(side: str, other: tuple[int, int], of: tuple[int, int]) -> None:
    x = numbers(M, K) if side == "a" else numbers(N, K, seed=1)
    values, sf = by_rows(x) if of == (1, 0) else by_tensor(x)
    blocks, rows = -(-K // 128), x.shape[0]
    as_blocks = side == "b" and of == (0, 0)
    repeated = sf.expand(-(-rows // 128) if as_blocks else rows, blocks).contiguous()
    usual = (128, 128) if as_blocks else (1, 128)
    beside = USUAL["b" if side == "a" else "a"][other]

    def computed(scales: Tensor, recipe: tuple[int, int]) -> Tensor:
        d, own = torch.empty(M, N), (values, scales)
        if side == "a":
            deep_gemm.fp8_gemm_nt(own, beside, d, recipe_a=recipe, recipe_b=other)
        else:
            deep_gemm.fp8_gemm_nt(beside, own, d, recipe_a=other, recipe_b=recipe)
        return d

    assert torch.equal(computed(sf, of), computed(repeated, usual))


def test_beside_fp4() -> None:
    w = quantize_mxfp4(numbers(N, 1184, seed=3))
    a, sfa = by_rows(numbers(M, 1184))
    d = deep_gemm.fp8_fp4_gemm_nt((a, sfa), w, recipe_a=(1, 0), recipe_b=(1, 32))
    right = deep_gemm.fp8_fp4_gemm_nt((a, sfa.expand(M, 10).contiguous()), w)
    assert torch.equal(some(d), some(right))


@pytest.mark.parametrize(("major", "dtype"), [*product(("nn", "tn", "tt"), (BF16, FP32))])
def test_operands_that_are_turned_have_their_scales_turned(major: str, dtype: torch.dtype) -> None:
    turn_a, turn_b = major[0] == "t", major[1] == "n"
    a, b = ((x[0].T, x[1].T) if turned else x for x, turned in ((A, turn_a), (B0, turn_b)))
    d, right = torch.empty(M, N, dtype=dtype), torch.empty(M, N, dtype=dtype)
    getattr(deep_gemm, f"fp8_gemm_{major}")(a, b, d, **WHOLE)
    deep_gemm.fp8_gemm_nt(A, B0, right, **WHOLE)
    assert torch.equal(d, right)


def dense(x: Any, group: int, c: Tensor | None, dtype: torch.dtype) -> Tensor:
    d = torch.empty(x[0].shape[0], N, dtype=dtype)
    if x[0].dtype == BF16:
        deep_gemm.bf16_gemm_nt(x[0], W16[group], d, c)
    else:
        deep_gemm.fp8_gemm_nt(x, (B[0][group], B[1][group]), d, c, **WHOLE)
    return d


X16, W16 = numbers(M, K).bfloat16(), numbers(GROUPS, N, K, seed=1).bfloat16()
BIAS = numbers(GROUPS, N, seed=4) * 100
KINDS = list(product(("fp8", "bf16"), (BF16, FP32), (None, BF16, FP32)))


@pytest.mark.parametrize(("kind", "dtype", "of_bias"), KINDS)
def test_rows_have_the_bits_of_dense_products(kind: str, dtype: torch.dtype, of_bias: Any) -> None:
    a, b = (A, B) if kind == "fp8" else ((X16,), W16)
    bias = None if of_bias is None else BIAS.to(of_bias)
    said: Any = {"bias": bias, **(WHOLE if kind == "fp8" else {})}
    d, masked = torch.full((M, N), 7.0, dtype=dtype), torch.full((GROUPS, M, N), 7.0, dtype=dtype)
    copies = [x.expand(GROUPS, *x.shape).contiguous() for x in a]
    stacked, spread = (tuple(each) if kind == "fp8" else each[0] for each in (a, copies))
    getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_contiguous")(stacked, b, d, IDS, **said)
    getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_masked")(spread, b, masked, COUNTS, M, **said)
    assert not d[IDS < 0].any()  # padding gets no bias
    for group, rows in enumerate(COUNTS.tolist()):
        row = None if bias is None else bias[group]
        assert torch.equal(d[group == IDS], dense([x[group == IDS] for x in a], group, row, dtype))
        assert torch.equal(masked[group, :rows], dense([x[:rows] for x in a], group, row, dtype))
        assert (masked[group, rows:] == 7).all()


@pytest.mark.parametrize(("dtype", "of_bias"), [*product((BF16, FP32), repeat=2)])
def test_a_bias_is_added_in_fp32_before_the_one_rounding(dtype: torch.dtype, of_bias: torch.dtype) -> None:
    bias = BIAS[0].to(of_bias)
    for x in ((A[0], A[1]), (X16,)):
        sums = dense(x, 0, None, FP32)
        assert torch.equal(dense(x, 0, bias, dtype), (sums + bias.float()).to(dtype))


@pytest.mark.parametrize("of_bias", [BF16, FP32])
def test_kernels_get_a_bias_in_bf16_beside_a_bf16_matrix_alone(of_bias: torch.dtype) -> None:
    for dtype in (BF16, FP32):
        p = dense_problem(A, B0, torch.empty(M, N, dtype=dtype), BIAS[0].to(of_bias), recipes=(None, (1, 0), (1, 0)))
        assert some(p.c).dtype == (BF16 if of_bias == dtype == BF16 else FP32)
    rows = contiguous_problem(A, B, None, IDS, recipes=(None, (1, 0), (1, 0)), bias=BIAS.to(of_bias))
    assert some(rows.bias).dtype == FP32


def test_products_of_no_depth_are_the_bias() -> None:
    a, b = (A[0][:, :0], A[1]), (B[0][..., :0], B[1])
    for c, right in ((None, torch.zeros(M, N)), (BIAS[0], BIAS[0].expand(M, N))):
        d = torch.ones(M, N)
        deep_gemm.fp8_gemm_nt(a, (b[0][0], b[1][0]), d, c, **WHOLE)
        assert torch.equal(d, right)
    d = torch.ones(M, N)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, IDS, bias=BIAS, **WHOLE)
    assert torch.equal(d, torch.where(IDS[:, None] >= 0, BIAS[IDS.clamp_min(0)], 0))


def test_zero_negative_infinite_and_no_numbers_as_scales() -> None:
    sfa = torch.tensor([0.0, -1.0, torch.inf, torch.nan, 1.0])[:, None]
    values, sfb = torch.ones(5, 512).to(FP8), torch.ones(8, 1)
    values[2, 256:] = -1.0  # the sum is zero, and infinity times zero is NaN
    d = some(deep_gemm.fp8_gemm_nt((values, sfa), (torch.ones(8, 512).to(FP8), sfb), **WHOLE)).float()
    assert d[:2, 0].tolist() == [0, -512]
    assert d[2:4].isnan().all()
    assert d[4, 0] == 512
    sfb[3] = -torch.inf
    d = some(deep_gemm.fp8_gemm_nt((values[4:], sfa[4:]), (torch.ones(8, 512).to(FP8), sfb), **WHOLE))
    assert d[0, 3] == -torch.inf
    assert (d[0, 4:] == 512).all()


OF_A = "NotImplementedError: recipe_a: expected (1, 128), (1, 64), (1, 32), (1, 0) or (0, 0)"
OF_C = "c: expected dtype torch.bfloat16 or torch.float32"
MISTAKES: list[tuple[str, Any]] = [
    ("sfa: expected shape (m, 1) = (21, 1), got (20, 1)", lambda: ((A[0], A[1][1:]), B0, {})),
    ("sfa: expected shape (m, 1) = (21, 1), got ()", lambda: ((A[0], torch.ones(())), B0, {})),
    ("sfa: expected shape (m, 1) = (21, 1), got (21,)", lambda: ((A[0], A[1][:, 0]), B0, {})),
    ("sfb: expected shape (n, 1) = (72, 1), got (1, 72)", lambda: (A, (B0[0], B0[1].T), {})),
    ("sfb: expected shape (1, 1) = (1, 1), got (72, 1)", lambda: (A, B0, {"recipe_b": (0, 0)})),
    ("sfa: expected dtype torch.float32, got torch.bfloat16", lambda: ((A[0], A[1].bfloat16()), B0, {})),
    (f"{OF_A}, got (0, 128)", lambda: (A, B0, {"recipe_a": (0, 128)})),
    ("c: expected shape (n) = (72), got (73,)", lambda: (A, B0, {"c": torch.zeros(73)})),
    (f"{OF_C}, got torch.float16", lambda: (A, B0, {"c": torch.zeros(72).half()})),
    ("c: expected device cpu, where a is, got meta", lambda: (A, B0, {"c": torch.zeros(72, device="meta")})),
    ("c: expected contiguous rows aligned to 16 bytes, got", lambda: (A, B0, {"c": torch.zeros(144)[::2]})),
    ("c: expected contiguous rows aligned to 16 bytes, got", lambda: (A, B0, {"c": torch.zeros(73)[1:]})),
    ("c: expected a tensor without a gradient", lambda: (A, B0, {"c": torch.zeros(72, requires_grad=True)})),
]


@pytest.mark.parametrize(("message", "call"), MISTAKES, ids=[message for message, _ in MISTAKES])
def test_a_mistake_is_named(message: str, call: Any) -> None:
    a, b, more = call()
    with refused(message):
        deep_gemm.fp8_gemm_nt(a, b, **{**WHOLE, **more})


@pytest.mark.parametrize(
    ("message", "bias"),
    [
        ("bias: expected shape (groups, n) = (3, 72), got (3, 73)", torch.zeros(3, 73)),
        ("bias: expected shape (groups, n) = (3, 72), got (72,)", torch.zeros(72)),
        ("bias: expected dtype torch.bfloat16 or torch.float32, got torch.float64", torch.zeros(3, 72).double()),
        ("bias: expected device cpu, where a is, got meta", torch.zeros(3, 72, device="meta")),
        ("bias: expected contiguous rows", torch.zeros(72, 3).T),
        ("bias: expected a tensor without a gradient", torch.zeros(3, 72, requires_grad=True)),
    ],
)
def test_a_bias_of_groups_is_checked(message: str, bias: Tensor) -> None:
    counts, a = COUNTS, (A[0].expand(GROUPS, M, K).contiguous(), A[1].expand(GROUPS, M, 1).contiguous())
    calls: list[Any] = [
        lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(A, B, grouped_layout=IDS, bias=bias, **WHOLE),
        lambda: deep_gemm.m_grouped_fp8_gemm_nt_masked(a, B, masked_m=counts, bias=bias, **WHOLE),
        lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(X16, W16, grouped_layout=IDS, bias=bias),
        lambda: deep_gemm.m_grouped_bf16_gemm_nt_masked(X16[None].expand(3, M, K), W16, masked_m=counts, bias=bias),
    ]
    for call in calls:
        with refused(message):
            call()


def test_an_output_over_a_bias_is_refused() -> None:
    room = torch.zeros(4 * M * N)
    with pytest.raises(ValueError, match="d: expected memory that does not overlap c"):
        deep_gemm.fp8_gemm_nt(A, B0, room[: M * N].view(M, N), room[N : 2 * N], **WHOLE)


def test_gradients_pass_a_bias_by() -> None:
    x, w = X16.clone().requires_grad_(), W16.clone().requires_grad_()
    product: Any = deep_gemm.m_grouped_bf16_gemm_nt_contiguous
    torch.autograd.backward(product(x, w, grouped_layout=IDS, bias=BIAS).sum())
    y, v = X16.clone().requires_grad_(), W16.clone().requires_grad_()
    torch.autograd.backward(product(y, v, grouped_layout=IDS).sum())
    assert torch.equal(some(x.grad), some(y.grad))
    assert torch.equal(some(w.grad), some(v.grad))
    with pytest.raises(ValueError, match="bias: expected a tensor without a gradient"):
        product(x, w, grouped_layout=IDS, bias=BIAS.clone().requires_grad_())


@pytest.mark.few
def test_compiled_programs_have_both() -> None:
    def dense_and_rows(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, bias: Tensor, ids: Tensor) -> tuple[Any, Any]:
        one = deep_gemm.fp8_gemm_nt((a, sfa), (b[0], sfb[0]), c=bias[0], recipe_a=(1, 0), recipe_b=(1, 0))
        said: Any = {"grouped_layout": ids, "bias": bias, "recipe_a": (1, 0), "recipe_b": (0, 0)}
        return one, deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, sfa), (b, sfb[:, :1]), **said)

    given = (*A, *B, BIAS, IDS)
    compiled = torch.compile(dense_and_rows, fullgraph=True, backend="aot_eager")
    for got, right in zip(compiled(*given), dense_and_rows(*given), strict=True):
        assert torch.equal(got, right)
