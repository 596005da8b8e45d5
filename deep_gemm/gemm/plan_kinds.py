"""Plans of products with scales that are laid out first, and of products with more than six operands."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..casts import lay_scales
from ..core.check.layout import ADDRESS_ALIGNMENT, byte_span, empty_mn_major
from ..core.check.memory import empty
from .plan import SCALE_BYTES, SFA, SFB, Addresses, Plan
from .problem import Problem

ROW_WEIGHTS, SCALES = 6, 7
"""Operands of a product that activates, behind the six of every plan."""
_ADDRESSES = struct.Struct("<QQ")


class ScalesLaid(NamedTuple):
    """A launch of lay_scales ahead of the product: the same for each call but for two addresses."""

    params: bytes
    grid: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, sf: Tensor) -> ScalesLaid:
        """Prepare the launch for scales that lie as these do."""
        out = empty_mn_major(sf)
        params, ctas = lay_scales.params_of(sf, out), lay_scales.grid(lay_scales.CONFIG, out)
        return cls(params, ctas, tuple(out.shape), out.stride())

    def lay(self, address: int, place: torch.device, device: int) -> Tensor:
        """Lay scales out that begin at an address."""
        out = empty("scales laid out for TMA", self.shape, torch.float32, place, self.strides)
        params = _ADDRESSES.pack(address, out.data_ptr()) + self.params[_ADDRESSES.size :]  # PARAMS begins with these
        lay_scales.KERNEL.run(lay_scales.CONFIG, params, self.grid, device)
        return out


class HeadsPlan(Plan):
    """A plan for scales as callers have them: scales that TMA cannot load there are laid out first."""

    laid_sfa: ScalesLaid | None = None
    laid_sfb: ScalesLaid | None = None

    def new_output(self) -> Tensor:
        """Make a D, contiguous for callers, who have rows first."""
        heads, m, n = self.rows.shape
        return torch.empty((m, heads, n), dtype=self.dtype, device=self.place).transpose(0, 1)

    def launch(self, at: Addresses, tail: bytes = b"", tail_at: int = 0) -> None:
        """Launch, behind the kernels that lay scales out."""
        if self.laid_sfa is None and self.laid_sfb is None:
            return super().launch(at, tail, tail_at)
        addresses, kept = list(at), []
        for operand, laid in ((SFA, self.laid_sfa), (SFB, self.laid_sfb)):
            if laid is not None:
                kept.append(laid.lay(at[operand], self.place, self.device))
                addresses[operand] = kept[-1].data_ptr()
        return super().launch(tuple(addresses), tail, tail_at)

    def set_copies(self, given: Problem, ready: Problem) -> None:
        """Let further launches begin with scales as callers have them, where `ready` has them elsewhere."""
        rows = self.rows
        if given.sfa is not None and ready.sfa is not given.sfa:
            self.laid_sfa, self.alignment_of_sfa = ScalesLaid.of(given.sfa), SCALE_BYTES
            self.rows = rows = rows._replace(span_sfa=_span(given.sfa))
        if given.sfb is not None and ready.sfb is not given.sfb:
            self.laid_sfb, self.alignment_of_sfb = ScalesLaid.of(given.sfb), SCALE_BYTES
            self.rows = rows._replace(span_sfb=_span(given.sfb))


def _span(x: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    return (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))) * x.element_size()


class SiluPlan(Plan):
    """A plan that has two operands more: row weights, and the output's scales."""

    def __init__(self, p: Problem, *given: Any) -> None:
        super().__init__(p, *given)
        self.span_weights, self.span_scales = (0 if x is None else byte_span(x) for x in (p.row_weights, p.scales))

    def fits(self, at: Addresses) -> bool:
        """Tell whether a launch at these addresses is right, of all eight operands."""
        *_, at_d, _, at_weights, at_scales = at
        if at_scales % ADDRESS_ALIGNMENT or at_weights % SCALE_BYTES or not super().fits(at[:ROW_WEIGHTS]):
            return False
        rows, end_scales, end_weights = self.rows, at_scales + self.span_scales, at_weights + self.span_weights
        if at_weights < at_d + rows.span_d and at_d < end_weights:
            return False
        spans = (rows.span_a, rows.span_sfa, rows.span_b, rows.span_sfb, rows.span_d, rows.span_c, self.span_weights)
        return all(end_scales <= first or first + span <= at_scales for first, span in zip(at, spans, strict=False))


def plan_kind(p: Problem) -> type[Plan]:
    """Give the kind of plan for a problem."""
    if p.epilogue.activates:
        return SiluPlan
    has_heads = p.work.has_planes and not p.work.groups_rows
    return HeadsPlan if has_heads and p.of_b is not None else Plan
