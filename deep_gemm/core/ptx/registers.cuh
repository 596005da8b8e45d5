// Moves registers between the warpgroups of a CTA. (PTX ISA, "setmaxnreg".)
//
// All warps of a warpgroup execute it. An increase waits until decreases have freed enough registers. It waits for ever
// if the sum of (threads x registers) would exceed the CTA's registers at launch.
#pragma once
#include "ptx/platform.cuh"

namespace ptx {

template <uint32_t kRegisters>
DEVICE void setmaxnreg_inc() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "24 to 256 registers, a multiple of 8");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <uint32_t kRegisters>
DEVICE void setmaxnreg_dec() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "24 to 256 registers, a multiple of 8");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace ptx
