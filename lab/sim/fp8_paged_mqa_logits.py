"""The kernel of paged logits in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.indexer.paged import get_paged_mqa_logits_metadata
from deep_gemm.indexer.paged_check import PagedLogits, paged_logits_problem
from deep_gemm.indexer.paged_kernel import KERNEL, PagedConfig, grid, paged_config, params_of, splits_of
from deep_gemm.indexer.reference import keys_of, weighted_scores

from .fp8_mqa_logits import ROUNDINGS, of_addends
from .launcher import How, Stage
from .library import HostKernel
from .rounding import largest_part
from .trial import Trial

ALIGNED = {"q": 16, "cache": 16, "schedule": 8, "logits": 16, "contexts": 4}
GARBAGE = -0x11111111
"""An entry of the table that must not be read."""


def problem(
    contexts: Sequence[Sequence[int]] | Sequence[int],
    next_n: int,
    heads: int = 64,
    depth: int = 128,
    *,
    page: int = 64,
    room: int = 0,
    shares: int = 2,
    columns: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
    names_last_block: bool = False,
) -> PagedLogits:
    """Make random operands; `room` bytes between blocks. Pages lie in any order, and entries behind are garbage.

    Or they name the last block, in which no page lies.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    sequences = len(contexts)
    longest = lengths.reshape(sequences, -1).amax(1).clamp(min=0) if sequences else lengths
    pages = -(-longest // page)
    most, blocks = int(pages.max()) + 1 if sequences else 1, int(pages.sum()) + 3
    order = torch.randperm(blocks - names_last_block, generator=g).int()
    table = torch.full((sequences, most + 2), blocks - 1 if names_last_block else GARBAGE, dtype=torch.int64).int()
    taken = 0
    for sequence, count in enumerate(pages.tolist()):
        table[sequence, :count] = order[taken : taken + count]
        taken += count
    stride = page * (depth + 4) + room
    memory = torch.full((blocks, stride), 0x7F, dtype=torch.uint8)  # NaN
    keys = torch.randn(blocks, page * depth, generator=g, dtype=torch.float32).to(torch.float8_e4m3fn)
    memory[:, : page * depth] = keys.view(torch.uint8)
    scales = torch.rand(blocks, page, generator=g, dtype=torch.float32) + 0.5
    memory[:, page * depth : page * (depth + 4)] = scales.view(torch.uint8)
    q = (
        torch.randn(sequences, next_n, heads, depth, generator=g, dtype=torch.float32)
        .to(torch.float8_e4m3fn)
        .to(device)
    )
    weights = torch.randn(sequences * next_n, heads, generator=g, dtype=torch.float32).to(device)
    shape, strides = (blocks, page, 1, depth + 4), (stride, depth + 4, depth + 4, 1)
    cache, lengths = memory.to(device).as_strided(shape, strides), lengths.to(device)
    schedule = get_paged_mqa_logits_metadata(lengths, page, shares)
    if columns is None:
        columns = int(longest.max()) if sequences else 5
    return paged_logits_problem(q, cache, weights, lengths, table.to(device), schedule, columns, False, dtype)


def run(
    kernel: HostKernel | None, config: PagedConfig, p: PagedLogits, *, hidden_blocks: int = 0, **how: Unpack[How]
) -> Tensor:
    """Compute the logits on simulated SMs. What the kernel leaves unwritten is NaN.

    So many of the cache's last blocks are not in memory: whoever reads one is found out.
    """
    columns = p.logits.shape[1]
    whole = torch.full((p.logits.shape[0], p.logits.stride(0)), torch.nan, dtype=p.logits.dtype)
    given = dict(zip(p._fields[:-1], p[:-1], strict=True))
    given["cache"] = p.cache[: len(p.cache) - hidden_blocks]
    stage = Stage(config, given, {"logits": whole}, ALIGNED, **how)
    splits = splits_of(p, stage.num_sms)

    def params(launcher: Any, at: Any) -> bytes:
        memory = at["cache"]
        cache = SimpleNamespace(data_ptr=memory.data_ptr, stride=memory.stride, shape=p.cache.shape)
        problem = PagedLogits(**{**at, "cache": cache, "logits": at["logits"][:, :columns]})
        return params_of(config, launcher, problem, splits)

    stage.run(KERNEL, kernel, params, grid(p, splits))
    return whole[:, :columns]


def compare(p: PagedLogits, got: Tensor, unwritten: float = torch.nan, of_addends: float = 0.0) -> float:
    """Give the largest error of logits, as a part of what is allowed. The kernel has left `unwritten` elsewhere.

    What a logit may be off by: `compare` of fp8_mqa_logits.
    """
    sequences, next_n, heads, _ = p.q.shape
    expected = torch.full(got.shape, unwritten, dtype=torch.float64, device=got.device)
    allowed = torch.zeros_like(expected)
    contexts = p.contexts.view(sequences, -1).expand(sequences, next_n).clamp(0, got.shape[1])
    for sequence, lengths in enumerate(contexts.tolist()):
        values, scales = keys_of(p, sequence, max(lengths))
        rows = slice(sequence * next_n, (sequence + 1) * next_n)
        q, keys, weights = p.q[sequence].double(), values.double(), p.weights[rows].double()
        right, magnitude, addends = (
            weighted_scores(*operands) * scales.double()
            for operands in ((q, keys, weights), (q, keys, weights.abs()), (q.abs(), keys.abs(), weights.abs()))
        )
        for token, length in enumerate(lengths):
            expected[rows][token, :length] = right[token, :length]
            roundings = magnitude[token, :length] * ((heads + 16) * ROUNDINGS)
            allowed[rows][token, :length] = roundings + addends[token, :length] * of_addends
    if p.logits.dtype == torch.bfloat16:
        allowed += torch.where(allowed > 0, expected.abs() * 2.0**-8, 0)
    return largest_part("logits", got, expected, allowed)


@dataclass(frozen=True)
class PagedTrial(Trial):
    """Contexts of sequences, one of whose tokens each, and what else a problem is made of; seed and schedule."""

    kernel = KERNEL
    contexts: tuple[tuple[int, ...], ...]
    heads: int
    depth: int
    page: int = 64
    shares: int = 2
    room: int = 0
    columns: int | None = None
    seed: int = 0
    schedule: str | None = None
    hides_block: bool = False
    """The block that the table names behind contexts is not in memory."""
    is_bf16: bool = False

    @property
    def config(self) -> PagedConfig:
        """The configuration of such a problem."""
        return paged_config(len(self.contexts[0]), self.heads, self.depth, self.page, 2 if self.is_bf16 else 4)

    @classmethod
    def drawn(cls, config: PagedConfig, seed: int) -> PagedTrial:
        """Draw contexts, shares and room between blocks."""
        draw = random.Random(seed)
        contexts = tuple(
            tuple(max(length + token, 0) for token in range(config.next_n))
            for length in (draw.choice((0, draw.randint(1, 700))) for _ in range(draw.randint(1, 9)))
        )
        shares = draw.randint(1, 3)
        return cls(
            contexts,
            config.heads,
            config.depth,
            config.page,
            shares,
            num_sms=shares * draw.randint(1, 2),
            room=draw.choice((0, 48)),
            columns=max(1, *map(max, contexts)),
            seed=seed,
            is_bf16=config.output_bytes == 2,
        )

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare logits with the reference's, within what rounding may do."""
        p = problem(
            self.contexts,
            len(self.contexts[0]),
            self.heads,
            self.depth,
            page=self.page,
            room=self.room,
            shares=self.shares,
            columns=self.columns,
            dtype=torch.bfloat16 if self.is_bf16 else torch.float32,
            seed=self.seed,
            names_last_block=self.hides_block,
        )
        hidden = int(self.hides_block)
        got = run(kernel, self.config, p, hidden_blocks=hidden, **self.how)
        return compare(p, got, of_addends=of_addends(self.how))
