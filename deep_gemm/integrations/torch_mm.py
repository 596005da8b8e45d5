"""A mode in which this package computes torch's BF16 matrix products: the bits of a row do not depend on the batch.

    with batch_invariant_mm():
        logits = model(tokens)
        logits.sum().backward()

In this mode, `torch.mm`, `addmm`, `bmm` and the functions that use them (`matmul`, `@`, `F.linear`) run products of
this package if all matrices are BF16, also for gradients. torch computes everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.check.layout import ADDRESS_ALIGNMENT
from ..gemm.api.bf16_dense import bf16_gemm_nn
from ..gemm.api.bf16_einsum import einsum
from ..gemm.ask.bf16 import MULTIPLE

__all__ = ["batch_invariant_mm"]


def batch_invariant_mm() -> TorchDispatchMode:
    """Make the mode, which is a context manager for the current thread. Gradients use it only if `backward` is called
    within the mode too.
    """
    return _Mode()  # type: ignore[no-untyped-call]


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = PRODUCTS.get(func)
        are_bf16 = (isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in args)
        if ours is not None and not kwargs and all(are_bf16):
            with torch.no_grad():  # torch calls a mode below autograd, which has formulas for these operators
                return ours(*args)
        return func(*args, **(kwargs or {}))


def mm(a: Tensor, b: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Compute `torch.mm`, rounded once to this type."""
    n = b.shape[1]
    a, b = _fitting(a, b)
    d = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    bf16_gemm_nn(a, b, d)
    return d[:, :n].contiguous()


def addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute `torch.addmm`. The bias is added in FP32, and the sum is rounded once."""
    return (mm(a, b, torch.float32) + bias).to(torch.bfloat16)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Compute `torch.bmm`."""
    n = b.shape[2]
    a, b = _fitting(a, b)
    d = a.new_empty(a.shape[1], a.shape[0], b.shape[2])
    einsum("bhr,hdr->bhd", a.transpose(0, 1), b.mT, d)
    return d.transpose(0, 1)[..., :n].contiguous()


def _fitting(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Pad A `[m, k]` and B `[k, n]` with zeros along k and n, and copy operands whose layout products do not accept."""
    of_k, of_n = (-size % MULTIPLE for size in b.shape[-2:])
    if of_k:
        a = F.pad(a, (0, of_k))
    if of_k or of_n:
        b = F.pad(b, (0, of_n, 0, of_k))
    return _lying_well(a), _lying_well(b)


def _lying_well(x: Tensor) -> Tensor:
    row_stride, column_stride = x.stride()[-2:]
    is_pitched = row_stride % MULTIPLE == 0 if column_stride == 1 else row_stride == 1 and column_stride % MULTIPLE == 0
    others_fit = all(stride % MULTIPLE == 0 for stride in x.stride()[:-2])
    fits = is_pitched and others_fit and x.data_ptr() % ADDRESS_ALIGNMENT == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.mm.default: mm,
    torch.ops.aten.addmm.default: addmm,
    torch.ops.aten.bmm.default: bmm,
}
