"""The trials of every kernel, by its name: the one list of what the simulator can run."""

from __future__ import annotations

from typing import Any

from deep_gemm.core.kernel import Kernel

from . import (
    bf16,
    bf16_counted,
    bf16_depths,
    bf16_rows,
    bf16_sums,
    cast_rows,
    cast_tiles,
    dense,
    depths,
    fp8_gemm_decode,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    gather_weighted,
    hc_prenorm,
    heads,
    lay_scales,
    linear_decode,
    pack_rows,
    peers,
    plan_paged_contexts,
    plan_sends,
    route_rows,
    rows,
    rows_fetched,
    rows_silu,
    rows_to_addresses,
    skip_head_mid,
)
from .trial import Trial

TRIALS: tuple[type[Trial], ...] = (
    dense.DenseTrial,
    rows.RowsTrial,
    rows_silu.SiluTrial,
    depths.DepthsTrial,
    depths.MapsTrial,
    heads.HeadsTrial,
    heads.DecodeHeadsTrial,
    skip_head_mid.SkipTrial,
    skip_head_mid.DecodeSkipTrial,
    fp8_gemm_decode.DecodeTrial,
    bf16.Bf16Trial,
    bf16_rows.Bf16RowsTrial,
    bf16_depths.Bf16DepthsTrial,
    bf16_counted.Bf16CountedTrial,
    bf16_sums.SumTrial,
    bf16_sums.SlicesTrial,
    linear_decode.LinearTrial,
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
    """Find the trial that runs this configuration of a kernel; a ValueError says that there is none."""
    for each in TRIALS:
        if each.kernel is kernel and each.takes(config):
            return each
    raise ValueError(f"kernel: expected one with a trial in lab/sim/trials.py, got {kernel.name} {config.name}")
