// What becomes of a piece in FP4: a block's largest magnitude becomes E2M1's largest.
#pragma once
#include "cast/e2m1.cuh"

constexpr float kLargestValue = kLargestOfE2m1;
