"""Casts, layouts and measurements under the module path from which programs for DeepGEMM import them."""

from functools import partial as _partial

from ..compat.absent import refuse as _refuse
from ..testing import bench as bench, bench_kineto as bench_kineto, calc_diff as calc_diff
from . import dist as dist, layout as layout, math as math
from .dist import init_dist as init_dist, uneven_all_gather as uneven_all_gather
from .layout import *  # noqa: F403  programs import all names of both modules from here too
from .math import *  # noqa: F403

globals()["__all__"] = [name for name in dir() if not name.startswith("_")]  # shown in `help`, not to type checkers
__getattr__ = _partial(_refuse, __name__)
"""Raises an error that says what to use instead of a name that DeepGEMM has and this package lacks."""
