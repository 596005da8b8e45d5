"""Every public function names the argument if it is no tensor, or a tensor that the function cannot read."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from example_calls import GROUPS, ROUTED, ROWS, W1, W2, Arguments, B, K, N, X, all_examples
from torch import Tensor

import deep_gemm
from deep_gemm import nn

MODULES: dict[str, tuple[Any, Arguments]] = {
    "Linear": (nn.Linear(K, N), {"input": X}),
    "Experts": (nn.Experts(GROUPS, K, N), {"x": X, **ROUTED}),
    "FrozenLinear": (nn.FrozenLinear(B), {"x": X}),
    "FrozenExperts": (nn.FrozenExperts(W1, W2), {"x": X, **ROUTED}),
}
EACH = [pytest.param(each.function, each.given, id=f"{each.name} {[*each.given][-1]}") for each in all_examples()]
EACH += [pytest.param(*call, id=name) for name, call in MODULES.items()]
OTHERS = {"uneven_all_gather", "ceil_to_ue8m0", "calc_diff", "refit_"}
"""Functions of a group of processes, of numbers of any type, and of modules."""


def wrong(x: Tensor) -> Iterator[Any]:
    """Give objects that are no tensors, and tensors of a kind that no function reads."""
    numbers = x.float()
    yield from (
        numbers.tolist(),
        numbers.numpy(),
        "x",
        numbers.to_sparse(),
        torch.zeros(x.shape, dtype=torch.complex64),
    )


def instead_of(value: Any) -> Iterator[Any]:
    """Give wrong values for a tensor, a pair, or `ExpertRows`: replace all of it, or one member."""
    if isinstance(value, Tensor):
        yield from wrong(value)
        return
    yield from (tuple(value[0]), value[0].float())
    for index, member in enumerate(value):
        for bad in () if member is None else wrong(member):
            members = (*value[:index], bad, *value[index + 1 :])
            yield deep_gemm.ExpertRows(*members) if value is ROWS else members


def mistakes(function: Any, given: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Give arguments that are right but for one, and its name."""
    parameters = inspect.signature(function).parameters
    for name, value in given.items():
        if isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and isinstance(value[0], Tensor)):
            is_needed = name in parameters and parameters[name].default is inspect.Parameter.empty
            for bad in (*instead_of(value), *[None] * is_needed):
                yield name, {**given, name: bad}


@pytest.mark.parametrize(("function", "given"), EACH)
def test_a_mistake_begins_with_the_arguments_name(function: Any, given: Arguments) -> None:
    function(**given)
    for name, arguments in mistakes(function, given):
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
            function(**arguments)
        # A layer of torch's names has an `input`, which is the x of a cast.
        names = f"{name}:", f"sf{name}:", f"{name}.", *(["x:"] if name == "input" else [])
        assert str(caught.value).startswith(names)


@pytest.mark.parametrize(("function", "given"), EACH)
def test_a_tensor_on_meta_beside_others_is_refused(function: Any, given: Arguments) -> None:
    tensors = [name for name, value in given.items() if isinstance(value, Tensor)]
    for name in tensors if len(tensors) > 1 and not isinstance(function, torch.nn.Module) else ():
        with pytest.raises(ValueError, match="meta"):
            function(**{**given, name: given[name].to("meta")})


def test_each_public_function_of_tensors_is_here() -> None:
    names = [name for name in vars(deep_gemm)["__all__"] if "mega_moe" not in name and name not in OTHERS]
    public = [getattr(deep_gemm, name) for name in names]
    signatures = {each.__name__: inspect.signature(each) for each in public if inspect.isfunction(each)}
    takes = {name: [str(x.annotation) for x in each.parameters.values()] for name, each in signatures.items()}
    of_tensors = {name for name, kinds in takes.items() if any("Tensor" in kind or "Operand" in kind for kind in kinds)}
    assert of_tensors == {example.name for example in all_examples()}
