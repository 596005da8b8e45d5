"""The two products of an expert with FP8 between them, on the CPU, compared with a plain loop over experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_within, random_fp8, random_scales, some
from layer_cases import assert_mistake
from torch import Tensor

from deep_gemm.casts.fp8 import cast_back_from_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.rules import empty_scales
from deep_gemm.gemm.api.grouped import product_of_rows_by_64
from deep_gemm.gemm.ask.silu import SILU_COLUMNS
from deep_gemm.gemm.reference import block_scaled_product
from deep_gemm.moe.activation import activated_product_of_rows, silu_mul
from lab.silu import right
from lab.sim import rows_silu as sim

CANARY = 42.0
SIZES = [7, 0, 5, 1]
ENDS = torch.tensor(SIZES).cumsum(0).int()
IDS = [*[0] * 7, *[2] * 5, 3, *[-1] * 4]


def interleaved(w: Tensor) -> Tensor:
    """Reorder rows `[groups, 2 i, k]`: first all of gate, then all of up, become 8 rows of gate and 8 of up in turn."""
    groups, n, k = w.shape
    gate, up = w.view(groups, 2, n // 16, 8, k).unbind(1)
    return torch.stack((gate, up), 2).reshape(groups, n, k)


def dequantized(w: tuple[Tensor, Tensor]) -> Tensor:
    """Multiply values by the scales of their 128x128 blocks, in FP64."""
    values, scales = w
    return values.double() * scales.double().repeat_interleave(128, -2).repeat_interleave(128, -1)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_an_expert_is_the_plain_chain(limit: float | None) -> None:
    torch.manual_seed(1)
    hidden, middle, groups = 256, 384, 4
    x = per_token_cast_to_fp8(torch.randn(len(IDS), hidden))
    w1 = per_block_cast_to_fp8(torch.randn(groups, 2 * middle, hidden) / 8)
    w2 = per_block_cast_to_fp8(torch.randn(groups, hidden, middle) / 8)
    weights, ids = torch.rand(len(IDS)), torch.tensor(IDS, dtype=torch.int32)
    weights[ids < 0] = torch.nan
    values = torch.zeros(len(IDS), middle).to(torch.float8_e4m3fn)
    scales = empty_scales((len(IDS),), middle, values, mn_major=True, gran_k=SILU_COLUMNS)
    y = torch.full((len(IDS), hidden), CANARY, dtype=torch.bfloat16)
    activated_product_of_rows(x, (interleaved(w1[0]), w1[1]), (values, scales), ENDS, weights, limit=limit)
    product_of_rows_by_64((values, scales), w2, y, ids)

    rows, first, second = cast_back_from_fp8(*x).double(), dequantized(w1), dequantized(w2)
    for row, group in enumerate(IDS):
        if group < 0:
            assert (y[row] == CANARY).all()
            continue
        gate, up = (first[group] @ rows[row]).chunk(2)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        exact = gate * gate.sigmoid() * up * weights[row]
        blocks = exact.view(-1, SILU_COLUMNS)
        amax = blocks.abs().amax(1)
        torch.testing.assert_close(scales[row].double(), amax / 448, rtol=1e-5, atol=0)
        back = values[row].double().view_as(blocks) * scales[row, :, None].double()
        # Half a step of E4M3 is 2^-4 of a number, or of the smallest normal number, 2^-6.
        step = torch.maximum(blocks.abs() * 2.0**-4, amax[:, None] / 448 * 2.0**-10)
        assert ((back - blocks).abs() <= step * 1.001 + amax[:, None] * 1e-6).all()
        of_values = second[group] @ back.flatten()
        torch.testing.assert_close(y[row].double(), of_values, rtol=2.0**-8, atol=1e-5)


def test_rows_are_cast_by_the_rules_of_casts_to_the_bit() -> None:
    p = sim.random_problem(SIZES, 512, 256, 2, behind=4, limit=1.5)
    values, scales = right(p)
    gates_first = p.b.view(torch.uint8).view(4, 32, 2, 8, 256).transpose(1, 2).reshape(4, 512, 256)
    b = gates_first.view(torch.float8_e4m3fn)
    for row, group in enumerate(IDS):
        if group < 0:
            assert (values[row].view(torch.uint8) == sim.POISON).all()
            assert (scales[row] == sim.CANARY).all()
            continue
        product = block_scaled_product(p.a[row, None], p.sfa[row, None], b[group], p.sfb[group])
        cast = per_token_cast_to_fp8(silu_mul(product, 1.5) * some(p.row_weights)[row], gran_k=64)
        assert torch.equal(values[row].view(torch.uint8), cast[0][0].view(torch.uint8))
        assert torch.equal(scales[row], cast[1][0])


@pytest.mark.parametrize("k", [64, 192, 384])
def test_a_has_a_scale_for_64_columns(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    a, b = random_fp8((5, k), generator), random_fp8((2, 136, k), generator)
    sfa, sfb = random_scales((5, k // 64), generator), random_scales((2, 2, -(-k // 128)), generator)
    ids, d = torch.tensor([0, 1, -1, 1, 0], dtype=torch.int32), torch.full((5, 136), CANARY)
    product_of_rows_by_64((a, sfa), (b, sfb), d, ids)
    by_columns = a.double() * sfa.double().repeat_interleave(64, 1)
    for row, group in enumerate(ids.tolist()):
        if group < 0:
            assert (d[row] == CANARY).all()
            continue
        w = b[group].double() * sfb[group].double().repeat_interleave(128, 0)[:136].repeat_interleave(128, 1)[:, :k]
        terms = (by_columns[row] * w).abs().sum(1)
        assert_within(d[row], w @ by_columns[row], terms * (2 * k // 64 + 2) * 2.0**-24)


def arguments(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a correct call of `activated_product_of_rows`, with these changes."""
    p = sim.random_problem([1, 1], 256, 128, behind=1)
    call = {"a": (p.a, p.sfa), "b": (p.b, p.sfb), "d": (p.d, p.scales), "ends": p.c, "row_weights": p.row_weights}
    return {**call, **changes}


FP8 = torch.float8_e4m3fn
OF_128_ROWS = torch.zeros(2, 128, 128).to(FP8), torch.ones(2, 1, 1)
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"a": torch.ones(3)}, "TypeError: a: expected a pair (values, scales), got Tensor"),
    ({"ends": torch.zeros(4, dtype=torch.int32)}, "ends: expected shape (groups,) = (2,), got (4,)"),
    ({"ends": torch.tensor([0, 4], dtype=torch.int32)}, "ends: expected values in 0..3, got 4 at index 1"),
    ({"ends": torch.tensor([2, 1], dtype=torch.int32)}, "ends: expected an end of 2 or from 2"),
    ({"row_weights": torch.ones(2)}, "row_weights: expected shape (m) = (3), got (2,)"),
    ({"row_weights": torch.ones(3).half()}, "row_weights: expected dtype torch.float32, got torch.float16"),
    ({"limit": 0.0}, "limit: expected a number above 0, got 0.0"),
    ({"b": OF_128_ROWS}, "b: expected a multiple of 256 rows, gate and up, got n = 128"),
    ({"d": (torch.zeros(3, 64).to(FP8), torch.ones(3, 1))}, "d: expected shape (m, n / 2) = (3, 128), got (3, 64)"),
    (
        {"d": (torch.zeros(3, 128).to(FP8), torch.ones(3, 2))},
        "sfd: expected m-major scales, as products load them, got strides (2, 1)",
    ),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_a_mistake_is_refused_in_words(changes: dict[str, Any], message: str) -> None:
    assert_mistake(activated_product_of_rows, arguments(**changes), message)


def test_outputs_that_overlap_are_refused() -> None:
    call = arguments()
    a, sfa = call["a"]
    call["a"] = call["d"][0], sfa
    with pytest.raises(ValueError, match="d: expected memory that does not overlap a"):
        activated_product_of_rows(**call)
    assert a.shape == (3, 128)
