"""Mistakes in cast_depths, and the trials that must notice them. mutations_cast_tiles.py breaks its tiles."""

from __future__ import annotations

import torch

from deep_gemm.casts.cast_depths import Source, depths_cast_config
from lab.sim.cast_depths import DepthsTrial
from lab.sim.mutate import Mutation

TOKENS = depths_cast_config(torch.bfloat16, Source.TOKENS)
TOKENS_FP32 = depths_cast_config(torch.float32, Source.TOKENS)
WEIGHTED = depths_cast_config(torch.bfloat16, Source.WEIGHTED)
WEIGHTED_FP32 = depths_cast_config(torch.float32, Source.WEIGHTED)
SILU = depths_cast_config(torch.bfloat16, Source.SILU)
AT_ONCE = depths_cast_config(torch.bfloat16, Source.SILU_AT_ONCE)
ROWS = depths_cast_config(torch.bfloat16, Source.SILU_ROWS)
MANY = tuple(i % 3 for i in range(300))  # more groups than a CTA or a warp has threads

TRIALS = [
    DepthsTrial(TOKENS, (5, 0, 130, 16), 144, 1),
    DepthsTrial(TOKENS, (300, 1), 272, 2, "slow_warps"),
    DepthsTrial(TOKENS, MANY, 16, 3, behind=0),
    DepthsTrial(TOKENS, (20, 30), 16, 4, ends=(40, 10, 50), behind=0),
    *(DepthsTrial(TOKENS, MANY[:80], 16, seed, "slow_warps") for seed in (5, 6)),
    DepthsTrial(TOKENS_FP32, (5, 0, 130, 16), 144, 7),
    DepthsTrial(WEIGHTED, (5, 0, 130, 16), 144, 8),
    DepthsTrial(WEIGHTED_FP32, (5, 130), 48, 9),
    DepthsTrial(SILU, (5, 0, 130, 16), 144, 10),
    DepthsTrial(SILU, (140, 3), 272, 11, "slow_warps", limit=0.5),
    DepthsTrial(SILU, (20, 30), 80, 12, limit=1.5, parts="gradient"),
    DepthsTrial(SILU, (20, 30), 208, 13, parts="activation"),
    DepthsTrial(AT_ONCE, (5, 0, 130, 16), 128, 14, "slow_warps", limit=1.5),
    DepthsTrial(AT_ONCE, (140, 3), 256, 15),
    DepthsTrial(AT_ONCE, (20, 30), 128, 16, parts="gradient"),
    DepthsTrial(AT_ONCE, (20, 30), 256, 17, parts="activation"),
    DepthsTrial(AT_ONCE, (20,), 128, 18, "late_loads"),
    DepthsTrial(ROWS, (5, 0, 130, 16), 136, 19, limit=1.5),
    DepthsTrial(ROWS, (140, 3), 264, 20, "slow_warps"),
    DepthsTrial(ROWS, (20, 30), 72, 21, parts="gradient"),
    DepthsTrial(ROWS, (20, 30), 200, 22, "slow_lanes", parts="activation"),
]

_KERNEL, _TOKENS, _SILU = "cast_depths.cuh", "cast/columns_of_tokens.cuh", "cast/columns_of_silu.cuh"
_AT_ONCE, _GRADIENT = "cast/columns_of_silu_at_once.cuh", "cast/silu_gradient.cuh"
_ROWS = "cast/rows_of_silu.cuh"

MUTATIONS = [
    # The group of a tile
    Mutation("depths are aligned down", _KERNEL, "own_depth = ceil_div(rows, kDepthMultiple) * kDepthMultiple;", "own_depth = rows / kDepthMultiple * kDepthMultiple;"),
    Mutation("a group's columns lie without zeros between them", _KERNEL, "return ceil_div(rows, kDepthMultiple) * kDepthMultiple; }", "return rows; }"),
    Mutation("groups have tiles of whole rows alone", _KERNEL, "own_tiles = ceil_div(rows, kBlock)", "own_tiles = rows / kBlock"),
    Mutation("the first group begins behind its end", _KERNEL, "first_row = group == 0 ? 0 : end_of(p, group - 1);", "first_row = group == 0 ? end : end_of(p, group - 1);"),
    Mutation("a group begins where it ends", _KERNEL, "end_of(p, group - 1)", "end_of(p, group)"),
    Mutation("groups of a second round are left out", _KERNEL, "first < p.num_groups; first += kNumThreads", "first < p.num_groups && first < kNumThreads; first += kNumThreads"),
    Mutation("tiles of a second round are counted anew", _KERNEL, "tiles += tiles_before - own_tiles", "tiles -= own_tiles"),
    Mutation("depths of a second round are counted anew", _KERNEL, "depth += depth_before - own_depth", "depth -= own_depth"),
    Mutation("a group counts its own tiles as before it", _KERNEL, "tiles += tiles_before - own_tiles", "tiles += tiles_before"),
    Mutation("a group counts its own depth as before it", _KERNEL, "depth += depth_before - own_depth", "depth += depth_before"),
    Mutation("other warps' tiles are left out", _KERNEL, "tiles += warp < thread / 32 ? of_warp.x : 0", "tiles += 0"),
    Mutation("other warps' depths are left out", _KERNEL, "depth += warp < thread / 32 ? of_warp.y : 0", "depth += 0"),
    Mutation("a warp counts its own tiles twice", _KERNEL, "tiles += warp < thread / 32 ?", "tiles += warp <= thread / 32 ?"),
    Mutation("every group has the tile", _KERNEL, "if (tile >= tiles && tile - tiles < own_tiles && has_room)", "if (tile >= tiles && has_room)"),
    Mutation("groups lie outside of their room", _KERNEL, " && has_room)", ")"),
    Mutation("rows of another tile", _KERNEL, "(tile - tiles) * kBlock);", "tile * kBlock);"),
    Mutation("no group is found at first", _KERNEL, "  if (thread == 0) ptx::st_shared_v4_b32(&shared.group, 0, 0, 0, 0);\n", ""),
    Mutation("sums of warps are read before all are there", _KERNEL, "if (lane == 31) ptx::st_shared_v2_b32(shared.warps[thread / 32], tiles, depth);\n    ptx::syncthreads();", "if (lane == 31) ptx::st_shared_v2_b32(shared.warps[thread / 32], tiles, depth);"),
    Mutation("the group is read before it is there", _KERNEL, "(tile - tiles) * kBlock);\n    ptx::syncthreads();", "(tile - tiles) * kBlock);"),
    Mutation("ends are read before the kernel ahead has ended", _KERNEL, "  ptx::griddepcontrol_wait();\n", ""),
    Mutation("tiles without a group are cast", _KERNEL, "if (group.rows != 0) cast_tile_of", "cast_tile_of"),
    # Addresses of the results
    Mutation("groups' columns begin as far apart as their rows", _KERNEL, "uint64_t{group.first_depth} * k", "uint64_t{group.first_row} * k"),
    Mutation("scales of the tile's block are the group's first", _KERNEL, "return block - row / kBlock; }", "return block; }"),
    Mutation("scales begin at the first group's", _KERNEL, "scales + uint64_t{group.first_block()} * stride_of_block", "scales"),
    Mutation("scales of columns and blocks exchanged", _KERNEL, "target.column_scales_stride_m = stride_of_block, target.column_scales_stride_k = 4;", "target.column_scales_stride_m = 4, target.column_scales_stride_k = stride_of_block;"),
    Mutation("tiles begin at the group's first row", _KERNEL, "tile.row = group.row, tile.column = column;", "tile.row = 0, tile.column = column;"),
    # Tokens
    Mutation("tokens are those of the first group", _TOKENS, "p.token_of + group.first_row + row", "p.token_of + row"),
    Mutation("rows are not gathered", _TOKENS, "uint64_t{tokens[i]} * p.x_pitch", "uint64_t{group.first_row + tile.row} * p.x_pitch"),
    Mutation("rows of the next group are there", _TOKENS, "const bool is_there = tile.row + tile.row_of(i) < group.rows;", "const bool is_there = true;"),
    Mutation("tokens behind the group are read", _TOKENS, "row < group.rows ? ptx::ld_global_b32", "true ? ptx::ld_global_b32"),
    Mutation("rows have no weights", _TOKENS, "ptx::mul_rn(element_of(tile.pieces[i], e), weight)", "element_of(tile.pieces[i], e)", shows_in=WEIGHTED),
    Mutation("weights are those of the first group", _KERNEL, "p.row_weights + group.first_row + row", "p.row_weights + row", shows_in=WEIGHTED),
    Mutation("weights behind the group are read", _KERNEL, "row < group.rows ? ptx::ld_global_f32", "true ? ptx::ld_global_f32", shows_in=WEIGHTED),
    Mutation("both elements of a word are the first", _KERNEL, "compute(word * 2 + 1)", "compute(word * 2)", shows_in=WEIGHTED),
    # SiLU
    Mutation("gate is up", _SILU, "load_piece(gate + uint64_t{half} * kInputBytes,", "load_piece(gate,", shows_in=SILU),
    Mutation("gates of the first group", _SILU, "p.x + uint64_t{group.first_row + row} * p.x_pitch", "p.x + uint64_t{row} * p.x_pitch", shows_in=SILU),
    Mutation("ds of the first group", _SILU, "p.ds + uint64_t{group.first_row + row} * p.ds_pitch", "p.ds + uint64_t{row} * p.ds_pitch", shows_in=SILU),
    Mutation("ds lies as far apart as gate and up", _SILU, "uint64_t{group.first_row + row} * p.ds_pitch", "uint64_t{group.first_row + row} * p.x_pitch", shows_in=SILU),
    Mutation("rows of the next group have gates", _SILU, "const bool is_there = row < group.rows;", "const bool is_there = true;", shows_in=SILU),
    Mutation("the second half of rows is the first", _SILU, "compute(first + i, tile.row + tile.row_of(first + i), loaded[i]);", "compute(first + i, tile.row + tile.row_of(i), loaded[i]);", shows_in=SILU),
    Mutation("up's gradient is gate's", _SILU, "is_up ? silu.by_up : silu.by_gate", "silu.by_gate", shows_in=SILU),
    Mutation("gate's gradient is up's", _SILU, "is_up ? silu.by_up : silu.by_gate", "silu.by_up", shows_in=SILU),
    Mutation("up begins one tile late", _SILU, ">= half;  // equal", ">= half + kBlock;  // equal", shows_in=SILU),
    Mutation("columns of up are loaded from behind ds", _SILU, "is_up ? tile.column - half : tile.column", "tile.column", shows_in=SILU),
    Mutation("the gradient has no weight", _SILU, "ptx::mul_rn(element_of(of_row.ds, e), weight)", "element_of(of_row.ds, e)", shows_in=SILU),
    Mutation("gate beyond the limit has a gradient", _GRADIENT, "gate > limit ? 0.f : slope", "slope", shows_in=SILU),
    Mutation("up beyond the limit has a gradient", _GRADIENT, "ptx::abs_f32(up) > limit ? 0.f : silu}", "silu}", shows_in=SILU),
    Mutation("up below the limit has a gradient", _GRADIENT, "ptx::abs_f32(up) > limit", "up > limit", shows_in=SILU),
    Mutation("up is not cut for gate's derivative", _GRADIENT, "ptx::mul_rn(cut_up, steepness)", "ptx::mul_rn(up, steepness)", shows_in=SILU),
    Mutation("up is not cut in the activation", _GRADIENT, "ptx::mul_rn(silu, cut_up)", "ptx::mul_rn(silu, up)", shows_in=SILU),
    Mutation("gate is not cut in the activation", _GRADIENT, "cut_gate = ptx::min_nan(gate, limit)", "cut_gate = gate", shows_in=SILU),
    Mutation("the derivative is the sigmoid's alone", _GRADIENT, "more = 1.f + cut_gate - silu;", "more = 1.f;", shows_in=SILU),
    Mutation("rows of the gradient begin at the first group's", _KERNEL, "p.values + uint64_t{group.first_row} * p.k", "p.values", shows_in=SILU),
    Mutation("rows' scales begin at the first group's", _KERNEL, "p.scales + uint64_t{group.first_row} * 4", "p.scales", shows_in=SILU),
    Mutation("rows' scales lie one beside the other", _KERNEL, "target.scales_stride_k = p.scales_stride_k;", "target.scales_stride_k = 4;", shows_in=SILU),
    Mutation("sums are those of the activation alone", _SILU, "sum += ptx::mul_rn(s, element_of(of_row.ds, e));", "sum += s;", shows_in=SILU),
    Mutation("sums of half of a team", _SILU, "distance < kLanes; distance *= 2", "distance < kLanes / 2; distance *= 2", shows_in=SILU),
    Mutation("sums of rows behind the group are stored", _SILU, "if (tile.lane == 0 && row < group.rows)", "if (tile.lane == 0)", shows_in=SILU),
    Mutation("sums of all tiles lie in one place", _SILU, "p.sums + uint64_t{block} * p.rows + group.first_row", "p.sums + group.first_row", shows_in=SILU),
    Mutation("sums of all groups lie in one place", _SILU, "uint64_t{block} * p.rows + group.first_row", "uint64_t{block} * p.rows", shows_in=SILU),
    Mutation("rows of the activation are stored", _SILU, "cast_any_tile<false>(shared", "cast_any_tile<true>(shared", shows_in=SILU),
    Mutation("the activation's columns are as many as gate's and up's", _SILU, "p.activated_stride_of_block, half)", "p.activated_stride_of_block, p.k)", shows_in=SILU),
    Mutation("the activation's tiles are the gradient's", _SILU, "if (block < p.gradient_tiles)", "if (block <= p.gradient_tiles)", shows_in=SILU),
    Mutation("tiles of the activation begin behind the gradient's", _SILU, "group, block - p.gradient_tiles);", "group, block);", shows_in=SILU),
    # SiLU's activation and both gradients by one CTA (SILU_AT_ONCE)
    Mutation("gate at once is up", _AT_ONCE, "slot_of(shared, kUp, i), gate + up)", "slot_of(shared, kUp, i), gate)", shows_in=AT_ONCE),
    Mutation("columns at once are the first tile's", _AT_ONCE, "(tile.column + column_of(tile.lane, 0)) * kInputBytes", "column_of(tile.lane, 0) * kInputBytes", shows_in=AT_ONCE),
    Mutation("gates at once of the first group", _AT_ONCE, "p.x + uint64_t{group.first_row + row} * p.x_pitch", "p.x + uint64_t{row} * p.x_pitch", shows_in=AT_ONCE),
    Mutation("ds at once of the first group", _AT_ONCE, "p.ds + uint64_t{group.first_row + row} * p.ds_pitch", "p.ds + uint64_t{row} * p.ds_pitch", shows_in=AT_ONCE),
    Mutation("ds at once lies as far apart as gate and up", _AT_ONCE, "uint64_t{group.first_row + row} * p.ds_pitch", "uint64_t{group.first_row + row} * p.x_pitch", shows_in=AT_ONCE),
    Mutation("rows of the next group are there at once", _AT_ONCE, "if (row < group.rows) {", "if (true) {", shows_in=AT_ONCE),
    Mutation("rows behind the group are not zeros", _AT_ONCE, "which < kPieces; ++which) store_slot", "which < kDs; ++which) store_slot", shows_in=AT_ONCE),
    Mutation("all threads share a piece", _AT_ONCE, ".pieces[i][ptx::thread_index()]", ".pieces[i][0]", shows_in=AT_ONCE),
    Mutation("pieces are read before they are there", _AT_ONCE, "  ptx::cp_async_wait_all();\n", "", shows_in=AT_ONCE),
    Mutation("the gradient at once has no weight", _GRADIENT, "weighted = ptx::mul_rn(of_s, weight)", "weighted = of_s", shows_in=AT_ONCE),
    Mutation("all rows have the first one's weight", _AT_ONCE, "ptx::lane_index() - tile.lane + i)", "ptx::lane_index() - tile.lane)", shows_in=AT_ONCE),
    Mutation("all teams of a warp have the first one's weights", _AT_ONCE, "ptx::lane_index() - tile.lane + i)", "i)", shows_in=AT_ONCE),
    Mutation("up's gradient at once is gate's", _GRADIENT, "ptx::mul_rn(weighted, silu.by_up)", "ptx::mul_rn(weighted, silu.by_gate)", shows_in=AT_ONCE),
    Mutation("gate's gradient at once is up's", _GRADIENT, "ptx::mul_rn(weighted, silu.by_gate)", "ptx::mul_rn(weighted, silu.by_up)", shows_in=AT_ONCE),
    Mutation("the activation stays ds", _GRADIENT, "    ds.words[word] = ptx::pack_bf16(s[0], s[1]);\n", "", shows_in=AT_ONCE),
    Mutation("both of a word are its first", _GRADIENT, "ptx::pack_bf16(by_up[0], by_up[1])", "ptx::pack_bf16(by_up[0], by_up[0])", shows_in=AT_ONCE),
    Mutation("what becomes of up is not stored", _AT_ONCE, " store_slot(shared, kUp, i, up),", "", shows_in=AT_ONCE),
    Mutation("sums at once are those of the activation alone", _GRADIENT, "sum += ptx::mul_rn(silu.s, of_s);", "sum += silu.s;", shows_in=AT_ONCE),
    Mutation("sums at once of half of a team", _AT_ONCE, "distance < kLanes; distance *= 2", "distance < kLanes / 2; distance *= 2", shows_in=AT_ONCE),
    Mutation("sums at once of rows behind the group are stored", _AT_ONCE, "if (tile.lane == 0 && row < group.rows)", "if (tile.lane == 0)", shows_in=AT_ONCE),
    Mutation("sums at once of all tiles lie in one place", _AT_ONCE, "p.sums + uint64_t{block} * p.rows + group.first_row", "p.sums + group.first_row", shows_in=AT_ONCE),
    Mutation("sums that nobody asks for are stored", _AT_ONCE, "    if (p.activated == nullptr) continue;\n", "", shows_in=AT_ONCE),
    Mutation("a tile is cast where others still read", _AT_ONCE, "  ptx::syncthreads();  // all threads have", "  // all threads have", shows_in=AT_ONCE),
    Mutation("rows of the activation at once are stored", _AT_ONCE, "cast_any_tile<false>(shared", "cast_any_tile<true>(shared", shows_in=AT_ONCE),
    Mutation("the activation is cast of up", _AT_ONCE, "take_tile(shared, tile, kDs, column)", "take_tile(shared, tile, kUp, column)", shows_in=AT_ONCE),
    Mutation("no activation is asked for, and it is cast", _AT_ONCE, "if (p.activated != nullptr) {", "if (true) {", shows_in=AT_ONCE),
    Mutation("no gradient is asked for, and it is cast", _AT_ONCE, "  if (p.columns == nullptr) return;\n", "", shows_in=AT_ONCE),
    Mutation("gate alone has a gradient", _AT_ONCE, "which <= kUp; ++which)\n    cast", "which < kUp; ++which)\n    cast", shows_in=AT_ONCE),
    Mutation("up's gradient lies where gate's does", _AT_ONCE, "column + (which == kUp ? half : 0)", "column", shows_in=AT_ONCE),
    # SiLU along rows alone
    Mutation("gate of rows is up", _ROWS, "load_piece(at + half * kInputBytes, row", "load_piece(at, row", shows_in=ROWS),
    Mutation("rows of gates lie as far apart as those of ds", _ROWS, "* p.x_pitch", "* p.ds_pitch", shows_in=ROWS),
    Mutation("rows of ds lie as far apart as gates", _ROWS, "* p.ds_pitch", "* p.x_pitch", shows_in=ROWS),
    Mutation("ds of rows is the first tile's", _ROWS, "row < group.rows, tile.column, half, tile.lane);\n    }", "row < group.rows, 0, half, tile.lane);\n    }", shows_in=ROWS),
    Mutation("gates of rows behind the last are loaded", _ROWS, "load_piece(at, row < group.rows,", "load_piece(at, true,", shows_in=ROWS),
    Mutation("rows of a step are the first step's", _ROWS, "const uint32_t row = tile.row + tile.row_of(first + i);\n      float", "const uint32_t row = tile.row + tile.row_of(i);\n      float", shows_in=ROWS),
    Mutation("one row of a step is computed", _ROWS, "weight_of(p, group, row), gate[i], up[i], ds[i]", "weight_of(p, group, row), gate[0], up[0], ds[0]", shows_in=ROWS),
    Mutation("the activation of rows has no weight", _ROWS, "compute_row<true>", "compute_row<false>", shows_in=ROWS),
    Mutation("one of two activations has a weight", _GRADIENT, ", s[1] = ptx::mul_rn(s[1], weight);", ";", shows_in=ROWS),
    Mutation("sums of rows of half of a team", _ROWS, "distance < kLanes; distance *= 2", "distance < kLanes / 2; distance *= 2", shows_in=ROWS),
    Mutation("rows behind the last are stored", _ROWS, "      if (row >= group.rows) continue;\n", "", shows_in=ROWS),
    Mutation("sums of rows lie in one place", _ROWS, "p.sums + uint64_t{block} * p.rows + at", "p.sums + at", shows_in=ROWS),
    Mutation("columns behind the last are stored", _ROWS, "      if (first_byte >= half * kInputBytes) continue;\n", "", shows_in=ROWS),
    Mutation("rows of the gradient lie as far apart as the activation's", _ROWS, "at * p.k * kInputBytes + first_byte;", "at * half * kInputBytes + first_byte;", shows_in=ROWS),
    Mutation("up's gradient of rows lies on gate's", _ROWS, "store_piece(gradient + half * kInputBytes, up[i])", "store_piece(gradient, up[i])", shows_in=ROWS),
    Mutation("up's gradient of rows is gate's", _ROWS, "store_piece(gradient + half * kInputBytes, up[i])", "store_piece(gradient + half * kInputBytes, gate[i])", shows_in=ROWS),
    Mutation("no gradient of rows is asked for, and it is stored", _ROWS, "if (p.values != nullptr) store_piece", "if (true) store_piece", shows_in=ROWS),
    Mutation("no activation of rows is asked for, and it is stored", _ROWS, "if (p.activated != nullptr) store_piece", "if (true) store_piece", shows_in=ROWS),
    Mutation("the activation of rows is gate's gradient", _ROWS, "+ at * half * kInputBytes + first_byte, ds[i])", "+ at * half * kInputBytes + first_byte, gate[i])", shows_in=ROWS),
    Mutation("sums of rows that nobody asks for are stored", _ROWS, "if (p.sums != nullptr && tile.lane == 0)", "if (tile.lane == 0)", shows_in=ROWS),
]  # fmt: skip
