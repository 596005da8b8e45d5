"""Experts of several processes."""

from . import gather_rows, meet_ranks, pack_rows, plan_sends, post_rows

KERNELS = (gather_rows.KERNEL, meet_ranks.KERNEL, pack_rows.KERNEL, plan_sends.KERNEL, post_rows.KERNEL)
