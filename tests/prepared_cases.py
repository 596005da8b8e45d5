"""For tests of prepared calls: tensors that are like others, and lie where no kernel can read them."""

from __future__ import annotations

import torch
from torch import Tensor


def at_any_byte(x: Tensor) -> Tensor:
    """A copy that begins a byte behind where elements may."""
    memory = bytearray(x.nbytes + 2 * x.element_size())
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    here = torch.frombuffer(memory, dtype=x.dtype, offset=-start % x.element_size() + 1, count=x.numel())
    return here.as_strided(x.shape, x.stride()).copy_(x)
