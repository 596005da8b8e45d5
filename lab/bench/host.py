"""Host time of a call: how long it occupies the caller's thread. Problems are tiny, so that the GPU keeps up."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import deep_gemm
from deep_gemm.casts.fp8 import ROWS, k_grouped_cast_to_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.core.call import recorded
from deep_gemm.core.check.layout import SCALE_BLOCK
from deep_gemm.core.gpu import H200
from deep_gemm.core.replay import Ready, computed, start
from deep_gemm.gemm.api import dense, grouped
from deep_gemm.gemm.choose.bf16 import select_bf16
from deep_gemm.gemm.choose.fp8 import menu_of, select
from deep_gemm.gemm.config.tall import Majors
from deep_gemm.gemm.kinds.output import BF16_OPERANDS, OUTPUTS_OF, Output, Sizes

from . import table
from .bench import Asked, Bench, Steps
from .contenders import m_major
from .products import reason
from .report import MAX_NAME, Add, Announce, Report, Row
from .timing import Spread, profiled

METHOD = (
    "host: wall time of a thread over 200 calls of a tiny product in a row, nothing synchronized in between, divided "
    "by 200; all products in turn, 20 rounds, median, least and most; operands, scales and outputs exist before, "
    "scales of A m-major; step: forward and backward, gradients set to None ahead of it; kernels: what one call "
    "launches, torch's kernels, copies and fills included, by torch.profiler. host_new_m: each of 100 calls has an m "
    "not seen before; host_new_weight: each of 30 calls has a weight of a shape not seen before; in both the kernel is "
    "loaded; median, least and most call"
)
ROUNDS, CALLS = 20, 200
NEW_MS, NEW_WEIGHTS = 100, 30
STEPS = 27
"""Number of steps that `measure` announces."""
GROUPS, TOPK, M, N, K = 4, 2, 64, 256, 256
HEADS, HEAD = 32, 64
BARE_LAUNCH = "a launch alone"

Call = Callable[[], Any]


def measure(*, add: Add, announce: Announce) -> None:
    """Measure a launch, calls of layers and products, then torch's calls, then calls with a new m or a new weight."""
    sound = []
    for name, shape, call in chain(layer_calls("cuda"), public_calls("cuda")):
        announce(name)
        failed = _failure_of(call)
        if failed is None:
            sound.append((name, shape, call))
        else:
            add([Row("host", shape, name, "host", failed=failed)])
    announce("all in turn")
    spreads = in_turn([call for _, _, call in sound])
    for (name, shape, call), spread in zip(sound, spreads, strict=True):
        kernels = tuple(kernel.name[:MAX_NAME] for kernel in profiled(call))
        add([replace(_row(name, shape, "host", spread), kernels=kernels)])
    announce("new m")
    for name, calls in (("fp8_gemm_nt", calls_with_new_m("cuda")), ("bf16_gemm_nt", calls_with_new_m_of_bf16("cuda"))):
        add([_row(f"deep_gemm.{name}", (0, N, K), "host_new_m", first_calls(calls))])
    announce("new weight")
    add([_row("deep_gemm.fp8_gemm_nt", (M, 0, 0), "host_new_weight", first_calls(calls_with_new_weight("cuda")))])


def in_turn(calls: Sequence[Call], rounds: int = ROUNDS, in_a_row: int = CALLS) -> list[Spread]:
    """Time each of these calls, in microseconds. A round takes the calls in turn, each many times in a row.

    A machine that is slow at first, or now and then, then slows all calls equally.
    """
    for call in calls:
        for _ in range(in_a_row):
            call()
    times: list[list[float]] = [[] for _ in calls]
    with _no_garbage_collection():
        for _ in range(rounds):
            for call, of_call in zip(calls, times, strict=True):
                _synchronize()
                begin = time.perf_counter_ns()
                for _ in range(in_a_row):
                    call()
                of_call.append((time.perf_counter_ns() - begin) / 1e3 / in_a_row)
    _synchronize()
    return [Spread.of(of_call) for of_call in times]


def first_calls(calls: Sequence[Call]) -> Spread:
    """Time these calls, each made once, in microseconds. The first call loads the kernel and is not timed."""
    calls[0]()
    times = []
    with _no_garbage_collection():
        for call in calls[1:]:
            _synchronize()
            begin = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - begin) / 1e3)
    _synchronize()
    return Spread.of(times)


def layer_calls(device: str) -> Iterator[tuple[str, tuple[int, ...], Call]]:
    """Yield name, shape and call of a launch, and of layers and functions with several kernels, on tiny problems."""
    torch.manual_seed(0)
    x, w = (torch.randn(rows, K, device=device, dtype=torch.bfloat16) for rows in (M, N))
    if device == "cuda":
        yield BARE_LAUNCH, (M, K), _bare_launch(x)
    linear = deep_gemm.nn.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16)
    experts = deep_gemm.nn.Experts(GROUPS, K, N, device=device, dtype=torch.bfloat16)
    ids = torch.rand(M, GROUPS, device=device, dtype=torch.float32).topk(TOPK).indices
    p = torch.rand(M, TOPK, device=device, dtype=torch.float32).requires_grad_()
    leaf, of_experts = x.clone().requires_grad_(), (GROUPS, TOPK, M, K, N)
    in_bf16 = torch.nn.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16)
    for name, layer in (("deep_gemm.nn.Linear", linear), ("torch.nn.Linear in BF16", in_bf16)):
        yield f"{name}, forward", (M, N, K), lambda layer=layer: layer(leaf)  # type: ignore[misc]
        yield f"{name}, step", (M, N, K), _step(layer, leaf)
    yield "deep_gemm.nn.Experts, forward", of_experts, lambda: experts(leaf, ids, p)
    yield "deep_gemm.nn.Experts, step", of_experts, _step(experts, leaf, ids, p)
    w1, w2 = (per_block_cast_to_fp8(each.detach()) for each in (experts.w1, experts.w2))
    weights, b = p.detach(), per_block_cast_to_fp8(w)
    yield "deep_gemm.experts", of_experts, lambda: deep_gemm.experts(x, ids, weights, w1, w2)
    yield "deep_gemm.linear", (M, N, K), lambda: deep_gemm.linear(x, b)
    d = torch.empty(M, N, device=device, dtype=torch.bfloat16)
    yield "deep_gemm.bf16_gemm_nt", (M, N, K), lambda: deep_gemm.bf16_gemm_nt(x, w, d)
    rows, of_heads = x.view(M, GROUPS, -1), w.view(N, GROUPS, -1).transpose(0, 1).contiguous()
    out = torch.empty(M, GROUPS, N, device=device, dtype=torch.bfloat16)
    yield "deep_gemm.einsum", (M, GROUPS, N), lambda: deep_gemm.einsum("bhr,hdr->bhd", rows, of_heads, out)
    q, kv = (
        torch.zeros(shape, device=device, dtype=torch.float32).to(torch.float8_e4m3fn)
        for shape in ((M, HEADS, HEAD), (N, HEAD))
    )
    scales = torch.ones(N, device=device, dtype=torch.float32)
    of_q = torch.ones(M, HEADS, device=device, dtype=torch.float32)
    first = torch.zeros(M, device=device, dtype=torch.int32)
    ranges = first, first + N
    yield "deep_gemm.fp8_mqa_logits", (M, HEADS, N), lambda: deep_gemm.fp8_mqa_logits(q, (kv, scales), of_q, *ranges)


def _step(layer: torch.nn.Module, *inputs: Tensor) -> Call:
    grad, leaves = torch.ones_like(layer(*inputs)), [*layer.parameters(), *(x for x in inputs if x.requires_grad)]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        layer(*inputs).backward(grad)

    return step


def _bare_launch(x: Tensor) -> Call:
    made = per_token_cast_to_fp8(x, mn_major=True)
    record, _ = recorded(ROWS, (x,), (False, SCALE_BLOCK, 0.0, True, False), (x,))
    (launch,), (numbers, device) = record.launches, (computed(record, [x]), x.get_device())
    assert numbers is not None
    ready, at = Ready.of(launch, numbers), [[each.data_ptr() for each in tensors] for tensors in ((x,), made)]

    def again() -> object:
        start(ready, at, device)
        return made

    return again


def public_calls(device: str) -> Iterator[tuple[str, tuple[int, ...], Call]]:
    """Yield name, shape and call of every public product on a tiny problem, and then of torch's products."""
    torch.manual_seed(0)
    x, y = (torch.randn(rows, K, device=device, dtype=torch.bfloat16) for rows in (M, N))
    a, b, b_rows = m_major(per_token_cast_to_fp8(x)), per_block_cast_to_fp8(y), m_major(per_token_cast_to_fp8(y))
    a_t, b_t = (a[0].t(), a[1].t()), (b[0].t(), b[1].t())
    d = torch.empty(M, N, device=device, dtype=torch.bfloat16)
    grad = torch.zeros(M, N, device=device, dtype=torch.float32)
    for name, p, q in (("nt", a, b), ("nn", a, b_t), ("tn", a_t, b_t), ("tt", a_t, b)):
        gemm = getattr(dense, f"fp8_gemm_{name}")
        yield f"deep_gemm.fp8_gemm_{name}", (M, N, K), lambda gemm=gemm, p=p, q=q: gemm(p, q, d)  # type: ignore[misc]
    yield "deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt", (M, N, K), lambda: dense.wgrad_gemm_fp8_fp8_fp32_nt(a, b_rows, grad)
    yield from _grouped_calls(device)
    one = torch.ones((), device=device, dtype=torch.float32)
    said: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    yield "torch._scaled_mm", (M, N, K), lambda: torch._scaled_mm(a[0], b_t[0], one, one, **said)
    yield "torch.matmul in BF16", (M, N, K), lambda: x @ y.t()


def _grouped_calls(device: str) -> Iterator[tuple[str, tuple[int, ...], Call]]:
    x = torch.randn(GROUPS, M, K, device=device, dtype=torch.bfloat16)
    w = torch.randn(GROUPS, N, K, device=device, dtype=torch.bfloat16)
    a, b = m_major(per_token_cast_to_fp8(x.flatten(0, 1))), per_block_cast_to_fp8(w)
    b_t = (b[0].mT, b[1].mT)
    ids = torch.arange(GROUPS, device=device, dtype=torch.int32).repeat_interleave(M)
    d = torch.empty(GROUPS * M, N, device=device, dtype=torch.bfloat16)
    shape = (GROUPS, M, N, K)
    nt, nn = grouped.m_grouped_fp8_gemm_nt_contiguous, grouped.m_grouped_fp8_gemm_nn_contiguous
    yield "deep_gemm.m_grouped_fp8_gemm_nt_contiguous", shape, lambda: nt(a, b, d, ids)
    yield "deep_gemm.m_grouped_fp8_gemm_nn_contiguous", shape, lambda: nn(a, b_t, d, ids)

    a_masked, d_masked = m_major(per_token_cast_to_fp8(x)), d.view(GROUPS, M, N)
    counts = torch.full((GROUPS,), M // 2, device=device, dtype=torch.int32)
    masked = grouped.m_grouped_fp8_gemm_nt_masked
    yield "deep_gemm.m_grouped_fp8_gemm_nt_masked", shape, lambda: masked(a_masked, b, d_masked, counts, M // 2)

    ks = [K] * GROUPS
    rows, columns = (torch.randn(size, sum(ks), device=device, dtype=torch.float32) for size in (M, N))
    p, q = (m_major(k_grouped_cast_to_fp8(operand, ks)) for operand in (rows, columns))
    p_t, q_t = (p[0], p[1].t()), (q[0], q[1].t())
    ks_tensor = torch.tensor(ks, device=device, dtype=torch.int32)
    grads = torch.zeros(GROUPS, M, N, device=device, dtype=torch.float32)
    along_k, wgrad = grouped.k_grouped_fp8_gemm_nt_contiguous, grouped.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt
    yield "deep_gemm.k_grouped_fp8_gemm_nt_contiguous", shape, lambda: along_k(p, q, grads, ks, ks_tensor, c=grads)
    yield "deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt", shape, lambda: wgrad(p_t, q_t, grads, ks)


def calls_with_new_m(device: str, count: int = NEW_MS) -> list[Call]:
    """Make calls that differ only in m and run the same kernel. The first call loads the kernel."""
    ms = _new_ms(lambda m: select(Sizes(m, N, K), Output(), H200), count)
    b = per_block_cast_to_fp8(torch.randn(N, K, device=device, dtype=torch.float32))
    operands = []
    for m in ms:
        a = m_major(per_token_cast_to_fp8(torch.randn(m, K, device=device, dtype=torch.float32)))
        operands.append((a, torch.empty(m, N, device=device, dtype=torch.bfloat16)))
    return [lambda a=a, d=d: dense.fp8_gemm_nt(a, b, d) for a, d in operands]  # type: ignore[misc]


def calls_with_new_m_of_bf16(device: str, count: int = NEW_MS) -> list[Call]:
    """Make calls of BF16 products that differ only in m."""
    ms = _new_ms(lambda m: select_bf16(m, N, K, OUTPUTS_OF[BF16_OPERANDS][0], Majors(), H200), count)
    b = torch.randn(N, K, device=device, dtype=torch.float32).bfloat16()
    operands = [[torch.randn(m, size, device=device, dtype=torch.float32).bfloat16() for size in (K, N)] for m in ms]
    return [lambda a=a, d=d: deep_gemm.bf16_gemm_nt(a, b, d) for a, d in operands]  # type: ignore[misc]


def _new_ms(config_of: Callable[[int], object], count: int) -> list[int]:
    """List `count + 1` values of m other than M that get M's configuration."""
    like = config_of(M)
    return list(islice((m for m in range(1, 4096) if m != M and config_of(m) == like), count + 1))


def calls_with_new_weight(device: str, count: int = NEW_WEIGHTS) -> list[Call]:
    """Make calls whose weights differ in n and k and that run the same kernel. The first call loads the kernel."""
    sizes = ((n, k) for k in range(4096, 8192, 128) for n in range(512, 4096, 64))
    first = next(sizes)
    config = select(Sizes(M, *first), Output(), H200)
    new = [first]
    for n, k in sizes:
        is_new = len(new) <= count and n != new[-1][0] and k != new[-1][1]
        if is_new and select(Sizes(M, n, k), Output(), H200) == config:
            new.append((n, k))
    menu_of.cache_clear()  # the first call includes the choice
    calls: list[Call] = []
    for n, k in new:
        a = m_major(per_token_cast_to_fp8(torch.randn(M, k, device=device, dtype=torch.float32)))
        b = per_block_cast_to_fp8(torch.randn(n, k, device=device, dtype=torch.float32))
        d = torch.empty(M, n, device=device, dtype=torch.bfloat16)
        calls.append(lambda a=a, b=b, d=d: dense.fp8_gemm_nt(a, b, d))  # type: ignore[misc]
    return calls


def _failure_of(call: Call) -> str | None:
    try:
        call()
        _synchronize()
    except Exception as error:
        return reason(error)
    return None


def _row(name: str, shape: tuple[int, ...], mode: str, spread: Spread) -> Row:
    return Row("host", shape, name, mode, spread.us, spread.us_min, spread.us_max)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


WHICH = {"host_new_m": "with a new m", "host_new_weight": "with a new weight"}


def tables(report: Report) -> list[Table]:
    """Tabulate calls, each with its times and its number of launches."""
    columns = (
        table.Column("call", lambda line: line.row.contender, is_left=True),
        table.Column("shape", lambda line: table.name_of(size or "any" for size in line.row.shape), is_left=True),
        table.Column("which", lambda line: WHICH.get(line.row.mode, "warm"), is_left=True),
        table.ours(),
        table.Column("least", lambda line: table.figure(line.row.us_min)),
        table.Column("most", lambda line: table.figure(line.row.us_max)),
        table.Column("launches", lambda line: str(len(line.row.kernels)) if line.row.kernels else ""),
        table.Column("us each", lambda line: table.figure(table.over(line.row.us, len(line.row.kernels)))),
    )
    return [table.table_of("one call", columns, (table.Line(row, {}) for row in report.rows), gap=3)]


def plan(_: Asked) -> Steps:
    """Plan all calls."""
    return STEPS, lambda add, announce: measure(add=add, announce=announce)


BENCH = Bench("host", METHOD, plan, tables, takes_shapes=False)
