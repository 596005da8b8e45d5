"""Calls that were seen, recognized by torch itself: one comparison in C++ instead of twenty attributes in Python.

torch.compile guards its graphs by `TensorGuards`: are these tensors like those, by shape, strides, type and device?
Nothing documents it, so `torch_compares` asks it first. Without it, calls are found by their whole signature.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

MAX_CALLS = 4096
MAX_ALIKE = 8
_KEEPING = threading.Lock()
Check = Callable[..., bool]
Free = tuple[tuple[int, ...], tuple[int, ...]]
"""Dimensions of a tensor whose sizes, and whose strides, may be others."""
FREE_ROWS: Free = ((0,), ())
STAYS: Free = ((), ())


class Seen(dict[tuple[object, ...], list[tuple[Check, Any]]]):
    """Plans of calls, by a hint: what is cheap to read of a call. The check that stands beside a plan decides."""

    def find(self, hint: tuple[object, ...], tensors: Sequence[Tensor]) -> Any:
        """Give what is kept for calls with this hint if torch recognizes the tensors; else None."""
        for check, found in self.get(hint, ()):
            if check(*tensors):
                return found
        return None

    def keep(
        self,
        hint: tuple[object, ...],
        tensors: Sequence[Tensor],
        plan: object,
        wants_checks: Callable[[Sequence[Tensor]], bool],
        free: Sequence[Free] = (),
    ) -> None:
        """Keep a plan for calls with this hint and tensors like these. The oldest go if there are too many.

        Torch tells tensors that require a gradient from others, but not whether `wants_checks` allows them. It
        recognizes no call that has one tensor twice: there a check would only take the place of another.
        """
        if not torch_compares() or len({*map(id, tensors)}) < len(tensors):
            return
        check = check_of(tensors, free)
        if any(x.requires_grad for x in tensors):
            check = _unless(wants_checks, check)
        with _KEEPING:
            if hint not in self and len(self) >= MAX_CALLS:
                del self[next(iter(self))]
            alike = self.get(hint, [])
            self[hint] = [(check, plan), *alike[: MAX_ALIKE - 1]]  # a new list: others may be reading the old


def _unless(wants_checks: Callable[[Sequence[Tensor]], bool], check: Check) -> Check:
    return lambda *tensors: check(*tensors) and not wants_checks(tensors)


def check_of(tensors: Sequence[Tensor], free: Sequence[Free] = ()) -> Check:
    """Make a check that takes as many tensors and tells whether they are like these, but for what is free in each.

    Nothing is, in the last of them, if `free` is shorter.
    """
    from torch._C._dynamo.guards import TensorGuards

    shapes: list[Any] = [list(x.shape) for x in tensors]
    strides: list[Any] = [list(x.stride()) for x in tensors]
    for shape, stride, (sizes, steps) in zip(shapes, strides, free, strict=False):
        for dimension in sizes:
            shape[dimension] = None
        for dimension in steps:
            stride[dimension] = None
    guards = TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
    return guards.check


@cache
@torch.inference_mode(False)
@torch.enable_grad()
def torch_compares() -> bool:
    """Tell whether this torch's guards see every difference that a signature has, a gradient's way, and no other."""
    fp32 = partial(torch.zeros, dtype=torch.float32)
    like = fp32(4, 8), torch.zeros(3, 5, dtype=torch.float16).t()
    rows = [fp32(5, 8), fp32(1, 8), fp32(0, 8)]
    columns = torch.zeros(3, 9, dtype=torch.float16)
    others: list[object] = [
        None,
        fp32(4, 9),
        fp32(4, 16)[:, :8],
        fp32(4, 16)[:, ::2],
        fp32(4, 8, 1),
        fp32(32),
        torch.zeros(4, 8, dtype=torch.int32),
        fp32(4, 8, device="meta"),
        fp32(4, 8, requires_grad=True),
    ]
    try:
        check, check_rows = check_of(like), check_of(like[:1], [FREE_ROWS])
        check_pitch = check_of(like, [STAYS, ((0,), (1,))])
        return (
            check(*like) is True
            and check(fp32(8, 8)[2:6], torch.ones(5, 3, dtype=torch.float16).as_strided((5, 3), (1, 5))) is True
            and all(check(other, like[1]) is False for other in (*rows, *others))
            and all(check(like[0], other) is False for other in (like[0], like[1].contiguous(), like[1].t()))
            and all(check_rows(other) is True for other in (like[0], *rows))
            and all(check_rows(other) is False for other in others)
            and all(check_pitch(like[0], columns[:, :size].t()) is True for size in (5, 2, 7))
            and all(check_pitch(like[0], other) is False for other in (columns[:, :5], columns[:2, :5].t()))
            and check_pitch(rows[0], like[1]) is False
        )
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        return False
