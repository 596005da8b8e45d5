"""Make operators of torch from a schema, a function that computes, and a function that checks fake tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes_in_force

from .check.recipes import recipes_of

library: Any = torch.library  # which has no types
LIBRARY = library.Library("deep_gemm", "FRAGMENT")
TAGS = (
    torch.Tag.pt2_compliant_tag,
    # Inductor must keep the strides that it saw when it compiled, so that m-major scales stay m-major.
    torch.Tag.needs_exact_strides,
)

Kernel = Callable[..., Any]
Tags = tuple[torch.Tag, ...]
Flops = Callable[..., int] | None
"""`flops(made, **arguments)` counts a call's operations by shapes. `made`: the first tensor that it made or wrote."""


def register_at_need(module: str) -> None:
    """Import the module that makes the operators only when torch.ops.deep_gemm is first used: the import is slow."""
    namespace = torch.ops.deep_gemm
    registered: Any = type(namespace)

    class Operators(registered):  # type: ignore[misc]
        __module__ = registered.__module__  # torch uses it to name an operator in a saved program

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__"):
                import_module(module)  # a thread already inside this import sees only the operators made until then
            # Return the same packet each time, because torch counts operations by packet.
            return vars(self).get(name) or super().__getattr__(name)

        def __dir__(self) -> list[str]:
            import_module(module)
            return list(super().__dir__())

        def __iter__(self) -> Iterator[str]:
            import_module(module)
            return iter(super().__iter__())

    namespace.__class__ = Operators


def flops_of(operand: str) -> Flops:
    """Make a formula for a product that multiplies each element of an operand once for each column of the result."""
    return lambda made, **given: 2 * given[operand].numel() * made.shape[-1]


def operator(
    schema: str, real: Kernel, fake: Kernel, tags: Tags = (), *, has_gradients: bool = False, flops: Flops = None
) -> None:
    """Make an operator of torch.ops.deep_gemm.

    `fake` has the arguments of `real`. It makes all checks that need neither addresses nor elements. Its results have
    the shapes, strides, types and devices of `real`'s. No result has a gradient unless `gradients` registers a formula.
    torch's FlopCounterMode calls `flops`.
    """
    name = schema.split("(", maxsplit=1)[0]
    LIBRARY.define(schema, tags=TAGS + tags)
    LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    if not has_gradients:
        LIBRARY.impl(name, library.fallthrough_kernel, "Autograd")
    library.register_fake(f"deep_gemm::{name}", fake, lib=LIBRARY)
    packet, _, overload = name.partition(".")
    made = getattr(getattr(torch.ops.deep_gemm, packet), overload or "default")
    if made._schema.is_mutable:
        LIBRARY.impl(name, _counting_versions(made), "ADInplaceOrView", with_keyset=True)
    _register_flops(name, flops)


def operators(
    schema: str,
    real: Kernel,
    fake: Kernel,
    tags: Tags = (),
    *,
    passes: str = "",
    has_gradients: bool = False,
    flops: Flops = None,
) -> None:
    """Make an operator whose kernels get all arguments by name, with defaults filled in. A schema with `<>` makes two.

    `f(Tensor x<, Tensor(d!) d>) -> Tensor` makes `f`, which returns D, and `f.into`, which writes a caller's D. Kernels
    of `f` get `d=None`. Kernels get an operand `x` and its scales `sfx` as a pair, or `x` alone if `sfx` is None, and
    lists as tuples. `adds_to_d` means that C is D: a tensor that is written cannot also be passed as C.
    `passes`: if given, an expression for all arguments that kernels get, such as `a, b, d, c, (recipes,)`. `recipes` is
    the triple of recipes that `recipe` stands for.
    """
    whole = re.sub(r"<(.*?)>", r"\1", schema)
    alone = re.sub(r"<(.*?)>", "", schema)
    names = [x.name for x in torch._C.parse_schema(whole).arguments]
    if not passes:
        gone = {"adds_to_d", *(f"sf{name}" for name in names)}
        passes = ", ".join(f"{name}={name}" for name in names if name not in gone)
    taking = partial(_taking, names, passes)
    operator(alone, taking(alone, real), taking(alone, fake), tags, has_gradients=has_gradients)
    if whole != alone:
        into = whole.replace("(", ".into(", 1).rsplit(" -> ", maxsplit=1)[0] + " -> ()"
        operator(into, taking(into, real), taking(into, fake), tags)
    _register_flops(alone, flops)  # after all overloads: torch makes a new packet for each


DECLARED: list[Callable[[], None]] = []
"""Functions that make the declared operators. deep_gemm/ops.py calls all of them."""


def declared(schema: str, real: Kernel, fake: Kernel, make: Callable[..., None] = operators, **more: Any) -> Kernel:
    """Declare an operator, which `make` makes later. Return a function that passes its arguments to the operator."""
    DECLARED.append(partial(make, schema, real, fake, **more))
    name = schema.partition("(")[0]
    return lambda *given: getattr(torch.ops.deep_gemm, name).default(*given)


def _taking(all_names: list[str], passes: str, schema: str, kernel: Kernel) -> Kernel:
    """Compile `lambda a, sfa, d, c=None, *, adds_to_d=False: kernel(a=(a, sfa), d=d, c=c_of(d, c, adds_to_d))`.

    A compiled graph calls the lambda in each run, so the lambda looks nothing up. It has defaults because torch leaves
    out arguments that equal the defaults.
    """
    arguments = torch._C.parse_schema(schema).arguments
    lists = {x.name for x in arguments if "List" in str(x.type)}
    names = [x.name for x in arguments]
    takes = [f"{x.name}={x.default_value!r}" if x.has_default_value() else x.name for x in arguments]
    if any(x.kwarg_only for x in arguments):
        takes.insert([x.kwarg_only for x in arguments].index(True), "*")

    def passed(name: str) -> str:
        if name == "recipes":
            return "recipes_of(recipe)"
        if name not in names:
            return "None" if name in all_names else name
        if f"sf{name}" in names:
            return f"{name} if sf{name} is None else ({name}, sf{name})"
        if name == "c" and "adds_to_d" in names:
            return "c_of(d, c, adds_to_d)"
        return f"{name} if {name} is None else tuple({name})" if name in lists else name

    given = re.sub(r"\b\w+\b(?!=)", lambda found: passed(found[0]), passes)
    code = f"lambda {', '.join(takes)}: kernel({given})"
    made: Kernel = eval(code, {"kernel": kernel, "c_of": _c_of, "recipes_of": recipes_of})
    return made


def _c_of(d: Any, c: Any, adds_to_d: bool) -> Any:
    if adds_to_d and c is not None:
        raise ValueError("c: expected None with adds_to_d, got a tensor")
    return d if adds_to_d else c


def gradients(name: str, backward: Kernel, keep: Kernel) -> None:
    """Register the formula of an operator's gradients, and the function that keeps the tensors that it needs."""
    library.register_autograd(f"deep_gemm::{name}", backward, setup_context=keep, lib=LIBRARY)


def _register_flops(name: str, flops: Flops) -> None:
    """Register one formula that counts the operations of all overloads. The overload `into` writes a given tensor."""
    if flops is None:
        return
    from torch.utils import flop_counter  # which loads Triton

    packet = getattr(torch.ops.deep_gemm, re.split(r"[.(]", name)[0])

    def count(*args: Any, out_val: Any, **kwargs: Any) -> int:
        overload = packet.into if out_val is None and hasattr(packet, "into") else packet.default
        arguments = overload._schema.arguments
        given = dict(zip((x.name for x in arguments), args, strict=False), **kwargs)
        written = [given[x.name] for x in arguments if x.alias_info is not None and x.alias_info.is_write]
        made, *_ = written or (out_val if isinstance(out_val, tuple | list) else [out_val])
        return flops(made, **given)

    flop_counter.register_flop_formula(packet, get_raw=True)(count)
    for mode in modes_in_force():  # a counter copied torch's formulas before this formula existed
        counter = getattr(mode, "counter", None)
        if isinstance(counter, flop_counter.FlopCounterMode):
            counter.flop_registry[packet] = count


def _counting_versions(made: torch._ops.OpOverload) -> Kernel:
    """Make a kernel that tells autograd which tensors are written, and then calls the next kernel of the operator."""
    arguments = made._schema.arguments
    written = [(i, x.name) for i, x in enumerate(arguments) if x.alias_info is not None and x.alias_info.is_write]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for place, name in written:
            torch.autograd.graph.increment_version(args[place] if place < len(args) else kwargs[name])
        return made.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    return kernel
