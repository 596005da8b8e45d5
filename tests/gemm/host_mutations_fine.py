"""Mistakes in the checks of fine scales and FP4 weights, which `host_mutations.py` runs.

The trials are tests of the reference on the CPU and of errors. They run in the process that has the broken module.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def by_tests(*files: str) -> None:
    """Run the tests of these files that need no GPU. If a test fails, raise an error with the tests' output."""
    told = io.StringIO()
    with redirect_stdout(told):
        code = pytest.main(["-x", "-m", "not gpu", "-p", "no:cacheprovider", "-p", "no:xdist", *_paths(files)])
    if code != pytest.ExitCode.OK:
        raise AssertionError(told.getvalue()[-2000:])


def _paths(files: tuple[str, ...]) -> list[str]:
    return [str(TESTS / file) for file in files]


FINE, FP4, FP4_ROWS = "tests of fine scales", "tests of FP4 weights", "tests of FP4 weights by groups"
LAYOUTS, WHOLE = "tests of layouts", "tests of scales of all of k"
TRIALS: dict[str, Callable[[], None]] = {
    FINE: partial(by_tests, "gemm/test_fine_scales.py"),
    FP4: partial(by_tests, "gemm/dense/test_fp4_products.py"),
    FP4_ROWS: partial(by_tests, "gemm/rows/test_fp4_rows.py"),
    WHOLE: partial(by_tests, "gemm/test_whole_scales.py"),
    LAYOUTS: partial(by_tests, "core/test_layout.py", "casts/test_packed_scales.py"),
}

CHECKS = "core.check.checks"
PACKED, SLOW, RECIPES, LAYOUT, CASTS, UE8M0 = (
    "gemm.packed",
    "gemm.fine_scales",
    "core.check.recipes",
    "core.check.layout",
    "casts.scales",
    "core.check.ue8m0",
)
SWAPS: list[tuple[str, ...]] = [
    # How FP4 weights and their scales are recognized
    (PACKED, "(torch.int8, torch.uint8, torch.float4", "(torch.int8, torch.int8, torch.float4", FP4),
    (PACKED, "torch.uint8, torch.float4_e2m1fn_x2)", "torch.uint8)", FP4),
    (PACKED, "if recipe is None and of_b is None:", "if recipe is None:", FP4),
    (PACKED, "return scales_of((None, of_a, None))[0]", "return scales_of((None, None, None))[0]", FP4),
    (PACKED, "    if found != MX:\n", "    if found == MX:\n", FP4),
    (PACKED, "    if found != MX:\n", "    if not found:\n", FP4),
    (PACKED, "of_b) if recipe is None else", "of_b) if recipe is not None else", FP4),
    (PACKED, "sizes[half] = sizes[depth] // 2", "sizes[half] = sizes[depth]", FP4),
    (PACKED, "k = whole_groups(depth, sizes.setdefault(", "k = (sizes.setdefault(", FP4),
    (PACKED, "values, sf = values.mT, sf.mT", "values = values.mT", FP4_ROWS),
    (PACKED, "    if k % COLUMNS:\n", "    if k % 16:\n", FP4),
    (PACKED, '    checks.has_type(f"sf{name}", sf, (torch.float32, torch.int32, *EXPONENTS))\n', "", FP4),
    (PACKED, "ceil_div(k, SCALE_BLOCK) if sf.dtype", "k // SCALE_BLOCK if sf.dtype", FP4),
    (PACKED, "else k // COLUMNS)", "else k // SCALE_BLOCK)", FP4),
    (PACKED, "else k // COLUMNS)\n    if sf.shape != expected:", "else k // COLUMNS)\n    if not expected:", FP4),
    (PACKED, '    whole_elements(f"sf{name}", sf)\n', "", FP4),
    (PACKED, "words_of(sf) if sf.dtype in EXPONENTS else sf", "sf", FP4),
    # Scales of E4M3 values
    (UE8M0, "is_fine = min(of.columns, beside.columns or SCALE_BLOCK)", "is_fine = of.columns", FINE),
    (UE8M0, "is_fine = min(of.columns, beside", "is_fine = max(of.columns, beside", FINE),
    (UE8M0, "return words_of(sf) if sf.dtype in EXPONENTS else sf", "return sf", FINE),
    (UE8M0, "    sf = sf.mT if transposed else sf\n", "", FINE),
    (UE8M0, "ceil_div(ceil_div(k, of.columns), UE8M0_PER_WORD)", "ceil_div(k, of.columns) // UE8M0_PER_WORD", FINE),
    (UE8M0, "(*outer[:-1], ceil_div(outer", "(ceil_div(outer", FP4_ROWS, FINE),
    (UE8M0, "ceil_div(outer[-1], of.rows)", "outer[-1] // of.rows", FINE),
    (UE8M0, "    if sf.shape != expected:\n", "    if not expected:\n", FINE),
    (UE8M0, "exponents_of(sf)[..., :groups]", "exponents_of(sf)[..., -groups:]", FINE),
    # Scales of all of k, and biases
    (RECIPES, "if not of_a.columns and not of_b.columns:", "if not of_a.columns:", WHOLE),
    (RECIPES, "return of_a if of_a.columns else PER_ROW,", "return PER_ROW,", FINE),
    (RECIPES, "if of_b.rows == 1 and of_b != WHOLE else", "if of_b.rows == 1 else", WHOLE),
    (UE8M0, "sf.mT if transposed and sf.dim() > 1 else sf", "sf", WHOLE),
    (UE8M0, "and (of.rows or sf.numel() != 1):", "and sf.numel() != 1:", WHOLE),
    (UE8M0, "rows if of.rows else 1, 1)", "rows, 1)", WHOLE),
    (UE8M0, "0 if size == 1 else stride", "stride", WHOLE),
    (UE8M0, "checks.fp32_scales(name, sf)\n    *groups", "*groups", WHOLE),
    (CHECKS, "x.float() if x.dtype != dtype == torch.float32 else x", "x", WHOLE),
    (CHECKS, "if not x.is_contiguous() or (has_memory(x)", "if (has_memory(x)", WHOLE),
    (
        CHECKS,
        'or (has_memory(x) and x.data_ptr() % ADDRESS_ALIGNMENT):\n        raise ValueError(f"{name}: expected contig',
        'or False:\n        raise ValueError(f"{name}: expected contig',
        WHOLE,
    ),
    (CHECKS, "inputs[name] = shaped(name", "shaped(name", WHOLE),
    ("gemm.reference", "made if p.bias is None else made + p.bias[group]).to", "made).to", WHOLE),
    ("gemm.reference", "* torch.mul(sfa, sfb.mT)", "* torch.mul(sfa, 1)", WHOLE),
    ("gemm.problem", "p.d.masked_fill_(padding_rows(ids, p.alignment)[:, None], 0)", "pass", WHOLE),
    # FP4 converted to E4M3
    (PACKED, "magnitudes > 1", "magnitudes > 0", FP4),
    (PACKED, "(magnitudes << 2) + HALF", "(magnitudes << 2) | HALF", FP4),
    (PACKED, "magnitudes * HALF", "HALF", FP4),
    (PACKED, "(codes & 8) << 4", "(codes & 8) << 3", FP4),
    (PACKED, "HALF = 0x30", "HALF = 0x38", FP4),
    # FP4 with scales that kernels do not support
    (SLOW, "if sfb.dtype != torch.int32:", "if sfb.dtype == torch.int32:", FP4_ROWS),
    (SLOW, "    if of_a.columns == SCALE_BLOCK:\n", "    if of_a.columns != SCALE_BLOCK:\n", FP4_ROWS),
    (SLOW, "squeeze(-1), PER_ROW", "squeeze(-1), of_a", FP4_ROWS),
    (SLOW, "columns // packed.COLUMNS\n", "1\n", FP4_ROWS),
    (SLOW, "groups = ceil_div(k, columns)", "groups = k // columns", FP4_ROWS),
    (SLOW, "(0, groups * of_group - exponents.shape[-1])", "(groups * of_group - exponents.shape[-1], 0)", FP4_ROWS),
    (SLOW, "SCALE_BLOCK // 2)", "SCALE_BLOCK)", FP4_ROWS),
    (SLOW, "wide[..., columns:] = 0", "wide[..., columns:] = 127", FP4_ROWS),
    (SLOW, "wide[..., whole, k % columns : columns] = 0", "wide[..., whole, k % columns : columns] = 127", FP4_ROWS),
    (SLOW, "= values[..., whole * columns :]\n", "= values[..., : k % columns]\n", FP4_ROWS),
    (SLOW, "    if whole < groups:\n", "    if whole > groups:\n", FP4_ROWS),
    # Recipes
    (RECIPES, "if all(recipe is None for", "if any(recipe is None for", FINE),
    (RECIPES, "RECIPES, (*RECIPES_OF_A, (1, 0)", "RECIPES, (*RECIPES_OF_B, (1, 0)", FINE),
    (RECIPES, "if each[-1] >= finest]", "if each[-1] >= 0]", FINE),
    (RECIPES, "if numbers is not None and numbers not in allowed:", "if numbers == ():", FINE),
    (RECIPES, "zip(USUAL, sides, strict=True))", "zip(USUAL[::-1], sides, strict=True))", FINE),
    (RECIPES, "both[0], both[2]), Scales(both[1],", "both[1], both[2]), Scales(both[0],", FINE),
    (RECIPES, "if side is not None and side != expected:", "if side is not None and not expected:", FINE),
    (RECIPES, "scales_of(recipes, SCALE_BLOCK)[1]", "scales_of(recipes)[1]", FINE),
    (RECIPES, "scales_of(recipes, SCALE_BLOCK)[1]", "scales_of(recipes, SCALE_BLOCK)[0]", "heads"),
    (RECIPES, "    if found == USUAL:\n", "    if found != USUAL:\n", FINE),
    (RECIPES, "if of_a.columns == of_b.columns > 0 else", "if of_a.columns != of_b.columns > 0 else", FINE),
    (RECIPES, "torch.float32 if of_b.rows == 1", "torch.float32 if of_b.rows > 1", FINE),
    (LAYOUT, "(1, 64, 64), (1, 32, 32), (1, 1, 32))", "(1, 64, 64), (1, 1, 32))", FINE),
    (LAYOUT, "(1, 64, 64), (1, 32, 32), (1, 1, 32))", "(1, 32, 32), (1, 1, 32))", FINE),
    (LAYOUT, "(1, 64, 64), (1, 32, 32), (1, 1, 32))", "(1, 64, 64), (1, 32, 32))", FINE),
    (LAYOUT, "((1, SCALE_BLOCK), (1, 64), (1, 32))", "((1, SCALE_BLOCK), (1, 64))", FINE),
    (LAYOUT, "((1, SCALE_BLOCK), (1, 64), (1, 32))", "((1, SCALE_BLOCK), (1, 32))", FINE),
    (LAYOUT, "(1, SCALE_BLOCK), (64, 64), (32, 32), (1, 32))", "(1, SCALE_BLOCK), (64, 64), (1, 32))", FINE),
    (LAYOUT, "(1, SCALE_BLOCK), (64, 64), (32, 32), (1, 32))", "(1, SCALE_BLOCK), (32, 32), (1, 32))", FINE),
    (LAYOUT, "(1, SCALE_BLOCK), (64, 64), (32, 32), (1, 32))", "(1, SCALE_BLOCK), (64, 64), (32, 32))", FINE),
    # Scales in the layout that a caller requests
    (LAYOUT, "if columns < SCALE_BLOCK and sf.dtype in", "if sf.dtype in", LAYOUTS),
    (LAYOUT, "(torch.int32, torch.uint8, torch.float8_e8m0fnu):", "(torch.int32, torch.uint8):", LAYOUTS),
    (LAYOUT, "(torch.int32, torch.uint8, torch.float8_e8m0fnu):", "(torch.uint8, torch.float8_e8m0fnu):", LAYOUTS),
    (LAYOUT, "each = UE8M0_PER_WORD if sf.dtype == torch.int32 else 1", "each = 1", LAYOUTS),
    (LAYOUT, "ceil_div(mn, rows), ceil_div(k,", "mn // rows, ceil_div(k,", LAYOUTS),
    (LAYOUT, "ceil_div(k, columns * each))", "k // (columns * each))", LAYOUTS),
    (LAYOUT, "    if stated in (*RECIPES_OF_A, *RECIPES_OF_B):\n", "    if stated in RECIPES_OF_A:\n", LAYOUTS),
    (LAYOUT, "    if stated in (*RECIPES_OF_A, *RECIPES_OF_B):\n", "    if stated in RECIPES_OF_B:\n", LAYOUTS),
    (LAYOUT, "    if stated not in RECIPES:\n", "    if not stated:\n", LAYOUTS),
    (LAYOUT, "if is_sfa is None and of_a != of_b:", "if is_sfa is None and of_a == of_b:", LAYOUTS),
    (LAYOUT, "return of_a if is_sfa else of_b, columns", "return of_b if is_sfa else of_a, columns", LAYOUTS),
    (CASTS, "!= torch.float32 and block == MX:", "!= torch.float32 and columns == 32:", LAYOUTS),
    (CASTS, "return sf if sf.dtype == torch.int32 else words_of(sf)", "return words_of(sf)", LAYOUTS),
    (CASTS, "numbers_of(sf, ceil_div(k, columns))", "numbers_of(sf, k // columns)", LAYOUTS),
    (CASTS, "tensor(sf) if rows == 1 else sf", "tensor(sf) if rows != 1 else sf", LAYOUTS),
    (UE8M0, "    if not lie_in_words(exponents):\n", "    if False:\n", LAYOUTS, FP4),
    (UE8M0, "    if not lie_in_words(exponents):\n", "    if True:\n", LAYOUTS, FP4),
    (UE8M0, "exponents[..., :groups] = given", "exponents[..., -groups:] = given", LAYOUTS),
    (UE8M0, "exponents.shape[-1] % UE8M0_PER_WORD == 0\n", "True\n", FP4),
    (UE8M0, "        and strides[-1] == 1\n", "", FP4),
    (UE8M0, "        and all(stride % UE8M0_PER_WORD == 0 for stride in strides[:-1])\n", "", LAYOUTS, FP4),
    (UE8M0, "        and not (has_memory(exponents) and exponents.data_ptr() % UE8M0_PER_WORD)\n", "", FP4),
    (UE8M0, "words >> 8 * i & 0xFF", "words >> 8 * (3 - i) & 0xFF", LAYOUTS),
    (UE8M0, "torch.where(exponents == 0, 1 <<", "torch.where(exponents == 0, 0 <<", LAYOUTS, FP4, FINE),
    (UE8M0, "where(exponents == NO_NUMBER,", "where(exponents > NO_NUMBER,", LAYOUTS, FP4),
]
