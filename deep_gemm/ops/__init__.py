"""Every product, cast and layer as an operator of `torch.ops.deep_gemm`: for torch.compile, torch.export, fake tensors.

Programs call the public functions. A function passes a call on to its operator where torch must see one (see
problem/tracing.py), and the operator, when it runs, calls the function. An operator takes tensors one by one: values
and scales of an operand, members of `ExpertRows`. Where a caller may give the output, the overload `into` writes it.
"""

from . import (
    activation,
    bf16,
    casts,
    dense,
    depths,
    einsum,
    hyper_connections,
    indexer,
    layers,
    nn,
    paged_indexer,
    routing,
    rows,
    scales,
    skip_head_mid,
)

__all__ = [
    "activation",
    "bf16",
    "casts",
    "dense",
    "depths",
    "einsum",
    "hyper_connections",
    "indexer",
    "layers",
    "nn",
    "paged_indexer",
    "routing",
    "rows",
    "scales",
    "skip_head_mid",
]
