"""BF16 products on the CPU, which define the arithmetic: exact products of BF16 values, summed in FP32, rounded once.

In which order a product is summed is not part of the definition: kernels sum slices of k in order, torch as it likes.
C is added in FP32 before the sum is rounded to the type of D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.check.layout import ids_of_groups
from ..reference import padding_rows
from .check import Bf16DepthsProblem, Bf16Problem, Bf16RowsProblem


@torch.no_grad()
def dense(p: Bf16Problem) -> None:
    """Write D = C + A @ B.T, of one product or of several."""
    _store(p.d, p.c, product(p.a, p.b))


@torch.no_grad()
def sum_of_products(p: Bf16Problem) -> None:
    """Write D = C + the sum of all A @ B.T."""
    a, b = (x.transpose(0, 1).flatten(1) for x in (p.a, p.b))
    _store(p.d, p.c, product(a, b))


@torch.no_grad()
def rows(p: Bf16RowsProblem) -> None:
    """Write the rows of each group, and zeros into the padding that shares a block with them.

    The host waits for a layout on a GPU.
    """
    if p.is_masked:
        for group, count in enumerate(p.layout.tolist()):
            p.d[group, :count] = product(p.a[group, :count], p.b[group]).to(p.d.dtype)
        return
    ids = group_ids(p)
    for group in range(len(p.b)):
        at = (ids == group).nonzero().flatten()
        if len(at):
            p.d[at] = product(p.a[at], p.b[group]).to(p.d.dtype)
    if p.zero_padding and len(ids):
        p.d[padding_rows(ids, p.alignment)] = 0


@torch.no_grad()
def depths(p: Bf16DepthsProblem) -> None:
    """Write D[g] = C[g] + A_g.T @ B_g. The host waits for depths that a GPU alone has."""
    ks = p.ks if p.ks is not None else tuple(p.ks_tensor.tolist())  # type: ignore[union-attr]
    first = 0
    for group, k in enumerate(ks):
        a, b = p.a[first : first + k], p.b[first : first + k]
        _store(p.d[group], None if p.c is None else p.c[group], product(a.mT, b.mT))
        first += k


def product(a: Tensor, b: Tensor) -> Tensor:
    """FP32 `[m, n]` of A `[m, k]` and B `[n, k]`."""
    return a.float() @ b.float().mT


def group_ids(p: Bf16RowsProblem) -> Tensor:
    """Group of each stacked row, -1 for none, from either form of the layout."""
    return ids_of_groups(p.layout, len(p.a), p.alignment) if p.layout_is_ends else p.layout


def _store(d: Tensor, c: Tensor | None, product: Tensor) -> None:
    d.copy_(product if c is None else product + c.float())
