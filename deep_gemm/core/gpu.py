"""The GPUs that kernels are chosen for, and the limits of one SM. gemm/choose/timings.json has each GPU's speed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

SHARED_BYTES_LIMIT = 232448
"""Bytes of shared memory that one CTA may use on sm_90."""
REGISTERS_PER_SM = 65536
WGMMA_ROWS = 64
WGMMA_K = 32
"""Depth of one WGMMA on FP8."""
WARPGROUP_THREADS = 128


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU and its number of SMs."""

    name: str
    num_sms: int


H200 = Gpu("H200", 132)
H100 = Gpu("H100", 132)
H20 = Gpu("H20", 78)
GPUS = (H200, H100, H20)
HOPPER = 9


class UnsupportedGpuError(NotImplementedError):
    """A CUDA device that cannot run the kernels."""


@cache
def is_hopper(device: int) -> bool:
    """Tell whether a CUDA device is a Hopper GPU, which can run the kernels."""
    return bool(_properties(device).major == HOPPER)


@cache
def gpu_of(device: int) -> Gpu:
    """Return the kind of a CUDA device. An unknown Hopper GPU counts as an H100 with its own number of SMs."""
    properties = _properties(device)
    if properties.major != HOPPER:
        raise UnsupportedGpuError(
            f"deep_gemm's kernels need a Hopper GPU (compute capability 9.0); cuda:{device} is {properties.name}, "
            f"compute capability {properties.major}.{properties.minor}"
        )
    known = next((gpu for gpu in GPUS if gpu.name in properties.name), H100)
    return replace(known, num_sms=properties.multi_processor_count)


def _properties(device: int) -> Any:
    import torch  # here, because settings and core/jit must import without torch

    return torch.cuda.get_device_properties(device)
