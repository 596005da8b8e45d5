"""Casts compared with a copy of equal traffic, and with the same cast in torch, compiled and eager. Timed cold."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from deep_gemm.casts import fp4, fp8
from deep_gemm.casts.by_torch import cast_blocks
from deep_gemm.casts.depths import GroupedRows, Silu, cast_along_groups, cast_silu_gradient
from deep_gemm.casts.rules import FP4, Quantized, Target
from deep_gemm.casts.scales import packed_rows
from deep_gemm.core.check.layout import SCALE_BLOCK, ceil_div
from deep_gemm.moe import activation, routing

from ..casts import cast_by_torch
from . import table
from .cases import Shape
from .contenders import OURS
from .kinds import Call, Kind, Kinds, Verdict, Work
from .report import Report

METHOD = (
    "BF16 input of random normal numbers; copy: of as many bytes as the cast reads and writes together, half of them "
    "read; compiled: torch.compile of the cast in torch for this shape alone; torch: the same, eager; our results "
    "checked bit for bit against torch on the same GPU (activations within one FP8 step); silu_cast_masked: 32 groups "
    "of 256 rows, of which 64 to 192 are in use: m and bytes count these, torch casts all rows; cast_fp4: scales are "
    "powers of two, one for each row and 32 columns; cast_1x32_packed: the same in FP8, four to an int32; cast_groups "
    "and silu_gradient: m rows in groups of 512, 8 rows of a token for the first; the second within one FP8 step"
)
COPY, COMPILED, EAGER = "copy", "compiled", "torch"
CONTENDERS = (OURS, COPY, COMPILED, EAGER)
COMPILE_SECONDS = 150
"""Compilation of rivals stops after this many seconds; later shapes have no compiled rival."""
TOPK, NUM_EXPERTS = 8, 128
GROUPS, MAX_M = 32, 256
FINE = 32
GROUP_ROWS = 512
_RANDOM = random.Random(1)
COUNTS = tuple(_RANDOM.randint(64, 192) for _ in range(GROUPS))
"""Number of rows that each group uses."""
ROWS = (*((m, 7168) for m in (1, 16, 64, 256, 1024, 4096, 8192)), (8192, 2048), (16384, 16384))
MASKED = ((sum(COUNTS), 2048), (sum(COUNTS), 7168))
TILES = ((1024, 7168), (8192, 7168), (16384, 16384))
SHAPES: dict[str, tuple[Shape, ...]] = {
    "cast_1x128": ROWS,
    **dict.fromkeys(("cast_row", "cast_tensor", "cast_by_given", "silu_cast_row"), ROWS),
    "cast_fp4": ROWS,
    "silu_cast": ROWS,
    "silu_cast_masked": MASKED,
    "cast_1x32": ROWS,
    "cast_1x32_packed": ROWS,
    **dict.fromkeys(("cast_128x1", "cast_both", "cast_128x128", "gather_cast", "gather_weighted"), TILES),
    **dict.fromkeys(("cast_32x1", "cast_32x32", "cast_64x64"), TILES),
    **dict.fromkeys(("cast_groups", "silu_gradient"), TILES),
}
QUICK_MS = (1, 1024, 8192)
COMPARED_ROWS = 4096
"""Rows that are compared at a time: FP32 copies need much memory."""


class Cast(NamedTuple):
    """A cast: the bytes that it must move, our call, and the same in torch."""

    bytes: int
    ours: Callable[[], Any]
    in_torch: Callable[[], Any]
    is_exact: bool = True
    in_use: Tensor | None = None
    """Mask of the defined rows; None if all are defined."""


class Compiler:
    """Compiles casts of torch until the time for compiling is used up."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, call: Call) -> Call:
        """Compile a call, and run it once."""
        if self.seconds > COMPILE_SECONDS:
            raise TimeoutError(f"compiling other casts took {self.seconds:.0f} s")
        begin = time.perf_counter()
        torch.compiler.reset()  # a function compiled for 8 shapes would run uncompiled for the next
        try:
            made = torch.compile(call, dynamic=False)
            made()
        finally:
            self.seconds += time.perf_counter() - begin
        return made


COMPILER = Compiler()


def work_of(kind: str, shape: Shape, device: str = "cuda") -> Work:
    """Make the work of a cast."""
    torch.manual_seed(0)
    cast, compiled = cast_of(kind, shape, device), cache(COMPILER)

    def by_compiler() -> Any:
        return compiled(cast.in_torch)()

    calls: dict[str, Call] = {
        OURS: cast.ours,
        COPY: copy_of(cast.bytes, device),
        COMPILED: by_compiler,
        EAGER: cast.in_torch,
    }

    def verdict() -> Verdict:
        return None, difference(cast)

    return Work(None, cast.bytes, calls, {OURS: verdict})


def difference(cast: Cast) -> str | None:
    """Return where our result differs from torch's; None if the results agree."""
    for number, (ours, right) in enumerate(zip(_flat(cast.ours()), _flat(cast.in_torch()), strict=True)):
        if cast.in_use is not None:
            ours, right = (x[cast.in_use] for x in (ours.float(), right.float()))  # noqa: PLW2901
        parts = [
            (x.float(), y.float()) for x, y in zip(*(torch.split(x, COMPARED_ROWS) for x in (ours, right)), strict=True)
        ]
        if cast.is_exact and (count := sum(int((x != y).sum()) for x, y in parts)):
            return f"output {number} differs in {count} elements"
        if not cast.is_exact and not all(torch.allclose(x, y, rtol=0.13, atol=2.0**-9) for x, y in parts):
            return f"output {number} differs by more than a step of FP8"
    return None


def cast_of(kind: str, shape: Shape, device: str = "cuda") -> Cast:
    """Make random input for a cast, our call, and the call of torch."""
    m, k = shape
    of_rows, of_columns = m * ceil_div(k, SCALE_BLOCK) * 4, k * ceil_div(m, SCALE_BLOCK) * 4
    if kind in ("silu_cast", "silu_cast_row"):
        x = torch.randn(m, 2 * k, device=device, dtype=torch.float32).bfloat16()
        columns = SCALE_BLOCK if kind == "silu_cast" else 0
        ours = lambda: activation.silu_mul_cast_to_fp8(x, gran_k=columns)  # noqa: E731
        right = lambda: cast_by_torch(_silu_mul(x), 1, columns)  # noqa: E731
        return Cast(m * k * 5 + (of_rows if columns else m * 4), ours, right, is_exact=False)
    if kind == "silu_cast_masked":
        x = torch.randn(GROUPS, MAX_M, 2 * k, device=device, dtype=torch.float32).bfloat16()
        counts = torch.tensor(COUNTS, dtype=torch.int32, device=device)
        in_use = torch.arange(MAX_M, device=device) < counts[:, None]
        ours = lambda: activation.silu_mul_cast_to_fp8(x, masked_m=counts)  # noqa: E731
        return Cast(m * k * 5 + of_rows, ours, lambda: _rows(_silu_mul(x)), False, in_use)
    if kind in ("gather_cast", "gather_weighted"):
        return _of_experts(kind, shape, device)
    if kind in ("cast_groups", "silu_gradient"):
        return _of_groups(kind, shape, device)
    x = torch.randn(m, k, device=device, dtype=torch.float32).bfloat16()
    scale = torch.full((1,), 0.01, device=device, dtype=torch.float32)
    calls: dict[str, tuple[int, Callable[[], Any], Callable[[], Any]]] = {
        "cast_row": (m * (k * 3 + 4), lambda: fp8.per_token_cast_to_fp8(x, gran_k=0), lambda: cast_by_torch(x, 1, 0)),
        "cast_tensor": (
            m * k * 5,  # x is read twice
            lambda: fp8.per_tensor_cast_to_fp8(x),
            lambda: _tensor(x, None),
        ),
        "cast_by_given": (
            m * k * 3,
            lambda: fp8.per_tensor_cast_to_fp8(x, scale)[0],
            lambda: _tensor(x, scale)[0],
        ),
        "cast_1x128": (m * k * 3 + of_rows, lambda: fp8.per_token_cast_to_fp8(x, mn_major=True), lambda: _rows(x)),
        "cast_fp4": (
            m * k * 2 + m * k // 2 + m * ceil_div(k, FINE) * 4,
            lambda: fp4.per_token_cast_to_fp4(x, True, FINE),
            lambda: cast_blocks(x, Target(1, FINE, True, format=FP4)),
        ),
        "cast_1x32": (
            m * k * 3 + m * ceil_div(k, FINE) * 4,
            lambda: fp8.per_token_cast_to_fp8(x, gran_k=FINE, mn_major=True),
            lambda: cast_by_torch(x, 1, FINE),
        ),
        "cast_1x32_packed": (
            m * k * 3 + m * ceil_div(k, FINE),
            lambda: fp8.per_token_cast_to_fp8(x, True, FINE, mn_major=True, use_packed_ue8m0=True),
            lambda: _packed_rows(x),
        ),
        "cast_32x1": (
            m * k * 3 + k * ceil_div(m, FINE) * 4,
            lambda: fp8.per_token_cast_to_fp8(x.t(), gran_k=FINE, mn_major=True),
            lambda: cast_by_torch(x.t(), 1, FINE),
        ),
        **{
            f"cast_{block}x{block}": (
                m * k * 3,
                lambda block=block: fp8.per_block_cast_to_fp8(x, gran_k=block),  # type: ignore[misc]
                lambda block=block: cast_by_torch(x, block, block),  # type: ignore[misc]
            )
            for block in (FINE, 64)
        },
        "cast_128x1": (m * k * 3 + of_columns, lambda: fp8.per_token_cast_to_fp8(x.t()), lambda: _rows(x.t())),
        "cast_both": (
            m * k * 4 + of_rows + of_columns,
            lambda: fp8.cast_both_to_fp8(x),
            lambda: (_rows(x), _rows(x.t())),
        ),
        "cast_128x128": (
            m * k * 3,
            lambda: fp8.per_block_cast_to_fp8(x),
            lambda: cast_by_torch(x, SCALE_BLOCK, SCALE_BLOCK),
        ),
    }
    return Cast(*calls[kind])


def _of_experts(kind: str, shape: Shape, device: str) -> Cast:
    tokens, k = shape
    ids = torch.stack([torch.randperm(NUM_EXPERTS, device=device)[:TOPK] for _ in range(min(tokens, 1024))])
    ids = ids.repeat(ceil_div(tokens, len(ids)), 1)[:tokens]
    rows = routing.expert_rows(ids, NUM_EXPERTS)
    if kind == "gather_cast":
        x = torch.randn(tokens, k, device=device, dtype=torch.float32).bfloat16()
        count = tokens * k * 2 + tokens * TOPK * (k + ceil_div(k, SCALE_BLOCK) * 4)
        return Cast(count, lambda: routing.gather_cast_to_fp8(x, rows), lambda: _rows_at(x, rows.token_of))
    y = torch.randn(tokens * TOPK, k, device=device, dtype=torch.float32).bfloat16()
    weights = torch.rand(tokens, TOPK, device=device, dtype=torch.float32)
    count = tokens * k * 2 * (TOPK + 1)
    ours = lambda: routing.gather_weighted(y, rows, weights)  # noqa: E731
    return Cast(count, ours, lambda: _summed(y, rows.row_of, weights))


def _of_groups(kind: str, shape: Shape, device: str) -> Cast:
    """Make casts along the rows of groups of `GROUP_ROWS` each; torch casts columns, and sorts them by groups."""
    rows, k = shape
    counts = torch.full((rows // GROUP_ROWS,), GROUP_ROWS, dtype=torch.int32, device=device)
    token_of = torch.randperm(rows, device=device).int() // TOPK
    groups = GroupedRows(counts, counts.cumsum(0, dtype=torch.int32), token_of)
    p = torch.rand(rows, device=device, dtype=torch.float32)
    x = torch.randn(rows // TOPK if kind == "cast_groups" else rows, k, device=device, dtype=torch.float32).bfloat16()
    of_columns = ceil_div(rows, SCALE_BLOCK) * 4
    if kind == "cast_groups":
        count = x.nbytes + rows * k + k * of_columns
        ours = lambda: _used(cast_along_groups(x, groups), rows)  # noqa: E731
        return Cast(count, ours, lambda: _along_groups(x[token_of.long()]))
    h = torch.randn(rows, 2 * k, device=device, dtype=torch.float32).bfloat16()
    count = rows * k * (6 + 5) + 3 * k * of_columns + 2 * rows * ceil_div(k, SCALE_BLOCK) * 4

    def of_silu() -> Any:
        of_rows, columns, activated, parts = cast_silu_gradient(h, x, groups, p)
        return of_rows, _used(columns, rows), _used(activated, rows), None if parts is None else parts.sum(0)

    def in_torch() -> Any:
        silu = Silu.of(h, None)
        dh = silu.gradient(x.float() * p[:, None]).bfloat16()
        return _rows(dh), _along_groups(dh), _along_groups(silu.s.bfloat16()), (silu.s * x.float()).sum(1)

    return Cast(count, of_silu, in_torch, is_exact=False)


def _used(columns: Quantized | None, rows: int) -> Quantized:
    """Remove the unused space after the last group."""
    assert columns is not None
    values, scales = columns
    return values[: rows * len(scales)], scales[:, : rows // SCALE_BLOCK]


def _along_groups(x: Tensor) -> Quantized:
    values, scales = _rows(x.t())
    by_groups = values.view(torch.uint8).view(x.shape[1], -1, GROUP_ROWS).transpose(0, 1).flatten()
    return by_groups.view(values.dtype), scales


def _tensor(x: Tensor, scale: Tensor | None) -> Quantized:
    values, made = cast_blocks(x.view(1, -1), Target(1, 0), scale)
    return values.view(x.shape), made.view(1)


def _rows(x: Tensor) -> Quantized:
    return cast_by_torch(x, 1, SCALE_BLOCK)


def _packed_rows(x: Tensor) -> Quantized:
    values, scales = cast_blocks(x, Target(1, FINE, use_ue8m0=True))
    return values, packed_rows(scales)


def _rows_at(x: Tensor, token: Tensor) -> Quantized:
    values, scales = _rows(x)
    return values.view(torch.uint8).index_select(0, token).view(values.dtype), scales.index_select(0, token)


def _silu_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _summed(y: Tensor, row_of: Tensor, weights: Tensor) -> Tensor:
    """Sum up like `gather_weighted`: term by term, in order of columns."""
    total = torch.zeros(row_of.shape[0], y.shape[1], device=y.device, dtype=torch.float32)
    for column in range(row_of.shape[1]):
        total = total + y.index_select(0, row_of[:, column]).float() * weights[:, column, None]
    return total.to(y.dtype)


def copy_of(count: int, device: str = "cuda") -> Callable[[], Any]:
    """Copy half of `count` bytes, so that reads and writes together move `count`."""
    source = torch.empty(count // 2, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _flat(outputs: Any) -> Sequence[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    return [x for each in outputs for x in _flat(each)]


def _kind(name: str, shapes: Sequence[Shape], device: str = "cuda") -> Kind:
    few = [(m, k) for m, k in shapes if m in (*QUICK_MS, sum(COUNTS)) and k == 7168]
    return Kind(shapes, few, lambda shape: work_of(name, shape, device))


KINDS = Kinds({name: _kind(name, shapes) for name, shapes in SHAPES.items()}, with_yardsticks=False, takes_new=False)
COLUMNS = (
    table.KIND,
    table.shape("m x k"),
    table.ours(),
    table.Column("of copy", lambda line: table.percent(table.over(line.us(COPY), line.row.us))),
    table.time(COPY, "copy us"),
    table.time(COMPILED, "compiled us"),
    table.time(EAGER, "torch us"),
    table.TB_PER_S,
)


def tables(report: Report) -> list[Table]:
    """Tabulate our times beside the times of a copy, and beside torch's."""
    return [table.table_of("casts", COLUMNS, table.lines_of(report))]


BENCH = KINDS.bench("casts", METHOD, "8192,7168", CONTENDERS, tables)
