"""Compile a model, converted to FP8, with torch.compile: one graph for any batch:  python examples/compile_layer.py

Prints the error relative to BF16 for three batch sizes, and the number of graphs. It takes 15 seconds, mostly for
torch.compile, and needs a C++ compiler, as torch.compile does. On a Hopper GPU the products run there.
"""

from __future__ import annotations

import copy

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import deep_gemm

HIDDEN, INTERMEDIATE = 256, 512


class Mlp(nn.Module):
    """Two layers, and between them operations that torch.compile fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Compute x + the layers of x."""
        return x + self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


@torch.no_grad()
def main() -> None:
    """Compile once, and run batches of other sizes."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = Mlp().to(device, torch.bfloat16)
    model = copy.deepcopy(plain)
    deep_gemm.convert.to_fp8_inference(model)
    graphs = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for batch in (5, 32, 200):
        x = torch.randn(batch, HIDDEN, device=device, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        right = plain(x).float()
        error = (compiled(x).float() - right).norm() / right.norm()
        print(f"batch {batch}: relative error beside BF16: {error:.3f}")
    print(f"graphs compiled: {graphs.frame_count}")


if __name__ == "__main__":
    main()
