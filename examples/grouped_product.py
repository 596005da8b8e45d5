"""Rows of several experts in one product, without padding:  python examples/grouped_product.py

Rows of different experts lie one behind the other, and a tensor says to which expert each row belongs. The host does
not read it, so on a GPU nothing waits for it, and a CUDA graph is replayed with other groups.
"""

from __future__ import annotations

import torch

import deep_gemm

ROWS_OF_EXPERT = (3, 0, 130, 67)
N, K = 256, 512


def main() -> None:
    """Compare each expert's rows with a product of their own."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_experts, m = len(ROWS_OF_EXPERT), sum(ROWS_OF_EXPERT)
    x = torch.randn(m, K, device=device, dtype=torch.bfloat16)
    w = torch.randn(num_experts, N, K, device=device, dtype=torch.bfloat16)
    counts = torch.tensor(ROWS_OF_EXPERT, device=device)
    ids = torch.arange(num_experts, device=device, dtype=torch.int32).repeat_interleave(counts)

    a = deep_gemm.per_token_cast_to_fp8(x, mn_major=True)  # scales lie as the product loads them
    b = deep_gemm.per_block_cast_to_fp8(w)
    d = torch.empty(m, N, device=device, dtype=torch.bfloat16)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, ids)

    first = 0
    for expert, rows in enumerate(ROWS_OF_EXPERT):
        mine = slice(first, first + rows)
        difference = deep_gemm.calc_diff(d[mine], x[mine].float() @ w[expert].float().t())
        print(f"expert {expert}: {rows:3} rows, difference {difference:.1e}")
        first += rows


if __name__ == "__main__":
    main()
