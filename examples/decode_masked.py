"""Decode with experts in fixed buffers, with one CUDA graph for all routes:  python examples/decode_masked.py

Prints the rows of each expert and the error relative to BF16, for three batches, in 3 seconds on a CPU. A CPU has no
graphs and calls the step each time; a Hopper GPU compiles kernels first.

A dispatch writes each expert's rows to the front of that expert's buffer, and counts them on the GPU. The host does
not read the counts, so one graph serves all batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import deep_gemm

EXPERTS, MOST_ROWS, HIDDEN, INTERMEDIATE = 4, 32, 512, 256
BATCHES = ([3, 0, 17, 1], [0, 32, 2, 2], [8, 8, 8, 8])


class Decode:
    """Two products of experts and the activation between them, with all tensors allocated once."""

    def __init__(self, w1: Tensor, w2: Tensor) -> None:
        self.w1, self.w2 = deep_gemm.per_block_cast_to_fp8(w1), deep_gemm.per_block_cast_to_fp8(w2)
        like: dict[str, Any] = {"device": w1.device, "dtype": torch.bfloat16}
        self.x = torch.zeros(EXPERTS, MOST_ROWS, HIDDEN, **like)
        self.gate_and_up = torch.zeros(EXPERTS, MOST_ROWS, 2 * INTERMEDIATE, **like)
        self.out = torch.zeros(EXPERTS, MOST_ROWS, HIDDEN, **like)
        self.counts = torch.zeros(EXPERTS, dtype=torch.int32, device=w1.device)

    def step(self) -> None:
        """Compute the first `counts` rows of each expert; the other rows stay unchanged."""
        expected = 8  # about the rows of an expert: a hint for choosing a tile
        a = deep_gemm.per_token_cast_to_fp8(self.x, mn_major=True)
        deep_gemm.m_grouped_fp8_gemm_nt_masked(a, self.w1, self.gate_and_up, self.counts, expected)
        y = deep_gemm.silu_mul_cast_to_fp8(self.gate_and_up, masked_m=self.counts, mn_major=True)
        deep_gemm.m_grouped_fp8_gemm_nt_masked(y, self.w2, self.out, self.counts, expected)


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step, after one run that compiles its kernels."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def main() -> None:
    """Replay one step for several batches, and compare each with BF16."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    w1 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, device=device, dtype=torch.float32).bfloat16() / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, device=device, dtype=torch.float32).bfloat16() / INTERMEDIATE**0.5
    decode = Decode(w1, w2)
    run = captured(decode.step) if device == "cuda" else decode.step
    for rows in BATCHES:
        decode.counts.copy_(torch.tensor(rows, dtype=torch.int64))
        decode.x.normal_()
        run()
        gate, up = (decode.x @ w1.mT).chunk(2, dim=-1)
        right = (F.silu(gate) * up @ w2.mT).float()
        used = torch.arange(MOST_ROWS, device=device) < decode.counts[:, None]
        error = (decode.out.float() - right)[used].norm() / right[used].norm()
        print(f"rows of experts {rows}: relative error beside BF16: {error:.3f}")


if __name__ == "__main__":
    main()
