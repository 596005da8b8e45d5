"""The forms of call that old and new programs use for a product.

Values and scales are pairs, `f((x, sx), (y, sy), out)`, or separate, `f(x, y, sx, sy, out)`. Arguments have today's
names or the names of 2025 (`lhs`, `rhs`, `out`, ...). A function declares today's form. `accepts_every_form` lets it
accept all forms, and `accepts_names` only other names. Releases differ in the order of the options of an indexer's
logits; `tells_options_by_type` accepts any order. `like` makes a function from another function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import SymBool, SymInt, Tensor

P = ParamSpec("P")
R = TypeVar("R")
Request = tuple[Any, ...]
"""The function that runs a product, and its arguments."""

SYNONYMS = {
    "lhs": "a",
    "rhs": "b",
    "out": "d",
    "m_indices": "grouped_layout",
    "ks_cpu": "ks",
    "batch_sizes": "ks",
}

OVERLAP = frozenset(("enable_overlap", "max_block_n", "signal"))
"""SGLang passes these keywords to let a masked product signal each block of rows that it has written."""


def accepts_every_form(
    *, can_be_asked_to_overlap: bool = False, **more_synonyms: str
) -> Callable[[Callable[P, Request]], Callable[P, Tensor | None]]:
    """Let a product accept every form of call. `more_synonyms` maps further old names to the product's own names.

    `can_be_asked_to_overlap`: engines pass the keywords of `OVERLAP`, which are refused unless the overlap is off.
    The function returns a request, and the decorator runs the request. Callers, checkers and editors see a function
    with the same parameters that returns the result of the run.
    """
    synonyms = {**SYNONYMS, **more_synonyms}
    overlap = OVERLAP if can_be_asked_to_overlap else frozenset[str]()
    old_names = overlap.union(synonyms)  # torch.compile cannot use a dictionary's keys here

    def decorate(function: Callable[P, Request]) -> Callable[P, Tensor | None]:
        parameters = tuple(inspect.signature(function).parameters)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Tensor | None:
            if len(args) >= 4 and isinstance(args[0], Tensor):
                x, y, sx, sy, *rest = args
                args = ((x, sx), (y, sy), *rest)
            if kwargs and not old_names.isdisjoint(kwargs):
                if overlap:
                    kwargs = _without_overlap(kwargs)
                kwargs = _todays_names(function.__name__, parameters[: len(args)], kwargs, synonyms)
            request = function(*args, **kwargs)
            return request[0](*request[1:])  # type: ignore[no-any-return]

        return _shown_as(call, function, "Tensor | None", decorate)  # type: ignore[no-any-return]

    return decorate


def like(model: Callable[P, R], **instead: object) -> Callable[[Callable[[], None]], Callable[P, R]]:
    """Make a function like `model` from a function that has only a name and a docstring.

    `like(f, NT="NN", compiled_dims="mn")` copies the code of `f` with the global `NN` instead of `NT`, so a call is as
    fast. The signature shows another default for `compiled_dims`, an option that must not change the work of `f`.
    """

    def make(named: Callable[[], None]) -> Callable[P, R]:
        function, decorate = inspect.unwrap(model), vars(model).get("decorate")
        names = tuple([str(instead.get(name, name)) for name in function.__code__.co_names])
        code = function.__code__.replace(co_names=names)
        copied = FunctionType(code, function.__globals__, named.__name__, function.__defaults__, function.__closure__)
        copied.__kwdefaults__, copied.__annotations__ = function.__kwdefaults__, function.__annotations__
        copied.__qualname__, copied.__doc__ = named.__qualname__, named.__doc__
        made: Any = decorate(copied) if decorate else copied
        signature = inspect.signature(model)
        shown = [each.replace(default=instead.get(name, each.default)) for name, each in signature.parameters.items()]
        made.__signature__ = signature.replace(parameters=shown)
        return made  # type: ignore[no-any-return]

    return make


def accepts_names(**synonyms: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function accept other names of arguments. `synonyms` maps another name to the function's name."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = tuple(inspect.signature(function).parameters)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            if not synonyms.keys().isdisjoint(kwargs):
                kwargs = _todays_names(function.__name__, parameters[: len(args)], kwargs, synonyms)
            return function(*args, **kwargs)

        return call

    return decorate


def _shown_as(call: Any, function: Callable[..., Request], returned: str, decorate: object = None) -> Any:
    """Give `call` the signature of `function`, with result type `returned`. `like` reads the attribute `decorate`."""
    call.__signature__ = inspect.signature(function).replace(return_annotation=returned)
    call.__annotations__ = {**function.__annotations__, "return": returned}
    call.decorate = decorate
    return call


def _without_overlap(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop the keywords of `OVERLAP` if the overlap is off. Refuse an overlap that is on."""
    if kwargs.get("enable_overlap") or kwargs.get("signal") is not None:
        what_helps = "start SGLang without --enable-single-batch-overlap"
        raise NotImplementedError(f"enable_overlap: expected False and no signal, as no product signals: {what_helps}")
    return {name: value for name, value in kwargs.items() if name not in OVERLAP}


def _todays_names(
    function: str, by_position: tuple[str, ...], kwargs: dict[str, Any], synonyms: dict[str, str]
) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, value in kwargs.items():
        today = synonyms.get(name, name)
        if today in by_position:
            raise ValueError(f"{today}: given twice in a call of {function}, by position and as {name}")
        if today in renamed:
            raise ValueError(f"{today}: given twice in a call of {function}, once as {name}")
        renamed[today] = value
    return renamed


def tells_options_by_type(function: Callable[P, Request]) -> Callable[P, Tensor]:
    """Let a function of an indexer accept its options, the arguments with a default, by position in any order.

    Like a product, the function returns a request, and the decorator runs it.

    Engines were written for releases with different orders, but each option has its own type: a bool is `clean_logits`,
    an integer `max_seqlen_k`, a torch.dtype `logits_dtype`, and a tensor or None the last option.
    """
    parameters = inspect.signature(function).parameters
    required = sum(each.default is each.empty for each in parameters.values())
    options = tuple(parameters)[required:]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        for option in args[required:]:
            name = _option_of_type(option, options[-1])
            if name not in options:
                kinds = ", ".join(options)
                raise ValueError(f"{function.__name__}: expected {kinds} after the first {required}, got {option!r}")
            if name in kwargs:
                raise ValueError(f"{name}: given twice in a call of {function.__name__}")
            kwargs[name] = option
        request = function(*args[:required], **kwargs)
        return request[0](*request[1:])  # type: ignore[no-any-return]

    return _shown_as(call, function, "Tensor")  # type: ignore[no-any-return]


def _option_of_type(option: object, last: str) -> str | None:
    if isinstance(option, (bool, SymBool)):
        return "clean_logits"
    if isinstance(option, torch.dtype):
        return "logits_dtype"
    if option is None or isinstance(option, Tensor):
        return last
    is_integer = isinstance(option, (int, SymInt)) or hasattr(option, "__index__")  # no hasattr of a SymInt
    return "max_seqlen_k" if is_integer else None
