"""The kernel of cuda/fp8_gemm.cuh where groups are along k, and cuda/k_group_maps.cuh, which runs ahead of it."""

from __future__ import annotations

import struct
import threading
from array import array
from functools import cache

import torch
from torch import Tensor

from .. import jit
from ..choose.config import BLOCK_K, GemmConfig, Groups, Output
from ..jit import driver
from ..jit.tensor_map import ElementType, TensorMap
from ..problem import KGroupedProblem
from ..problem.layout import ceil_div, get_mn_major_tma_aligned_tensor
from ..settings import get_pdl
from .fp8_gemm import loaded
from .plan import matrix_map, output_map
from .sources import cuda_sources

MAPS_SOURCE = '#include "k_group_maps.cuh"\n'
MAPS_NAME = "k_group_maps"
MAPS_THREADS = 32
"""Threads of its blocks, one for each group."""
MAX_INLINE_KS = 896
"""Depths from the host that it takes among its parameters."""
K_GROUP_BYTES = 320
"""Size of `KGroup` in cuda/k_groups.cuh, of which there is one for each group."""
COUNTER_BYTES = 4
"""Of what lies behind them, `tiles_come_for`."""


class Plan:
    """Both launches, prepared for operands of certain strides, a kind of C and a device. Depths and addresses vary."""

    # Words of Params in cuda/fp8_gemm.cuh: five tensor maps, of which the groups' A and B have none here, and pointers.
    _SFA, _D_MAP, _SFB, _C, _D, _K_GROUPS = 32, 48, 64, 81, 82, 88

    def __init__(self, p: KGroupedProblem, config: GemmConfig, num_sms: int) -> None:
        """`p` is `prepared` for the kernel."""
        self.config = config
        device = p.d.get_device()
        self._params = driver.ParamsBuffer(self._encoded(p) + scalars(p))
        self._num_k_blocks = p.sfa.shape[1]
        like_a, like_b = (
            driver.encode(map_, values.data_ptr())
            for map_, values in zip(templates(config, p), (p.a, p.b), strict=True)
        )
        self._map_params = driver.ParamsBuffer(like_a + like_b + bytes(MAP_SCALARS.size + 4 * MAX_INLINE_KS))
        maps_grid = ceil_div(p.num_groups, MAPS_THREADS)
        self._make_maps = driver.Launch(
            loaded_maps(device), self._map_params, maps_grid, MAPS_THREADS, 1, is_dependent=get_pdl()
        )
        # It waits for the maps itself, and begins while they are made.
        self._multiply = driver.Launch(
            loaded(config, device),
            self._params,
            grid(config, p, num_sms),
            config.num_threads,
            config.cluster_size,
            is_dependent=True,
        )
        self._lock = threading.Lock()  # parameters are written and read by the launches in one go

    def launch(self, p: KGroupedProblem) -> None:
        """Launch for a problem like the plan's, `prepared`, on the current stream."""
        # Memory of this call alone: whatever else is under way, on any stream or in a graph, has its own maps.
        k_groups = torch.empty(k_groups_bytes(p), dtype=torch.uint8, device=p.d.device)
        ks, inline_ks = depths(p)
        at_ks = 0 if ks is None else ks.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(p.d.get_device())
        with self._lock:
            at_maps = 2 * driver.TENSOR_MAP_BYTES
            self._map_params.write(map_scalars(p, k_groups.data_ptr(), at_ks) + inline_ks, at_maps)
            words = self._params.words
            words[self._SFA], words[self._SFB] = p.sfa.data_ptr(), p.sfb.data_ptr()
            words[self._D_MAP] = words[self._D] = p.d.data_ptr()
            words[self._C] = 0 if p.c is None else p.c.data_ptr()
            words[self._K_GROUPS] = k_groups.data_ptr()
            if p.sfa.shape[1] != self._num_k_blocks or not driver.address_is_first_word():
                self._params.write(self._encoded(p))
                self._num_k_blocks = p.sfa.shape[1]
            self._make_maps(stream)
            self._multiply(stream)

    def _encoded(self, p: KGroupedProblem) -> bytes:
        """The head of Params, with room for what is not there."""
        nothing = bytes(driver.TENSOR_MAP_BYTES)
        maps = tensor_maps(self.config, p)
        sfa, d, sfb = (driver.encode(maps[name], getattr(p, name).data_ptr()) for name in ("sfa", "d", "sfb"))
        return nothing + nothing + sfa + d + sfb


def maps_headers() -> dict[str, str]:
    """Everything that the source of the first kernel includes; it has no configuration."""
    return cuda_sources()


@cache
def loaded_maps(device: int) -> driver.Kernel:
    """Get the first kernel on a device, compiled and loaded at first need."""
    return driver.Kernel(jit.build(MAPS_SOURCE, maps_headers(), name=MAPS_NAME), 0)


def output_of(p: KGroupedProblem) -> Output:
    """What decides the kernel's code besides the tile."""
    adds_to_d = p.c is not None and p.c.data_ptr() == p.d.data_ptr()
    with_c = p.c is not None and not adds_to_d
    return Output(True, with_c=with_c, adds_to_d=adds_to_d, sfb_is_per_row=True, groups=Groups.DEPTHS)


def prepared(p: KGroupedProblem) -> KGroupedProblem:
    """Lay scales out for TMA; the problem itself where they lie so."""
    sfa, sfb = get_mn_major_tma_aligned_tensor(p.sfa), get_mn_major_tma_aligned_tensor(p.sfb)
    return p if sfa is p.sfa and sfb is p.sfb else p._replace(sfa=sfa, sfb=sfb)


def grid(config: GemmConfig, p: KGroupedProblem, num_sms: int) -> int:
    """One CTA for each SM, but no more clusters than tiles to share out.

    Of an odd number of SMs, as a caller may set it, clusters leave one idle.
    """
    tiles_m, pairs_n = ceil_div(p.m, config.block_m), ceil_div(p.n, config.block_n * config.cluster_n)
    clusters = min(max(num_sms // config.cluster_size, 1), p.num_groups * tiles_m * pairs_n)
    return clusters * config.cluster_size


def k_groups_bytes(p: KGroupedProblem) -> int:
    """Size of what the first kernel writes for the second."""
    return p.num_groups * K_GROUP_BYTES + COUNTER_BYTES


def tensor_maps(config: GemmConfig, p: KGroupedProblem) -> dict[str, TensorMap]:
    """What TMA is told of the operands that all groups share, scales m-major."""
    return {
        "sfa": matrix_map(ElementType.FLOAT32, p.sfa, (1, config.box_rows_of_a), 0, transposed=True),
        "d": output_map(config, p.d),
        "sfb": matrix_map(ElementType.FLOAT32, p.sfb, (1, config.block_n), 0, transposed=True),
    }


def templates(config: GemmConfig, p: KGroupedProblem) -> tuple[TensorMap, TensorMap]:
    """Maps of some group's A and B: addresses, sizes and strides along k are replaced by each group's own."""
    a, b = (
        TensorMap(ElementType.UINT8, (BLOCK_K, rows), (BLOCK_K,), (BLOCK_K, block), 128)
        for rows, block in ((p.m, config.box_rows_of_a), (p.n, config.block_n))
    )
    return a, b


def depths(p: KGroupedProblem) -> tuple[Tensor | None, bytes]:
    """The groups' k, as a tensor on the GPU or as bytes to be passed along. The host waits for neither."""
    if p.ks_tensor is not None:
        return p.ks_tensor, b""
    ks = p.ks or ()
    if len(ks) <= MAX_INLINE_KS:
        return None, array("i", ks).tobytes()
    # More than fit a kernel's parameters; to capture such a call in a graph, pass `ks_tensor`.
    return torch.tensor(ks, dtype=torch.int32).pin_memory().to(p.d.device, non_blocking=True), b""


MAP_SCALARS = struct.Struct("<4Q5I")


def map_scalars(p: KGroupedProblem, k_groups: int, ks: int) -> bytes:
    """Pack what `MapParams` of cuda/k_group_maps.cuh holds between its maps and the inline depths."""
    sizes = (p.m, p.n, p.num_groups, p.a.numel() // p.m, p.sfa.shape[1])
    return MAP_SCALARS.pack(p.a.data_ptr(), p.b.data_ptr(), k_groups, ks, *sizes)


def scalars(p: KGroupedProblem) -> bytes:
    """Pack what follows the tensor maps in `Params` of cuda/fp8_gemm.cuh; pointers are written for each launch."""
    return struct.pack("<5Q5I4x2Q4I", 0, 0, 0, *pitches(p), 0, 0, p.m, p.n, 0, 0, c_stride(p), p.num_groups, 0, 0, 0)


def pitches(p: KGroupedProblem) -> tuple[int, int]:
    """Elements from one row of C, and of D, to the next."""
    return 0 if p.c is None else p.c.stride(1), p.d.stride(1)


def c_stride(p: KGroupedProblem) -> int:
    """Elements from one group's C to the next."""
    return 0 if p.c is None else p.c.stride(0)
