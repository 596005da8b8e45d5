"""Comparing and timing products. Programs of this family import these names from here or from the modules.

The module `bench` is hidden by the function of its name, as elsewhere in the family; `import_module` finds it.
"""

from . import numeric as numeric, utils as utils
from .bench import (
    bench as bench,
    bench_kineto as bench_kineto,
    empty_suppress as empty_suppress,
    suppress_stdout_stderr as suppress_stdout_stderr,
)
from .numeric import assert_bitwise_equal as assert_bitwise_equal, calc_diff as calc_diff, count_bytes as count_bytes
from .utils import get_arch_major as get_arch_major, ignore_env as ignore_env, test_filter as test_filter

globals()["__all__"] = [name for name in dir() if not name.startswith("_")]  # for `help`, but not for checkers
