"""The GPUs that kernels are chosen for: what a choice must know of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch


@dataclass(frozen=True)
class Gpu:
    """What the cost of a product depends on."""

    name: str
    num_sms: int
    dram_tb_per_s: float
    """What products reach, cold, at the sizes of real weights."""
    fp8_tflops: float
    """What the tensor cores reach in a burst, operands resident."""
    launch_us: float = 2.9
    """An empty product: launch, barriers, first bytes from DRAM."""


H200 = Gpu("H200", 132, 3.0, 1875)
H100 = Gpu("H100", 132, 2.1, 1875)
H20 = Gpu("H20", 78, 2.5, 290)
GPUS = (H200, H100, H20)
HOPPER = 9


def gpu_named(name: str) -> Gpu | None:
    """Facts of a GPU by its name here; None if there are none."""
    return next((gpu for gpu in GPUS if gpu.name == name), None)


@cache
def gpu_of(device: int) -> Gpu:
    """Facts of a CUDA device; an unknown Hopper GPU is taken for an H100 with its own number of SMs."""
    properties = torch.cuda.get_device_properties(device)
    if properties.major != HOPPER:
        raise NotImplementedError(
            f"deep_gemm's kernels need a Hopper GPU (compute capability 9.0); cuda:{device} is {properties.name}, "
            f"compute capability {properties.major}.{properties.minor}"
        )
    known = next((gpu for gpu in GPUS if gpu.name in properties.name), H100)
    return replace(known, num_sms=properties.multi_processor_count)
