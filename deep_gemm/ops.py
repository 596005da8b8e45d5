"""Every product, cast and layer as an operator of `torch.ops.deep_gemm`: for torch.compile, torch.export, fake tensors.

Programs call the public functions. A function passes a call on to its operator where torch must see one (see
core/check/tracing.py), and the operator, when it runs, calls the function. An operator takes tensors one by one: values
and scales of an operand, members of `ExpertRows`. Where a caller may give the output, the overload `into` writes it.
"""

from .casts import ops as casts
from .gemm.bf16 import ops as bf16
from .gemm.dense import ops as dense
from .gemm.depths import ops as depths
from .gemm.heads import ops as einsum
from .gemm.rows import ops as rows
from .gemm.skip import ops as skip_head_mid
from .hyper import ops as hyper_connections
from .indexer import ops as indexer
from .linear import ops as linear
from .moe import ops as moe
from .nn import ops as nn

__all__ = [
    "bf16",
    "casts",
    "dense",
    "depths",
    "einsum",
    "hyper_connections",
    "indexer",
    "linear",
    "moe",
    "nn",
    "rows",
    "skip_head_mid",
]
