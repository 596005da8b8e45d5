"""Products of FP4 weights (MXFP4): their cases, and their contenders. Timed cold, on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from deep_gemm.casts.fp4 import cast_back_from_fp4, quantize_mxfp4
from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.cli.models import MODELS
from deep_gemm.core.check.ue8m0 import words_of
from deep_gemm.gemm.packed import COLUMNS

from . import table
from .bulk_read import READ, read, read_of
from .cases import FP4_DENSE, FP4_KINDS, Case, Shape, case_of
from .contenders import BF16, OURS, Contender, dequantized, kept, layout_of, m_major, multiply, parts_of, places_of
from .grid import MOST_OPERATIONS
from .report import Report, Row

FP8, HUMMING, VLLM = f"{OURS}_fp8", "humming", "vllm"
SHORT = {READ: "read", FP8: "fp8"}
"""Short names of contenders for tables."""
PARTS = {True: "judged", False: "fitted", None: ""}
PRODUCT = "product"
"""The name of the time that the longest kernel of a rival's call takes."""
FEW, MANY, LARGE_BYTES = 64, 1024, 29e6
"""Numbers of rows that separate the means of ratios. Up to FEW rows, weights also split at LARGE_BYTES in FP8."""
METHOD = (
    "FP4: normal weights by quantize_mxfp4, scales as words; deep_gemm_fp8: our product of the same shape with weights "
    "in FP8, 128x128; bulk_read: a kernel that brings as many bytes as the FP4 product must move from DRAM into shared "
    "memory; humming: HummingLayer of humming-kernels, e4m3 1x128 by MXFP4, its error beside x in BF16 times the "
    "weight, its time with its cast of x, its part `product` the longest of its kernels"
)
FITTED = frozenset(
    {
        (4096, 7168),
        (7168, 2048),
        (7168, 16384),
        (24576, 1536),
        (2112, 7168),
        (6144, 4096),
        (12288, 5120),
        (3072, 5120),
        (8192, 8192),
        (5120, 2304),
    }
)
"""Weights `(n, k)` that were used to tune tiles and their cost."""
MS = (1, 4, 16, 64, 128, 512, 1024, 4096)
ROWS = {"fp4_masked": (4, 16, 48, 256), "fp4_contiguous": (64, 256, 1024)}
"""Rows of each group."""
RANKS = 8
"""Ranks that share the experts of a model."""
AIMED_AT = {"fp4_masked": ((8, 16, 4096, 7168), (8, 48, 4096, 7168))}
QUICK: dict[str, tuple[Shape, ...]] = {
    "fp4_dense": ((1, 4096, 7168), (16, 6144, 7168), (128, 7168, 3072), (4096, 4608, 5120)),
    "fp4_masked": (*AIMED_AT["fp4_masked"], (48, 16, 6144, 7168)),
    "fp4_contiguous": ((32, 64, 4096, 4096), (48, 256, 6144, 7168)),
}


def all_cases(kind: str) -> list[Case]:
    """List the cases of a kind; cases with the same weights are consecutive."""
    weights = [each for model in MODELS.values() for each in model.weights(1, RANKS) if each.is_fp4]
    if kind == FP4_DENSE:
        new = sorted({(each.n, each.k) for each in weights} - FITTED, key=lambda each: (each[0] * each[1], each))
        shapes: list[Shape] = [(m, n, k) for n, k in (*sorted(FITTED), *new) for m in MS]
    else:
        groups = sorted({(each.num_groups, each.n, each.k) for each in weights})
        shapes = [*AIMED_AT.get(kind, ()), *((count, rows, n, k) for count, n, k in groups for rows in ROWS[kind])]
    found = (case_of(kind, shape, FITTED) for shape in shapes)
    return [case for case in found if case.operations <= MOST_OPERATIONS]


class Weights:
    """Weights of groups in FP4 and in FP8."""

    def __init__(self, groups: int, n: int, k: int) -> None:
        fp4, fp8 = [], []
        for _ in range(groups):
            plain = torch.randn(n, k, dtype=torch.bfloat16)
            fp4.append(quantize_mxfp4(plain))
            fp8.append(per_block_cast_to_fp8(plain))
        self.packed, self.exponents = map(torch.stack, zip(*fp4, strict=True))
        values, scales = map(torch.stack, zip(*fp8, strict=True))
        self.fp4, self.fp8 = (self.packed, words_of(self.exponents)), (values, scales)

    def numbers_of_fp4(self, group: int) -> Tensor:
        """Return the numbers of a group in FP64."""
        return cast_back_from_fp4(self.packed[group], self.exponents[group], COLUMNS).double()

    def numbers_of_fp8(self, group: int) -> Tensor:
        """Return the numbers of a group of the FP8 weight in FP64."""
        return dequantized((self.fp8[0][group], self.fp8[1][group]), 128)

    @cached_property
    def humming(self) -> Any:
        """Make the rival's layer for the first group."""
        if importlib.util.find_spec("humming") is None:
            raise NotImplementedError("humming-kernels is not installed: pip install humming-kernels==0.1.19")
        _, n, half_k = self.packed.shape
        layer = importlib.import_module("humming.layer").HummingLayer(
            shape_n=n,
            shape_k=2 * half_k,
            weight_config={"quant_method": "mxfp4"},
            input_config={"dtype": "float8e4m3", "group_size": 128},
            torch_dtype=torch.bfloat16,
        )
        layer = layer.to(self.packed.device)
        layer.load_from_tensors({"weight": self.packed[0], "weight_scale": self.exponents[0]})
        layer.transform()
        return layer


weights_of = kept(Weights)


def contenders_of(case: Case, device: str = "cuda") -> Iterator[Contender]:
    """Make random activations for a case, and its contenders. One function serves both kinds of weights."""
    groups, rows, n, k = case.shape if case.sizes else (1, *case.shape)
    weights = weights_of(groups, n, k, device)
    torch.manual_seed(1)
    with torch.device(device):
        outer = (groups, case.max_m) if case.kind == "fp4_masked" else (sum(case.sizes) or rows,)
        x, d = (torch.randn(*outer, columns, dtype=torch.bfloat16) for columns in (k, n))
        a, sa = per_token_cast_to_fp8(x)
        operand = m_major((a, sa))
        layout = layout_of(case)
        source, done = read_of(case.bytes), torch.ones(1, dtype=torch.float32)

    def reading() -> Tensor:
        read(source)
        return done

    ways = ((OURS, weights.fp4, weights.numbers_of_fp4), (FP8, weights.fp8, weights.numbers_of_fp8))
    for name, b, numbers_of in ways:
        call = partial(multiply, case, operand, b, d, layout)
        yield Contender(name, call, parts_of(places_of(case), (a, sa), numbers_of), lambda: d.fill_(torch.nan))
    yield Contender(READ, reading, lambda got: [(got, got.double())])
    if case.kind == FP4_DENSE:
        yield Contender(
            HUMMING, lambda: weights.humming(x), lambda got: [(got, x.double() @ weights.numbers_of_fp4(0).t())]
        )


def tables(report: Report) -> list[Table]:
    """Tabulate products or layers and mean ratios by rows; "alone" is the rival's product without its cast."""
    names = {row.contender for row in report.rows}
    rivals = {name: SHORT.get(name, name) for name in (READ, FP8, BF16, HUMMING, VLLM) if name in names or name == READ}
    columns = [table.shape("shape"), table.ours()]
    for name, short in rivals.items():
        columns += table.beside(name, short)
    if HUMMING in rivals:
        columns.append(table.Column("alone", lambda line: table.ratio(line.over(_alone_us(line)))))
    lines = table.lines_of(report)
    ratios = (
        (
            (rows_of(line.row), PARTS[line.row.is_judged]),
            (*(line.over(line.us(name)) for name in rivals), line.over(_alone_us(line))),
        )
        for line in lines
    )
    means = table.means_of(["rows", "part"], [f"/ {short}" for short in (*rivals.values(), "alone")], ratios, gap=2)
    return [table.table_of(report.kind, columns, lines, gap=1), means]


def _alone_us(line: table.Line) -> float | None:
    rival = line.others.get(HUMMING)
    return rival.parts[PRODUCT] if rival is not None and rival.parts else None


def rows_of(row: Row) -> str:
    """Name a shape's regime by its rows (of each group) or tokens; for few rows of FP4 also by the bytes in FP8."""
    rows = row.shape[0 if row.kind.endswith("_dense") else 2 if row.kind.endswith("_experts") else 1]
    if rows > FEW:
        return f"to {MANY - 1}" if rows < MANY else f"from {MANY}"
    if row.kind != FP4_DENSE:
        return f"to {FEW}"
    return f"to {FEW}, {'from' if row.shape[1] * row.shape[2] >= LARGE_BYTES else 'below'} {LARGE_BYTES / 1e6:.0f} MB"


assert set(QUICK) == set(FP4_KINDS)
