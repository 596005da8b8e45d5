#pragma once
#include "ptx/platform.cuh"

namespace sim {
void setmaxnreg_inc(uint32_t registers);
void setmaxnreg_dec(uint32_t registers);
}  // namespace sim

namespace ptx {

template <uint32_t kRegisters>
void setmaxnreg_inc() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "24 to 256 registers, a multiple of 8");
  sim::setmaxnreg_inc(kRegisters);
}
template <uint32_t kRegisters>
void setmaxnreg_dec() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "24 to 256 registers, a multiple of 8");
  sim::setmaxnreg_dec(kRegisters);
}

}  // namespace ptx
