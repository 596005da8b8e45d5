"""Logits of many tokens, for `bench attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_gemm.indexer import api, reference
from deep_gemm.indexer.check import MqaLogits, mqa_logits_problem
from deep_gemm.testing import calc_diff

from ..sim.logits import causal, problem
from .cases import Shape
from .contenders import OURS
from .kinds import Call, Work, of_ours
from .layers import EAGER

SCORES_AT_A_TIME, MOST_SCORES = 1 << 28, 1 << 34
CHECKED_QUERIES = 256
MOST_DIFFERENCE = 5e-6
MQA_SHAPES: tuple[Shape, ...] = (
    *((2048, keys, 64, 128) for keys in (4096, 8192, 32768)),
    *((8192, keys, 64, 128) for keys in (8192, 65536)),
    *((2048, 8192, 32, 128), (2048, 65536, 32, 128), (2048, 8192, 64, 64)),
    *((queries, keys, 64, 128) for queries, keys in ((1, 4096), (4, 8192), (16, 65536), (64, 65536), (256, 65536))),
)


def mqa_logits(shape: Shape, *, clean: bool = False, device: str = "cuda") -> Work:
    """Make the work of causal logits."""
    p = causal_problem(shape, clean=clean, device=device)
    queries, num_keys, heads, depth = shape
    pairs = sum(num_keys - queries + 1 + i for i in range(queries))
    written = queries * num_keys if clean else pairs
    moved = p.q.numel() + p.keys.numel() + (num_keys + p.weights.numel() + queries * 2 + written) * 4
    calls: dict[str, Call] = {OURS: lambda: api.compute(p)}
    if pairs * heads <= MOST_SCORES:
        calls[EAGER] = lambda: in_torch(p)
    return Work(2 * pairs * heads * depth, moved, calls, of_ours(lambda: difference(p), MOST_DIFFERENCE))


def causal_problem(shape: Shape, *, clean: bool, device: str) -> MqaLogits:
    """Make a problem in which each query sees the keys up to its own."""
    queries, num_keys, _, _ = shape
    return problem(shape, causal(queries, num_keys), clean=clean, device=device)  # type: ignore[arg-type]


def in_torch(p: MqaLogits) -> Tensor:
    """Compute the logits by torch's products, for every query and all keys."""
    queries, heads, depth = p.q.shape
    keys = (p.keys.float() * p.scales[:, None]).to(torch.bfloat16)
    out = torch.empty(queries, len(keys), device=p.q.device, dtype=torch.float32)
    step = max(SCORES_AT_A_TIME // (heads * len(keys)), 1)
    for first in range(0, queries, step):
        rows = slice(first, first + step)
        scores = (p.q[rows].to(torch.bfloat16).view(-1, depth) @ keys.t()).relu_().view(-1, heads, len(keys))
        out[rows] = torch.bmm(p.weights[rows, None].to(torch.bfloat16), scores)[:, 0]
    return out


def difference(p: MqaLogits) -> float:
    """Return how far our logits of some queries are from the reference's; NaN if the logits' ranges differ."""
    p.logits.fill_(torch.nan)
    api.compute(p)
    rows = torch.linspace(
        0, len(p.q) - 1, min(len(p.q), CHECKED_QUERIES), device=p.q.device, dtype=torch.float32
    ).long()
    found = p.logits[rows]
    right = mqa_logits_problem(
        p.q[rows], (p.keys, p.scales), p.weights[rows], p.starts[rows], p.ends[rows], p.clean_logits, 0, torch.float32
    )
    right.logits.fill_(torch.nan)
    reference.mqa_logits(right)
    is_number = right.logits.isfinite()
    if not torch.equal(found.isfinite(), is_number) or not torch.equal(found.isnan(), right.logits.isnan()):
        return torch.nan
    return float(calc_diff(found[is_number], right.logits[is_number]))
