"""Layers in training, forward and backward, compared with BF16 layers of torch, and with torchao. Warm, on a GPU.

torchao is measured if it is installed. It needs no C extension: its Python files on PYTHONPATH are enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from deep_gemm.convert import to_fp8_training
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.nn import Experts, keep_casts

from . import table
from .bench import Bench, planned
from .cases import Shape, floor_of
from .contenders import BF16, OURS
from .experts_by_torch import chains_in_bf16
from .linear import relative_error
from .products import SETTLE_SECONDS, measure_each, raise_if_lost, reason
from .report import Add, Announce, Report, Row
from .timing import KernelEvent, profiled, warm

METHOD = (
    "training: forward and backward of a layer, gradients of x, weights of routes and parameters set to None ahead of "
    "each step; time between CUDA events around each of 10 steps behind 3 that warm up, median, least and most, the "
    "host's waits included; mode forward: forward alone in grad mode; parameters and inputs BF16, random normal "
    "numbers; each token goes to top-k different experts at random; casts kept: in a block of keep_casts, of a step "
    "behind the first; by rows: recipe='row' of a linear layer; torchao rowwise: torchao.float8 by its recipe of that "
    "name, eager and by torch.compile; bf16: torch.nn.Linear, or sorting, index_select, grouped_mm, silu * up, "
    "grouped_mm and index_add, and torch's autograd; operations: three times those of forward; peak_bytes: the most "
    "that torch allocated in a step above what was allocated before it, "
    "gradients included; parts: microseconds of each kernel of a step by torch.profiler, those of one name that "
    "follow each other as one, wait: none ran for more than 3 us; error: the largest relative one of the result and "
    "the gradients beside bf16, of every n-th expert's if those of all are more than 2 GiB; regression: two layers "
    "with a SiLU between learn numbers of two that are given, FP32 weights, autocast to BF16, AdamW at 1e-3, the same "
    "seeds and numbers for all; error: the squared error over the numbers' square, mean of the last 10 steps"
)
EXPERTS, LINEAR, REGRESSION = "train_experts", "train_linear", "train_regression"
KEPT = "deep_gemm, casts kept"
"""A batch after the first batch between two optimizer steps: the weights are already cast."""
ROWS, AO, AO_COMPILED = "deep_gemm by rows", "torchao rowwise", "torchao rowwise compiled"
CONTENDERS = (OURS, KEPT, ROWS, AO, AO_COMPILED, BF16)
STEP, FORWARD = "step", "forward"
MOST_ERROR = 0.1
"""The largest allowed error. `TYPICAL_OF_EXPERTS` of the tests explains it: six operands are rounded to FP8."""
SHAPES: tuple[Shape, ...] = (
    (128, 8, 32768, 2048, 768),
    (64, 8, 16384, 4096, 1536),
    (32, 8, 8192, 7168, 2048),
    (256, 8, 8192, 7168, 2048),
    *((tokens, n, k) for n, k in ((4096, 4096), (14336, 4096), (7168, 18432)) for tokens in (4096, 16384)),
    (4096, 1024, 4096, 300),
)
"""Experts, top-k, tokens, hidden, intermediate; or for a linear layer tokens, n, k; or for a regression tokens, width,
width between the layers, and steps."""
KINDS = {3: LINEAR, 4: REGRESSION, 5: EXPERTS}
MAX_NAME = 48
MOST_COMPARED = 1 << 31
"""A result or gradient with more bytes than this is compared only in part."""
WAIT, LAUNCH_US = "wait", 3.0
"""A gap up to this long between two launches does not count as a wait."""


def shapes_of(*, quick: bool = False) -> Sequence[Shape]:
    """List the shapes to measure."""
    return (SHAPES[0], SHAPES[4]) if quick else SHAPES


def kind_of(shape: Shape) -> str:
    """Tell the kind of a shape by its number of sizes."""
    return KINDS[len(shape)]


def measure(shapes: Sequence[Shape], *, only: Sequence[str] = (), add: Add, announce: Announce) -> None:
    """Measure steps of layers of these shapes."""
    measure_each(
        [(kind_of(shape), shape) for shape in shapes],
        lambda kind, shape: (
            learned(shape, "cuda", only) if kind == REGRESSION else rows_of(shape, layers_of(shape, "cuda"), only)
        ),
        add,
        announce,
    )


class Layer(NamedTuple):
    """One way to compute a layer, and the tensors that receive its gradients."""

    forward: Callable[[], Tensor]
    leaves: Sequence[Tensor]
    grad: Tensor
    """The gradient of the result."""

    def step(self) -> Sequence[Tensor]:
        """Compute the result, and the gradients of all leaves."""
        return self.run()[1:]

    def run(self) -> list[Tensor]:
        """Return the result, and the gradients of all leaves in order."""
        for leaf in self.leaves:
            leaf.grad = None
        out = self.forward()
        out.backward(self.grad)  # type: ignore[no-untyped-call]
        return [out.detach(), *(leaf.grad for leaf in self.leaves if leaf.grad is not None)]


def layers_of(shape: Shape, device: str) -> dict[str, Layer]:
    """Return all ways to compute a layer, which share the same parameters."""
    said: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    if kind_of(shape) == LINEAR:
        tokens, n, k = shape
        x, grad = (torch.randn(tokens, width, **said) for width in (k, n))
        linear = torch.nn.Linear(k, n, bias=False, **said)
        both = [x.requires_grad_(), linear.weight]

        def layer(name: str) -> Layer:
            own = torch.nn.Linear(k, n, bias=False, device="meta")
            own.weight = linear.weight
            return Layer(partial(converted(name, torch.nn.Sequential(own)), x), both, grad)

        return {name: layer(name) for name in linear_contenders()}
    num_experts, topk, tokens, hidden, intermediate = shape
    x, grad = (torch.randn(tokens, hidden, **said) for _ in range(2))
    logits, ids = torch.randn(tokens, num_experts, device=device, dtype=torch.float32).topk(topk)
    experts, p = Experts(num_experts, hidden, intermediate, **said), logits.softmax(dim=-1).requires_grad_()
    leaves = [x.requires_grad_(), p, experts.w1, experts.w2]
    (_, in_bf16), *_ = chains_in_bf16(x, ids, p, experts.w1, experts.w2, with_compiled=False)
    ours = Layer(lambda: experts(x, ids, p), leaves, grad)
    return {OURS: ours, KEPT: ours, BF16: Layer(in_bf16, leaves, grad)}


def linear_contenders() -> list[str]:
    """Name the ways to compute a linear layer."""
    return [name for name in CONTENDERS if name not in (AO, AO_COMPILED) or find_spec("torchao") is not None]


def converted(name: str, model: torch.nn.Module) -> Any:
    """Convert linear layers for a contender. torchao emulates its products without a GPU."""
    if name in (OURS, KEPT, ROWS):
        to_fp8_training(model, recipe="row" if name == ROWS else "block")
    elif name != BF16:
        float8 = import_module("torchao.float8")
        config = float8.Float8LinearConfig.from_recipe_name("rowwise")
        emulates = next(model.parameters()).is_cpu
        float8.convert_to_float8_training(model, config=replace(config, emulate=emulates))
    if name != AO_COMPILED:
        return model
    torch._dynamo.reset()  # after earlier layers torch would compile for any shape, or not at all
    return torch.compile(model, dynamic=False)


def learned(shape: Shape, device: str, only: Sequence[str] = ()) -> list[Row]:
    """Train a model of two layers in each way, on the same numbers, and return the losses at the end."""
    tokens, width, inner, steps = shape
    rows = []
    for name in linear_contenders():
        if name == KEPT or (only and name not in only):
            continue
        torch.manual_seed(0)
        model, right = (
            torch.nn.Sequential(torch.nn.Linear(width, inner), torch.nn.SiLU(), torch.nn.Linear(inner, width))
            for _ in range(2)
        )
        optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=1e-3)
        forward, losses, right = converted(name, model), [], right.to(device)
        for step in range(steps):
            x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(step), dtype=torch.float32).to(
                device
            )
            with torch.no_grad():
                y = right(x)
            with torch.autocast(device, torch.bfloat16):
                got = forward(x)
            loss = (got.float() - y).square().mean() / y.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        last = float(torch.stack(losses[-10:]).mean())
        rows.append(Row(REGRESSION, shape, name, STEP, error=last, failed=None if last < 1 else "nothing learned"))
    return rows


def work_of(shape: Shape) -> tuple[int, int]:
    """Count the operations of forward, and the fewest bytes that a step moves.

    A step moves inputs, outputs and their gradients once, and BF16 parameters three times: for forward, for backward,
    and as gradients.
    """
    if kind_of(shape) == LINEAR:
        tokens, n, k = shape
        return 2 * tokens * n * k, 2 * (3 * n * k + 2 * tokens * (n + k))
    num_experts, topk, tokens, hidden, intermediate = shape
    operations = 6 * tokens * topk * hidden * intermediate
    return operations, 2 * (3 * 3 * num_experts * hidden * intermediate + 4 * tokens * hidden)


def rows_of(shape: Shape, layers: dict[str, Layer], only: Sequence[str]) -> list[Row]:
    """Check the result of each requested layer, and time the layer: whole steps, and forward alone."""
    operations, moved = work_of(shape)
    floor_us = round(floor_of(3 * operations, moved), 3)
    rows = []
    for name, layer in layers.items():
        if only and name not in only:
            continue
        more: dict[str, Any] = {}
        try:
            if name not in (KEPT, BF16):
                error = error_of(layers, name)
                wrong = f"wrong: relative error {error:.2g}, expected {MOST_ERROR}"
                more = {"error": error, "failed": None if error <= MOST_ERROR else wrong}
        except Exception as exception:
            raise_if_lost(exception)
            rows.append(Row(kind_of(shape), shape, name, STEP, failed=reason(exception)))
            continue
        time.sleep(SETTLE_SECONDS)
        with keep_casts() if name == KEPT else nullcontext():
            of_step, of_forward = (asdict(warm(call)) for call in (layer.step, layer.forward))
            line = parts_of(profiled(layer.step))
            of_step |= {"bytes": moved, "floor_us": floor_us, "peak_bytes": peak_bytes(layer), "parts": line}
        rows.append(Row(kind_of(shape), shape, name, STEP, operations=3 * operations, **of_step, **more))
        rows.append(Row(kind_of(shape), shape, name, FORWARD, operations=operations, **of_forward, **more))
    return rows


def error_of(layers: dict[str, Layer], name: str = OURS) -> float:
    """Return the largest relative error of the result and of the gradients.

    If a GPU's memory cannot hold the gradients of both ways, only some experts' gradients are compared.
    """
    ours, right = ([some_of(each) for each in layers[way].run()] for way in (name, BF16))
    errors = [relative_error(*each) for each in zip(ours, right, strict=True)]
    return float(torch.tensor(errors, dtype=torch.float64).max())  # the maximum is NaN if any error is


def some_of(x: Tensor) -> Tensor:
    """Copy every n-th row, or expert, so that the copy has about `MOST_COMPARED` bytes; copy a smaller tensor whole."""
    return x[:: ceil_div(x.nbytes, MOST_COMPARED)].clone()


def peak_bytes(layer: Layer) -> int:
    """Count the bytes of a step's peak, above the bytes that were allocated before it."""
    for leaf in layer.leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer.step()
    return torch.cuda.max_memory_allocated() - before


def parts_of(events: Sequence[KernelEvent]) -> dict[str, float]:
    """Return the timeline of a step: kernels in order of their starts, and the time without a kernel before each.

    >>> events = [KernelEvent("a", 0, 2), KernelEvent("a", 2, 3), KernelEvent("b", 9, 1)]
    >>> parts_of(events)
    {'1 a x2': 5, '2 wait': 4, '3 b': 1}
    """
    named: list[tuple[str, float]] = []
    end: float | None = None
    for event in sorted(events, key=lambda event: event.start_us):
        if end is not None and event.start_us > end + LAUNCH_US:
            named.append((WAIT, event.start_us - end))
        # Time during which the previous kernel still ran does not count twice.
        us = event.us if end is None else max(0.0, event.start_us + event.us - max(end, event.start_us))
        named.append((event.name[:MAX_NAME], us))
        end = max(end or 0.0, event.start_us + event.us)
    line: dict[str, float] = {}
    for name, alike in groupby(named, key=lambda part: part[0]):
        all_us = [us for _, us in alike]
        line[f"{len(line) + 1} {name}" + (f" x{len(all_us)}" if len(all_us) > 1 else "")] = round(sum(all_us), 3)
    return line


def tables(report: Report) -> list[Table]:
    """Tabulate steps beside BF16 steps, and a timeline of each step of ours."""
    forward = {(row.shape, row.contender): row.us for row in report.rows if row.mode == FORWARD}
    columns = (
        table.shape("shape"),
        table.ours(),
        *table.beside(BF16, "bf16"),
        table.TFLOPS,
        table.Column("GB", lambda line: _gigabytes(line.row)),
        table.Column("bf16", lambda line: _gigabytes(line.others.get(BF16))),
        table.Column("forward", lambda line: table.figure(forward.get((line.row.shape, OURS)))),
        table.Column("bf16", lambda line: table.figure(forward.get((line.row.shape, BF16)))),
    )
    lines = table.lines_of(report, OURS, EXPERTS, LINEAR, mode=STEP)
    by_rows = (
        table.shape("linear layers"),
        table.ours("by rows"),
        table.time(OURS, "blocks"),
        table.time(AO, "torchao"),
        *table.beside(AO_COMPILED, "compiled"),
        *table.beside(BF16, "bf16"),
    )
    found = [table.table_of("training", columns, lines), *(_time_line(line.row) for line in lines if line.row.parts)]
    if lines := table.lines_of(report, ROWS, LINEAR, mode=STEP):
        found.append(table.table_of("scales by row", by_rows, lines))
    if learned_by := [row for row in report.rows if row.kind == REGRESSION]:
        found.append(table.new_table("loss of a regression at its end"))
        for heading in ("shape", "contender", "loss"):
            found[-1].add_column(heading)
        for row in learned_by:
            found[-1].add_row(table.name_of(row.shape), row.contender, f"{row.error:.4g}")
    return found


def _gigabytes(row: Row | None) -> str:
    return f"{row.peak_bytes / 1e9:.1f}" if row is not None and row.peak_bytes is not None else ""


def _time_line(row: Row) -> Table:
    parts = row.parts or {}
    found = table.new_table(f"{sum(parts.values()):.0f} us")
    found.add_column(f"a step of {table.name_of(row.shape)}", no_wrap=True)
    found.add_column("us", justify="right")
    for part, us in parts.items():
        found.add_row(part, table.figure(us))
    return found


PLAN = planned(shapes_of, measure, (3, 4, 5), "128,8,32768,2048,768")
BENCH = Bench("training", METHOD, PLAN, tables, contenders=CONTENDERS)
