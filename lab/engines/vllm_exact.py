"""Functions that vLLM calls on Hopper for linear layers and experts, in FP32 from dequantized operands.

Results are compared with it. It waits for the GPU, and loops over experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

torch.backends.cuda.matmul.allow_tf32 = False
_alignment = [128]
Operand = tuple[Tensor, Tensor]


def get_mk_alignment_for_contiguous_layout() -> int:
    """Return the number whose multiple of rows each expert gets."""
    return _alignment[0]


def set_mk_alignment_for_contiguous_layout(value: int) -> None:
    """Set that number."""
    _alignment[0] = value


def get_theoretical_mk_alignment_for_contiguous_layout(*_: Any) -> int:
    """Return what any problem may have."""
    return 128


def transform_sf_into_required_layout(sf: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return scales as they are."""
    return sf


get_mn_major_tma_aligned_tensor = transform_sf_into_required_layout


def fp8_gemm_nt(a: Operand, b: Operand, d: Tensor, **_: Any) -> None:
    """Compute D = A @ B.T."""
    d.copy_(_dequantized(*a, rows=1) @ _dequantized(*b, rows=128).T)


def m_grouped_fp8_gemm_nt_contiguous(a: Operand, b: Operand, d: Tensor, m_indices: Tensor, **_: Any) -> None:
    """Multiply each row by the expert that `m_indices` names; -1 is none."""
    for expert in range(len(b[0])):
        rows = (m_indices == expert).nonzero().squeeze(1)
        out = torch.empty_like(d[rows])
        fp8_gemm_nt((a[0][rows], a[1][rows]), (b[0][expert], b[1][expert]), out)
        d[rows] = out


def _dequantized(values: Tensor, scales: Tensor, rows: int) -> Tensor:
    of_rows = scales.float().repeat_interleave(rows, 0)[: values.shape[0]]
    return values.float() * of_rows.repeat_interleave(128, 1)[:, : values.shape[1]]
