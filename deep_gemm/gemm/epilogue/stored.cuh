// D gets the accumulators' totals, plus C if there is a C.
#pragma once
#include "epilogue/store.cuh"

using Output = PanelOutput;
