// mma.sync. A warp's lanes share its fragments. Products are exact; their sum with the accumulator is rounded once.
#pragma once
#include "warps.h"

namespace ptx {

void mma_m16n8k8_tf32(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  uint32_t a[4][kLanes], b[2][kLanes];  // lanes exchange two registers of the fragments at a time
  const auto share = [](uint32_t first, uint32_t second, uint32_t* of_first, uint32_t* of_second) {
    const uint64_t* values = gather("mma_m16n8k8_tf32", first | static_cast<uint64_t>(second) << 32);
    for (uint32_t lane = 0; lane < kLanes; ++lane)
      of_first[lane] = static_cast<uint32_t>(values[lane]), of_second[lane] = static_cast<uint32_t>(values[lane] >> 32);
  };
  share(a0, a1, a[0], a[1]);
  share(a2, a3, a[2], a[3]);
  share(b0, b1, b[0], b[1]);
  const auto value = [](uint32_t bits) {
    float number;
    bits &= ~0x1fffu;
    std::memcpy(&number, &bits, 4);
    return static_cast<double>(number);
  };
  const uint32_t g = lane_index() / 4, t = lane_index() % 4;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t column = 2 * t + i % 2;
    double sum = d[i];
    for (uint32_t k = 0; k < 8; ++k) {
      const uint32_t from = g * 4 + k % 4;
      sum += value(a[i / 2 + k / 4 * 2][from]) * value(b[k / 4][column * 4 + k % 4]);
    }
    d[i] = static_cast<float>(sum);
  }
}

}  // namespace ptx
