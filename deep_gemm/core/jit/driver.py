"""Calls of the CUDA driver: load machine code, encode tensor maps, launch. Only core/jit calls the driver.

No function here allocates device memory, reads it or waits. The contexts are torch's.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from functools import cache
from typing import Any

import torch

from .compiler import CompiledKernel
from .tensor_map import MAP_ALIGNMENT, MAP_BYTES, ElementType, TensorMap


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class LaunchError(DriverError):
    """A kernel was not launched, because the GPU refused the launch."""


class EarlierError(DriverError):
    """A kernel that ran earlier has failed: this package's kernel or another's. The process has lost its GPU."""


OF_EARLIER_KERNELS = frozenset(
    {
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    }
)
"""Errors of running kernels. Any later call of the driver returns such an error, but that call did not cause it."""


@cache
def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _checked(call: str, result: tuple[Any, ...], failure: type[DriverError] = DriverError) -> Any:
    status, *values = result
    if int(status) != 0:
        told = _driver().cuGetErrorName(status), _driver().cuGetErrorString(status)
        name, text = ((said or b"?").decode() for _, said in told)
        if name in OF_EARLIER_KERNELS:
            raise EarlierError(
                f"{call} met an error of a kernel that ran before, of this package or another's: {name}: {text}. "
                f"The process has lost its GPU; run it with CUDA_LAUNCH_BLOCKING=1 to see which call it was"
            )
        raise failure(f"{call} failed: {name}: {text}")
    return values[0] if len(values) == 1 else tuple(values)


def driver_version() -> tuple[int, int] | None:
    """Return the driver's CUDA version, such as (13, 0); None if the driver or the bindings are missing."""
    try:
        version = _checked("cuDriverGetVersion", _driver().cuDriverGetVersion())
    except (ImportError, OSError, RuntimeError):
        return None
    return version // 1000, version % 1000 // 10


def use_torchs_context() -> bool:
    """Set torch's context of the current device if this thread has no context. Tell whether it had none."""
    cu = _driver()
    if int(_checked("cuCtxGetCurrent", cu.cuCtxGetCurrent())):
        return False
    _checked("cuCtxSetCurrent", cu.cuCtxSetCurrent(_torchs_context(torch.cuda.current_device())))
    return True


@cache
def _torchs_context(device: int) -> Any:
    cu = _driver()
    found = _checked("cuDeviceGet", cu.cuDeviceGet(device))
    return _checked("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(found))


class Kernel:
    """A kernel that is loaded into the current context, and the bytes of shared memory of its launches."""

    def __init__(self, compiled: CompiledKernel, shared_bytes: int) -> None:
        cu = _driver()
        self.name, self.shared_bytes = compiled.name, shared_bytes
        use_torchs_context()
        try:
            self._module = _checked("cuModuleLoadData", cu.cuModuleLoadData(compiled.cubin))
        except DriverError as error:
            raise type(error)(f"{compiled.name}: {error}{_if_too_old(compiled, str(error))}") from error
        name = compiled.name.encode()
        self.function = _checked("cuModuleGetFunction", cu.cuModuleGetFunction(self._module, name))
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked("cuFuncSetAttribute", cu.cuFuncSetAttribute(self.function, attribute, shared_bytes))


CODES_OF_ANOTHER_CUDA = ("NO_BINARY_FOR_GPU", "INVALID_IMAGE", "UNSUPPORTED_PTX_VERSION")
"""Error codes of a driver that cannot load a kernel's machine code."""
OLDEST_COMPILER = (12, 8)
"""The oldest supported NVRTC."""


def _if_too_old(compiled: CompiledKernel, said: str) -> str:
    """Return advice if the driver's CUDA is older than the compiler's; else an empty text.

    A driver should load code of every compiler of its major version. The minor version counts too if the driver
    returned an error code of `CODES_OF_ANOTHER_CUDA`.
    """
    version = _checked("cuDriverGetVersion", _driver().cuDriverGetVersion())
    has, minor = version // 1000, version % 1000 // 10
    needs, of_compiler = (int(number) for number in compiled.compiler.split(".")[:2])
    both = f". This driver is of CUDA {has}.{minor}, and NVRTC {compiled.compiler} compiled the kernel: it "
    if has < OLDEST_COMPILER[0]:
        return f"{both}needs a driver of CUDA {needs}"
    if has < needs:
        return (
            f"{both}needs a driver of CUDA {needs}, or torch and NVRTC of CUDA {has} "
            f'(pip install "hopper-gemm[cu{has}]")'
        )
    if (has, minor) < (needs, of_compiler) and any(code in said for code in CODES_OF_ANOTHER_CUDA):
        package = "nvidia-cuda-nvrtc-cu12" if has == 12 else "nvidia-cuda-nvrtc"
        or_older = f', or NVRTC {has}.{minor} (pip install "{package}=={has}.{minor}.*")'
        is_supported = (has, minor) >= OLDEST_COMPILER
        return f"{both}may need a driver of CUDA {needs}.{of_compiler}{or_older if is_supported else ''}"
    return ""


PORTABLE_CLUSTER = 8
"""CTAs of the largest cluster that every GPU runs. A kernel with larger clusters needs an attribute for this."""
_OnePointer = ctypes.c_void_p * 1


class ParamsBuffer:
    """Memory for a kernel's parameter struct, at an address that is aligned for tensor maps."""

    def __init__(self, size: int) -> None:
        size += -size % MAP_ALIGNMENT
        memory = bytearray(size + MAP_ALIGNMENT)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        before = -start % MAP_ALIGNMENT
        self.address = start + before
        self.bytes = memoryview(memory)[before : before + size]
        """The parameters' bytes. A write past their end raises a ValueError."""
        self.words = self.bytes.cast("Q")
        self.pointers = _OnePointer(self.address)


class Launcher:
    """Launches one kernel. A launcher holds the memory of the parameters and all other arguments of a launch."""

    def __init__(
        self, kernel: Kernel, params_bytes: int, threads: int, cluster: int, *, is_dependent: bool = False, of: str = ""
    ) -> None:
        """`is_dependent`: the kernel may start before its stream's previous kernel ends, and waits for that end.

        `of` is the configuration's name, for errors.
        """
        cu = _driver()
        if cluster > PORTABLE_CLUSTER:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            _checked("cuFuncSetAttribute", cu.cuFuncSetAttribute(kernel.function, attribute, 1))
        self.params = ParamsBuffer(params_bytes)
        self.lock = threading.Lock()  # held from writing the parameters until the launch has read them
        self.grid = 0
        self.stream: int | None = None
        """The stream in `config`."""
        self.function, self.pointers = kernel.function, ctypes.addressof(self.params.pointers)
        self.kernel, self.threads, self.cluster, self.is_dependent, self.of = kernel, threads, cluster, is_dependent, of
        self.config = _config(kernel, 1, threads, _attributes(cluster, is_dependent))
        self.start, self.success = cu.cuLaunchKernelEx, cu.CUresult.CUDA_SUCCESS
        """The arguments of `start` are `config`, `function`, `pointers` and 0. It returns (the driver's status,)."""
        self.current_stream, self.current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice

    def encode(self, tensor_map: TensorMap, address: int, tensor: int) -> bytes:
        """Encode a map that begins at `address`. Only the simulator needs `tensor`, the address of the map's tensor."""
        return encode(tensor_map, address)

    def keeps_addresses(self) -> bool:
        """Tell whether a map's first word is its address, so that a replay may overwrite this word."""
        return address_is_first_word()

    def hold(self, template: bytes, grid: int) -> None:
        """Store the parameters and the grid of the next launch."""
        self.params.bytes[: len(template)] = template
        self.config.gridDimX = self.grid = grid

    def set_stream(self, stream: int) -> None:
        """Launch on this stream from now on."""
        self.config.hStream = self.stream = stream

    def start_again(self, status: Any, device: int) -> None:
        """Launch again if the launch failed because this thread had no context; else raise the driver's error."""
        with torch.cuda.device(device):
            if use_torchs_context():
                (status,) = self.start(self.config, self.function, self.pointers, 0)
        _checked(f"cuLaunchKernelEx of {self.text()}", (status,), LaunchError)

    def text(self) -> str:
        """Describe the launch, for an error's text."""
        clusters = f" in clusters of {self.cluster}" if self.cluster > 1 else ""
        return (
            f"{self.kernel.name}{f' ({self.of})' if self.of else ''} with {self.config.gridDimX} CTAs{clusters}, "
            f"{self.config.blockDimX} threads and {self.kernel.shared_bytes} bytes of shared memory each"
        )


def failed(launcher: Launcher, status: int, grid: int) -> None:
    """Raise the driver's error for a launch that replay.c tried with `grid` CTAs."""
    launcher.config.gridDimX = launcher.grid = grid
    _checked(f"cuLaunchKernelEx of {launcher.text()}", (_driver().CUresult(status),), LaunchError)


def _config(kernel: Kernel, grid: int, threads: int, attributes: list[Any]) -> Any:
    config = _driver().CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = kernel.shared_bytes
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


@cache
def _attributes(cluster: int, is_dependent: bool) -> list[Any]:
    """Make the attributes of a launch. They are cached because the bindings are slow; each launch copies them."""
    cu = _driver()
    attributes = []
    if cluster > 1:
        attributes.append(_cluster_attribute(cluster))
    if is_dependent:
        attribute, value = cu.CUlaunchAttribute(), cu.CUlaunchAttributeValue()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value.programmaticStreamSerializationAllowed = 1
        attribute.value = value
        attributes.append(attribute)
    return attributes


def _cluster_attribute(cluster: int) -> Any:
    cu = _driver()
    attribute, value = cu.CUlaunchAttribute(), cu.CUlaunchAttributeValue()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
    attribute.value = value
    return attribute


def clusters_at_once(kernel: Kernel, threads: int, cluster: int) -> int:
    """Return the number of clusters that the current GPU runs at a time, with `cluster` CTAs of `threads` threads."""
    config = _config(kernel, cluster, threads, [_cluster_attribute(cluster)])
    answer = _driver().cuOccupancyMaxActiveClusters(kernel.function, config)
    return int(_checked("cuOccupancyMaxActiveClusters", answer))


def encode(tensor_map: TensorMap, address: int) -> bytes:
    """Encode a tensor map that begins at this address. Return the 128 bytes that a kernel reads."""
    cu = _driver()
    number = cu.cuuint64_t
    sizes, strides = [*map(number, tensor_map.sizes)], [*map(number, tensor_map.strides)]
    fixed = _fixed_arguments(tensor_map.element, tensor_map.swizzle, tensor_map.box)
    element, swizzle, box, ones, interleave, promotion, fill = fixed
    status, encoded = cu.cuTensorMapEncodeTiled(
        element, len(sizes), address, sizes, strides, box, ones, interleave, swizzle, promotion, fill
    )
    if status != cu.CUresult.CUDA_SUCCESS:
        reason = tensor_map.why_illegal()  # only now, because it takes longer than the driver's own checks
        if reason is not None:
            raise ValueError(f"tensor_map: {reason}")
        _checked("cuTensorMapEncodeTiled", (status,))
    return ctypes.string_at(encoded.getPtr(), MAP_BYTES)


@cache
def _fixed_arguments(element: ElementType, swizzle: int, box: tuple[int, ...]) -> tuple[Any, ...]:
    """Make the arguments that do not depend on the tensor's sizes. They are cached because the bindings are slow."""
    cu = _driver()
    return (
        getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{element.name}"),
        getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{f'{swizzle}B' if swizzle else 'NONE'}"),
        [cu.cuuint32_t(extent) for extent in box],
        [cu.cuuint32_t(1) for _ in box],
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


@cache
def address_is_first_word() -> bool:
    """Tell whether this driver stores a tensor map's address in its first word, so that a replay may overwrite it.

    The test encodes one map for two addresses. Only the first word may differ, and it must be the address.
    """
    tensor_map = TensorMap(ElementType.UINT8, (256, 64), (256,), (128, 64), 128)
    addresses = (0x7000_0000_0000, 0x7111_2222_3340)
    first, second = (encode(tensor_map, address) for address in addresses)
    words = [int.from_bytes(encoded[:8], "little") for encoded in (first, second)]
    return words == list(addresses) and first[8:] == second[8:]
