"""Copies of a kernel's results to the host: the one place that reads a GPU's memory, or waits for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from . import driver

_WRITTEN_TO: list[tuple[Tensor, Tensor]] = []
"""Memory of copies that were under way when their `ToHost` was dropped."""


class ToHost:
    """Copies from a tensor of a GPU to one in pinned memory of the host, again and again.

    torch's own copy and event take two to four times as long on the host, and a GPU waits for the host.
    """

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._is_under_way = False
        self._tensors = source, target  # keeps both tensors' memory
        self._addresses = target.data_ptr(), source.data_ptr(), source.nbytes
        self._device = source.get_device()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            self._done.record()  # torch makes an event where it is recorded first
        self._event = driver._driver().CUevent(self._done.cuda_event)

    def begin(self) -> None:
        """Copy, on the current stream."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self.begin()
        cu, stream = driver._driver(), torch._C._cuda_getCurrentRawStream(self._device)
        self._is_under_way = True
        driver._checked("cuMemcpyDtoHAsync", cu.cuMemcpyDtoHAsync(*self._addresses, stream))
        driver._checked("cuEventRecord", cu.cuEventRecord(self._event, stream))
        return None

    def __del__(self) -> None:
        """Keep the memory that a copy may yet write to: torch does not know of the copy."""
        if self._is_under_way:
            _WRITTEN_TO.append(self._tensors)

    def wait(self) -> None:
        """Wait for the copy that began last."""
        self._done.synchronize()
        self._is_under_way = False
