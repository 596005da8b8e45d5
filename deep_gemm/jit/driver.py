"""The CUDA driver: loading machine code, encoding tensor maps, launching. The only module that knows it.

Nothing here allocates, synchronizes or reads device memory. Handles are kept by device; a context is torch's.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
import threading
from functools import cache
from typing import Any, NoReturn

import torch

from ..problem.layout import ADDRESS_ALIGNMENT
from .compiler import CompiledKernel
from .tensor_map import MAP_ALIGNMENT, MAP_BYTES, ElementType, TensorMap


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


@cache
def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _checked(call: str, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        _, name = _driver().cuGetErrorName(status)
        _, text = _driver().cuGetErrorString(status)
        detail = f"{(name or b'?').decode()}: {(text or b'?').decode()}"
        raise DriverError(f"{call} failed: {detail}")
    return values[0] if len(values) == 1 else tuple(values)


class Kernel:
    """A kernel loaded into the current context, with the shared memory that its launches use."""

    def __init__(self, compiled: CompiledKernel, shared_bytes: int) -> None:
        cu = _driver()
        self.shared_bytes = shared_bytes
        try:
            self._module = _checked("cuModuleLoadData", cu.cuModuleLoadData(compiled.cubin))
        except DriverError as error:
            raise DriverError(f"{compiled.name}: {error}{_if_too_old(compiled)}") from error
        name = compiled.name.encode()
        self.function = _checked("cuModuleGetFunction", cu.cuModuleGetFunction(self._module, name))
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked("cuFuncSetAttribute", cu.cuFuncSetAttribute(self.function, attribute, shared_bytes))


def _if_too_old(compiled: CompiledKernel) -> str:
    """What to do where the driver is of an older CUDA than the compiler; empty where it is not.

    Any driver of one major version loads what any compiler of that version made.
    """
    version = _checked("cuDriverGetVersion", _driver().cuDriverGetVersion())
    has, needs = version // 1000, int(compiled.compiler.split(".")[0])
    if has >= needs:
        return ""
    return (
        f". This driver is of CUDA {has}.{version % 1000 // 10}, and NVRTC {compiled.compiler} compiled the kernel: it "
        f'needs a driver of CUDA {needs}, or torch and NVRTC of CUDA {has} (pip install "deep_gemm[cu{has}]")'
    )


_OnePointer = ctypes.c_void_p * 1


@cache
def _words(size: int) -> type[ctypes.Array[ctypes.c_uint64]]:
    return ctypes.c_uint64 * (size // 8)


class ParamsBuffer:
    """Memory for the one parameter of a kernel, a struct: 64-bit words at an address aligned as tensor maps demand."""

    def __init__(self, size: int) -> None:
        size += -size % MAP_ALIGNMENT
        self._memory = _words(size + MAP_ALIGNMENT)()
        start = ctypes.addressof(self._memory)
        self.address = start + -start % MAP_ALIGNMENT
        self.words = _words(size).from_address(self.address)
        self.pointers = _OnePointer(self.address)

    def write(self, data: bytes, at: int = 0) -> None:
        """Write the struct's bytes from one of them on."""
        ctypes.memmove(self.address + at, data, len(data))


class Launcher:
    """The way one kernel is launched: its parameters' memory and all else of a launch. Plans take turns in using it."""

    def __init__(
        self, kernel: Kernel, params_bytes: int, threads: int, cluster: int, *, is_dependent: bool = False
    ) -> None:
        """`is_dependent`: the kernel may start while the one ahead on its stream ends, and waits for it itself."""
        cu = _driver()
        self.params = ParamsBuffer(params_bytes)
        self.lock = threading.Lock()  # parameters are written and read by the launch in one go
        self.plan: object = None
        """Whose parameters are there now."""
        self.stream: int | None = None
        """The one that `config` has."""
        self.function, self.pointers = kernel.function, ctypes.addressof(self.params.pointers)
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = 1, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = kernel.shared_bytes
        attributes = _attributes(cluster, is_dependent)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        self.config = config
        self.start, self.success = cu.cuLaunchKernelEx, cu.CUresult.CUDA_SUCCESS
        """`start` takes `config`, `function`, `pointers` and 0, and gives a tuple with the driver's status."""
        self.current_stream, self.current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice

    def encode(self, tensor_map: TensorMap, address: int, tensor: int) -> bytes:
        """Encode a map that begins at this address; `tensor`, where its tensor begins, is for the simulator."""
        return encode(tensor_map, address)

    def keeps_addresses(self) -> bool:
        """Tell whether a map's address is its first word, where a plan may replace it."""
        return address_is_first_word()

    def hold(self, plan: object, template: bytes, grid: int) -> None:
        """Take the parameters and the grid of another plan."""
        self.params.write(template)
        self.config.gridDimX = grid
        self.plan = plan

    def set_stream(self, stream: int) -> None:
        """Launch on this stream from now on. (Writing it costs as much as a look-up of a key.)"""
        self.config.hStream = self.stream = stream

    def fail(self, status: Any) -> NoReturn:
        """Raise what the driver says of a launch that failed."""
        _checked("cuLaunchKernelEx", (status,))
        raise DriverError(f"cuLaunchKernelEx: {status}")


@cache
def _attributes(cluster: int, is_dependent: bool) -> list[Any]:
    """Attributes of a launch, which copies them. The bindings are slow to make them."""
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
    """Ask how many clusters of so many CTAs, each of so many threads, run at a time on the current GPU."""
    cu = _driver()
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = kernel.shared_bytes
    config.attrs = [_cluster_attribute(cluster)]
    config.numAttrs = 1
    answer = cu.cuOccupancyMaxActiveClusters(kernel.function, config)
    return int(_checked("cuOccupancyMaxActiveClusters", answer))


def encode(tensor_map: TensorMap, address: int) -> bytes:
    """Encode a tensor map for a tensor at this address: the 128 bytes that a kernel takes."""
    cu = _driver()
    number = cu.cuuint64_t
    sizes, strides = [*map(number, tensor_map.sizes)], [*map(number, tensor_map.strides)]
    element, swizzle, box, ones, interleave, promotion, fill = _fixed_arguments(
        tensor_map.element, tensor_map.swizzle, tensor_map.box
    )
    status, encoded = cu.cuTensorMapEncodeTiled(
        element, len(sizes), address, sizes, strides, box, ones, interleave, swizzle, promotion, fill
    )
    if status != cu.CUresult.CUDA_SUCCESS:
        reason = tensor_map.why_illegal()  # asked now only, because it takes longer than the driver's own checks
        if reason is not None:
            raise ValueError(f"tensor_map: {reason}")
        _checked("cuTensorMapEncodeTiled", (status,))
    return ctypes.string_at(encoded.getPtr(), MAP_BYTES)


@cache
def _fixed_arguments(element: ElementType, swizzle: int, box: tuple[int, ...]) -> tuple[Any, ...]:
    """What of an encoding does not depend on the tensor's sizes, in the bindings' types, which are slow to make."""
    cu = _driver()
    types, swizzles = cu.CUtensorMapDataType, cu.CUtensorMapSwizzle
    return (
        {
            ElementType.UINT8: types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            ElementType.BFLOAT16: types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            ElementType.FLOAT32: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        }[element],
        {
            0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
            32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
            64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
            128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        }[swizzle],
        [cu.cuuint32_t(extent) for extent in box],
        [cu.cuuint32_t(1) for _ in box],
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


@cache
def address_is_first_word() -> bool:
    """Tell whether this driver keeps a tensor map's address in its first word, so that a plan may replace it there.

    Seen by encoding one map for two addresses: they must differ in that word alone, and it must be the address.
    """
    tensor_map = TensorMap(ElementType.UINT8, (256, 64), (256,), (128, 64), 128)
    addresses = (0x7000_0000_0000, 0x7111_2222_3340)
    first, second = (encode(tensor_map, address) for address in addresses)
    words = [int.from_bytes(encoded[:8], "little") for encoded in (first, second)]
    return words == list(addresses) and first[8:] == second[8:]


# Where a tensor map keeps what depends on the size of a batch: as 32-bit numbers, at these bytes. Nothing documents it,
# so `sizes_are_numbers` asks the driver.
_STRIDES_AT, _SIZES_AT = 12, 32
STRIDE_LIMIT = 1 << 36


def size_number(dimension: int, size: int) -> tuple[int, int]:
    """A size's place in a tensor map, and the number that stands for it there."""
    return _SIZES_AT + 4 * dimension, size - 1


def stride_number(stride: int) -> tuple[int, int]:
    """The same for the innermost of the strides, which is below `STRIDE_LIMIT`."""
    return _STRIDES_AT, stride // ADDRESS_ALIGNMENT


@cache
def sizes_are_numbers() -> bool:
    """Tell whether this driver keeps sizes and strides where `size_number` and `stride_number` say, and nowhere else.

    Seen by encoding maps of each kind in use for several sizes: changed so, the first must be each of the others.
    """
    kinds = [  # and which dimension has the rows
        (TensorMap(ElementType.UINT8, (7168, 64), (7168,), (128, 64), 128), 1),
        (TensorMap(ElementType.BFLOAT16, (4096, 64), (8192,), (64, 64), 128), 1),
        (TensorMap(ElementType.BFLOAT16, (4096, 64), (8192,), (16, 64), 32), 1),
        (TensorMap(ElementType.FLOAT32, (4096, 64), (16384,), (32, 64), 128), 1),
        (TensorMap(ElementType.FLOAT32, (32, 128, 64), (128, 16384), (32, 2, 64), 128), 2),
        (TensorMap(ElementType.UINT8, (7168, 64, 64, 1), (7168, 7168, 16), (128, 64, 1, 1), 128), 2),
        (TensorMap(ElementType.FLOAT32, (64, 56), (256,), (128, 1)), 0),
        (TensorMap(ElementType.FLOAT32, (64, 56, 1), (256, 64), (128, 1, 1)), 0),
    ]
    sizes = (2, 3, 100, 255, 256, 257, 4097, 65536, 1 << 20, (1 << 31) - 1)
    if not address_is_first_word():
        return False
    for kind, dimension in kinds:
        first = encode(kind, 1 << 40)
        for m in sizes:
            # Scales have their rows inside, and a pitch that depends on them.
            pitch = (m + 3) // 4 * 16 if dimension == 0 else kind.strides[0]
            m_sizes = (*kind.sizes[:dimension], m, *kind.sizes[dimension + 1 :])
            other = kind._replace(sizes=m_sizes, strides=(pitch, *kind.strides[1:]))
            changed = bytearray(first)
            for at, number in (size_number(dimension, m), stride_number(pitch)):
                struct.pack_into("<I", changed, at, number)
            try:
                encoded = encode(other, 1 << 40)
            except (DriverError, ValueError):  # a map so large that no product has it
                return False
            if changed != encoded:
                return False
    return True
