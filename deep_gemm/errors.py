"""Errors other than wrong arguments. Each type of error has its own remedy.

A call allocates memory through torch. If torch has no memory left, it raises `torch.OutOfMemoryError`.
"""

from .core.gpu import UnsupportedGpuError
from .core.jit import CompileError, CompilerMissing
from .core.jit.driver import DriverError, EarlierError, LaunchError

__all__ = ["CompileError", "CompilerMissing", "DriverError", "EarlierError", "LaunchError", "UnsupportedGpuError"]
