// A part of `count` blocks that are dealt to `parts` as evenly as can be, earlier parts being the longer ones.
#pragma once
#include "types.cuh"

struct Part {
  uint32_t first, count;

  DEVICE Part(uint32_t blocks, uint32_t parts, uint32_t index) {
    const uint32_t each = blocks / parts, more = blocks % parts;
    first = index * each + (index < more ? index : more);
    count = each + (index < more ? 1 : 0);
  }
};
