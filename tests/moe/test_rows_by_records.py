"""Products at addresses launch what products of tensors launch, for any number of rows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu
from torch import Tensor

from deep_gemm.across import rows_to_addresses
from deep_gemm.casts.gating import Gating
from deep_gemm.casts.rules import empty_scales
from deep_gemm.core.check import checks
from deep_gemm.core.jit import driver
from deep_gemm.core.settings import set_num_sms
from deep_gemm.gemm.api.grouped import product_of_stacked_groups, product_of_stacked_rows
from deep_gemm.gemm.packed import depth_of
from deep_gemm.moe import rows_at
from deep_gemm.moe.activation import activated_product_of_rows
from deep_gemm.moe.rows_at import RowsAt

GROUPS, N, ROWS = 3, 512, (700, 1, 2, 5, 64, 700, 4096)
Fp8 = tuple[Tensor, Tensor]


@pytest.fixture
def gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(checks, "on_host", lambda _: False)
    return gpu


def fp8(m: int, k: int) -> Fp8:
    values = torch.empty(m, k, dtype=torch.float8_e4m3fn)
    return values, empty_scales((m,), k, values, mn_major=True)


def weight(k: int, is_fp4: bool = False) -> Fp8:
    if is_fp4:
        return torch.empty(GROUPS, N, k // 2, dtype=torch.uint8), torch.empty(GROUPS, N, k // 32, dtype=torch.uint8)
    return torch.empty(GROUPS, N, k, dtype=torch.float8_e4m3fn), torch.empty(GROUPS, N // 128, -(-k // 128))


def stacked(m: int, w: Fp8) -> tuple[Callable[[], object], tuple[int, ...]]:
    a, d, ids = fp8(m, depth_of(w)), torch.empty(m, N, dtype=torch.bfloat16), torch.zeros(m, dtype=torch.int32)
    return lambda: product_of_stacked_rows(a, w, d, ids), at(*a, *w, d, ids)


def by_ends(m: int, w: Fp8) -> tuple[Callable[[], object], tuple[int, ...]]:
    a, d, ends = fp8(m, depth_of(w)), torch.empty(m, N, dtype=torch.bfloat16), torch.zeros(GROUPS, dtype=torch.int32)
    return lambda: product_of_stacked_groups(a, w, d, ends), at(*a, *w, d, ends)


def activated(m: int, w: Fp8) -> tuple[Callable[[], object], tuple[int, ...]]:
    a, d, ends = fp8(m, depth_of(w)), fp8(m, N // 2), torch.zeros(GROUPS, dtype=torch.int32)
    by_tensors = lambda: activated_product_of_rows(a, w, d, ends, limit=2.0, gates_apart=True)  # noqa: E731
    return by_tensors, (*at(*a, *w, d[0], ends), 0, d[1].data_ptr())


def to_addresses(m: int, w: Fp8) -> tuple[Callable[[], object], tuple[int, ...]]:
    a, addresses, ends = fp8(m, depth_of(w)), torch.zeros(m, dtype=torch.int64), torch.zeros(GROUPS, dtype=torch.int32)
    return lambda: rows_to_addresses.run(a, w, ends, addresses), at(*a, *w, addresses, ends)


def made_for(call: Any, w: Fp8) -> RowsAt:
    if call is activated:
        return rows_at.activated(w, 2.0)
    return rows_to_addresses.at_addresses(w) if call is to_addresses else rows_at.product(w, by_ends=call is by_ends)


def at(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in tensors)


@pytest.mark.parametrize("knows_maps", [True, False])
@pytest.mark.parametrize("k", [16, 144, 512])
@pytest.mark.parametrize("call", [stacked, by_ends, activated, to_addresses])
def test_launches_are_those_of_tensors(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, call: Any, k: int, knows_maps: bool
) -> None:
    monkeypatch.setattr(driver, "sizes_are_numbers", lambda: knows_maps)
    check_launches(gpu, call, weight(k), weight(k))


@pytest.mark.parametrize("k", [128, 384])
@pytest.mark.parametrize("call", [stacked, by_ends, to_addresses])
def test_launches_with_fp4_weights_are_those_of_tensors(gpu: FakeGpu, call: Any, k: int) -> None:
    check_launches(gpu, call, weight(k, is_fp4=True), weight(k, is_fp4=True))


def check_launches(gpu: FakeGpu, call: Any, like: Fp8, w: Fp8) -> None:
    """Launches that were made with a weight are, for another weight, those of a call by tensors."""
    made, k = made_for(call, like), depth_of(w)
    for m in ROWS:
        by_tensors, addresses = call(m, w)
        by_tensors()
        made.launch(m, w, addresses[:2], addresses[4:])
        right, got = gpu.launches[-2:]
        plan = made.plan(m, w)
        names = plan.params.word
        of_sfa = {names("map_sfa") + 1, names("map_sfa") + 2} if "map_sfa" in plan.maps else {names("sfa_stride_m")}
        pitches = of_sfa if k <= 128 or m == 1 else set()
        if m == 1:
            pitches |= {names(name) + word for name in plan.maps for word in (1, 2, 3)} | {names("d_pitch")}
        assert (got.kernel, got.grid) == (right.kernel, right.grid)
        differ = {i for i, (x, y) in enumerate(zip(got.words, right.words, strict=True)) if x != y}
        assert differ <= pitches, "but what a single row or block has no use for"
    assert len(made._plans) == len(set(ROWS))


def test_what_is_prepared_keeps_no_tensor(gpu: FakeGpu) -> None:
    """It may be prepared while torch captures a graph, whose pool must not lose memory."""
    gc.collect()
    before = set(map(id, tensors()))
    kept: list[object] = []
    w, x = weight(512), torch.empty(0, 512, dtype=torch.bfloat16)
    for made in (rows_at.product(w), rows_at.activated(w, 2.0), rows_to_addresses.at_addresses(w)):
        made.plan(700, w)
        kept.append(made)
    casts = rows_at.gathered(x, 3), rows_at.activation(256, GROUPS, Gating(), x.device)
    for cast, operands in zip(casts, (5, 6), strict=True):
        cast.launch(700, *range(operands))
    del w, x
    gc.collect()
    assert not [each.shape for each in tensors() if id(each) not in before]


def tensors() -> list[Tensor]:
    return [each for each in gc.get_objects() if type(each) is Tensor]


def test_plans_are_for_the_settings_in_force_and_not_too_many(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_at, "MAX_PLANS", 3)
    w, m = weight(512), 5000
    made = rows_at.product(w)
    all_sms = made.plan(m, w)
    assert made.plan(m, w) is all_sms
    for few in (1, 2, 3):
        made.plan(few, w)
    assert len(made._plans) == 3 and m not in made._plans
    set_num_sms(16)
    assert made.plan(m, w).grid == 16 < all_sms.grid
