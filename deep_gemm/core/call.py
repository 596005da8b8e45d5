r"""Calls like one that was checked: their plan is found, and launched at their addresses without checks.

    call --signature--> Plans --> CallPlan.fits(addresses) --> its launch at the addresses
      \--- unknown ---> answer: check, compute --> the second time a plan, kept for calls like this one

A signature is everything that decides whether a call is right and what it launches, but for addresses: shapes, strides,
types, devices, what the caller said, the settings in force. So a call with the signature of one that was checked is
right as well, if only its addresses are: they are aligned, and an output overlaps nothing that it must not.

`run` is for functions of any tensors; products have more to tell apart, so gemm/product.py has a `run` of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from . import settings
from .check.layout import ADDRESS_ALIGNMENT, byte_span
from .check.tracing import dispatch_is_on, handles_operators, is_dynamo_compiling, num_modes, refuse_transforms
from .kernel import WISHES, Prepared
from .record import Apart, Launch, Record, Recording, Word
from .replay import Records, native
from .seen import Seen

MAX_PLANS = 4096
_PUTTING = threading.Lock()
Key = tuple[object, ...]
P = TypeVar("P")
PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype))
"""Types of what a caller may say in a signature: equal ones of a type mean the same, and hold no memory."""


class Plans(Generic[P]):
    """Plans of calls: by signature, and by what torch recognizes. Both are bounded."""

    def __init__(self) -> None:
        self.plans: dict[Key, P] = {}
        self.seen = Seen()
        self._met: dict[Key, None] = {}
        self._lock = threading.Lock()

    def find_by_signature(
        self, key: Key, hint: Key, tensors: Sequence[Tensor], wants_checks: Callable[[Sequence[Tensor]], bool]
    ) -> P | None:
        """Give the plan of calls with this signature, and let torch recognize the next one."""
        plan = self.plans.get(key)
        if plan is not None:
            self.seen.keep(hint, tensors, plan, wants_checks)
        return plan

    def was_met(self, hint: Key) -> bool:
        """Tell whether a call with this hint was met before: sizes that never come again are not worth a plan."""
        if hint in self._met:
            return True
        with self._lock:
            put(self._met, hint, None, MAX_PLANS)
        return False

    def keep(self, key: Key, plan: P) -> None:
        """Keep a plan for calls of this signature."""
        with self._lock:
            put(self.plans, key, plan, MAX_PLANS)

    def clear(self) -> None:
        """Forget all plans."""
        with self._lock:
            self.plans.clear()
            self.seen.clear()
            self._met.clear()


def as_they_are(made: tuple[Tensor, ...]) -> Any:
    """Give what a call returns that made these outputs: all, the one, or None."""
    return made if len(made) > 1 else made[0] if made else None


@dataclass(eq=False)
class CallPlan:
    """A launch for tensors of certain shapes, strides, types and device, at any addresses."""

    launch: Callable[..., None]
    """`(ctas, *addresses)`, as `Prepared.launch` takes them."""
    ctas: int
    places: Sequence[tuple[int, int]]
    """The tensor of the call that each address is in, and how many bytes behind its start. Made outputs are last."""
    alignments: Sequence[int]
    """Bytes, of each tensor of the call."""
    outputs: Sequence[int] = ()
    """Tensors of the call that are written."""
    new_outputs: Callable[[], tuple[Tensor, ...]] = tuple
    """Makes outputs that the caller left out."""
    result: Callable[[tuple[Tensor, ...]], Any] = as_they_are
    """Gives what a call returns, of the outputs that were made."""
    apart: Sequence[tuple[int, int, int, int]] = ()
    """An output and another tensor, and how far each reaches: these share no memory."""

    def fits(self, at: Sequence[int]) -> bool:
        """Tell whether a launch at these addresses is right. If not, the call wants a closer look."""
        for address, alignment in zip(at, self.alignments, strict=False):
            if address % alignment:
                return False
        for output, other, span, span_other in self.apart:
            if at[output] < at[other] + span_other and at[other] < at[output] + span:
                return False
        return True

    def reaches(self, tensors: Sequence[Tensor]) -> CallPlan:
        """Note how far tensors of the call reach, and give the plan itself."""
        spans = [*map(byte_span, tensors)]
        inputs = [each for each in range(len(tensors)) if each not in self.outputs]
        pairs = *product(self.outputs, inputs), *combinations(self.outputs, 2)
        self.apart = [(output, other, spans[output], spans[other]) for output, other in pairs]
        return self


class Launches(Protocol):
    """One launch or some, prepared for other addresses: `Prepared`, and what a family makes of several."""

    @property
    def launch(self) -> Callable[..., None]:
        """Takes CTAs and addresses."""


def plan_at(
    ready: tuple[Launches | None, int],
    launched: Sequence[tuple[int, Tensor]],
    given: Sequence[Tensor],
    made: Sequence[Tensor] = (),
    outputs: Sequence[int] = (),
    result: Callable[[tuple[Tensor, ...]], Any] = as_they_are,
) -> CallPlan | None:
    """Give the plan of calls like one of tensors `given` that makes those `made`; None if it would not serve them.

    Kernels were chosen for numbers that begin where 16 bytes may be loaded; integers are read one by one. `ready` is
    the launch and its CTAs. `launched` are the tensors at whose addresses it went, in order, each with its place among
    `given` and `made`: one that lies elsewhere was copied, which is this call's own business.
    """
    prepared, ctas = ready
    tensors = *given, *made
    alignments = [ADDRESS_ALIGNMENT if x.is_floating_point() else x.element_size() for x in given]
    if prepared is None or any(x.data_ptr() % alignment for x, alignment in zip(given, alignments, strict=True)):
        return None
    if any(x.data_ptr() != tensors[place].data_ptr() for place, x in launched):
        return None
    like = [(x.shape, x.stride(), x.dtype, x.device) for x in made]

    def new_outputs() -> tuple[Tensor, ...]:
        return tuple([torch.empty_strided(size, stride, dtype=dtype, device=at) for size, stride, dtype, at in like])

    places = [(place, 0) for place, _ in launched]
    return CallPlan(prepared.launch, ctas, places, alignments, outputs, new_outputs, result)


def never(tensors: Sequence[Tensor]) -> bool:
    """Tell that no call must be checked for the sake of a gradient: whoever calls has asked, or there is none."""
    return False


def requires_gradient(tensors: Sequence[Tensor]) -> bool:
    """Tell whether a call with these has a gradient, which plans know nothing of."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


@dataclass(eq=False)
class Function:
    """A public function, and who answers its calls: these have `operands`, tensors and pairs, and what was `said`."""

    answer: Callable[..., tuple[Any, CallPlan | None]]
    """`(*operands, *said)`: checks and computes. It gives what the call returns, and the plan if that serves others."""
    as_operator: Callable[..., Any]
    """`(*operands, *said)`: passes a call to the operator of `torch.ops.deep_gemm` that computes it."""
    tensors: Callable[..., tuple[Tensor, ...]]
    """`(*operands)`: gives all tensors among them, in the order that `CallPlan.places` counts."""
    wants_checks: Callable[[Sequence[Tensor]], bool] = requires_gradient
    """Tells whether a call must be checked although one like it was: for the sake of a gradient."""
    has_gradient: Callable[..., bool] = lambda *operands: False
    """`(*operands)`: tells whether the operator must compute them, so that autograd sees it."""


CALLS: Plans[CallPlan] = Plans()


def run(function: Function, operands: tuple[Any, ...], said: Key = ()) -> Any:
    """Compute a call: by the plan of calls like it; else check it, and keep the plan if it is not the first of them."""
    if is_dynamo_compiling() or (num_modes() and dispatch_is_on()):
        return function.as_operator(*operands, *said)
    plan: CallPlan | None = None
    key: Key = ()
    name: Any = None
    try:
        tensors = function.tensors(*operands)
        first = tensors[0]
        if first.is_cuda and (type(first) is Tensor or not handles_operators(first)):
            of = (function, said, *map(type, said), settings.in_force.generation)
            if (kept := RECORDS.get(of)) is not None:
                name, answer = kept[0].recall(tensors)
                if answer is not NotImplemented:
                    return kept[1](tuple(answer))
            hint = (function, said, *map(type, said), settings.in_force.generation, len(tensors), first.shape)
            plan = CALLS.seen.find(hint, tensors)
            is_like_others = plan is None and PLAIN.issuperset(map(type, said)) and CALLS.was_met(hint)
            if is_like_others and not (handles_operators(*tensors) or function.wants_checks(tensors)):
                key = signature(hint, tensors)
                plan = CALLS.find_by_signature(key, hint, tensors, function.wants_checks)
            if plan is not None:
                at = [x.data_ptr() for x in tensors]
                if not plan.fits(at):
                    plan = None
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):  # malformed: the checks say how
        key, plan = (), None
    if plan is not None:
        made = plan.new_outputs()
        at += [x.data_ptr() for x in made]
        plan.launch(plan.ctas, *[at[tensor] + behind for tensor, behind in plan.places])
        return plan.result(made)
    refuse_transforms()
    if handles_operators(*operands) or function.has_gradient(*operands):
        return function.as_operator(*operands, *said)
    if not key:
        return function.answer(*operands, *said)[0]
    WISHES.prepared = True
    try:
        result, plan = function.answer(*operands, *said)
    finally:
        WISHES.prepared = False
    if plan is not None:
        record, result_of = plan, as_they_are
        if isinstance(plan, CallPlan):
            plan, result_of = plan.reaches(tensors), plan.result
            record = recorded(plan, tensors)
        if record is None:
            CALLS.keep(key, plan)
            return result
        kept = RECORDS.get(of)
        if kept is None:
            kept = RECORDS[of] = Records([((), ())] * 16, native()), result_of
            name = None
        if name is None:
            name, _ = kept[0].recall(tensors)
        if name is not None:
            kept[0].keep(name, record, first.device)
    return result


RECORDS: dict[Key, tuple[Records, Callable[..., Any]]] = {}


def recorded(plan: CallPlan, tensors: Sequence[Tensor]) -> Record | None:
    """Give the record of calls like one with these tensors that a plan answers by one launch; None if it cannot."""
    prepared = getattr(plan.launch, "__self__", None)
    made = plan.new_outputs()
    if not isinstance(prepared, Prepared) or any(byte_span(x) != x.untyped_storage().nbytes() for x in made):
        return None
    r = Recording(prepared.device)
    shadows = [r.shadow(x, alignment) for x, alignment in zip(tensors, plan.alignments, strict=False)]
    if len(shadows) < len(tensors):
        return None
    shadows += [r.result(x.shape, x.stride(), x.dtype) for x in made]
    params = prepared.kernel.params_of(prepared.config)
    launcher = prepared.launcher()
    words = tuple(
        Word(params.offset(name), 8, 0, r.address(shadows[place], -behind))
        for name, (place, behind) in zip(prepared.changing, plan.places, strict=True)
    )
    r.launches.append(Launch(launcher, r.index(plan.ctas), prepared.params, words, ()))
    for output, other, span, span_other in plan.apart:
        if max(output, other) < len(tensors):
            r.apart.append(Apart(output, other, r.index(span), r.index(span_other), False))
    return r.record()


def signature(hint: Key, tensors: Sequence[Tensor]) -> Key:
    """Give all that decides whether a call is right and what it launches, but for addresses."""
    return (*hint, *((x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors))


def put(kept: dict[Any, Any], key: object, value: object, most: int) -> None:
    """Keep a value; the oldest goes if there are too many. Threads may do so at a time."""
    with _PUTTING:
        if len(kept) >= most:
            del kept[next(iter(kept))]
        kept[key] = value
