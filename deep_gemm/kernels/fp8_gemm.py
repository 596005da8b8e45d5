"""The kernel of cuda/fp8_gemm.cuh: how it is compiled for a configuration, and launched for a problem."""

from __future__ import annotations

import struct
import sys
import threading
from functools import cache

import torch
from torch import Tensor

from .. import jit
from ..config import BLOCK_K, WARPGROUP_THREADS, WGMMA_K, WGMMA_ROWS, GemmConfig, Output
from ..gates import CodePlan
from ..heuristics import gpu_of, select
from ..jit import driver
from ..layout import SCALE_BLOCK, align, ceil_div, get_mn_major_tma_aligned_tensor
from ..problem import DenseProblem
from ..settings import get_compile_mode, get_num_sms, settings
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


def code_plan(config: GemmConfig) -> CodePlan:
    """Derive what the kernel's machine code must consist of.

    The k loop is there once: `#pragma unroll 1` keeps NVRTC from unrolling it, and neither NVRTC nor ptxas peels it.
    """
    producer_registers, math_registers = config.registers
    stores = config.units_per_warpgroup * (config.unit_n or config.block_n) // config.panel_columns
    return CodePlan(
        roles=(
            (WARPGROUP_THREADS, producer_registers),
            (WARPGROUP_THREADS * config.num_math_warpgroups, math_registers),
        ),
        shared_bytes=config.shared_bytes,
        qgmma=config.units_per_warpgroup * BLOCK_K // WGMMA_K,
        tma_loads=3,  # A, its scales, B
        multicast_loads=1 if config.cluster_size > 1 else 0,
        tma_stores=0 if config.adds_to_d else stores,
        tma_reduces=stores if config.adds_to_d else 0,
    )


class Plan:
    """A launch prepared for operands of certain shapes, strides, types and device, at any addresses."""

    # Words of Params in cuda/fp8_gemm.cuh that each call writes: the first word of each tensor map, and two pointers.
    _MAP_A, _MAP_B, _MAP_SFA, _MAP_D, _SFB, _C = 0, 16, 32, 48, 64, 65

    def __init__(self, p: DenseProblem, sfa: Tensor, num_sms: int, config: GemmConfig | None = None) -> None:
        self.output = _output(p)
        # Chosen for the whole GPU: with fewer SMs the same kernel runs on a smaller grid, and nothing is compiled.
        self.config = config or select(p.m, p.n, p.k, self.output, gpu_of(p.d.device.index))
        if settings().print_configs:
            print(f"deep_gemm: {p.m} x {p.n} x {p.k} runs {self.config.name}", file=sys.stderr)
        self._device = p.d.device.index
        self._shape, self._dtype = (p.m, p.n), p.d.dtype
        self._maps = tensor_maps(self.config, p, sfa)
        self._params = driver.ParamsBuffer(driver.encode_all(self._maps, _addresses(p, sfa)) + scalars(p))
        self._words = self._params.words
        self._spans = tuple(_span(x) for x in (p.a, sfa, p.b, p.sfb, p.d))
        self._span_c = 0 if p.c is None else _span(p.c)
        self._launch = driver.Launch(
            loaded(self.config, self._device),
            self._params,
            grid(self.config, p, num_sms),
            self.config.num_threads,
            self.config.cluster_size,
        )
        self._patches_maps = driver.address_is_first_word()
        self._lock = threading.Lock()  # addresses are written and read by the launch in one go

    def run(self, a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, d: Tensor, c: Tensor | None) -> bool:
        """Compute a product of operands like the plan's. False, and nothing done, if addresses need a closer look."""
        at_a, at_sfa, at_b, at_sfb, at_d = a.data_ptr(), sfa.data_ptr(), b.data_ptr(), sfb.data_ptr(), d.data_ptr()
        at_c = 0 if c is None else c.data_ptr()
        span_a, span_sfa, span_b, span_sfb, span_d = self._spans
        end_d = at_d + span_d
        if (
            (at_a | at_sfa | at_b | at_d | at_c) % ADDRESS_ALIGNMENT
            or (at_d < at_a + span_a and at_a < end_d)
            or (at_d < at_b + span_b and at_b < end_d)
            or (at_d < at_sfa + span_sfa and at_sfa < end_d)
            or (at_d < at_sfb + span_sfb and at_sfb < end_d)
            or (c is not None and not self._c_may_be_at(at_c, at_d))
        ):
            return False
        self.launch(at_a, at_sfa, at_b, at_sfb, at_d, at_c)
        return True

    def new_output(self) -> Tensor:
        """Make a D like that of the plan."""
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

    def launch(self, at_a: int, at_sfa: int, at_b: int, at_sfb: int, at_d: int, at_c: int) -> None:
        """Launch for operands at these addresses, on the current stream of the plan's device."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        with self._lock:
            words = self._words
            if self._patches_maps:
                words[self._MAP_A] = at_a
                words[self._MAP_B] = at_b
                words[self._MAP_SFA] = at_sfa
                words[self._MAP_D] = at_d
            else:
                self._params.write(driver.encode_all(self._maps, (at_a, at_b, at_sfa, at_d)))
            words[self._SFB] = at_sfb
            words[self._C] = at_c
            if torch._C._cuda_getDevice() == self._device:
                self._launch(stream)
            else:
                with torch.cuda.device(self._device):
                    self._launch(stream)

    def _c_may_be_at(self, at_c: int, at_d: int) -> bool:
        """C is D, or apart from it, as it was for the operands that the plan was made for."""
        if self.output.adds_to_d or at_c == at_d:
            return at_c == at_d and (self.output.adds_to_d or not self.output.is_fp32)
        span_d = self._spans[-1]
        return at_c + self._span_c <= at_d or at_d + span_d <= at_c


_plans: dict[tuple[object, ...], Plan] = {}


def run(p: DenseProblem, config: GemmConfig | None = None) -> Plan | None:
    """Compute a dense product on the GPU that its tensors are on. The plan serves later products of the same kind.

    `config` None leaves the choice to the heuristics.
    """
    if p.m == 0 or p.n == 0:
        return None
    if p.k == 0:
        p.d.zero_() if p.c is None else p.d.copy_(p.c)
        return None
    sfa = get_mn_major_tma_aligned_tensor(p.sfa)
    with torch.cuda.device(p.d.device):
        num_sms = get_num_sms()
        key = (p.m, p.n, p.k, p.sfb_rows, p.d.dtype, p.d.device, num_sms, _strides(p, sfa), _output(p), config)
        plan = _plans.get(key)
        if plan is None:
            make_room(_plans)
            plan = _plans[key] = Plan(p, sfa, num_sms, config)
        if get_compile_mode() == 1:
            return None
        at_a, at_b, at_sfa, at_d = _addresses(p, sfa)
        plan.launch(at_a, at_sfa, at_b, p.sfb.data_ptr(), at_d, 0 if p.c is None else p.c.data_ptr())
    return plan if sfa is p.sfa else None


def make_room(plans: dict[tuple[object, ...], Plan]) -> None:
    """Keep plans bounded in number: the oldest goes."""
    if len(plans) >= MAX_PLANS:
        del plans[next(iter(plans))]


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


def grid(config: GemmConfig, p: DenseProblem, num_sms: int) -> int:
    """One CTA for each SM, but no more clusters than tiles to share out."""
    tiles_m, tiles_n = ceil_div(p.m, config.block_m), ceil_div(p.n, config.block_n)
    cluster_tiles = ceil_div(tiles_m, config.cluster_m) * ceil_div(tiles_n, config.cluster_n)
    return min(max(num_sms // config.cluster_size, 1), cluster_tiles) * config.cluster_size


@cache
def loaded(config: GemmConfig, device: int) -> driver.Kernel:
    """Get the kernel of a configuration on a device, compiled and loaded at first need."""
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


def _addresses(p: DenseProblem, sfa: Tensor) -> tuple[int, int, int, int]:
    return p.a.data_ptr(), p.b.data_ptr(), sfa.data_ptr(), p.d.data_ptr()


def _span(x: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    return (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))) * x.element_size()


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
