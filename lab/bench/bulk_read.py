"""The kernel of bulk_read.cuh, whose time on the same GPU is compared with kernels that stream weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deep_gemm.core.kernel import Config, Kernel
from deep_gemm.core.params import Params
from deep_gemm.core.settings import get_num_sms

READ = "bulk_read"
SOURCE = Path(__file__).with_name("bulk_read.cuh")
PARAMS = Params.of_source(SOURCE.read_text(), "ReadParams")


@dataclass(frozen=True)
class ReadConfig(Config):
    """The only configuration: a CTA keeps `slots` requests of `chunk` bytes in flight."""

    slots: int = 12
    chunk: int = 16384
    num_threads: int = 32

    @property
    def name(self) -> str:
        """Return a short name for people."""
        return f"{self.slots}x{self.chunk}"

    @property
    def shared_bytes(self) -> int:
        """Return the size of `SharedStorage` in bulk_read.cuh, which asserts the same size."""
        return -(-self.slots * (self.chunk + 8) // 128) * 128

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers that the source needs."""
        return {
            "kSlots": self.slots,
            "kChunk": self.chunk,
            "kNumThreads": self.num_threads,
            "kSharedBytes": self.shared_bytes,
        }


class OfLaboratory(Kernel[ReadConfig]):
    """A kernel whose source is in this folder, not in the package."""

    def headers(self, config: ReadConfig) -> dict[str, str]:
        """Return all files that the source includes."""
        return {**super().headers(config), SOURCE.name: SOURCE.read_text()}


CONFIG = ReadConfig()
KERNEL = OfLaboratory(READ, PARAMS, lambda: [CONFIG])


def read(source: Tensor) -> None:
    """Copy a whole tensor, contiguous and a multiple of 16 bytes, into the shared memory of all SMs."""
    if not source.is_cuda:
        source.clone()
        return
    KERNEL.run(CONFIG, values_of(source), get_num_sms(), source.get_device())


def values_of(source: Tensor) -> dict[str, Any]:
    """Return the members of the kernel's parameters."""
    if not source.is_contiguous() or source.nbytes % 16:
        raise ValueError(f"source: expected contiguous whole 16 bytes, got {source.nbytes} of {source.stride()}")
    return {"source": source, "bytes": source.nbytes}


def read_of(count: int) -> Tensor:
    """Make `count` random bytes, rounded up to a multiple of 16, as the source of a read on the current device."""
    return torch.randint(0, 256, (-(-count // 16) * 16,), dtype=torch.uint8)
