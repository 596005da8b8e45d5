r"""Calls of public functions: a record of a similar call is replayed, or the call is checked, answered and recorded.

    call --tensors--> Records.recall --> its launches, its results
      \--- unknown ---> answer: check, compute --> with shadows in place of tensors: a record, kept and replayed

A function computes only by its `answer`. If a call's tensors are on a GPU, `answer` runs with shadows (shadow.py) and
gives a record; if no record can be made, it runs with the tensors themselves. A record serves a call only if the call's
tensors give the same answer to each question that `answer` asked, so its results are right.
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
"""The first size of a tensor may differ between calls of one record."""


def never(tensors: Sequence[Tensor]) -> bool:
    """Give False: calls need no check for a gradient, because the caller has made it, or no gradient exists."""
    return False


def requires_gradient(tensors: Sequence[Tensor]) -> bool:
    """Tell whether a call with these tensors has a gradient, which records do not handle."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


@dataclass(eq=False)
class Function:
    """A public function, and how calls are answered. A call has `operands`, tensors and pairs, and options, `said`."""

    answer: Callable[..., Any]
    """`(*operands, *said)`: checks and computes. It gives the results: tensors, tuples of them, or None."""
    as_operator: Callable[..., Any]
    """`(*operands, *said)`: passes a call to the operator of `torch.ops.deep_gemm` that computes it."""
    tensors: Callable[..., tuple[Tensor, ...]]
    """`(*operands)`: gives all tensors among the operands, the written ones last."""
    wants_checks: Callable[[Sequence[Tensor]], bool] = requires_gradient
    """Tells whether a call must be checked for a gradient although a record serves it."""
    has_gradient: Callable[..., bool] = lambda *operands: False
    """`(*operands)`: tells whether the operator must compute the call, so that autograd sees it."""
    free: Sequence[Free] = ()
    """The sizes and strides of each tensor that may differ between calls of one record; further tensors have none."""
    outputs: int = 0
    """Number of tensors, the last ones, that a call writes; they share no memory with other tensors."""
    numbers: int | None = None
    """Index of the last operand, if it holds integers, which may differ between calls of one record."""


class Kept(Records):
    """Records of a function's calls with equal options, and the way to put results together."""

    def __init__(self, free: Sequence[Free], within: list[type], native: Any) -> None:
        """`within`: types of the values in tuples of options, because 128.0 equals 128 but must be refused."""
        super().__init__(free, native)
        self.within = within
        self.result: Callable[[Sequence[Tensor]], Any] = _nothing
        self.parts: tuple[Any, ...] | None = None
        """The parts that replay.c needs to answer calls."""
        self._tries: dict[Key, int] = {}

    def is_worth_a_try(self, name: Any) -> bool:
        """Tell whether to record a call that no record with this name serves: after failures less and less often."""
        tries = self._tries.get(name, 0)
        put(self._tries, name, tries + 1, MOST_RECORDS)
        return (tries & (tries - 1)) == 0  # 0, 1, 2, 4, 8, ...

    def keep_with(self, result: Callable[[Sequence[Tensor]], Any], key: Any, record: Record, place: Any) -> None:
        """Keep a record and the way to put its results together; try again soon for calls that it does not serve."""
        self.keep(key, record, place)
        self._tries.pop(key, None)
        self.result, self.parts = result, (self._kept, self._bits, self.within, result)


RECORDS: dict[Key, Kept] = {}
MOST_SAID = 4096


class _Replay:
    """The module of replay.c if it made the newest records; None for records in Python, and before the first record."""

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
    """Answer a call by a record of similar calls, as `answer` of replay.c does; without one give NotImplemented."""
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
    """Detach a call's tensors, since records handle no gradients, if the call needs no gradient."""
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
    """Answer a call of tensors on a GPU that no record serves, and record it. `plain`: tensors without gradients."""
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
    """Record a call, and give the way to put its results together; None if such calls cannot be recorded.

    An error is not raised here but by the call itself, which knows the tensors and names them.
    """
    if len({*map(id, tensors)}) < len(tensors):  # other calls give two tensors in the places of one given twice
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
    """List the tensors of results in `leaves`; give the way to put results together from such a list, None for None."""
    if isinstance(made, Shadow):
        place = len(leaves)
        leaves.append(made)
        return lambda tensors: tensors[place]
    if made is None:
        return None
    if not isinstance(made, tuple):
        raise UnfitError("a result that is no tensor")
    parts = [_assembled(each, leaves) for each in made]
    kind = getattr(made, "_make", tuple)
    if all(isinstance(each, Shadow) for each in made):
        begin, end = len(leaves) - len(made), len(leaves)
        return lambda tensors: kind(tensors[begin:end])
    return lambda tensors: kind([None if part is None else part(tensors) for part in parts])


def _nothing(_: Sequence[Tensor]) -> None:
    """Give None, the result of a call without results."""
