"""Runs kernels in the simulator: buffers in, buffers out, or a SimulationError that describes the mistake."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deep_gemm.core.check.recipes import VALUES
from deep_gemm.core.kernel import Config

from .arguments import Argument, encode
from .library import SCHEDULES, HostKernel, Launch, OtherRanks, Stats
from .library import Buffer as NativeBuffer

_GUARD_BYTES = 4096
_CANARY = 0xFF
_FP8 = torch.full((8, 256), torch.nan, dtype=torch.float64)
"""The number that each byte means in each FP8 type, by the type's bits of exponent."""
for _values in VALUES:
    if _values.bits == 8:
        _FP8[_values.exponent_bits] = torch.arange(256, dtype=torch.uint8).view(_values.dtype).double()


class SimulationError(RuntimeError):
    """The kernel broke a rule of the hardware. The message tells the rule, the place, and how to repeat the run."""

    def __init__(self, name: str, what: str, how: str) -> None:
        super().__init__(name, what, how)  # a worker process pickles an exception by these arguments
        self.name, self.what, self.how = name, what, how

    def __str__(self) -> str:
        return f"{self.name}: {self.what}\n(again with {self.how})"


@dataclass(frozen=True)
class Buffer:
    """A tensor in global memory. The kernel works on a copy, surrounded by bytes that it must not access."""

    data: Tensor
    is_writable: bool = False
    alignment: int = 16
    """The copy's address is a multiple of this, but not of twice this."""
    is_dependent: bool = False
    """True: the previous kernel may still use it, so the kernel must not access it before griddepcontrol_wait."""
    rank: int = 0
    """The rank that owns the memory."""


@dataclass(frozen=True)
class Result:
    """The writable buffers after the run, by name, and counters of the last kernel."""

    buffers: dict[str, Tensor]
    steps: int
    products: int
    loads: int
    stores: int
    prefetches: int
    to_peers: int
    """Number of ordinary stores to memory of other ranks."""


@dataclass(frozen=True)
class KernelLaunch:
    """One of several kernels that run one after another. If `grid` is None, each SM has a CTA (a persistent kernel)."""

    kernel: HostKernel
    arguments: Sequence[Argument]
    threads: int
    shared_bytes: int
    grid: int | None = None
    cluster_size: int = 1
    inputs: frozenset[str] = frozenset()
    """Writable buffers that this kernel must not write."""

    @classmethod
    def of(
        cls, kernel: HostKernel, config: Config, params: bytes, grid: int, inputs: frozenset[str] = frozenset()
    ) -> KernelLaunch:
        """Return the launch of one of the package's kernels, for a configuration."""
        return cls(kernel, [params], config.num_threads, config.shared_bytes, grid, config.cluster_size, inputs)


def simulate(
    kernel: HostKernel,
    arguments: Sequence[Argument],
    buffers: Mapping[str, Buffer],
    *,
    threads: int,
    shared_bytes: int,
    grid: int | None = None,
    cluster_size: int = 1,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
    max_steps: int = 50_000_000,
) -> Result:
    """Launch `kernel` on a GPU with `num_sms` SMs. If `grid` is None, each SM has a CTA (a persistent kernel).

    Equal arguments give equal runs. `schedule` is one of SCHEDULES; None draws one from the seed. With `truncate`
    WGMMA accumulates with Hopper's few bits instead of exactly.
    """
    simulation = Simulation(
        buffers, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate, max_steps=max_steps
    )
    simulation.launch(KernelLaunch(kernel, arguments, threads, shared_bytes, grid, cluster_size))
    return simulation.result()


class Simulation:
    """A GPU with buffers in its memory. Kernels run on it one after another."""

    def __init__(
        self,
        buffers: Mapping[str, Buffer],
        *,
        num_sms: int | None = None,
        seed: int = 0,
        schedule: str | None = None,
        truncate: bool = False,
        max_steps: int = 50_000_000,
    ) -> None:
        if schedule is not None and schedule not in SCHEDULES:
            raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
        self.num_sms, self.seed, self.schedule, self.truncate = num_sms or 2, seed, schedule, truncate
        self._max_steps = max_steps
        self._arena = Arena(buffers)
        self.tensor = self._arena.tensor
        self._stats = Stats()

    def address(self, name: str) -> int:
        """Return the address of a buffer."""
        return int(self._arena.addresses[name])

    def launch(
        self, launched: KernelLaunch, *, rank: int = 0, other_ranks: Callable[[], int] | None = None, seed: int = 0
    ) -> None:
        """Run a kernel. A SimulationError describes its mistake.

        Among several ranks it runs on `rank`, and calls `other_ranks` to let other ranks run; `seed` is this launch's.
        """
        kernel, native = launched.kernel, self._arena.native_but_inputs(launched.inputs)
        encoded = [_Aligned(encode(argument, self._arena.addresses)) for argument in launched.arguments]
        sizes = [len(argument.data) for argument in encoded]
        if sizes != kernel.argument_bytes():
            raise ValueError(f"arguments: expected parameters of {kernel.argument_bytes()} bytes, got {sizes}")
        launch = Launch(
            seed=self.seed + seed,
            max_steps=self._max_steps,
            grid=self.num_sms if launched.grid is None else launched.grid,
            cluster_size=launched.cluster_size,
            threads=launched.threads,
            shared_bytes=launched.shared_bytes,
            num_sms=self.num_sms,
            schedule=-1 if self.schedule is None else SCHEDULES.index(self.schedule),
            truncate=self.truncate,
            num_buffers=len(native),
            buffers=native,
            arguments=(ctypes.c_void_p * max(len(encoded), 1))(*(argument.address for argument in encoded)),
            fp8=_FP8.data_ptr(),
            rank=rank,
            other_ranks=OtherRanks() if other_ranks is None else OtherRanks(other_ranks),
        )
        self._stats = Stats()
        with kernel.lock:
            message = kernel.library.sim_run(launch, self._stats)
        how = f"seed={self.seed}, schedule={self.schedule!r}"
        if message is not None:
            raise SimulationError(kernel.name, message.decode(), how)
        if trampled := self._arena.trampled():
            raise SimulationError(kernel.name, f"wrote outside of `{trampled}` by other means than `ptx::`", how)

    def result(self) -> Result:
        """Return the present writable buffers, and the counters of the last kernel."""
        return Result(self._arena.outputs(), *(getattr(self._stats, name) for name, *_ in Stats._fields_))


class _Aligned:
    """Bytes at an address that is a multiple of 64, as structs with tensor maps require."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.storage = np.zeros(len(data) + 64, np.uint8)
        offset = -self.storage.ctypes.data % 64
        self.storage[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        self.address = self.storage.ctypes.data + offset


class Arena:
    """All buffers in one allocation, far enough apart that a stray access does not reach the next one."""

    def __init__(self, buffers: Mapping[str, Buffer], device: str = "cpu") -> None:
        self.buffers = dict(buffers)
        contents = {
            name: buffer.data.detach().contiguous().reshape(-1).view(torch.uint8)
            for name, buffer in self.buffers.items()
        }
        total = sum(len(contents[name]) + 2 * buffer.alignment + _GUARD_BYTES for name, buffer in buffers.items())
        whole = torch.full((total + 2 * _GUARD_BYTES,), _CANARY, dtype=torch.uint8, device=device)
        self.memory = whole[-whole.data_ptr() % _GUARD_BYTES :]  # so that gaps between buffers are always equal
        self.spans: dict[str, slice] = {}
        base, at = self.memory.data_ptr(), 0
        for name, data in contents.items():
            alignment = self.buffers[name].alignment
            at += _GUARD_BYTES
            # A multiple of the alignment, but not of twice the alignment.
            at += (alignment - (base + at)) % (2 * alignment)
            self.spans[name] = slice(at, at + len(data))
            self.memory[self.spans[name]] = data.to(device)
            at += len(data)
        # One byte for each word. Arrays are as long as memory, so a buffer's bytes begin at the buffer's own offset.
        self.of_words = {name: np.zeros(len(self.memory), np.uint8) for name in ("news", "held", "released")}
        self.addresses = {name: base + span.start for name, span in self.spans.items()}

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """Return a buffer's memory as a tensor with the type, shape and strides of `like`, its original tensor."""
        return self.memory[self.spans[name]].view(like.dtype).as_strided(like.shape, like.stride())

    def native_but_inputs(self, inputs: frozenset[str]) -> ctypes.Array[NativeBuffer]:
        """Return all buffers for the model, with `inputs` read-only."""
        return (NativeBuffer * max(len(self.spans), 1))(
            *(
                NativeBuffer(
                    base=self.addresses[name],
                    num_bytes=span.stop - span.start,
                    name=name.encode(),
                    is_writable=self.buffers[name].is_writable and name not in inputs,
                    is_dependent=self.buffers[name].is_dependent,
                    rank=self.buffers[name].rank,
                    **{
                        kind: bytes_of[span].ctypes.data if self.buffers[name].is_writable else None
                        for kind, bytes_of in self.of_words.items()
                    },
                )
                for name, span in self.spans.items()
            )
        )

    def trampled(self) -> str | None:
        """Name a buffer at whose edge bytes were overwritten."""
        return self.changed(_CANARY, self.spans)

    def changed(self, before: Tensor | int, but: Iterable[str]) -> str | None:
        """Name the buffer at or next to the first changed byte of memory, except for changes in the buffers `but`."""
        is_other = self.memory != before
        for name in but:
            is_other[self.spans[name]] = False
        if not is_other.any():
            return None
        first = int(is_other.int().argmax())
        return min(self.spans, key=lambda name: max(self.spans[name].start - first, first - self.spans[name].stop + 1))

    def outputs(self) -> dict[str, Tensor]:
        """Return copies of the writable buffers."""
        return {
            name: self.memory[self.spans[name]].clone().view(buffer.data.dtype).reshape(buffer.data.shape)
            for name, buffer in self.buffers.items()
            if buffer.is_writable
        }
