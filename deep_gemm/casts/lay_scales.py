"""The kernel of casts/lay_scales.cuh, which copies scales to the layout that TMA loads, and the choice to use it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import call
from ..core.check.layout import ceil_div, empty_mn_major, is_mn_major_tma_aligned
from ..core.check.ue8m0 import numbers_of
from ..core.gpu import is_hopper
from ..core.kernel import Config, Kernel


@dataclass(frozen=True)
class ScalesConfig(Config):
    """The only configuration. A CTA copies the scales of `rows` rows and `blocks` k-blocks."""

    rows: int = 64
    blocks: int = 32
    num_threads: int = 256
    ctas_per_sm: int = 4
    taken = "rows", "blocks", "num_threads", "ctas_per_sm", "shared_bytes"

    @property
    def name(self) -> str:
        """Short description for people: rows x blocks."""
        return f"{self.rows}x{self.blocks}"

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in casts/lay_scales.cuh, which asserts the same size."""
        return self.blocks * (self.rows + 1) * 4

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs for a configuration that the kernel can be built for."""
        yield self.rows * self.blocks % self.num_threads == 0, "an equal number of scales for each thread"


CONFIG = ScalesConfig()
KERNEL: Kernel[ScalesConfig] = Kernel("lay_scales", "ScalesParams", lambda: [CONFIG])


def mn_major(sf: Tensor) -> Tensor:
    """Return FP32 scales `[m, k_blocks]` or `[groups, m, k_blocks]` in TMA's layout. Copy them only if needed."""
    return sf if is_mn_major_tma_aligned(sf) else laid_out(sf)


def laid_out(sf: Tensor, k_blocks: int | None = None) -> Tensor:
    """Copy scales with any strides to FP32 scales that TMA can load.

    `k_blocks`: a row's number of scales. It is needed if `sf` may be UE8M0, in words or in bytes that form whole words.
    """
    return call.run(LAID, (sf,), (k_blocks,))  # type: ignore[no-any-return]


def _laid_out(sf: Tensor, k_blocks: int | None) -> Tensor:
    sf = sf if sf.dtype == torch.float32 else sf.view(torch.int32)
    out = empty_mn_major(sf, k_blocks)
    if not has_kernel(sf):
        return out.copy_(numbers_of(sf.detach(), out.shape[-1]))
    run(sf, out)
    return out


LAID = call.Function(_laid_out, _laid_out, lambda sf: (sf,), call.never)


def has_kernel(sf: Tensor) -> bool:
    """Tell whether scales are on a GPU that can run the kernel."""
    device = sf.get_device()
    return device >= 0 and is_hopper(device)


def run(sf: Tensor, out: Tensor) -> None:
    """Copy scales, FP32 or words, on their GPU to `out`, which `empty_mn_major` has made."""
    if sf.numel() != 0:
        KERNEL.run(CONFIG, values_of(sf, out), grid(CONFIG, out), sf.get_device())


def grid(config: ScalesConfig, out: Tensor) -> int:
    """Count CTAs: one for each tile of each group."""
    *groups, m, k_blocks = out.shape
    return (groups[0] if groups else 1) * ceil_div(m, config.rows) * ceil_div(k_blocks, config.blocks)


def values_of(sf: Tensor, out: Tensor) -> dict[str, Any]:
    """Return the values of the kernel's parameters by member."""
    *group_strides, stride_m, stride_k = sf.stride()
    return {
        "sf": sf,
        "out": out,
        "group_stride": group_strides[0] if group_strides else 0,
        "stride_m": stride_m,
        "stride_k": stride_k,
        "pitch": out.stride(-1),
        "m": out.shape[-2],
        "k_blocks": out.shape[-1],
        "reads_along_m": int(stride_m < stride_k),
        "are_words": int(sf.dtype == torch.int32),
    }
