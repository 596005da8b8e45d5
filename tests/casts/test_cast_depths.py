"""Casts along groups' rows are compared with casts of each group; casts of SiLU's gradient with FP64 autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import dequantize, some
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_cases import error
from torch import Tensor

from deep_gemm import k_grouped_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.cast_depths import room_of
from deep_gemm.casts.depths import GroupedRows, cast_along_groups, cast_silu_gradient
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.moe.routing import expert_rows
from lab.casts import assert_same_bits

HIDDEN, INTER = 48, 80
OF_CASTS = 0.03
"""Largest error of a cast of normal numbers: 0.026 from FP8, and 0.002 from BF16, which precedes it."""


def grouped(tokens: int, experts: int, seed: int = 0) -> GroupedRows:
    """Draw rows of experts. Some routes have no expert."""
    generator = torch.Generator().manual_seed(seed)
    rows = expert_rows(torch.randint(-1, experts, (tokens, 2), generator=generator), experts)
    return GroupedRows(rows.counts, rows.ends, rows.token_of)


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def back(columns: tuple[Tensor, Tensor], groups: GroupedRows) -> Tensor:
    """Return the FP64 rows of all groups from a cast along groups. Check that padding behind a group's rows is zero."""
    parts, value, block, (values, scales) = [], 0, 0, columns
    k = scales.shape[0]
    for count, depth in zip(groups.counts.tolist(), groups.depths.tolist(), strict=True):
        its = values[value : value + k * depth].view(k, depth), scales[:, block : block + ceil_div(depth, 128)]
        whole = dequantize(*its).t()
        assert not whole[count:].any()
        parts.append(whole[:count])
        value, block = value + k * depth, block + ceil_div(depth, 128)
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_tokens_are_cast_along_the_rows_of_each_group(dtype: torch.dtype, weighted: bool) -> None:
    groups, x = grouped(300, 4), random(300, HIDDEN, dtype=dtype)
    weights = torch.rand(len(groups.token_of), generator=torch.Generator().manual_seed(2)) if weighted else None
    found = cast_along_groups(x, groups, weights)
    starts, depths = [0, *groups.ends.tolist()], groups.depths.tolist()
    parts = []
    for first, end, depth in zip(starts, starts[1:], depths, strict=False):
        part = x[groups.token_of[first:end].long()].float()
        if weights is not None:
            part = part * weights[first:end, None]
            part = part.bfloat16().float() if dtype == torch.bfloat16 else part
        parts.append(F.pad(part, (0, 0, 0, depth - (end - first))))
    assert_same_bits(found, k_grouped_cast_to_fp8(torch.cat(parts).t(), depths, mn_major=True))


def right_gradients(h: Tensor, ds: Tensor, p: Tensor, limit: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the activation, and the gradients of gate and up and of the rows' weights, by autograd in FP64."""
    h, p = h.double().requires_grad_(), p.double().requires_grad_()
    gate, up = h.chunk(2, dim=1)
    if limit is not None:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    s = F.silu(gate) * up
    (s * p[:, None] * ds.double()).sum().backward()  # type: ignore[no-untyped-call]
    assert h.grad is not None and p.grad is not None
    return s.detach(), h.grad, p.grad


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(20, 200),
    experts=st.integers(1, 6),
    i=st.integers(1, 12).map(lambda i: 16 * i),
    limit=st.sampled_from([None, 0.7]),
    seed=st.integers(0, 1 << 16),
)
def test_gradients_are_those_of_autograd(tokens: int, experts: int, i: int, limit: float | None, seed: int) -> None:
    groups = grouped(tokens, experts, seed)
    rows, used = len(groups.token_of), int(groups.ends[-1])
    h, ds = random(rows, 2 * i, seed=seed), random(rows, i, seed=seed + 1)
    p = torch.rand(rows, generator=torch.Generator().manual_seed(seed))
    right_s, right_dh, right_dp = right_gradients(h[:used], ds[:used], p[:used], limit)
    h[used:] = ds[used:] = p[used:] = torch.nan  # these rows are in no group, so they may hold anything
    found = cast_silu_gradient(h, ds, groups, p, limit)
    assert found.rows is not None and found.columns is not None
    assert found.activated is not None and found.of_weights is not None
    assert error(dequantize(*found.rows)[:used], right_dh) < OF_CASTS
    assert error(back(found.columns, groups), right_dh) < OF_CASTS
    assert error(back(found.activated, groups), right_s) < OF_CASTS
    assert error(found.of_weights[0, :used], right_dp) < 1e-5
    alone = cast_silu_gradient(h, None, groups, p, limit, gradient_too=False)
    assert_same_bits(some(alone.activated), found.activated)


def test_wrong_gradients_are_not_within_the_bound() -> None:
    h, ds, p = random(200, 2 * INTER), random(200, INTER), torch.rand(200)
    _, right, of_p = right_gradients(h, ds, p, 0.7)
    _, without_limit, of_p_without = right_gradients(h, ds, p, None)
    others = right_gradients(h, ds, torch.ones(200), 0.7)[1], right.roll(INTER, 1), right * 1.04, without_limit
    assert all(error(other, right) > OF_CASTS for other in others)
    assert error(of_p_without, of_p) > 1e-5


def test_what_is_not_asked_for_is_not_there() -> None:
    groups, h, ds = grouped(20, 3), random(40, 2 * INTER), random(40, INTER)
    p = torch.rand(40)
    gradient = cast_silu_gradient(h, ds, groups, p, activation_too=False)
    assert gradient.activated is None and gradient.of_weights is None and gradient.rows is not None
    activation = cast_silu_gradient(h, ds, groups, p, gradient_too=False)
    assert activation.rows is None and activation.columns is None and activation.of_weights is not None


@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=8), behind=st.integers(0, 40))
def test_there_is_room_for_the_depths_of_any_groups(counts: list[int], behind: int) -> None:
    depth, blocks = room_of(sum(counts) + behind, len(counts))
    assert depth % 16 == 0
    assert depth >= sum(ceil_div(count, 16) * 16 for count in counts)
    assert blocks >= sum(ceil_div(count, 128) for count in counts)


@pytest.mark.parametrize("rows", [1, 2, 17, 130, 300])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_no_room_is_left_over_where_groups_are_as_bad_as_can_be(rows: int, groups: int) -> None:
    some = min(rows, groups)
    counts = [1] * (some - 1) + [rows - some + 1]
    depth, blocks = room_of(rows, groups)
    assert depth - sum(ceil_div(count, 16) * 16 for count in counts) < 16
    assert blocks == sum(ceil_div(count, 128) for count in counts) or rows - some >= 128


def test_rows_are_cast_as_activations_are() -> None:
    groups, h, ds, p = grouped(30, 2), random(60, 2 * INTER), random(60, INTER), torch.ones(60)
    found = cast_silu_gradient(h, ds, groups, p, activation_too=False)
    assert some(found.rows)[1].stride() == per_token_cast_to_fp8(h, mn_major=True)[1].stride()
