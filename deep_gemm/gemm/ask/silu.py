"""Checks of calls of products of grouped rows with gate and up, whose result is activated and cast to FP8."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.check import checks
from ...core.check.checks import Operand, Sizes
from ...core.check.layout import SCALE_BLOCK, is_mn_major_tma_aligned, whole_elements
from ...core.check.numbers import positive
from ...core.shadow import plain
from ..kinds.epilogues import SILU, SILU_OF_HALVES
from ..kinds.works import ENDS
from ..problem import Problem

INTERLEAVED = 8
"""B alternates between this many rows of gate and of up: WGMMA's accumulators hold 8 columns together."""
SILU_COLUMNS = SCALE_BLOCK // 2
"""Columns of activations under one scale."""


def silu_rows_problem(
    a: Operand,
    b: Operand,
    d: Operand,
    ends: Tensor,
    row_weights: Tensor | None,
    limit: float | None,
    gates_apart: bool = False,
) -> Problem:
    """Check a product of grouped rows that is activated. `d`: the values and scales to write."""
    sizes: Sizes = {}
    av, sfa = checks.operand("a", a, ("m", "k"), sizes)
    bv, sfb = checks.operand("b", b, ("groups", "n", "k"), sizes)
    m, n, k, groups = sizes["m"], sizes["n"], sizes["k"], sizes["groups"]
    if n % (2 * SCALE_BLOCK):
        raise ValueError(f"b: expected a multiple of {2 * SCALE_BLOCK} rows, gate and up, got n = {n}")
    blocks = "n / 256" if gates_apart else "n / 128"
    sizes |= {"n / 2": n // 2, blocks: n // 2 // (SCALE_BLOCK if gates_apart else SILU_COLUMNS)}
    sfa = checks.scales("sfa", sfa, "m", (m,), k, 1)
    sfb = checks.scales("sfb", sfb, "n", (groups, n), k, SCALE_BLOCK)
    values, scales = checks.operand("d", d, ("m", "n / 2"), sizes)
    checks.fp32_scales("sfd", scales)
    checks.bind("sfd", scales, ("m", blocks), sizes)
    if not is_mn_major_tma_aligned(scales):
        raise ValueError(f"sfd: expected m-major scales, as products load them, got strides {scales.stride()}")
    checks.int32("ends", ends, "groups", groups)
    given = {"a": av, "sfa": sfa, "b": bv, "sfb": sfb, "ends": ends}
    if row_weights is not None:
        checks.shaped("row_weights", row_weights, (torch.float32,), ("m",), sizes)
        whole_elements("row_weights", row_weights)
        given["row_weights"] = row_weights = row_weights.contiguous()
    checks.supported_device("a", av)
    checks.same_device({**given, "d": values, "sfd": scales}, av.device)
    checks.depth(k)
    if k == 0:
        raise ValueError("k: expected a depth above 0, got 0")
    checks.rows("d", values, "n / 2")
    for name, out in (("d", values), ("sfd", scales)):
        checks.no_overlap(given, out, None, name)
    checks.no_overlap({"sfd": scales}, values, None)
    if checks.on_host(ends):
        checks.ends(ends, m, 1, "ends")
    av, bv = checks.k_major("a", av), checks.weights("b", bv)
    limit = None if limit is None else positive("limit", limit)
    return activated((av, sfa), (bv, sfb), (values, scales), ends, row_weights, limit, gates_apart)


def activated(
    a: Operand,
    b: Operand,
    d: Operand,
    ends: Tensor,
    row_weights: Tensor | None,
    limit: float | None,
    gates_apart: bool = False,
) -> Problem:
    """Make the problem of silu(gate) * up for each row of A `[m, k]`; gate and up: row @ B.T, B `[groups, n, k]`.

    In B 8 rows of gate and 8 of up alternate, or with `gates_apart` all rows of gate come first. In B's scales gate
    always comes first. D is FP8 `[m, n / 2]`. `ends`: the row after each group's last. Rows after the last group are
    neither read nor written.
    """
    return Problem(
        *a,
        *b,
        d[0],
        ends,
        ENDS,
        epilogue=SILU_OF_HALVES if gates_apart else SILU,
        expected_m=plain(a[0].shape[0]) / max(b[0].shape[0], 1),
        row_weights=row_weights,
        scales=d[1],
        limit=limit,
    )
