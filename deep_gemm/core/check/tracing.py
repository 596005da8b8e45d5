"""Tells when torch must see a call as an operator, and which tensors have no memory.

A call launches its kernel directly, unless torch traces the call or something observes torch's operators. Then the call
uses an operator of `torch.ops.deep_gemm` (ops.py). The operator's fake kernel makes the same checks, without data.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _disabled_torch_dispatch_impl as leaves_operators_to_torch
from torch._C import _len_torch_dispatch_stack as num_modes
from torch._C._functorch import TransformType
from torch._C._functorch import peek_interpreter_stack as innermost
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_dynamo_compiling

__all__ = ["dispatch_is_on", "handles_operators", "has_memory", "is_dispatched", "is_dynamo_compiling", "num_modes"]

FUNCTIONALIZE = TransformType.Functionalize
without_autocast = torch._C._DisableAutocast
"""A context in which torch computes in the types of its operands: references and answers on a GPU use it."""


def is_dispatched(x: object) -> bool:
    """Tell whether torch must see a call with this argument as an operator.

    It must if Dynamo traces the call, or if a dispatch mode is active (make_fx, torch.export, fake mode), or if the
    argument is a tensor of a class that handles operators itself.
    """
    return (
        is_dynamo_compiling()
        or (num_modes() > 0 and dispatch_is_on())
        or (type(x) is not Tensor and handles_operators(x))
    )


def dispatch_is_on() -> bool:
    """Tell whether modes and tensor classes receive operators. A handler of an operator may have switched this off."""
    return not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)


def handles_operators(*given: object) -> bool:
    """Tell whether an argument, or a member of a pair, must receive operators: by its class, or as a meta tensor."""
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

    Two cases pass: Dynamo traces a transform and then calls operators, and functionalize changes no values.
    """
    are_active = torch._C._are_functorch_transforms_active()
    if are_active and not is_dynamo_compiling() and innermost().key() != FUNCTIONALIZE:
        instead = "compute gradients by torch.autograd, and merge the dimension that vmap maps into the rows"
        raise NotImplementedError(f"torch.func and torch.vmap are not supported: {instead}")
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError("torch.jit.trace is not supported: use torch.export, or torch.compile")


def has_memory(x: Tensor) -> bool:
    """Tell whether a tensor has an address and elements. Tensors of fake kernels and of Dynamo's traces have none."""
    return not (is_dynamo_compiling() or isinstance(x, FakeTensor) or x.is_meta)
