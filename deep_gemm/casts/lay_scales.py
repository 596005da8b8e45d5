"""The kernel of casts/lay_scales.cuh, which lays scales out as TMA loads them, and where it takes torch's place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ..core.check.layout import ceil_div, empty_mn_major, is_mn_major_tma_aligned
from ..core.gpu import is_hopper
from ..core.kernel import Config, Kernel
from ..core.params import Field, Kind, Params

PARAMS = Params(
    "ScalesParams",
    Field("sf", Kind.POINTER),
    Field("out", Kind.POINTER),
    Field("group_stride", Kind.UINT64),
    Field("stride_m", Kind.UINT64),
    Field("stride_k", Kind.UINT64),
    Field("pitch", Kind.UINT64),
    Field("m", Kind.UINT32),
    Field("k_blocks", Kind.UINT32),
    Field("reads_along_m", Kind.UINT32),
)
"""`ScalesParams` of casts/lay_scales.cuh."""


@dataclass(frozen=True)
class ScalesConfig(Config):
    """The configuration: there is one. A CTA copies `rows` rows of `blocks` blocks of k."""

    rows: int = 64
    blocks: int = 32
    num_threads: int = 256
    ctas_per_sm: int = 4

    @property
    def name(self) -> str:
        """Short, for people: rows x blocks."""
        return f"{self.rows}x{self.blocks}"

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in casts/lay_scales.cuh, which asserts that it is the same."""
        return self.blocks * (self.rows + 1) * 4

    def rules(self) -> Iterator[tuple[bool, str]]:
        """State what must hold for the kernel to be built so."""
        yield self.rows * self.blocks % self.num_threads == 0, "as many scales for each thread"

    def constants(self) -> dict[str, int | bool]:
        """Give the numbers that the source takes."""
        return {
            "kRows": self.rows,
            "kBlocks": self.blocks,
            "kNumThreads": self.num_threads,
            "kCtasPerSm": self.ctas_per_sm,
            "kSharedBytes": self.shared_bytes,
        }


CONFIG = ScalesConfig()
KERNEL: Kernel[ScalesConfig] = Kernel("lay_scales", PARAMS, lambda: [CONFIG])


def mn_major(sf: Tensor) -> Tensor:
    """Give FP32 scales `[m, k_blocks]` or `[groups, m, k_blocks]` as TMA loads them: themselves if they lie so."""
    return sf if is_mn_major_tma_aligned(sf) else laid_out(sf)


def laid_out(sf: Tensor) -> Tensor:
    """Copy FP32 scales, as they may lie, to where TMA can load them."""
    out = empty_mn_major(sf)
    if has_kernel(sf):
        run(sf, out)
    else:
        out.copy_(sf.detach())
    return out


def has_kernel(sf: Tensor) -> bool:
    """Tell whether scales lie on a GPU that the kernel is for."""
    device = sf.get_device()
    return device >= 0 and is_hopper(device)


def run(sf: Tensor, out: Tensor) -> None:
    """Copy scales to `out`, which `empty_mn_major` gave, on the GPU that they are on."""
    if sf.numel() > 0:
        KERNEL.run(CONFIG, params_of(sf, out), grid(CONFIG, sf), sf.get_device())


def grid(config: ScalesConfig, sf: Tensor) -> int:
    """A CTA for each tile of each group."""
    *groups, m, k_blocks = sf.shape
    return (groups[0] if groups else 1) * ceil_div(m, config.rows) * ceil_div(k_blocks, config.blocks)


def params_of(sf: Tensor, out: Tensor) -> bytes:
    """Give the kernel's parameters."""
    *group_strides, stride_m, stride_k = sf.stride()
    return PARAMS.pack(
        {
            "sf": sf.data_ptr(),
            "out": out.data_ptr(),
            "group_stride": group_strides[0] if group_strides else 0,
            "stride_m": stride_m,
            "stride_k": stride_k,
            "pitch": out.stride(-1),
            "m": sf.shape[-2],
            "k_blocks": sf.shape[-1],
            "reads_along_m": int(stride_m < stride_k),
        }
    )
