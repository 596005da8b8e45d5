"""Products of heads beside torch's BF16 einsum, and beside what DeepGEMM would take. Cold, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.gemm.heads.api import fp8_einsum
from deep_gemm.testing import calc_diff

from . import yardsticks
from .cases import Shape
from .contenders import BF16, OURS
from .products import measure_each
from .report import Add, Announce, Row, cold_rows_of
from .timing import L2Flush, cold

KIND, EXPRESSION = "fp8_einsum", "bhr,hdr->bhd"
ROW_MAJOR = f"{OURS}_row_major"
CONTENDERS = (OURS, ROW_MAJOR, BF16)
METHOD = (
    "einsum: fp8_einsum of bhr,hdr->bhd, shapes are b x h x r x d, BF16 output; GPU time of all kernels of a call from "
    "torch.profiler, a 512 MB fill before each call to evict the L2, contenders interleaved in one process in rotating "
    "order, 20 calls each, median, least and most; random normal numbers, cast to FP8; deep_gemm: scales of a m-major "
    "for each head; deep_gemm_row_major: scales as casts give them, which some kernels need laid out first; bf16: "
    "torch.einsum; "
    f"error: calc_diff from torch.einsum in FP32 of the same FP8 numbers with their scales; {yardsticks.METHOD}"
)
SHAPES = tuple((b, h, r, d) for h, r, d in ((8, 4096, 1024), (128, 512, 128)) for b in (1, 4, 32, 128, 130, 4096))
QUICK_SHAPES = ((4, 8, 4096, 1024), (4096, 8, 4096, 1024))
REPEATS = 20
MOST_ERROR = 1e-5


def shapes_of(*, quick: bool = False) -> list[Shape]:
    """List what is measured: b, h, r, d."""
    return list(QUICK_SHAPES if quick else SHAPES)


def measure(shapes: Sequence[Shape], *, only: Sequence[str] = (), add: Add, announce: Announce) -> None:
    """Measure products of these shapes."""
    flush = L2Flush()
    add(yardsticks.measure(flush))
    measure_each(
        [(KIND, shape) for shape in shapes], lambda _, shape: rows_of(Heads(shape, "cuda"), flush, only), add, announce
    )


class Heads:
    """Operands of products of heads, and the ways to compute them."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape = b, h, r, d = shape
        x = torch.randn(b, h, r, device=device, dtype=torch.bfloat16)
        w = torch.randn(h, d, r, device=device, dtype=torch.bfloat16)
        self.plain = x, w
        self.a, self.w = per_token_cast_to_fp8(x), per_block_cast_to_fp8(w)
        self.laid = get_mn_major_tma_aligned_tensor(self.a[1].transpose(0, 1)).transpose(0, 1)
        self.out = torch.empty(b, h, d, device=device, dtype=torch.bfloat16)
        scales = (self.a[1].numel() + self.w[1].numel()) * 4
        self.operations, self.bytes = 2 * b * h * r * d, (b * h * r + h * d * r) + b * h * d * 2 + scales

    def calls(self) -> dict[str, Callable[[], Any]]:
        """All ways, by name."""
        return {
            OURS: lambda: fp8_einsum(EXPRESSION, (self.a[0], self.laid), self.w, self.out),
            ROW_MAJOR: lambda: fp8_einsum(EXPRESSION, self.a, self.w, self.out),
            BF16: lambda: torch.einsum(EXPRESSION, *self.plain),
        }

    def right(self) -> Tensor:
        """Compute what the FP8 numbers and their scales give in FP32."""
        (values, scales), (weights, of_blocks) = self.a, self.w
        _, _, r, d = self.shape
        x = values.float() * scales.repeat_interleave(128, -1)[..., :r]
        spread = of_blocks.repeat_interleave(128, 1)[:, :d].repeat_interleave(128, 2)[..., :r]
        return torch.einsum(EXPRESSION, x, weights.float() * spread)

    def error(self, call: Callable[[], Any]) -> float:
        """Let a call write to `out`, and compare that."""
        self.out.fill_(torch.nan)
        call()
        return float(calc_diff(self.out, self.right()))


def rows_of(heads: Heads, flush: L2Flush, only: Sequence[str]) -> list[Row]:
    """Check and time all contenders of one shape."""
    calls = {name: call for name, call in heads.calls().items() if not only or name in only}
    errors = {name: heads.error(call) for name, call in calls.items() if name != BF16}
    return cold_rows_of(
        KIND,
        heads.shape,
        cold(calls, flush, REPEATS),
        errors=errors,
        failed={name: wrong_if(error) for name, error in errors.items()},
        operations=heads.operations,
        bytes=heads.bytes,
    )


def wrong_if(error: float | None) -> str | None:
    """Say what is wrong with a result that differs so much; None if nothing is."""
    if error is None or error <= MOST_ERROR:  # NaN is neither
        return None
    return f"wrong: differs by {error:.2g}, expected at most {MOST_ERROR}"
