"""The kernels of the indexer's logits in the simulator, with the source, tensor maps and parameters of a launch."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.indexer import plan_paged_contexts
from deep_gemm.indexer.api import get_paged_mqa_logits_metadata
from deep_gemm.indexer.check import Logits, MqaLogits, PagedLogits, mqa_logits_problem, paged_logits_problem
from deep_gemm.indexer.config import InPages, LogitsConfig, logits_config
from deep_gemm.indexer.kernel import IN_PAGES, IN_ROWS, grid, kernel_of, values_of
from deep_gemm.indexer.plan_paged_contexts import CONFIG, PlanConfig
from deep_gemm.indexer.reference import keys_of, schedule, weighted_scores

from ..casts import wider
from .launcher import How, Stage, is_on_gpu
from .library import HostKernel
from .rounding import largest_part
from .trial import Trial, same

Ranges = tuple[Sequence[int], Sequence[int]]
ROUNDINGS = 2.0**-24
SCORES = 1 << 26
BITS_OF_PRODUCTS = 2.0**-8
"""Error relative to the sum of all magnitudes: a step cuts 33 addends 13 bits below the largest of its 32 products.

Normal numbers of depth 32, 64 and 128 add up to 2, 4 and 7 times their largest product: 33 * 2^-13 / 2 < 2^-8.
"""
ALIGNED = {**dict.fromkeys(("q", "keys", "scales", "cache", "logits"), 16), "schedule": 8}
POISON = -0x5A5A5A5A
GARBAGE = -0x11111111
"""A table entry that the kernel must not read."""


def causal(tokens: int, keys: int) -> Ranges:
    """Let each token see the keys up to the token's own key; the tokens' keys are the last keys."""
    return [0] * tokens, [keys - tokens + 1 + i for i in range(tokens)]


def anywhere(tokens: int, keys: int, seed: int = 0) -> Ranges:
    """Draw ranges of every kind: empty, reversed, or beyond the keys on both sides."""
    g = torch.Generator().manual_seed(seed)
    starts, ends = torch.randint(-keys // 4 - 2, keys + keys // 4 + 2, (2, tokens), generator=g).tolist()
    return starts, ends


def packed(tokens: int, keys: int) -> Ranges:
    """Place two sequences one after the other: ranges jump in the middle of a tile."""
    half, middle = tokens // 2, keys // 3
    starts = [0] * half + [middle] * (tokens - half)
    ends = [min(i + 1, middle) for i in range(half)] + [min(middle + i + 1, keys) for i in range(tokens - half)]
    return starts, ends


RANGES = {"causal": causal, "anywhere": anywhere, "packed": packed}


def fp8(g: torch.Generator, *shape: int) -> Tensor:
    """Draw normal numbers in FP8."""
    return torch.randn(*shape, generator=g, dtype=torch.float32).to(torch.float8_e4m3fn)


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
    """Make random operands of [tokens, keys, heads, depth]; `columns`: width of compressed rows."""
    tokens, keys, heads, depth = shape
    g = torch.Generator().manual_seed(seed)
    q, k = fp8(g, tokens, heads, depth), fp8(g, keys, depth)
    scales = torch.rand(keys, generator=g, dtype=torch.float32) + 0.5
    weights = torch.randn(tokens, heads, generator=g, dtype=torch.float32)
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in ranges)
    q, k, scales, weights, starts, ends = (x.to(device) for x in (q, k, scales, weights, starts, ends))
    return mqa_logits_problem(q, (k, scales), weights, starts, ends, clean, columns, dtype)


def paged_problem(
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
    """Make random operands; `room` bytes separate blocks. Pages have a random order; unused table entries are garbage.

    With `names_last_block`, unused entries name the last block, which holds no page.
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
    memory[:, : page * depth] = fp8(g, blocks, page * depth).view(torch.uint8)
    scales = torch.rand(blocks, page, generator=g, dtype=torch.float32) + 0.5
    memory[:, page * depth : page * (depth + 4)] = scales.view(torch.uint8)
    q = fp8(g, sequences, next_n, heads, depth).to(device)
    weights = torch.randn(sequences * next_n, heads, generator=g, dtype=torch.float32).to(device)
    shape, strides = (blocks, page, 1, depth + 4), (stride, depth + 4, depth + 4, 1)
    cache, lengths = memory.to(device).as_strided(shape, strides), lengths.to(device)
    shares_of = get_paged_mqa_logits_metadata(lengths, page, shares)
    if columns is None:
        columns = int(longest.max()) if sequences else 5
    return paged_logits_problem(q, cache, weights, lengths, table.to(device), shares_of, columns, False, dtype)


def run(
    kernel: HostKernel | None, config: LogitsConfig, p: Logits, *, hidden_blocks: int = 0, **how: Unpack[How]
) -> Tensor:
    """Compute the logits on simulated SMs. Logits that the kernel does not write are NaN.

    The last `hidden_blocks` blocks of a cache are not in memory, so that a read of them is detected.
    """
    rows, columns = p.logits.shape
    whole = torch.full((rows, p.logits.stride(0)), torch.nan, dtype=p.logits.dtype)
    given = {name: x for name, x in p._asdict().items() if isinstance(x, Tensor) and name != "logits"}
    if hidden_blocks:
        given["cache"] = given["cache"][:-hidden_blocks]
    stage = Stage(config, given, {"logits": whole}, ALIGNED, **how)
    ctas = grid(config, p, stage.num_sms)

    def values(at: Any) -> dict[str, Any]:
        placed = {**at, "logits": at["logits"][:, :columns]}
        if isinstance(p, PagedLogits):
            memory = at["cache"]
            placed["cache"] = SimpleNamespace(data_ptr=memory.data_ptr, stride=memory.stride, shape=p.cache.shape)
        return values_of(config, p._replace(**placed), ctas)

    stage.run(kernel_of(p), kernel, values, ctas)
    return whole[:, :columns]


def sharing_keys(p: Logits) -> Iterator[tuple[slice, tuple[Tensor, Tensor, Tensor], list[tuple[int, int, int]]]]:
    """Yield tokens that share keys: their rows; their queries, keys and scales; their ranges and first columns."""
    columns = p.logits.shape[1]
    if isinstance(p, PagedLogits):
        sequences, next_n = p.q.shape[:2]
        contexts = p.contexts.view(sequences, -1).expand(sequences, next_n).clamp(0, columns)
        for sequence, lengths in enumerate(contexts.tolist()):
            rows = slice(sequence * next_n, (sequence + 1) * next_n)
            operands = p.q[sequence], *keys_of(p, sequence, max(lengths))
            yield rows, operands, [(0, length, 0) for length in lengths]
        return
    begins, ends = p.starts.clamp(0).tolist(), p.ends.clamp(max=len(p.keys)).tolist()
    if p.is_compressed:
        ends = [min(end, begin + columns) for begin, end in zip(begins, ends, strict=True)]
    ranges = [
        (begin, max(begin, end), 0 if p.is_compressed else begin) for begin, end in zip(begins, ends, strict=True)
    ]
    step = max(SCORES // (len(p.keys) * p.q.shape[1]), 1)
    for rows in (slice(first, first + step) for first in range(0, len(p.q), step)):
        yield rows, (p.q[rows], p.keys, p.scales), ranges[rows]


def compare(p: Logits, got: Tensor, unwritten: float = torch.nan, of_addends: float = 0.0) -> float:
    """Return the largest error of logits relative to the allowed error. Other elements must have kept `unwritten`.

    For each head, and a few times more, a sum may be off by a rounding of its magnitude. On a GPU each score may
    also be off by `of_addends` times the sum of its products' magnitudes, even a score that relu sets to zero.
    """
    is_clean = isinstance(p, MqaLogits) and p.clean_logits
    expected = torch.full(got.shape, -torch.inf if is_clean else unwritten, dtype=torch.float64, device=got.device)
    allowed = torch.zeros_like(expected)
    for rows, operands, ranges in sharing_keys(p):
        q, keys, scales, weights = (x.double() for x in (*operands, p.weights[rows]))
        right = weighted_scores(q, keys, weights) * scales
        off = weighted_scores(q, keys, weights.abs()) * scales * ((p.q.shape[-2] + 16) * ROUNDINGS)
        if of_addends:
            off += weighted_scores(q.abs(), keys.abs(), weights.abs()) * scales * of_addends
        for token, (begin, end, column) in enumerate(ranges):
            at = slice(column, column + end - begin)
            expected[rows][token, at], allowed[rows][token, at] = right[token, begin:end], off[token, begin:end]
    if p.logits.dtype == torch.bfloat16:
        allowed += torch.where(allowed > 0, expected.abs() * 2.0**-8, 0)
    return largest_part("logits", got, expected, allowed)


class LogitsTrial(Trial):
    """Logits of a subclass's problem, compared with the reference's."""

    config: Any
    hides_block = False

    @abstractmethod
    def problem(self) -> Logits:
        """Make the problem."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the logits."""
        return torch.float32 if self.config.output_bytes == 4 else torch.bfloat16

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare logits with the reference's, within the error of rounding."""
        p = self.problem()
        got = run(kernel, self.config, p, hidden_blocks=int(self.hides_block), **self.how)
        return compare(p, got, of_addends=BITS_OF_PRODUCTS if is_on_gpu(self.how) else 0.0)


@dataclass(frozen=True)
class MqaTrial(LogitsTrial):
    """One configuration, number of tokens and of keys, kind of ranges, seed and schedule."""

    kernel = IN_ROWS
    config: LogitsConfig
    tokens: int
    keys: int
    ranges: str
    """`causal`, `anywhere` or `packed`."""
    seed: int = 0
    schedule: str | None = None
    columns: int = 70
    """Columns of compressed logits."""

    @classmethod
    def drawn(cls, config: LogitsConfig, seed: int) -> MqaTrial:
        """Draw sizes and ranges."""
        draw = random.Random(seed)
        tokens = draw.randint(1, 60)
        keys, ranges = draw.randint(tokens, 700), draw.choice((*RANGES,))
        return cls(config, tokens, keys, ranges, seed, columns=draw.randint(1, 200))

    def problem(self) -> MqaLogits:
        """Make the problem; a NaN in q must affect its own logits only."""
        keys: Any = self.config.keys
        p = problem(
            (self.tokens, self.keys, self.config.heads, self.config.depth),
            RANGES[self.ranges](self.tokens, self.keys),
            clean=keys.is_clean,
            columns=self.columns if keys.is_compressed else 0,
            dtype=self.dtype,
            seed=self.seed,
        )
        q = p.q.clone()
        q[0, 1, 2] = torch.nan  # poison is NaN too, and must not become 0
        return p._replace(weights=wider(p.weights, 5, torch.nan), q=q)


@dataclass(frozen=True)
class PagedTrial(LogitsTrial):
    """The contexts of each sequence, one for each of its tokens, and other sizes of a problem; seed and schedule."""

    kernel = IN_PAGES
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
    """True: the block of unused table entries is not in memory."""
    is_bf16: bool = False

    @property
    def config(self) -> LogitsConfig:
        """Return the configuration for this problem."""
        keys = InPages(len(self.contexts[0]), self.page)
        return logits_config(self.heads, self.depth, 2 if self.is_bf16 else 4, keys)

    @classmethod
    def drawn(cls, config: LogitsConfig, seed: int) -> PagedTrial:
        """Draw contexts, shares and the gap between blocks."""
        draw = random.Random(seed)
        keys: Any = config.keys
        contexts = tuple(
            tuple(max(length + token, 0) for token in range(keys.next_n))
            for length in (draw.choice((0, draw.randint(1, 700))) for _ in range(draw.randint(1, 9)))
        )
        shares = draw.randint(1, 3)
        return cls(
            contexts,
            config.heads,
            config.depth,
            keys.page,
            shares,
            num_sms=shares * draw.randint(1, 2),
            room=draw.choice((0, 48)),
            columns=max(1, *map(max, contexts)),
            seed=seed,
            is_bf16=config.output_bytes == 2,
        )

    def problem(self) -> PagedLogits:
        """Make the problem."""
        how = {name: getattr(self, name) for name in ("heads", "depth", "page", "room", "shares", "columns", "seed")}
        next_n = len(self.contexts[0])
        return paged_problem(self.contexts, next_n, dtype=self.dtype, names_last_block=self.hides_block, **how)


def check_schedule(kernel: HostKernel | None, contexts: Tensor, shares: int, **how: Unpack[How]) -> Tensor:
    """Make a schedule on a simulated SM, compare it with the reference's, and return it."""
    right, got = torch.empty(shares + 1, 2, dtype=torch.int32), torch.full((shares + 1, 2), POISON, dtype=torch.int32)
    schedule(contexts, right)
    given = contexts if len(contexts) else contexts.new_zeros(1, *contexts.shape[1:])  # a buffer cannot be empty
    stage = Stage(CONFIG, {"contexts": given}, {"out": got}, {"out": 8}, **how)
    schedule_values = plan_paged_contexts.values_of
    stage.run(
        plan_paged_contexts.KERNEL, kernel, lambda at: schedule_values(at["contexts"][: len(contexts)], at["out"]), 1
    )
    same("schedule", got, right)
    return got


@dataclass(frozen=True)
class PlanTrial(Trial):
    """Contexts of sequences, and shares to plan for."""

    kernel = plan_paged_contexts.KERNEL
    sequences: int
    next_n: int
    shares: int
    most: int = 2000
    seed: int = 0
    schedule: str | None = None
    config: PlanConfig = CONFIG

    @classmethod
    def drawn(cls, config: PlanConfig, seed: int) -> PlanTrial:
        """Draw sequences and shares."""
        draw = random.Random(seed)
        return cls(draw.randint(1, 900), draw.randint(1, 4), draw.randint(1, 200), draw.choice((0, 90, 4000)), seed)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare the schedule, bit for bit."""
        g = torch.Generator().manual_seed(self.seed)
        lengths = torch.randint(-300, self.most, (self.sequences, self.next_n), generator=g, dtype=torch.int32)
        check_schedule(kernel, lengths, self.shares, **self.how)
        return 0.0
