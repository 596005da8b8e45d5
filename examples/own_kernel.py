"""Compile and launch your own CUDA kernel, like the package's kernels:  python examples/own_kernel.py

Prints whether the kernel agrees with torch, in 3 seconds. It runs on a Hopper GPU, or without one in the simulator,
which needs g++ and a checkout. docs/learn/own.md explains the program.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deep_gemm.core.kernel import Config, Kernel
from deep_gemm.core.params import Params

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of the simulator

SOURCE = """
#include "config.cuh"
#include "types.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

struct Params {
  const float* x;
  float* amax;
  uint32_t rows, columns;
};
#include "params_layout.cuh"

KERNEL(kNumThreads, 1) row_amax(GRID_CONSTANT Params p) {  // a warp for each row
  const uint32_t row = ptx::block_index() * (kNumThreads / 32) + ptx::thread_index() / 32;
  if (row >= p.rows) return;
  float amax = 0;
  for (uint32_t column = ptx::lane_index(); column < p.columns; column += 32)
    amax = ptx::max_f32(amax, ptx::abs_f32(ptx::ld_global_nc_f32(p.x + row * p.columns + column)));
  for (uint32_t bits = 16; bits > 0; bits /= 2) amax = ptx::max_f32(amax, ptx::shfl_xor_sync(amax, bits));
  if (ptx::lane_index() == 0) ptx::st_global_f32(p.amax + row, amax);
}
"""


@dataclass(frozen=True)
class AmaxConfig(Config):
    """The constants for compiling the source."""

    num_threads: int = 128
    name: str = "row_amax"

    def constants(self) -> dict[str, int | bool]:
        """Return the constants of config.cuh."""
        return {"kNumThreads": self.num_threads}


CONFIG = AmaxConfig()
PARAMS = Params.of_source(SOURCE, "Params")
KERNEL: Kernel[AmaxConfig] = Kernel("row_amax", PARAMS, lambda: [CONFIG], more=lambda _: {"row_amax.cuh": SOURCE})


def row_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row of `x`, which must be FP32 and contiguous."""
    rows, columns = x.shape
    amax = torch.full((rows,), float("nan"), device=x.device, dtype=torch.float32)
    grid = -(-rows // (CONFIG.num_threads // 32))

    def values(x: Tensor, amax: Tensor) -> dict[str, Any]:
        return {"x": x, "amax": amax, "rows": rows, "columns": columns}

    if x.is_cuda:
        KERNEL.run(CONFIG, values(x, amax), grid, x.get_device())
    else:
        from lab.sim.launcher import Stage

        stage = Stage(CONFIG, {"x": x}, {"amax": amax}, ready={"x", "amax"})
        stage.run(KERNEL, None, lambda at: values(**at), grid)
    return amax


if __name__ == "__main__":
    x = torch.randn(37, 500, device="cuda" if torch.cuda.is_available() else "cpu", dtype=torch.float32)
    says = "says the same as" if torch.equal(row_amax(x), x.abs().amax(1)) else "differs from"
    print(f"For {x.shape[0]} rows the kernel {says} torch, to the bit, on {'a' if x.is_cuda else 'the simulated'} GPU.")
