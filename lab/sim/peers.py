"""Kernels that read and write memory of peers: `post_rows`, `gather_rows` and `meet_ranks`, for rank_calls.py's calls.

Each trial runs all of them, on several simulated ranks: one kernel may detect a mistake of another.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from deep_gemm.across import gather_rows, meet_ranks, post_rows
from deep_gemm.across.gather_rows import Gathered, GatherRowsConfig
from deep_gemm.across.meet_ranks import MeetConfig
from deep_gemm.across.post_rows import PostConfig
from deep_gemm.core.check.layout import ceil_div, get_tma_aligned_size
from deep_gemm.core.kernel import Config, Kernel
from deep_gemm.core.meeting import ERROR_WORD, STATE_WORDS, Node, Way
from deep_gemm.core.params import Params
from deep_gemm.core.sources import cuda_sources
from deep_gemm.moe import gather_weighted
from deep_gemm.moe.gather_weighted import GatherConfig

from .launcher import flat_memory
from .library import HostKernel, compile_kernel, compiled
from .rank_calls import Call, Sizes, calls_of
from .ranks import run_ranks
from .simulate import Buffer, KernelLaunch, Simulation
from .trial import Trial, same

SOURCES = Path(__file__).parent / "cuda"
KEEP, STORE = (
    Params.of_source((SOURCES / f"{name}.cuh").read_text(), struct_name)
    for name, struct_name in (("keep_room", "KeepParams"), ("store_results", "StoreParams"))
)
SUM = GatherConfig(torch.float32)
LIMIT = 1 << 20
"""Most steps of a wait."""
POISON = 0xA5
ROWS = "row_of", "token_of"
"""Parts of a call's rows that the kernels read."""


@cache
def own_kernel(name: str) -> HostKernel:
    """Compile a kernel of lab/sim/cuda, which replaces other kernels between the tested ones."""
    headers = {**cuda_sources(), f"{name}.cuh": (SOURCES / f"{name}.cuh").read_text()}
    return compile_kernel(f'#include "{name}.cuh"\n', headers, name=name)


def buffers_of(sizes: Sizes, by_rank: list[list[Call]]) -> dict[str, Buffer]:
    """Return all buffers of the ranks, by name; each name ends with the rank's number."""
    room, found = sizes.room, {}

    def add(name: str, data: Tensor, *, written: bool = False, alignment: int = 4) -> None:
        rank = int(name.rsplit(maxsplit=1)[-1])
        data = data if data.is_contiguous() else flat_memory(data)
        found[name] = Buffer(data, is_writable=written, alignment=alignment, is_dependent=True, rank=rank)

    for rank, calls in enumerate(by_rank):
        memory = torch.full((room.num_bytes,), POISON, dtype=torch.uint8)
        memory[room.flags :] = 0
        add(f"room {rank}", memory, written=True, alignment=16)
        add(f"state {rank}", torch.zeros(STATE_WORDS, dtype=torch.int32), written=True)
        add(f"report {rank}", torch.zeros(1, dtype=torch.int32), written=True)
        for i, call in enumerate(calls):
            rows = max(call.x.shape[0], 1)  # a buffer cannot be empty
            add(f"x {i} {rank}", call.x, alignment=16)
            if call.sf is not None:
                add(f"sf {i} {rank}", call.sf)
            add(f"ids {i} {rank}", call.topk_ids, alignment=call.topk_ids.element_size())
            add(f"p {i} {rank}", call.topk_weights)
            add(f"returns_to {i} {rank}", torch.full((rows, sizes.topk), 77, dtype=torch.int32), written=True)
            add(f"kept {i} {rank}", torch.full((room.results // 4,), 77, dtype=torch.int32), written=True)
            add(f"y {i} {rank}", call.y, alignment=16)
            for name in ROWS:
                add(f"{name} {i} {rank}", getattr(call.rows, name).contiguous())
            to = gathered_of(sizes)
            add(f"values {i} {rank}", to.values, written=True, alignment=16)
            if to.sfa is not None:
                add(f"sfa {i} {rank}", to.sfa.t(), written=True, alignment=16)
            for name in ("weights", "addresses"):
                add(f"{name} {i} {rank}", getattr(to, name), written=True, alignment=8)
            add(
                f"out {i} {rank}",
                torch.full((rows, sizes.hidden), torch.nan, dtype=torch.float32).bfloat16(),
                written=True,
                alignment=16,
            )
    return found


def launches_of(
    trial: PeerTrial, kernels: Mapping[str, HostKernel], by_rank: list[list[Call]], simulation: Simulation, limit: int
) -> list[list[KernelLaunch]]:
    """Return the launches of each rank, in order."""
    sizes, post, gather = trial.sizes, trial.post, trial.gather
    room = sizes.room
    addresses = tuple(simulation.address(f"room {rank}") for rank in range(sizes.ranks))
    found: list[list[KernelLaunch]] = []
    for rank, calls in enumerate(by_rank):
        state = simulation.tensor(f"state {rank}", torch.empty(STATE_WORDS, dtype=torch.int32))
        report = simulation.tensor(f"report {rank}", torch.empty(1, dtype=torch.int32))
        node = Node(room, addresses, rank, state, sizes.experts_here, report, limit, state)
        launches: list[KernelLaunch] = []

        def add(kernel: Kernel[Any], config: Config, values: Mapping[str, Any], grid: int, to: Any = launches) -> None:
            host = kernels.get(kernel.name) or compiled(kernel, config)
            to.append(KernelLaunch.of(host, config, kernel.packed(config, values), grid))

        for i, call in enumerate(calls):

            def at(name: str, like: Tensor, i: int = i, rank: int = rank) -> Tensor:
                return simulation.tensor(f"{name} {i} {rank}", like)

            returns_to = at("returns_to", call.returns_to)
            x, ids, p = at("x", call.x), at("ids", call.topk_ids), at("p", call.topk_weights)
            sf = None if call.sf is None else at("sf", call.sf)
            of_post = post_rows.values_of(x, ids, p, returns_to, node, sf)
            add(post_rows.KERNEL, post, of_post, post_rows.grid(post, node, simulation.num_sms))
            kept = simulation.address(f"kept {i} {rank}")
            params = KEEP.pack({"room": addresses[rank], "kept": kept, "words": room.results // 4})
            launches.append(KernelLaunch(own_kernel("keep_room"), [params], 64, 0, 1))
            memory = simulation.tensor(f"room {rank}", torch.empty(room.num_bytes, dtype=torch.uint8))
            values, sfa, *more = gathered_of(sizes)
            rest = zip(Gathered._fields[2:], more, strict=True)
            of_rows = (at(name, each) for name, each in rest if each is not None)
            of_scales = None if sfa is None else at("sfa", sfa.t()).t()
            placed = Gathered(at("values", values), of_scales, *of_rows)
            of_experts = call.rows._replace(**{name: at(name, getattr(call.rows, name)) for name in ROWS})
            grid = gather_rows.grid(gather, len(of_experts.row_of), *values.shape)
            add(gather_rows.KERNEL, gather, gather_rows.values_of(node, of_experts, placed), grid)
            places = {name: simulation.address(f"{name} {i} {rank}") for name in ("y", "addresses", "token_of")}
            stored = STORE.pack({**places, "rows": len(call.y), "n": sizes.hidden})
            launches.append(KernelLaunch(own_kernel("store_results"), [stored], 64, 0, 1))
            add(meet_ranks.KERNEL, meet_ranks.CONFIG, node.meeting(Way.BACK), 1)
            if call.x.shape[0]:
                results = memory[room.results : room.flags].view(torch.bfloat16).view(-1, sizes.hidden)
                out = at("out", call.out)
                of_sums = gather_weighted.values_of(results, returns_to, p, out)
                add(gather_weighted.KERNEL, SUM, of_sums, gather_weighted.grid(SUM, *out.shape))
        found.append(launches)
    return found


def gathered_of(sizes: Sizes) -> Gathered:
    """Make the outputs of gather_rows, in their state before the launch. Scales are the contiguous `sfa.t()`."""
    rows, hidden, is_fp8 = sizes.room.slots * sizes.topk, sizes.hidden, sizes.value_bytes == 1
    sfa = torch.full((ceil_div(hidden, 128), get_tma_aligned_size(rows, 4)), torch.nan, dtype=torch.float32)
    values = torch.full((rows, hidden), POISON, dtype=torch.uint8 if is_fp8 else torch.int16)
    weights, addresses = torch.full((rows,), torch.nan, dtype=torch.float32), torch.full((rows,), -1, dtype=torch.int64)
    return Gathered(values, sfa.t() if is_fp8 else None, weights, addresses)


def check_gathered(sizes: Sizes, call: Call, found: Mapping[str, Tensor], which: str) -> None:
    """Compare the results of gather_rows; rows without a token must be unchanged."""
    room, before = sizes.room, gathered_of(sizes)
    values, weights = found[f"values {which}"], found[f"weights {which}"]
    sfa = None if before.sfa is None else found[f"sfa {which}"].t()
    for row, place in enumerate(call.places):
        got = _bytes_of(row, values, sfa, weights)
        if place is None:
            assert before.weights is not None
            right = _bytes_of(row, before.values, before.sfa, before.weights)
        else:
            right = call.gathered[row, : room.weights + 4]
        same(f"row {row} gathered {which}", got, right)
    at = found[f"addresses {which}"]
    unused = [row for row, place in enumerate(call.places) if place is None]
    if not bool((at[unused] == -1).all()):
        raise ValueError(f"addresses {which}: expected no address for a row without a token")


def _bytes_of(row: int, *parts: Tensor | None) -> Tensor:
    whole = [x[row].reshape(-1).clone(memory_format=torch.contiguous_format) for x in parts if x is not None]
    return torch.cat([each.view(torch.uint8) for each in whole])


def check(sizes: Sizes, by_rank: list[list[Call]], found: Mapping[str, Tensor]) -> None:
    """Compare all results bit by bit. A slot without a route to this rank may hold anything."""
    room = sizes.room
    for rank, calls in enumerate(by_rank):
        for i, call in enumerate(calls):
            where = f"of call {i} on rank {rank}"
            tokens = call.x.shape[0]
            same(f"row_of {where}", found[f"returns_to {i} {rank}"][:tokens], call.returns_to)
            kept = found[f"kept {i} {rank}"].view(torch.uint8)
            ids = kept[room.ids :][: room.slots * room.topk * 4].view(torch.int32).view(room.slots, room.topk)
            same(f"ids {where}", ids, call.ids)
            rows = kept[: room.ids].view(room.max_tokens, room.row_bytes)
            same(f"rows {where}", rows[:tokens, : call.posted.shape[1]], call.posted)
            if i == 0 and bool((rows[tokens:] != POISON).any()):
                raise ValueError(f"rows {where}: expected none after the last token")
            check_gathered(sizes, call, found, f"{i} {rank}")
            out = found[f"out {i} {rank}"][:tokens]
            same(f"out {where}", out.view(torch.int16), call.out.view(torch.int16))
        if (missed := int(found[f"report {rank}"])) != 0:
            raise ValueError(f"rank {rank} missed rank {missed - 1}")


@dataclass(frozen=True)
class PeerTrial(Trial):
    """Calls of several ranks, which start at different times; a trial of post_rows."""

    kernel: ClassVar[Kernel[Any]] = post_rows.KERNEL
    needs_ranks = True
    sizes: Sizes
    seed: int = 0
    schedule: str | None = None
    num_threads: int = 64
    """Threads of a CTA, in post_rows and gather_rows."""

    @property
    def post(self) -> PostConfig:
        """Return the configuration of post_rows."""
        has_scales = self.sizes.value_bytes == 1
        return PostConfig(self.sizes.dtype, self.sizes.ids.itemsize, self.num_threads, has_scales=has_scales)

    @property
    def gather(self) -> GatherRowsConfig:
        """Return the configuration of gather_rows."""
        return GatherRowsConfig(self.num_threads, value_bytes=self.sizes.value_bytes)

    @property
    def configs(self) -> dict[Kernel[Any], Config]:
        """Return the tested kernels, each with its configuration."""
        return {post_rows.KERNEL: self.post, gather_rows.KERNEL: self.gather, meet_ranks.KERNEL: meet_ranks.CONFIG}

    @property
    def config(self) -> Config:
        """Return the configuration of the kernel of this trial."""
        return self.configs[self.kernel]

    @classmethod
    def drawn(cls, config: Any, seed: int) -> PeerTrial:
        """Draw the numbers of ranks and calls, and the number of tokens of each rank in each call."""
        draw = random.Random(seed)
        ranks, most, calls = draw.randint(1, 3), draw.randint(1, 5), draw.randint(1, 2)
        tokens = tuple(tuple(draw.randint(0, most) for _ in range(ranks)) for _ in range(calls))
        post = config if isinstance(config, PostConfig) else PostConfig(torch.bfloat16, draw.choice((4, 8)))
        value_bytes = getattr(config, "value_bytes", 1 if post.has_scales else 2)
        hidden = 128 * draw.randint(1, 5) if post.dtype == torch.float8_e4m3fn else 16 * draw.randint(1, 40)
        ids = torch.int64 if post.id_bytes == 8 else torch.int32
        of: dict[str, Any] = {"dtype": post.dtype, "ids": ids, "value_bytes": value_bytes}
        sizes = Sizes(tokens, most, hidden, draw.randint(1, 6), **of)
        return cls(sizes, seed, num_threads=64 if isinstance(config, MeetConfig) else config.num_threads)

    def headers(self) -> dict[str, str]:
        """Return the headers that all kernels include; each kernel adds its own configuration."""
        return dict(cuda_sources())

    def kernels(self, headers: Mapping[str, str] | None = None) -> dict[str, HostKernel]:
        """Compile the tested kernels, by name."""
        return {kernel.name: compiled(kernel, config, headers) for kernel, config in self.configs.items()}

    def run(self, headers: Mapping[str, str] | None = None) -> float:
        """Compile all kernels and check them."""
        return self.check_all(self.kernels(headers))

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare all results on every rank, bit for bit."""
        return self.check_all({**self.kernels(), **({} if kernel is None else {self.kernel.name: kernel})})

    def check_all(self, kernels: Mapping[str, HostKernel]) -> float:
        """Compare all results on every rank, bit for bit."""
        found, by_rank = self.simulated(kernels, LIMIT)
        check(self.sizes, by_rank, found)
        return 0.0

    def simulated(
        self, kernels: Mapping[str, HostKernel], limit: int, of_last: int | None = None
    ) -> tuple[dict[str, Tensor], list[list[Call]]]:
        """Run the calls, but only `of_last` launches of the last rank; return the final memory, and the calls."""
        by_rank = calls_of(self.sizes, self.seed)
        simulation = Simulation(
            buffers_of(self.sizes, by_rank),
            num_sms=self.num_sms,
            seed=self.seed,
            schedule=self.schedule,
            max_steps=4 * LIMIT,
        )
        *others, last = launches_of(self, kernels, by_rank, simulation, limit)
        run_ranks(simulation, [*others, last[:of_last]])
        return simulation.result().buffers, by_rank


@dataclass(frozen=True)
class GatherRowsTrial(PeerTrial):
    """The same calls, as a trial of gather_rows."""

    kernel = gather_rows.KERNEL


@dataclass(frozen=True)
class MeetTrial(PeerTrial):
    """The same calls, as a trial of meet_ranks."""

    kernel = meet_ranks.KERNEL


@dataclass(frozen=True)
class AbsentTrial(PeerTrial):
    """The last rank never starts, or stops before the second meeting: the others must report it, but set no flag."""

    launches: int = 0
    """Number of launches of the last rank: 1 means that it posts its rows."""

    def check_all(self, kernels: Mapping[str, HostKernel]) -> float:
        """Compare the ranks' reports, and check that nothing is written after them."""
        last = self.sizes.ranks - 1
        found, _ = self.simulated(kernels, LIMIT // 2, of_last=self.launches)
        room = self.sizes.room
        for rank in range(last):
            for what, got in (("report", found[f"report {rank}"][0]), ("error", found[f"state {rank}"][ERROR_WORD])):
                if int(got) != last + 1:
                    raise ValueError(f"{what} of rank {rank}: expected {last + 1}, got {int(got)}")
        for rank in range(self.sizes.ranks):  # no rank stores results where others may still read
            if self.launches == 0 and not bool((found[f"room {rank}"][room.results : room.flags] == POISON).all()):
                raise ValueError(f"results on rank {rank}: expected none")
        flags = found[f"room {last}"][room.flags :].view(torch.int32).view(2, -1)[:, :last]
        if flags.tolist() != [[1] * last, [self.launches] * last]:
            raise ValueError(f"flags on the absent rank: expected epoch 1 of earlier meetings, got {flags.tolist()}")
        return 0.0
