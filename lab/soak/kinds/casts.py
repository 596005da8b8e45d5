"""Casts and layouts of scales: results of kernels compared with torch operations, bit for bit."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from deep_gemm.casts import fp8, scales
from deep_gemm.casts.by_torch import cast_blocks
from deep_gemm.casts.gating import activated, gating_of
from deep_gemm.casts.rules import Target
from deep_gemm.core.check.layout import rows_of_counts
from deep_gemm.moe.activation import silu_mul_cast_to_fp8

from ..draw import Draw
from ..trial import Right, Tensors, Trial
from .groups import draw_counts

TYPES = (torch.bfloat16, torch.float16, torch.float32)
COLUMNS = (128, 128, 64, 32)
"""Numbers of columns that may share a scale."""
OF_ROWS = (*COLUMNS, 0, 0)
"""Numbers of columns of a row that may share a scale; 0: all."""


def of_many_magnitudes(draw: Draw, x: Tensor, specials: float, empty: float = 0.0) -> Tensor:
    """Draw numbers of many magnitudes, zeros, infinities or NaNs with a given chance, and first columns of zeros."""
    drawn = draw.normal(x.shape) * 2.0 ** draw.rng.randint(-8, 8)
    drawn[torch.rand(x.shape, generator=draw.generator, device=x.device, dtype=torch.float32) < 0.2] = 0
    if draw.flag(empty):
        drawn[..., : draw.rng.randint(0, x.shape[-1])] = 0
    if draw.flag(specials):
        drawn.reshape(-1)[draw.rng.randrange(drawn.numel())] = draw.rng.choice((torch.inf, -torch.inf, torch.nan))
    return drawn


class Cast(Trial):
    """Every cast of one or several matrices to FP8."""

    kind = "casts"
    faults: ClassVar = {"x": "cast_type"}

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.form = draw.rng.choice(("token", "channel", "block", "both", "groups", "masked", "tensor"))
        self.rounds_up, self.mn_major = draw.flag(), draw.flag()
        self.least = draw.rng.choice((0.0, 1e-4))
        some = OF_ROWS if self.form in ("token", "masked") else COLUMNS
        self.columns = 128 if self.form in ("both", "groups") else draw.rng.choice(some)
        self.m, self.k = draw.size(1, 2000), draw.size(1, 3000, draw.rng.choice((1, 8, 16)))
        self.ks: list[int] = []
        left = self.k
        while left:
            self.ks.append(draw.rng.randint(1, left) if len(self.ks) < 8 else left)
            left -= self.ks[-1]
        groups = draw.rng.choice((1, 2, 5)) if self.form in ("masked", "block", "channel") else 0
        groups = max(groups, 1) if self.form == "masked" else groups
        shape = (groups, min(self.m, 300), self.k) if groups else (self.m, self.k)
        turned = draw.flag(0.3) and self.form in ("token", "groups", "tensor")
        self.operands = {"x": draw.matrix(shape, draw.rng.choice(TYPES), turned=turned)}
        if self.form == "masked":
            self.operands["masked_m"] = torch.empty(groups, dtype=torch.int32, device=draw.device)
        if self.form == "tensor" and draw.flag():  # the caller passes the scale
            self.operands["scale"] = torch.empty(1, dtype=torch.float32, device=draw.device)
            self.rounds_up, self.least = False, 0.0

    def fill(self) -> None:
        """Draw numbers of many magnitudes, zeros, and sometimes an infinity or a NaN."""
        x, draw = self.operands["x"], self.draw
        x.copy_(of_many_magnitudes(draw, x, 0.1))
        if self.form == "masked":
            self.operands["masked_m"].copy_(draw_counts(draw, len(x), x.shape[1]))
        if "scale" in self.operands:
            self.operands["scale"].copy_(draw.normal((1,)).abs())

    def call(self, x: Tensors) -> Tensors:
        """Cast; the call makes values and scales."""
        operand, least = x["x"], self.least
        if self.form == "both":
            (values, sf), (values_t, sf_t) = fp8.cast_both_to_fp8(operand, self.rounds_up, min_amax=least)
            return {"values": values, "scales": sf, "values_t": values_t, "scales_t": sf_t}
        if self.form == "groups":
            made = fp8.k_grouped_cast_to_fp8(operand, self.ks, self.rounds_up, min_amax=least, mn_major=self.mn_major)
        elif self.form == "tensor":
            made = fp8.per_tensor_cast_to_fp8(operand, x.get("scale"), self.rounds_up, min_amax=least)
        elif self.form == "channel":
            made = fp8.per_channel_cast_to_fp8(operand, self.rounds_up, self.columns, min_amax=least)
        elif self.form == "block":
            made = fp8.per_block_cast_to_fp8(operand, self.rounds_up, self.columns, min_amax=least)
        else:
            masked_m = x.get("masked_m")
            made = fp8.per_token_cast_to_fp8(
                operand, self.rounds_up, self.columns, min_amax=least, mn_major=self.mn_major, masked_m=masked_m
            )
        return dict(zip(("values", "scales"), made, strict=True))

    def right(self) -> dict[str, Right]:
        """Cast by torch operations."""
        x = self.operands["x"]
        if self.form == "groups":
            parts = [self.blocks(part, 1, 128) for part in torch.split(x, self.ks, dim=1)]
            return {
                "values": Right(torch.cat([values.flatten() for values, _ in parts])),
                "scales": Right(torch.cat([sf for _, sf in parts], dim=1)),
            }
        if self.form == "tensor":
            to = Target(1, 0, self.rounds_up, self.least)
            values, sf = cast_blocks(x.reshape(1, -1), to, self.operands.get("scale"))
            return {"values": Right(values.view(x.shape)), "scales": Right(sf.view(1))}
        many = self.columns
        rows, columns = {"channel": (many, 1), "block": (many, many)}.get(self.form, (1, many))
        values, sf = self.blocks(x, rows, columns)
        if self.form == "masked":
            counts = rows_of_counts(self.operands["masked_m"], x.shape[1])[..., None]
            return {"values": Right(values, None, counts), "scales": Right(sf, None, counts)}
        right = {"values": Right(values), "scales": Right(sf)}
        if self.form == "both":
            values, sf = self.blocks(x.t(), 1, 128)
            right |= {"values_t": Right(values), "scales_t": Right(sf)}
        return right

    def blocks(self, x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Cast by torch operations."""
        return cast_blocks(x, Target(rows, columns, self.rounds_up, self.least))


class Activation(Trial):
    """`silu_mul_cast_to_fp8`."""

    kind = "activation"
    faults: ClassVar = {"x": "cast_type"}

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.m, self.i = draw.size(1, 1500), draw.size(1, 1500, draw.rng.choice((1, 8, 16)))
        self.groups = draw.rng.choice((0, 0, 1, 4))
        name, self.rounds_up = draw.rng.choice(("swiglu", "swiglu", "situ")), draw.flag()
        self.limit = draw.rng.choice((None, 3.0)) if name == "swiglu" else None
        alpha, beta = draw.rng.choice(((None, None), (1.702, 1.0), (2.0, 7.0)))
        self.said: dict[str, Any] = {"activation": name, "alpha": alpha, "beta": beta, "limit": self.limit}
        self.gating = gating_of(**self.said)
        self.columns = draw.rng.choice(OF_ROWS)
        shape = (self.groups, min(self.m, 200), 2 * self.i) if self.groups else (self.m, 2 * self.i)
        self.operands = {"x": draw.matrix(shape, draw.rng.choice(TYPES))}
        if self.groups:
            self.operands["masked_m"] = torch.empty(self.groups, dtype=torch.int32, device=draw.device)
        if draw.flag(0.3):
            self.operands["row_weights"] = torch.empty(shape[:-1], device=draw.device, dtype=torch.float32)

    def fill(self) -> None:
        """Draw normal numbers."""
        x = self.operands["x"]
        x.copy_(self.draw.normal(x.shape))
        if self.groups:
            self.operands["masked_m"].copy_(draw_counts(self.draw, self.groups, x.shape[1]))
        if "row_weights" in self.operands:
            self.operands["row_weights"].copy_(self.draw.powers_of_two(x.shape[:-1]))

    def call(self, x: Tensors) -> Tensors:
        """Activate and cast; the call makes values and scales."""
        said = {"use_ue8m0": self.rounds_up, "gran_k": self.columns, **self.said}
        values, sf = silu_mul_cast_to_fp8(x["x"], x.get("row_weights"), masked_m=x.get("masked_m"), **said)
        k = values.shape[-1]
        return {"numbers": values.float() * sf.repeat_interleave(self.columns or k, -1)[..., :k]}

    def right(self) -> dict[str, Right]:
        """Return the activated numbers; allow two steps of FP8, because a GPU's sigmoid differs from the CPU's."""
        x = self.operands["x"]
        y = activated(x, self.gating).double()
        if "row_weights" in self.operands:
            y *= self.operands["row_weights"].double()[..., None]
        _, sf = cast_blocks(y.float(), Target(1, self.columns, self.rounds_up))
        scale = sf.double().repeat_interleave(self.columns or self.i, -1)[..., : self.i]
        allowed = y.abs() * 2.0**-3 + scale * 2.0**-8
        written = rows_of_counts(self.operands["masked_m"], x.shape[1])[..., None] if self.groups else None
        return {"numbers": Right(y, allowed, written)}


class Scales(Trial):
    """Scales in the layout of products, and scales packed as exponents."""

    kind = "scales"
    faults: ClassVar = {"sf": "dtype"}

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.packs = draw.flag(0.3)
        groups = draw.rng.choice((0, 0, 1, 5))
        self.m, self.blocks = draw.size(1, 3000), draw.size(4, 64, 4) if self.packs else draw.size(1, 64)
        shape = (groups, self.m, self.blocks) if groups else (self.m, self.blocks)
        self.operands = {"sf": torch.empty(shape, device=draw.device, dtype=torch.float32)}

    def fill(self) -> None:
        """Draw powers of two."""
        sf = self.operands["sf"]
        sf.copy_(self.draw.powers_of_two(sf.shape, -20, 20))

    def call(self, x: Tensors) -> Tensors:
        """Convert the scales; the call makes the results."""
        if self.packs:
            packed = scales.pack_ue8m0_to_int(x["sf"])
            return {"exponents": packed, "again": scales.unpack_ue8m0_from_int(packed)}
        return {"laid": scales.get_mn_major_tma_aligned_tensor(x["sf"])}

    def right(self) -> dict[str, Right]:
        """Return the same numbers in new memory."""
        sf = self.operands["sf"]
        if not self.packs:
            return {"laid": Right(sf)}
        exponents = (sf.view(torch.int32) >> 23).to(torch.uint8).contiguous()
        return {"exponents": Right(exponents.view(torch.int32)), "again": Right(sf)}
