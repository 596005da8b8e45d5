"""Copies of what a kernel has written, for the host: the one place that reads a GPU's memory, or waits for it."""

from __future__ import annotations

import torch
from torch import Tensor

from . import driver

_WRITTEN_TO: list[tuple[Tensor, Tensor]] = []
"""Memory of copies that had not ended when nobody waited for them any more."""


class ToHost:
    """Copies from a tensor of a GPU to one in pinned memory of the host, again and again.

    torch's own copy and event take the host two to four times as long, for which a GPU waits.
    """

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._is_under_way = False
        self._tensors = source, target  # what is copied stays where it is
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
        """Wait until the copy has come that began last."""
        self._done.synchronize()
        self._is_under_way = False
