// Rows that are there before the kernel begins.
#pragma once
#include ROWS_PARAMS

struct ArrivalStorage {
  DEVICE void init() {}
};

DEVICE void wait_for_rows(const Params&, uint32_t, uint32_t) {}
DEVICE void fetch_rows(const Params&, ArrivalStorage&, uint32_t) {}
