"""Scales of fewer than 128 columns: the definition's bits on the CPU, its bound on a GPU, and errors for mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_within, random_fp8, random_scales, refused, rounding_to, some
from thorough import one_in
from torch import Tensor

import deep_gemm
from deep_gemm.casts.scales import get_mn_major_tma_aligned_packed_ue8m0_tensor
from deep_gemm.core.call import RECORDS
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.check.recipes import Scales, recipes_of, scales_of, whole_recipe
from deep_gemm.core.check.ue8m0 import powers_of, words_of
from deep_gemm.gemm.reference import fma_fp32
from lab.bench.timing import profiled
from lab.sim.rounding import FP32_UNIT, TENSOR_CORES

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WHOLE: list[tuple[dict[str, Any], Scales, Scales]] = [
    ({"recipe": (1, 32, 32)}, Scales(1, 32), Scales(32, 32)),
    ({"recipe": [1, 64, 64]}, Scales(1, 64), Scales(64, 64)),
    ({"recipe": (1, 1, 32)}, Scales(1, 32), Scales(1, 32)),
]
SIDES: list[tuple[dict[str, Any], Scales, Scales]] = [
    ({"recipe_a": (1, 128), "recipe_b": (32, 32)}, Scales(1, 128), Scales(32, 32)),
    ({"recipe_b": (64, 64)}, Scales(1, 128), Scales(64, 64)),
    ({"recipe_a": (1, 32)}, Scales(1, 32), Scales(128, 128)),
    ({"recipe_a": (1, 64), "recipe_b": (1, 32)}, Scales(1, 64), Scales(1, 32)),
    ({"recipe": (1, 32, 32), "recipe_a": (1, 32), "recipe_b": (32, 32)}, Scales(1, 32), Scales(32, 32)),
]
every_recipe = pytest.mark.parametrize(("said", "of_a", "of_b"), [*WHOLE, *SIDES], ids=str)
M, N, K = 37, 136, 288
BY_32 = (1, 32, 32)
IN_TWO_WAYS = {"recipe": BY_32, "recipe_a": (1, 128)}
product: Any = deep_gemm.fp8_gemm_nt
COUNTS = [5, 0, 12]


def operand(shape: tuple[int, ...], of: Scales, seed: int) -> tuple[Tensor, Tensor]:
    *groups, rows, k = shape
    g = torch.Generator().manual_seed(seed)
    return random_fp8(shape, g), random_scales((*groups, ceil_div(rows, of.rows), ceil_div(k, of.columns)), g)


def by_definition(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], of_a: Scales, of_b: Scales) -> tuple[Tensor, ...]:
    """Return D in FP32 by the definition, and how far another order of sums, and tensor cores, may be from this D."""
    (x, sx), (y, sy) = a, b
    columns = min(of_a.columns, of_b.columns)
    acc, terms, sums = (torch.zeros(len(x), len(y), dtype=torch.float64) for _ in range(3))
    sy = sy.repeat_interleave(of_b.rows, 0)[: len(y)]
    blocks = ceil_div(x.shape[1], columns)
    for block in range(blocks):
        ks = slice(block * columns, (block + 1) * columns)
        partial = (x[:, ks].double() @ y[:, ks].double().t()).float()
        scale = sx[:, ks.start // of_a.columns, None] * sy[None, :, ks.start // of_b.columns]
        acc = fma_fp32(partial, scale, acc)
        terms += (partial.double() * scale.double()).abs()
        sums += (x[:, ks].double().abs() @ y[:, ks].double().abs().t()) * scale.double()
    return acc.float(), terms * (blocks + 2) * FP32_UNIT * 2, sums * TENSOR_CORES


def check(d: Tensor, rows: Tensor, a: Any, b: Any, of_a: Scales, of_b: Scales, c: Tensor | None = None) -> None:
    """Check that `rows` of D are the product of a and b."""
    expected, bound, tensor_cores = by_definition(a, b, of_a, of_b)
    total = expected if c is None else expected + c.cpu().float()
    if d.is_cpu:
        assert torch.equal(d[rows], total.to(d.dtype))
    else:
        exact = total.double()
        assert_within(d[rows], exact, rounding_to(d.dtype, exact, bound + tensor_cores))


@every_recipe
def test_an_operator_is_told_all_of_a_recipe(said: dict[str, Any], of_a: Scales, of_b: Scales) -> None:
    recipes = said.get("recipe"), said.get("recipe_a"), said.get("recipe_b")
    assert scales_of(recipes_of(whole_recipe(recipes))) == scales_of(recipes) == (of_a, of_b)


def same(x: Tensor | None, y: Tensor) -> bool:
    return x is not None and torch.equal(x, y)


def to(device: str, operand: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return operand[0].to(device), operand[1].to(device)


@pytest.mark.parametrize("device", DEVICES)
@every_recipe
def test_dense(said: dict[str, Any], of_a: Scales, of_b: Scales, device: str) -> None:
    everything = torch.arange(M)
    for k in (K, 16, 128, 336):
        a, b = operand((M, k), of_a, 1), operand((N, k), of_b, 2)
        on_a, on_b = to(device, a), to(device, b)
        d = product(on_a, on_b, **said)
        assert d.dtype == (torch.float32 if of_b.rows == 1 else torch.bfloat16)
        check(d, everything, a, b, of_a, of_b)
        for dtype in (torch.bfloat16, torch.float32):
            c = torch.randn(M, N, device=device).to(dtype)
            d = torch.full_like(c, torch.nan)
            assert product(on_a, on_b, d, c, **said) is None
            check(d, everything, a, b, of_a, of_b, c)
            accumulated = c.clone()
            product(on_a, on_b, accumulated, accumulated, **said)
            assert torch.equal(accumulated, d)


@pytest.mark.parametrize("device", DEVICES)
@every_recipe
def test_operands_that_are_turned(said: dict[str, Any], of_a: Scales, of_b: Scales, device: str) -> None:
    a, b = (to(device, operand(shape, of, 3)) for shape, of in (((M, K), of_a), ((N, K), of_b)))
    expected = product(a, b, **said)
    turned_a, turned_b = ((values.t(), scales.t()) for values, scales in (a, b))
    assert same(deep_gemm.fp8_gemm_nn(a, turned_b, **said), expected)
    m_major = a[0], deep_gemm.get_mn_major_tma_aligned_tensor(a[1])  # engines pass such scales
    assert same(product(m_major, b, **said), expected)
    assert same(deep_gemm.fp8_gemm_tn(turned_a, turned_b, **said), expected)
    assert same(deep_gemm.fp8_gemm_tt(turned_a, b, **said), expected)


@pytest.mark.parametrize("device", DEVICES)
@every_recipe
def test_rows_of_groups(said: dict[str, Any], of_a: Scales, of_b: Scales, device: str) -> None:
    m, groups = 200, len(COUNTS)
    a, b = operand((m, K), of_a, 4), operand((groups, N, K), of_b, 5)
    on_a, on_b = to(device, a), to(device, b)
    ids = torch.full((m,), -1, dtype=torch.int32)
    ids[:70], ids[70:71], ids[130:190] = 2, 0, 2
    ends = torch.tensor([70, 70, 190], dtype=torch.int32)
    by_ends = torch.full_like(ids, -1)
    by_ends[:70], by_ends[128:190] = 0, 2
    turned = on_b[0].mT, on_b[1].mT
    for layout, of_rows, more in ((ids, ids, {}), (ends, by_ends, {"use_psum_layout": True})):
        d = torch.full((m, N), torch.nan, dtype=torch.bfloat16, device=device)
        given: Any = {**said, **more, "grouped_layout": layout.to(device)}
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(on_a, on_b, d, **given)
        for group in range(groups):
            rows = (of_rows == group).nonzero().flatten()
            check(d, rows, (a[0][rows], a[1][rows]), (b[0][group], b[1][group]), of_a, of_b)
        again = torch.full_like(d, torch.nan)
        deep_gemm.m_grouped_fp8_gemm_nn_contiguous(on_a, turned, again, **given)
        assert torch.equal(again.nan_to_num(7), d.nan_to_num(7))


@pytest.mark.parametrize("device", DEVICES)
@every_recipe
def test_counted_rows(said: dict[str, Any], of_a: Scales, of_b: Scales, device: str) -> None:
    shape = (len(COUNTS), 12, K)
    a, b = operand(shape, of_a, 6), operand((len(COUNTS), N, K), of_b, 7)
    d = torch.full((*shape[:2], N), 7.0, dtype=torch.bfloat16, device=device)
    counts = torch.tensor(COUNTS, dtype=torch.int32, device=device)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(to(device, a), to(device, b), d, counts, 8, **said)
    for group, count in enumerate(COUNTS):
        operands = [(values[group], scales[group]) for values, scales in (a, b)]
        check(d[group], torch.arange(count), tuple(x[:count] for x in operands[0]), operands[1], of_a, of_b)
        assert (d[group, count:] == 7).all()


FORMS: list[Any] = [
    lambda x: x,
    lambda x: x.view(torch.float8_e8m0fnu),
    words_of,
    lambda x: words_of(x).mT.contiguous().mT,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
]


def exponents_like(sf: Tensor) -> tuple[Tensor, Tensor]:
    """Draw exponents, among them 0 and NaN; return them and the numbers that they encode."""
    generator = torch.Generator().manual_seed(sf.numel())
    exponents = torch.randint(120, 134, sf.shape, generator=generator, dtype=torch.uint8)
    exponents.view(-1)[3], exponents.view(-1)[-2] = 0, 255
    return exponents.to(sf.device), powers_of(exponents.int()).to(sf.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m", one_in(2, [M, 300]))
@every_recipe
def test_ue8m0_bytes_and_words(said: dict[str, Any], of_a: Scales, of_b: Scales, m: int, device: str) -> None:
    """Pass the exponents of either operand, in any form, together with FP32 scales of the other."""
    a, b = to(device, operand((m, K), of_a, 1)), to(device, operand((N, K), of_b, 2))
    (bytes_of_a, numbers_of_a), (bytes_of_b, numbers_of_b) = exponents_like(a[1]), exponents_like(b[1])
    expected = product((a[0], numbers_of_a), (b[0], numbers_of_b), **said).nan_to_num(7.25)
    assert (expected == 7.25).any()
    assert (expected != 7.25).any()
    for form in FORMS:
        sfa, sfb = form(bytes_of_a), form(bytes_of_b)
        for given_a, given_b in ((sfa, sfb), (numbers_of_a, sfb), (sfa, numbers_of_b)):
            for _ in range(2):
                assert same(product((a[0], given_a), (b[0], given_b), **said).nan_to_num(7.25), expected)
        turned = some(deep_gemm.fp8_gemm_nn((a[0], sfa), (b[0].t(), sfb.t()), **said))
        assert same(turned.nan_to_num(7.25), expected)


@pytest.mark.parametrize("device", DEVICES)
@every_recipe
def test_ue8m0_of_groups(said: dict[str, Any], of_a: Scales, of_b: Scales, device: str) -> None:
    """Rows by ids, by ends and by counts give the same result for exponents in any form as for the numbers in FP32."""
    m, groups = 200, len(COUNTS)
    b = to(device, operand((groups, N, K), of_b, 5))
    ids = torch.full((m,), -1, dtype=torch.int32, device=device)
    ids[:70], ids[128:190] = 0, 2
    ends = torch.tensor([70, 70, 190], dtype=torch.int32, device=device)
    counts = torch.tensor(COUNTS, dtype=torch.int32, device=device)
    api: Any = deep_gemm
    calls: list[tuple[tuple[int, ...], Any]] = [
        ((m,), lambda *x: api.m_grouped_fp8_gemm_nt_contiguous(*x, ids, **said)),
        ((m,), lambda *x: api.m_grouped_fp8_gemm_nt_contiguous(*x, ends, use_psum_layout=True, **said)),
        ((groups, 12), lambda *x: api.m_grouped_fp8_gemm_nt_masked(*x, counts, 8, **said)),
    ]
    for rows, call in calls:
        a = to(device, operand((*rows, K), of_a, 4))
        (bytes_of_a, numbers_of_a), (bytes_of_b, numbers_of_b) = exponents_like(a[1]), exponents_like(b[1])

        def multiplied(sfa: Tensor, sfb: Tensor, a: Any = a, call: Any = call, rows: Any = rows) -> Tensor:
            d = torch.full((*rows, N), 3.5, dtype=torch.bfloat16, device=device)
            call((a[0], sfa), (b[0], sfb), d)
            return d.nan_to_num(7.25)

        expected = multiplied(numbers_of_a, numbers_of_b)
        for form in one_in(2, FORMS):
            for given_a in (form(bytes_of_a), numbers_of_a):
                assert torch.equal(multiplied(given_a, form(bytes_of_b)), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.uint8, torch.float8_e8m0fnu])
def test_a_product_of_no_depth_is_c_with_scales_of_each_type(dtype: torch.dtype, device: str) -> None:
    def empty(rows: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, 0, dtype=torch.uint8, device=device).to(dtype)

    a, b = ((empty(rows, torch.float8_e4m3fn), empty(rows, dtype)) for rows in (5, 16))
    d, c = torch.full((5, 16), torch.nan, device=device), torch.rand(5, 16, device=device)
    for _ in range(3):
        product(a, b, d, c, recipe=(1, 1, 32))
        assert torch.equal(d, c)
    bias, x = torch.rand(16, device=device).bfloat16(), torch.empty(5, 0, device=device)
    packed = empty(16, torch.int8), b[1]
    for w, said in ((b, {"recipe_b": (1, 32)}), (packed, {})):
        out = deep_gemm.linear(x, w, bias=bias, **said)  # type: ignore[arg-type]
        assert out is not None and torch.equal(out, bias.expand(5, 16))


@pytest.mark.parametrize("turned", [False, True])
def test_words_of_another_shape_are_refused(turned: bool) -> None:
    a, b = operand((M, K), Scales(1, 32), 1), operand((N, K), Scales(32, 32), 2)
    words = torch.zeros(4, 3, dtype=torch.int32)  # lacks one row of blocks
    with pytest.raises(ValueError, match=r"sfb: expected shape \(5, 3\) of torch.int32, got \(4, 3\)"):
        if turned:
            deep_gemm.fp8_gemm_nn(a, (b[0].t(), words.t()), recipe=(1, 32, 32))
        else:
            product(a, (b[0], words), recipe=(1, 32, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [8, 512])
@pytest.mark.parametrize("form", FORMS[::2])
@pytest.mark.parametrize(("said", "of_a", "of_b"), [WHOLE[0], WHOLE[2], SIDES[0]], ids=str)
def test_calls_that_are_alike_have_one_record(said: Any, of_a: Scales, of_b: Scales, form: Any, m: int) -> None:
    """A call runs only the product's kernel; with many rows also a kernel that copies scales to a layout for TMA."""
    a, b = (to("cuda", operand(shape, of, 1)) for shape, of in (((m, 1024), of_a), ((N, 1024), of_b)))
    a, b = ((values, form(exponents_like(sf)[0])) for values, sf in (a, b))
    d = torch.empty(m, N, dtype=torch.bfloat16, device="cuda")
    product(a, b, d, **said)
    kept = sum(map(len, RECORDS.values()))
    kernels = [event.name for event in profiled(lambda: product(a, b, d, **said))]
    assert sum(map(len, RECORDS.values())) == kept
    laid = 0 if m == 8 else 1 if of_b.rows > 1 else 2
    assert sum(name == "lay_scales" for name in kernels) == laid
    assert sum(name.startswith("fp8_") for name in kernels) == 1 == len(kernels) - laid


@pytest.mark.parametrize(
    ("said", "shape_a", "shape_b", "message"),
    [
        ({"recipe": BY_32}, (M, 3), (5, 9), "sfa: expected shape (m, ceil(k / 32)) = (37, 9), got (37, 3)"),
        ({"recipe": BY_32}, (M, 9), (2, 3), "sfb: expected shape (ceil(n / 32), ceil(k / 32)) = (5, 9), got (2, 3)"),
        ({"recipe": (1, 1, 32)}, (M, 9), (5, 9), "sfb: expected shape (n, ceil(k / 32)) = (136, 9), got (5, 9)"),
        ({"recipe_b": (64, 64)}, (M, 5), (3, 5), "sfa: expected shape (m, ceil(k / 128)) = (37, 3), got (37, 5)"),
        (IN_TWO_WAYS, (M, 3), (5, 9), "recipe_a: expected agreement with recipe (1, 32, 32), got (1, 128)"),
    ],
)
def test_a_mistake_is_told(said: Any, shape_a: tuple[int, int], shape_b: tuple[int, int], message: str) -> None:
    a, b = ((torch.zeros(rows, K).to(torch.float8_e4m3fn)) for rows in (M, N))
    with refused(message):
        product((a, torch.ones(shape_a)), (b, torch.ones(shape_b)), **said)


def test_products_that_take_128_columns_alone_say_so() -> None:
    a, b = operand((M, 128), Scales(1, 32), 1), operand((N, 128), Scales(32, 32), 2)
    d = torch.empty(M, N, dtype=torch.bfloat16)
    expected = r"recipe: expected \(1, 128, 128\) or \(1, 1, 128\), got \(1, 32, 32\)"
    with pytest.raises(NotImplementedError, match=expected):
        deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, d, (68, 0, 68), recipe=(1, 32, 32))
    with pytest.raises(NotImplementedError, match=expected):
        deep_gemm.fp8_einsum("bhr,hdr->bhd", a, b, recipe=(1, 32, 32))
    with pytest.raises(NotImplementedError, match=expected):
        deep_gemm.explain(M, N, 128, groups="heads", num_groups=2, recipe=(1, 32, 32))
    assert deep_gemm.explain(M, N, 128, recipe=(1, 32, 32))[0].config.name == "64x8 2/SM bf16 1x32 by 32x32"
