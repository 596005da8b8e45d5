"""Mixtures of experts compared with their products alone and torch's BF16 grouped products. Timed cold, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, product
from typing import Any, ClassVar, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from deep_gemm.casts.rules import FP8_MAX
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.layout import SCALE_BLOCK, ceil_div
from deep_gemm.gemm.api.grouped import m_grouped_fp8_gemm_nt_contiguous, product_of_stacked_rows
from deep_gemm.moe import api as public
from deep_gemm.moe.activation import silu_mul_cast_to_fp8
from deep_gemm.moe.routing import ExpertRows, expert_rows, gather_cast_to_fp8, gather_weighted

from . import layers, table
from .bench import Bench, planned
from .contenders import BF16, OURS, m_major
from .experts_by_torch import chains_in_bf16, steps_with_casts
from .layers import ALONE, EAGER, FIRST, SECOND, Layer, Work
from .linear import relative_error
from .products import raise_if_lost, reason
from .report import Add, Announce, Report, Row
from .timing import L2Flush

METHOD = (
    f"experts: {layers.METHOD}; each token goes to top-k different experts at random; weights are FP8 numbers of "
    "normal distribution with random scales, and the same numbers in BF16; deep_gemm: deep_gemm.experts; "
    "product_alone: its two grouped products, one after the other, their operands cast before; bf16: the fastest of "
    "chains of torch's grouped_mm (sorting, index_select, grouped_mm, silu * up, grouped_mm, weighted sum by "
    "index_add, by bmm, or with activation and sum compiled), named by config; torch: our products with casts, "
    "routing, activation and sum in eager torch; our result is that of the public parts bit for bit; error: relative, "
    "beside a chain in BF16"
)
TOPK = 8
TOKENS, QUICK_TOKENS = (1, 16, 64, 256, 1024, 4096, 8192), (1, 64, 8192)
EXPERTS, QUICK_EXPERTS = (32, 128, 256), (32,)
SIZES, QUICK_SIZES = ((7168, 2048), (4096, 1536)), ((7168, 2048),)
CONTENDERS = (OURS, ALONE, BF16, EAGER)
MOST_ERROR = 0.06
"""Activations are rounded to FP8 twice, which causes an error of 0.04."""

Shape = tuple[int, int, int, int, int]
"""Experts, top-k, tokens, hidden, intermediate."""


def shapes_of(*, quick: bool = False) -> list[Shape]:
    """List the shapes to measure; shapes with the same weights are consecutive."""
    experts, sizes, tokens = (QUICK_EXPERTS, QUICK_SIZES, QUICK_TOKENS) if quick else (EXPERTS, SIZES, TOKENS)
    return [(count, TOPK, m, *size) for size, count, m in product(sizes, experts, tokens)]


class Weights(NamedTuple):
    """Weights of all experts, and the same weights in BF16."""

    w1: Operand
    w2: Operand
    plain1: Tensor
    plain2: Tensor
    fp8: tuple[Operand, Operand] | None = None
    """Nearly the same weights in FP8, if `w1` and `w2` are FP4."""


WeightsOf = Callable[[int, int, int, str], Weights]
"""Makes weights for a number of experts, a hidden and an intermediate size, on a device."""


def measure(
    make: type[Experts],
    weights_of: WeightsOf,
    shapes: Sequence[Shape],
    *,
    only: Sequence[str] = (),
    add: Add,
    announce: Announce,
) -> None:
    """Measure layers of a kind. Consecutive shapes with the same weights share them, so each weight is made once."""
    flush = L2Flush()
    for (num_experts, hidden, intermediate), alike in groupby(shapes, key=lambda shape: (shape[0], *shape[3:])):
        weights: Weights | None = None
        for shape in alike:
            announce(f"{make.kind} {table.name_of(shape)}")
            try:
                weights = weights or weights_of(num_experts, hidden, intermediate, "cuda")
                layer = make(shape, weights)
                add(layers.rows_of(layer.work, layers.only_asked_for(layer.contenders(), only), layer.check, flush))
            except Exception as exception:
                raise_if_lost(exception)
                add([Row(make.kind, shape, OURS, "cold", failed=reason(exception))])


def weights_of(num_experts: int, hidden: int, intermediate: int, device: str) -> Weights:
    """Make weights at random, expert by expert to save memory."""
    torch.manual_seed(0)
    w1, plain1 = _weights(num_experts, 2 * intermediate, hidden, device)
    w2, plain2 = _weights(num_experts, hidden, intermediate, device)
    return Weights(w1, w2, plain1, plain2)


def _weights(num_experts: int, n: int, k: int, device: str) -> tuple[Operand, Tensor]:
    """Make FP8 values like a cast of normal numbers; a block's largest number is about 4.2 standard deviations."""
    values = torch.empty(num_experts, n, k, dtype=torch.float8_e4m3fn, device=device)
    plain = torch.empty(num_experts, n, k, dtype=torch.bfloat16, device=device)
    blocks = ceil_div(n, SCALE_BLOCK), ceil_div(k, SCALE_BLOCK)
    scales = (torch.rand(num_experts, *blocks, device=device, dtype=torch.float32) + 0.5) * (4.2 / FP8_MAX / k**0.5)
    for expert in range(num_experts):
        numbers = torch.randn(n, k, device=device, dtype=torch.float32) * (FP8_MAX / 4.2)
        values[expert] = numbers.clamp_(-FP8_MAX, FP8_MAX).to(values.dtype)
        spread = scales[expert].repeat_interleave(SCALE_BLOCK, 0)[:n].repeat_interleave(SCALE_BLOCK, 1)[:, :k]
        plain[expert] = values[expert].float() * spread
    return (values, scales), plain


class Experts:
    """Tokens and routes of a mixture of experts, and the ways to compute it."""

    kind: ClassVar[str] = "experts"

    def __init__(self, shape: Shape, weights: Weights) -> None:
        num_experts, topk, tokens, hidden, intermediate = shape
        device = weights.plain1.device
        torch.manual_seed(0)
        self.weights = weights
        self.x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
        route_weights, self.topk_ids = torch.randn(tokens, num_experts, device=device, dtype=torch.float32).topk(topk)
        self.topk_weights = route_weights.softmax(dim=-1)
        self.out, self.out_of_eager = torch.empty_like(self.x), torch.empty_like(self.x)
        used = int((torch.bincount(self.topk_ids.flatten(), minlength=num_experts) > 0).sum())
        of_weights = sum(x[0].nbytes for w in (weights.w1, weights.w2) for x in w)
        operations = 6 * tokens * topk * hidden * intermediate
        self.work = Work(self.kind, shape, operations, used * of_weights + 2 * tokens * hidden * 2)

    def contenders(self) -> Iterator[Layer]:
        """Yield every way to compute the mixture."""
        x, ids, weights, (w1, w2, plain1, plain2, _) = self.x, self.topk_ids, self.topk_weights, self.weights
        yield Layer(OURS, lambda: public.experts(x, ids, weights, w1, w2, out=self.out), parts=layers.parts_of_experts)
        yield Layer(ALONE, self._products(), parts=lambda names: [FIRST, SECOND] if len(names) == 2 else None)
        for chain, call in chains_in_bf16(x, ids, weights, plain1, plain2, with_compiled=x.is_cuda):
            yield Layer(BF16, call, chain=chain)
        steps = steps_with_casts(x, ids, weights, w1, w2, self.out_of_eager)
        yield Layer(EAGER, lambda: [call() for _, call in steps], steps=steps)

    def _products(self) -> Callable[[], None]:
        """Return a call of both grouped products, with operands made beforehand."""
        w1, w2 = self.weights.w1, self.weights.w2
        rows = expert_rows(self.topk_ids, w1[0].shape[0])
        h, y = self._buffers(rows)
        a = m_major(gather_cast_to_fp8(self.x, rows))
        product_of_stacked_rows(a, w1, h, rows.ids)
        b = m_major(silu_mul_cast_to_fp8(h))

        def call() -> None:
            product_of_stacked_rows(a, w1, h, rows.ids)
            product_of_stacked_rows(b, w2, y, rows.ids)

        return call

    def check(self, call: Callable[[], object]) -> tuple[float, str | None]:
        """Run a call that writes to `out`, and judge the result."""
        self.out.fill_(torch.nan)
        call()
        return self.judge(self.out)

    def judge(self, out: Tensor) -> tuple[float, str | None]:
        """Return the error of a result, and a sentence if it is wrong.

        The result must equal the public parts' result bit for bit, and be near a chain in BF16 without casts to FP8.
        """
        plain = self.weights.plain1, self.weights.plain2
        chains = chains_in_bf16(self.x, self.topk_ids, self.topk_weights, *plain, with_compiled=False)
        error = relative_error(out, dict(chains)["sum"]())
        if not torch.equal(out, right := self._by_parts()):
            return error, f"wrong: {int((out != right).sum())} elements differ from the separate parts"
        return error, None if error <= MOST_ERROR else f"wrong: relative error {error:.2g}, expected {MOST_ERROR}"

    def _by_parts(self) -> Tensor:
        w1, w2 = self.weights.w1, self.weights.w2
        rows = expert_rows(self.topk_ids, w1[0].shape[0])
        out = torch.empty_like(self.out)
        h, y = self._buffers(rows)
        m_grouped_fp8_gemm_nt_contiguous(gather_cast_to_fp8(self.x, rows), w1, h, rows.ids)
        m_grouped_fp8_gemm_nt_contiguous(silu_mul_cast_to_fp8(h), w2, y, rows.ids)
        gather_weighted(y, rows, self.topk_weights, out=out)
        return out

    def _buffers(self, rows: ExpertRows) -> tuple[Tensor, Tensor]:
        """Allocate the outputs of both products."""
        h, y = (
            torch.empty(rows.ids.shape[0], w[0].shape[1], dtype=torch.bfloat16, device=self.x.device)
            for w in (self.weights.w1, self.weights.w2)
        )
        return h, y


COLUMNS = (
    table.Column("experts", lambda line: str(line.row.shape[0])),
    table.Column("tokens", lambda line: str(line.row.shape[2])),
    table.shape("h x inter", slice(3, None)),
    table.ours(),
    *table.beside(BF16, "bf16"),
    table.time(ALONE, "products"),
    table.Column("share", lambda line: table.percent(table.over(line.us(ALONE), line.row.us))),
    table.time(EAGER, "torch"),
)


def tables(report: Report) -> list[Table]:
    """Tabulate our times, and for each weight the means of ratios to other times."""
    lines = table.lines_of(report)
    ratios = (
        ((str(line.row.shape[0]), table.name_of(line.row.shape[3:])), (line.over(line.us(BF16)),)) for line in lines
    )
    means = table.means_of(["experts", "h x inter"], ["/ bf16"], ratios)
    return [table.table_of("experts", COLUMNS, lines), means]


def bench_of(
    make: type[Experts], weights_of: WeightsOf, shapes_of: Callable[..., list[Shape]], example: str, **more: Any
) -> Bench:
    """Make the bench of a kind of mixtures."""
    plan = planned(shapes_of, partial(measure, make, weights_of), (len(example.split(",")),), example)
    return Bench(make.kind, plan=plan, **more)


BENCH = bench_of(
    Experts,
    weights_of,
    shapes_of,
    "32,8,64,7168,2048",
    method=METHOD,
    tables=tables,
    contenders=CONTENDERS,
    drawn_by="plot_layers",
)
