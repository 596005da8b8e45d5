"""Every public product in every call form: correct values, no write around them, None returned where D was passed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from helpers import (
    CANARY,
    assert_within,
    framed,
    product_and_bound,
    random_fp8,
    random_scales,
    rounding_to,
    some,
    tensor_core_bound,
)
from torch import Tensor

import deep_gemm
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.gemm.api import grouped

M, N, K, GROUPS = 40, 208, 336, 3
FP8_NAN = 0x7F
KS = [144, 0, 256]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass
class Case:
    """One product: the operands of its call, the shape of D, and the values that D must hold."""

    a: tuple[Tensor, Tensor]
    b: tuple[Tensor, Tensor]
    exact: Tensor
    bound: Tensor
    written: Tensor
    """The elements of D that the product writes."""
    tensor_core_bound: Tensor
    """How much the error of a kernel's partial sums may add to the error bound."""
    extra: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    d_starts_as: float = CANARY
    """The value of D before the call: a canary, or the number to which the call adds the product."""


def dense_case(major: str = "nt", sfb_rows: int = 128, dtype: torch.dtype = torch.bfloat16, into: float = 0) -> Case:
    g = torch.Generator().manual_seed(1)
    a, sfa = random_fp8((M, K), g), random_scales((M, ceil_div(K, 128)), g)
    b, sfb = random_fp8((N, K), g), random_scales((ceil_div(N, sfb_rows), ceil_div(K, 128)), g)
    exact, bound = product_and_bound(a, sfa, b, sfb, sfb_rows)
    exact = exact + into
    operand_a = (a, sfa) if major[0] == "n" else (a.t().contiguous(), sfa.t().contiguous())
    operand_b = (b, sfb) if major[1] == "t" else (b.t(), sfb.t())
    extra = {"recipe": (1, 1, 128)} if sfb_rows == 1 and not into else {}
    tensor_cores = tensor_core_bound(a, sfa, b, sfb, sfb_rows)
    written = torch.ones(M, N, dtype=torch.bool)
    return Case(operand_a, operand_b, exact, bound, written, tensor_cores, extra, dtype, into or CANARY)


def grouped_weights(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return random_fp8((GROUPS, N, K), g), random_scales((GROUPS, ceil_div(N, 128), ceil_div(K, 128)), g)


def contiguous_case(layout: str, major: str = "nt", zero_padding: bool = True) -> Case:
    """Make rows of groups 2, 0, 2 with skipped rows between and after them, or the same layout as end offsets."""
    g = torch.Generator().manual_seed(2)
    m = 600
    ids = torch.full((m,), -1, dtype=torch.int32)
    extra: dict[str, Any]
    if layout == "ids":
        ids[:37], ids[40:41], ids[50:90], ids[200:210] = 2, 0, 2, 1
        padding = (torch.arange(m) < 256) & (ids < 0)  # these rows become zeros; the rows behind them are not written
        extra = {"grouped_layout": ids}
    elif layout == "ends":
        ends = torch.tensor([37, 128, 300], dtype=torch.int32)
        ids[:37], ids[128:300] = 0, 2
        padding = (torch.arange(m) < 384) & (ids < 0)
        extra = {"grouped_layout": ends, "use_psum_layout": True}
    else:
        ids = torch.arange(GROUPS, dtype=torch.int32).repeat_interleave(m // GROUPS)
        padding = torch.zeros(m, dtype=torch.bool)
        extra = {"num_groups": GROUPS}
    if not zero_padding:
        if layout == "ends":  # with ids, this option changes nothing
            padding = torch.zeros(m, dtype=torch.bool)
        extra["ensure_zero_padding"] = False
    a, sfa = random_fp8((m, K), g), random_scales((m, ceil_div(K, 128)), g)
    a.view(torch.uint8)[ids < 0], sfa[ids < 0] = FP8_NAN, float("nan")
    b, sfb = grouped_weights(g)
    exact, bound, tensor_cores = (torch.zeros(m, N, dtype=torch.float64) for _ in range(3))
    for group in range(GROUPS):
        rows = ids == group
        exact[rows], bound[rows] = product_and_bound(a[rows], sfa[rows], b[group], sfb[group], 128)
        tensor_cores[rows] = tensor_core_bound(a[rows], sfa[rows], b[group], sfb[group], 128).double()
    written = ((ids >= 0) | padding)[:, None].expand(m, N)
    operand_b = (b, sfb) if major == "nt" else (b.mT, sfb.mT)
    return Case((a, sfa), operand_b, exact, bound, written, tensor_cores, extra)


def masked_case() -> Case:
    g = torch.Generator().manual_seed(3)
    counts = torch.tensor([0, M, 7], dtype=torch.int32)
    a, sfa = random_fp8((GROUPS, M, K), g), random_scales((GROUPS, M, ceil_div(K, 128)), g)
    b, sfb = grouped_weights(g)
    pairs = [product_and_bound(a[x], sfa[x], b[x], sfb[x], 128) for x in range(GROUPS)]
    exact, bound = (torch.stack(x) for x in zip(*pairs, strict=True))
    tensor_cores = torch.stack([tensor_core_bound(a[x], sfa[x], b[x], sfb[x], 128) for x in range(GROUPS)])
    valid = torch.arange(M)[None, :] < counts[:, None]
    a.view(torch.uint8)[~valid], sfa[~valid] = FP8_NAN, float("inf")
    written = valid[..., None].expand(GROUPS, M, N)
    return Case((a, sfa), (b, sfb), exact, bound, written, tensor_cores, {"masked_m": counts, "expected_m": 16})


def columns(x: Tensor, widths: list[int]) -> list[Tensor]:
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    return [x[:, end - width : end] for end, width in zip(ends, widths, strict=True)]


def k_grouped_case(transposed_scales: bool = False, into: float = 0) -> Case:
    g = torch.Generator().manual_seed(4)
    blocks = [ceil_div(k, 128) for k in KS]
    parts_a, parts_b = [random_fp8((M, k), g) for k in KS], [random_fp8((N, k), g) for k in KS]
    sfa, sfb = random_scales((M, sum(blocks)), g), random_scales((N, sum(blocks)), g)
    parts = list(zip(parts_a, columns(sfa, blocks), parts_b, columns(sfb, blocks), strict=True))
    exact, bound = (torch.stack(x) for x in zip(*(product_and_bound(*part, 1) for part in parts), strict=True))
    tensor_cores = torch.stack([tensor_core_bound(*part, 1) for part in parts])
    a, b = (torch.cat([x.flatten() for x in of_side]) for of_side in (parts_a, parts_b))
    if transposed_scales:
        sfa, sfb = sfa.t().contiguous(), sfb.t().contiguous()
    written, extra = torch.ones(len(KS), M, N, dtype=torch.bool), {"ks": KS}
    exact = exact + into
    return Case((a, sfa), (b, sfb), exact, bound, written, tensor_cores, extra, torch.float32, into or CANARY)


PRODUCTS: dict[str, Callable[[], Case]] = {
    **{f"fp8_gemm_{major}": partial(dense_case, major) for major in ("nt", "nn", "tn", "tt")},
    **{f"fp8_fp4_gemm_{major}": partial(dense_case, major) for major in ("nt", "nn", "tn", "tt")},
    "gemm_fp8_fp8_bf16_nt": dense_case,
    "wgrad_gemm_fp8_fp8_fp32_nt": lambda: dense_case(sfb_rows=1, dtype=torch.float32, into=3),
    "m_grouped_fp8_gemm_nt_contiguous": lambda: contiguous_case("ids"),
    "m_grouped_fp8_gemm_nn_contiguous": lambda: contiguous_case("ids", "nn"),
    "m_grouped_fp8_fp4_gemm_nt_contiguous": lambda: contiguous_case("ends"),
    "m_grouped_fp8_fp4_gemm_nn_contiguous": lambda: contiguous_case("ends", "nn"),
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous": lambda: contiguous_case("ids"),
    "m_grouped_fp8_gemm_nt_masked": masked_case,
    "m_grouped_fp8_fp4_gemm_nt_masked": masked_case,
    "fp8_m_grouped_gemm_nt_masked": masked_case,
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked": masked_case,
    "k_grouped_fp8_gemm_nt_contiguous": k_grouped_case,
    "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt": lambda: k_grouped_case(transposed_scales=True, into=3),
}

CALL_FORMS: dict[str, Callable[..., Tensor | None]] = {
    "pairs": lambda f, a, b, d, extra: f(a, b, d, **extra),
    "pairs as lists": lambda f, a, b, d, extra: f(list(a), list(b), d, **extra),
    "apart": lambda f, a, b, d, extra: f(a[0], b[0], a[1], b[1], d, **extra),
    "names of today": lambda f, a, b, d, extra: f(a=a, b=b, d=d, **extra),
    "names of 2025": lambda f, a, b, d, extra: f(lhs=a, rhs=b, out=d, **extra),
    "all positional": lambda f, a, b, d, extra: f(a, b, d, *extra.values()),
    "m-major scales": lambda f, a, b, d, extra: f((a[0], get_mn_major_tma_aligned_tensor(a[1])), b, d, **extra),
    "returned": lambda f, a, b, d, extra: f(a, b, **extra),
    "returned, apart": lambda f, a, b, d, extra: f(a[0], b[0], a[1], b[1], **extra),
}


def to_device(x: Any, device: str) -> Any:
    if isinstance(x, tuple):
        return tuple(to_device(y, device) for y in x)
    return x.to(device) if isinstance(x, Tensor) else x


def check(name: str, case: Case, form: Callable[..., Tensor | None], device: str = "cpu") -> None:
    function = getattr(deep_gemm, name)
    a, b = to_device(case.a, device), to_device(case.b, device)
    extra = {key: to_device(x, device) for key, x in case.extra.items()}
    frame = framed(case.exact.shape, case.dtype, device)
    frame.view.fill_(case.d_starts_as)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        returned = form(function, a, b, frame.view, extra)
    d_was_passed = form not in (CALL_FORMS["returned"], CALL_FORMS["returned, apart"])
    assert (returned is None) == d_was_passed
    into = case.d_starts_as if case.d_starts_as != CANARY else 0
    exact = case.exact
    if returned is None:
        got = frame.view.cpu()
        frame.assert_untouched_outside()
        assert bool((got[~case.written] == case.d_starts_as).all()), "an element outside of the product was written"
    else:
        got, exact = returned.cpu(), exact - into  # without D, nothing is accumulated
        assert torch.equal(frame.view, torch.full_like(frame.view, case.d_starts_as)), "D was written, but not passed"
        assert got.dtype == case.dtype
    bound = case.bound + (exact.abs() + into) * 2.0**-24
    if device == "cuda":
        bound = bound + case.tensor_core_bound
        relative = (got.double() - exact)[case.written].norm() / exact[case.written].norm()
        assert float(relative) < 4e-3
    bound = rounding_to(case.dtype, exact, bound)
    assert_within(torch.where(case.written, got, exact.to(got.dtype)), exact, bound)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", CALL_FORMS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product_in_every_call_form(name: str, form: str, device: str) -> None:
    case = PRODUCTS[name]()
    if form == "all positional" and "contiguous" in name and "use_psum_layout" in case.extra:
        pytest.skip("a keyword selects the form with offsets")
    if form == "m-major scales" and (name.startswith(("fp8_gemm_t", "fp8_fp4_gemm_t"))):
        pytest.skip("the scales of a transposed operand are m-major already")
    check(name, case, CALL_FORMS[form], device)


def test_the_table_above_has_every_public_product() -> None:
    public = {name for name in vars(deep_gemm)["__all__"] if "fp8" in name and "gemm" in name}
    of_other_shapes = {"fp8_gemm_nt_skip_head_mid"}  # tests/gemm/skip/test_skip_head_mid.py tests it
    assert public == set(PRODUCTS) | of_other_shapes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("fp8_gemm_nt", lambda: dense_case(dtype=torch.float32)),
        ("fp8_gemm_nt", lambda: dense_case(sfb_rows=1)),
        ("fp8_gemm_nn", lambda: dense_case("nn", sfb_rows=1, dtype=torch.float32)),
        ("m_grouped_fp8_gemm_nt_contiguous", lambda: contiguous_case("ids", zero_padding=False)),
        ("m_grouped_fp8_gemm_nt_contiguous", lambda: contiguous_case("ends", zero_padding=False)),
        ("m_grouped_fp8_gemm_nt_contiguous", lambda: contiguous_case("equal")),
        ("k_grouped_fp8_gemm_nt_contiguous", k_grouped_case),
    ],
)
def test_variants_of_products(name: str, case: Callable[[], Case], device: str) -> None:
    check(name, case(), CALL_FORMS["pairs"], device)


KEYWORDS: list[tuple[str, Callable[[], Case], dict[str, Any]]] = [
    ("fp8_gemm_nt", dense_case, {"recipe": (1, 128, 128)}),
    ("fp8_gemm_nt", dense_case, {"recipe": [1, 128, 128]}),
    ("fp8_gemm_nt", dense_case, {"recipe_a": (1, 128), "recipe_b": (128, 128)}),
    ("fp8_gemm_nt", dense_case, {"compiled_dims": "mnk", "disable_ue8m0_cast": True}),
    ("fp8_gemm_nn", lambda: dense_case("nn"), {"compiled_dims": "nk", "disable_ue8m0_cast": False}),
    ("fp8_gemm_nt", dense_case, {"alpha": None}),
    ("fp8_gemm_nn", lambda: dense_case("nn"), {"alpha": None}),
    ("fp8_gemm_tn", lambda: dense_case("tn"), {"alpha": None}),
    ("fp8_gemm_tt", lambda: dense_case("tt"), {"alpha": None}),
    ("m_grouped_fp8_gemm_nt_contiguous", lambda: contiguous_case("ids"), {"recipe": (1, 128, 128)}),
    ("m_grouped_fp8_gemm_nt_contiguous", lambda: contiguous_case("ids"), {"num_groups": GROUPS}),
    ("m_grouped_fp8_gemm_nt_contiguous", lambda: contiguous_case("ids"), {"disable_ue8m0_cast": True}),
    ("m_grouped_fp8_gemm_nt_contiguous", lambda: contiguous_case("ends"), {"expected_m_for_psum_layout": 100}),
    ("m_grouped_fp8_gemm_nt_masked", masked_case, {"recipe_a": (1, 128), "compiled_dims": "nk"}),
    ("k_grouped_fp8_gemm_nt_contiguous", k_grouped_case, {"recipe": (1, 1, 128), "compiled_dims": "mn"}),
    ("k_grouped_fp8_gemm_nt_contiguous", k_grouped_case, {"ks_tensor": torch.tensor(KS, dtype=torch.int32)}),
]


@pytest.mark.parametrize(("name", "case", "keywords"), KEYWORDS)
def test_keywords_of_either_era_are_accepted(name: str, case: Callable[[], Case], keywords: dict[str, Any]) -> None:
    made = case()
    made.extra.update(keywords)
    check(name, made, CALL_FORMS["pairs"])


@pytest.mark.parametrize(
    ("name", "case", "old", "new"),
    [
        ("m_grouped_gemm_fp8_fp8_bf16_nt_contiguous", lambda: contiguous_case("ids"), "m_indices", "grouped_layout"),
        ("k_grouped_fp8_gemm_nt_contiguous", k_grouped_case, "ks_cpu", "ks"),
        ("k_grouped_wgrad_gemm_fp8_fp8_fp32_nt", lambda: k_grouped_case(True, 3), "batch_sizes", "ks"),
    ],
)
def test_arguments_go_by_their_older_names(name: str, case: Callable[[], Case], old: str, new: str) -> None:
    made = case()
    made.extra[old] = made.extra.pop(new)
    check(name, made, CALL_FORMS["names of 2025"])


def test_group_sizes_known_to_the_device_alone() -> None:
    case = k_grouped_case()
    sizes = torch.tensor(case.extra.pop("ks"), dtype=torch.int32)
    for keyword in ("ks_tensor", "grouped_layout"):
        case.extra = {"ks": None, keyword: sizes}
        check("k_grouped_fp8_gemm_nt_contiguous", case, CALL_FORMS["pairs"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("host_knows", [False, True])
def test_groups_along_k_may_be_given_by_where_they_end(host_knows: bool, device: str) -> None:
    case, ends = k_grouped_case(), torch.tensor([144, 144, 400], dtype=torch.int32)
    ks = case.extra.pop("ks")
    deep_gemm.set_mk_alignment_for_contiguous_layout(16)
    for keyword in ("ks_tensor", "grouped_layout"):
        case.extra = {"ks": ks if host_knows else None, keyword: ends, "use_psum_layout": True}
        check("k_grouped_fp8_gemm_nt_contiguous", case, CALL_FORMS["pairs"], device)
    case.extra = {"ks": ks, "use_psum_layout": False}
    check("k_grouped_fp8_gemm_nt_contiguous", case, CALL_FORMS["pairs"], device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("d_is_made", [True, False])
def test_c_is_added_in_fp32_and_may_be_d_itself(dtype: torch.dtype, in_place: bool, d_is_made: bool) -> None:
    case = dense_case(dtype=dtype)
    c = torch.randn(M, N, generator=torch.Generator().manual_seed(9)).to(dtype)
    before = c.clone()
    exact = case.exact + before.double()
    if d_is_made:
        d = some(deep_gemm.fp8_gemm_nt(case.a, case.b, c=c))
        assert d.dtype == dtype
    else:
        d = c if in_place else torch.empty_like(c)
        assert deep_gemm.fp8_gemm_nt(case.a, case.b, d, c) is None
    if d is not c:
        assert torch.equal(c, before)
    assert_within(d, exact, rounding_to(dtype, exact, case.bound + exact.abs() * 2.0**-24))


def test_k_grouped_adds_c_and_leaves_it_alone() -> None:
    case = k_grouped_case()
    c = torch.randn(len(KS), M, N)
    before = c.clone()
    d = some(deep_gemm.k_grouped_fp8_gemm_nt_contiguous(case.a, case.b, ks=KS, c=c))
    assert torch.equal(c, before)
    assert torch.equal(d[1], c[1]), "an empty group copies C"
    exact = case.exact + c.double()
    assert_within(d, exact, rounding_to(torch.float32, exact, case.bound + exact.abs() * 2.0**-24))


@pytest.mark.parametrize("m", [0, 4])
@pytest.mark.parametrize("n", [0, 8])
@pytest.mark.parametrize("k", [0, 128])
def test_sizes_of_zero_give_an_empty_d_or_zero_or_c(m: int, n: int, k: int) -> None:
    g = torch.Generator().manual_seed(5)
    a = random_fp8((m, k), g), random_scales((m, ceil_div(k, 128)), g)
    b = random_fp8((n, k), g), random_scales((ceil_div(n, 128), ceil_div(k, 128)), g)
    d = some(deep_gemm.fp8_gemm_nt(a, b))
    assert d.shape == (m, n)
    c = torch.ones(m, n)
    with_c = some(deep_gemm.fp8_gemm_nt(a, b, c=c))
    if k == 0:
        assert torch.equal(d, torch.zeros_like(d))
        assert torch.equal(with_c, c)


def test_no_groups_and_no_rows_are_no_work() -> None:
    layout = torch.empty(0, dtype=torch.int32)
    weights = torch.empty(0, 8, 128).to(torch.float8_e4m3fn), torch.empty(0, 1, 1)
    rows = torch.empty(0, 128).to(torch.float8_e4m3fn), torch.empty(0, 1)
    assert some(deep_gemm.m_grouped_fp8_gemm_nt_contiguous(rows, weights, grouped_layout=layout)).shape == (0, 8)
    planes = torch.empty(0, 4, 128).to(torch.float8_e4m3fn), torch.empty(0, 4, 1)
    assert some(deep_gemm.m_grouped_fp8_gemm_nt_masked(planes, weights, masked_m=layout)).shape == (0, 4, 8)
    a, b = ((torch.empty(0).to(torch.float8_e4m3fn), torch.empty(m, 0)) for m in (4, 8))
    assert some(deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, ks=[])).shape == (0, 4, 8)


def test_products_of_layers_write_no_row_without_a_group() -> None:
    case = contiguous_case("ids")
    d = torch.full((600, N), CANARY, dtype=torch.bfloat16)
    grouped.product_of_stacked_rows(case.a, case.b, d, case.extra["grouped_layout"])
    assert bool((d[case.extra["grouped_layout"] < 0] == CANARY).all())


def test_compile_mode_computes_nothing() -> None:
    case = dense_case()
    d = torch.full((M, N), 7, dtype=torch.bfloat16)
    deep_gemm.set_compile_mode(1)
    deep_gemm.fp8_gemm_nt(case.a, case.b, d)
    assert bool((d == 7).all())


@pytest.mark.parametrize("major", ["nt", "nn", "tn", "tt"])
def test_cublaslt_products_go_through_torch(major: str) -> None:
    x, w = torch.randn(8, 32, dtype=torch.bfloat16), torch.randn(24, 32, dtype=torch.bfloat16)
    a, b = (x if major[0] == "n" else x.t()), (w if major[1] == "t" else w.t())
    for dtype in (torch.bfloat16, torch.float32):
        c = torch.ones(8, 24, dtype=dtype)
        d = torch.empty(8, 24, dtype=dtype)
        getattr(deep_gemm, f"cublaslt_gemm_{major}")(a, b, d, c)
        assert deep_gemm.calc_diff(d, x.double() @ w.double().t() + 1) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [32, 24])  # torch's FP8 product needs multiples of 16
@pytest.mark.parametrize("major", ["nt", "nn", "tn", "tt"])
def test_cublaslt_products_take_fp8_values_without_scales(major: str, n: int, device: str) -> None:
    g = torch.Generator().manual_seed(6)
    x, w = (torch.randn(shape, generator=g).to(torch.float8_e4m3fn) for shape in ((8, 64), (n, 64)))
    exact = x.double() @ w.double().t()
    a, b = (x if major[0] == "n" else x.t()), (w if major[1] == "t" else w.t())
    for lay in (torch.clone, Tensor.contiguous):  # keep operands as views, then copy them to row-major memory
        for dtype, of_c in ((torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, 1.0), (torch.float32, 1.0)):
            d = torch.empty(8, n, dtype=dtype, device=device)
            c = None if of_c is None else torch.full_like(d, of_c)
            getattr(deep_gemm, f"cublaslt_gemm_{major}")(lay(a).to(device), lay(b).to(device), d, c)
            assert deep_gemm.calc_diff(d.cpu(), exact + (of_c or 0)) < (1e-5 if dtype == torch.bfloat16 else 1e-6)


def test_cublaslt_products_of_fp8_values_may_be_empty() -> None:
    for m, n, k in ((0, 16, 16), (16, 0, 16), (16, 16, 0)):
        a, b = torch.empty(m, k).to(torch.float8_e4m3fn), torch.empty(n, k).to(torch.float8_e4m3fn)
        d = torch.ones(m, n)
        deep_gemm.cublaslt_gemm_nt(a, b, d)
        assert not d.any()
