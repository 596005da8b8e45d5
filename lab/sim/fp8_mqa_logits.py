"""The `fp8_mqa_logits` kernel in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.indexer.check import MqaLogits, mqa_logits_problem
from deep_gemm.indexer.kernel import KERNEL, MqaConfig, grid, params_of
from deep_gemm.indexer.reference import weighted_scores

from ..casts import wider
from .launcher import How, Stage, is_on_gpu
from .library import HostKernel
from .rounding import largest_part
from .trial import Trial

Ranges = tuple[Sequence[int], Sequence[int]]
ROUNDINGS = 2.0**-24
SCORES = 1 << 26
BITS_OF_PRODUCTS = 2.0**-8
"""A part of the sum of all addends without signs: a step of 32 of them cuts 33 off 13 bits below the largest of these.

Normal numbers of depth 32, 64 and 128 add up to 2, 4 and 7 times their largest product: 33 * 2^-13 / 2 < 2^-8.
"""


def causal(tokens: int, keys: int) -> Ranges:
    """Let each token see the keys up to its own, which is one of the last."""
    return [0] * tokens, [keys - tokens + 1 + i for i in range(tokens)]


def anywhere(tokens: int, keys: int, seed: int = 0) -> Ranges:
    """Draw ranges that are empty, crossed, beyond the keys on both sides, and all else."""
    g = torch.Generator().manual_seed(seed)
    starts, ends = torch.randint(-keys // 4 - 2, keys + keys // 4 + 2, (2, tokens), generator=g).tolist()
    return starts, ends


def packed(tokens: int, keys: int) -> Ranges:
    """Put two sequences behind each other: ranges jump in the middle of a tile."""
    half, middle = tokens // 2, keys // 3
    starts = [0] * half + [middle] * (tokens - half)
    ends = [min(i + 1, middle) for i in range(half)] + [min(middle + i + 1, keys) for i in range(tokens - half)]
    return starts, ends


RANGES = {"causal": causal, "anywhere": anywhere, "packed": packed}


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
    """Make random operands of [tokens, keys, heads, depth]; `columns` of compressed rows."""
    tokens, keys, heads, depth = shape
    g = torch.Generator().manual_seed(seed)
    q, k = (
        torch.randn(*size, generator=g, dtype=torch.float32).to(torch.float8_e4m3fn)
        for size in ((tokens, heads, depth), (keys, depth))
    )
    scales = torch.rand(keys, generator=g, dtype=torch.float32) + 0.5
    weights = torch.randn(tokens, heads, generator=g, dtype=torch.float32)
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in ranges)
    q, k, scales, weights, starts, ends = (x.to(device) for x in (q, k, scales, weights, starts, ends))
    return mqa_logits_problem(q, (k, scales), weights, starts, ends, clean, columns, dtype)


def unsigned(p: MqaLogits) -> MqaLogits:
    """Give the problem without the signs of queries and keys."""
    q, keys = ((x.view(torch.uint8) & 0x7F).view(torch.float8_e4m3fn) for x in (p.q, p.keys))
    return p._replace(q=q, keys=keys)


def in_parts(p: MqaLogits, weights: Tensor) -> Tensor:
    """Compute all logits in FP64, of a part of the tokens at a time."""
    keys, scales, step = p.keys.double(), p.scales.double(), max(SCORES // (len(p.keys) * p.q.shape[1]), 1)
    rows = [slice(first, first + step) for first in range(0, len(p.q), step)]
    return torch.cat([weighted_scores(p.q[each].double(), keys, weights[each]) * scales for each in rows])


def run(kernel: HostKernel | None, config: MqaConfig, p: MqaLogits, **how: Unpack[How]) -> Tensor:
    """Compute the logits on simulated SMs. What the kernel leaves unwritten is NaN."""
    tokens, columns = p.logits.shape
    whole = torch.full((tokens, p.logits.stride(0)), torch.nan, dtype=p.logits.dtype)
    given = {name: getattr(p, name) for name in ("q", "keys", "scales", "weights", "starts", "ends")}
    aligned = dict.fromkeys(("q", "keys", "scales", "logits"), 16)
    stage = Stage(config, given, {"logits": whole}, aligned, **how)
    stage.run(
        KERNEL,
        kernel,
        lambda launcher, at: params_of(config, launcher, p._replace(**{**at, "logits": at["logits"][:, :columns]})),
        grid(config, tokens, p.keys.shape[0], stage.num_sms),
    )
    return whole[:, :columns]


def of_addends(how: How) -> float:
    """Give the part of all addends that a score may be off."""
    return BITS_OF_PRODUCTS if is_on_gpu(how) else 0.0


def compare(p: MqaLogits, got: Tensor, unwritten: float = torch.nan, of_addends: float = 0.0) -> float:
    """Give the largest error of logits, as a part of what is allowed. The kernel has left `unwritten` elsewhere.

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
        allowed += torch.where(allowed > 0, expected.abs() * 2.0**-8, 0)
    return largest_part("logits", got, expected, allowed)


@dataclass(frozen=True)
class MqaTrial(Trial):
    """One configuration, number of tokens and of keys, kind of ranges, seed and schedule."""

    kernel = KERNEL
    config: MqaConfig
    tokens: int
    keys: int
    ranges: str
    """`causal`, `anywhere` or `packed`."""
    seed: int = 0
    schedule: str | None = None
    columns: int = 70
    """Columns of compressed logits."""

    @classmethod
    def drawn(cls, config: MqaConfig, seed: int) -> MqaTrial:
        """Draw sizes and ranges."""
        draw = random.Random(seed)
        tokens = draw.randint(1, 60)
        keys, ranges = draw.randint(tokens, 700), draw.choice((*RANGES,))
        return cls(config, tokens, keys, ranges, seed, columns=draw.randint(1, 200))

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare logits with the reference's, within what rounding may do; a NaN of q and no others."""
        c = self.config
        p = problem(
            (self.tokens, self.keys, c.heads, c.depth),
            RANGES[self.ranges](self.tokens, self.keys),
            clean=c.is_clean,
            columns=self.columns if c.is_compressed else 0,
            dtype=torch.float32 if c.output_bytes == 4 else torch.bfloat16,
            seed=self.seed,
        )
        q = p.q.clone()
        q[0, 1, 2] = torch.nan  # poison is NaN too, and must not become 0
        p = p._replace(weights=wider(p.weights, 5, torch.nan), q=q)
        return compare(p, run(kernel, c, p, **self.how), of_addends=of_addends(self.how))
