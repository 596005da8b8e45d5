"""Every product, cast and layer as an operator of `torch.ops.deep_gemm`: for torch.compile, torch.export, fake tensors.

Programs call the public functions. A function passes a call on to its operator where torch must see one (see
core/check/tracing.py), and the operator, when it runs, calls the function. An operator takes tensors one by one: values
and scales of an operand, members of `ExpertRows`. Where a caller may give the output, the overload `into` writes it.
"""

from .casts import ops as casts
from .core.operators import DECLARED
from .gemm import ops as gemm
from .linear import ops as linear
from .moe import ops as moe
from .nn import ops as nn

bf16 = gemm
for make in DECLARED:  # of functions beside which their operators stand
    make()

__all__ = ["bf16", "casts", "gemm", "linear", "moe", "nn"]
