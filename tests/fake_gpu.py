"""A GPU that launches nothing: dense products of CPU tensors take the path of a GPU's, up to the driver."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from deep_gemm.gpus import H200, Gpu
from deep_gemm.jit import driver
from deep_gemm.jit.tensor_map import TensorMap
from deep_gemm.kernels import dense as kernels_dense
from deep_gemm.kernels import fp8_gemm, fp8_gemm_decode

MAP_BYTES = driver.TENSOR_MAP_BYTES


class OnGpu(Tensor):
    """A CPU tensor that dispatch takes for a GPU's."""

    is_cuda = True


def on_gpu(x: Tensor) -> Tensor:
    return x.as_subclass(OnGpu)


def encoded_map(sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], address: int) -> bytes:
    """A tensor map as drivers of today lay it out, so far as it depends on these."""
    encoded = bytearray(MAP_BYTES)
    struct.pack_into("<Q", encoded, 0, address)
    struct.pack_into(f"<{len(strides)}I", encoded, 12, *(stride >> 4 for stride in strides))
    struct.pack_into(f"<{len(sizes)}I", encoded, 32, *(size - 1 for size in sizes))
    struct.pack_into(f"<{len(box)}B", encoded, 55, *(extent - 1 for extent in box))
    return bytes(encoded)


@dataclass
class Launch:
    """What was launched: the configuration of the launch, and Params' 64-bit words as they were then."""

    kernel: str
    grid: int
    cluster: int
    is_dependent: bool
    words: tuple[int, ...]
    maps: tuple[TensorMap, ...]
    """Those that were encoded for the plan."""


@dataclass
class FakeGpu:
    """What came to the driver."""

    gpu: Gpu
    launches: list[Launch] = field(default_factory=list)
    compiled: list[Any] = field(default_factory=list)
    """Configurations, as kernels were built for them."""
    plans: int = 0
    """Launches prepared."""
    encoded: list[TensorMap] = field(default_factory=list)

    @property
    def last(self) -> Launch:
        return self.launches[-1]


class _FakeLaunch:
    gpu: FakeGpu

    def __init__(
        self,
        kernel: str,
        params: driver.ParamsBuffer,
        grid: int,
        threads: int,
        cluster: int,
        *,
        is_dependent: bool = False,
    ) -> None:
        self.of = kernel, grid, cluster, is_dependent
        self.params, self.maps = params, tuple(self.gpu.encoded)
        self.gpu.encoded.clear()
        self.gpu.plans += 1

    def __call__(self, stream: int) -> None:
        self.gpu.launches.append(Launch(*self.of, tuple(self.params.words), self.maps))


def install(monkeypatch: pytest.MonkeyPatch, gpu: Gpu = H200) -> FakeGpu:
    """Put a GPU without a driver in place of the real one; plans made before are not known to it, nor its own later."""
    fake = FakeGpu(gpu)

    def encode(tensor_map: TensorMap, address: int) -> bytes:
        assert tensor_map.why_illegal() is None
        assert address % 16 == 0
        fake.encoded.append(tensor_map)
        return encoded_map(tensor_map.sizes, tensor_map.strides, tensor_map.box, address)

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # what CPU tensors say they are on
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(kernels_dense, "gpu_of", lambda _: fake.gpu)
    monkeypatch.setattr(kernels_dense, "_plans", {})
    monkeypatch.setattr(kernels_dense, "_elders", {})
    monkeypatch.setattr("deep_gemm.dense._plans", {})
    monkeypatch.setattr(driver, "encode", encode)
    monkeypatch.setattr(driver, "address_is_first_word", lambda: True)
    monkeypatch.setattr(driver, "sizes_are_numbers", lambda: True)
    monkeypatch.setattr(driver, "Launch", type("Launch", (_FakeLaunch,), {"gpu": fake}))
    for module in (fp8_gemm, fp8_gemm_decode):

        def loaded(config: Any, device: int, name: str = module.NAME) -> str:
            if config not in fake.compiled:
                fake.compiled.append(config)
            return name

        monkeypatch.setattr(module, "loaded", loaded)
    return fake
