"""Products with scales finer than 128x128: their cases, and their contenders. Timed cold, on a GPU."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from deep_gemm.casts.fp8 import cast_back_from_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.cli.models import Compressed, Grouped
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.recipes import PER_BLOCK, PER_ROW, Scales, scales_of
from deep_gemm.gemm.kinds.output import Output

from . import table
from .cases import FINE_DENSE, FINE_KINDS, Case, Shape, case_of
from .contenders import BF16, OURS, Contender, kept, m_major, multiply, places_of
from .fp4 import PARTS, rows_of
from .report import Report

USUAL, TRITON = f"{OURS}_128x128", "triton"
BLOCKS_OF_32 = f"{OURS}_32x32"
SAID: dict[str, dict[str, Any]] = {
    f"{OURS}_32x32_1x128": {"recipe_a": (1, 128), "recipe_b": (32, 32)},
    BLOCKS_OF_32: {"recipe": (1, 32, 32)},
    f"{OURS}_64x64": {"recipe": (1, 64, 64)},
    f"{OURS}_1x32": {"recipe": (1, 1, 32)},
}
"""Recipes that a caller passes for scales below 128x128, by contender."""
SIDES = {
    name: scales_of((said.get("recipe"), said.get("recipe_a"), said.get("recipe_b")))
    for name, said in {USUAL: {}, **SAID}.items()
}
"""Scales of A and B, by contender."""
OUTPUTS = {name: Output(sfa=of_a, sfb=of_b) for name, (of_a, of_b) in SIDES.items()}
TRANSFORMERS = "transformers==5.3.0"
"""The last release whose wheel has a Triton kernel for blocks of any size: later releases load it from a hub."""
METHOD = (
    "fine scales: normal numbers; scales FP32, those of B but 128x128 rounded up to powers of two, which fold, of "
    "A and of B's rows m-major; deep_gemm_*: our products of one weight, named by B's scales, and A's where they "
    "are not as deep; bf16: the numbers before a cast by cuBLASLt, groups by grouped_mm, rows put together; triton: "
    f"w8a8_block_fp8_matmul_triton of {TRANSFORMERS}, 32x32"
)
FITTED = frozenset({(4096, 7168), (7168, 2048), (7168, 16384)})
"""Weights `(n, k)` that were used to tune tiles and their cost."""
RANKS = (1, 2, 4, 8)
MS = (1, 16, 64, 256, 1024, 4096)
ROWS = (4, 16, 48, 256)
"""Rows of each group."""
GROUPS = ((8, 4096, 7168), (8, 7168, 2048), (32, 3072, 3072), (32, 3072, 1536), (48, 4608, 5120), (48, 5120, 2304))
"""Weights of experts `(groups, n, k)`: two weights that tiles were tuned to, and a model's on one of eight ranks."""
QUICK: dict[str, tuple[Shape, ...]] = {
    FINE_DENSE: ((1, 4608, 5120), (16, 5120, 288), (64, 576, 5120), (1024, 4096, 7168), (4096, 4608, 5120)),
    "fine_masked": ((8, 16, 4096, 7168), (32, 48, 3072, 1536)),
}


def dense_weights() -> list[tuple[int, int]]:
    """List the weights `(n, k)` by size: two models' weights on 1, 2, 4 or 8 ranks, and `FITTED`.

    DeepSeek-V4.1-Flash: its hidden size and shared expert are known; the rest is taken from DeepSeek-V4-Flash.
    MiniMax-M3: it is known that all its scales are 1x32; the rest is taken from MiniMax-M2.
    """
    found = set(FITTED)
    models = ((5120, 2304, Compressed(64, 512, 1024, 1024, 8, 64)), (3072, 1536, Grouped(48, 8, 128)))
    for hidden, width, attention in models:
        for tp in RANKS:
            found |= {(2 * width // tp, hidden), (hidden, width // tp)}
            weights = attention.weights(hidden, tp)
            found |= {(each.n, each.k) for each in weights if not each.is_bf16 and each.groups is None}
    return sorted(found, key=lambda each: (each[0] * each[1], each))


def all_cases(kind: str) -> list[Case]:
    """List the cases of a kind; cases with the same weights are consecutive."""
    if kind == FINE_DENSE:
        shapes: list[Shape] = [(m, n, k) for n, k in dense_weights() for m in MS]
    else:
        shapes = [(count, rows, n, k) for count, n, k in GROUPS for rows in ROWS]
    return [case_of(kind, shape, FITTED) for shape in shapes]


class Weights:
    """Weights of groups in BF16, and in FP8 for each kind of scales."""

    def __init__(self, groups: int, n: int, k: int) -> None:
        self.plain = torch.randn(groups, n, k, dtype=torch.bfloat16)
        self.by_scales = {of_b: quantized(self.plain, of_b) for _, of_b in SIDES.values()}


def quantized(w: Tensor, of: Scales) -> Operand:
    """Cast a weight as a model's checkpoint and loader do."""
    fine = of != PER_BLOCK
    if of.rows > 1:
        return per_block_cast_to_fp8(w, fine, of.columns)
    return m_major(per_token_cast_to_fp8(w, fine, of.columns))


weights_of = kept(Weights)


def contenders_of(case: Case, device: str = "cuda") -> Iterator[Contender]:
    """Make random activations for a case, and its contenders."""
    groups, rows, n, k = case.shape if case.sizes else (1, *case.shape)
    weights, places = weights_of(groups, n, k, device), places_of(case)
    torch.manual_seed(1)
    with torch.device(device):
        outer = (groups, case.max_m) if case.sizes else (rows,)
        x, d = (torch.randn(*outer, columns, dtype=torch.bfloat16) for columns in (k, n))
        by_columns = {of_a.columns: per_token_cast_to_fp8(x, gran_k=of_a.columns) for of_a, _ in SIDES.values()}
        counts = torch.tensor(case.sizes, dtype=torch.int32)
        ends = counts.cumsum(0).to(torch.int32)

    def right(of_a: Scales, of_b: Scales, got: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        (a, sa), (b, sb) = by_columns[of_a.columns], weights.by_scales[of_b]
        for group, at in places:
            left, other = numbers((a[at], sa[at]), of_a), numbers((b[group], sb[group]), of_b)
            yield got[at], left @ other.t()

    for name, (of_a, of_b) in SIDES.items():
        operands = m_major(by_columns[of_a.columns]), weights.by_scales[of_b]
        call: Any = partial(multiply, case, *operands, d, counts, **SAID.get(name, {}))
        yield Contender(name, call, partial(right, of_a, of_b), lambda: d.fill_(torch.nan))
    yield _plain(x, weights.plain, places, ends)
    if case.kind == FINE_DENSE:
        of_a, of_b = SIDES[BLOCKS_OF_32]
        b, sb = weights.by_scales[of_b]
        yield Contender(TRITON, _by_triton(by_columns[of_a.columns], (b[0], sb[0]), of_b), partial(right, of_a, of_b))


def numbers(operand: Operand, of: Scales) -> Tensor:
    """Convert FP8 values `[rows, k]` and their scales to FP64 numbers."""
    return cast_back_from_fp8(*operand, of.columns).double()


def _plain(x: Tensor, w: Tensor, places: Sequence[tuple[int, Any]], ends: Tensor) -> Contender:
    """Multiply in BF16. The rows of groups are joined first, so that no other rows are multiplied."""
    together = torch.cat([x[at] for _, at in places])

    def call() -> Tensor:
        return together @ w[0].t() if not len(ends) else torch.nn.functional.grouped_mm(together, w.mT, offs=ends)

    def right(got: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        parts = zip(torch.split(got, [len(x[at]) for _, at in places]), places, strict=True)
        return ((part, x[at].double() @ w[group].double().t()) for part, (group, at) in parts)

    return Contender(BF16, call, right)


def _by_triton(a: Operand, b: Operand, of_b: Scales) -> Callable[[], Tensor]:
    """Return a call of the rival. Without transformers its first call raises; the other contenders are measured."""

    def call() -> Tensor:
        has_it = importlib.util.find_spec("transformers") is not None
        module = importlib.import_module("transformers.integrations.finegrained_fp8") if has_it else None
        multiply: Any = getattr(module, "w8a8_block_fp8_matmul_triton", None)
        if multiply is None:
            raise NotImplementedError(f"no transformers with a Triton kernel: pip install {TRANSFORMERS}")
        return multiply(a[0], b[0], a[1], b[1], list(of_b), torch.bfloat16)  # type: ignore[no-any-return]

    return call


def tables(report: Report) -> list[Table]:
    """Tabulate products with fine scales beside 128x128 and BF16, and means of ratios by rows."""
    scales = {name: name.removeprefix(f"{OURS}_") for name in SAID}
    columns = [table.shape("shape"), table.ours("128x128"), table.time(BF16, "bf16")]
    for name, of_scales in scales.items():
        columns += [table.time(name, of_scales.replace("_", "\n")), _over_usual(name)]
    lines = table.lines_of(report, USUAL)
    ratios = (
        (
            (of_scales.replace("_", " by "), rows_of(line.row), PARTS[line.row.is_judged]),
            tuple(table.over(line.us(name), line.us(rival)) for rival in (USUAL, BF16, TRITON)),
        )
        for name, of_scales in scales.items()
        for line in lines
    )
    means = table.means_of(["scales", "rows", "part"], ["/ 128x128", "/ bf16", "/ triton"], ratios, gap=2)
    return [table.table_of(report.kind, columns, lines, gap=1), means]


def _over_usual(name: str) -> table.Column:
    return table.Column("", lambda line: table.ratio(table.over(line.us(name), line.row.us)))


assert set(QUICK) == set(FINE_KINDS)
assert SIDES[USUAL] == (PER_ROW, PER_BLOCK)
