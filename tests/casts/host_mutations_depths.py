"""Mistakes in the parameters that launches of cast_depths pack, which `host_mutations.py` runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def trial(source: str, counts: tuple[int, ...], k: int, **more: Any) -> None:
    from deep_gemm.casts import cast_depths
    from lab.sim.cast_depths import DepthsTrial

    config = cast_depths.depths_cast_config(torch.bfloat16, cast_depths.Source[source])
    DepthsTrial(config, counts, k, **more).check()


TOKENS, WEIGHTED, SILU, AT_ONCE = "rows of tokens", "weighted rows", "SiLU's gradient", "SiLU at once"
ROWS, ROWS_ALONE = "SiLU's rows", "SiLU's rows, the gradient alone"
GRADIENT, ACTIVATION = "SiLU's gradient alone", "the activation alone"
COUNTS = (5, 0, 130)
TRIALS: dict[str, Callable[[], None]] = {
    TOKENS: partial(trial, "TOKENS", COUNTS, 144, behind=0),
    WEIGHTED: partial(trial, "WEIGHTED", COUNTS, 144),
    SILU: partial(trial, "SILU", COUNTS, 144, limit=1.5),
    AT_ONCE: partial(trial, "SILU_AT_ONCE", COUNTS, 256, limit=1.5),
    GRADIENT: partial(trial, "SILU", (20,), 80, parts="gradient"),
    ACTIVATION: partial(trial, "SILU", (20,), 80, parts="activation"),
    ROWS: partial(trial, "SILU_ROWS", COUNTS, 264, limit=1.5),
    ROWS_ALONE: partial(trial, "SILU_ROWS", (20,), 72, parts="gradient"),
}

DEPTHS = "casts.cast_depths"
SWAPS: list[tuple[str, ...]] = [
    (DEPTHS, '"x_pitch": pitch(p.x, 0)', '"x_pitch": p.x.shape[1] * p.x.element_size()', TOKENS),
    (DEPTHS, "pitch(p.ds, 0)", "pitch(p.x, 0)", SILU),
    (DEPTHS, '"stride_of_block": pitch(p.column_scales, 1)', '"stride_of_block": 4', TOKENS),
    (DEPTHS, "pitch(p.activated_scales, 1)", "pitch(p.column_scales, 1)", SILU),
    (DEPTHS, "pitch(p.scales, 1)", "pitch(p.column_scales, 1)", SILU),
    ("casts.config", "x.stride(dim) * x.element_size()", "x.stride(dim)", TOKENS, SILU),
    (DEPTHS, '"rows": p.rows', '"rows": p.rows - 1', TOKENS),
    (DEPTHS, '"k": p.x.shape[1]', '"k": p.x.shape[1] - 16', TOKENS),
    (DEPTHS, '"room": room_of(p.rows, p.ends.numel())[0]', '"room": p.rows', TOKENS),
    (DEPTHS, '"num_groups": p.ends.numel()', '"num_groups": p.ends.numel() - 1', TOKENS),
    (DEPTHS, '"tiles": tiles', '"tiles": tiles - 1', TOKENS),
    (DEPTHS, "block_reciprocal(tiles * SCALE_BLOCK)", "block_reciprocal(tiles)", TOKENS),
    (DEPTHS, '"gradient_tiles": of_gradient', '"gradient_tiles": 0', SILU),
    (DEPTHS, "math.inf if p.limit is None else p.limit", "math.inf", SILU),
    (DEPTHS, "return room_of(p.rows, p.ends.numel())[1]", "return (room_of(p.rows, p.ends.numel())[1] - 1)", GRADIENT),
    (DEPTHS, "if p.ds.shape[1] % SCALE_BLOCK == 0 else", "if True else", SILU),
    (DEPTHS, "return 0, ceil_div(k // 2, SCALE_BLOCK)", "return 0, k // 4 // SCALE_BLOCK", AT_ONCE),
    (DEPTHS, "return 0, ceil_div(k // 2, SCALE_BLOCK)", "return 0, k // 2 // SCALE_BLOCK", ROWS),
    (DEPTHS, "source = Source.SILU_ROWS", "source = Source.SILU", ROWS_ALONE),
    (DEPTHS, "(Source.SILU_AT_ONCE, Source.SILU_ROWS)", "(Source.SILU_AT_ONCE,)", ROWS_ALONE),
    (DEPTHS, "tile = 16", "tile = 0", ROWS),
    (DEPTHS, "pitch(p.ds, 0)", "pitch(p.x, 0)", ROWS),
    (DEPTHS, "return of_x if p.columns is not None else 0", "return of_x", ACTIVATION),
    (DEPTHS, "of_activation if p.activated is not None else 0", "of_activation", GRADIENT),
    (DEPTHS, "some * (K_MULTIPLE - 1)", "0 * (K_MULTIPLE - 1)", TOKENS),
    (DEPTHS, "// SCALE_BLOCK + some", "// SCALE_BLOCK + 1", TOKENS),
]
