"""A router and a mixture of experts with FP8 weights:  python examples/mixture_of_experts.py"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import deep_gemm

TOKENS, NUM_EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 40, 8, 2, 256, 128


class MixtureOfExperts(nn.Module):
    """Each token goes through the `TOPK` experts that the router prefers, and their results are weighted and summed."""

    def __init__(self, router: Tensor, gate_and_up: Tensor, down: Tensor) -> None:
        """`gate_and_up` is `[experts, 2 intermediate, hidden]`, the gate's rows first."""
        super().__init__()
        self.router = router
        self.w1 = deep_gemm.per_block_cast_to_fp8(gate_and_up)
        self.w2 = deep_gemm.per_block_cast_to_fp8(down)

    def forward(self, x: Tensor) -> Tensor:
        """Route, then compute all experts in one call. The host reads nothing of the routes."""
        weights, ids = (x @ self.router.t()).float().softmax(dim=-1).topk(TOPK)
        out = deep_gemm.experts(x, ids, weights, self.w1, self.w2)
        assert out is not None  # it is None only if the caller gives an `out`
        return out


def in_bf16(x: Tensor, router: Tensor, gate_and_up: Tensor, down: Tensor) -> Tensor:
    """Compute the same by torch alone, expert after expert."""
    weights, ids = (x @ router.t()).float().softmax(dim=-1).topk(TOPK)
    out = torch.zeros(x.shape, device=x.device)
    for expert in range(NUM_EXPERTS):
        gate, up = (x @ gate_and_up[expert].t()).chunk(2, dim=-1)
        y = (nn.functional.silu(gate) * up) @ down[expert].t()
        out += y.float() * (weights * (ids == expert)).sum(dim=-1, keepdim=True)
    return out


@torch.no_grad()
def main() -> None:
    """Show how far FP8 is from BF16, and what the layer needs between its parts."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, router, gate_and_up, down = (
        torch.randn(shape, device=device).bfloat16()
        for shape in (
            (TOKENS, HIDDEN),
            (NUM_EXPERTS, HIDDEN),
            (NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN),
            (NUM_EXPERTS, HIDDEN, INTERMEDIATE),
        )
    )
    gate_and_up /= HIDDEN**0.5
    got = MixtureOfExperts(router, gate_and_up, down)(x).float()
    expected = in_bf16(x, router, gate_and_up, down)
    print(f"relative error beside BF16: {(got - expected).norm() / expected.norm():.3f}")
    workspace = deep_gemm.experts_workspace_bytes(TOKENS, TOPK, NUM_EXPERTS, HIDDEN, INTERMEDIATE)
    print(f"workspace: {workspace} bytes")


if __name__ == "__main__":
    main()
