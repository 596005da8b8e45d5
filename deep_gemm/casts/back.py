"""From values and scales back to the numbers that they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.check.checks import no_gradient, same_device
from ..core.check.layout import SCALE_BLOCK, ceil_div, check_dense
from .rules import granularity
from .scales import unpack_ue8m0_from_int


def cast_back_from_fp8(x: Tensor, sf: Tensor, gran_k: int = SCALE_BLOCK, use_packed_ue8m0: bool = False) -> Tensor:
    """Get the FP32 numbers that FP8 values and their scales stand for, each rounded once.

    `x` is `[..., m, k]`; `sf` is `[..., m, ceil(k / gran_k)]`, or one for each block,
    `[..., ceil(m / gran_k), ceil(k / gran_k)]`, in FP32 or, for rows, as packed UE8M0, which
    `use_packed_ue8m0` insists on.

    >>> cast_back_from_fp8(*per_token_cast_to_fp8(torch.tensor([[896.0, -448.0, 0.0]]))).tolist()
    [[896.0, -448.0, 0.0]]
    """
    no_gradient("x", x)
    no_gradient("sf", sf)
    check_dense("x", x)
    if x.dtype != torch.float8_e4m3fn:
        raise ValueError(f"x: expected dtype torch.float8_e4m3fn, got {x.dtype}")
    if use_packed_ue8m0 and isinstance(sf, Tensor) and sf.dtype != torch.int32:
        raise ValueError(f"sf: expected dtype torch.int32 with use_packed_ue8m0, got {sf.dtype}")
    if x.dim() < 2:
        raise ValueError(f"x: expected at least 2 dimensions, got shape {tuple(x.shape)}")
    with torch.no_grad():
        return scaled_back(x.float(), sf, gran_k, "x")


def scaled_back(x: Tensor, sf: Tensor, gran_k: int, name: str) -> Tensor:
    """Multiply FP32 numbers `[..., m, k]`, of values that are called `name`, with scales of rows or of blocks."""
    gran_k = granularity(gran_k)
    check_dense("sf", sf)
    same_device({"sf": sf}, x.device, name)
    *batch, m, k = x.shape
    columns = ceil_div(k, gran_k)
    if sf.dtype == torch.int32:
        sf = unpack_ue8m0_from_int(sf)[..., :columns]
    if sf.dtype != torch.float32:
        raise ValueError(f"sf: expected dtype torch.float32 or torch.int32, got {sf.dtype}")
    of_rows, of_blocks = (*batch, m, columns), (*batch, ceil_div(m, gran_k), columns)
    if sf.shape not in (of_rows, of_blocks):
        raise ValueError(f"sf: expected shape {of_rows} or {of_blocks}, got {tuple(sf.shape)}")
    if sf.shape != of_rows:
        sf = sf.repeat_interleave(gran_k, -2)[..., :m, :]
    return x * sf.repeat_interleave(gran_k, -1)[..., :k]
