"""Trials and mutations of the host's part of plan_sends and pack_rows, for host_mutations.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mutations_sends import FACTS

from deep_gemm.across.message import pack, row_bytes
from deep_gemm.across.owners import count_routes, owners_of_routes, owners_of_tokens
from deep_gemm.moe.routing import expert_rows


def plan_trial() -> None:
    from deep_gemm.across import plan_sends
    from lab.sim import plan_sends as sim

    here, ranks = 3, 5
    ids = torch.randint(-1, here * ranks, (1030, 4), generator=torch.Generator().manual_seed(0))
    config = plan_sends.config_of(ids.element_size())
    row_of, told = sim.run(sim.compile_config(config), config, ids, FACTS, here, ranks)
    owners = owners_of_routes(ids, here, ranks)
    rows = expert_rows(owners_of_tokens(owners, ranks), ranks)
    if not torch.equal(row_of, rows.row_of):
        raise ValueError("other rows")
    if told.tolist() != [*FACTS, *rows.counts.tolist(), *count_routes(owners, ranks).tolist()]:
        raise ValueError("other numbers")


def pack_trial(behind: int | None) -> None:
    from deep_gemm.across import pack_rows
    from lab.sim import pack_rows as sim

    tokens, hidden, topk = 5, 272, 3
    g = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden + 16, generator=g).bfloat16()[:, :hidden]
    ids, p = torch.randint(-1, 99, (tokens, topk), generator=g), torch.randn(tokens, topk, generator=g)
    row_of = None if behind is not None else torch.arange(tokens * topk, dtype=torch.int32).flip(0).view(tokens, topk)
    rows = tokens * topk if behind is None else tokens + behind
    config = pack_rows.config_of(x.dtype, ids.element_size())
    found = sim.run(sim.compile_config(config), config, x, ids, p, row_of, (rows, row_bytes(hidden, topk) // 4))
    right = pack(x, ids, p)
    if row_of is not None and not torch.equal(found[row_of.flatten().long()], right.repeat_interleave(topk, 0)):
        raise ValueError("other rows")
    if row_of is None and not (torch.equal(found[:tokens], right) and bool((found[tokens:, 71:74] == -1).all())):
        raise ValueError("other rows")


PLANS, PACKS, OWN = "plan of sends", "rows to ranks", "rows to all"
TRIALS: dict[str, Callable[[], None]] = {
    PLANS: plan_trial,
    PACKS: lambda: pack_trial(None),
    OWN: lambda: pack_trial(2),
}
SWAPS: tuple[tuple[str, ...], ...] = (
    ("across.plan_sends", '"facts": _FACTS.pack(*facts)', '"facts": b""', PLANS),
    ("across.plan_sends", '"topk_ids": topk_ids.data_ptr()', '"topk_ids": told.data_ptr()', PLANS),
    ("across.plan_sends", '"row_of": row_of.data_ptr()', '"row_of": told.data_ptr()', PLANS),
    ("across.plan_sends", '"told": told.data_ptr()', '"told": row_of.data_ptr()', PLANS),
    ("across.plan_sends", '"tokens": topk_ids.shape[0]', '"tokens": topk_ids.shape[0] - 1', PLANS),
    ("across.plan_sends", '"topk": topk_ids.shape[1]', '"topk": topk_ids.shape[1] - 1', PLANS),
    ("across.plan_sends", '"experts_here": experts_here', '"experts_here": experts_here - 1', PLANS),
    ("across.plan_sends", '"ranks": ranks', '"ranks": ranks - 1', PLANS),
    ("across.plan_sends", "ceil_div(tokens, config.num_threads)", "tokens // config.num_threads", PLANS),
    ("across.pack_rows", '"x": x.data_ptr()', '"x": rows.data_ptr()', PACKS),
    ("across.pack_rows", '"topk_ids": topk_ids.data_ptr()', '"topk_ids": topk_weights.data_ptr()', PACKS),
    ("across.pack_rows", '"topk_weights": topk_weights.data_ptr()', '"topk_weights": topk_ids.data_ptr()', PACKS),
    ("across.pack_rows", '"row_of": 0 if row_of is None else row_of.data_ptr()', '"row_of": 0', PACKS),
    ("across.pack_rows", '"rows": rows.data_ptr()', '"rows": x.data_ptr()', PACKS),
    (
        "across.pack_rows",
        '"x_pitch": x.stride(0) * x.element_size()',
        '"x_pitch": x.shape[1] * x.element_size()',
        PACKS,
    ),
    ("across.pack_rows", '"tokens": tokens', '"tokens": tokens - 1', PACKS),
    ("across.pack_rows", '"slots": rows.shape[0] if row_of is None else tokens', '"slots": tokens', OWN),
    ("across.pack_rows", '"hidden": hidden', '"hidden": hidden - 16', PACKS),
    ("across.pack_rows", '"topk": topk_ids.shape[1]', '"topk": topk_ids.shape[1] - 1', PACKS),
    ("across.pack_rows", "rows.shape[1] * rows.element_size()", "rows.shape[1] * 4 - 16", PACKS),
    ("across.pack_rows", "(1 << 32) // units_of_token(hidden)", "(1 << 32) // units_of_token(hidden) // 2", PACKS),
    ("across.pack_rows", "ceil_div(hidden, SCALE_BLOCK) + 1", "ceil_div(hidden, SCALE_BLOCK)", PACKS),
    ("across.pack_rows", "ceil_div(slots * units_of_token(hidden), config.teams)", "1", PACKS),
)
