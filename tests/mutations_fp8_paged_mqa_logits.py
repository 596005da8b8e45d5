"""Ways to break the kernels of logits of keys in pages and of their schedule, and the trials they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from paged_cases import GARBAGE, mistakes, problem
from torch import Tensor

from deep_gemm.choose.config_paged_mqa_logits import PagedConfig, paged_config
from deep_gemm.indexer.paged_reference import schedule as right_schedule
from deep_gemm.kernels import fp8_paged_mqa_logits, plan_paged_contexts
from deep_gemm.problem.paged import PagedLogits
from deep_gemm.sim import fp8_paged_mqa_logits as sim
from deep_gemm.sim.mutate import Mutation

Contexts = tuple[int, ...] | tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Trial:
    """Contexts, a form, shares and CTAs; with `alone` each share in a launch of its own, and no logit in two."""

    contexts: Contexts
    next_n: int
    heads: int
    depth: int
    page: int
    shares: int
    num_sms: int
    seed: int
    schedule: str | None = None
    output_bytes: int = 4
    columns: int | None = None
    alone: bool = False

    @property
    def config(self) -> PagedConfig:
        return paged_config(self.next_n, self.heads, self.depth, self.page, self.output_bytes)

    def headers(self) -> dict[str, str]:
        return fp8_paged_mqa_logits.headers(self.config)

    def run(self, headers: Mapping[str, str]) -> None:
        p = problem(
            self.contexts,
            self.next_n,
            self.heads,
            self.depth,
            page=self.page,
            shares=self.shares,
            columns=self.columns,
            dtype=torch.float32 if self.output_bytes == 4 else torch.bfloat16,
            seed=self.seed,
        )
        weights = torch.full((p.weights.shape[0], self.heads + 5), torch.nan)
        weights[:, : self.heads] = p.weights
        # Entries that must not be used name the block that there is not.
        table = torch.where(p.table == GARBAGE, p.cache.shape[0], p.table)
        p = p._replace(weights=weights[:, : self.heads], table=table)
        kernel = sim.compile_config(self.config, headers)

        def logits(schedule: Tensor) -> Tensor:
            part = p._replace(schedule=schedule.contiguous())
            with mock.patch.object(fp8_paged_mqa_logits, "params_of", params_of):
                return sim.run(kernel, self.config, part, num_sms=self.num_sms, seed=self.seed, schedule=self.schedule)

        if self.alone:
            parts = torch.stack([logits(p.schedule[share : share + 2]) for share in range(self.shares)])
            if (~parts.isnan()).sum(0).max() > 1:
                raise ValueError("two shares have the same logit")
            got = torch.where(parts.isnan().all(0), torch.nan, parts.nansum(0))
        else:
            got = logits(p.schedule)
        wrong = mistakes(p, got)
        if wrong is not None:
            raise ValueError(wrong)


class OneBlockMore:
    """Of a cache, what its tensor maps are made of; the last block is not in memory, and loading it is refused."""

    def __init__(self, cache: Tensor) -> None:
        self.shape = (cache.shape[0] + 1, *cache.shape[1:])
        self.stride, self.data_ptr = cache.stride, cache.data_ptr


def params_of(config: PagedConfig, launcher: Any, p: PagedLogits, splits: int) -> bytes:
    more: Any = OneBlockMore(p.cache)
    return real_params_of(config, launcher, p._replace(cache=more), splits)


real_params_of = fp8_paged_mqa_logits.params_of


@dataclass(frozen=True)
class PlanTrial:
    """A schedule of contexts drawn at random, or given."""

    sequences: int
    next_n: int
    shares: int
    seed: int
    schedule: str | None = None
    contexts: tuple[tuple[int, ...], ...] = ()
    config = plan_paged_contexts.CONFIG

    def headers(self) -> dict[str, str]:
        return plan_paged_contexts.headers(self.config)

    def run(self, headers: Mapping[str, str]) -> None:
        g = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(-300, 2000, (self.sequences, self.next_n), generator=g, dtype=torch.int32)
        contexts = torch.tensor(self.contexts, dtype=torch.int32) if self.contexts else drawn
        right = torch.empty(self.shares + 1, 2, dtype=torch.int32)
        right_schedule(contexts, right)
        kernel = sim.compile_plan(self.config, headers)
        got = sim.plan(kernel, self.config, contexts, self.shares, seed=self.seed, schedule=self.schedule)
        if not torch.equal(got, right):
            row = int((got != right).any(1).nonzero()[0])
            raise ValueError(f"row {row}: expected {right[row].tolist()}, got {got[row].tolist()}")


_MIXED = ((1300, 1290, 7), (0, 0, 0), (300, 297, 400), (64, 65, 66), (1, 0, 0), (-3, -900, 2))
_LONG = ((2500, 2499, 8), (60, 65, 66), (0, 0, 0), (700, 3, 701))
_DEEP = ((1500, 1499, 1400, 1300), (600, 601, 602, 603), (130, 0, 5, 129), (700, 3, 4, 5))
_MANY = tuple(((i * 97) % 400 if i % 3 else 0,) for i in range(75))
TRIALS = [
    Trial(_MIXED, 3, 64, 32, 32, 1, 1, 0, columns=1400),
    Trial(_DEEP, 4, 64, 128, 64, 1, 1, 1, "slow_math"),
    Trial(_DEEP, 4, 64, 128, 64, 1, 1, 2, "late_loads"),
    Trial(_LONG, 3, 64, 32, 32, 1, 2, 3),
    Trial((300, 0, 77, 513), 3, 24, 32, 64, 2, 2, 4, output_bytes=2, columns=400),
    Trial(((512, 500), (0, 0), (511, 512), (70, 71)), 2, 40, 32, 64, 5, 1, 5, alone=True),
    Trial(((512, 500), (0, 0), (511, 512), (70, 71)), 2, 40, 32, 64, 5, 10, 6),
    Trial(_MANY, 1, 16, 32, 64, 2, 1, 7, alone=True),
]
PLAN_TRIALS = [
    PlanTrial(700, 2, 600, 0),
    PlanTrial(1100, 1, 7, 1, "slow_warps"),
    PlanTrial(1100, 3, 132, 2, "slow_lanes"),
    PlanTrial(0, 1, 5, 3, contexts=((0,), (-9,), (0,))),
    PlanTrial(0, 1, 1100, 4, contexts=((2**31 - 1,), (5,), (2**30,))),
]

_K, _P = "fp8_paged_mqa_logits.cuh", "plan_paged_contexts.cuh"
MUTATIONS = [
    # the ring and the slots of sequences
    Mutation("slots of keys are not waited for", _K, "wait_until_free(shared.ring, at);", ";"),
    Mutation("keys are not waited for", _K, "wait_until_loaded(work.shared.ring, at);", ""),
    Mutation("slots of keys are not given back", _K, "if constexpr (kUnit + 1 == kUnits) release(work.shared.ring, slots[kBlock], work.lane, scales[kBlock]);", ""),
    Mutation("slots of keys are given back before the last product is done", _K, "if constexpr (kUnit + 1 == kUnits) release(", "if constexpr (kUnit == 0) release("),
    Mutation("scales are not announced", _K, "kSlotBytes = kKeysBytes + kBlockKeys * 4", "kSlotBytes = kKeysBytes"),
    Mutation("one arrival is not expected", _K, "&shared.q_full[slot], 33", "&shared.q_full[slot], 32"),
    Mutation("sequences' slots are not waited for", _K, "ptx::mbarrier_wait_parity(&shared.q_empty[slot_at.slot], slot_at.parity ^ 1);\n      ptx::syncwarp();\n      SequenceLoad", "SequenceLoad"),
    Mutation("sequences' slots are given back by one warp", _K, "&shared.q_empty[slot], kNumMathWarps", "&shared.q_empty[slot], 1"),
    Mutation("sequences' slots are given back before all lanes have read", _K, "weights and rows.\n    ptx::syncwarp();", "weights and rows."),
    Mutation("the end waits for no slot", _K, "  // No sequence is left.\n  ptx::mbarrier_wait_parity(&shared.q_empty[slot_at.slot], slot_at.parity ^ 1);", ""),
    Mutation("the kernel ahead is not waited for", _K, "  ptx::griddepcontrol_wait();\n", ""),
    # entries of the table
    Mutation("entries behind the table's room", _K, "page * kPage < p.most_keys ?", "true ?"),
    Mutation("the first pages behind a context are loaded", _K, "entries.cut(p, keys);\n      uint32_t", "uint32_t"),
    Mutation("later pages behind a context are loaded", _K, "entries = next;\n        entries.cut(p, keys);", "entries = next;"),
    Mutation("all sequences have the first's entries", _K, "if (sequence != begin.x) entries.load", "if (false) entries.load"),
    Mutation("all pages of a block are its first", _K, "held * kPages + lane % kPages", "held * kPages"),
    Mutation("the next entries are those of the other half", _K, "step = 32 / kPages * blocks.step", "step = 32 / kPages"),
    # what is loaded
    Mutation("scales of all pages lie at the first's", _K, "shared.scales[at.stage] + lane * kPage", "shared.scales[at.stage]"),
    Mutation("the second unit gets the first's q", _K, " + unit * Unit::kColumns);", ");"),
    Mutation("weights of tokens that there are not", _K, "token < kNextN\n", "true\n"),
    Mutation("only the first weights are asked for", _K, "first < kAll; first +=", "first < 0; first +="),
    Mutation("weights of columns that there are not", _K, "if (column < kColumns)", "if (true)"),
    # contexts and rows
    Mutation("contexts below zero", _K, "given < 0 ? 0 : given", "given"),
    Mutation("contexts beyond the rows", _K, "keys < p.most_keys ? keys : p.most_keys", "keys"),
    Mutation("contexts of sequences alone lie apart", _K, "(sequence) * p.contexts_pitch", "(sequence) * kNextN"),
    Mutation("the last token's context is the longest", _K, "most = keys > most ? keys : most;", "most = keys;"),
    Mutation("rows of tokens that there are not", _K, "lane < kNextN ? keys_of_token(p, sequence, lane)", "lane < kTokens ? keys_of_token(p, sequence, 0)"),
    # shares
    Mutation("both CTAs of a share begin alike", _K, "kSegmentBlocks + half, all", "kSegmentBlocks, all"),
    Mutation("a share begins with its sequence", _K, "sequence == begin.x ? begin.y : 0", "0"),
    Mutation("a share ends with its sequence", _K, "if (sequence == end.x && end.y", "if (false && end.y"),
    Mutation("a sequence without blocks is the end", _K, "if (blocks.count() == 0) continue;", ""),
    Mutation("halves have as many blocks", _K, "ceil_div(end - first, step)", "(end - first) / step"),
    Mutation("a window is left out in part", _K, "window += 32", "window += 33"),
    Mutation("windows end early", _K, "in_window < 32", "in_window < 31"),
    Mutation("sequences behind the share", _K, "window + lane <= end.x ?", "true ?"),
    # products and stores
    Mutation("all blocks of a run have the first's scales", _K, "logits, scales[kBlock], work.lane", "logits, scales[0], work.lane"),
    Mutation("both tokens stored by a lane without one", _K, "if (Unit::kTokens % 2 && token >= Unit::kTokens) continue;", ""),
    Mutation("contexts end a key late", _K, "if (key >= row.z)", "if (key > row.z)"),
    Mutation("logits are not scaled", _K, "st_global_f32(to, logits[i] * scale)", "st_global_f32(to, logits[i])"),
]  # fmt: skip
PLAN_MUTATIONS = [
    Mutation("contexts are read before the kernel ahead has ended", _P, "  ptx::griddepcontrol_wait();\n", ""),
    Mutation("the last context counts", _P, "most = context > most ? context : most;", "most = context;"),
    Mutation("sequences that there are not", _P, "if (sequence < p.sequences) sum", "if (true) sum"),
    Mutation("sums of half a warp", _P, "distance < 32;", "distance < 16;"),
    Mutation("sums of warps are read too early", _P, "of_warps[warp], sum);\n  ptx::syncthreads();", "of_warps[warp], sum);"),
    Mutation("sums of threads are read too early", _P, "ends[thread], sum);\n  ptx::syncthreads();", "ends[thread], sum);"),
    Mutation("sums of a warp alone", _P, "if (other == warp) sum += total;", ""),
    Mutation("the last row is missing", _P, "row <= p.shares;", "row < p.shares;"),
    Mutation("the last row is the last segment", _P, "      segment += is_last;\n", ""),
    Mutation("shares of large batches", _P, "static_cast<uint64_t>(total) * row", "total * row"),
    Mutation("the thread before", _P, "- 1]) <= wanted", "- 1]) < wanted"),
    Mutation("threads have one sequence", _P, "sequence = owner * per_thread;", "sequence = owner;"),
    Mutation("batches without keys", _P, "if (total) {", "if (true) {"),
]  # fmt: skip
