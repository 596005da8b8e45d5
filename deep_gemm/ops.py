"""Every product, cast and layer as an operator of `torch.ops.deep_gemm`: for torch.compile, torch.export, fake tensors.

Programs call the public functions. If torch must see an operator (core/check/tracing.py), a function passes its call to
the operator, which calls the function when it runs. An operator has single tensors as arguments: values and scales of
an operand, members of `ExpertRows`. If a caller may pass the output, the overload `into` writes the caller's output.
"""

from .casts import ops as casts
from .core.operators import DECLARED
from .gemm import ops as gemm
from .linear import ops as linear
from .moe import ops as moe
from .nn import ops as nn

bf16 = gemm
for make in DECLARED:  # operators that are declared beside their functions
    make()

__all__ = ["bf16", "casts", "gemm", "linear", "moe", "nn"]
