"""Products of heads compared with torch's BF16 einsum, and with an estimate of DeepGEMM. Timed cold, on a GPU."""

from __future__ import annotations

from functools import partial

import torch
from rich.table import Table
from torch import Tensor

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.gemm.api.heads import fp8_einsum
from deep_gemm.testing import calc_diff

from . import skip_head_mid, table
from .cases import Shape
from .contenders import BF16, OURS, dequantized
from .kinds import Call, Kind, Kinds, Verdict, Work, within
from .layers import ALONE
from .report import Report

KIND, INTO_HEADS, EXPRESSION = "fp8_einsum", "skip_head_mid", "bhr,hdr->bhd"
ROW_MAJOR = f"{OURS}_row_major"
METHOD = (
    "fp8_einsum of bhr,hdr->bhd, shapes are b x h x r x d, BF16 output; random normal numbers, cast to FP8; deep_gemm: "
    "scales of a m-major for each head; deep_gemm_row_major: scales as casts give them, which some kernels need laid "
    "out first; bf16: torch.einsum; error: calc_diff from torch.einsum in FP32 of the same FP8 numbers with their "
    f"scales; {skip_head_mid.METHOD}"
)
SHAPES = tuple((b, h, r, d) for h, r, d in ((8, 4096, 1024), (128, 512, 128)) for b in (1, 4, 32, 128, 130, 4096))
QUICK_SHAPES = ((4, 8, 4096, 1024), (4096, 8, 4096, 1024))
MOST_ERROR = 1e-5


def work_of(shape: Shape, device: str = "cuda") -> Work:
    """Make the work of a shape."""
    heads = Heads(shape, device)
    calls = heads.calls()
    checks = {name: partial(heads.verdict, call) for name, call in calls.items() if name != BF16}
    return Work(heads.operations, heads.bytes, calls, checks)


class Heads:
    """Operands of products of heads, and the ways to compute them."""

    def __init__(self, shape: Shape, device: str) -> None:
        b, h, r, d = shape
        x = torch.randn(b, h, r, device=device, dtype=torch.bfloat16)
        w = torch.randn(h, d, r, device=device, dtype=torch.bfloat16)
        self.plain = x, w
        self.a, self.w = per_token_cast_to_fp8(x), per_block_cast_to_fp8(w)
        self.laid = get_mn_major_tma_aligned_tensor(self.a[1].transpose(0, 1)).transpose(0, 1)
        self.out = torch.empty(b, h, d, device=device, dtype=torch.bfloat16)
        scales = (self.a[1].numel() + self.w[1].numel()) * 4
        self.operations, self.bytes = 2 * b * h * r * d, (b * h * r + h * d * r) + b * h * d * 2 + scales

    def calls(self) -> dict[str, Call]:
        """Return every way to compute the products, by name."""
        return {
            OURS: lambda: fp8_einsum(EXPRESSION, (self.a[0], self.laid), self.w, self.out),
            ROW_MAJOR: lambda: fp8_einsum(EXPRESSION, self.a, self.w, self.out),
            BF16: lambda: torch.einsum(EXPRESSION, *self.plain),
        }

    def right(self) -> Tensor:
        """Compute the product in FP32 from the FP8 numbers and their scales."""
        return torch.einsum(EXPRESSION, dequantized(self.a, 1).float(), dequantized(self.w, 128).float())

    def verdict(self, call: Call) -> Verdict:
        """Run a call that writes to `out`, and judge the result."""
        self.out.fill_(torch.nan)
        call()
        return within(MOST_ERROR, float(calc_diff(self.out, self.right())))


OF_PARTS = Kind(skip_head_mid.SHAPES, skip_head_mid.QUICK_SHAPES, skip_head_mid.work_of)
KINDS = Kinds({KIND: Kind(SHAPES, QUICK_SHAPES, work_of), INTO_HEADS: OF_PARTS})
OF_UPSTREAM = (table.UPSTREAM, table.TO_UPSTREAM)
COLUMNS = (
    table.shape("b x h x r x d"),
    table.ours(),
    table.time(ROW_MAJOR, "row-major"),
    *table.beside(BF16, "bf16"),
    *OF_UPSTREAM,
)
COLUMNS_OF_PARTS = (table.shape("m x n x k"), table.ours(), *table.beside(ALONE, "plain"), *OF_UPSTREAM)


def tables(report: Report) -> list[Table]:
    """Tabulate products of heads, and products that write parts of heads."""
    return [
        table.table_of("einsum", COLUMNS, table.lines_of(report, OURS, KIND)),
        table.table_of("products into parts of heads", COLUMNS_OF_PARTS, table.lines_of(report, OURS, INTO_HEADS)),
    ]


BENCH = KINDS.bench("einsum", METHOD, "32,8,4096,1024", (OURS, ROW_MAJOR, BF16, ALONE), tables)
