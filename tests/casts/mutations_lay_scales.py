"""Mistakes in the kernel that copies scales to another layout, and the trials that must notice them."""

from __future__ import annotations

from lab.sim.lay_scales import ScalesTrial
from lab.sim.mutate import Mutation

TRIALS = [
    ScalesTrial(2, 70, 37, False, 1),
    ScalesTrial(3, 67, 35, True, 2, "slow_warps"),
    ScalesTrial(1, 130, 40, False, 3, "slow_lanes"),
    ScalesTrial(1, 3, 5, False, 4, "slow_cta"),
    *(ScalesTrial(2, 70, 37, is_m_major, 5, are_words=True) for is_m_major in (False, True)),
]

_KERNEL = "lay_scales.cuh"
MUTATIONS = [
    Mutation("scales are read before the kernel ahead has ended", _KERNEL, "  ptx::griddepcontrol_wait();\n", ""),
    Mutation("the tile is read before all have stored", _KERNEL, "  ptx::syncthreads();\n", ""),
    Mutation("rows of the tile are blocks", _KERNEL, "ptx::st_shared_b32(&shared.tile[at.block][at.row]", "ptx::st_shared_b32(&shared.tile[at.row % kBlocks][at.block]"),
    Mutation("strides swapped", _KERNEL, "row * p.stride_m + (are_words ? block / 4 : block) * p.stride_k", "row * p.stride_k + block * p.stride_m"),
    Mutation("all groups are the first", _KERNEL, "group * p.group_stride + ", ""),
    Mutation("groups are written one upon the other", _KERNEL, "(group * p.k_blocks + block)", "block"),
    Mutation("tiles counted along m first", _KERNEL, "tile / tiles_k * kRows, first_block = tile % tiles_k", "tile % tiles_k * kRows, first_block = tile / tiles_k"),
    Mutation("the tiles of a group are those along m", _KERNEL, "group = ptx::block_index() / (tiles_m * tiles_k)", "group = ptx::block_index() / tiles_m"),
    Mutation("rows past the last are read", _KERNEL, "if (row < p.m && block < p.k_blocks)\n      words", "if (block < p.k_blocks)\n      words"),
    Mutation("blocks past the last are read", _KERNEL, "if (row < p.m && block < p.k_blocks)\n      words", "if (row < p.m)\n      words"),
    Mutation("the padding is written", _KERNEL, "if (row < p.m && block < p.k_blocks)\n      ptx::st", "if (row < p.pitch && block < p.k_blocks)\n      ptx::st"),
    Mutation("blocks past the last are written", _KERNEL, "if (row < p.m && block < p.k_blocks)\n      ptx::st", "if (row < p.m)\n      ptx::st"),
    Mutation("rows lie m apart", _KERNEL, "* p.pitch + row", "* p.m + row"),
    Mutation("writes follow the way of the reads", _KERNEL, "place_of(i, true)", "Place{place_of(i, true).block, place_of(i, true).row}"),
    Mutation("the lowest exponent is zero", "types.cuh", "s == 0 ? 0x400000 : ", ""),
    Mutation("words are numbers", _KERNEL, "are_words = p.are_words != 0;", "are_words = false;"),
    Mutation("a word for each scale", _KERNEL, "(are_words ? block / 4 : block)", "block"),
    Mutation("a word's first exponent for all", _KERNEL, "bits_of_scale_at(at.block, words[i])", "bits_of_scale_at(0, words[i])"),
    Mutation("a thread has one element", _KERNEL, "index = i * kNumThreads + ptx", "index = ptx"),
]  # fmt: skip
