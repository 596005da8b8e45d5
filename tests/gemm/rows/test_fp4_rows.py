"""Products of grouped rows with FP4 weights (MXFP4): all forms give the bits of dense products of each group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp4_cases import FORMS, plain, random_weight
from helpers import refused
from torch import Tensor

import deep_gemm
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.ue8m0 import exponents_of, words_of
from deep_gemm.gemm.api.grouped import product_of_rows_by_64
from deep_gemm.gemm.ask.rows import contiguous_problem, masked_problem

GROUPS, N = 3, 24
IDS = [2, 2, -1, 0, 0, 0, 2]
stacked: Any = deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous
turned: Any = deep_gemm.m_grouped_fp8_fp4_gemm_nn_contiguous
counted: Any = deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked
dense: Any = deep_gemm.fp8_fp4_gemm_nt


def rows(*shape: int, columns: int = 128) -> Operand:
    """Make an A whose scales are powers of two, so that words can hold the scales."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=True, gran_k=columns)


def by_groups(a: Operand, b: Operand, ids: list[int], **said: Any) -> Tensor:
    """Compute each row by a dense product; rows without a group are zeros."""
    d = torch.zeros(len(ids), b[0].shape[1], dtype=torch.bfloat16)
    for row, group in enumerate(ids):
        if group >= 0:
            d[row] = dense((a[0][row : row + 1], a[1][row : row + 1]), (b[0][group], b[1][group]), **said)
    return d


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [32, 288, 512])
def test_all_forms_of_scales_give_the_product(k: int, form: str) -> None:
    a, (values, scales) = rows(len(IDS), k), random_weight(GROUPS, N, k)
    b, ids = (values, FORMS[form](scales)), torch.tensor(IDS, dtype=torch.int32)
    expected = by_groups(a, b, IDS)
    said = {"recipe_a": (1, 128), "recipe_b": (1, 32)}
    d = stacked(a, b, grouped_layout=ids, **said)
    assert d.dtype == torch.bfloat16
    assert torch.equal(d, expected)
    b = values.view(torch.int8).mT, FORMS[form](scales).mT
    assert torch.equal(turned(a, b, grouped_layout=ids, **said), expected)


@pytest.mark.parametrize("alignment", [16, 128])
def test_ends_at_any_alignment(alignment: int) -> None:
    deep_gemm.get_mk_alignment_for_contiguous_layout()
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    a, b = rows(2 * alignment + 5, 160), random_weight(GROUPS, N, 160)
    ends = torch.tensor([3, 3, 2 * alignment + 5], dtype=torch.int32)
    d = stacked(a, b, grouped_layout=ends, use_psum_layout=True)
    ids = [0] * 3 + [-1] * (alignment - 3) + [2] * (alignment + 5)
    assert torch.equal(d, by_groups(a, b, ids))


@pytest.mark.parametrize("form", FORMS)
def test_counted_rows(form: str) -> None:
    (x, sx), (values, scales) = rows(GROUPS, 5, 288), random_weight(GROUPS, N, 288)
    counts, b = [5, 0, 2], (values, FORMS[form](scales))
    d = torch.full((GROUPS, 5, N), 7.0, dtype=torch.bfloat16)
    assert counted((x, sx), b, d, torch.tensor(counts, dtype=torch.int32), 2) is None
    for group, count in enumerate(counts):
        expected = by_groups((x[group], sx[group]), b, [group] * count + [-1] * (5 - count))
        assert torch.equal(d[group, :count], expected[:count])
        assert (d[group, count:] == 7).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("columns", [32, 128])
def test_scales_of_a_in_every_form(columns: int, packed: bool) -> None:
    x, sx = rows(len(IDS), 672, columns=columns)
    b, said = random_weight(GROUPS, N, 672), {"recipe_a": (1, columns), "recipe_b": (1, 32)}
    expected = by_groups((x, sx), b, IDS, **said)
    words = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor
    of_a = words(sx) if packed else deep_gemm.get_mn_major_tma_aligned_tensor(sx)
    assert torch.equal(stacked((x, of_a), b, grouped_layout=torch.tensor(IDS, dtype=torch.int32), **said), expected)
    of_a = words(sx[None].expand(GROUPS, -1, -1)) if packed else sx.expand(GROUPS, -1, -1)
    everywhere = torch.full((GROUPS,), len(IDS), dtype=torch.int32)
    d = counted((x.repeat(GROUPS, 1, 1), of_a), b, None, everywhere, **said)
    for row, group in enumerate(IDS):
        assert torch.equal(d[group, row], expected[row]) or group < 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [64, 160, 672])
def test_scales_of_a_for_64_columns(k: int, form: str) -> None:
    """A has a scale for each half of a k-block, as activations have, so the sum of each half is scaled separately."""
    (x, sx), (values, scales) = rows(len(IDS), k, columns=64), random_weight(GROUPS, N, k)
    b, d = (values, FORMS[form](scales)), torch.full((len(IDS), N), 7.0)
    product_of_rows_by_64((x, sx), b, d, torch.tensor(IDS, dtype=torch.int32))
    exact = x.double() * sx.double().repeat_interleave(64, 1)[:, :k]
    for row, group in enumerate(IDS):
        right = plain(values[max(group, 0)], scales[max(group, 0)]) @ exact[row]
        assert deep_gemm.calc_diff(d[row].double(), right) < 1e-12 or (group < 0 and (d[row] == 7).all())


@pytest.mark.parametrize("columns", [32, 64])
def test_beside_finer_scales_of_a_a_weight_remains_fp4(columns: int) -> None:
    (x, sx), b = rows(6, 288, columns=columns), random_weight(GROUPS, N, 288)
    p = contiguous_problem((x, sx), b, None, None, num_groups=GROUPS, recipes=(None, (1, columns), None))
    blocks = -(-288 // columns)
    assert (p.k, p.of_a, p.of_b) == (128 * blocks, (1, 128), (1, 32))
    assert (p.b.dtype, p.b.shape, p.sfb.shape) == (torch.uint8, (GROUPS, N, 64 * blocks), (GROUPS, N, blocks))
    narrow = x.double() * sx.double().repeat_interleave(columns, 1)[:, :288]
    wide = p.a.double() * p.sfa.double().repeat_interleave(128, 1)
    for group in range(GROUPS):
        right = narrow @ plain(b[0][group], b[1][group]).t()
        found = wide @ plain(p.b[group], exponents_of(p.sfb[group]).to(torch.uint8)).t()
        assert torch.allclose(found, right, rtol=1e-12, atol=1e-12)


def test_scales_of_any_fp32_value() -> None:
    a, (values, _) = rows(len(IDS), 288), random_weight(GROUPS, N, 288)
    b = values, torch.rand(GROUPS, N, 9) + 0.1
    assert torch.equal(stacked(a, b, grouped_layout=torch.tensor(IDS, dtype=torch.int32)), by_groups(a, b, IDS))


def test_groups_may_share_a_weight_by_a_stride_of_zero() -> None:
    a, (values, scales) = rows(6, 256), random_weight(1, N, 256)
    shared = values.expand(GROUPS, -1, -1), scales.expand(GROUPS, -1, -1)
    expected = by_groups(a, (values, scales), [0] * 6)
    assert torch.equal(stacked(a, shared, num_groups=GROUPS), expected)
    p = contiguous_problem(a, shared, None, None, num_groups=GROUPS)
    assert (p.b.data_ptr(), p.b.stride(0), p.sfb.data_ptr()) == (values.data_ptr(), 0, scales.data_ptr())


def test_kernels_are_given_bytes_and_words() -> None:
    b, counts = random_weight(GROUPS, N, 288), torch.zeros(GROUPS, dtype=torch.int32)
    by_ids = contiguous_problem(rows(6, 288), b, None, None, num_groups=GROUPS)
    for p in (by_ids, masked_problem(rows(3, 2, 288), b, None, counts, None)):
        assert p.b.dtype == torch.uint8 and p.b.shape == (GROUPS, N, 144)
        assert p.sfb.dtype == torch.int32 and p.sfb.shape == (GROUPS, N, 3)
        assert (p.n, p.k, p.of_b) == (N, 288, (1, 32))


REFUSED: dict[str, Callable[..., dict[str, Any]]] = {
    "recipe: expected (1, 1, 32) for packed FP4 values, got (1, 128, 128)": lambda b, sf: {"recipe": (1, 128, 128)},
    "b: expected shape (groups, n, k / 2) = (groups, n, 48), got (3, 24, 47)": lambda b, sf: {"b": (b[..., 1:], sf)},
    "sfb: expected shape (3, 24, 3) of torch.uint8, got (2, 24, 3)": lambda b, sf: {"b": (b, sf[1:])},
    "sfb: expected shape (3, 24, 1) of torch.int32": lambda b, sf: {"b": (b, words_of(sf).repeat(1, 1, 2))},
    "b: expected values contiguous along k": lambda b, sf: {"b": (b.mT.contiguous().mT, sf)},
    "n: expected a multiple of 8": lambda b, sf: {"b": (b[:, :12], sf[:, :12])},
    "num_groups: expected the 3 groups of b, got 2": lambda b, sf: {"num_groups": 2},
    "k: expected a multiple of 32 for packed FP4 values, got 80": lambda b, sf: {
        "a": rows(6, 80),
        "b": (b[..., :40].contiguous(), sf),
    },
}
"""The beginning of an error, and the change of a correct call's weight that causes it."""


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_wrong_is_said_in_words(message: str) -> None:
    b = random_weight(GROUPS, N, 96)
    with refused(message):
        stacked(**{"a": rows(6, 96), "b": b, "num_groups": GROUPS, **REFUSED[message](*b)})


def test_a_weight_packed_along_n_is_refused() -> None:
    values, scales = random_weight(GROUPS, 48, 96)
    with pytest.raises(ValueError, match=r"^b: expected values contiguous along k"):
        turned(rows(6, 96), (values.mT.contiguous(), scales.mT), num_groups=GROUPS)
