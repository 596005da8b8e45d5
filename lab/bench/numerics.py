"""Measure the error of every product against FP64, by depth and distribution of operands, beside cuBLASLt and BF16.

Each whole result has two relative errors. `error` is the error of the arithmetic alone: it compares the
result with the FP64 product of the multiplied numbers. `error_with_cast` is the error that a model sees: it compares
the result with the FP64 product of the numbers before the cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice, product

import torch
from rich.table import Table
from torch import Tensor

from deep_gemm.casts.fp8 import k_grouped_cast_to_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.rules import FP8_MAX
from deep_gemm.core.check.checks import Operand
from deep_gemm.gemm.api.bf16_dense import bf16_gemm_nt
from deep_gemm.gemm.api.bf16_einsum import einsum
from deep_gemm.gemm.api.dense import fp8_gemm_nt
from deep_gemm.gemm.api.grouped import (
    k_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)
from deep_gemm.gemm.api.heads import fp8_einsum
from deep_gemm.hyper.api import tf32_hc_prenorm_gemm, to_tf32
from deep_gemm.indexer.api import fp8_mqa_logits
from deep_gemm.linear.api import linear
from deep_gemm.moe.api import experts

from . import table
from .bench import Asked, Bench, Steps
from .cases import Shape
from .contenders import BF16, BLOCKWISE, FAST, OURS, blockwise_call, dequantized
from .products import raise_if_lost, reason
from .report import Add, Announce, Report, Row

EXACT = "cublaslt"
"""cuBLASLt's product without fast accumulation: like ours, it adds partial sums outside of the tensor cores."""
TF32 = "tf32"
MODE = "numerics"
METHOD = (
    "numerics: relative error of the whole result (Frobenius norm) beside FP64; error: beside the product of the "
    "numbers that were multiplied; error_with_cast: beside that of the numbers ahead of the cast; bias: mean of the "
    "differences away from zero over the mean magnitude (negative: too small); cublaslt and cublaslt_fast: "
    "torch._scaled_mm, one scale for each tensor, largest magnitude over 448, use_fast_accum False and True; bf16: "
    "torch.mm; normal: randn; heavy: Student's t with 2 degrees of freedom; positive: |randn|; cancelling: the second "
    "half of k takes away what the first gave, but for one number in 64; all rounded to BF16 first; one_big_*: a "
    "product of 2^16 and small ones of 2^(16-gap), shape: gap, error: share of the small ones' sum that is lost"
)
MOST_ERROR = 0.05
"""If our `error` exceeds this limit, the result is wrong. A rival's error may exceed the limit."""
M, N = 256, 256
FEW_ROWS = 16
DEPTHS = tuple(1 << e for e in range(7, 17))
SOME_DEPTHS = (128, 1024, 8192, 65536)
FRESH = 64
"""In cancelling operands, one number in this many does not cancel."""

Result = Callable[[], Tensor]


@dataclass(frozen=True)
class Way:
    """One way to compute a product, and two right results in FP64."""

    contender: str
    output: torch.dtype
    call: Result
    given: Result
    """Computes the right result for the multiplied numbers."""
    asked: Result
    """Computes the right result for the numbers before any cast."""


Numbers = Callable[[int, int, int], tuple[Tensor, Tensor]]
"""Draws X `[m, k]` and W `[n, k]` in BF16, given m, n and k."""
Make = Callable[[Shape, Numbers], Iterator[Way]]


@dataclass(frozen=True)
class Kind:
    """A product: its shapes (k last), the operands to draw, and the ways to compute it."""

    shapes: tuple[Shape, ...]
    make: Make
    operands: tuple[str, ...]


Step = tuple[str, Shape, str]
"""A kind, a shape, and the name of its operands."""


def steps(*, quick: bool = False) -> list[Step]:
    """List the steps. A quick run has one step for each kind: its shallowest shape, with normal operands."""
    found = []
    for name, kind in KINDS.items():
        shapes, operands = (kind.shapes[:1], kind.operands[:1]) if quick else (kind.shapes, kind.operands)
        found += [(name, shape, which) for shape, which in product(shapes, operands)]
    return found


def measure(chosen: Sequence[Step], device: str, *, add: Add, announce: Announce) -> None:
    """Compute each product in every way on this device, and compare the results with FP64."""
    for kind, shape, operands in chosen:
        announce(f"{kind} {'x'.join(map(str, shape))} {operands}")
        torch.manual_seed(0)
        with torch.device(device):
            ways = list(KINDS[kind].make(shape, OPERANDS[operands]))
        add([row_of(kind, shape, operands, way) for way in ways])


def row_of(kind: str, shape: Shape, operands: str, way: Way) -> Row:
    """Compute a product once, and compare it with FP64. If the way raises an error, the row gets the reason."""
    row = partial(
        Row, kind, shape, way.contender, MODE, operands=operands, output=str(way.output).removeprefix("torch.")
    )
    try:
        got = way.call().double()
    except Exception as exception:
        raise_if_lost(exception)
        return row(failed=reason(exception))
    if kind in ONE_BIG:
        missing = way.given() - got
        return row(error=float((missing / way.asked()).mean()))
    given = way.given()
    error, with_cast = relative(got, given), relative(got, way.asked())
    bias = float(((got - given) * given.sign()).sum() / given.abs().sum())
    wrong = f"wrong: error {error:.2g}" if way.contender == OURS and not error <= MOST_ERROR else None
    return row(error=error, error_with_cast=with_cast, bias=bias, failed=wrong)


def relative(got: Tensor, right: Tensor) -> float:
    """Return the norm of the difference over the norm of the right result."""
    return float((got - right).norm() / right.norm())


# Operands


def normal(rows: int, k: int) -> Tensor:
    """Draw normal numbers."""
    return torch.randn(rows, k, dtype=torch.float32)


def heavy(rows: int, k: int) -> Tensor:
    """Draw from Student's t with two degrees of freedom: the largest of 10000 numbers is about 70."""
    return (
        torch.randn(rows, k, dtype=torch.float32) / torch.randn(2, rows, k, dtype=torch.float32).square().mean(0).sqrt()
    )


def positive(rows: int, k: int) -> Tensor:
    """Draw the magnitudes of normal numbers: no terms cancel, and every sum grows with k."""
    return torch.randn(rows, k, dtype=torch.float32).abs()


def independent(draw: Callable[[int, int], Tensor]) -> Numbers:
    """Draw X and W from the same distribution, independently."""
    return lambda m, n, k: (draw(m, k).bfloat16(), draw(n, k).bfloat16())


def cancelling(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Repeat X's first half of k, and negate W's in the second half, except for one number in `FRESH`."""
    x, w = normal(m, k // 2), normal(n, k // 2)
    back = -w
    back[:, ::FRESH] = normal(*back[:, ::FRESH].shape)
    return torch.cat([x, x], 1).bfloat16(), torch.cat([w, back], 1).bfloat16()


OPERANDS: Mapping[str, Numbers] = {
    "normal": independent(normal),
    "heavy": independent(heavy),
    "positive": independent(positive),
    "cancelling": cancelling,
}


# Products


def exact(a: Tensor, b: Tensor) -> Result:
    """Return a function that computes A @ B.T in FP64, at most once."""
    return cache(lambda: a.double() @ b.double().mT)


def into(shape: Sequence[int], dtype: torch.dtype, call: Callable[[Tensor], object]) -> Result:
    """Make an output full of NaN, and return a function that runs the call on this output and returns the output."""
    d = torch.full(tuple(shape), torch.nan, dtype=dtype)

    def run() -> Tensor:
        call(d)
        return d

    return run


def fp8_of_blocks(shape: Shape, numbers: Numbers) -> Iterator[Way]:
    """Scale each 128x128 block of B. Rivals multiply the same numbers, cast with other scales or not cast."""
    m, n, k = shape
    x, w = numbers(m, n, k)
    a, b, asked = per_token_cast_to_fp8(x), per_block_cast_to_fp8(w), exact(x, w)
    given = exact(dequantized(a, 1), dequantized(b, 128))
    for dtype in (torch.bfloat16, torch.float32):
        yield Way(OURS, dtype, into((m, n), dtype, lambda d: fp8_gemm_nt(a, b, d)), given, asked)
    yield Way(BLOCKWISE, torch.bfloat16, blockwise_call(a, b), given, asked)
    yield from by_tensorwise_scales(tensorwise(x), tensorwise(w), asked)
    yield Way(BF16, torch.bfloat16, lambda: torch.mm(x, w.t()), asked, asked)
    yield Way(BF16, torch.float32, lambda: torch.mm(x, w.t(), out_dtype=torch.float32), asked, asked)


def tensorwise(x: Tensor) -> Operand:
    """Cast a tensor with one scale."""
    scale = x.abs().max().float() / FP8_MAX
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def by_tensorwise_scales(a: Operand, b: Operand, asked: Result) -> Iterator[Way]:
    """Multiply by cuBLASLt in two ways: partial sums stay in the tensor cores, or are added outside of them."""
    (p, sp), (q, sq) = a, b
    given = exact(p.double() * sp.double(), q.double() * sq.double())
    for name, is_fast in ((FAST, True), (EXACT, False)):
        for dtype in (torch.bfloat16, torch.float32):
            call = partial(torch._scaled_mm, p, q.t(), sp, sq, out_dtype=dtype, use_fast_accum=is_fast)
            yield Way(name, dtype, call, given, asked)


def fp8_of_rows(shape: Shape, numbers: Numbers) -> Iterator[Way]:
    """Scale each row and 128 columns of B."""
    m, n, k = shape
    x, w = numbers(m, n, k)
    a, b = per_token_cast_to_fp8(x), per_token_cast_to_fp8(w)
    given, asked = exact(dequantized(a, 1), dequantized(b, 1)), exact(x, w)
    for dtype in (torch.bfloat16, torch.float32):
        call = into((m, n), dtype, lambda d: fp8_gemm_nt(a, b, d, recipe=(1, 1, 128)))
        yield Way(OURS, dtype, call, given, asked)


def fp8_of_few_rows(shape: Shape, numbers: Numbers) -> Iterator[Way]:
    """Compute only our product, for few rows: a GPU uses another kernel for it."""
    return islice(fp8_of_blocks(shape, numbers), 1)


def of_groups(groups: int, m: int, n: int, k: int, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Draw X `[groups, m, k]` and W `[groups, n, k]`."""
    drawn = [numbers(m, n, k) for _ in range(groups)]
    return torch.stack([x for x, _ in drawn]), torch.stack([w for _, w in drawn])


def fp8_contiguous(shape: Shape, numbers: Numbers) -> Iterator[Way]:
    """Multiply rows that are stacked by group."""
    groups, m, n, k = shape
    x, w = of_groups(groups, m, n, k, numbers)
    a, b = per_token_cast_to_fp8(x), per_block_cast_to_fp8(w)
    ids = torch.arange(groups, dtype=torch.int32).repeat_interleave(m)
    stacked = a[0].flatten(0, 1), a[1].flatten(0, 1)
    call = into((groups * m, n), torch.bfloat16, lambda d: m_grouped_fp8_gemm_nt_contiguous(stacked, b, d, ids))
    given = exact(dequantized(a, 1), dequantized(b, 128))
    yield Way(OURS, torch.bfloat16, call, lambda: given().flatten(0, 1), lambda: exact(x, w)().flatten(0, 1))


def fp8_masked(shape: Shape, numbers: Numbers) -> Iterator[Way]:
    """Multiply masked rows, here all rows of each group."""
    groups, m, n, k = shape
    x, w = of_groups(groups, m, n, k, numbers)
    a, b = per_token_cast_to_fp8(x), per_block_cast_to_fp8(w)
    counts = torch.full((groups,), m, dtype=torch.int32)
    call = into((groups, m, n), torch.bfloat16, lambda d: m_grouped_fp8_gemm_nt_masked(a, b, d, counts, m))
    yield Way(OURS, torch.bfloat16, call, exact(dequantized(a, 1), dequantized(b, 128)), exact(x, w))


def fp8_along_k(shape: Shape, numbers: Numbers) -> Iterator[Way]:
    """Multiply groups along k, in FP32."""
    groups, m, n, k = shape
    x, w = of_groups(groups, m, n, k, numbers)
    ks = [k] * groups
    a, b = (k_grouped_cast_to_fp8(torch.cat(list(each), 1), ks) for each in (x, w))
    given = exact(*(dequantized(per_token_cast_to_fp8(each), 1) for each in (x, w)))  # equal: 128 divides each k
    call = into((groups, m, n), torch.float32, lambda d: k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks))
    yield Way(OURS, torch.float32, call, given, exact(x, w))


def fp8_of_heads(shape: Shape, numbers: Numbers) -> Iterator[Way]:
    """Multiply heads."""
    heads, m, n, k = shape
    x, w = of_groups(heads, m, n, k, numbers)
    a, b = per_token_cast_to_fp8(x.transpose(0, 1).contiguous()), per_block_cast_to_fp8(w)
    given = exact(dequantized(a, 1).transpose(0, 1), dequantized(b, 128))
    call = into((m, heads, n), torch.bfloat16, lambda d: fp8_einsum("bhr,hdr->bhd", a, b, d))
    yield Way(OURS, torch.bfloat16, lambda: call().transpose(0, 1), given, exact(x, w))


def bf16_dense(shape: Shape, numbers: Numbers) -> Iterator[Way]:
    """Multiply in BF16, beside torch."""
    m, n, k = shape
    x, w = numbers(m, n, k)
    right = exact(x, w)
    for dtype in (torch.bfloat16, torch.float32):
        yield Way(OURS, dtype, into((m, n), dtype, lambda d: bf16_gemm_nt(x, w, d)), right, right)
    yield Way(BF16, torch.bfloat16, lambda: torch.mm(x, w.t()), right, right)
    yield Way(BF16, torch.float32, lambda: torch.mm(x, w.t(), out_dtype=torch.float32), right, right)


def bf16_sums(shape: Shape, numbers: Numbers) -> Iterator[Way]:
    """Sum BF16 products of depth 128 each; k is the depth of all products together."""
    m, n, k = shape
    x, w = numbers(m, n, k)
    a, b = (each.view(-1, k // 128, 128).transpose(0, 1).contiguous() for each in (x, w))
    right, expr = exact(x, w), "bmk,bnk->mn"
    yield Way(OURS, torch.bfloat16, into((m, n), torch.bfloat16, lambda d: einsum(expr, a, b, d)), right, right)
    yield Way(
        OURS, torch.float32, into((m, n), torch.float32, lambda d: einsum(expr, a, b, d.zero_(), d)), right, right
    )
    yield Way(BF16, torch.bfloat16, lambda: torch.einsum(expr, a, b), right, right)


def hc_prenorm(shape: Shape, numbers: Numbers) -> Iterator[Way]:
    """Multiply by a few FP32 vectors; rounding them to TF32 is the cast."""
    m, n, k = shape
    x, w = numbers(m, n, k)
    b = w.float() * torch.rand(n, 1, dtype=torch.float32).add(1)  # more bits than BF16 holds
    given, asked = exact(x, to_tf32(b)), exact(x, b)
    squares = torch.empty(m, dtype=torch.float32)
    call = into((m, n), torch.float32, lambda d: tf32_hc_prenorm_gemm(x, b, d, squares))
    yield Way(OURS, torch.float32, call, given, asked)
    yield Way(TF32, torch.float32, lambda: in_tf32(x.float(), b), given, asked)


def in_tf32(a: Tensor, b: Tensor) -> Tensor:
    """Compute A @ B.T by torch in TF32; in FP32 on the CPU."""
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        return a @ b.t()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def mqa_logits(shape: Shape, numbers: Numbers) -> Iterator[Way]:
    """Compute the indexer's logits; k is the depth of a head."""
    tokens, keys, heads, k = shape
    x, y = numbers(tokens * heads, keys, k)
    weights = torch.randn(tokens, heads, dtype=torch.float32)
    (q, sq), (kv, sk) = per_token_cast_to_fp8(x), per_token_cast_to_fp8(y)
    begins, ends = torch.zeros(tokens, dtype=torch.int32), torch.full((tokens,), keys, dtype=torch.int32)
    folded = weights * sq.view(tokens, heads)

    def right(a: Tensor, b: Tensor, factors: Tensor) -> Tensor:
        scores = (a.double() @ b.double().t()).relu().view(tokens, heads, keys)
        return torch.einsum("thk,th->tk", scores, factors.double())

    yield Way(
        OURS,
        torch.float32,
        lambda: fp8_mqa_logits(q.view(tokens, heads, k), (kv, sk.flatten()), folded, begins, ends),
        lambda: right(q, kv.double() * sk.double(), folded),
        lambda: right(x, y, weights),
    )


def linear_layer(shape: Shape, numbers: Numbers) -> Iterator[Way]:
    """Compute a linear layer, which casts its activations itself."""
    m, n, k = shape
    x, w = numbers(m, n, k)
    b = per_block_cast_to_fp8(w)
    given = exact(dequantized(per_token_cast_to_fp8(x), 1), dequantized(b, 128))
    yield Way(OURS, torch.bfloat16, into((m, n), torch.bfloat16, lambda d: linear(x, b, out=d)), given, exact(x, w))


def mixture(shape: Shape, numbers: Numbers) -> Iterator[Way]:
    """Compute a mixture of two experts; each token has both. k is `hidden`. `given` casts at the layer's steps."""
    tokens, intermediate, k = shape
    x, w1 = numbers(tokens, 4 * intermediate, k)
    w1 = (w1.float() * k**-0.5).bfloat16().view(2, 2 * intermediate, k)
    w2 = (torch.randn(2, k, intermediate, dtype=torch.float32) * intermediate**-0.5).bfloat16()
    q1, q2 = per_block_cast_to_fp8(w1), per_block_cast_to_fp8(w2)
    ids = torch.arange(2).expand(tokens, 2).contiguous()
    weights = torch.rand(tokens, 2, dtype=torch.float32)

    def to_fp8(values: Tensor) -> Tensor:
        return dequantized(per_token_cast_to_fp8(values), 1)

    def chain(
        first: Tensor, second: Tensor, to: Callable[[Tensor], Tensor], cast: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Add up both experts' results; `to` rounds the results of products, and `cast` rounds the operands."""
        results = []
        for expert in range(2):
            gate, up = to(cast(x) @ first[expert].t()).chunk(2, 1)
            inner = cast(torch.nn.functional.silu(gate) * up)
            results.append(to(inner @ second[expert].t()) * weights[:, expert, None].to(gate.dtype))
        return results[0] + results[1]

    in_fp64 = cache(lambda: chain(w1.double(), w2.double(), Tensor.double, Tensor.double))
    yield Way(
        OURS,
        torch.bfloat16,
        into((tokens, k), torch.bfloat16, lambda d: experts(x, ids, weights, q1, q2, out=d)),
        lambda: chain(dequantized(q1, 128), dequantized(q2, 128), lambda between: between.bfloat16().double(), to_fp8),
        in_fp64,
    )
    yield Way(BF16, torch.bfloat16, lambda: chain(w1, w2, Tensor.bfloat16, Tensor.bfloat16), in_fp64, in_fp64)


# Bits that tensor cores drop

BIG = 8
"""Exponent of both factors of the big product; each row has one big product, in the first 32 columns of k."""
GAPS = tuple(range(8, 24))
"""The small products are smaller than the big product by these powers of two. FP32 holds the sum for each gap."""
ONE_BIG: Mapping[str, slice] = {
    "one_big_same_step": slice(1, 32),
    "one_big_same_block": slice(32, 128),
    "one_big_next_block": slice(128, 256),
}
"""Positions of the small products along k."""


def one_big_operands(kind: str, gap: int) -> tuple[Tensor, Tensor]:
    """Make A `[m, k]` and B `[n, k]` of FP8 numbers; small products are `gap` powers of two below the big product."""
    a, b, at = torch.zeros(M, 256, dtype=torch.float32), torch.zeros(N, 256, dtype=torch.float32), ONE_BIG[kind]
    a[:, 0], b[:, 0] = 2.0**BIG, 2.0**BIG
    exponent = 2 * BIG - gap
    a[:, at], b[:, at] = 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)
    return a, b


def one_big(kind: str) -> Make:
    """Multiply one big pair, and small pairs in the same 32 columns of k, in the same 128, or in the next 128."""

    def make(shape: Shape, numbers: Numbers) -> Iterator[Way]:
        (gap,) = shape
        a, b = one_big_operands(kind, gap)
        right, small = exact(a, b), exact(a[:, ONE_BIG[kind]], b[:, ONE_BIG[kind]])
        p, q = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        operands = (p, torch.ones(M, 2, dtype=torch.float32)), (q, torch.ones(N // 128, 2, dtype=torch.float32))
        yield Way(OURS, torch.float32, into((M, N), torch.float32, lambda d: fp8_gemm_nt(*operands, d)), right, small)
        one = torch.ones((), dtype=torch.float32)
        for way in by_tensorwise_scales((p, one), (q, one), right):
            if way.output == torch.float32:
                yield Way(way.contender, way.output, way.call, right, small)
        x, w = a.bfloat16(), b.bfloat16()
        yield Way(BF16, torch.float32, lambda: torch.mm(x, w.t(), out_dtype=torch.float32), right, small)

    return make


ALL = tuple(OPERANDS)
KINDS: Mapping[str, Kind] = {
    "fp8_gemm_nt": Kind(tuple((M, N, k) for k in DEPTHS), fp8_of_blocks, ALL),
    "fp8_gemm_nt_of_rows": Kind(tuple((M, N, k) for k in DEPTHS), fp8_of_rows, ALL),
    "fp8_gemm_nt_few_rows": Kind(tuple((FEW_ROWS, N, k) for k in SOME_DEPTHS), fp8_of_few_rows, ALL),
    "m_grouped_fp8_gemm_nt_contiguous": Kind(((2, 128, N, 8192),), fp8_contiguous, ALL[:1]),
    "m_grouped_fp8_gemm_nt_masked": Kind(((2, 128, N, 8192),), fp8_masked, ALL[:1]),
    "k_grouped_fp8_gemm_nt_contiguous": Kind(tuple((2, M, N, k) for k in SOME_DEPTHS), fp8_along_k, ALL),
    "fp8_einsum": Kind(tuple((2, 128, N, k) for k in SOME_DEPTHS), fp8_of_heads, ALL),
    "fp8_mqa_logits": Kind(tuple((64, 512, 64, k) for k in (32, 64, 128)), mqa_logits, ALL),
    "bf16_gemm_nt": Kind(tuple((M, N, k) for k in DEPTHS), bf16_dense, ALL),
    "einsum_sum": Kind(tuple((M, N, k) for k in SOME_DEPTHS), bf16_sums, ALL),
    "tf32_hc_prenorm_gemm": Kind(tuple((M, 24, k) for k in SOME_DEPTHS), hc_prenorm, ALL),
    "linear": Kind(tuple((m, N, k) for k in SOME_DEPTHS for m in (M, FEW_ROWS)), linear_layer, ALL),
    "experts": Kind(tuple((64, 256, k) for k in SOME_DEPTHS[:3]), mixture, ALL[:3]),
    **{kind: Kind(tuple((gap,) for gap in GAPS), one_big(kind), ALL[:1]) for kind in ONE_BIG},
}


def plan(asked: Asked) -> Steps:
    """Plan the requested products, on a GPU if there is one."""
    chosen, device = steps(quick=asked.quick), "cuda" if torch.cuda.is_available() else "cpu"
    return len(chosen), lambda add, announce: measure(chosen, device, add=add, announce=announce)


def tables(report: Report) -> list[Table]:
    """Tabulate our errors and the rivals' at the largest depth of each product and kind of operands."""
    found: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in report.rows:
        found.setdefault((row.kind, row.shape, row.operands, row.output), {})[row.contender] = row
    deepest = {(row.kind, row.operands): row.shape for row in report.rows}
    lines = (
        table.Line(row, found[row.kind, row.shape, row.operands, row.output])
        for row in report.rows
        if row.contender == OURS and (row.shape == deepest[row.kind, row.operands] or row.kind in ONE_BIG)
    )
    columns = (
        table.KIND._replace(heading="product"),
        table.shape("shape"),
        table.Column("operands", lambda line: line.row.operands or "", is_left=True),
        table.Column("output", lambda line: line.row.output or "", is_left=True),
        _error_of(OURS, "error"),
        table.Column("with cast", lambda line: _error(line.row.error_with_cast)),
        table.Column("bias", lambda line: _error(line.row.bias)),
        *(_error_of(rival, rival) for rival in (FAST, EXACT, BF16)),
    )
    return [table.table_of("relative errors beside FP64, at the largest depth", columns, lines, gap=3)]


def _error_of(name: str, heading: str) -> table.Column:
    return table.Column(heading, lambda line: _error(line.others[name].error if name in line.others else None))


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


BENCH = Bench("numerics", METHOD, plan, tables, takes_shapes=False, needs_gpu=lambda asked: not asked.quick)
