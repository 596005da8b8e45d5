// B is stored as WGMMA reads it, and its scales as the math warps read them: no warp converts values or scales.
#pragma once
#include "convert/as_it_lies.cuh"

template <typename... Given>
DEVICE void scale_tiles(Given&&...) {}
