// Where rows of tokens and results of routes lie in the rooms of the ranks.
#pragma once
#include "meeting.cuh"

// Of slot `slot`: the token of that number among those of all ranks, each of which has room for `max_tokens`.
DEVICE const uint8_t* row_of_slot(const Meeting& m, uint32_t slot, uint32_t max_tokens, uint32_t row_bytes) {
  return m.rooms[slot / max_tokens] + uint64_t{slot % max_tokens} * row_bytes;
}

// Where the result of a slot's route goes. `results` is a byte of a room: BF16 [max_tokens, topk, columns].
DEVICE uint64_t place_of_result(const Meeting& m, uint32_t slot, uint32_t route, uint32_t max_tokens, uint32_t topk,
                                uint32_t columns, uint64_t results) {
  const uint64_t place = (uint64_t{slot % max_tokens} * topk + route) * columns * 2;
  return reinterpret_cast<uint64_t>(m.rooms[slot / max_tokens]) + results + place;
}

// The same as a word of a table. A rank that missed another may not write to rooms: 0 is nowhere.
DEVICE void store_address(uint64_t* to, uint64_t address, bool is_whole) {
  ptx::st_global_v2_b32(to, is_whole ? static_cast<uint32_t>(address) : 0, is_whole ? static_cast<uint32_t>(address >> 32) : 0);
}
