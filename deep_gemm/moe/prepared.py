"""Calls of a module like one before: torch recognizes them, so only what may differ between them is asked again.

Calls of a `Kind` have these in common: types, strides and devices of all tensors, shapes but for the number of tokens,
and the mode of torch. The forms of a call across GPUs derive from it: prefill.py, decode.py, mega_by_peers.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from ..casts.by_kernels import PITCH_LIMIT
from ..core.check.checks import Operand
from ..core.check.layout import ADDRESS_ALIGNMENT, SCALE_BLOCK, ceil_div, pitch_of_scales
from ..core.check.tracing import is_dynamo_compiling, num_modes
from ..core.kernel import computes_on
from ..core.seen import FREE_ROWS, check_of
from ..gemm.packed import is_taken_as_it_lies
from ..gemm.plan import SCALE_BYTES

MAX_KINDS = 8
"""Calls of a form are prepared for at most so many kinds of operands."""
APART = 256
"""Bytes. Parts of a buffer begin at multiples of it."""


class Tokens(NamedTuple):
    """The operands of a call."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


class Weights(NamedTuple):
    """The experts of a process, in FP8 or FP4."""

    w1: Operand
    w2: Operand

    def are_taken_as_they_lie(self) -> bool:
        """Tell whether kernels take both, which were checked, where calls have them."""
        return is_taken_as_it_lies(self.w1) and is_taken_as_it_lies(self.w2)

    def have_whole_scales(self) -> bool:
        """Tell whether scales begin where FP32 numbers may, and words of exponents, which may come as bytes."""
        return (self.w1[1].data_ptr() | self.w2[1].data_ptr()) % SCALE_BYTES == 0


class Kind:
    """Calls with tensors of one kind, of any number of tokens, and weights of one kind."""

    def __init__(self, given: Sequence[Tensor], weights: Weights) -> None:
        """Prepare for calls like this one, which was checked. `given` are tensors whose number of rows may change."""
        self.device, self.place = given[0].get_device(), given[0].device
        self._count = len(given)
        self._is_like = check_of(given, [FREE_ROWS] * len(given))
        self._has_weights_like = check_of((*weights.w1, *weights.w2))

    def is_like(self, given: Sequence[Tensor], weights: Weights) -> bool:
        """Tell whether a call is like that which was checked, but for the number of tokens and for addresses."""
        (w1, sfw1), (w2, sfw2) = weights
        return len(given) == self._count and self._is_like(*given) and self._has_weights_like(w1, sfw1, w2, sfw2)

    def is_straight(self) -> bool:
        """Tell whether a call goes straight to kernels: nothing watches it, and the device is the current one."""
        return computes_on(self.device) and not num_modes() and not is_dynamo_compiling()


K = TypeVar("K", bound=Kind)


def find(kinds: Iterable[K], given: Sequence[Tensor], weights: Weights) -> K | None:
    """Find the kind of a call that nobody has checked: what it was given may be anything."""
    for each in kinds:
        if each.is_like(given, weights):
            return each
    return None


def are_whole(*tensors: Tensor) -> bool:
    """Tell whether tensors begin where their elements may: those made from a buffer may begin at any byte."""
    return not any(x.data_ptr() % x.element_size() for x in tensors)


def has_aligned_rows(x: Tensor) -> bool:
    """Tell whether kernels may load 16 bytes at once of a matrix's rows."""
    pitch = x.stride(0) * x.element_size()
    is_aligned = x.stride(1) == 1 and pitch % ADDRESS_ALIGNMENT == 0 and x.data_ptr() % ADDRESS_ALIGNMENT == 0
    return is_aligned and pitch < PITCH_LIMIT


def span_of_rows(rows: int, pitch: int, row_bytes: int) -> int:
    """Bytes from the beginning of the first row to the end of the last one."""
    return (rows - 1) * pitch + row_bytes if rows else 0


def touches(first: int, span: int, others: Iterable[tuple[int, int]]) -> bool:
    """Tell whether one of the others, each an address and a span too, begins or ends within the span."""
    return any(begin < first + span and first < begin + other for begin, other in others)


def apart(size: int) -> int:
    """Give where the next part of a buffer may begin."""
    return (size + (APART - 1)) & -APART


class Parts:
    """The parts of a buffer, each behind the one before."""

    end = 0
    """Bytes of the buffer."""

    def part(self, size: int) -> int:
        """Place a part of so many bytes, and give where it begins."""
        at = self.end
        self.end = apart(at + size)
        return at

    def operand(self, rows: int, columns: int) -> tuple[int, int]:
        """Place FP8 values and their scales, which lie m-major."""
        scales = pitch_of_scales(rows) * ceil_div(columns, SCALE_BLOCK)
        return self.part(rows * columns), self.part(SCALE_BYTES * scales)
