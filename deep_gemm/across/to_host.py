"""Copies of what a kernel has written, for the host: the driver's copy, as what is around kernels may use it."""

from __future__ import annotations

from ..core.jit.driver import ToHost

__all__ = ["ToHost"]
