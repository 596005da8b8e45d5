"""`experts` of few rows on a Hopper GPU, for calls like one before: its host does little, as the GPU waits for it.

    route_rows --> gather_cast --> product --> activation --> product --> gather_weighted

It launches the kernels that the way by tensors launches (`compute_experts`), at addresses in one buffer, so results
have the same bits. Left out are checks of what was checked, tensors that nobody but a kernel sees, and packing
parameters that stay. Torch recognizes a call, of any number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..casts.by_kernels import has_kernels
from ..core.call import put
from ..core.check.checks import Operand, cuts_gradient
from ..core.check.layout import ADDRESS_ALIGNMENT, BF16_BYTES, WORD_BYTES, byte_span, pitch_of_scales
from ..core.check.tracing import handles_operators
from ..core.kernel import computes_on
from ..core.seen import FREE_ROWS, STAYS, Free, Seen, torch_compares
from ..gemm.kinds.output import FP4_OPERANDS, USUAL_OPERANDS
from . import rows_at
from .check import ExpertsProblem
from .gather_weighted import sums_at
from .prepared import Parts, Weights, apart, are_whole, has_aligned_rows, span_of_rows, touches
from .route_rows import RouteProblem, RoutesAt
from .rows_at import FEW, MAX_EXPERTS

MANY_ROWS = 2048
"""So many rows of experts, or more, are found by ends instead of ids, and activated where they are multiplied."""
MAX_SIZES = 256
"""Numbers of tokens for which a kind keeps where parts of a buffer begin."""
FREE: tuple[Free, ...] = (*[FREE_ROWS] * 3, *[STAYS] * 4, FREE_ROWS)
"""Rows may be others in x, ids, weights of routes and `out`, nothing in weights."""
Key = tuple[object, ...]
Said = tuple[Any, ...]
SEEN = Seen()


class Places(Parts):
    """The places where the parts of a call's buffer begin, ids of rows first."""

    def __init__(self, rows: int, hidden: int, intermediate: int, experts: int) -> None:
        """Place the parts. The second product's result lies where what led to its operand was."""
        self.ids, self.token_of, self.row_of = (self.part(WORD_BYTES * rows) for _ in range(3))
        self.counts, self.ends = (self.part(WORD_BYTES * experts) for _ in range(2))
        self.values, self.scales = self.operand(rows, hidden)
        self.h = self.part(2 * BF16_BYTES * rows * intermediate)
        self.end = max(self.end, apart(self.values + BF16_BYTES * rows * hidden))
        self.middle, self.of_middle = self.operand(rows, intermediate)


class Mixture:
    """Calls with tensors of one kind, of any number of tokens with fewer than `MANY_ROWS` routes."""

    def __init__(self, p: ExpertsProblem) -> None:
        """Prepare for calls like this one, which was checked, and of which `can_be_prepared` is true."""
        (_, self.hidden), (_, self.topk), self.experts = p.x.shape, p.topk_ids.shape, p.num_experts
        self.intermediate, self.place, self.device = p.w1[0].shape[1] // 2, p.x.device, p.x.get_device()
        given = p.x, p.topk_ids, p.topk_weights, p.out
        x, ids, weights, out = (
            torch.empty_strided((0, each.shape[1]), each.stride(), dtype=each.dtype, device=self.place)
            for each in given  # without rows, as those of a caller may lie far apart
        )
        self.row_bytes = tuple(each.shape[1] * each.element_size() for each in given)
        self.pitches = tuple(each.stride(0) * each.element_size() for each in given)
        self._weight_bytes = tuple(map(byte_span, (*p.w1, *p.w2)))
        self._places: dict[int, Places] = {}
        self.route = RoutesAt(RouteProblem(ids, self.experts))
        self.gather = rows_at.gathered(x, self.topk, is_dependent=True)
        self.first, self.second = (rows_at.product(w, is_behind_cast=True) for w in (p.w1, p.w2))
        self.activation = rows_at.activation(self.intermediate, self.experts, p.gating, self.place, is_dependent=True)
        y = torch.empty((FEW, self.hidden), dtype=torch.bfloat16, device=self.place)
        self.sum = sums_at(y, torch.empty_like(ids, dtype=torch.int32), weights, out, is_dependent=True)

    def is_right(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether a call that torch recognized is right, and one of few rows: else it wants a closer look."""
        x, ids, p, w1, sfw1, w2, sfw2, *out = tensors
        tokens, addresses = x.shape[0], x.data_ptr() | w1.data_ptr() | w2.data_ptr()
        if out:
            if out[0].shape[0] != tokens or self._may_overlap(tokens, tensors):
                return False
            addresses |= out[0].data_ptr()
        return (
            0 < tokens * self.topk < MANY_ROWS
            and tokens == ids.shape[0] == p.shape[0]
            and addresses % ADDRESS_ALIGNMENT == 0
            and are_whole(ids, p)
            and Weights((w1, sfw1), (w2, sfw2)).have_whole_scales()
            and computes_on(self.device)
        )

    def _may_overlap(self, tokens: int, tensors: Sequence[Tensor]) -> bool:
        """Tell whether `out` begins or ends among the rows of another tensor, or in a weight."""
        x, ids, p, w1, sfw1, w2, sfw2, out = tensors
        *inputs, (first, span) = (
            (each.data_ptr(), span_of_rows(tokens, pitch, row_bytes))
            for each, pitch, row_bytes in zip((x, ids, p, out), self.pitches, self.row_bytes, strict=True)
        )
        weights = (each.data_ptr() for each in (w1, sfw1, w2, sfw2))
        return touches(first, span, [*inputs, *zip(weights, self._weight_bytes, strict=True)])

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Compute the mixture, into `out` if there is one."""
        x, ids, p, w1, sfw1, w2, sfw2, *out = tensors
        tokens = x.shape[0]
        rows, here = tokens * self.topk, self._places.get(tokens) or self._placed(tokens)
        y = out[0] if out else torch.empty((tokens, self.hidden), dtype=torch.bfloat16, device=self.place)
        buffer = torch.empty(here.end, dtype=torch.uint8, device=self.place)
        at = buffer.data_ptr()
        row_of, ends, values, scales = at + here.row_of, at + here.ends, at + here.values, at + here.scales
        h, middle, of_middle = at + here.h, at + here.middle, at + here.of_middle
        pitch = WORD_BYTES * pitch_of_scales(rows)

        self.route.launch(rows, ids.data_ptr(), at + here.counts, ends, row_of, at + here.token_of, at, 0)
        self.gather.launch(tokens, x.data_ptr(), values, scales, row_of, pitch)
        self.first.launch(rows, (w1, sfw1), (values, scales), (h, at))
        self.activation.launch(rows, h, middle, of_middle, ends, pitch)
        self.second.launch(rows, (w2, sfw2), (middle, of_middle), (values, at))
        self.sum.launch(tokens, values, row_of, p.data_ptr(), y.data_ptr())
        return None if out else y

    def _placed(self, tokens: int) -> Places:
        placed = Places(tokens * self.topk, self.hidden, self.intermediate, self.experts)
        put(self._places, tokens, placed, MAX_SIZES)
        return placed


def recognized(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1: Operand, w2: Operand, out: Tensor | None, said: Said
) -> tuple[Mixture | None, tuple[Tensor, ...], Key]:
    """Find the mixture that computes a call like one before, None if there is none; give the call's tensors too, and
    the key under which `keep` may keep one.
    """
    try:
        (values1, sf1), (values2, sf2) = w1, w2
        tensors = x, topk_ids, topk_weights, values1, sf1, values2, sf2, *(() if out is None else (out,))
        if not has_kernels(x):
            return None, (), ()
        *others, recipe_b = said  # equal ones of different types are not alike: a recipe of floats is refused
        types = map(type, (*others, *(recipe_b or ()), w1, w2))
        key = (said, *types, len(tensors), values1.shape, values2.shape, x.dtype)
        found = SEEN.find(key, tensors)
        return found if found is not None and found.is_right(tensors) else None, tensors, key
    except (TypeError, ValueError, AttributeError, RuntimeError):  # malformed: the checks say how
        return None, (), ()


def keep(key: Key, tensors: Sequence[Tensor], p: ExpertsProblem) -> None:
    """Prepare for calls like one that was computed, if they can be."""
    if key and can_be_prepared(p, tensors) and not handles_operators(*tensors) and SEEN.find(key, tensors) is None:
        SEEN.keep(key, tensors, Mixture(p), lambda given: cuts_gradient(given[:7], given[7:]), FREE)


def can_be_prepared(p: ExpertsProblem, tensors: Sequence[Tensor]) -> bool:
    """Tell whether kernels take what a call was given as it lies, and it has few rows."""
    weights, usual = Weights(p.w1, p.w2), (USUAL_OPERANDS, FP4_OPERANDS)
    return (
        0 < p.topk_ids.numel() < MANY_ROWS
        and 0 < p.num_experts <= MAX_EXPERTS
        and 0 not in p.w1[0].shape
        and p.first in usual
        and p.second in usual
        and all(x.data_ptr() == given.data_ptr() for x, given in zip((*p.w1, *p.w2), tensors[3:7], strict=True))
        and weights.are_taken_as_they_lie()
        and all(x.stride() == (x.shape[1], 1) for x in (p.topk_ids, p.topk_weights))
        and all(has_aligned_rows(x) and x.stride(0) >= x.shape[1] for x in (p.x, p.out))
        and torch_compares()
    )
