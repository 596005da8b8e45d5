"""Host time of a call: how long the caller's thread is busy with it. Problems are tiny, so that the GPU keeps up."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deep_gemm.casts.fp8 import k_grouped_cast_to_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.gpu import H200
from deep_gemm.gemm.dense import api as dense
from deep_gemm.gemm.dense.choose import menu_of, select
from deep_gemm.gemm.output import Output
from deep_gemm.gemm.rows import api as grouped

from .products import reason
from .report import Add, Announce, Row
from .timing import Spread

METHOD = (
    "host: wall time of a thread over 200 calls of a tiny product in a row, nothing synchronized in between, divided "
    "by 200; all products in turn, 20 rounds, median, least and most; operands, scales and outputs exist before, "
    "scales of A m-major. host_new_m: each of 100 calls has an m not seen before; host_new_weight: each of 30 calls "
    "has a weight of a shape not seen before; in both the kernel is loaded; median, least and most call"
)
ROUNDS, CALLS = 20, 200
NEW_MS, NEW_WEIGHTS = 100, 30
STEPS = 15
"""Number of steps that `measure` announces."""
GROUPS, M, N, K = 4, 64, 256, 256

Call = Callable[[], Any]


def measure(*, add: Add, announce: Announce) -> None:
    """Measure every product's call, then torch's, then calls with a new m and with a new weight."""
    sound = []
    for name, shape, call in public_calls("cuda"):
        announce(name)
        failed = _failure_of(call)
        if failed is None:
            sound.append((name, shape, call))
        else:
            add([Row("host", shape, name, "host", failed=failed)])
    announce("all in turn")
    spreads = in_turn([call for _, _, call in sound])
    add([_row(name, shape, "host", spread) for (name, shape, _), spread in zip(sound, spreads, strict=True)])
    announce("new m")
    add([_row("deep_gemm.fp8_gemm_nt", (0, N, K), "host_new_m", first_calls(calls_with_new_m("cuda")))])
    announce("new weight")
    add([_row("deep_gemm.fp8_gemm_nt", (M, 0, 0), "host_new_weight", first_calls(calls_with_new_weight("cuda")))])


def in_turn(calls: Sequence[Call], rounds: int = ROUNDS, in_a_row: int = CALLS) -> list[Spread]:
    """Microseconds of each of these calls, made many times in a row, one after the other in every round.

    What a machine does only in the beginning, or now and then, so falls on all of them.
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
    """Microseconds of these calls, each made once. The first is not timed: it makes sure that the kernel is loaded."""
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


def public_calls(device: str) -> Iterator[tuple[str, tuple[int, ...], Call]]:
    """Name, shape and call of every public product on a tiny problem, and then of torch's products."""
    torch.manual_seed(0)
    x, y = (torch.randn(rows, K, device=device, dtype=torch.bfloat16) for rows in (M, N))
    a, b, b_rows = _m_major(per_token_cast_to_fp8(x)), per_block_cast_to_fp8(y), _m_major(per_token_cast_to_fp8(y))
    a_t, b_t = (a[0].t(), a[1].t()), (b[0].t(), b[1].t())
    d, grad = torch.empty(M, N, device=device, dtype=torch.bfloat16), torch.zeros(M, N, device=device)
    for name, p, q in (("nt", a, b), ("nn", a, b_t), ("tn", a_t, b_t), ("tt", a_t, b)):
        gemm = getattr(dense, f"fp8_gemm_{name}")
        yield f"deep_gemm.fp8_gemm_{name}", (M, N, K), lambda gemm=gemm, p=p, q=q: gemm(p, q, d)  # type: ignore[misc]
    yield ("deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt", (M, N, K), lambda: dense.wgrad_gemm_fp8_fp8_fp32_nt(a, b_rows, grad))
    yield from _grouped_calls(device)
    one = torch.ones((), device=device)
    yield (
        "torch._scaled_mm",
        (M, N, K),
        lambda: torch._scaled_mm(a[0], b_t[0], one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
    )
    yield "torch.matmul in BF16", (M, N, K), lambda: x @ y.t()


def _grouped_calls(device: str) -> Iterator[tuple[str, tuple[int, ...], Call]]:
    x = torch.randn(GROUPS, M, K, device=device, dtype=torch.bfloat16)
    w = torch.randn(GROUPS, N, K, device=device, dtype=torch.bfloat16)
    a, b = _m_major(per_token_cast_to_fp8(x.flatten(0, 1))), per_block_cast_to_fp8(w)
    b_t = (b[0].mT, b[1].mT)
    ids = torch.arange(GROUPS, device=device, dtype=torch.int32).repeat_interleave(M)
    d = torch.empty(GROUPS * M, N, device=device, dtype=torch.bfloat16)
    shape = (GROUPS, M, N, K)
    nt, nn = grouped.m_grouped_fp8_gemm_nt_contiguous, grouped.m_grouped_fp8_gemm_nn_contiguous
    yield "deep_gemm.m_grouped_fp8_gemm_nt_contiguous", shape, lambda: nt(a, b, d, ids)
    yield "deep_gemm.m_grouped_fp8_gemm_nn_contiguous", shape, lambda: nn(a, b_t, d, ids)

    a_masked, d_masked = _m_major(per_token_cast_to_fp8(x)), d.view(GROUPS, M, N)
    counts = torch.full((GROUPS,), M // 2, device=device, dtype=torch.int32)
    masked = grouped.m_grouped_fp8_gemm_nt_masked
    yield "deep_gemm.m_grouped_fp8_gemm_nt_masked", shape, lambda: masked(a_masked, b, d_masked, counts, M // 2)

    ks = [K] * GROUPS
    rows, columns = (torch.randn(size, sum(ks), device=device) for size in (M, N))
    p, q = (_m_major(k_grouped_cast_to_fp8(operand, ks)) for operand in (rows, columns))
    p_t, q_t = (p[0], p[1].t()), (q[0], q[1].t())
    ks_tensor = torch.tensor(ks, device=device, dtype=torch.int32)
    grads = torch.zeros(GROUPS, M, N, device=device)
    along_k, wgrad = grouped.k_grouped_fp8_gemm_nt_contiguous, grouped.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt
    yield "deep_gemm.k_grouped_fp8_gemm_nt_contiguous", shape, lambda: along_k(p, q, grads, ks, ks_tensor, c=grads)
    yield "deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt", shape, lambda: wgrad(p_t, q_t, grads, ks)


def calls_with_new_m(device: str, count: int = NEW_MS) -> list[Call]:
    """Calls that differ only in m and run the same kernel. The first is for loading the kernel."""
    config = select(M, N, K, Output(), H200)
    ms = [m for m in range(1, 4096) if m != M and select(m, N, K, Output(), H200) == config][: count + 1]
    b = per_block_cast_to_fp8(torch.randn(N, K, device=device))
    operands = []
    for m in ms:
        a = _m_major(per_token_cast_to_fp8(torch.randn(m, K, device=device)))
        operands.append((a, torch.empty(m, N, device=device, dtype=torch.bfloat16)))
    return [lambda a=a, d=d: dense.fp8_gemm_nt(a, b, d) for a, d in operands]  # type: ignore[misc]


def calls_with_new_weight(device: str, count: int = NEW_WEIGHTS) -> list[Call]:
    """Calls whose weights differ in n and k and that run the same kernel. The first is for loading the kernel."""
    sizes = ((n, k) for k in range(4096, 8192, 128) for n in range(512, 4096, 64))
    first = next(sizes)
    config = select(M, *first, Output(), H200)
    new = [first]
    for n, k in sizes:
        if len(new) <= count and n != new[-1][0] and k != new[-1][1] and select(M, n, k, Output(), H200) == config:
            new.append((n, k))
    menu_of.cache_clear()  # choosing is a part of the first call
    calls: list[Call] = []
    for n, k in new:
        a = _m_major(per_token_cast_to_fp8(torch.randn(M, k, device=device)))
        b = per_block_cast_to_fp8(torch.randn(n, k, device=device))
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


def _m_major(operand: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return operand[0], get_mn_major_tma_aligned_tensor(operand[1])


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
