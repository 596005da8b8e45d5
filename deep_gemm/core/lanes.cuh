// Sets of lanes as masks.
#pragma once
#include "ptx/warp.cuh"

// The lowest of some lanes.
DEVICE uint32_t lowest(uint32_t lanes) { return ptx::popc((lanes & -lanes) - 1); }
