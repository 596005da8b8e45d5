"""The kernel of cuda/gather_weighted.cuh: how it is compiled, and launched for the rows of experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .. import jit
from ..jit import driver
from ..problem.layout import ceil_div
from ..settings import get_compile_mode, get_pdl
from .code_plan import CodePlan
from .launch import launch
from .params import Field, Kind, Params
from .sources import cuda_sources

SOURCE = '#include "gather_weighted.cuh"\n'
NAME = "gather_weighted"
PARAMS = Params(
    "GatherParams",
    Field("y", Kind.POINTER),
    Field("row_of", Kind.POINTER),
    Field("weights", Kind.POINTER),
    Field("out", Kind.POINTER),
    Field("y_pitch", Kind.UINT64),
    Field("out_pitch", Kind.UINT64),
    Field("tokens", Kind.UINT32),
    Field("topk", Kind.UINT32),
    Field("n", Kind.UINT32),
)
"""`GatherParams` of cuda/gather_weighted.cuh."""
COLUMNS = 8
"""Columns of a thread: 16 bytes, at a multiple of which rows of y and of the output begin."""
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class GatherConfig:
    """One configuration."""

    weights: torch.dtype
    num_threads: int = 256

    @property
    def name(self) -> str:
        """Short, for people."""
        return f"weights in {str(self.weights).removeprefix('torch.')}"

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        return "\n".join(
            [
                "#pragma once",
                '#include "types.cuh"',
                f"constexpr uint32_t kWeightBytes = {self.weights.itemsize};",
                f"constexpr bool kWeightIsFp16 = {str(self.weights == torch.float16).lower()};",
                f"constexpr uint32_t kNumThreads = {self.num_threads};",
                "",
            ]
        )


def run(y: Tensor, row_of: Tensor, weights: Tensor, out: Tensor) -> None:
    """Sum up each token's rows on the GPU that they are on. `row_of` and `weights` are contiguous."""
    if out.numel() == 0:
        return
    device = y.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            run(y, row_of, weights, out)
        return
    config = GatherConfig(weights.dtype)
    launcher = launcher_of(config, device, get_pdl())
    if get_compile_mode() == 0:
        launch(launcher, params_of(y, row_of, weights, out), grid(config, *out.shape), device)


def reachable_gather() -> list[GatherConfig]:
    """Every configuration that `run` can take."""
    return [GatherConfig(dtype) for dtype in WEIGHTS]


def grid(config: GatherConfig, tokens: int, n: int) -> int:
    """As many CTAs for each token as its columns need."""
    return tokens * ceil_div(n // COLUMNS, config.num_threads)


def params_of(y: Tensor, row_of: Tensor, weights: Tensor, out: Tensor) -> bytes:
    """Give the kernel's parameters."""
    return PARAMS.pack(
        {
            "y": y.data_ptr(),
            "row_of": row_of.data_ptr(),
            "weights": weights.data_ptr(),
            "out": out.data_ptr(),
            "y_pitch": y.stride(0),
            "out_pitch": out.stride(0),
            "tokens": out.shape[0],
            "topk": row_of.shape[1],
            "n": out.shape[1],
        }
    )


def headers(config: GatherConfig) -> dict[str, str]:
    """Everything that the kernel's source includes, for one configuration."""
    return {**cuda_sources(), "config.cuh": config.header(), "gather_params_layout.cuh": PARAMS.layout_header()}


def build(config: GatherConfig) -> jit.CompiledKernel:
    """Compile the kernel, or take it from the cache."""
    return jit.build(SOURCE, headers(config), name=NAME)


def code_plan(config: GatherConfig) -> CodePlan:
    """Derive what the kernel's machine code must consist of: ordinary loads and stores alone."""
    return CodePlan(
        roles=((config.num_threads, None),), shared_bytes=0, qgmma=0, tma_loads=0, multicast_loads=0, ctas_per_sm=2
    )


@cache
def launcher_of(config: GatherConfig, device: int, is_dependent: bool) -> driver.Launcher:
    """Get the way a configuration is launched on a device, compiled and loaded at first need."""
    return driver.Launcher(
        driver.Kernel(build(config), 0), PARAMS.size, config.num_threads, 1, is_dependent=is_dependent
    )
