"""Errors other than wrong arguments: one type for each thing that a caller can do about it.

Memory that a call needs besides its output comes from torch; if torch has none, it raises `torch.OutOfMemoryError`.
"""

from .core.gpu import UnsupportedGpuError
from .core.jit import CompileError, CompilerMissing
from .core.jit.driver import DriverError, EarlierError, LaunchError

__all__ = ["CompileError", "CompilerMissing", "DriverError", "EarlierError", "LaunchError", "UnsupportedGpuError"]
