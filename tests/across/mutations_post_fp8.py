"""Ways to break post_rows of tokens that are FP8 already, and calls of some ranks that notice them.

The rest of the kernel is that of other tokens: mutations_peers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deep_gemm.across.post_rows import PostConfig
from deep_gemm.casts.fp8 import per_token_cast_to_fp8
from deep_gemm.core.meeting import STATE_WORDS, Node, Room
from deep_gemm.core.sources import cuda_sources
from lab.sim import post_rows as sim_post
from lab.sim.mutate import Mutation
from lab.sim.ranks import run_ranks
from lab.sim.simulate import Buffer, Simulation

ONE_IN = 1
LIMIT = 1 << 20
POISON = 0xA5
EXPERTS_HERE = 2


@dataclass(frozen=True)
class PostTrial:
    """One call of each rank, whose token t has its expert t of the next rank, and one of its own."""

    tokens: tuple[int, ...]
    hidden: int
    seed: int
    ids: torch.dtype = torch.int64
    schedule: str | None = None

    @property
    def config(self) -> PostConfig:
        return PostConfig(torch.float8_e4m3fn, self.ids.itemsize, num_threads=32)

    @property
    def room(self) -> Room:
        return Room(len(self.tokens), max(self.tokens), self.hidden, topk=2)

    def headers(self) -> dict[str, str]:
        return dict(cuda_sources())

    def run(self, headers: Mapping[str, str]) -> None:
        g, room, ranks = torch.Generator().manual_seed(self.seed), self.room, len(self.tokens)
        kernel = sim_post.compile_config(self.config, headers)
        buffers, rows = {}, []
        for rank, tokens in enumerate(self.tokens):
            values, scales = per_token_cast_to_fp8(torch.randn(tokens, self.hidden, generator=g))
            p = torch.randn(tokens, 2, generator=g)
            owners = torch.tensor([(rank + 1) % ranks, rank]).expand(tokens, 2)
            ids = owners * EXPERTS_HERE + torch.arange(tokens)[:, None] % EXPERTS_HERE
            parts = [each.contiguous().view(torch.uint8) for each in (values, scales, p)]
            rows.append(torch.cat(parts, dim=1))
            memory = torch.full((room.num_bytes,), POISON, dtype=torch.uint8)
            memory[room.flags :] = 0
            # Rows of a wider matrix: pitches are not sizes.
            wide = torch.full((tokens, self.hidden + 32), 0x7F, dtype=torch.uint8)
            wide[:, : self.hidden] = values.view(torch.uint8)
            wide_scales = torch.full((tokens, scales.shape[1] + 1), torch.nan)
            wide_scales[:, :-1] = scales
            zeros = torch.zeros(max(tokens, 1) * max(ranks, 2), dtype=torch.int32)
            given = {
                "room": (memory, True, 16),
                "state": (torch.zeros(STATE_WORDS, dtype=torch.int32), True, 4),
                "report": (torch.zeros(1, dtype=torch.int32), True, 4),
                "x": (wide, False, 16),
                "sf": (wide_scales, False, 4),
                "ids": (ids.to(self.ids), False, self.ids.itemsize),
                "p": (p, False, 4),
                "row_of": (zeros, True, 4),
            }
            for name, (data, written, alignment) in given.items():
                buffer = Buffer(data, is_writable=written, alignment=alignment, is_dependent=True, rank=rank)
                buffers[f"{name} {rank}"] = buffer
        simulation = Simulation(buffers, num_sms=2, seed=self.seed, schedule=self.schedule, max_steps=4 * LIMIT)
        addresses = tuple(simulation.address(f"room {rank}") for rank in range(ranks))
        launches = []
        for rank, tokens in enumerate(self.tokens):
            state, report, row_of, ids, p = (
                simulation.tensor(f"{name} {rank}", torch.as_tensor(buffers[f"{name} {rank}"].data))
                for name in ("state", "report", "row_of", "ids", "p")
            )
            x = simulation.tensor(f"x {rank}", torch.as_tensor(buffers[f"x {rank}"].data)).view(torch.float8_e4m3fn)[
                :, : self.hidden
            ]
            sf = simulation.tensor(f"sf {rank}", torch.as_tensor(buffers[f"sf {rank}"].data))[:, :-1]
            node = Node(room, addresses, rank, state, EXPERTS_HERE, torch.empty(0), report, LIMIT)
            launch = sim_post.launch_of(kernel, self.config, x, ids, p, row_of, node, 2, sf)
            assert launch is not None
            assert tokens == len(x)
            launches.append([launch])
        run_ranks(simulation, launches)
        found = simulation.result().buffers
        for rank in range(ranks):
            memory = torch.as_tensor(found[f"room {rank}"])
            posted = memory[: room.ids].view(room.max_tokens, room.row_bytes)
            tokens = self.tokens[rank]
            got = posted[:tokens, : rows[rank].shape[1]]
            if not torch.equal(got, rows[rank]):
                at = (got != rows[rank]).nonzero()[0].tolist()
                raise ValueError(f"rows of rank {rank}: wrong at {at}")
            if bool((posted[tokens:] != POISON).any()):
                raise ValueError(f"a row on rank {rank} of a token that it lacks")


TRIALS = [
    PostTrial((3, 2), 768, 1),
    PostTrial((1, 4), 256, 2, torch.int32, "slow_warps"),
    PostTrial((2, 0, 3), 1280, 3, schedule="late_stores"),
]
_COPY, _POST = "post/copy_token.cuh", "post_rows.cuh"
MUTATIONS = [
    Mutation("the first token's values", _COPY, "p.x + uint64_t{token} * p.x_pitch", "p.x"),
    Mutation("the first token's scales", _COPY, "p.sf + uint64_t{token} * p.sf_pitch", "p.sf"),
    Mutation("scales lie without gaps", _COPY, "uint64_t{token} * p.sf_pitch", "uint64_t{token} * blocks * 4"),
    Mutation("values lie without gaps", _COPY, "uint64_t{token} * p.x_pitch", "uint64_t{token} * p.hidden"),
    Mutation("16 values for each thread", _COPY, "at += kNumThreads * 16", "at += p.hidden"),
    Mutation("the last values are not copied", _COPY, "at < p.hidden;", "at + 16 < p.hidden;"),
    Mutation("values as far as scales go", _COPY, "at < p.hidden;", "at < p.hidden + blocks * 4;"),
    Mutation("words of a piece swapped", _COPY, "piece.x, piece.y, piece.z, piece.w", "piece.x, piece.z, piece.y, piece.w"),
    Mutation("one scale", _COPY, "block < blocks;", "block < 1;"),
    Mutation("scales one too far", _COPY, "row + p.hidden + block * 4", "row + p.hidden + block * 4 + 4"),
    Mutation("the first scale for all blocks", _COPY, "ptx::ld_global_f32(scales + block * 4)", "ptx::ld_global_f32(scales)"),
    Mutation("weights lie over scales", _POST, "(blocks + j) * 4, weight", "j * 4, weight"),
]  # fmt: skip
