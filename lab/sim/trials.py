"""The trials of every kernel, by its name: the one list of what the simulator can run."""

from __future__ import annotations

from typing import Any

from deep_gemm.core.kernel import Kernel

from . import (
    cast_rows,
    cast_tiles,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    gather_weighted,
    hc_prenorm,
    lay_scales,
    pack_rows,
    peers,
    plan_paged_contexts,
    plan_sends,
    route_rows,
    rows_fetched,
    rows_to_addresses,
)
from .trial import Trial

TRIALS: tuple[type[Trial], ...] = (
    cast_tiles.TileTrial,
    cast_rows.RowTrial,
    lay_scales.ScalesTrial,
    route_rows.RouteTrial,
    route_rows.CountTrial,
    gather_weighted.GatherTrial,
    gather_weighted.ManyTrial,
    fp8_mqa_logits.MqaTrial,
    fp8_paged_mqa_logits.PagedTrial,
    plan_paged_contexts.PlanTrial,
    hc_prenorm.HcTrial,
    hc_prenorm.HcFewTrial,
    pack_rows.PackTrial,
    plan_sends.PlanTrial,
    peers.PeerTrial,
    peers.GatherRowsTrial,
    peers.MeetTrial,
    rows_fetched.FetchTrial,
    rows_to_addresses.AddressesTrial,
)


def trial_of(kernel: Kernel[Any], config: Any) -> type[Trial]:
    """Find the trial that runs this configuration of a kernel."""
    return next(each for each in TRIALS if each.kernel is kernel and each.takes(config))
