r"""Calls of public functions: a record of a similar call is replayed, or the call is checked, answered and recorded.

    call --tensors--> Records.recall: a record serves the call --> start its launches, return its results
      \--- no record does --> run `answer` with shadows --> a new record: keep it, replay it

A function's `answer` checks and computes a call. If the tensors are on a GPU, `answer` runs with shadows (shadow.py)
and makes a record. If no record can be made, `answer` runs with the tensors themselves. A record stores each condition
that `answer` tested. It serves a call only if the call's tensors meet the same conditions, so the results are right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import settings
from .check.tracing import (
    dispatch_is_on,
    handles_operators,
    is_dynamo_compiling,
    num_modes,
    refuse_transforms,
    without_autocast,
)
from .jit import driver
from .record import MOST_TENSORS, Record
from .replay import FIXED, MOST_RECORDS, Free, Records, are_apart, native, put
from .shadow import Recording, Shadow, UnfitError, launching_into, target

Key = tuple[object, ...]
FREE_ROWS = (0,), ()
"""The `Free` of a tensor whose first size may differ between calls of one record."""


def never(tensors: Sequence[Tensor]) -> bool:
    """Return False: no call needs a check for a gradient, because the caller checks, or no gradient exists."""
    return False


def requires_gradient(tensors: Sequence[Tensor]) -> bool:
    """Tell whether a call with these tensors has a gradient, which records do not handle."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


@dataclass(eq=False)
class Function:
    """A public function and how to answer its calls. A call has `operands` (tensors, pairs) and options (`said`)."""

    answer: Callable[..., Any]
    """`answer(*operands, *said)` checks and computes a call. It returns tensors, tuples of tensors, or None."""
    as_operator: Callable[..., Any]
    """`as_operator(*operands, *said)` passes a call to the operator of `torch.ops.deep_gemm` that computes it."""
    tensors: Callable[..., tuple[Tensor, ...]]
    """`tensors(*operands)` returns all tensors among the operands, and last the tensors that the call writes."""
    wants_checks: Callable[[Sequence[Tensor]], bool] = requires_gradient
    """Tells whether a call needs the check for a gradient even if a record serves it."""
    has_gradient: Callable[..., bool] = lambda *operands: False
    """`has_gradient(*operands)` tells whether the operator must compute the call, so that autograd sees it."""
    free: Sequence[Free] = ()
    """The sizes and strides of each tensor that may differ between calls of one record; without an entry, none may."""
    outputs: int = 0
    """Number of tensors that a call writes: the last ones. They share no memory with other tensors."""
    numbers: int | None = None
    """Index of the last operand if it is a list of integers. The integers may differ between calls of one record."""


class Kept(Records):
    """Records of a function's calls with equal options, and the function that assembles the calls' results."""

    def __init__(self, free: Sequence[Free], within: list[type], native: Any) -> None:
        """`within`: types of the values in tuples of options. Without types, 128.0, a mistake, would pass as 128."""
        super().__init__(free, native)
        self.within = within
        self.result: Callable[[Sequence[Tensor]], Any] = _nothing
        self.parts: tuple[Any, ...] | None = None
        """The values that replay.c reads to answer calls."""
        self._tries: dict[Key, int] = {}

    def is_worth_a_try(self, name: Any) -> bool:
        """Tell whether to try to record a call with this name. After failures, the answer is rarely True."""
        tries = self._tries.get(name, 0)
        put(self._tries, name, tries + 1, MOST_RECORDS)
        return (tries & (tries - 1)) == 0  # 0, 1, 2, 4, 8, ...

    def keep_with(self, result: Callable[[Sequence[Tensor]], Any], key: Any, record: Record, place: Any) -> None:
        """Keep a record and the function that assembles its results. The count of tries begins again at 0."""
        self.keep(key, record, place)
        self._tries.pop(key, None)
        self.result, self.parts = result, (self._kept, self._bits, self.within, result)


RECORDS: dict[Key, Kept] = {}
MOST_SAID = 4096


class _Replay:
    """Module of replay.c if it replays the records; None before the first record, or if Python replays."""

    module: Any = None


def run(function: Function, operands: tuple[Any, ...], said: Key = ()) -> Any:
    """Answer a call: replay the record of a similar call, or let the function answer and record it."""
    if is_dynamo_compiling() or (num_modes() and dispatch_is_on()):
        return function.as_operator(*operands, *said)
    tensors: tuple[Any, ...] = ()
    plain: tuple[Any, ...] = ()
    stated: tuple[int, ...] = ()
    may_have_record = False
    try:
        tensors = function.tensors(*operands)
        if function.numbers is not None and operands[function.numbers] is not None:
            stated = tuple(operands[function.numbers])
        recalled = _recalled if _Replay.module is None else _Replay.module.answer
        answer = recalled(RECORDS, function, said, settings.in_force.generation, tensors, stated)
        if answer is not NotImplemented:
            return answer
        plain = _plain(function, tensors)
        if plain is not tensors:
            answer = recalled(RECORDS, function, said, settings.in_force.generation, plain, stated)
            if answer is not NotImplemented:
                return answer
        first = tensors[0]
        may_have_record = first.is_cuda and (type(first) is Tensor or not handles_operators(first))
    except (TypeError, ValueError, AttributeError, IndexError, UnfitError):
        pass  # malformed: the checks below raise the right error
    if target() is not None:
        return function.answer(*operands, *said)
    refuse_transforms()
    if handles_operators(*operands[: function.numbers]) or function.has_gradient(*operands):
        return function.as_operator(*operands, *said)
    with without_autocast():
        if may_have_record and settings.get_compile_mode() == 0 and all(isinstance(x, Tensor) for x in tensors):
            return answered(function, operands, said, tensors, plain, stated)
        return function.answer(*operands, *said)


def _recalled(
    all_kept: dict[Key, Kept],
    function: Function,
    said: Key,
    generation: int,
    tensors: tuple[Any, ...],
    stated: tuple[int, ...],
) -> Any:
    """Replay a record that serves a call, as `answer` of replay.c does. Return NotImplemented if no record does."""
    if not tensors[0].is_cuda:
        return NotImplemented
    kept = all_kept.get((function, said, *map(type, said), generation))
    if kept is None or (kept.within and kept.within != _types_within(said)):
        return NotImplemented
    answer = kept.recall(tensors, stated)
    return answer if answer is NotImplemented else kept.result(answer)


def _types_within(said: Key) -> list[type]:
    """List the types of all values but None in the tuples of `said`."""
    found = []
    for each in said:
        if type(each) is tuple:
            found += [type(x) for x in each if x is not None] + _types_within(each)
    return found


def _plain(function: Function, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Detach a call's tensors if the call needs no gradient, because records handle no gradients."""
    if not torch.is_grad_enabled() or function.wants_checks(tensors) or not any(x.requires_grad for x in tensors):
        return tensors
    return tuple([x.detach() if x.requires_grad else x for x in tensors])


def answered(
    function: Function,
    operands: tuple[Any, ...],
    said: Key,
    tensors: tuple[Tensor, ...],
    plain: tuple[Tensor, ...],
    stated: tuple[int, ...],
) -> Any:
    """Answer and record a call on a GPU that no record serves. `plain`: the tensors without gradients."""
    device = tensors[0].device
    if torch._C._cuda_getDevice() != tensors[0].get_device():
        with torch.cuda.device(device):
            return run(function, operands, said)
    if torch.cuda.is_available() and driver.use_torchs_context():  # this thread had not used the GPU yet
        return run(function, operands, said)
    key, within = (function, said, *map(type, said), settings.in_force.generation), _types_within(said)
    kept = RECORDS.get(key)
    if kept is None:
        _Replay.module = native()
        kept = Kept([*function.free, *[FIXED] * MOST_TENSORS][:MOST_TENSORS], within, _Replay.module)
        put(RECORDS, key, kept, MOST_SAID)
    name = kept.name(plain, stated) if kept.within == within else None
    if name is not None and kept.is_worth_a_try(name):
        record, result = recorded(function, operands, said, tensors, stated)
        if record is not None and are_apart(plain, record.outputs):
            kept.keep_with(result, name, record, device)
            answer = kept.recall(plain, stated)
            if answer is not NotImplemented:
                return kept.result(answer)
    return function.answer(*operands, *said)


def recorded(
    function: Function, operands: tuple[Any, ...], said: Key, tensors: tuple[Tensor, ...], numbers: Sequence[int] = ()
) -> tuple[Any, Any]:
    """Record a call. Return its record and the function that assembles its results; (None, None) if it has no record.

    No error is raised here. The call itself runs afterwards, and raises the error with the names of its tensors.
    """
    if len({*map(id, tensors)}) < len(tensors):  # one tensor passed twice: another call may pass two tensors
        times, met = Counter(map(id, tensors)), set[int]()

        def other(x: Tensor) -> Tensor:
            if times[id(x)] > 1 and id(x) in met:
                return x.detach()
            met.add(id(x))
            return x

        operands = tuple([_with(each, other) for each in operands])
        tensors = function.tensors(*operands)
    r = Recording(tensors[0].device, outputs=function.outputs)
    free = [*function.free, *[FIXED] * len(tensors)]
    shadows: dict[int, Shadow] = {}
    for x, (sizes, strides) in zip(tensors, free, strict=False):
        if x.get_device() != tensors[0].get_device():
            return None, None
        shadows[id(x)] = r.shadow(x, sizes, strides)
    try:
        stand_in = [*_with(operands, lambda x: shadows[id(x)])]
        if function.numbers is not None and operands[function.numbers] is not None:
            stand_in[function.numbers] = r.stated_numbers(numbers)
        with launching_into(r), torch.no_grad():
            made = function.answer(*stand_in, *said)
        leaves: list[Shadow] = []
        result = _assembled(made, leaves)
        return r.record(leaves), result or _nothing
    except Exception:
        return None, None


def _with(operand: Any, instead: Callable[[Tensor], Any]) -> Any:
    """Replace each tensor of an operand by `instead(tensor)`."""
    if isinstance(operand, Tensor):
        return instead(operand)
    if isinstance(operand, (tuple, list)):
        each = [_with(x, instead) for x in operand]
        return type(operand)(*each) if hasattr(operand, "_fields") else type(operand)(each)
    return operand


def _assembled(made: Any, leaves: list[Shadow]) -> Callable[[Sequence[Tensor]], Any] | None:
    """Append a result's tensors to `leaves`. Return a function that makes the result from such a list, or None."""
    if isinstance(made, Shadow):
        place = len(leaves)
        leaves.append(made)
        return lambda tensors: tensors[place]
    if made is None:
        return None
    if not isinstance(made, tuple):
        raise UnfitError("a result that is not a tensor")
    parts = [_assembled(each, leaves) for each in made]
    kind = getattr(made, "_make", tuple)
    if all(isinstance(each, Shadow) for each in made):
        begin, end = len(leaves) - len(made), len(leaves)
        return lambda tensors: kind(tensors[begin:end])
    return lambda tensors: kind([None if part is None else part(tensors) for part in parts])


def _nothing(_: Sequence[Tensor]) -> None:
    """Return None, the result of a call without results."""
