"""A GPU that launches nothing: products of CPU tensors take the path of a GPU's, up to the driver."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from deep_gemm.core.call import CALLS
from deep_gemm.core.gpu import H200, Gpu
from deep_gemm.core.jit import driver
from deep_gemm.core.jit.tensor_map import MAP_BYTES, TensorMap
from deep_gemm.core.params import Params
from deep_gemm.core.seen import Seen
from deep_gemm.gemm import kernel as fp8_gemm
from deep_gemm.gemm import kernel_decode as fp8_gemm_decode
from deep_gemm.gemm.bf16 import depths as bf16_depths
from deep_gemm.gemm.bf16 import kernel as bf16_gemm
from deep_gemm.gemm.bf16 import launch as bf16
from deep_gemm.gemm.bf16 import rows as bf16_rows
from deep_gemm.gemm.bf16 import sum_slices
from deep_gemm.gemm.bf16 import sums as bf16_sums
from deep_gemm.gemm.dense import launch as dense
from deep_gemm.gemm.depths import launch as depths
from deep_gemm.gemm.depths import maps_kernel as k_group_maps
from deep_gemm.gemm.heads import launch as heads
from deep_gemm.gemm.plan import PLANS
from deep_gemm.gemm.rows import launch as rows


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
    """Those that were encoded since the launch before."""


@dataclass
class FakeGpu:
    """What came to the driver."""

    gpu: Gpu
    launches: list[Launch] = field(default_factory=list)
    compiled: list[Any] = field(default_factory=list)
    """Configurations, as kernels were built for them."""
    encoded: list[TensorMap] = field(default_factory=list)
    is_capturing: bool = False
    stream: int = 7

    @property
    def last(self) -> Launch:
        return self.launches[-1]

    @property
    def plans(self) -> int:
        """Plans that are kept."""
        return len(PLANS.plans)


class FakeLauncher:
    """Takes what a launcher of the driver takes, and writes it down."""

    def __init__(self, gpu: FakeGpu, kernel: str, params_bytes: int, cluster: int, is_dependent: bool) -> None:
        self.gpu, self.of = gpu, (kernel, cluster, is_dependent)
        self.params = driver.ParamsBuffer(params_bytes)
        self.lock = threading.Lock()
        self.plan: object = None
        self.stream: int | None = None
        self.grid = 0
        self.config = self.function = self.pointers = None
        self.success = 0

    def encode(self, tensor_map: TensorMap, address: int, tensor: int) -> bytes:
        assert tensor_map.why_illegal() is None
        assert address % 16 == 0
        self.gpu.encoded.append(tensor_map)
        return encoded_map(tensor_map.sizes, tensor_map.strides, tensor_map.box, address)

    def keeps_addresses(self) -> bool:
        return True

    def hold(self, plan: object, template: bytes, grid: int) -> None:
        self.params.bytes[: len(template)] = template
        self.plan, self.grid = plan, grid

    def set_stream(self, stream: int) -> None:
        self.stream = stream

    def current_stream(self, device: int) -> int:
        return self.gpu.stream

    def is_capturing(self) -> bool:
        return self.gpu.is_capturing

    def current_device(self) -> int:
        return -1  # what CPU tensors say they are on

    def start(self, config: None, function: None, pointers: None, extra: int) -> tuple[int]:
        kernel, cluster, is_dependent = self.of
        maps = tuple(self.gpu.encoded)
        self.gpu.encoded.clear()
        words = tuple(self.params.words)
        self.gpu.launches.append(Launch(kernel, self.grid, cluster, is_dependent, words, maps))
        return (0,)


def install(monkeypatch: pytest.MonkeyPatch, gpu: Gpu = H200) -> FakeGpu:
    """Put a GPU without a driver in place of the real one; plans made before are not known to it, nor its own later."""
    fake = FakeGpu(gpu)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # what CPU tensors say they are on
    monkeypatch.setattr(driver, "sizes_are_numbers", lambda: True)
    for kind in (dense, rows, depths, heads, bf16, bf16_rows, bf16_depths, bf16_sums):
        monkeypatch.setattr(kind, "gpu_of", lambda _: fake.gpu)
    for kept in (PLANS, CALLS):
        monkeypatch.setattr(kept, "plans", {})
        monkeypatch.setattr(kept, "seen", Seen())
        monkeypatch.setattr(kept, "_met", {})
    monkeypatch.setattr(PLANS, "families", Seen())

    def launcher_of(
        name_of: Callable[[Any], str], params_of: Callable[[Any], Params], cluster_of: Callable[[Any], int]
    ) -> Callable[..., FakeLauncher]:
        @cache
        def launcher(config: Any, device: int, is_dependent: bool) -> FakeLauncher:
            if config not in fake.compiled:
                fake.compiled.append(config)
            return FakeLauncher(fake, name_of(config), params_of(config).size, cluster_of(config), is_dependent)

        return launcher

    gemm = launcher_of(lambda config: config.kernel_name, fp8_gemm.params_of, lambda config: config.cluster_size)
    monkeypatch.setattr(fp8_gemm.KERNEL, "launcher", gemm)
    monkeypatch.setattr(bf16_gemm.KERNEL, "launcher", gemm)
    slices = launcher_of(lambda _: sum_slices.KERNEL.name, lambda _: sum_slices.PARAMS, lambda _: 1)
    monkeypatch.setattr(sum_slices.KERNEL, "launcher", slices)
    decode = launcher_of(
        lambda _: fp8_gemm_decode.KERNEL.name, fp8_gemm_decode.params_of, lambda config: config.cluster_k
    )
    monkeypatch.setattr(fp8_gemm_decode.KERNEL, "launcher", decode)
    of_maps = FakeLauncher(fake, k_group_maps.KERNEL.name, k_group_maps.PARAMS.size, 1, is_dependent=False)
    monkeypatch.setattr(k_group_maps.KERNEL, "launcher", lambda *_: of_maps)
    return fake
