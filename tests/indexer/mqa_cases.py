"""Problems of the indexer's logits for many tokens, and what is wrong with logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deep_gemm.indexer.check import MqaLogits, mqa_logits_problem
from deep_gemm.indexer.reference import weighted_scores

Ranges = tuple[Sequence[int], Sequence[int]]
ROUNDINGS = 2.0**-24
SCORES = 1 << 26
BITS_OF_PRODUCTS = 2.0**-8
"""Of the sum of all addends without their signs: a step of 32 of them cuts 33 off 13 bits below the largest of these.

Normal numbers of depth 32, 64 and 128 add up to 2, 4 and 7 times their largest product: 33 * 2^-13 / 2 < 2^-8.
"""


def causal(tokens: int, keys: int) -> Ranges:
    """Each token sees the keys up to its own, which is one of the last."""
    return [0] * tokens, [keys - tokens + 1 + i for i in range(tokens)]


def anywhere(tokens: int, keys: int, seed: int = 0) -> Ranges:
    """Empty, crossed, beyond the keys on both sides, and all else."""
    g = torch.Generator().manual_seed(seed)
    starts, ends = torch.randint(-keys // 4 - 2, keys + keys // 4 + 2, (2, tokens), generator=g).tolist()
    return starts, ends


def packed(tokens: int, keys: int) -> Ranges:
    """Two sequences behind each other: ranges jump in the middle of a tile."""
    half, middle = tokens // 2, keys // 3
    starts = [0] * half + [middle] * (tokens - half)
    ends = [min(i + 1, middle) for i in range(half)] + [min(middle + i + 1, keys) for i in range(tokens - half)]
    return starts, ends


def problem(
    shape: tuple[int, int, int, int],
    ranges: Ranges,
    *,
    clean: bool = False,
    columns: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> MqaLogits:
    """Random operands of [tokens, keys, heads, depth]; `columns` of compressed rows."""
    tokens, keys, heads, depth = shape
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(*size, generator=g).to(torch.float8_e4m3fn) for size in ((tokens, heads, depth), (keys, depth)))
    scales, weights = torch.rand(keys, generator=g) + 0.5, torch.randn(tokens, heads, generator=g)
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in ranges)
    q, k, scales, weights, starts, ends = (x.to(device) for x in (q, k, scales, weights, starts, ends))
    return mqa_logits_problem(q, (k, scales), weights, starts, ends, clean, columns, dtype)


def unsigned(p: MqaLogits) -> MqaLogits:
    """The problem without the signs of queries and keys."""
    q, keys = ((x.view(torch.uint8) & 0x7F).view(torch.float8_e4m3fn) for x in (p.q, p.keys))
    return p._replace(q=q, keys=keys)


def in_parts(p: MqaLogits, weights: Tensor) -> Tensor:
    """All logits in FP64, of a part of the tokens at a time."""
    keys, scales, step = p.keys.double(), p.scales.double(), max(SCORES // (len(p.keys) * p.q.shape[1]), 1)
    rows = [slice(first, first + step) for first in range(0, len(p.q), step)]
    return torch.cat([weighted_scores(p.q[each].double(), keys, weights[each]) * scales for each in rows])


def mistakes(p: MqaLogits, got: Tensor, unwritten: float = torch.nan, of_addends: float = 0.0) -> str | None:
    """Say what is wrong with logits, where the kernel has left `unwritten`; None if nothing is.

    A sum over heads may be off by a rounding of its magnitude for each head and a few more. On a GPU each score may be
    off by a part, `of_addends`, of what its products add up to without their signs: also one that relu takes for zero.
    """
    tokens, heads, _ = p.q.shape
    num_keys, columns = len(p.keys), p.logits.shape[1]
    right, magnitude = (in_parts(p, weights.double()) for weights in (p.weights, p.weights.abs()))
    addends = in_parts(unsigned(p), p.weights.double().abs()) if of_addends else magnitude
    begins, ends = p.starts.clamp(0).long(), p.ends.clamp(max=num_keys).long()
    ends = torch.where(ends > begins, ends, begins)
    expected = torch.full((tokens, columns), -torch.inf if p.clean_logits else unwritten, dtype=torch.float64)
    expected = expected.to(p.q.device)
    allowed = torch.zeros_like(expected)
    for token in range(tokens):
        begin, end = int(begins[token]), int(ends[token])
        if p.is_compressed:
            end = min(end, begin + columns)
        to = slice(0, end - begin) if p.is_compressed else slice(begin, end)
        expected[token, to] = right[token, begin:end]
        allowed[token, to] = magnitude[token, begin:end] * (heads + 16) * ROUNDINGS
        if of_addends:
            allowed[token, to] += addends[token, begin:end] * of_addends
    if p.logits.dtype == torch.bfloat16:
        allowed += expected.abs().nan_to_num(0, 0, 0) * 2.0**-8
    found = got.double()
    special = ~expected.isfinite()
    same = torch.where(expected.isnan(), found.isnan(), found == expected)
    wrong = torch.where(special, ~same, ~((found - expected).abs() <= allowed))
    if not math.isnan(unwritten) and not p.clean_logits:  # a number stands for what is left
        wrong = torch.where((expected == unwritten) & (allowed == 0), found != unwritten, wrong)
    if not wrong.any():
        return None
    row, column = wrong.nonzero()[0].tolist()
    return (
        f"{int(wrong.sum())} of {wrong.numel()} logits are wrong, the first of token {row}, column {column}: "
        f"expected {expected[row, column]}, got {found[row, column]}"
    )
