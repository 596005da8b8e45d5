"""A product of a GPU's tensors runs the kernel of its kind, another the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_gpu import on_gpu
from torch import Tensor

import deep_gemm
from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.gemm import depths
from deep_gemm.gemm.api import dense, grouped


def rows(*shape: int) -> Any:
    return per_token_cast_to_fp8(torch.ones(shape))


def blocks(*shape: int) -> Any:
    return per_block_cast_to_fp8(torch.ones(shape))


def slices(rows: int, turned: bool = False) -> Any:
    values, scales = deep_gemm.k_grouped_cast_to_fp8(torch.ones(rows, 32), [16, 16])
    return values, scales.t() if turned else scales


def fp32(*shape: int) -> Tensor:
    return torch.zeros(shape)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


Place = Callable[[Tensor], Tensor]
CALLS: dict[str, tuple[str, Callable[[Place], Any]]] = {
    "dense": ("dense", lambda d: deep_gemm.fp8_gemm_nt(rows(4, 16), blocks(8, 16), d(fp32(4, 8)))),
    "weight gradient": (
        "dense",
        lambda d: deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(rows(4, 16), rows(8, 16), d(fp32(4, 8))),
    ),
    "contiguous groups": (
        "contiguous",
        lambda d: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            rows(4, 16), blocks(2, 8, 16), d(fp32(4, 8)), ints(0, 0, 1, -1)
        ),
    ),
    "masked groups": (
        "masked",
        lambda d: deep_gemm.m_grouped_fp8_gemm_nt_masked(
            rows(2, 4, 16), blocks(2, 8, 16), d(fp32(2, 4, 8)), ints(0, 3), 2
        ),
    ),
    "groups along k": (
        "k_grouped",
        lambda d: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(slices(4), slices(8), d(fp32(2, 4, 8)), ks=[16, 16]),
    ),
    "groups along k, of 2025": (
        "k_grouped",
        lambda d: deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(
            slices(4, turned=True), slices(8, turned=True), d(fp32(2, 4, 8)), [16, 16]
        ),
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_each_product_runs_its_backend(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, call = CALLS[name]
    ran: list[str] = []
    products = {dense.NT: "dense", dense.GRADIENT_NT: "dense", grouped.CONTIGUOUS_NT: "contiguous"}
    products |= {grouped.MASKED: "masked", depths.ALONG_K: "k_grouped", depths.BY_ROW: "k_grouped"}
    for product, product_name in products.items():
        monkeypatch.setattr(product, "on_gpu", lambda p, name=product_name: ran.append(f"kernel {name}"))
        monkeypatch.setattr(product, "reference", lambda p, name=product_name: ran.append(f"reference {name}"))
    call(on_gpu if place == "gpu" else lambda d: d)
    assert ran == [f"{'kernel' if place == 'gpu' else 'reference'} {kind}"]
