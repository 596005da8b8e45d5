"""A checked call of a product, to be computed by kernels or by the reference."""

from __future__ import annotations

from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.check.layout import align, ceil_div, ids_of_groups, rows_of_counts
from ..core.check.recipes import PER_BLOCK, PER_ROW, Scales
from ..core.settings import get_compile_mode
from .kinds.epilogues import TO_D, Epilogue
from .kinds.output import Output, Sizes, output_into, values_of
from .kinds.works import DENSE, Work

MID_MULTIPLE = 8
"""Parts of heads begin at multiples of this many columns of BF16: TMA needs multiples of 16 bytes."""


class HeadParts(NamedTuple):
    """Columns of each head of D: the product has a left and a right part, and D has a middle part between the two."""

    left: int
    mid: int
    right: int

    @property
    def columns(self) -> int:
        """Columns of the product in each head."""
        return self.left + self.right

    @property
    def columns_of_d(self) -> int:
        """Columns of D in each head."""
        return self.left + self.mid + self.right

    @property
    def part_multiple(self) -> int:
        """The largest number of columns that divides both parts."""
        return gcd(self.left, self.right)

    @property
    def division(self) -> tuple[int, int]:
        """A multiplier and a shift that divide by `columns`: `column // 8 * multiplier >> shift`.

        Let N = 2^(29 + s), with 2^s no less than u = columns / 8, and M = ceil(N / u). M / N is above 1 / u by less
        than 1 / N. So for c below 2^29, c * M / N is above c / u by less than 2^-s, which is at most 1 / u: no whole
        number is between them.
        """
        units = self.columns // MID_MULTIPLE
        shift = 29 + (units - 1).bit_length()
        return ceil_div(1 << shift, units), shift

    def of(self, d: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the left and the right parts of D's heads: `[m, number of heads, columns]`."""
        of_heads = d.view(d.shape[0], d.shape[1] // self.columns_of_d, self.columns_of_d)
        return of_heads[..., : self.left], of_heads[..., self.left + self.mid :]


class Asked(NamedTuple):
    """D = C + A @ B.T: one product, or several of the same kind, as `work` says.

    A is `[m, k]`, B `[n, k]`, D `[m, n]`. For heads, groups and summed products, tensors have one more dimension, in
    front: B for groups of rows, and A and D too if each group has its own plane. Groups along k share one A, `[m, sum
    of ks]`, and one B; in FP8 the values of one group follow another's, in one dimension.
    """

    a: Tensor
    sfa: Any
    """Scales of A, a tensor; None in BF16, but for groups along k it may hold depths that only the GPU knows."""
    b: Tensor
    sfb: Any
    """Scales of B; None in BF16."""
    d: Tensor
    """The output. For rows stored at addresses, int64 `[m]`: the address of each row, or 0."""
    c: Any = None
    """C, a tensor or None. For groups of rows it holds the layout instead: ids, ends or counts."""
    work: Work = DENSE
    of_b: Scales | None = PER_BLOCK
    """Rows and columns under a scale of B; MX if B is FP4. core/check/ue8m0.py says which types scales have."""
    of_a: Scales | None = PER_ROW
    epilogue: Epilogue = TO_D
    expected_m: float = 0.0
    """The expected number of rows of a group, a hint."""
    alignment: int = 1
    """Alignment, in rows, of group starts (given by ends) and of zero padding."""
    zero_padding: bool = False
    """True if zeros are written to rows without a group that share an aligned block with a row of a group."""
    ks: tuple[int, ...] | None = None
    """The groups' k, if the caller has them on the host; else `ks_tensor` holds them."""
    ks_tensor: Tensor | None = None
    layout: Tensor | None = None
    """For groups along k, the tensor that the caller passed: `ks_tensor`, or the ends from which it was computed."""
    bias: Tensor | None = None
    """FP32 `[groups, n]`, contiguous: a C for grouped rows."""
    heads: Any = None
    """`HeadParts`, or None: columns of D's heads, if some of them are not written."""
    softmax: dict[str, Any] | None = None
    """If D has sums of blocks: the members that `Params` has for them, by their names in epilogue/block_sums.cuh."""
    row_weights: Tensor | None = None
    """FP32 `[m]`: a factor for each row, which multiplies its activation."""
    scales: Any = None
    """Scales of a D that is cast, m-major: one for each row and 64 columns, or 128 if gate is apart from up."""
    limit: float | None = None
    """An activation limits gate to at most this number, and up to +- this number."""


class Problem(Asked):
    """A checked call of a product; each of its sizes is computed once."""

    @cached_property
    def m(self) -> int:
        """Rows of A, or of each plane of A."""
        return self.a.shape[-2] if self.a.dim() > 1 else self.d.shape[-2]

    @cached_property
    def n(self) -> int:
        """Columns of the product."""
        return self.b.shape[-2] if self.b.dim() > 1 else self.d.shape[-1]

    @cached_property
    def k(self) -> int:
        """Depth; for groups along k, the average depth of a group."""
        if self.a.dim() == 1:
            return self.a.numel() // max(self.m, 1) // max(self.groups, 1)
        return self.a.shape[-1]

    @cached_property
    def groups(self) -> int:
        """The number of heads, groups, or summed products."""
        return self.b.shape[0] if self.b.dim() > 2 else self.d.shape[0] if self.work.may_be_empty else 1

    @property
    def planes(self) -> int:
        """The number of matrices of rows."""
        return self.groups if self.work.has_planes else 1

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes, in the form that the choice of a configuration needs."""
        return Sizes(self.expected_m if self.work.groups_rows else self.m, self.n, self.k, self.groups)

    @cached_property
    def output(self) -> Output:
        """Everything besides the tile that decides the kernel's code."""
        c = self.bias if self.work.groups_rows else self.c
        return output_into(self.d, c, (values_of(self.b), self.of_a, self.of_b), self.work, self.epilogue)

    @property
    def ids(self) -> Tensor:
        """The group of each stacked row, -1 for none, from ids or ends."""
        ids: Tensor = self.c if self.work.reads_ids else ids_of_groups(self.c, self.m, self.alignment)
        return ids


def padding_rows(ids: Tensor, alignment: int) -> Tensor:
    """Mark rows without a group that share an aligned block of rows with a row of a group."""
    valid = ids >= 0
    blocks = torch.zeros(align(len(ids), alignment), dtype=torch.bool, device=ids.device)
    blocks[: len(ids)] = valid
    near_valid = blocks.view(-1, alignment).any(dim=1).repeat_interleave(alignment)[: len(ids)]
    return near_valid & ~valid


def write_without_depth(p: Problem) -> None:
    """Write a product of depth 0: C, or zeros; nothing in a mode that only compiles. The host reads nothing."""
    if get_compile_mode():
        return
    if p.work.groups_rows:
        if p.work.has_planes:
            is_written, bias = rows_of_counts(p.c, p.m), None if p.bias is None else p.bias[:, None]
        else:
            ids = p.ids
            is_written, bias = ids >= 0, None if p.bias is None else p.bias[ids.clamp_min(0)]
            if p.zero_padding:
                p.d.masked_fill_(padding_rows(ids, p.alignment)[:, None], 0)
        p.d.copy_(torch.where(is_written[..., None], 0 if bias is None else bias, p.d))
    elif p.heads is not None:
        for part in p.heads.of(p.d):
            part.zero_()
    elif p.c is None:
        p.d.zero_()
    else:
        p.d.copy_(p.c)
