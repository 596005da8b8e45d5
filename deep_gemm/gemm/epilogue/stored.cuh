// D is what the accumulators hold, and C beside it.
#pragma once
#include "epilogue/store.cuh"

using Output = PanelOutput;
