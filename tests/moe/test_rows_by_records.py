"""Products of rows of groups make the same launches with a record as without one, for any number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from addressed_kernels import Seen, watched
from fake_gpu import FakeGpu
from torch import Tensor

from deep_gemm.across import rows_to_addresses
from deep_gemm.casts.rules import empty_scales
from deep_gemm.core.check import checks
from deep_gemm.core.settings import set_num_sms
from deep_gemm.gemm.api.grouped import product_of_stacked_groups, product_of_stacked_rows
from deep_gemm.gemm.packed import is_packed
from deep_gemm.moe.activation import activated_product_of_rows

GROUPS, N, ROWS = 3, 512, (700, 1, 2, 5, 64, 699, 4096, 4097)
Fp8 = tuple[Tensor, Tensor]


@pytest.fixture
def seen(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Seen:
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(checks, "on_host", lambda _: False)
    return watched(monkeypatch, gpu)


def fp8(m: int, k: int) -> Fp8:
    values = torch.empty(m, k, dtype=torch.float8_e4m3fn)
    return values, empty_scales((m,), k, values, mn_major=True)


def weight(k: int, is_fp4: bool = False) -> Fp8:
    if is_fp4:
        return torch.empty(GROUPS, N, k // 2, dtype=torch.uint8), torch.empty(GROUPS, N, k // 32, dtype=torch.uint8)
    return torch.empty(GROUPS, N, k, dtype=torch.float8_e4m3fn), torch.empty(GROUPS, N // 128, -(-k // 128))


def depth_of(w: Fp8) -> int:
    return w[0].shape[-1] * (2 if is_packed(w) else 1)


def stacked(m: int, w: Fp8) -> Callable[[], object]:
    a, d, ids = fp8(m, depth_of(w)), torch.empty(m, N, dtype=torch.bfloat16), torch.zeros(m, dtype=torch.int32)
    return lambda: product_of_stacked_rows(a, w, d, ids)


def by_ends(m: int, w: Fp8) -> Callable[[], object]:
    a, d, ends = fp8(m, depth_of(w)), torch.empty(m, N, dtype=torch.bfloat16), torch.zeros(GROUPS, dtype=torch.int32)
    return lambda: product_of_stacked_groups(a, w, d, ends)


def activated(m: int, w: Fp8) -> Callable[[], object]:
    a, d, ends = fp8(m, depth_of(w)), fp8(m, N // 2), torch.zeros(GROUPS, dtype=torch.int32)
    return lambda: activated_product_of_rows(a, w, d, ends, limit=2.0, gates_apart=True)


def to_addresses(m: int, w: Fp8) -> Callable[[], object]:
    a, addresses, ends = fp8(m, depth_of(w)), torch.zeros(m, dtype=torch.int64), torch.zeros(GROUPS, dtype=torch.int32)
    return lambda: rows_to_addresses.run(a, w, ends, addresses)


@pytest.mark.parametrize(
    ("product", "k", "is_fp4"),
    [
        *((of, k, False) for of in (stacked, by_ends, activated, to_addresses) for k in (16, 144, 512)),
        *((of, k, True) for of in (stacked, by_ends, to_addresses) for k in (128, 384)),
    ],
)
def test_launches_are_those_of_the_call_itself(seen: Seen, product: Any, k: int, is_fp4: bool) -> None:
    product(700, weight(k, is_fp4))()
    for m in ROWS:
        ((_, _, grid, *_),) = seen.by_record_as_without(product(m, weight(k, is_fp4)), "words")
    assert None not in seen.made and len(seen.made) < len(ROWS)
    set_num_sms(16)
    product(4096, weight(k, is_fp4))()
    assert seen.gpu.last.grid <= 16 < grid
