"""A mixture of experts on one GPU."""

from . import gather_weighted, route_rows

KERNELS = (route_rows.KERNEL, route_rows.COUNTER, gather_weighted.KERNEL, gather_weighted.MANY)
