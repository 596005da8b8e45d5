"""Kinds of problems. A new product, cast or layer needs a class in its own file, and a name here."""

from __future__ import annotations

from ..trial import Trial
from . import (
    bf16,
    casts,
    dense,
    depths,
    fine,
    fp4,
    heads,
    hyper_connections,
    layers,
    logits,
    mega_moe,
    rows,
    skip,
    training,
    whole,
)

ALL: tuple[type[Trial], ...] = (
    *(dense.Dense, skip.SkipHeadMid, rows.Contiguous, rows.Masked),
    *(fine.DenseFine, fine.ContiguousFine, fine.MaskedFine),
    *(whole.DenseWhole, whole.ContiguousWhole, whole.MaskedWhole, whole.LinearWhole, whole.ExpertsWhole),
    *(depths.Depths, heads.Heads),
    *(bf16.DenseBf16, bf16.RowsBf16, bf16.MaskedBf16, bf16.DepthsBf16, bf16.Expressions),
    *(logits.MqaLogits, logits.PagedLogits, hyper_connections.HcPrenorm),
    *(casts.Cast, casts.Activation, casts.Scales),
    *(layers.Linear, layers.Experts, layers.ExpertsBf16, layers.Routing, training.LinearStep, training.ExpertsStep),
    *(fine.LinearFine, fine.ExpertsFine, mega_moe.MegaMoe),
    *(fp4.DenseFp4, fp4.ContiguousFp4, fp4.MaskedFp4, fp4.LinearFp4, fp4.ExpertsFp4, fp4.MegaMoeFp4, fp4.CastFp4),
)
KINDS = {trial.kind: trial for trial in ALL}
