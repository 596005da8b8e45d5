// B lies in memory as WGMMA reads it, and its scales where the math warps do.
#pragma once
#include "convert/as_it_lies.cuh"

template <typename... Given>
DEVICE void scale_tiles(Given&&...) {}
