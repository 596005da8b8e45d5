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

DEVICE void store_address(uint64_t* to, uint64_t address) {
  ptx::st_global_v2_b32(to, static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32));
}

// A rank that missed another has rows that are of no use, touches no room, and has no results either: 0 is nowhere. By all of
// some threads, this one being number `thread`.
DEVICE void send_nowhere(uint64_t* addresses, uint32_t rows, uint32_t thread, uint32_t threads) {
  for (uint32_t row = thread; row < rows; row += threads) store_address(addresses + row, 0);
}
