"""Tell when torch must see a call as an operator, and which tensors have no memory.

A call goes straight to its kernel unless it is traced, or something observes torch's operators. Then it is an operator
of `torch.ops.deep_gemm` (see ops/), whose fake kernel makes the same checks of tensors without memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch._C import _disabled_torch_dispatch_impl as leaves_operators_to_torch
from torch._C import _dispatch_tls_is_dispatch_key_excluded as is_excluded
from torch._C import _get_tracing_state as jit_state
from torch._C import _len_torch_dispatch_stack as num_modes
from torch._C._functorch import TransformType
from torch._C._functorch import peek_interpreter_stack as innermost
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_dynamo_compiling

__all__ = ["dispatch_is_on", "handles_operators", "has_memory", "is_dispatched", "is_dynamo_compiling", "num_modes"]

FUNCTIONALIZE = TransformType.Functionalize
without_autocast = torch._C._DisableAutocast
"""Lets torch compute in the types that it is given, for references and for parts of answers on a GPU."""


def is_dispatched(x: object) -> bool:
    """Tell whether torch must see a call with this argument as an operator.

    Dynamo traces the call; or a dispatch mode is active, as in make_fx, in torch.export and in fake mode; or the
    argument is a tensor of a class that handles operators itself.
    """
    return (
        is_dynamo_compiling()
        or (num_modes() > 0 and dispatch_is_on())
        or (type(x) is not Tensor and handles_operators(x))
    )


def dispatch_is_on() -> bool:
    """Tell whether modes and classes get operators: one that is handling an operator may have switched that off."""
    return not is_excluded(DispatchKey.Python)


def handles_operators(*given: object) -> bool:
    """Tell whether one of these, or a member of a pair, must get operators: for its class, or for being on "meta"."""
    for x in given:
        kind = type(x)
        if isinstance(x, Tensor) and x.is_meta:
            return True
        if kind is Tensor:
            continue
        if isinstance(x, (tuple, list)):
            if handles_operators(*x):
                return True
        elif getattr(kind, "__torch_dispatch__", leaves_operators_to_torch) is not leaves_operators_to_torch:
            return dispatch_is_on()
    return False


def refuse_transforms() -> None:
    """Refuse transforms of torch.func, whose tensors have no address, and torch.jit.trace, which sees no kernel.

    Dynamo traces a transform and then calls operators; functionalize changes no values.
    """
    if transforms_are_active() and not is_dynamo_compiling() and innermost().key() != FUNCTIONALIZE:
        instead = "take gradients by torch.autograd, and make the dimension that vmap maps one of the rows"
        raise NotImplementedError(f"torch.func and torch.vmap are not supported: {instead}")
    if jit_state() is not None:
        raise NotImplementedError("torch.jit.trace is not supported: use torch.export, or torch.compile")


def has_memory(x: Tensor) -> bool:
    """Tell whether a tensor has an address and elements: in a fake kernel, or while Dynamo traces, it has none."""
    return not (is_dynamo_compiling() or isinstance(x, FakeTensor) or x.is_meta)
