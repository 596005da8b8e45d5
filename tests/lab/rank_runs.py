"""The calls of rank_cases.py in the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from rank_cases import Call, Sizes
from torch import Tensor

from deep_gemm.across.gather_rows import Gathered, GatherRowsConfig
from deep_gemm.across.post_rows import PostConfig
from deep_gemm.core.check.layout import ceil_div, get_tma_aligned_size
from deep_gemm.core.meeting import STATE_WORDS, Node
from deep_gemm.core.params import Field, Kind, Params
from deep_gemm.core.sources import cuda_sources
from deep_gemm.moe import gather_weighted
from deep_gemm.moe.gather_weighted import GatherConfig
from lab.sim import gather_rows as sim_gather_rows
from lab.sim import gather_weighted as sim_gather
from lab.sim import meet_ranks as sim_meet
from lab.sim import post_rows as sim_post
from lab.sim.library import HostKernel, compile_kernel
from lab.sim.simulate import Buffer, KernelLaunch, Simulation

KEEP = Params("KeepParams", Field("room", Kind.POINTER), Field("kept", Kind.POINTER), Field("words", Kind.UINT32))
STORE = Params(
    "StoreParams",
    *(Field(name, Kind.POINTER) for name in ("y", "addresses", "token_of")),
    *(Field(name, Kind.UINT32) for name in ("rows", "n")),
)
SOURCES = Path(__file__).parent / "sim_kernels"
SUM = GatherConfig(torch.float32)
GATHER = GatherRowsConfig(num_threads=64)
LIMIT = 1 << 20
"""Steps that a wait may take."""
POISON = 0xA5


@cache
def own_kernel(name: str) -> HostKernel:
    headers = {**cuda_sources(), f"{name}.cuh": (SOURCES / f"{name}.cuh").read_text()}
    return compile_kernel(f'#include "{name}.cuh"\n', headers, name=name)


@cache
def sum_kernel() -> HostKernel:
    return sim_gather.compile_config(SUM)


@dataclass(frozen=True)
class Kernels:
    post_config: PostConfig
    post: HostKernel
    gather: HostKernel
    meet: HostKernel


def post_config(sizes: Sizes) -> PostConfig:
    return PostConfig(sizes.dtype, sizes.ids.itemsize, num_threads=64)


def compiled(sizes: Sizes, edits: Mapping[str, str] | None = None) -> Kernels:
    config = post_config(sizes)
    gather, meet = sim_gather_rows.compile_config(GATHER, edits), sim_meet.compile_config(edits)
    return Kernels(config, sim_post.compile_config(config, edits), gather, meet)


def buffers_of(sizes: Sizes, by_rank: list[list[Call]]) -> dict[str, Buffer]:
    """All that the ranks have, by name; the rank's number ends the name of each."""
    room, found = sizes.room, {}

    def add(name: str, data: Tensor, *, written: bool = False, alignment: int = 4) -> None:
        rank = int(name.rsplit(maxsplit=1)[-1])
        found[name] = Buffer(data, is_writable=written, alignment=alignment, is_dependent=True, rank=rank)

    for rank, calls in enumerate(by_rank):
        memory = torch.full((room.num_bytes,), POISON, dtype=torch.uint8)
        memory[room.flags :] = 0
        add(f"room {rank}", memory, written=True, alignment=16)
        add(f"state {rank}", torch.zeros(STATE_WORDS, dtype=torch.int32), written=True)
        add(f"report {rank}", torch.zeros(1, dtype=torch.int32), written=True)
        for i, call in enumerate(calls):
            rows = max(call.x.shape[0], 1)  # no buffer is empty
            add(f"x {i} {rank}", call.x, alignment=16)
            add(f"ids {i} {rank}", call.topk_ids, alignment=call.topk_ids.element_size())
            add(f"p {i} {rank}", call.topk_weights)
            add(f"returns_to {i} {rank}", torch.full((rows, sizes.topk), 77, dtype=torch.int32), written=True)
            add(f"kept {i} {rank}", torch.full((room.results // 4,), 77, dtype=torch.int32), written=True)
            add(f"y {i} {rank}", call.y, alignment=16)
            for name in ("row_of", "token_of"):
                add(f"{name} {i} {rank}", getattr(call.rows, name).contiguous())
            to = gathered_of(sizes)
            add(f"values {i} {rank}", to.values, written=True, alignment=16)
            add(f"sfa {i} {rank}", to.sfa.t(), written=True, alignment=16)
            for name in ("weights", "addresses"):
                add(f"{name} {i} {rank}", getattr(to, name), written=True, alignment=8)
            add(f"out {i} {rank}", torch.full((rows, sizes.hidden), torch.nan).bfloat16(), written=True, alignment=16)
    return found


def launches_of(
    sizes: Sizes, kernels: Kernels, by_rank: list[list[Call]], simulation: Simulation, limit: int, num_sms: int
) -> list[list[KernelLaunch]]:
    """The kernels of each rank, in order."""
    room = sizes.room
    addresses = tuple(simulation.address(f"room {rank}") for rank in range(sizes.ranks))
    found: list[list[KernelLaunch]] = []
    for rank, calls in enumerate(by_rank):
        state = simulation.tensor(f"state {rank}", torch.empty(STATE_WORDS, dtype=torch.int32))
        report = simulation.tensor(f"report {rank}", torch.empty(1, dtype=torch.int32))
        node = Node(room, addresses, rank, state, sizes.experts_here, torch.empty(0), report, limit)
        launches: list[KernelLaunch] = []
        for i, call in enumerate(calls):

            def at(name: str, like: Tensor, i: int = i, rank: int = rank) -> Tensor:
                return simulation.tensor(f"{name} {i} {rank}", like)

            returns_to = at("returns_to", call.returns_to)
            x, ids, p = at("x", call.x), at("ids", call.topk_ids), at("p", call.topk_weights)
            launches.append(sim_post.launch_of(kernels.post, kernels.post_config, x, ids, p, returns_to, node, num_sms))
            kept = KEEP.pack(
                {"room": addresses[rank], "kept": simulation.address(f"kept {i} {rank}"), "words": room.results // 4}
            )
            launches.append(KernelLaunch(own_kernel("keep_room"), [kept], 64, 0, 1))
            memory = simulation.tensor(f"room {rank}", torch.empty(room.num_bytes, dtype=torch.uint8))
            like = gathered_of(sizes)
            assert like.weights is not None
            assert like.addresses is not None
            to = Gathered(
                at("values", like.values),
                at("sfa", like.sfa.t()).t(),
                at("weights", like.weights),
                at("addresses", like.addresses),
            )
            of_experts = call.rows._replace(
                row_of=at("row_of", call.rows.row_of), token_of=at("token_of", call.rows.token_of)
            )
            launches.append(sim_gather_rows.launch_of(kernels.gather, GATHER, node, of_experts, to))
            places = {name: simulation.address(f"{name} {i} {rank}") for name in ("y", "addresses", "token_of")}
            stored = STORE.pack({**places, "rows": len(call.y), "n": sizes.hidden})
            launches.append(KernelLaunch(own_kernel("store_results"), [stored], 64, 0, 1))
            launches.append(sim_meet.launch_of(kernels.meet, node))
            if call.x.shape[0]:
                results = memory[room.results : room.flags].view(torch.bfloat16).view(-1, sizes.hidden)
                out = at("out", call.out)
                params = gather_weighted.params_of(results, returns_to, p, out)
                launches.append(
                    KernelLaunch(sum_kernel(), [params], SUM.num_threads, 0, gather_weighted.grid(SUM, *out.shape))
                )
        found.append(launches)
    return found


def gathered_of(sizes: Sizes) -> Gathered:
    """Where rows are gathered to, as it is before. Scales lie as `sfa.t()`, contiguous."""
    rows, hidden = sizes.room.slots * sizes.topk, sizes.hidden
    sfa = torch.full((ceil_div(hidden, 128), get_tma_aligned_size(rows, 4)), torch.nan)
    values = torch.full((rows, hidden), POISON, dtype=torch.uint8)
    return Gathered(values, sfa.t(), torch.full((rows,), torch.nan), torch.full((rows,), -1, dtype=torch.int64))


def check_gathered(sizes: Sizes, call: Call, found: Mapping[str, Tensor], which: str) -> None:
    """Compare what gather_rows wrote; rows without a token stay as they were."""
    room, before = sizes.room, gathered_of(sizes)
    values, sfa = found[f"values {which}"], found[f"sfa {which}"].t()
    weights = found[f"weights {which}"]
    for row, place in enumerate(call.places):
        got = torch.cat([each[row].reshape(-1).view(torch.uint8) for each in (values, sfa.contiguous(), weights)])
        if place is None:
            assert before.weights is not None
            parts = before.values, before.sfa.contiguous(), before.weights
            right = torch.cat([each[row].reshape(-1).view(torch.uint8) for each in parts])
        else:
            right = call.gathered[row, : room.weights + 4]
        _same(f"row {row} gathered {which}", got, right)
    at = found[f"addresses {which}"]
    unused = [row for row, place in enumerate(call.places) if place is None]
    if not bool((at[unused] == -1).all()):
        raise ValueError(f"addresses {which}: expected no address for a row without a token")


def check(sizes: Sizes, by_rank: list[list[Call]], found: Mapping[str, Tensor]) -> None:
    """Compare all that came, bit by bit. A slot without a route here may hold anything."""
    room = sizes.room
    for rank, calls in enumerate(by_rank):
        for i, call in enumerate(calls):
            where = f"of call {i} on rank {rank}"
            tokens = call.x.shape[0]
            _same(f"row_of {where}", found[f"returns_to {i} {rank}"][:tokens], call.returns_to)
            kept = found[f"kept {i} {rank}"].view(torch.uint8)
            ids = kept[room.ids :][: room.slots * room.topk * 4].view(torch.int32).view(room.slots, room.topk)
            _same(f"ids {where}", ids, call.ids)
            rows = kept[: room.ids].view(room.max_tokens, room.row_bytes)
            _same(f"rows {where}", rows[:tokens, : call.posted.shape[1]], call.posted)
            if i == 0 and bool((rows[tokens:] != POISON).any()):
                raise ValueError(f"rows {where}: expected none of tokens that are not there")
            check_gathered(sizes, call, found, f"{i} {rank}")
            out = found[f"out {i} {rank}"][:tokens]
            _same(f"out {where}", out.view(torch.int16), call.out.view(torch.int16))
        if (missed := int(found[f"report {rank}"])) != 0:
            raise ValueError(f"rank {rank} missed rank {missed - 1}")


def _same(name: str, got: Tensor, right: Tensor) -> None:
    if not torch.equal(got, right):
        at = (got != right).nonzero()[0].tolist()
        raise ValueError(f"{name}: expected {right[tuple(at)]} at {at}, got {got[tuple(at)]}")
