"""The forms in which programs of either era call a product.

Values and scales come in pairs, `f((x, sx), (y, sy), out)`, or apart, `f(x, y, sx, sy, out)`. Arguments have today's
names or those of 2025 (`lhs`, `rhs`, `out`, ...). A function declares today's form, and `accepts_every_form` lets it
take the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

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


def accepts_every_form(**more_synonyms: str) -> Callable[[Callable[..., Request]], Callable[..., Tensor | None]]:
    """Let a product take every form of call. `more_synonyms` maps further old names to the product's own.

    The decorated function returns a request, which is then run.
    """
    synonyms = {**SYNONYMS, **more_synonyms}
    old_names = frozenset(synonyms)  # torch.compile cannot ask a dictionary's keys

    def decorate(function: Callable[..., Request]) -> Callable[..., Tensor | None]:
        parameters = tuple(inspect.signature(function).parameters)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Tensor | None:
            if len(args) >= 4 and isinstance(args[0], Tensor):
                x, y, sx, sy, *rest = args
                args = ((x, sx), (y, sy), *rest)
            if kwargs and not old_names.isdisjoint(kwargs):
                kwargs = _todays_names(function.__name__, parameters[: len(args)], kwargs, synonyms)
            request = function(*args, **kwargs)
            return request[0](*request[1:])  # type: ignore[no-any-return]

        return call

    return decorate


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
