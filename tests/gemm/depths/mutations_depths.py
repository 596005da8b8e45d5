"""Ways to break k-grouped products: the kernel that makes the maps, and the core kernel's code for groups along k."""

from __future__ import annotations

from typing import Any

from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.gemm.choose.tiles import DEPTHS_TILES as TILES
from deep_gemm.gemm.choose.tiles import SHARING_A, Tile
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from lab.sim.depths import DepthsTrial as Trial
from lab.sim.mutate import Mutation


def _config(tile: Tile, **output: Any) -> GemmConfig:
    kind = Output(is_fp32=True, sfb=PER_ROW, work=works.DEPTHS, **output)
    return tile_config(tile.block_m, tile.block_n, kind, cluster_n=tile.cluster_n, k=128)


FRESH, IN_PLACE, WITH_C = _config(TILES[0]), _config(TILES[0], adds_to_d=True), _config(TILES[0], with_c=True)
HIGH = _config(TILES[1])
PAIRS, PAIRS_IN_PLACE = _config(SHARING_A), _config(SHARING_A, adds_to_d=True)
KS = (16, 0, 144, 128, 656, 0, 32)
SHALLOW = (16,) * 24

TRIALS = [
    *(Trial(FRESH, KS, 1, name) for name in (None, "slow_producer", "slow_warps", "slow_lanes", "late_loads")),
    *(Trial(IN_PLACE, KS, 2, name) for name in (None, "slow_math")),
    Trial(IN_PLACE, KS, 2, on_gpu_alone=False),
    Trial(WITH_C, KS, 3),
    Trial(HIGH, KS, 4, m=520, n=400),
    Trial(FRESH, tuple(16 * (index * 7 % 13) for index in range(70)), 5, m=20, n=24),
    *(Trial(FRESH, SHALLOW, seed, name) for seed, name in ((6, "slow_warps"), (7, "slow_lanes"), (8, "slow_math"))),
    Trial(FRESH, (128, 1024), 9, m=1100, n=128),
    *(Trial(PAIRS, KS, seed, name, m=300, n=300, num_sms=5) for seed, name in ((10, None), (11, "slow_cta"))),
    *(Trial(PAIRS, (400, 16), seed, "slow_warpgroup", m=260, n=256) for seed in (1, 2, 3)),
    Trial(PAIRS, (0,) * 6 + (16,), 1, "slow_producer", m=20, n=256, num_sms=2),
    Trial(PAIRS, (0,) * 6 + (16,), 2, "slow_cta", m=20, n=256, num_sms=2),
    Trial(PAIRS_IN_PLACE, KS, 12, "late_loads", m=300, n=300, num_sms=4),
]

_GEMM, _MAINLOOP, _MAPS, _TILE = (f"{name}.cuh" for name in ("fp8_gemm", "mainloop", "k_group_maps", "tile"))
_WORK, _K_SCHEDULER, _QUEUE = (f"work/{name}.cuh" for name in ("depths", "k_scheduler", "tile_queue"))
_BY_ROW_KEPT, _THREAD, _PANELS = "scales/by_row_kept.cuh", "scales/thread.cuh", "epilogue/panels.cuh"
_WRITE = "    ptx::st_shared_v4_b32(&tiles[slot], tile.x, tile.y, tile.z, tile.w);\n"
_TELL = "    ptx::mbarrier_arrive(&full[slot]);\n"

# fmt: off
MUTATIONS = [
    # The maps
    Mutation("maps are not released", _MAPS, "  ptx::fence_tensormap_release();\n", ""),
    Mutation("maps are made while the kernel before writes", _MAPS, "  ptx::griddepcontrol_wait();\n", ""),
    Mutation("the address is the template's", _MAPS, "  ptx::tensormap_replace_address(map, values);\n", ""),
    Mutation("the size along k is the template's", _MAPS, "  ptx::tensormap_replace_size<0>(map, k == 0 ? 16 : k);\n", ""),
    Mutation("the pitch of rows is the template's", _MAPS, "  ptx::tensormap_replace_stride<1>(map, k == 0 ? 16 : k);\n", ""),
    Mutation("a group without depth has a size of zero", _MAPS, "tensormap_replace_size<0>(map, k == 0 ? 16 : k)", "tensormap_replace_size<0>(map, k)"),
    Mutation("a group without depth has a stride of zero", _MAPS, "tensormap_replace_stride<1>(map, k == 0 ? 16 : k)", "tensormap_replace_stride<1>(map, k)"),
    Mutation("B begins where A does", _MAPS, "static_cast<uint64_t>(p.n) * place.first_k", "static_cast<uint64_t>(p.m) * place.first_k"),
    Mutation("A is B", _MAPS, "make_map(&k_group->map_a, p.map_a, p.a +", "make_map(&k_group->map_a, p.map_a, p.b +"),
    Mutation("B is loaded as A is", _MAPS, "make_map(&k_group->map_b, p.map_b,", "make_map(&k_group->map_b, p.map_a,", shows_in=HIGH),
    Mutation("a group begins behind itself", _MAPS, "const bool is_before = first + i < group;", "const bool is_before = first + i <= group;"),
    Mutation("scales of a ragged group end with whole blocks", _MAPS, "is_before ? ceil_div(ks[i], kDepthOfBlock) : 0", "is_before ? ks[i] / kDepthOfBlock : 0"),
    Mutation("groups of one depth have one place", _MAPS, "(ks[i] > place.k) | ((ks[i] == place.k) & is_before)", "ks[i] > place.k"),
    Mutation("depths past the last are counted", _MAPS, "(first + i < p.count) & is_ahead", "is_ahead"),
    Mutation("depths past the last are read", _MAPS, "k_of_group<kIsInline>(p, at_most(first + i, p.count - 1))", "k_of_group<kIsInline>(p, first + i)"),
    Mutation("threads past the last group write", _MAPS, "  if (group >= p.count) return;\n", ""),
    Mutation("each block makes the maps of the first groups", _MAPS, "ptx::block_index() * kMapThreads + ptx::thread_index()", "ptx::thread_index()"),
    Mutation("inline depths are taken for those of a tensor", _MAPS, "p.ks == nullptr ? place_of<true>(p, group) : place_of<false>(p, group)", "place_of<false>(p, group)"),
    Mutation("a group's last part of a block is left out", _MAPS, "ceil_div(place.k, kDepthOfBlock)", "place.k / kDepthOfBlock"),
    Mutation("planes are places", _MAPS, "st_global_b32(&k_group->group, group)", "st_global_b32(&k_group->group, place.number)"),
    Mutation("the first block of scales is not said", _MAPS, "  ptx::st_global_b32(&k_group->first_k_block, place.first_k_block);\n", ""),
    # The scheduler
    Mutation("A's map is not acquired", _K_SCHEDULER, "      ptx::fence_tensormap_acquire(&next.k_group->map_a);\n", ""),
    Mutation("B's map is not acquired", _K_SCHEDULER, "      ptx::fence_tensormap_acquire(&next.k_group->map_b);\n", ""),
    Mutation("only the first group's maps are acquired", _K_SCHEDULER, "group != known", "known == ~0u"),
    Mutation("the last tile is left out", _K_SCHEDULER, "number >= num_tiles", "number + 1 >= num_tiles"),
    Mutation("one tile too many", _K_SCHEDULER, "number >= num_tiles", "number > num_tiles"),
    Mutation("the count of claimed tiles is not zeroed", _MAPS, "  if (group == 0) ptx::st_global_b32(next_tile_counter(p.k_groups, p.count), 0);\n", ""),
    Mutation("first tiles are claimed again", _K_SCHEDULER, "ptx::grid_size() / kClusterSize + claimed", "claimed", shows_in=IN_PLACE),
    Mutation("a tile between is left out", _K_SCHEDULER, "ptx::grid_size() / kClusterSize + claimed", "ptx::grid_size() / kClusterSize + claimed + 1"),
    Mutation("as many tiles are left out as CTAs wait for others", _K_SCHEDULER, "ptx::grid_size() / kClusterSize", "ptx::grid_size()", shows_in=PAIRS),
    Mutation("each CTA of a cluster claims tiles", _K_SCHEDULER, "kClusterSize == 1 || ptx::cluster_rank() == 0", "true", shows_in=PAIRS),
    Mutation("the other CTA is told the tile after", _K_SCHEDULER, "mail.send(number, turn - 1)", "mail.send(number + 1, turn - 1)", shows_in=PAIRS),
    Mutation("a number is sent over one that was not read", _K_SCHEDULER, "    ptx::mbarrier_wait_parity(&empty, (turn & 1) ^ 1);\n", "", shows_in=PAIRS),
    Mutation("a number is read before it came", _K_SCHEDULER, "    ptx::mbarrier_wait_parity_cluster(&full, turn & 1);\n", "", shows_in=PAIRS),
    Mutation("nobody is told that a number was read", _K_SCHEDULER, "    if (received < end) ptx::mbarrier_arrive_cluster(&empty, 0);\n", "", shows_in=PAIRS),
    Mutation("one is told of the last number who may be gone", _K_SCHEDULER, "    if (received < end) ptx", "    ptx", shows_in=PAIRS),
    Mutation("a cluster's CTAs take tiles by themselves", _K_SCHEDULER, "ptx::block_index() / kClusterSize", "ptx::block_index()", shows_in=PAIRS),
    Mutation("a cluster's CTAs take the same tile", _K_SCHEDULER, "tile_of_cta<kClusterN>(index.n)", "index.n * kClusterN", shows_in=PAIRS),
    Mutation("the next cluster takes the second tile again", _K_SCHEDULER, "tile_of_cta<kClusterN>(index.n)", "(index.n + ptx::cluster_rank())", shows_in=PAIRS_IN_PLACE),
    Mutation("a tile without a neighbour is left out", _K_SCHEDULER, "ceil_div(n, kBlockN * kClusterN)", "(kClusterN > 1 ? n / (kBlockN * kClusterN) : ceil_div(n, kBlockN))", shows_in=PAIRS),
    Mutation("tiles of a group are counted on", _K_SCHEDULER, "place_in_raster(number % tiles,", "place_in_raster(number,"),
    Mutation("a raster of full height at the end", _TILE, "tiles_m - first_m < max_height ? tiles_m - first_m : max_height", "max_height", shows_in=FRESH),
    Mutation("rasters all begin at the first row", _TILE, "first_m + in_group % height", "in_group % height", shows_in=FRESH),
    Mutation("a tile is not given back", _WORK, "    storage.queue.give_back(number, dealt.x, ptx::lane_index() == 0);\n", ""),
    Mutation("a tile is given back before all lanes have read it", _WORK, "    ptx::syncwarp();", "", shows_in=FRESH),
    Mutation("a tile is looked at before it is dealt", _WORK, "    storage.queue.wait_until_dealt(number);\n", ""),
    Mutation("tiles are taken from one slot", _WORK, "ptx::lane_index() == 0);\n    ++number;\n", "ptx::lane_index() == 0);\n"),
    # Dealing and loading
    Mutation("one more taker is awaited", _WORK, "queue.init(kNumMathWarps);", "queue.init(kNumMathWarps + 1);"),
    Mutation("one taker less is awaited", _WORK, "queue.init(kNumMathWarps);", "queue.init(kNumMathWarps - 1);"),
    Mutation("a slot is dealt into that is not free", _QUEUE, "    wait_until_free(number);\n", ""),
    Mutation("the end of tiles looks like a group without depth", _WORK, "0xffffffff", "0"),
    Mutation("nobody is told of the end", _WORK, "    deal(kNoMoreTiles);\n", ""),
    Mutation("tiles are dealt into one slot", _WORK, "tile.num_k_blocks, tile.group});\n    ++number;\n", "tile.num_k_blocks, tile.group});\n"),
    Mutation("a tile is told of before it is there", _QUEUE, _WRITE + _TELL, _TELL + _WRITE),
    Mutation("the next tile is loaded in place of this one", _WORK, "      tile = coming;\n", ""),
    Mutation("tiles without depth end a product that is not added to D", _WORK, "kAddsToD && tile.num_k_blocks == 0", "tile.num_k_blocks == 0"),
    Mutation("scales are those of the first group", _WORK, "row_m, tile.first_k_block + k_block);", "row_m, k_block);"),
    Mutation("scales of B are those of the first group", _WORK, "tile.row_n, tile.first_k_block + k_block);", "tile.row_n, k_block);"),
    Mutation("A is loaded for B", _WORK, "&tile.k_group->map_b, slot.full", "&tile.k_group->map_a, slot.full"),
    Mutation("half of A at the wrong rows", _WORK, "row_m(tile.row_m + first_row)", "row_m(tile.row_m)", shows_in=PAIRS),
    Mutation("half of A into the wrong slot rows", _WORK, "slot.a + first_row * kBlockK, k_block", "slot.a, k_block", shows_in=PAIRS),
    Mutation("half of A's scales into the wrong place", _WORK, "slot.scales + first_row, row_m", "slot.scales, row_m", shows_in=PAIRS),
    Mutation("each CTA of a cluster loads the first half of A", _WORK, "ptx::cluster_rank() * kBoxRowsOfA", "0", shows_in=PAIRS),
    Mutation("exits while the other CTA still arrives", _GEMM, "for (uint32_t i = 0; i < kNumStages; ++i, at = at.next()) wait_until_free(shared.ring, at);", "{}", shows_in=PAIRS),
    Mutation("the first block of k again and again", _WORK, "first_row * kBlockK, k_block * kBlockK, row_m", "first_row * kBlockK, 0, row_m"),
    # Multiplying and storing
    Mutation("kept scales of the first slot", _BY_ROW_KEPT, "(stage * kScales + index) * 4", "index * 4", shows_in=PAIRS),
    Mutation("kept scales of slots four times as close", _BY_ROW_KEPT, "(stage * kScales + index) * 4", "stage * kScales + index * 4", shows_in=PAIRS),
    Mutation("second row takes a scale two rows on", _THREAD, "ptx::ld_shared_f32(sfa + 8 * 4);", "ptx::ld_shared_f32(sfa + 8);", shows_in=PAIRS),
    Mutation("only half of the blocks of k are multiplied", _WORK, "KBlocks(tile.num_k_blocks * kBlockK)", "KBlocks(tile.num_k_blocks / 2 * kBlockK)"),
    Mutation("a tail is forgotten", _MAINLOOP, "for (; k_block < count; ++k_block)", "for (; k_block + 1 < count; ++k_block)"),
    Mutation("C is the first group's", _WORK, "p.c + tile.group * p.groups.c_stride * kOutputBytes", "p.c", shows_in=WITH_C),
    Mutation("D is the first group's", _PANELS, "ptx::tma_store_4d(map_d, panel, c0, c1, c2, c3)", "ptx::tma_store_4d(map_d, panel, c0, c1, c2, 0)"),
    Mutation("the D that is added to is the first group's", _PANELS, "ptx::tma_reduce_add_4d(map_d, panel, c0, c1, c2, c3)", "ptx::tma_reduce_add_4d(map_d, panel, c0, c1, c2, 0)", shows_in=IN_PLACE),
    Mutation("D is overwritten where it is added to", _PANELS, "ptx::tma_reduce_add_4d(", "ptx::tma_store_4d(", shows_in=IN_PLACE),
    Mutation("D is added to where it is overwritten", _PANELS, "ptx::tma_store_4d(", "ptx::tma_reduce_add_4d("),
    Mutation("the place of a tile is that of one before", _GEMM, "      if (!kStoresAtOnce && share.is_any) tiles.finish(tile);\n", ""),
]
# fmt: on
