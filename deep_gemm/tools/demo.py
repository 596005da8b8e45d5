"""The demo: make data, quantize it, run every kind of product and both layers, and check each against FP64.

On a Hopper GPU it then compares the speed of a few dense products with cuBLASLt's. Without one it compiles a few of
the kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from ..benchmark.cases import Case
from ..benchmark.contenders import FAST, OURS, dequantized
from ..benchmark.products import MAX_ERROR_BF16, MAX_ERROR_FP32, cold_rows
from ..benchmark.report import Row
from ..benchmark.table import make_console
from ..benchmark.timing import L2Flush
from ..dense import fp8_gemm_nt, wgrad_gemm_fp8_fp8_fp32_nt
from ..gpus import HOPPER
from ..grouped import k_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_masked
from ..jit import CompilerMissing
from ..layers import experts, linear
from ..quantize import k_grouped_cast_to_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8
from .inspect import show_families

MAX_ERROR_EXPERTS = 1e-2
"""Where sums of the first product round to BF16 differently, some activations become another FP8 number."""
MAX_ERROR = {torch.bfloat16: MAX_ERROR_BF16, torch.float32: MAX_ERROR_FP32}
DTYPE_NAME = {torch.bfloat16: "BF16", torch.float32: "FP32"}
ROWS, N, K = 256, 512, 1024
GROUP_ROWS = (100, 0, 37, 119)
KS = [512, 0, 128, 384]
TOKENS, TOPK, HIDDEN, INTERMEDIATE = 64, 2, 512, 256
SPEED_SHAPES = ((64, 2112, 7168), (4096, 7168, 2048), (4096, 7168, 16384))
SPEED_REPEATS = 10


Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Example:
    """One product or layer to show: its call, and its result from FP64 operands, quantized and not."""

    product: str
    m: int
    n: int
    k: int
    call: Callable[[], Tensor]
    """Returns the part of D that it computes."""
    from_quantized: Tensor
    from_original: Tensor
    max_error: float | None = None
    """None: what a single product may have."""


def run() -> bool:
    """Run every example, then show speed, or a few kernels if there is no GPU. Tell whether all was right."""
    console = make_console()
    all_right = _show_products(console)
    console.print()
    return (_show_speed(console) if _has_hopper() else _show_kernels(console)) and all_right


def _show_kernels(console: Console) -> bool:
    try:
        return show_families(console)
    except CompilerMissing as error:
        console.print(f"The kernels for Hopper were not compiled: {error}", markup=False)
        return True


def _show_speed(console: Console) -> bool:
    title = "Speed beside cuBLASLt, dense, BF16 out, cold L2"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False)
    table.add_column("m x n x k", no_wrap=True)
    for heading in ("us", "TFLOPS", "error", "cuBLASLt", "TFLOPS", "ratio"):
        table.add_column(heading, justify="right")
    failures = []
    with console.status("measuring") as status:
        flush = L2Flush()
        for shape in SPEED_SHAPES:
            sizes = " x ".join(map(str, shape))
            status.update(sizes)
            rows = {row.contender: row for row in cold_rows(Case("dense", shape), flush, SPEED_REPEATS)}
            ours, theirs = rows[OURS], rows[FAST]
            failures += [f"{sizes}: {row.contender} {row.failed}" for row in (ours, theirs) if row.failed]
            ratio = f"{ours.us / theirs.us:.2f}" if ours.us and theirs.us else ""
            error = "" if ours.error is None else f"{ours.error:.1e}"
            table.add_row(sizes, *_speed(ours), error, *_speed(theirs), ratio)
    console.print(table)
    for failure in failures:
        console.print(f"[red]{escape(failure)}[/]")
    console.print(
        "\ncuBLASLt: torch._scaled_mm with one scale for each tensor, which is less work.\n"
        "us: the kernels' time, median. A ratio below 1 means less time than cuBLASLt's.\n"
        "error: relative to the FP64 product of the same FP8 numbers.",
        style="dim",
    )
    return not failures


def _speed(row: Row) -> tuple[str, str]:
    return (f"{row.us:.1f}", f"{row.tflops:.0f}") if row.us else ("failed", "")


def _has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER


def _show_products(console: Console) -> bool:
    device, backend = ("cuda", "kernel") if _has_hopper() else ("cpu", "reference")
    title = f"FP8 products and layers on {_device_name(device)}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False)
    for heading in ("product", "m x n x k", "D", "backend"):
        table.add_column(heading)
    table.add_column("ms", justify="right")
    table.add_column("error", justify="right")
    table.add_column("")
    all_right, quantization_errors = True, []
    with console.status("quantizing") as status:
        for example in _examples(device):
            status.update(example.product)
            d, milliseconds = _timed(example.call, device)
            error = _relative_error(d, example.from_quantized)
            right = error < (example.max_error or MAX_ERROR[d.dtype])
            all_right &= right
            quantization_errors.append(_relative_error(d, example.from_original))
            verdict = "[green]right[/]" if right else "[red]wrong[/]"
            sizes = f"{example.m} x {example.n} x {example.k}"
            cells = (example.product, sizes, DTYPE_NAME[d.dtype], backend, f"{milliseconds:.1f}", f"{error:.1e}")
            table.add_row(*cells, verdict)
    console.print(table)
    console.print(
        "\nerror: of the whole result, relative to the FP64 product of the same FP8 numbers.\n"
        "       Rounding D to BF16 alone gives 1.7e-03.\n"
        f"       Quantizing to FP8 added up to {max(quantization_errors):.1e}, which is not counted here.\n"
        "mixture of experts: tokens x intermediate x hidden.",
        style="dim",
    )
    return all_right


def _examples(device: str) -> Iterator[Example]:
    torch.manual_seed(0)
    x, w = torch.randn(ROWS, K, device=device), torch.randn(N, K, device=device)
    of_groups = torch.randn(len(GROUP_ROWS), N, K, device=device)
    a, b, b_experts = per_token_cast_to_fp8(x), per_block_cast_to_fp8(w), per_block_cast_to_fp8(of_groups)
    xq, wq, experts_q = dequantized(a, 1), dequantized(b, 128), dequantized(b_experts, 128)

    yield Example("dense", ROWS, N, K, lambda: _made(fp8_gemm_nt(a, b)), xq @ wq.t(), x.double() @ w.double().t())

    ids = torch.repeat_interleave(torch.arange(len(GROUP_ROWS)), torch.tensor(GROUP_ROWS)).to(device, torch.int32)
    yield Example(
        "contiguous groups",
        ROWS,
        N,
        K,
        lambda: _made(m_grouped_fp8_gemm_nt_contiguous(a, b_experts, grouped_layout=ids)),
        torch.einsum("mk,mnk->mn", xq, experts_q[ids.long()]),
        torch.einsum("mk,mnk->mn", x.double(), of_groups.double()[ids.long()]),
    )

    max_m = 128
    xs = torch.randn(len(GROUP_ROWS), max_m, K, device=device)
    a_masked, counts = per_token_cast_to_fp8(xs), torch.tensor(GROUP_ROWS, dtype=torch.int32, device=device)
    valid = torch.arange(max_m, device=device) < counts[:, None]
    yield Example(
        "masked groups",
        ROWS,
        N,
        K,
        lambda: _made(m_grouped_fp8_gemm_nt_masked(a_masked, b_experts, masked_m=counts, expected_m=64))[valid],
        (dequantized(a_masked, 1) @ experts_q.mT)[valid],
        (xs.double() @ of_groups.double().mT)[valid],
    )

    dy = torch.randn(N, K, device=device)
    a_grad, b_grad = per_token_cast_to_fp8(dy), per_token_cast_to_fp8(x)
    grad = torch.ones(N, ROWS, device=device)

    def accumulated() -> Tensor:
        d = grad.clone()
        wgrad_gemm_fp8_fp8_fp32_nt(a_grad, b_grad, d)
        return d

    yield Example(
        "weight gradient",
        N,
        ROWS,
        K,
        accumulated,
        grad + dequantized(a_grad, 1) @ dequantized(b_grad, 1).t(),
        grad + dy.double() @ x.double().t(),
    )

    a_k, b_k = k_grouped_cast_to_fp8(dy, KS), k_grouped_cast_to_fp8(x, KS)
    # KS are multiples of 128, so the blocks of k are those of the operands cast whole.
    yield Example(
        "groups along k",
        N,
        ROWS,
        K,
        lambda: _made(k_grouped_fp8_gemm_nt_contiguous(a_k, b_k, ks=KS)),
        _products_along_k(dequantized(a_grad, 1), dequantized(b_grad, 1)),
        _products_along_k(dy.double(), x.double()),
    )

    bias = torch.randn(N, device=device)
    yield Example(
        "linear layer",
        ROWS,
        N,
        K,
        lambda: _made(linear(x, b, bias=bias)),
        xq @ wq.t() + bias,
        x.double() @ w.double().t() + bias,
    )
    yield _mixture_of_experts(device)


def _mixture_of_experts(device: str) -> Example:
    x = torch.randn(TOKENS, HIDDEN, device=device)
    weights = torch.randn(len(GROUP_ROWS), 2 * INTERMEDIATE, HIDDEN, device=device) / HIDDEN**0.5
    weights_back = torch.randn(len(GROUP_ROWS), HIDDEN, INTERMEDIATE, device=device)
    w1, w2 = per_block_cast_to_fp8(weights), per_block_cast_to_fp8(weights_back)
    topk_weights, topk_ids = torch.randn(TOKENS, len(GROUP_ROWS), device=device).softmax(dim=-1).topk(TOPK)

    def computed(x: Tensor, w1: Tensor, w2: Tensor, of_product: Rounding, of_activation: Rounding) -> Tensor:
        """In FP64, with the first product and the activation rounded as they are told to be."""
        h = of_product(torch.einsum("tk,tenk->ten", x, w1[topk_ids]))
        gate, up = h.chunk(2, dim=-1)
        a = of_activation(torch.nn.functional.silu(gate) * up)
        return torch.einsum("tei,tehi,te->th", a, w2[topk_ids], topk_weights.double())

    def to_fp8(a: Tensor) -> Tensor:
        return dequantized(per_token_cast_to_fp8(a.float()), 1)

    from_quantized = computed(
        to_fp8(x), dequantized(w1, 128), dequantized(w2, 128), lambda h: h.bfloat16().double(), to_fp8
    )
    from_original = computed(x.double(), weights.double(), weights_back.double(), lambda h: h, lambda a: a)
    return Example(
        "mixture of experts",
        TOKENS,
        INTERMEDIATE,
        HIDDEN,
        lambda: _made(experts(x, topk_ids, topk_weights, w1, w2)),
        from_quantized,
        from_original,
        MAX_ERROR_EXPERTS,
    )


def _products_along_k(a: Tensor, b: Tensor) -> Tensor:
    """`[groups, m, n]`: the product of FP64 operands for each group of columns."""
    pairs = zip(torch.split(a, KS, 1), torch.split(b, KS, 1), strict=True)
    return torch.stack([p @ q.t() for p, q in pairs])


def _timed(call: Callable[[], Tensor], device: str) -> tuple[Tensor, float]:
    """Result and milliseconds of a second call."""
    call()
    _synchronize(device)
    begin = time.perf_counter()
    d = call()
    _synchronize(device)
    return d, (time.perf_counter() - begin) * 1e3


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _made(d: Tensor | None) -> Tensor:
    """The D that a call made."""
    assert d is not None
    return d


def _relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"the CPU ({torch.get_num_threads()} threads, no Hopper GPU found)"
