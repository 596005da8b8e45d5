"""The GPUs that kernels are chosen for, and the limits of one SM. How fast each is says gemm/choose/timings.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

SHARED_BYTES_LIMIT = 232448
"""Shared memory that one block may use on sm_90."""
REGISTERS_PER_SM = 65536
WGMMA_ROWS = 64
WGMMA_K = 32
"""Depth of one WGMMA on FP8."""
WARPGROUP_THREADS = 128


@dataclass(frozen=True)
class Gpu:
    """A GPU: which kind, and how many of its SMs there are."""

    name: str
    num_sms: int


H200 = Gpu("H200", 132)
H100 = Gpu("H100", 132)
H20 = Gpu("H20", 78)
GPUS = (H200, H100, H20)
HOPPER = 9


class UnsupportedGpuError(NotImplementedError):
    """A CUDA device that the kernels are not for."""


@cache
def is_hopper(device: int) -> bool:
    """Tell whether a CUDA device is a GPU that the kernels are for."""
    return bool(_properties(device).major == HOPPER)


@cache
def gpu_of(device: int) -> Gpu:
    """The GPU that a CUDA device is; an unknown Hopper GPU is taken for an H100 with its own number of SMs."""
    properties = _properties(device)
    if properties.major != HOPPER:
        raise UnsupportedGpuError(
            f"deep_gemm's kernels need a Hopper GPU (compute capability 9.0); cuda:{device} is {properties.name}, "
            f"compute capability {properties.major}.{properties.minor}"
        )
    known = next((gpu for gpu in GPUS if gpu.name in properties.name), H100)
    return replace(known, num_sms=properties.multi_processor_count)


def _properties(device: int) -> Any:
    import torch  # here, because settings and the jit room must import without torch

    return torch.cuda.get_device_properties(device)
