"""FP8 products with one scale for all of k in A, B or both, some with a bias: dense; grouped by ids, ends or counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from deep_gemm.core.check.layout import SCALE_BLOCK
from deep_gemm.core.check.recipes import PER_BLOCK, PER_ROW, WHOLE

from ...casts import spread
from ..draw import Draw
from ..trial import Right, Tensors
from . import dense, fp8, layers, rows
from .groups import ids_of_ends

SIDES = ((WHOLE, WHOLE), (WHOLE, WHOLE), (WHOLE, PER_BLOCK), (PER_ROW, WHOLE), (WHOLE, PER_ROW))
LONGEST = 4096
"""The largest k."""


class WholeWeight(fp8.Weight):
    """A weight with a scale for each row, or to be multiplied by an A with a scale for each row. Sums are exact."""

    def __init__(self, draw: Draw, exact: bool, low: int = -2, high: int = 2) -> None:
        super().__init__(draw, exact, low, high)
        self.of_a, self.of_b = draw.rng.choice(SIDES)
        self.columns_of_a = self.of_a.columns or LONGEST

    def room(self, shape: Sequence[int], rows: int = SCALE_BLOCK) -> tuple[Tensor, Tensor]:
        """Allocate a weight `[..., n, k]` and its scales."""
        values, sf = super().room(shape, self.of_b.rows)
        return values, sf if self.of_b.columns else self.draw.scales((*shape[:-1], 1))

    def numbers(self, values: Tensor, sf: Tensor, rows: int = SCALE_BLOCK) -> Tensor:
        """Return the FP64 numbers `[..., n, k]`."""
        return spread(values, sf, self.of_b.rows, self.of_b.columns or LONGEST)


class LayerWeight(WholeWeight):
    """A layer's weight with a scale for each row."""

    block, usual_beside = (WHOLE.rows, WHOLE.columns), LONGEST

    def __init__(self, draw: Draw, exact: bool, low: int = -2, high: int = 2) -> None:
        super().__init__(draw, exact, low, high)
        self.of_a, self.of_b = draw.rng.choice((WHOLE, PER_ROW)), WHOLE
        self.columns_of_a = self.of_a.columns or LONGEST


class LinearWhole(layers.Linear):
    """`linear`."""

    kind = "linear_whole"
    make_weight: ClassVar[type[fp8.Weight]] = LayerWeight


class ExpertsWhole(layers.Experts):
    """`experts`."""

    kind = "experts_whole"
    make_weight: ClassVar[Any] = LayerWeight


class OfWhole(fp8.OfFp8):
    """The code that kinds of products with one scale for all of k share. Biases are integers: all sums are exact."""

    make_weight: ClassVar[type[fp8.Weight]] = WholeWeight

    def drawn_exactness(self) -> bool:
        """Choose exact sums always."""
        return True

    def add_bias(self, *shape: int) -> None:
        """Allocate a bias, in half of all trials."""
        if self.draw.flag():
            self.operands["bias"] = self.draw.integers(shape, -9, 9)

    def fill(self) -> None:
        """Draw everything anew."""
        super().fill()
        if "bias" in self.operands:
            self.operands["bias"].copy_(self.draw.integers(self.operands["bias"].shape, -9, 9))


class DenseWhole(OfWhole, dense.Dense):
    """`fp8_gemm_nt` and its relatives. A bias replaces C."""

    kind = "fp8_gemm_whole"
    has_rows: ClassVar[bool] = False

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        if self.c is None:
            self.add_bias(self.n)

    def refused_faults(self) -> Mapping[str, str]:
        """Return the faults that a call must refuse. No address is a fault in a turned B: a call may copy it."""
        return {**super().refused_faults(), "b": "dtype shape device" if self.turned else fp8.VALUES}

    def call(self, x: Tensors) -> Tensors:
        """Multiply into the given D."""
        c = {"c": x.get("c"), "d": x["d"], None: x.get("bias")}[self.c]
        self.calls[self.major](*self.given(x), x["d"], c, **self.weight.recipes)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute D in FP64."""
        c = self.operands.get("c", self.operands.get("bias", self.starts.get("d")))
        return {"d": Right(*fp8.product(*self.numbers(), c, self.dtype, self.exact))}


class ContiguousWhole(OfWhole, rows.Contiguous):
    """`m_grouped_fp8_gemm_nt_contiguous` and its nn form."""

    kind = "m_grouped_fp8_contiguous_whole"

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.add_bias(self.groups, self.n)

    def call(self, x: Tensors) -> Tensors:
        """Multiply into the given D."""
        said = {"use_psum_layout": self.by_ends, "ensure_zero_padding": self.zero_padding, **self.weight.recipes}
        self.calls[self.turned](*self.given(x), x["d"], x["layout"], bias=x.get("bias"), **said)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute D group by group."""
        right, bias = super().right()["d"], self.operands.get("bias")
        if bias is None:
            return {"d": right}
        layout = self.operands["layout"]
        ids = ids_of_ends(layout, self.m, self.alignment) if self.by_ends else layout
        a, b = self.numbers()
        total = torch.zeros(self.m, self.n, dtype=torch.float64, device=a.device)
        for group in range(self.groups):
            at = ids == group
            total[at] = a[at] @ b[group].mT + bias[group].double()
        return {"d": replace(right, exact=total.to(self.dtype))}


class MaskedWhole(OfWhole, rows.Masked):
    """`m_grouped_fp8_gemm_nt_masked`."""

    kind = "m_grouped_fp8_masked_whole"

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.add_bias(self.groups, self.n)

    def call(self, x: Tensors) -> Tensors:
        """Multiply into the given D."""
        more = {"bias": x.get("bias"), **self.weight.recipes}
        self.calls[0](*self.given(x), x["d"], x["masked_m"], self.expected_m, **more)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute all rows; only the first rows of each group are written."""
        right, bias = super().right()["d"], self.operands.get("bias")
        a, b = self.numbers()
        total = a @ b.mT + (0 if bias is None else bias[:, None].double())
        return {"d": replace(right, exact=total.to(self.dtype))}
