"""A training step of torchao's experts in FP8: torchao finds the package by itself and calls its grouped products."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from deep_gemm import calc_diff

pytestmark = pytest.mark.gpu
pytest.importorskip("torchao", minversion="0.18")

GROUPS, HIDDEN, INTERMEDIATE = 4, 512, 256
CASTS = 5e-3
"""A limit of calc_diff: half the squared relative error. Six casts to FP8 change a gradient by 6.3%; 10% may occur."""


def module(name: str) -> Any:
    return import_module(f"torchao.prototype.{name}")


def step(x: Tensor, w1: Tensor, w2: Tensor, ends: Tensor, product: Any) -> list[Tensor]:
    """Return the result of two products by experts with SiLU between them, and the gradients of all operands."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, w1, w2)]
    x, w1, w2 = leaves
    gate, up = product(x, w1.transpose(-2, -1), ends).chunk(2, dim=-1)
    y = product(torch.nn.functional.silu(gate) * up, w2.transpose(-2, -1), ends)
    y.square().sum().backward()
    return [y.detach(), *(t.grad for t in leaves if t.grad is not None)]


@pytest.mark.parametrize("sizes", [(128, 256, 384, 128), (100, 0, 37, 300)])
def test_a_training_step_runs_on_our_products(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    backend = module("blockwise_fp8_training.deepgemm_grouped_kernels")
    in_fp8 = module("moe_training.blockwise_fp8.grouped_mm")._to_fp8_blockwise_then_scaled_grouped_mm
    backend._clear_deepgemm_capability_cache()
    import deep_gemm

    calls = []

    def counted(name: str) -> None:
        compute = getattr(deep_gemm, name)

        def call(*args: Any, **said: Any) -> Any:
            calls.append(name)
            return compute(*args, **said)

        monkeypatch.setattr(deep_gemm, name, call)

    counted("m_grouped_fp8_gemm_nt_contiguous")
    counted("k_grouped_fp8_gemm_nt_contiguous")
    x = torch.randn(sum(sizes), HIDDEN, device="cuda", dtype=torch.bfloat16)
    w1 = torch.randn(GROUPS, 2 * INTERMEDIATE, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
    w2 = torch.randn(GROUPS, HIDDEN, INTERMEDIATE, device="cuda", dtype=torch.bfloat16) / INTERMEDIATE**0.5
    ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    got = step(x, w1, w2, ends, in_fp8)
    backend._clear_deepgemm_capability_cache()
    expected = step(x, w1, w2, ends, lambda a, b, offs: torch._grouped_mm(a, b, offs=offs))
    for p, q in zip(got, expected, strict=True):
        assert calc_diff(p, q) < CASTS
    assert calls.count("m_grouped_fp8_gemm_nt_contiguous") == 4
    assert calls.count("k_grouped_fp8_gemm_nt_contiguous") == 2
