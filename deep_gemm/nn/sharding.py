"""Tell DTensor how to shard the operators of `Linear` over the GPUs of a tensor-parallel group.

Every operand may be whole on each GPU. Otherwise n is split (as by `ColwiseParallel`), or k (as by `RowwiseParallel`):

             x        weight    d          dy       dx         dw
    n        whole    by n      by n       by n     partial    by n
    k        by k     by k      partial    whole    by k       by k

Each GPU casts its own part of the weight. Blocks, or rows, begin where the part begins.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def know_shardings() -> None:
    """Tell DTensor the shardings once, if the program has loaded DTensor: torch needs half a second to load it."""
    if "torch.distributed.tensor" in sys.modules and not _known:
        _register()
        _known.append(True)


# While torch.compile traces, it calls this function instead of tracing it. torch.compiler.assume_constant_result would
# mark it too, but loads the compiler, which takes seconds.
know_shardings._dynamo_marked_constant = True  # type: ignore[attr-defined]
_known: list[bool] = []


def _register() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    whole, rows, columns, partial = Replicate(), Shard(0), Shard(1), Partial()

    def beside(given: Any, placement: Any) -> Any:
        return None if given is None else placement

    def of_rows(x: Any, weight: Any, bias: Any, keeps_columns: int, gran_k: int) -> Any:
        kept = rows if keeps_columns else whole  # x cast along tokens: values have k first, scales have one dimension
        return [
            ([whole, whole, whole], [whole, whole, beside(bias, whole), None, None]),
            ([columns, whole, whole], [whole, rows, beside(bias, rows), None, None]),
            ([partial, kept, kept], [columns, columns, beside(bias, partial), None, None]),
        ]

    def of_gradients(grad: Any, weight: Any, x_values: Any, x_scales: Any, *_: Any) -> Any:
        def sharding(grad: Any, of_weight: Any, of_x: Any, dx: Any, dw: Any) -> Any:
            outputs = [whole if weight is None else dx, whole if x_values is None else dw]
            inputs = [grad, beside(weight, of_weight), beside(x_values, of_x), beside(x_scales, of_x)]
            return outputs, [*inputs, None, None, None]

        return [
            sharding(whole, whole, whole, whole, whole),
            sharding(columns, rows, whole, partial, rows),
            sharding(whole, columns, rows, columns, columns),
        ]

    register: Any = register_sharding  # register_sharding has no types
    register(torch.ops.deep_gemm.nn_linear_rows.default)(of_rows)
    register(torch.ops.deep_gemm.nn_linear_gradients.default)(of_gradients)
