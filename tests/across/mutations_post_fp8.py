"""Ways to break post_rows of tokens that are FP8 already, or stay BF16, and the calls of ranks that must notice.

mutations_peers.py breaks the code of this kernel that all kinds of tokens share.
"""

from __future__ import annotations

import torch

from lab.sim.mutate import Mutation
from lab.sim.peers import PeerTrial
from lab.sim.rank_calls import Sizes

FP8 = torch.float8_e4m3fn
TRIALS = [
    PeerTrial(Sizes(((3, 2),), 3, 768, 2, dtype=FP8), 1, num_threads=32),
    PeerTrial(Sizes(((1, 4),), 4, 256, 2, dtype=FP8, ids=torch.int32), 2, "slow_warps", num_threads=32),
    PeerTrial(Sizes(((2, 0, 3),), 3, 1280, 2, dtype=FP8), 3, "late_stores", num_threads=32),
    PeerTrial(Sizes(((3, 2),), 3, 144, 2, value_bytes=2), 4, num_threads=32),
]
_COPY, _POST, _GATHER = "post/copy_token.cuh", "post_rows.cuh", "gather_rows.cuh"
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
    Mutation("rows of BF16 have room for scales", _POST, "kHasScales ? ceil_div(p.hidden, kBlock) : 0", "ceil_div(p.hidden, kBlock)"),
    Mutation("results of BF16 lie as far apart as bytes of rows", _GATHER, "p.hidden / kValueBytes", "p.hidden"),
    Mutation("weights lie over scales", _POST, "(blocks + j) * 4, weight", "j * 4, weight"),
]  # fmt: skip
