// Registers moved between warpgroups after the launch. (PTX ISA, "setmaxnreg".) All warps of a warpgroup execute it; an
// increase waits until others have given up enough, so the sum must not exceed what the launch allocated.
#pragma once
#include "types.cuh"

namespace ptx {

template <int kRegisters>
DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace ptx
