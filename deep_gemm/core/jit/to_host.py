"""Copies of a kernel's results to the host. Only this module reads a GPU's memory or waits for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from . import driver

_WRITTEN_TO: list[tuple[Tensor, Tensor]] = []
"""Tensors whose copy was under way when their `ToHost` was deleted. They are never freed."""


class ToHost:
    """Copies a GPU's tensor to a tensor in pinned host memory, as often as wanted.

    torch's own copy and event need two to four times as much host time, and a GPU waits for the host.
    """

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._is_under_way = False
        self._tensors = source, target  # keeps both tensors' memory
        self._addresses = target.data_ptr(), source.data_ptr(), source.nbytes
        self._device = source.get_device()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            self._done.record()  # torch makes the event on the device of its first record
        self._event = driver._driver().CUevent(self._done.cuda_event)

    def begin(self) -> None:
        """Start the copy on the current stream."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self.begin()
        cu, stream = driver._driver(), torch._C._cuda_getCurrentRawStream(self._device)
        self._is_under_way = True
        driver._checked("cuMemcpyDtoHAsync", cu.cuMemcpyDtoHAsync(*self._addresses, stream))
        driver._checked("cuEventRecord", cu.cuEventRecord(self._event, stream))
        return None

    def __del__(self) -> None:
        """Keep the memory of a copy that is under way: torch does not know of the copy and would reuse the memory."""
        if self._is_under_way:
            _WRITTEN_TO.append(self._tensors)

    def wait(self) -> None:
        """Wait for the end of the last copy."""
        self._done.synchronize()
        self._is_under_way = False
