"""The kernel of cuda/fp8_gemm.cuh: how it is compiled for a configuration, and launched for a problem."""

from __future__ import annotations

import struct
import threading
from functools import cache

import torch
from torch import Tensor

from .. import jit
from ..config import BLOCK_K, WGMMA_ROWS, GemmConfig, Output
from ..heuristics import gpu_of, select
from ..jit import driver
from ..layout import SCALE_BLOCK, align, ceil_div, get_mn_major_tma_aligned_tensor
from ..problem import DenseProblem
from ..settings import get_compile_mode, get_num_sms
from ..tensor_map import ADDRESS_ALIGNMENT, ElementType, TensorMap
from .sources import cuda_sources
from .wgmma_header import wgmma_header

SOURCE = '#include "fp8_gemm.cuh"\n'
NAME = "fp8_gemm_kernel"
MAX_PLANS = 4096


def headers(config: GemmConfig) -> dict[str, str]:
    """Everything that the kernel's source includes, for one configuration."""
    return {
        **cuda_sources(),
        "config.cuh": config.header(),
        "wgmma_shapes.cuh": wgmma_header([config.unit_n or config.block_n]),
    }


def build(config: GemmConfig) -> jit.CompiledKernel:
    """Compile the kernel, or take it from the cache."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"config: {reason}, got {config}")
    return jit.build(SOURCE, headers(config), name=NAME)


class Plan:
    """A launch for one shape, with everything that does not change from call to call prepared."""

    # Words of Params in cuda/fp8_gemm.cuh that each call writes: the first word of each tensor map, and two pointers.
    _MAP_A, _MAP_B, _MAP_SFA, _MAP_D, _SFB, _C = 0, 16, 32, 48, 64, 65

    def __init__(self, p: DenseProblem, sfa: Tensor, num_sms: int) -> None:
        self.config = select(p.m, p.n, p.k, _output(p), gpu_of(p.d.device.index), num_sms)
        self._maps = tensor_maps(self.config, p, sfa)
        self._params = driver.ParamsBuffer(encoded_maps(self._maps, p, sfa) + scalars(p))
        kernel = _loaded(self.config, p.d.device.index)
        grid = _grid(self.config, p, num_sms)
        self._launch = driver.Launch(kernel, self._params, grid, self.config.num_threads, self.config.cluster_size)
        self._words = self._params.words
        self._lock = threading.Lock()  # addresses are written and read by the launch in one go

    def run(self, p: DenseProblem, sfa: Tensor, stream: int) -> None:
        """Launch for tensors of the plan's shapes at any addresses."""
        words = self._words
        with self._lock:
            if driver.address_is_first_word():
                words[self._MAP_A] = p.a.data_ptr()
                words[self._MAP_B] = p.b.data_ptr()
                words[self._MAP_SFA] = sfa.data_ptr()
                words[self._MAP_D] = p.d.data_ptr()
            else:
                self._params.write(encoded_maps(self._maps, p, sfa))
            words[self._SFB] = p.sfb.data_ptr()
            words[self._C] = 0 if p.c is None else p.c.data_ptr()
            self._launch(stream)


_plans: dict[tuple[object, ...], Plan] = {}


def run(p: DenseProblem) -> None:
    """Compute a dense product on the GPU that its tensors are on."""
    if p.m == 0 or p.n == 0:
        return
    if p.k == 0:
        p.d.zero_() if p.c is None else p.d.copy_(p.c)
        return
    sfa = get_mn_major_tma_aligned_tensor(p.sfa)
    device = p.d.device.index
    with torch.cuda.device(device):
        num_sms = get_num_sms()
        key = (p.m, p.n, p.k, p.sfb_rows, p.d.dtype, device, num_sms, _strides(p, sfa), _output(p))
        plan = _plans.get(key)
        if plan is None:
            if len(_plans) >= MAX_PLANS:
                del _plans[next(iter(_plans))]
            plan = _plans[key] = Plan(p, sfa, num_sms)
        if get_compile_mode() == 1:
            return
        plan.run(p, sfa, torch.cuda.current_stream(device).cuda_stream)


def can_run(p: DenseProblem) -> bool:
    """Tell whether this kernel computes such a product."""
    return p.sfb_rows == SCALE_BLOCK


def _strides(p: DenseProblem, sfa: Tensor) -> tuple[object, ...]:
    c_stride = None if p.c is None else p.c.stride(0)
    return p.a.stride(0), sfa.stride(1), p.b.stride(0), p.sfb.stride(), p.d.stride(0), c_stride


def _output(p: DenseProblem) -> Output:
    is_fp32 = p.d.dtype == torch.float32
    if p.c is None:
        return Output(is_fp32)
    if is_fp32 and p.c.data_ptr() == p.d.data_ptr():
        return Output(is_fp32, adds_to_d=True)
    return Output(is_fp32, with_c=True)


def _grid(config: GemmConfig, p: DenseProblem, num_sms: int) -> int:
    """One CTA for each SM, but no more clusters than tiles to share out."""
    tiles_m, tiles_n = ceil_div(p.m, config.block_m), ceil_div(p.n, config.block_n)
    cluster_tiles = ceil_div(tiles_m, config.cluster_m) * ceil_div(tiles_n, config.cluster_n)
    return min(num_sms // config.cluster_size, cluster_tiles) * config.cluster_size


@cache
def _loaded(config: GemmConfig, device: int) -> driver.Kernel:
    return driver.Kernel(build(config).cubin, NAME, config.shared_bytes)


def tensor_maps(config: GemmConfig, p: DenseProblem, sfa: Tensor) -> tuple[TensorMap, TensorMap, TensorMap, TensorMap]:
    """What TMA is told of A, B, the scales of A (m-major) and D."""
    output = ElementType.FLOAT32 if config.output_is_fp32 else ElementType.BFLOAT16
    return (
        _matrix(ElementType.UINT8, p.a, (config.block_m // config.cluster_n, BLOCK_K), 128),
        _matrix(ElementType.UINT8, p.b, (config.block_n // config.cluster_m, BLOCK_K), 128),
        _matrix(ElementType.FLOAT32, sfa.t(), (1, config.block_m), 0),
        _matrix(output, p.d, (WGMMA_ROWS, config.panel_columns), config.panel_columns * config.output_bytes),
    )


def encoded_maps(maps: tuple[TensorMap, ...], p: DenseProblem, sfa: Tensor) -> bytes:
    """Encode the maps for where the tensors lie."""
    return b"".join(driver.encode(m, x.data_ptr()) for m, x in zip(maps, (p.a, p.b, sfa, p.d), strict=True))


def _matrix(element: ElementType, x: Tensor, box: tuple[int, int], swizzle: int) -> TensorMap:
    """A row-major matrix. The stride of a single row is nowhere used, but TMA still demands a multiple of 16 bytes."""
    rows, columns = x.shape
    pitch = x.stride(0) if rows > 1 else align(columns, ADDRESS_ALIGNMENT)
    return TensorMap(element, (columns, rows), (pitch * element.value,), (box[1], box[0]), swizzle)


def scalars(p: DenseProblem) -> bytes:
    """Pack what follows the tensor maps in `Params` of cuda/fp8_gemm.cuh."""
    c_address, c_pitch = (p.c.data_ptr(), p.c.stride(0)) if p.c is not None else (0, 0)
    return struct.pack(
        "<QQQIIIII", p.sfb.data_ptr(), c_address, c_pitch, p.sfb.stride(0), p.sfb.stride(1), p.m, p.n, p.k
    )
