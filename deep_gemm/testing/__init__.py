"""Comparing and timing products. Programs of this family import these names from here or from the modules.

The module `bench` is hidden by the function of its name, as elsewhere in the family; `import_module` finds it.
"""

from . import numeric, utils
from .bench import bench, bench_kineto, empty_suppress, suppress_stdout_stderr
from .numeric import assert_bitwise_equal, calc_diff, count_bytes
from .utils import get_arch_major, ignore_env, test_filter

__all__ = [
    "assert_bitwise_equal",
    "bench",
    "bench_kineto",
    "calc_diff",
    "count_bytes",
    "empty_suppress",
    "get_arch_major",
    "ignore_env",
    "numeric",
    "suppress_stdout_stderr",
    "test_filter",
    "utils",
]
