"""The simulator: kernels compiled with g++ and run on a model of Hopper. See docs/simulator.md."""

from .arguments import U64, Map, Pointer, Struct
from .library import SCHEDULES, HostCompileError, HostKernel, compile_kernel
from .simulate import Buffer, Result, SimulationError, simulate

__all__ = [
    "SCHEDULES",
    "U64",
    "Buffer",
    "HostCompileError",
    "HostKernel",
    "Map",
    "Pointer",
    "Result",
    "SimulationError",
    "Struct",
    "compile_kernel",
    "simulate",
]
