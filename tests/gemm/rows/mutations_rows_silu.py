"""Ways to break fp8_gemm's code for the two products of an expert, and the trials that must notice.

The first product activates and casts on its way out; the second takes a scale of A for each 64 columns.
"""

from __future__ import annotations

from deep_gemm.core.check.recipes import PER_64
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds import epilogues, works
from deep_gemm.gemm.kinds.output import Output
from lab.sim.mutate import Mutation
from lab.sim.rows import RowsTrial
from lab.sim.rows_silu import SiluTrial

SILU = Output(work=works.ENDS, epilogue=epilogues.SILU)
BY_64 = Output(work=works.IDS, sfa=PER_64)
LOW, USUAL, CUT = (tile_config(*tile, SILU, k=384) for tile in ((64, 128), (128, 128), (128, 256)))
HALVES = tile_config(64, 256, Output(work=works.ENDS, epilogue=epilogues.SILU_OF_HALVES), k=384)
SECOND_LOW, SECOND, SECOND_UNITS = (tile_config(*tile, BY_64, k=384) for tile in ((64, 128), (128, 128), (128, 256)))
FEW_STAGES = GemmConfig(64, 128, 2, 1, run_k_blocks=1, panels_per_store=2, work=works.IDS, sfa=PER_64)
"""A configuration that calls never choose: with few slots, each slot is needed again at once."""

MIXED = (-1,) * 7 + (2,) * 70 + (0,) * 3 + (-1,) * 50 + (1,) * 150 + (2,) * 64 + (0,) * 5
SIZES = (3, 150, 70, 0, 64, 5)

TRIALS = [
    SiluTrial(USUAL, SIZES, 1, n=768, k=384),
    SiluTrial(USUAL, SIZES, 2, limit=0.5, size=2.0),
    SiluTrial(USUAL, SIZES, 3, has_weights=False),
    SiluTrial(LOW, SIZES, 4, "slow_warps"),
    SiluTrial(USUAL, SIZES, 5, "slow_lanes"),
    SiluTrial(CUT, SIZES, 6, n=768),
    SiluTrial(CUT, SIZES, 7, num_sms=5),
    SiluTrial(LOW, (64,), 8, n=256, factors=(1e18, 4e18, 1e25, 1e-13, 1e-18, 1e-30, 1, 1)),
    SiluTrial(HALVES, SIZES, 15, n=768, limit=0.5, size=2.0),
    *(RowsTrial(SECOND, MIXED, 9, name, n=136, k=384) for name in (None, "slow_warps")),
    RowsTrial(SECOND_LOW, MIXED, 10, n=136, k=384),
    RowsTrial(SECOND_UNITS, MIXED, 11, n=264, k=384),
    *(RowsTrial(FEW_STAGES, (0,) * 70, seed, "slow_warps", n=136, k=128 * 24) for seed in (12, 13, 14)),
]

_SILU, _HALVES, _BLOCKS = "epilogue/silu.cuh", "scales/by_halves.cuh", "scales/blocks_of_b.cuh"
_TURN, _APART, _PARAMS = "epilogue/gates_in_turn.cuh", "epilogue/gates_apart.cuh", "params.cuh"
_OF_TILE, _MAINLOOP, _TILE = "work/rows_of_tile.cuh", "mainloop.cuh", "tile.cuh"
_GATE = "const float gate = ptx::min_nan(total[at], limit), up = ptx::min_magnitude(total[at + 4], limit);"
_WEIGHT = "a.row_weights != nullptr && is_there ? ptx::ld_global_f32(a.row_weights + row) : 1.f;"

MUTATIONS = [
    # Scales of B
    Mutation("up by the scales of gate", _HALVES, "row[0] + static_cast<uint64_t>(n / 256) * stride_n;", "row[0];", shows_in=USUAL),
    Mutation("scales of up where those of twice as many columns would be", _HALVES, "(n / 256)", "(n / 128)", shows_in=USUAL),
    Mutation("scales of columns as they follow each other", _HALVES, "(row_n / 256)", "(row_n / 128)", shows_in=USUAL),
    Mutation("scales of the first columns", _HALVES, "(row_n / 256)", "(0)", shows_in=USUAL),
    Mutation("gate and up exchanged in the promotion", _HALVES, "scales[column / chunk % 2]", "scales[1 - column / chunk % 2]", shows_in=USUAL),
    Mutation("gate and up in turns of 16", _HALVES, "column / chunk % 2", "column / (2 * kGateColumns) % 2", shows_in=USUAL),
    # Gates and ups
    Mutation("up for gate", _TURN, _GATE, _GATE.replace("total[at],", "total[at + 4],").replace("total[at + 4], limit);", "total[at], limit);"), shows_in=USUAL),
    Mutation("gate alone", _TURN, "total[at + 4]", "total[at]", shows_in=USUAL),
    Mutation("both rows are the first", _TURN, "i / 2 * 8 + half * 2 + i % 2", "i / 2 * 8 + i % 2", shows_in=USUAL),
    Mutation("columns of a pair exchanged", _TURN, "half * 2 + i % 2", "half * 2 + 1 - i % 2", shows_in=USUAL),
    Mutation("gates have no limit", _TURN, "ptx::min_nan(total[at], limit)", "total[at]", shows_in=USUAL),
    Mutation("gates have a limit below", _TURN, "ptx::min_nan(total[at], limit)", "ptx::min_magnitude(total[at], limit)", shows_in=USUAL),
    Mutation("ups have no limit", _TURN, "ptx::min_magnitude(total[at + 4], limit)", "total[at + 4]", shows_in=USUAL),
    Mutation("ups have no limit below", _TURN, "ptx::min_magnitude(total[at + 4], limit)", "ptx::min_nan(total[at + 4], limit)", shows_in=USUAL),
    Mutation("no activation", _TURN, "ptx::mul_rn(silu(gate), up)", "ptx::mul_rn(gate, up)", shows_in=USUAL),
    Mutation("up is forgotten", _TURN, "ptx::mul_rn(silu(gate), up)", "silu(gate)", shows_in=USUAL),
    # Weights
    Mutation("no weights", _TURN, "up), weight);", "up), 1.f);", shows_in=USUAL),
    Mutation("weights that are not given", _SILU, _WEIGHT, _WEIGHT.replace("a.row_weights != nullptr && ", ""), shows_in=USUAL),
    Mutation("weights of rows past the last", _SILU, _WEIGHT, _WEIGHT.replace(" && is_there", ""), shows_in=USUAL),
    Mutation("the next row's weight", _SILU, "a.row_weights + row)", "a.row_weights + (row ^ 1))", shows_in=USUAL),
    # The cast
    Mutation("the largest number, not magnitude", _SILU, "magnitude = ptx::abs_f32(x);", "magnitude = x;", shows_in=USUAL),
    Mutation("the largest of half of the lanes", _SILU, "  return ptx::max_f32(amax, ptx::shfl_xor_sync(amax, 2));", "  return amax;", shows_in=USUAL),
    Mutation("the largest of every second lane", _SILU, "  amax = ptx::max_f32(amax, ptx::shfl_xor_sync(amax, 1));\n", "", shows_in=USUAL),
    Mutation("the largest of two rows", _SILU, "ptx::shfl_xor_sync(amax, 2)", "ptx::shfl_xor_sync(ptx::max_f32(amax, ptx::shfl_xor_sync(amax, 2)), 4)", shows_in=USUAL),
    Mutation("infinities count", _SILU, "kIsOrdinary || ptx::bits_of(magnitude) < 0x7f800000", "true", shows_in=LOW),
    Mutation("all rows count as ordinary", _SILU, "    if (!ptx::all_sync(!is_there || is_ordinary(cast_row.divisor))) cast<false>(activated, cast_row);\n", "", shows_in=LOW),
    Mutation("one lane's rows are cast anew", _SILU, "if (!ptx::all_sync(!is_there || is_ordinary(cast_row.divisor)))", "if (ptx::all_sync(is_there && !is_ordinary(cast_row.divisor)))", shows_in=LOW),
    Mutation("halves of words exchanged", _SILU, "quotient(i), quotient(i + 1), quotient(i + 2), quotient(i + 3)", "quotient(i + 2), quotient(i + 3), quotient(i), quotient(i + 1)", shows_in=USUAL),
    # The exchange
    Mutation("words are exchanged with the neighbour alone", _SILU, "distance < 4; distance *= 2", "distance < 2; distance *= 2", shows_in=USUAL),
    Mutation("words are not exchanged", _SILU, "lane ^ distance);", "lane);", shows_in=USUAL),
    Mutation("the word that is kept is sent", _SILU, "is_second ? first : second, lane", "is_second ? second : first, lane", shows_in=USUAL),
    Mutation("the word that was sent is kept", _SILU, "first = is_second ? received : first, second = is_second ? second : received;", "first = is_second ? first : received, second = is_second ? received : second;", shows_in=USUAL),
    Mutation("8 columns before the other 8", _SILU, "lower(words[0], words[1]),\n                            lower(words[2], words[3]), upper(words[0], words[1]), upper(words[2], words[3])", "upper(words[0], words[1]), upper(words[2], words[3]),\n                          lower(words[0], words[1]), lower(words[2], words[3])", shows_in=USUAL),
    Mutation("lanes of a half exchanged", _SILU, "lower(words[0], words[1]),\n                            lower(words[2], words[3])", "lower(words[2], words[3]), lower(words[0], words[1])", shows_in=USUAL),
    Mutation("upper halves are lower ones", _SILU, "return x >> 16 | (y & 0xffff0000);", "return (x & 0xffff) | y << 16;", shows_in=USUAL),
    # Where it goes
    Mutation("a row past the group's end", _SILU, "is_there = row < end_row;", "is_there = row <= end_row;", shows_in=USUAL),
    Mutation("all rows of a tile", _SILU, "      if (!is_there) continue;\n", "", shows_in=USUAL),
    Mutation("scales of all rows of a tile", _SILU, "    if (!is_there) return;\n", "", shows_in=USUAL),
    # Gate and up that lie apart
    Mutation("rows of B as they lie", _PARAMS, "  return column / kTurn * kGateColumns + column % kGateColumns + (column % kTurn < kGateColumns ? 0 : p.n / 2);", "  return column;", shows_in=HALVES),
    Mutation("gate twice", _PARAMS, "(column % kTurn < kGateColumns ? 0 : p.n / 2)", "0", shows_in=HALVES),
    Mutation("up first", _PARAMS, "kGateColumns ? 0 : p.n / 2", "kGateColumns ? p.n / 2 : 0", shows_in=HALVES),
    Mutation("up of twice as many columns", _PARAMS, "kGateColumns ? 0 : p.n / 2)", "kGateColumns ? 0 : p.n / 4)", shows_in=HALVES),
    Mutation("tiles of gate twice as far apart", _PARAMS, "column / kTurn * kGateColumns", "column / kTurn * kTurn", shows_in=HALVES),
    Mutation("gate is not rounded", _APART, "const ptx::Float2 gates = ptx::unpack_bf16(ptx::pack_bf16(totals[unit][at], totals[unit][at + 1]));", "const ptx::Float2 gates = {totals[unit][at], totals[unit][at + 1]};", shows_in=HALVES),
    Mutation("up is not rounded", _APART, "const ptx::Float2 ups = ptx::unpack_bf16(ptx::pack_bf16(totals[unit + 1][at], totals[unit + 1][at + 1]));", "const ptx::Float2 ups = {totals[unit + 1][at], totals[unit + 1][at + 1]};", shows_in=HALVES),
    Mutation("gate for up", _APART, "totals[unit + 1][at], totals[unit + 1][at + 1]", "totals[unit][at], totals[unit][at + 1]", shows_in=HALVES),
    Mutation("one row of two", _APART, "i * 2 + half * 2;", "i * 2;", shows_in=HALVES),
    Mutation("pairs exchanged", _APART, "gate[2] = {gates.x, gates.y}", "gate[2] = {gates.y, gates.x}", shows_in=HALVES),
    Mutation("no limit of gates that lie apart", _APART, "silu(ptx::min_nan(gate[j], limit))", "silu(gate[j])", shows_in=HALVES),
    Mutation("no limit of ups that lie apart", _APART, "ptx::min_magnitude(up[j], limit)", "up[j]", shows_in=HALVES),
    Mutation("no weights of what lies apart", _APART, "ptx::mul_rn(product, weight)", "product", shows_in=HALVES),
    Mutation("the other 64 columns over the first", _SILU, "column + part * 64 + lane % 4 * 16,", "column + lane % 4 * 16,", shows_in=HALVES),
    Mutation("the first 64 columns twice", _SILU, "= cast_row.words[part];", "= cast_row.words[0];", shows_in=HALVES),
    Mutation("the last row is left out", _SILU, "is_there = row < end_row;", "is_there = row + 1 < end_row;", shows_in=USUAL),
    Mutation("both rows in one place", _SILU, "row_of_unit(unit) + half * 8, tile.end_m", "row_of_unit(unit), tile.end_m", shows_in=USUAL),
    Mutation("both warpgroups where the first is", _SILU, "tile.row_m + warpgroup * 64 + ", "tile.row_m + ", shows_in=USUAL),
    Mutation("all warps where the first is", _SILU, "ptx::warp_index() % 4 * 16 + ", "", shows_in=USUAL),
    Mutation("columns of the product, not of activations", _SILU, "(tile.row_n + column_of_unit(unit)) / 2", "(tile.row_n + column_of_unit(unit))", shows_in=USUAL),
    Mutation("the second unit where the first is", _SILU, "(tile.row_n + column_of_unit(unit)) / 2", "tile.row_n / 2", shows_in=CUT),
    Mutation("all lanes at the first columns", _SILU, "column + part * 64 + lane % 4 * 16,", "column + part * 64,", shows_in=USUAL),
    Mutation("rows as far apart as they are long before they are activated", _SILU, "p.d_pitch, total", "p.d_pitch * 2, total", shows_in=USUAL),
    Mutation("scales of the first columns' place", _SILU, "uint64_t{column / kColumns} * a.scales_pitch + row", "row", shows_in=USUAL),
    Mutation("scales of columns beside each other", _SILU, "uint64_t{column / kColumns} * a.scales_pitch + row", "row * 2 + column / kColumns", shows_in=USUAL),
    Mutation("a scale for 128 columns", _SILU, "column / kColumns}", "column / 128}", shows_in=USUAL),
    Mutation("the reciprocal for the scale", _SILU, "cast_row.divisor.scale);", "cast_row.divisor.reciprocal);", shows_in=USUAL),
    # Scales of A for 64 columns
    Mutation("the second half by the scales of the first", _BLOCKS, "part * kScaleRows + ", "", shows_in=SECOND),
    Mutation("halves by each other's scales", _BLOCKS, "part * kScaleRows + ", "(1 - part) * kScaleRows + ", shows_in=SECOND),
    Mutation("each half loads both halves' scales", _BLOCKS, "    if (part_of_piece<kOfUnit>(piece) > 0) return;\n", "", shows_in=SECOND),
    Mutation("scales of the k-block's half number", _OF_TILE, "k_block * scale_parts_of(tile)", "k_block", shows_in=SECOND),
    Mutation("the first half twice", _MAINLOOP, "part_of_piece<kOfUnit>(piece) * (kBlockK / kOfUnit / 16);", "0;", shows_in=SECOND),
    Mutation("the second half begins within the first", _MAINLOOP, "(kBlockK / kOfUnit / 16);", "(kBlockK / kOfUnit / 32);", shows_in=SECOND),
    Mutation("halves as deep as a block", _MAINLOOP, "k < kBlockK / kOfUnit; k += 32", "k < kBlockK; k += 32", shows_in=SECOND),
    Mutation("a quarter of the depth", _MAINLOOP, "k < kBlockK / kOfUnit; k += 32", "k < 32; k += 32", shows_in=SECOND),
    Mutation("A's first 32 for all", _MAINLOOP, "smem_descriptor_from_low(a_low + k / 16)", "smem_descriptor_from_low(a_low)", shows_in=SECOND),
    Mutation("B's first 32 for all", _MAINLOOP, "smem_descriptor_from_low(b_low + k / 16)", "smem_descriptor_from_low(b_low)", shows_in=SECOND),
    Mutation("halves are added before they are promoted", _MAINLOOP, "k != 0);\n  }", "true);\n  }", shows_in=SECOND),
    Mutation("the last 32 alone", _MAINLOOP, "k != 0);\n  }", "false);\n  }", shows_in=SECOND),
    Mutation("halves promoted into another unit's totals", _TILE, "return piece / kOfUnit;", "return piece % kOfUnit % kUnitsPerWarpgroup;", shows_in=SECOND_UNITS),
    Mutation("the slot is let go behind its first piece", _BLOCKS, "if (piece + 1 == kPieces) release_slot", "if (piece == 0) release_slot", shows_in=FEW_STAGES),
    Mutation("the slot is let go behind each half", _BLOCKS, "if (piece + 1 == kPieces) release_slot", "if (true) release_slot", shows_in=FEW_STAGES),
]  # fmt: skip
