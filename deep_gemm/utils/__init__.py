"""Programs of this family import casts, layouts and measurements from here."""

from functools import partial as _partial

from ..compat.absent import refuse as _refuse
from ..testing import bench as bench, bench_kineto as bench_kineto, calc_diff as calc_diff
from . import dist as dist, layout as layout, math as math
from .dist import init_dist as init_dist, uneven_all_gather as uneven_all_gather
from .layout import *  # noqa: F403  all of both modules is here too
from .math import *  # noqa: F403

globals()["__all__"] = [name for name in dir() if not name.startswith("_")]  # for `help`, but not for checkers
__getattr__ = _partial(_refuse, __name__)
"""Says what to use instead of a name that other libraries of this family have."""
