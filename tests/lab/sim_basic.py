"""The product of sim_kernels/basic.cuh: its configuration, its data, and what is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from deep_gemm.core.jit.tensor_map import ElementType, TensorMap
from deep_gemm.core.sources import cuda_sources
from deep_gemm.core.wgmma_header import wgmma_header
from lab.sim import Buffer, HostKernel, Map, Pointer, Result, Struct, compile_kernel, simulate
from lab.sim.trial import Trial

KERNELS = Path(__file__).parent / "sim_kernels"
SOURCE = '#include "basic.cuh"\n'


@dataclass(frozen=True)
class Config:
    block_n: int = 128
    num_stages: int = 3
    cluster_size: int = 1

    @property
    def shared_bytes(self) -> int:
        stage_bytes = (128 + self.block_n) * 128 + 128 * 4 + 16
        return -(-(128 * self.block_n * 2 + self.num_stages * stage_bytes) // 1024) * 1024

    def headers(self) -> dict[str, str]:
        constants = {
            "kBlockN": self.block_n,
            "kNumStages": self.num_stages,
            "kClusterSize": self.cluster_size,
            "kSharedBytes": self.shared_bytes,
        }
        lines = [f"constexpr uint32_t {name} = {value};" for name, value in constants.items()]
        return {
            **cuda_sources(),
            "basic.cuh": (KERNELS / "basic.cuh").read_text(),
            "config.cuh": "\n".join(["#pragma once", '#include "types.cuh"', *lines, ""]),
            "wgmma_shapes.cuh": wgmma_header([self.block_n]),
        }


@dataclass(frozen=True)
class Problem:
    a: torch.Tensor
    b: torch.Tensor
    sfa: torch.Tensor  # [k-blocks, m rounded up to 4], NaN in what rounding added
    sfb: torch.Tensor
    right: torch.Tensor

    @property
    def mnk(self) -> tuple[int, int, int]:
        return self.a.shape[0], self.b.shape[0], self.a.shape[1]


@cache
def problem(m: int, n: int, k: int) -> Problem:
    generator = torch.Generator().manual_seed(m * 7 + n * 5 + k)
    k_blocks, n_blocks = -(-k // 128), -(-n // 128)
    a, b = (torch.randn(rows, k, generator=generator).to(torch.float8_e4m3fn) for rows in (m, n))
    sfa = torch.full((k_blocks, -(-m // 4) * 4), float("nan"))
    sfa[:, :m] = torch.rand(k_blocks, m, generator=generator) + 0.5
    sfb = torch.rand(n_blocks, k_blocks, generator=generator) + 0.5
    right = torch.zeros(m, n, dtype=torch.float64)
    for i in range(k_blocks):
        columns = slice(i * 128, i * 128 + 128)
        scale = sfa[i, :m, None].double() * sfb[:, i].repeat_interleave(128)[None, :n].double()
        right += (a[:, columns].double() @ b[:, columns].double().T) * scale
    return Problem(a, b, sfa, sfb, right)


def compile_basic(config: Config, headers: Mapping[str, str] | None = None) -> HostKernel:
    return compile_kernel(SOURCE, headers or config.headers(), name="basic_kernel")


def run_basic(kernel: HostKernel, config: Config, p: Problem, **options: Any) -> tuple[torch.Tensor, Result]:
    m, n, k = p.mnk
    uint8, bf16, fp32 = ElementType.UINT8, ElementType.BFLOAT16, ElementType.FLOAT32
    panel = 64 if config.block_n % 64 == 0 else 32 if config.block_n % 32 == 0 else 16
    params = Struct(
        Map("a", TensorMap(uint8, (k, m), (k,), (128, 128), 128)),
        Map("b", TensorMap(uint8, (k, n), (k,), (128, config.block_n // config.cluster_size), 128)),
        Map("sfa", TensorMap(fp32, (m, p.sfa.shape[0]), (p.sfa.shape[1] * 4,), (128, 1))),
        Map("d", TensorMap(bf16, (n, m), (n * 2,), (panel, 64), panel * 2)),
        Pointer("sfb"),
        m,
        n,
        k,
    )
    buffers = {
        "a": Buffer(p.a),
        "b": Buffer(p.b),
        "sfa": Buffer(p.sfa),
        "sfb": Buffer(p.sfb, alignment=4),
        "d": Buffer(torch.full((m, n), float("nan"), dtype=torch.bfloat16), is_writable=True),
    }
    result = simulate(
        kernel,
        [params],
        buffers,
        threads=384,
        shared_bytes=config.shared_bytes,
        cluster_size=config.cluster_size,
        **options,
    )
    d = result.buffers["d"]
    assert isinstance(d, torch.Tensor)
    return d, result


class WrongResultError(AssertionError):
    """The kernel ended well, with wrong numbers."""


class OwnTrial(Trial):
    """A trial of what is no kernel of the package, and is not drawn."""

    @classmethod
    def drawn(cls, config: Any, seed: int) -> Trial:
        raise NotImplementedError

    def check(self, kernel: HostKernel | None = None) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class BasicTrial(OwnTrial):
    config: Config
    mnk: tuple[int, int, int]
    seed: int
    schedule: str | None = None

    def headers(self) -> dict[str, str]:
        return self.config.headers()

    def compiled(self, headers: Mapping[str, str] | None = None) -> HostKernel:
        return compile_basic(self.config, headers)

    def check(self, kernel: HostKernel | None = None) -> float:
        assert kernel is not None
        p = problem(*self.mnk)
        check(run_basic(kernel, self.config, p, seed=self.seed, schedule=self.schedule)[0], p)
        return 0.0


def check(d: torch.Tensor, p: Problem) -> None:
    """Each element within BF16's rounding of the right one."""
    bound = p.right.abs() * 2**-8 + p.right.square().mean().sqrt() * 1e-5
    wrong = ~((d.double() - p.right).abs() <= bound)
    if wrong.any():
        first = wrong.nonzero()[0].tolist()
        raise WrongResultError(
            f"{int(wrong.sum())} of {d.numel()} elements are wrong, {int(d.isnan().sum())} of them NaN; "
            f"the first, {first}: {d[tuple(first)].item()} instead of {p.right[tuple(first)].item():.6g}"
        )
