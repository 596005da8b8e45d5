"""Trials and mutations of the host's part of plan_sends and pack_rows, for host_mutations.py."""

from __future__ import annotations

from collections.abc import Callable

import torch


def plan_trial() -> None:
    from deep_gemm.across.plan_sends import config_of
    from lab.sim.plan_sends import PlanTrial

    PlanTrial(config_of(8), 1030, 4, 3, 5).run()


def pack_trial(behind: int | None) -> None:
    from deep_gemm.across.pack_rows import config_of
    from lab.sim.pack_rows import PackTrial

    PackTrial(config_of(torch.bfloat16, 8), 5, 272, 3, behind=behind).run()


PLANS, PACKS, OWN = "plan of sends", "rows to ranks", "rows to all"
TRIALS: dict[str, Callable[[], None]] = {PLANS: plan_trial, PACKS: lambda: pack_trial(None), OWN: lambda: pack_trial(2)}
SWAPS: tuple[tuple[str, ...], ...] = (
    ("across.plan_sends", '"facts": struct.pack(f"<{NUM_FACTS}q", *facts)', '"facts": b""', PLANS),
    ("across.plan_sends", '"topk_ids": topk_ids,', '"topk_ids": told,', PLANS),
    ("across.plan_sends", '"row_of": row_of,', '"row_of": told,', PLANS),
    ("across.plan_sends", '"told": told,', '"told": row_of,', PLANS),
    ("across.plan_sends", '"tokens": topk_ids.shape[0]', '"tokens": topk_ids.shape[0] - 1', PLANS),
    ("across.plan_sends", '"topk": topk_ids.shape[1]', '"topk": topk_ids.shape[1] - 1', PLANS),
    ("across.plan_sends", '"experts_here": experts_here', '"experts_here": experts_here - 1', PLANS),
    ("across.plan_sends", '"ranks": ranks', '"ranks": ranks - 1', PLANS),
    ("across.plan_sends", "ceil_div(tokens, config.num_threads)", "tokens // config.num_threads", PLANS),
    ("across.pack_rows", '"x": x,', '"x": rows,', PACKS),
    ("across.pack_rows", '"topk_ids": topk_ids,', '"topk_ids": topk_weights,', PACKS),
    ("across.pack_rows", '"topk_weights": topk_weights,', '"topk_weights": topk_ids,', PACKS),
    ("across.pack_rows", '"row_of": row_of,', '"row_of": None,', PACKS),
    ("across.pack_rows", '"rows": rows,', '"rows": x,', PACKS),
    ("across.pack_rows", "x.stride(0) * x.element_size()", "x.shape[1] * x.element_size()", PACKS),
    ("across.pack_rows", '"tokens": tokens', '"tokens": tokens - 1', PACKS),
    ("across.pack_rows", '"slots": rows.shape[0] if row_of is None else tokens', '"slots": tokens', OWN),
    ("across.pack_rows", '"hidden": hidden', '"hidden": hidden - 16', PACKS),
    ("across.pack_rows", '"topk": topk_ids.shape[1]', '"topk": topk_ids.shape[1] - 1', PACKS),
    ("across.pack_rows", "rows.shape[1] * rows.element_size()", "rows.shape[1] * 4 - 16", PACKS),
    ("across.pack_rows", "(1 << 32) // units_of_token(hidden)", "(1 << 32) // units_of_token(hidden) // 2", PACKS),
    ("across.pack_rows", "ceil_div(hidden, SCALE_BLOCK) + 1", "ceil_div(hidden, SCALE_BLOCK)", PACKS),
    ("across.pack_rows", "ceil_div(slots * units_of_token(hidden), config.teams)", "1", PACKS),
)
