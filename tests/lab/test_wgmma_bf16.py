"""BF16 WGMMA in both majors: the simulator compared with FP64, and with a GPU to the bit. See docs/simulator.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deep_gemm.core.jit import driver
from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.tensor_map import ElementType, TensorMap
from deep_gemm.core.kernel import launch
from deep_gemm.core.sources import cuda_sources
from deep_gemm.core.wgmma_header import wgmma_bf16_header
from lab.sim import Buffer, Map, Pointer, Struct, compile_kernel, simulate

SOURCE = '#include "wgmma_bf16.cuh"\n'
TEXT = (Path(__file__).parent / "sim_kernels" / "wgmma_bf16.cuh").read_text()
Majors = tuple[bool, bool]
MAJORS: list[Majors] = [(False, False), (False, True), (True, False), (True, True)]


def headers(n: int, majors: Majors) -> dict[str, str]:
    constants = [f"constexpr uint32_t kN = {n};"]
    constants += [f"constexpr bool k{name}IsMnMajor = {is_mn:d};" for name, is_mn in zip("AB", majors, strict=True)]
    return {
        **cuda_sources(),
        "wgmma_bf16.cuh": TEXT,
        "config.cuh": "\n".join(["#pragma once", '#include "types.cuh"', *constants, ""]),
        "wgmma_shapes.cuh": wgmma_bf16_header([n], *majors),
    }


def shared_bytes(n: int) -> int:
    return (1 + -(-n // 64)) * 64 * 128 + 1024


def laid(x: Tensor, is_mn_major: bool) -> Tensor:
    return x.T.contiguous() if is_mn_major else x.contiguous()


def tensor_map(x: Tensor) -> TensorMap:
    rows, columns = x.shape
    return TensorMap(ElementType.BFLOAT16, (columns, rows), (columns * 2,), (64, 64), 128)


def simulated(a: Tensor, b: Tensor, majors: Majors, *, truncate: bool) -> Tensor:
    n, k = b.shape
    a, b = (laid(x, is_mn) for x, is_mn in zip((a, b), majors, strict=True))
    params = Struct(Map("a", tensor_map(a)), Map("b", tensor_map(b)), Pointer("d"), k)
    buffers = {"a": Buffer(a), "b": Buffer(b), "d": Buffer(torch.full((64, n), float("nan")), is_writable=True)}
    kernel = compile_kernel(SOURCE, headers(n, majors), name="wgmma_bf16_kernel")
    result = simulate(kernel, [params], buffers, threads=128, shared_bytes=shared_bytes(n), truncate=truncate)
    d = result.buffers["d"]
    assert isinstance(d, Tensor)
    return d


def on_gpu(a: Tensor, b: Tensor, majors: Majors) -> Tensor:
    n, k = b.shape
    a, b = (laid(x, is_mn).cuda() for x, is_mn in zip((a, b), majors, strict=True))
    d = torch.full((64, n), float("nan"), device="cuda")
    kernel = driver.Kernel(compile_cubin(SOURCE, headers(n, majors), name="wgmma_bf16_kernel"), shared_bytes(n))
    params = b"".join(driver.encode(tensor_map(x), x.data_ptr()) for x in (a, b))
    params += d.data_ptr().to_bytes(8, "little") + k.to_bytes(4, "little") + bytes(52)
    launch(driver.Launcher(kernel, len(params), 128, 1), params, 1, a.device.index)
    return d.cpu()


def normal(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g).bfloat16()


def wide(low: int, high: int) -> Callable[[tuple[int, int], torch.Generator], Tensor]:
    """Return a function that draws BF16 numbers of either sign with stored exponents from `low` to `high` - 1."""

    def make(shape: tuple[int, int], g: torch.Generator) -> Tensor:
        bits = torch.randint(low << 7, high << 7, shape, generator=g) | torch.randint(0, 2, shape, generator=g) << 15
        return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.bfloat16)

    return make


OPERANDS: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "normally distributed": normal,
    "eight binades": wide(123, 131),
    "forty binades": wide(107, 147),
    "sparse": lambda shape, g: normal(shape, g) * (torch.rand(shape, generator=g) < 0.2),
    "subnormal": lambda shape, g: wide(0, 3)(shape, g) if shape[0] == 64 else wide(180, 184)(shape, g),
}


@pytest.mark.host_compiler
@pytest.mark.parametrize("n", [8, 48, 136])
@pytest.mark.parametrize("majors", MAJORS)
def test_products_are_right_in_both_majors(n: int, majors: Majors) -> None:
    g = torch.Generator().manual_seed(n)
    a, b = normal((64, 128), g), normal((n, 128), g)
    right = a.double() @ b.double().T
    d = simulated(a, b, majors, truncate=False)
    assert (d.double() - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.gpu
@pytest.mark.host_compiler
@pytest.mark.parametrize("n", [8, 136, 256])
@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize("kind", OPERANDS)
def test_simulator_and_gpu_give_the_same_bits(kind: str, majors: Majors, n: int) -> None:
    g = torch.Generator().manual_seed(n + len(kind))
    a, b = OPERANDS[kind]((64, 192), g), OPERANDS[kind]((n, 192), g)
    assert torch.equal(on_gpu(a, b, majors), simulated(a, b, majors, truncate=True))


def test_the_mnemonic_names_types_and_majors() -> None:
    assert "m64n24k16.f32.bf16.bf16" in wgmma_bf16_header([24])
    assert "%12, %13, p, 1, 1, 0, 1;" in wgmma_bf16_header([24], b_is_mn_major=True)
