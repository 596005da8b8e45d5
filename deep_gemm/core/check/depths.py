"""Depths of groups along k, from the host or from a tensor that the host reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks


def depths_of_ends(ends: Tensor | None, alignment: int, name: str = "ks_tensor") -> Tensor:
    """Depths of groups from where they end along k. The host reads nothing of a GPU.

    A group begins at the aligned end of the one before, and there is no room between groups, so the ends are aligned.
    """
    if ends is None:
        raise ValueError(f"{name}: expected the ends of groups with use_psum_layout, got None")
    checks.int32(name, ends, "groups", checks.tensor(name, ends).numel())
    if ends.is_cpu:
        last = 0
        for group, end in enumerate(ends.tolist()):
            if last % alignment:
                raise ValueError(
                    f"{name}: expected ends that are multiples of {alignment}, the alignment of groups, got {last} "
                    f"for group {group - 1}"
                )
            if end < last:
                raise ValueError(f"{name}: expected ends that do not decrease, got {end} behind {last}")
            last = end
    return torch.diff(ends, prepend=ends.new_zeros(1))


def ue8m0_depths(
    ks: Sequence[int] | None, layout: Tensor | None, alignment: int, layout_is_ends: bool
) -> tuple[int, ...]:
    """Depths of groups whose scales are packed, from the host or from a tensor, which the host then reads."""
    if ks is None and layout is None:
        raise ValueError("ks_cpu: expected a list, or grouped_layout with the same numbers, got neither")
    name = "ks_cpu" if ks is not None else "grouped_layout"
    if ks is None:
        layout = checks.tensor(name, layout)
        checks.readable(name, layout)
        layout = layout.cpu()
        layout = depths_of_ends(layout, alignment, name) if layout_is_ends else layout
    sizes = checks.integers(name, layout if ks is None else ks)
    for index, k in enumerate(sizes):
        if k < 0 or k % alignment:
            raise ValueError(f"{name}: expected multiples of k_alignment = {alignment}, got {k} at index {index}")
    return sizes
