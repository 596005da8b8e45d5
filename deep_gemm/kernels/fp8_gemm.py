"""The kernel of cuda/fp8_gemm.cuh: how it is compiled for a configuration, and launched for a problem."""

from __future__ import annotations

import struct
from functools import cache

from torch import Tensor

from .. import jit
from ..config import BLOCK_K, WARPGROUP_THREADS, WGMMA_K, GemmConfig, Output
from ..gates import CodePlan
from ..jit import driver
from ..layout import align, ceil_div, get_mn_major_tma_aligned_tensor
from ..problem import DenseProblem
from ..tensor_map import ElementType, TensorMap
from . import plan
from .plan import AddressWords, matrix_map, output_map
from .sources import cuda_sources
from .wgmma_header import wgmma_header

SOURCE = '#include "fp8_gemm.cuh"\n'
NAME = "fp8_gemm_kernel"
GROUPS_BYTES = 32
"""Size of `Groups`, which ends `Params`; a dense product leaves it empty."""


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
    return jit.build(SOURCE, headers(config), name=NAME, passes=jit.passes_for(config.num_threads))


def code_plan(config: GemmConfig) -> CodePlan:
    """Derive what the kernel's machine code must consist of.

    The k loops, of runs and of the tail, are there once, or once more for the units of a tile that is short or narrow:
    `#pragma unroll 1` keeps NVRTC from unrolling them, and neither NVRTC nor ptxas peels them.
    """
    producer_registers, math_registers = config.registers
    k_blocks_in_code = config.run_k_blocks + config.has_tail
    units = config.units_per_warpgroup + config.units_of_part
    stores = units * (config.unit_n or config.block_n) // config.panel_columns
    boxes = 2  # of A and B
    if config.rows_are_grouped:
        boxes = config.block_m // config.box_rows_of_a + config.block_n // config.box_rows_of_b
    has_whole_d = config.rows_are_grouped and not config.sfb_is_per_row  # beside the one that cuts off
    return CodePlan(
        roles=(
            (WARPGROUP_THREADS, producer_registers),
            (WARPGROUP_THREADS * config.num_math_warpgroups, math_registers),
        ),
        shared_bytes=config.shared_bytes,
        qgmma=units * BLOCK_K // WGMMA_K * k_blocks_in_code,
        tma_loads=boxes + (2 if config.sfb_is_per_row else 1),  # and scales
        multicast_loads=0 if config.cluster_m * config.cluster_n == 1 else 2 if config.groups else 1,  # and A's scales
        tma_stores=0 if config.adds_to_d or config.cluster_k > 1 else stores * (1 + has_whole_d),
        tma_reduces=stores if config.adds_to_d else 0,
    )


class Plan(plan.Plan):
    """A launch of this kernel, prepared."""

    # Words of Params in cuda/fp8_gemm.cuh: five tensor maps, and three pointers.
    _WORDS = AddressWords(a=0, b=16, sfa=32, d=48, sfb=80, c=81)
    _SFB_MAP, _D_POINTER = 64, 82
    _M_AT = 688
    """Byte of m."""

    def __init__(self, p: DenseProblem, output: Output, config: GemmConfig, num_sms: int) -> None:
        """`p` is `prepared` for the kernel."""
        self.output, self.config, self._num_sms = output, config, num_sms
        a, sfa, b, sfb, d, c = self._WORDS
        super().__init__(
            p,
            maps=tensor_maps(config, p),
            tail=scalars(config, p),
            words=AddressWords(
                a,
                sfa,
                b,
                self._SFB_MAP if config.sfb_is_per_row else sfb,
                d if config.cluster_k == 1 else self._D_POINTER,
                c,
            ),
            kernel=loaded(config, p.d.get_device()),
            grid=grid(config, p, num_sms),
            threads=config.num_threads,
            cluster=config.cluster_size,
        )

    def prepared(self, p: DenseProblem) -> DenseProblem:
        """Lay scales that TMA loads out for it: m-major, in rows of a multiple of 16 bytes."""
        return prepared(self.config, p)

    def for_m(self, p: DenseProblem) -> Plan | None:
        """Derive, in less time, a plan for a problem that differs in m and the strides of A's scales alone.

        None where that cannot be. Neither has fewer rows than a tile, which makes other boxes; and the driver lays maps
        out as `sizes_are_numbers` says.
        """
        (pitch,) = scales_map(self.config.block_m, p.sfa).strides
        if pitch >= driver.STRIDE_LIMIT:
            return None
        rows_at, number = driver.size_number(1, p.m)
        scales_at, _ = driver.size_number(0, p.m)
        pitch_at, pitch_number = driver.stride_number(pitch)
        rows_of_d_at, _ = driver.size_number(2 if self.config.has_wide_panels else 1, p.m)
        a, sfa, d = 8 * self._WORDS.a, 8 * self._WORDS.sfa, 8 * self._WORDS.d
        numbers = {
            a + rows_at: number,
            sfa + scales_at: number,
            sfa + pitch_at: pitch_number,
            d + rows_of_d_at: number,
            self._M_AT: p.m,
        }
        return self._changed(p, grid(self.config, p, self._num_sms), numbers)

    def _c_may_be_at(self, at_c: int, at_d: int) -> bool:
        """C is D, or apart from it, as it was for the operands that the plan was made for."""
        if self.output.adds_to_d or at_c == at_d:
            return at_c == at_d and (self.output.adds_to_d or not self.output.is_fp32)
        return super()._c_may_be_at(at_c, at_d)


def prepared(config: GemmConfig, p: DenseProblem) -> DenseProblem:
    """Lay scales that TMA loads out for it: m-major, in rows of a multiple of 16 bytes. Itself, where they lie so."""
    sfa = get_mn_major_tma_aligned_tensor(p.sfa)
    sfb = get_mn_major_tma_aligned_tensor(p.sfb) if config.sfb_is_per_row else p.sfb
    return p if sfa is p.sfa and sfb is p.sfb else p._replace(sfa=sfa, sfb=sfb)


def why_unfit(config: GemmConfig, k: int, output: Output) -> str | None:
    """Say why a configuration would compute something else than this problem; None if it computes it."""
    of_output = (config.output_is_fp32, config.sfb_is_per_row, config.with_c or config.adds_to_d)
    if of_output != (output.is_fp32, output.sfb_is_per_row, output.with_c or output.adds_to_d):
        return "is for another type of D, another C, or other scales of B"
    if config.groups != output.groups:
        return "is for rows that are grouped otherwise, or not at all"
    if config.adds_to_d and not output.adds_to_d:
        return "adds to D, which is not C"
    k_blocks = ceil_div(k, BLOCK_K)
    if k_blocks % config.run_k_blocks and not config.has_tail:
        return f"has no code for the tail of {k_blocks} blocks of k in runs of {config.run_k_blocks}"
    return None


def grid(config: GemmConfig, p: DenseProblem, num_sms: int) -> int:
    """One CTA for each SM, but no more clusters than tiles to share out."""
    tiles_m, tiles_n = ceil_div(p.m, config.block_m), ceil_div(p.n, config.block_n)
    cluster_tiles = ceil_div(tiles_m, config.cluster_m) * ceil_div(tiles_n, config.cluster_n)
    return min(max(num_sms // config.cluster_size, 1), cluster_tiles) * config.cluster_size


@cache
def loaded(config: GemmConfig, device: int) -> driver.Kernel:
    """Get the kernel of a configuration on a device, compiled and loaded at first need."""
    return driver.Kernel(build(config), config.shared_bytes)


def tensor_maps(config: GemmConfig, p: DenseProblem) -> dict[str, TensorMap]:
    """What TMA is told of the operands, in the order of `Params`; the scales that it loads are m-major.

    Boxes of A have no rows that are never there, those of its scales at most what fills 16 bytes.
    """
    maps = {
        "a": matrix_map(ElementType.UINT8, p.a, (min(config.box_rows_of_a, p.m), BLOCK_K), 128),
        "b": matrix_map(ElementType.UINT8, p.b, (config.block_n // config.cluster_m, BLOCK_K), 128),
        "sfa": scales_map(min(config.block_m, align(p.m, 4)), p.sfa),
        "d": output_map(config, p.d),
    }
    if config.sfb_is_per_row:
        maps["sfb"] = scales_map(config.block_n, p.sfb)
    return maps


def scales_map(rows: int, sf: Tensor) -> TensorMap:
    """Scales by row, m-major, in boxes of so many rows and one block of k."""
    return matrix_map(ElementType.FLOAT32, sf, (1, rows), 0, transposed=True)


def scalars(config: GemmConfig, p: DenseProblem) -> bytes:
    """Pack what follows the tensor maps in `Params` of cuda/fp8_gemm.cuh; and room for that of sfb if there is none."""
    no_map = b"" if config.sfb_is_per_row else bytes(driver.TENSOR_MAP_BYTES)
    c_address, c_pitch = (p.c.data_ptr(), p.c.stride(0)) if p.c is not None else (0, 0)
    pointers = (p.sfb.data_ptr(), c_address, p.d.data_ptr())
    pitches = (c_pitch, p.d.stride(0))
    sizes = (p.sfb.stride(0), p.sfb.stride(1), p.m, p.n, p.k)
    return no_map + struct.pack("<QQQQQIIIII4x", *pointers, *pitches, *sizes) + bytes(GROUPS_BYTES)
