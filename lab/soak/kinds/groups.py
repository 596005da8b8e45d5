"""Assigns rows to groups by ids, ends or counts, with empty groups and rows without a group."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_gemm.core.check.layout import align
from deep_gemm.gemm.problem import padding_rows

from ..draw import Draw


def draw_ids(draw: Draw, m: int, groups: int) -> Tensor:
    """Draw runs of equal ids with any lengths, in any order; some ids are -1."""
    ids: list[int] = []
    while len(ids) < m:
        ids += [draw.rng.randint(-1, groups - 1)] * draw.rng.choice((1, 7, 64, 128, 129, 300))
    return torch.tensor(ids[:m], dtype=torch.int32, device=draw.device)


def draw_ends(draw: Draw, m: int, groups: int, alignment: int) -> Tensor:
    """Draw the end of each group; a group begins at the aligned end of the previous one. Some groups are empty."""
    ends: list[int] = []
    end = 0
    for _ in range(groups):
        start = align(end, alignment)
        if start <= m and draw.flag(0.8):  # otherwise the group is empty, and ends where the previous group ends
            end = start + draw.rng.randint(0, (m - start) // 2)
        ends.append(end)
    return torch.tensor(ends, dtype=torch.int32, device=draw.device)


def draw_layout(draw: Draw, m: int, groups: int, alignment: int, by_ends: bool) -> Tensor:
    """Draw ends, or ids."""
    return draw_ends(draw, m, groups, alignment) if by_ends else draw_ids(draw, m, groups)


def draw_counts(draw: Draw, groups: int, max_m: int) -> Tensor:
    """Draw the number of rows of each group."""
    counts = [draw.rng.choice((0, max_m, draw.rng.randint(0, max_m))) for _ in range(groups)]
    return torch.tensor(counts, dtype=torch.int32, device=draw.device)


def ids_of_ends(ends: Tensor, m: int, alignment: int) -> Tensor:
    """Return the group of each row, or -1 for none."""
    ids, start = torch.full((m,), -1, dtype=torch.int32, device=ends.device), 0
    for group, end in enumerate(ends.tolist()):
        ids[start:end] = group
        start = align(end, alignment)
    return ids


BLOCK_OF_IDS = 128
"""With ids, padding is set to zero within blocks of this many rows, whatever alignment the user has set."""


def rows_written(ids: Tensor, alignment: int, zero_padding: bool, by_ends: bool) -> Tensor:
    """Return `[m, 1]`: True for rows of groups, and for padding that is set to zero (always with ids)."""
    written = ids >= 0
    if (zero_padding or not by_ends) and len(ids):
        written = written | padding_rows(ids, alignment if by_ends else BLOCK_OF_IDS)
    return written[:, None]
