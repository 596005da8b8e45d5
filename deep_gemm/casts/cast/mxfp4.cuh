// What becomes of a piece in MXFP4: as in FP4, but a block's largest magnitude may be cut off by as much as rounding might take.
#pragma once
#include "cast/e2m1.cuh"

constexpr float kLargestValue = 7.f;  // between E2M1's largest, 6, and 8, which would be the next
