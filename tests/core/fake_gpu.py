"""A fake GPU that launches nothing: calls with CPU tensors run the code for a GPU up to the call of the driver."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deep_gemm.core import call, replay
from deep_gemm.core import gpu as gpus
from deep_gemm.core.gpu import H200, HOPPER, Gpu
from deep_gemm.core.jit import driver
from deep_gemm.core.jit.tensor_map import MAP_BYTES, TensorMap
from deep_gemm.core.kernel import Kernel
from deep_gemm.core.params import Params
from deep_gemm.linear import kernel as linear_kernel


class OnGpu(Tensor):
    """A CPU tensor that dispatch treats as a tensor on a GPU."""

    is_cuda = True


def on_gpu(x: Tensor) -> Tensor:
    return x.as_subclass(OnGpu)


def encoded_map(sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], address: int) -> bytes:
    """Lay out the fields of a tensor map that depend on these arguments, as drivers of 2026 do."""
    encoded = bytearray(MAP_BYTES)
    struct.pack_into("<Q", encoded, 0, address)
    struct.pack_into(f"<{len(strides)}I", encoded, 12, *(stride >> 4 for stride in strides))
    struct.pack_into(f"<{len(sizes)}I", encoded, 32, *(size - 1 for size in sizes))
    struct.pack_into(f"<{len(box)}B", encoded, 55, *(extent - 1 for extent in box))
    return bytes(encoded)


@dataclass
class Launch:
    """A launch that reached the driver: its configuration, and Params' 64-bit words at that time."""

    kernel: str
    grid: int
    cluster: int
    is_dependent: bool
    words: tuple[int, ...]
    maps: tuple[TensorMap, ...]
    """Tensor maps that were encoded after the previous launch."""
    config: Any
    params: Params


@dataclass
class FakeGpu:
    """A GPU without a driver. Stores all launches, configurations and tensor maps that a driver would receive."""

    gpu: Gpu = H200
    launches: list[Launch] = field(default_factory=list)
    compiled: list[Any] = field(default_factory=list)
    """Configurations for which kernels were built, in order."""
    encoded: list[TensorMap] = field(default_factory=list)
    stream: int = 7

    @property
    def last(self) -> Launch:
        return self.launches[-1]

    @property
    def records(self) -> int:
        """Return the number of records that are stored."""
        return sum(map(len, call.RECORDS.values()))


def recorded_alike(gpu: FakeGpu, calls: Sequence[Callable[[], Any]], *made: str) -> int:
    """Check that calls make the same launches with records as without. Return the number of records.

    `made`: names of parameters that hold addresses of memory that the package allocates.
    """
    rounds = []
    for has_records in (True, False):
        first = len(gpu.launches)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(call, "RECORDS", {})
            if not has_records:
                patch.setattr(call, "recorded", lambda *_: (None, None))
            for each in calls:
                each()
            if has_records:
                records = gpu.records
        rounds.append([_described(launch, made) for launch in gpu.launches[first:]])
    assert rounds[0] == rounds[1]
    assert records > 0
    return records


def _described(launch: Launch, made: Sequence[str]) -> tuple[Any, ...]:
    own = {launch.params.offset(each.name) // 8 for each in launch.params.fields if each.name in made}
    words = [0 if i in own else word for i, word in enumerate(launch.words)]
    return launch.kernel, launch.grid, launch.cluster, launch.is_dependent, launch.config, words


class FakeLauncher:
    """Replaces the driver's launcher, and writes down each launch."""

    def __init__(self, gpu: FakeGpu, kernel: Kernel[Any], config: Any, is_dependent: bool) -> None:
        self.gpu, self.of, self.is_dependent = gpu, config, is_dependent
        self.name, self.cluster, self.layout = kernel.name_of(config), config.cluster_size, kernel.params_of(config)
        self.params = driver.ParamsBuffer(self.layout.size)
        self.lock = threading.Lock()
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

    def hold(self, template: bytes, grid: int) -> None:
        self.params.bytes[: len(template)] = template
        self.grid = grid

    def set_stream(self, stream: int) -> None:
        self.stream = stream

    def current_stream(self, device: int) -> int:
        return self.gpu.stream

    def start(self, config: None, function: None, pointers: None, extra: int) -> tuple[int]:
        words, maps = tuple(self.params.words), tuple(self.gpu.encoded)
        self.gpu.encoded.clear()
        launch = Launch(self.name, self.grid, self.cluster, self.is_dependent, words, maps, self.of, self.layout)
        self.gpu.launches.append(launch)
        return (0,)


def install(
    monkeypatch: pytest.MonkeyPatch, gpu: Gpu = H200, launcher: Callable[..., FakeLauncher] = FakeLauncher
) -> FakeGpu:
    """Replace the real GPU by a fake one: its properties, and everything that launches a kernel on it.

    Calls on the fake GPU find no earlier record. Its records are removed after the test.
    """
    fake = FakeGpu(gpu)
    properties = SimpleNamespace(name=gpu.name, major=HOPPER, multi_processor_count=gpu.num_sms)

    @cache  # one per thread: a rank that waits for others holds its launcher
    def launcher_of(kernel: Kernel[Any], config: Any, device: int, is_dependent: bool, thread: int) -> FakeLauncher:
        if config not in fake.compiled:
            fake.compiled.append(config)
        return launcher(fake, kernel, config, is_dependent)

    monkeypatch.setattr(gpus, "_properties", lambda _: properties)
    monkeypatch.setattr(Kernel, "launcher", lambda *of: launcher_of(*of, threading.get_ident()))
    # There is no driver that could answer queries, or that replay.c could call.
    monkeypatch.setattr(call, "native", lambda: None)
    monkeypatch.setattr(Kernel, "fits", lambda *_: True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # as for a CPU tensor
    monkeypatch.setattr(replay, "KNOWN", {*replay.KNOWN, OnGpu})
    monkeypatch.setattr(call, "RECORDS", {})
    forget_devices()
    return fake


def forget_devices() -> None:
    """Clear the caches of facts about devices, such as the GPU that each device is."""
    for of_devices in (gpus.gpu_of, gpus.is_hopper, linear_kernel.config_of):
        of_devices.cache_clear()
