"""Programs of this family import casts, layouts and measurements from here."""

from functools import partial

from ..compat.absent import refuse
from ..testing import bench, bench_kineto, calc_diff
from . import dist, layout, math
from .dist import init_dist, uneven_all_gather
from .layout import *  # noqa: F403  all of both modules is here too
from .math import *  # noqa: F403

__all__ = ["bench", "bench_kineto", "calc_diff", "dist", "init_dist", "layout", "math", "uneven_all_gather"]
__all__ += layout.__all__
__all__ += math.__all__


__getattr__ = partial(refuse, __name__)
"""Says what to use instead of a name that other libraries of this family have."""
