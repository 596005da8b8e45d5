// B is stored as WGMMA reads it: no warp converts, and a tile's k-blocks are multiplied in one pass.
#pragma once
#include "types.cuh"

struct ConvertStorage {
  DEVICE void init() {}
  DEVICE uint64_t* full_of_b(uint64_t* full, uint32_t) { return full; }
};

template <typename... Given>
DEVICE void convert_tiles(Given&&...) {}

struct Passes {
  DEVICE explicit Passes(ConvertStorage&) {}
  template <bool kIsWarp>
  DEVICE bool again() {
    return false;
  }
};
