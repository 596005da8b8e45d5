"""Logits of keys in pages, and their schedule, for `bench attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_gemm.core.gpu import gpu_of
from deep_gemm.indexer import api, reference
from deep_gemm.indexer.check import PagedLogits, paged_logits_problem
from deep_gemm.testing import calc_diff

from .cases import Shape
from .contenders import OURS
from .kinds import Work, of_ours
from .logits_prefill import MOST_DIFFERENCE

PAGE = 64
MEAN_CONTEXTS: dict[Shape, float] = {
    (1, 1, 64, 128, 8192): 8347.0,
    (16, 1, 64, 128, 8192): 7964.4,
    (64, 1, 64, 128, 8192): 7887.7,
    (64, 2, 64, 128, 8192): 7887.7,
    (256, 1, 64, 128, 8192): 8150.6,
    (256, 2, 64, 128, 8192): 8150.6,
    (256, 1, 32, 128, 8192): 8150.6,
    (64, 1, 64, 128, 65536): 65299.4,
    (128, 2, 64, 128, 65536): 64609.6,
    (1, 1, 64, 128, 131072): 95638.0,
    (4, 1, 64, 128, 131072): 149789.5,
}
"""Number of sequences, tokens of each, heads, depth, context; and the mean context when DeepGEMM was measured."""
# DeepGEMM 2.6.1 does not support shapes with four tokens.
PAGED_SHAPES: tuple[Shape, ...] = (*MEAN_CONTEXTS, (256, 4, 64, 128, 8192), (256, 4, 32, 128, 8192))
METADATA_SHAPES = tuple((*shape[:2], shape[4]) for shape in MEAN_CONTEXTS if shape[2] == 64)
CHECKED_SEQUENCES = 4


def contexts_of(shape: Shape, *, device: str) -> Tensor:
    """Draw contexts from 0.7 to 1.3 of their mean; a sequence's tokens are the last ones of its context."""
    sequences, next_n, _, _, context = shape
    spread = 0.7 + 0.6 * torch.rand(sequences, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    mean = MEAN_CONTEXTS.get(shape, float(context))
    last = (spread * (mean / float(spread.mean()))).int()
    return (last[:, None] - torch.arange(next_n - 1, -1, -1, dtype=torch.int32)).to(device)


def paged_problem(shape: Shape, *, device: str) -> PagedLogits:
    """Make sequences whose pages are scattered in the cache."""
    sequences, next_n, heads, depth, _ = shape
    torch.manual_seed(0)
    contexts = contexts_of(shape, device=device)
    most = int(contexts.max())
    pages = -(-most // PAGE)
    cache = torch.randint(0, 120, (sequences * pages, PAGE, 1, depth + 4), dtype=torch.uint8, device=device)
    scales = cache.view(sequences * pages, -1)[:, PAGE * depth :]
    scales.copy_((torch.rand(len(cache), PAGE, device=device, dtype=torch.float32) + 0.5).view(torch.uint8))
    table = torch.randperm(len(cache), device=device).int().view(sequences, pages)
    q = torch.randn(sequences, next_n, heads, depth, device=device, dtype=torch.float32).to(torch.float8_e4m3fn)
    weights = torch.randn(sequences * next_n, heads, device=device, dtype=torch.float32)
    shares = gpu_of(q.get_device()).num_sms if q.is_cuda else 4
    schedule = api.get_paged_mqa_logits_metadata(contexts, PAGE, shares)
    return paged_logits_problem(q, cache, weights, contexts, table, schedule, most, False, torch.float32)


def paged_mqa_logits(shape: Shape, *, device: str = "cuda") -> Work:
    """Make the work of logits of keys in pages."""
    p = paged_problem(shape, device=device)
    _, _, heads, depth, _ = shape
    pairs, loaded = int(p.contexts.sum()), int(p.contexts.amax(1).sum())
    moved = loaded * (depth + 4) + p.q.numel() + p.weights.numel() * 4 + pairs * 4
    checks = of_ours(lambda: difference(p), MOST_DIFFERENCE)
    return Work(2 * pairs * heads * depth, moved, {OURS: lambda: api.compute(p)}, checks)


def difference(p: PagedLogits) -> float:
    """Return how far our logits of some sequences are from the reference's; NaN if a needed logit is missing."""
    p.logits.fill_(torch.nan)
    api.compute(p)
    next_n = p.q.shape[1]
    found, right = [], []
    for sequence in (
        torch.linspace(0, len(p.q) - 1, min(len(p.q), CHECKED_SEQUENCES), dtype=torch.float32).int().tolist()
    ):
        rows = slice(sequence * next_n, (sequence + 1) * next_n)
        one = PagedLogits(
            p.q[sequence : sequence + 1],
            p.cache,
            p.weights[rows],
            p.contexts[sequence : sequence + 1],
            p.table[sequence : sequence + 1],
            p.schedule,
            torch.full_like(p.logits[rows], torch.nan),
        )
        reference.paged_mqa_logits(one)
        is_asked = ~one.logits.isnan()
        found.append(p.logits[rows][is_asked])
        right.append(one.logits[is_asked])
    return float(calc_diff(torch.cat(found), torch.cat(right)))


def metadata(shape: Shape, *, device: str = "cuda") -> Work:
    """Make the work of a schedule."""
    sequences, next_n, context = shape
    contexts = contexts_of((sequences, next_n, 0, 0, context), device=device)
    shares = gpu_of(contexts.get_device()).num_sms if contexts.is_cuda else 4

    def ours() -> Tensor:
        return api.get_paged_mqa_logits_metadata(contexts, PAGE, shares)

    def error() -> float:
        right = api.get_paged_mqa_logits_metadata(contexts.cpu(), PAGE, shares)
        return 0.0 if torch.equal(ours().cpu(), right) else torch.nan

    return Work(0, contexts.numel() * 4 + (shares + 1) * 8, {OURS: ours}, of_ours(error, MOST_DIFFERENCE))
