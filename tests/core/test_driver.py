"""Arguments passed to the CUDA driver, in the bindings' own types, and errors if the driver refuses. Needs no GPU."""

from __future__ import annotations

import ctypes
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import encoded_map
from helpers import raising

from deep_gemm.core import gpu as gpus
from deep_gemm.core.jit import driver
from deep_gemm.core.jit.compiler import CompiledKernel
from deep_gemm.core.jit.tensor_map import ElementType, TensorMap
from deep_gemm.core.jit.to_host import ToHost
from deep_gemm.errors import UnsupportedGpuError

cu = pytest.importorskip("cuda.bindings.driver")

COMPILED = CompiledKernel("fp8_gemm_dense", b"cubin", "", "13.0.88 CL-36424714")
MAP = TensorMap(ElementType.UINT8, (256, 64), (256,), (128, 64), 128)


class Driver:
    """Replaces the bindings; the functions named in `answers` return these values."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        for name, answer in answers.items():
            setattr(self, name, self._answering(name, answer))

    def _answering(self, name: str, answer: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append((name, args))
            return answer(*args) if callable(answer) else answer

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(cu, name)


@pytest.fixture
def fresh() -> Any:
    """Empty the caches of facts about a driver, before the test and after it."""
    caches = (driver._attributes, driver._fixed_arguments, driver.address_is_first_word)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def use(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> Driver:
    errors = {
        "cuGetErrorName": lambda status: (0, cu.CUresult(status).name.encode()),
        "cuGetErrorString": (0, b"some text"),
        "cuCtxGetCurrent": (0, 1),
    }
    fake = Driver(**{**errors, **answers})
    monkeypatch.setattr(driver, "_driver", lambda: fake)
    return fake


# Launches


@pytest.mark.parametrize("cluster", [1, 8])
def test_the_driver_is_asked_how_many_clusters_run_at_once(monkeypatch: pytest.MonkeyPatch, cluster: int) -> None:
    fake = use(monkeypatch, cuOccupancyMaxActiveClusters=(cu.CUresult.CUDA_SUCCESS, 15))
    kernel: Any = SimpleNamespace(function="function", shared_bytes=4096)
    assert driver.clusters_at_once(kernel, 384, cluster) == 15
    (_, (function, config)) = fake.calls[-1]
    assert function == "function"
    assert (config.gridDimX, config.blockDimX, config.sharedMemBytes, config.numAttrs) == (cluster, 384, 4096, 1)
    (attribute,) = config.attrs
    assert attribute.id == cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert attribute.value.clusterDim.x == cluster


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("cluster", [1, 2, 8])
@pytest.mark.parametrize("is_dependent", [False, True])
def test_a_launch_has_the_attributes_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, cluster: int, is_dependent: bool
) -> None:
    fake = use(monkeypatch, cuLaunchKernelEx=(cu.CUresult.CUDA_SUCCESS,))
    for grid in (132, 264):  # two launchers share only the parts that are slow to make
        launcher = driver.Launcher(kernel, 100, 384, cluster, is_dependent=is_dependent)
        launcher.hold(bytes(range(100)), grid)
        launcher.set_stream(7)
        assert bytes(launcher.params.words)[:100] == bytes(range(100))
        (status,) = launcher.start(launcher.config, launcher.function, launcher.pointers, 0)
        assert status == launcher.success
        _, (config, function, _, _) = fake.calls[-1]
        assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (grid, 1, 1)
        assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (384, 1, 1)
        assert (config.sharedMemBytes, int(config.hStream), function) == (4096, 7, "function")
        ids = cu.CUlaunchAttributeID
        found = {attribute.id: attribute.value for attribute in config.attrs}
        assert config.numAttrs == len(found) == (cluster > 1) + is_dependent
        if cluster > 1:
            value = found[ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION].clusterDim
            assert (value.x, value.y, value.z) == (cluster, 1, 1)
        if is_dependent:
            value = found[ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION]
            assert value.programmaticStreamSerializationAllowed == 1


NO_DEVICE = -1
"""A device that torch need not switch to, on a machine without GPUs."""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("getCurrentRawStream", "getDevice", "isCurrentStreamCapturing"):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", None, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    driver._torchs_context.cache_clear()
    yield SimpleNamespace(name="fp8_gemm_dense", function="function", shared_bytes=4096)
    driver._torchs_context.cache_clear()


def test_a_launch_that_fails_says_what_was_launched(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    use(monkeypatch)
    launcher = driver.Launcher(kernel, 8, 32, 2, of="128x64")
    launcher.hold(b"", 66)
    asked = "fp8_gemm_dense (128x64) with 66 CTAs in clusters of 2, 32 threads and 4096 bytes of shared memory each"
    said = f"cuLaunchKernelEx of {asked} failed: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: some text"
    with pytest.raises(driver.LaunchError, match=f"^{re.escape(said)}$"):
        launcher.start_again(cu.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, NO_DEVICE)


WRONG = ("ILLEGAL_ADDRESS", "ASSERT", "LAUNCH_FAILED", "MISALIGNED_ADDRESS", "ILLEGAL_INSTRUCTION", "ECC_UNCORRECTABLE")
EARLIER = [f"CUDA_ERROR_{each}" for each in WRONG]


@pytest.mark.parametrize("name", EARLIER)
def test_an_error_that_was_there_before_is_not_taken_for_ours(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, name: str
) -> None:
    use(monkeypatch)
    told = f"fp8_gemm_dense .* ran before, of this package or another's: {name}"
    with pytest.raises(driver.EarlierError, match=told):
        driver.Launcher(kernel, 8, 32, 1).start_again(getattr(cu.CUresult, name), NO_DEVICE)


def test_what_the_driver_says_of_kernels_that_run_are_names_that_it_has() -> None:
    assert set(EARLIER) <= driver.OF_EARLIER_KERNELS
    unknown = {name for name in driver.OF_EARLIER_KERNELS if not hasattr(cu.CUresult, name)}
    assert unknown <= {"CUDA_ERROR_TENSOR_MEMORY_LEAK", "CUDA_ERROR_CONTAINED"}  # bindings of CUDA 12 lack these


def test_a_thread_without_a_context_launches_in_torchs(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    fake = use(
        monkeypatch,
        cuCtxGetCurrent=(0, 0),
        cuDeviceGet=lambda index: (0, f"device {index}"),
        cuDevicePrimaryCtxRetain=lambda device: (0, f"context of {device}"),
        cuCtxSetCurrent=(0,),
        cuLaunchKernelEx=(cu.CUresult.CUDA_SUCCESS,),
    )
    driver.Launcher(kernel, 8, 32, 1).start_again(cu.CUresult.CUDA_ERROR_INVALID_CONTEXT, NO_DEVICE)
    assert fake.calls[-2:-1] == [("cuCtxSetCurrent", ("context of device 0",))]
    assert fake.calls[-1][0] == "cuLaunchKernelEx"


@pytest.mark.parametrize("size", [1, 64, 65, 700])
def test_parameters_lie_as_tensor_maps_demand_and_keep_their_bytes(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    buffer = driver.ParamsBuffer(size)
    buffer.bytes[: len(data)] = data
    assert buffer.address % 64 == 0
    assert bytes(buffer.words)[:size] == data
    assert buffer.pointers[0] == buffer.address
    buffer.words[0] = 0x1122334455667788
    assert bytes(buffer.words)[:8] == bytes.fromhex("8877665544332211")
    with pytest.raises(ValueError):
        buffer.bytes[len(buffer.bytes) - 1 :] = b"two"  # would write behind the struct's memory


# Tensor maps


@pytest.mark.usefixtures("fresh")
def test_a_tensor_map_reaches_the_driver_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, cuTensorMapEncodeTiled=(cu.CUresult.CUDA_SUCCESS, cu.CUtensorMap()))
    assert len(driver.encode(MAP, 0x1000)) == 128
    _, (element, rank, address, sizes, strides, box, ones, _, swizzle, _, _) = fake.calls[-1]
    assert element == cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8
    assert swizzle == cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    assert (rank, address) == (2, 0x1000)
    numbers = [[int(x) for x in given] for given in (sizes, strides, box, ones)]
    assert numbers == [[256, 64], [256], [128, 64], [1, 1]]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("tensor_map", "error", "message"),
    [
        (MAP._replace(box=(128, 257)), ValueError, "tensor_map: expected box extents in 1..256, got (128, 257)"),
        (MAP, driver.DriverError, "cuTensorMapEncodeTiled failed: CUDA_ERROR_INVALID_VALUE"),
    ],
)
def test_a_tensor_map_that_the_driver_refuses_is_explained(
    monkeypatch: pytest.MonkeyPatch, tensor_map: TensorMap, error: type[Exception], message: str
) -> None:
    use(monkeypatch, cuTensorMapEncodeTiled=(cu.CUresult.CUDA_ERROR_INVALID_VALUE, None))
    with pytest.raises(error, match=re.escape(message)):
        driver.encode(tensor_map, 0x1000)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("flaw", ["", "address elsewhere", "address again behind"])
def test_addresses_of_maps_are_replaced_only_where_the_driver_keeps_them_as_expected(
    monkeypatch: pytest.MonkeyPatch, flaw: str
) -> None:
    def encode(_element: Any, _rank: Any, address: int, sizes: Any, strides: Any, box: Any, *_: Any) -> Any:
        of_sizes, of_strides, of_box = ([int(x) for x in given] for given in (sizes, strides, box))
        encoded = bytearray(encoded_map(of_sizes, of_strides, of_box, address))
        if flaw:
            encoded[64:72], encoded[:8] = encoded[:8], encoded[64:72] if flaw == "address elsewhere" else encoded[:8]
        made = cu.CUtensorMap()
        ctypes.memmove(made.getPtr(), bytes(encoded), 128)
        return cu.CUresult.CUDA_SUCCESS, made

    use(monkeypatch, cuTensorMapEncodeTiled=encode)
    assert driver.address_is_first_word() is not bool(flaw)


# Machines on which a kernel cannot run


def refusal(monkeypatch: pytest.MonkeyPatch, status: str, driver_has: int, compiled: CompiledKernel = COMPILED) -> str:
    """Load a kernel that a driver of this version refuses; return the error's text."""
    failure = getattr(cu.CUresult, f"CUDA_ERROR_{status}")
    use(monkeypatch, cuModuleLoadData=(failure, None), cuDriverGetVersion=(0, driver_has))
    with pytest.raises(driver.DriverError) as caught:
        driver.Kernel(compiled, 4096)
    return str(caught.value)


@pytest.mark.parametrize("status", ["NO_BINARY_FOR_GPU", "INVALID_IMAGE", "UNSUPPORTED_PTX_VERSION"])
def test_a_driver_too_old_for_the_kernel_is_named_with_what_helps(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    told = refusal(monkeypatch, status, 12040)
    assert told.startswith(f"fp8_gemm_dense: cuModuleLoadData failed: CUDA_ERROR_{status}")
    assert "This driver is of CUDA 12.4" in told
    assert "NVRTC 13.0.88 CL-36424714 compiled the kernel" in told
    assert "needs a driver of CUDA 13, or torch and NVRTC of CUDA 12" in told
    assert 'pip install "hopper-gemm[cu12]"' in told


@pytest.mark.parametrize(
    ("driver_has", "compiler", "helps"),
    [
        (13000, "13.5.37 CL-1", 'pip install "nvidia-cuda-nvrtc==13.0.*"'),
        (12080, "12.9.86 CL-1", 'or NVRTC 12.8 (pip install "nvidia-cuda-nvrtc-cu12==12.8.*")'),
        (12040, "12.9.86 CL-1", "may need a driver of CUDA 12.9"),
    ],
)
def test_a_driver_of_an_older_minor_version_is_named_only_if_it_does_not_know_the_code(
    monkeypatch: pytest.MonkeyPatch, driver_has: int, compiler: str, helps: str
) -> None:
    compiled = replace(COMPILED, compiler=compiler)
    told = [refusal(monkeypatch, status, driver_has, compiled) for status in ("NO_BINARY_FOR_GPU", "OUT_OF_MEMORY")]
    has = f"{driver_has // 1000}.{driver_has % 1000 // 10}"
    assert f"This driver is of CUDA {has}, and NVRTC {compiler} compiled the kernel" in told[0]
    assert helps in told[0]
    assert ("pip install" in told[0]) is (driver_has >= 12080)
    assert told[1].endswith("CUDA_ERROR_OUT_OF_MEMORY: some text")


@pytest.mark.parametrize(
    ("status", "driver_has", "told"),
    [
        ("INVALID_IMAGE", 11080, r"This driver is of CUDA 11\.8, .* needs a driver of CUDA 13$"),  # no extra cu11
        ("OUT_OF_MEMORY", 13000, "cuModuleLoadData failed: CUDA_ERROR_OUT_OF_MEMORY: some text$"),
    ],
)
def test_a_driver_from_before_any_supported_compiler_is_told_of_no_package_and_a_new_one_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, status: str, driver_has: int, told: str
) -> None:
    assert re.search(told, refusal(monkeypatch, status, driver_has))


def test_the_drivers_version_is_that_of_the_newest_cuda_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, cuDriverGetVersion=(0, 12040))
    assert driver.driver_version() == (12, 4)
    use(monkeypatch, cuDriverGetVersion=(cu.CUresult.CUDA_ERROR_NOT_INITIALIZED, 0))
    assert driver.driver_version() is None


@pytest.mark.parametrize("error", [ImportError("no bindings"), RuntimeError("no libcuda.so.1"), OSError("no file")])
def test_no_driver_has_no_version(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(driver, "_driver", raising(error))
    assert driver.driver_version() is None


@pytest.mark.parametrize(("name", "major", "minor"), [("NVIDIA L4", 8, 9), ("NVIDIA B200", 10, 0)])
def test_a_gpu_that_is_not_hopper_is_named_with_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, name: str, major: int, minor: int
) -> None:
    properties = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    gpus.gpu_of.cache_clear()
    told = rf"need a Hopper GPU \(compute capability 9\.0\).*; cuda:3 is {name}, compute capability {major}\.{minor}"
    with pytest.raises(UnsupportedGpuError, match=told):
        gpus.gpu_of(3)


# Waits on the host, and copies to it


class Event:
    """Replaces a torch event, with only the members that are used."""

    cuda_event = 77
    waits = 0

    def record(self) -> None:
        """Do nothing: torch creates an event when it is recorded."""

    def synchronize(self) -> None:
        """Count the wait."""
        self.waits += 1


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> Event:
    made = Event()
    monkeypatch.setattr(torch.cuda, "Event", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # as for a CPU tensor
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 9, raising=False)
    return made


def test_numbers_come_to_the_host_by_a_copy_and_an_event_behind_it(
    monkeypatch: pytest.MonkeyPatch, event: Event
) -> None:
    fake = use(monkeypatch, cuMemcpyDtoHAsync=(0,), cuEventRecord=(0,))
    source, target = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    comes = ToHost(source, target)
    comes.begin()
    (copy, of_copy), (record, of_record) = fake.calls
    assert (copy, of_copy) == ("cuMemcpyDtoHAsync", (target.data_ptr(), source.data_ptr(), 40, 9))
    assert (record, int(of_record[0]), of_record[1]) == ("cuEventRecord", 77, 9)
    assert event.waits == 0
    comes.wait()
    assert event.waits == 1


@pytest.mark.parametrize("fails", ["cuMemcpyDtoHAsync", "cuEventRecord"])
@pytest.mark.usefixtures("event")
def test_a_copy_to_the_host_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    answers = {"cuMemcpyDtoHAsync": (0,), "cuEventRecord": (0,)}
    use(monkeypatch, **{**answers, fails: (cu.CUresult.CUDA_ERROR_INVALID_VALUE,)})
    comes = ToHost(torch.arange(5), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(driver.DriverError, match=f"^{fails} failed: CUDA_ERROR_INVALID_VALUE"):
        comes.begin()
