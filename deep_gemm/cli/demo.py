"""The demo: make data, quantize it, run every kind of product and both layers, and check each against FP64.

On a Hopper GPU, it then compares the speed of a few dense products with cuBLASLt's. Without a GPU, it compiles a few
kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..casts.fp8 import cast_back_from_fp8, k_grouped_cast_to_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8
from ..casts.rules import Quantized
from ..core.gpu import HOPPER
from ..core.jit import CompilerMissing, applied
from ..core.jit.compiler import compile_cubin, compiler_version
from ..core.jit.cubin import report
from ..gemm.api.dense import fp8_gemm_nt, wgrad_gemm_fp8_fp8_fp32_nt
from ..gemm.api.grouped import (
    k_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)
from ..gemm.config.of_tile import tile_config
from ..gemm.kernel import FP8_GEMM
from ..gemm.kinds.output import Output
from ..linear.api import linear
from ..moe.api import experts
from ..testing.bench import L2_FLUSH_BYTES
from . import make_console, with_progress

MAX_ERROR_EXPERTS = 1e-2
"""If a sum of the first product is rounded to BF16 differently, its activation may become another FP8 number."""
MAX_ERROR = {torch.bfloat16: 4e-3, torch.float32: 1e-3}
DTYPE_NAME = {torch.bfloat16: "BF16", torch.float32: "FP32"}
ROWS, N, K = 256, 512, 1024
GROUP_ROWS = (100, 0, 37, 119)
KS = [512, 0, 128, 384]
TOKENS, TOPK, HIDDEN, INTERMEDIATE = 64, 2, 512, 256
SPEED_SHAPES = ((64, 2112, 7168), (4096, 7168, 2048), (4096, 7168, 16384))
SPEED_REPEATS = 11
KERNELS = {
    "small": tile_config(64, 32, Output()),
    "large": tile_config(256, 128, Output()),
    "cluster": tile_config(256, 128, Output(), cluster_n=2),
    "accumulating": tile_config(256, 128, Output(is_fp32=True, adds_to_d=True)),
}
"""Configurations of different kinds, which a machine without a GPU compiles."""

Rounding = Callable[[Tensor], Tensor]
normal = partial(torch.randn, dtype=torch.float32)


@dataclass(frozen=True)
class Example:
    """A product or layer to show: its call, and its results in FP64 from quantized and from original operands."""

    product: str
    sizes: tuple[int, int, int]
    """(m, n, k)."""
    call: Callable[[], Any]
    """Computes the product or layer, and returns the part of D that the product defines."""
    from_quantized: Tensor
    from_original: Tensor
    max_error: float | None = None
    """The largest allowed error; None for the limit of a single product."""


def run() -> bool:
    """Run every example, then show speed, or a few kernels if there is no GPU. Tell whether all results were right."""
    console = make_console()
    all_right = _show_products(console)
    console.print()
    return (_show_speed(console) if _has_hopper() else _show_kernels(console)) and all_right


def _show_kernels(console: Console) -> bool:
    try:
        compiler_version()  # load the compiler first, so that its load time does not count
    except CompilerMissing as error:
        console.print(f"The kernels for Hopper were not compiled: {error}", markup=False)
        return True
    title = "Kernels compiled for Hopper (sm_90a), on this machine"
    table = _table(title, ("kind", "fp8_gemm"), ("registers", "ms to compile"))
    compiled = []

    def work(announce: Callable[[str], None]) -> None:
        for kind, config in KERNELS.items():
            announce(config.name)
            start = time.perf_counter()
            kernel = compile_cubin(FP8_GEMM.source, FP8_GEMM.headers(config), name=f"fp8_gemm {config.name}")
            kernel = applied(FP8_GEMM.passes(config), kernel)
            compiled.append((kind, config.name, report(kernel.cubin, kernel.log), time.perf_counter() - start))

    with_progress(len(KERNELS), console, work)
    for kind, name, found, seconds in compiled:
        table.add_row(kind, name, str(found.registers), f"{seconds * 1e3:.0f}")
    console.print(table)
    return True


def _show_speed(console: Console) -> bool:
    numbers = "us", "TFLOPS", "error", "cuBLASLt", "TFLOPS", "ratio"
    table = _table("Speed beside cuBLASLt, dense, BF16 out, cold L2", ("m x n x k",), numbers)
    failures = []
    with console.status("measuring") as status:
        for m, n, k in SPEED_SHAPES:
            sizes = f"{m} x {n} x {k}"
            status.update(sizes)
            error, ours, theirs = measured(m, n, k)
            if not error < MAX_ERROR[torch.bfloat16]:
                failures.append(f"{sizes}: wrong, relative error {error:.1e}")
            speeds = ((f"{us:.1f}", f"{2e-6 * m * n * k / us:.0f}") for us in (ours, theirs))
            (our_us, our_tflops), (their_us, their_tflops) = speeds
            table.add_row(sizes, our_us, our_tflops, f"{error:.1e}", their_us, their_tflops, f"{ours / theirs:.2f}")
    console.print(table)
    for failure in failures:
        console.print(failure, style="red", markup=False)
    console.print(
        "\ncuBLASLt: torch._scaled_mm with one scale for each tensor, which is less work.\n"
        "us: median time between events around a call. A ratio below 1 means less time.\n"
        "error: relative to the FP64 product of the same FP8 numbers.",
        style="dim",
    )
    return not failures


def measured(m: int, n: int, k: int) -> tuple[float, float, float]:
    """Measure a product. Return its relative error, its microseconds, and cuBLASLt's microseconds."""
    x, w = normal(m, k, device="cuda"), normal(n, k, device="cuda")
    a, b = per_token_cast_to_fp8(x, mn_major=True), per_block_cast_to_fp8(w)
    d = x.new_empty((m, n), dtype=torch.bfloat16)
    one = torch.ones((), dtype=torch.float32, device="cuda")
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    theirs = partial(torch._scaled_mm, a[0], b[0].t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    def cold_us(call: Callable[[], object]) -> float:
        times: list[float] = []
        for _ in range(SPEED_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            flush.zero_()  # keeps the GPU busy until the host has made the call
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return median(times[1:])

    ours_us, theirs_us = cold_us(lambda: fp8_gemm_nt(a, b, d)), cold_us(theirs)
    return _relative_error(d, _exact(a) @ _exact(b).t()), ours_us, theirs_us


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False)
    for heading in texts:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _exact(operand: Quantized) -> Tensor:
    """Multiply values by scales. Each number is rounded once to FP32, and returned as FP64."""
    return cast_back_from_fp8(*operand).double()


def _has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER


def _show_products(console: Console) -> bool:
    device, backend, name = "cpu", "reference", f"the CPU ({torch.get_num_threads()} threads, no Hopper GPU found)"
    if _has_hopper():
        device, backend, name = "cuda", "kernel", torch.cuda.get_device_name()
    title = f"FP8 products and layers on {name}"
    # The time of the reference tells nothing about a GPU's time.
    table = _table(title, ("product", "m x n x k", "D", "backend"), ("ms", "error") if device == "cuda" else ("error",))
    table.add_column("")
    all_right, quantization_errors = True, []
    with console.status("quantizing") as status:
        for example in _examples(device):
            status.update(example.product)
            for _ in range(2):  # only the second call is timed
                begin = time.perf_counter()
                d = example.call()
                if device == "cuda":
                    torch.cuda.synchronize()
            milliseconds = (time.perf_counter() - begin) * 1e3
            error = _relative_error(d, example.from_quantized)
            right = error < (example.max_error or MAX_ERROR[d.dtype])
            all_right &= right
            quantization_errors.append(_relative_error(d, example.from_original))
            verdict = "[green]right[/]" if right else "[red]wrong[/]"
            sizes = " x ".join(map(str, example.sizes))
            times = (f"{milliseconds:.1f}",) if device == "cuda" else ()
            table.add_row(example.product, sizes, DTYPE_NAME[d.dtype], backend, *times, f"{error:.1e}", verdict)
    console.print(table)
    console.print(
        "\nerror: of the whole result, relative to the FP64 product of the same FP8 numbers.\n"
        "       Rounding D to BF16 alone causes 1.7e-03.\n"
        f"       Quantizing to FP8 added up to {max(quantization_errors):.1e}, which is not counted here.\n"
        "mixture of experts: tokens x intermediate x hidden.",
        style="dim",
    )
    return all_right


def _examples(device: str) -> Iterator[Example]:
    torch.manual_seed(0)
    x, w = normal(ROWS, K, device=device), normal(N, K, device=device)
    of_groups = normal(len(GROUP_ROWS), N, K, device=device)
    a, b, b_experts = per_token_cast_to_fp8(x), per_block_cast_to_fp8(w), per_block_cast_to_fp8(of_groups)
    xq, wq, experts_q = _exact(a), _exact(b), _exact(b_experts)

    sizes = ROWS, N, K
    yield Example("dense", sizes, lambda: fp8_gemm_nt(a, b), xq @ wq.t(), x.double() @ w.double().t())

    rows = torch.tensor(GROUP_ROWS, dtype=torch.int32)
    ids = torch.arange(len(GROUP_ROWS), dtype=torch.int32).repeat_interleave(rows).to(device)
    yield Example(
        "contiguous groups",
        sizes,
        lambda: m_grouped_fp8_gemm_nt_contiguous(a, b_experts, grouped_layout=ids),
        torch.einsum("mk,mnk->mn", xq, experts_q[ids.long()]),
        torch.einsum("mk,mnk->mn", x.double(), of_groups.double()[ids.long()]),
    )

    max_m = 128
    xs = normal(len(GROUP_ROWS), max_m, K, device=device)
    a_masked, counts = per_token_cast_to_fp8(xs), torch.tensor(GROUP_ROWS, dtype=torch.int32, device=device)
    valid = torch.arange(max_m, device=device) < counts[:, None]
    yield Example(
        "masked groups",
        sizes,
        lambda: m_grouped_fp8_gemm_nt_masked(a_masked, b_experts, masked_m=counts, expected_m=64)[valid],  # type: ignore[index]
        (_exact(a_masked) @ experts_q.mT)[valid],
        (xs.double() @ of_groups.double().mT)[valid],
    )

    dy = normal(N, K, device=device)
    a_grad, b_grad = per_token_cast_to_fp8(dy), per_token_cast_to_fp8(x)
    grad = torch.ones(N, ROWS, dtype=torch.float32, device=device)

    def accumulated() -> Tensor:
        d = grad.clone()
        wgrad_gemm_fp8_fp8_fp32_nt(a_grad, b_grad, d)
        return d

    yield Example(
        "weight gradient",
        (N, ROWS, K),
        accumulated,
        grad + _exact(a_grad) @ _exact(b_grad).t(),
        grad + dy.double() @ x.double().t(),
    )

    a_k, b_k = k_grouped_cast_to_fp8(dy, KS), k_grouped_cast_to_fp8(x, KS)
    # KS are multiples of 128, so a cast by groups has the same blocks of k as a cast of the whole operands.
    yield Example(
        "groups along k",
        (N, ROWS, K),
        lambda: k_grouped_fp8_gemm_nt_contiguous(a_k, b_k, ks=KS),
        _products_along_k(_exact(a_grad), _exact(b_grad)),
        _products_along_k(dy.double(), x.double()),
    )

    bias = normal(N, device=device)
    yield Example(
        "linear layer",
        sizes,
        lambda: linear(x, b, bias=bias),
        xq @ wq.t() + bias,
        x.double() @ w.double().t() + bias,
    )
    yield _mixture_of_experts(device)


def _mixture_of_experts(device: str) -> Example:
    x = normal(TOKENS, HIDDEN, device=device)
    weights = normal(len(GROUP_ROWS), 2 * INTERMEDIATE, HIDDEN, device=device) / HIDDEN**0.5
    weights_back = normal(len(GROUP_ROWS), HIDDEN, INTERMEDIATE, device=device)
    w1, w2 = per_block_cast_to_fp8(weights), per_block_cast_to_fp8(weights_back)
    topk_weights, topk_ids = normal(TOKENS, len(GROUP_ROWS), device=device).softmax(dim=-1).topk(TOPK)

    def computed(x: Tensor, w1: Tensor, w2: Tensor, of_product: Rounding, of_activation: Rounding) -> Tensor:
        """Compute the layer in FP64, with the given rounding of the first product and of the activation."""
        h = of_product(torch.einsum("tk,tenk->ten", x, w1[topk_ids]))
        gate, up = h.chunk(2, dim=-1)
        a = of_activation(torch.nn.functional.silu(gate) * up)
        return torch.einsum("tei,tehi,te->th", a, w2[topk_ids], topk_weights.double())

    def to_fp8(a: Tensor) -> Tensor:
        return _exact(per_token_cast_to_fp8(a.float()))

    from_quantized = computed(to_fp8(x), _exact(w1), _exact(w2), lambda h: h.bfloat16().double(), to_fp8)
    from_original = computed(x.double(), weights.double(), weights_back.double(), lambda h: h, lambda a: a)
    return Example(
        "mixture of experts",
        (TOKENS, INTERMEDIATE, HIDDEN),
        lambda: experts(x, topk_ids, topk_weights, w1, w2),
        from_quantized,
        from_original,
        MAX_ERROR_EXPERTS,
    )


def _products_along_k(a: Tensor, b: Tensor) -> Tensor:
    """Compute `[groups, m, n]`: the product of FP64 operands for each group of columns."""
    pairs = zip(torch.split(a, KS, 1), torch.split(b, KS, 1), strict=True)
    return torch.stack([p @ q.t() for p, q in pairs])


def _relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())
