"""Operands in the layouts of engines' calls, and checks of the calls' results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import deep_gemm
from deep_gemm import cast_back_from_fp4, cast_back_from_fp8, get_mn_major_tma_aligned_tensor
from deep_gemm.indexer.check import Logits, PagedLogits

from ..sim import logits as sim
from ..sim.hc_prenorm import random_operands

Drawn = dict[str, Any]
WRITTEN = "d", "d_fp32", "squares", "y"
"""Operands that calls write. They are filled with NaN before each call."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Draw normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def near(got: Tensor, x: Tensor, y: Tensor) -> bool:
    """Tell whether `got` is x @ y.T within the rounding of BF16 and of sums in FP32."""
    x, y = x.double(), y.double()
    right, size = x @ y.mT, x.abs() @ y.abs().mT
    return bool(((got.double() - right).abs() <= right.abs() * 2.0**-8 + size * 2.0**-18).all())


def near_rows(got: Tensor, x: Tensor, y: Tensor, ids: Tensor) -> bool:
    """Tell whether each row is `near` x times the group's weight. A row without a group is zero, or unchanged."""
    owned = [ids == group for group in range(len(y))]
    return all(near(got[of], x[of], w) for of, w in zip(owned, y, strict=True))


def near_counted(got: Tensor, x: Tensor, y: Tensor, counts: Tensor) -> bool:
    """Tell whether the first rows of each group, by its count, are `near` x times the group's weight."""
    return all(near(got[g, :count], x[g, :count], y[g]) for g, count in enumerate(counts.tolist()))


def right_logits(p: Logits, got: Tensor) -> bool:
    """Tell whether a token's logits of its own keys are right. All other logits are undefined."""
    columns = torch.arange(got.shape[1])
    try:
        if isinstance(p, PagedLogits):
            sim.compare(p, got.where(columns < p.contexts.view(-1, 1), torch.nan))
        else:
            first = torch.zeros_like(p.starts) if p.is_compressed else p.starts
            has = (columns >= first[:, None]) & (columns < (first + p.ends - p.starts)[:, None])
            sim.compare(p, got.where(has, torch.nan))
    except ValueError:
        return False
    return True


def right_prenorm(d: Tensor, squares: Tensor, a: Tensor, b: Tensor) -> bool:
    """Tell whether partial sums add up to the TF32 product, and to the rows' sums of squares."""
    pairs = (d.sum(0), a.float() @ b.t(), 1e-6), (squares.sum(0), a.float().square().sum(1), 1e-10)
    return all(bool(deep_gemm.calc_diff(got, right) < most) for got, right, most in pairs)


def operands(rows: tuple[int, ...], columns: tuple[int, ...]) -> Drawn:
    """Draw A and B with 256 columns: FP8 with scales for 128 and for 32, BF16, B in FP4; and their exact numbers."""
    of_a, of_b = numbers(*rows, 256), numbers(*columns, 256, seed=1)
    a, sfa = deep_gemm.per_token_cast_to_fp8(of_a)
    b, sfb = deep_gemm.per_block_cast_to_fp8(of_b)
    a32, b32 = numbers(*rows, 8).exp(), numbers(*columns[:-1], columns[-1] // 32, 8).exp()
    row32 = numbers(*columns, 8).round().exp2()
    fp4, fp4_sf = deep_gemm.quantize_mxfp4(of_b)
    d = torch.full((*rows, columns[-1]), torch.nan, dtype=torch.float32)
    return {
        "a": a,
        "sfa": get_mn_major_tma_aligned_tensor(sfa),
        "b": b,
        "sfb": sfb,
        "x": cast_back_from_fp8(a, sfa),
        "w": cast_back_from_fp8(b, sfb),
        "a32": a32,
        "b32": b32,
        "row32": row32,
        "x_32": cast_back_from_fp8(a, a32, 32),
        "w_32": cast_back_from_fp8(b, b32, 32),
        "w_row32": cast_back_from_fp8(b, row32, 32),
        "fp4": fp4,
        "fp4_fp32": fp4_sf.view(torch.float8_e8m0fnu).float(),
        "w_fp4": cast_back_from_fp4(fp4, fp4_sf, 32),
        "bf16": of_a.bfloat16(),
        "w_bf16": of_b.bfloat16(),
        "d": d.bfloat16(),
        "d_fp32": d,
    }


def dense() -> Drawn:
    """Draw one product."""
    return operands((9,), (160,))


def stacked() -> Drawn:
    """Draw rows of three groups, each padded to 128, the second empty."""
    ids = torch.tensor([0] * 130 + [-1] * 126 + [2] * 5 + [-1] * 123, dtype=torch.int32)
    return {**operands((len(ids),), (3, 160)), "ids": ids, "ends": torch.tensor([130, 256, 261], dtype=torch.int32)}


def counted() -> Drawn:
    """Draw a separate matrix of rows for each group."""
    return {**operands((3, 24), (3, 160)), "counts": torch.tensor([24, 0, 7], dtype=torch.int32)}


def of_heads() -> Drawn:
    """Draw tokens of two heads, with scales in the layout of a fused cast."""
    return operands((5, 2), (2, 160))


def many_logits() -> Drawn:
    """Draw queries of many tokens, and keys in one contiguous matrix."""
    free = sim.problem((6, 70, 32, 64), sim.causal(6, 70))
    narrow = free._replace(is_compressed=True, logits=torch.full((6, 70), torch.nan, dtype=torch.float32))
    return {**free._asdict(), "kv": (free.keys, free.scales), "free": free, "narrow": narrow}


def paged_logits() -> Drawn:
    """Draw queries of one token and of four for each sequence, and keys in pages."""
    one = sim.paged_problem([[300], [0], [65]], 1, 64, 128, columns=320, shares=132)
    four = sim.paged_problem([[300, 301, 302, 303], [0] * 4], 4, 64, 128, columns=320, shares=66)
    return {**one._asdict(), "one": one, "four": four}


def prenorm() -> Drawn:
    """Draw the operands of the product that precedes a norm of hyper-connections."""
    a, b = random_operands(5, 24, 1024)
    return {
        "a": a,
        "b": b,
        "d": torch.full((4, 5, 24), torch.nan, dtype=torch.float32),
        "squares": torch.full((4, 5), torch.nan, dtype=torch.float32),
    }


def mixture() -> Drawn:
    """Draw tokens and experts of a single rank; in the first weight, 8 rows of gate and 8 of up alternate."""
    w1, w2 = numbers(4, 512, 512) / 16, numbers(4, 512, 256, seed=1) / 16
    (b1, s1), (b2, s2) = (deep_gemm.per_block_cast_to_fp8(w) for w in (w1, w2))
    gate, up = b1.view(torch.uint8).view(4, 2, 32, 8, 512).unbind(1)
    x, ids = numbers(3, 512, seed=2).bfloat16(), torch.tensor([[0, 3], [2, -1], [3, 0]], dtype=torch.int32)
    p = numbers(3, 2, seed=3).abs()
    right = torch.zeros(3, 512, dtype=torch.float32)
    for token, k in (ids >= 0).nonzero().tolist():
        of_gate, of_up = (cast_back_from_fp8(b1, s1)[ids[token, k]] @ x[token].float()).chunk(2)
        middle = torch.nn.functional.silu(of_gate) * of_up * p[token, k] * 2.5
        right[token] += cast_back_from_fp8(b2, s2)[ids[token, k]] @ middle
    return {
        "x": x,
        "ids": ids,
        "p": p,
        "l1": (torch.stack([gate, up], 2).flatten(1, 3).view(b1.dtype), s1),
        "l2": (b2, s2),
        "y": torch.full((3, 512), torch.nan, dtype=torch.bfloat16),
        "mixed": right,
    }


def nothing() -> Drawn:
    """Draw a few tensors for scales and settings."""
    return {"x": numbers(256, 256), "sf": numbers(4, 6).round().exp2(), "sf_rows": numbers(2, 160, 8).round().exp2()}
