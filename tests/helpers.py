"""Helpers for tests: random operands, correct results in FP64, outputs framed by canaries, sources of kernels,
and broken kernels."""

from __future__ import annotations

import builtins
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import first_trials
import pytest
import torch
from mutated import CAUGHT, try_mutation
from torch import Tensor

from deep_gemm.core import jit
from deep_gemm.core.check.layout import RECIPE_1D1D, ceil_div
from deep_gemm.core.check.recipes import PER_BLOCK, PER_ROW, Scales
from deep_gemm.core.jit.compiler import DEFAULT_OPTIONS, CompiledKernel, compile_cubin
from deep_gemm.core.jit.cubin import KernelReport, _sections, read_kernels, report
from deep_gemm.core.params import Kind, Params
from deep_gemm.core.settings import settings
from deep_gemm.gemm import reference
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM
from deep_gemm.gemm.problem import Problem
from lab.sim import product
from lab.sim.mutate import Mutation
from lab.sim.rounding import FP32_UNIT, TENSOR_CORES, describe_mistakes, sum_of_magnitudes
from lab.sim.trial import Trial

T = TypeVar("T")
CANARY = 42.0
BF16_UNIT = 2.0**-8


def some(x: T | None) -> T:
    """Return the value, which must not be None."""
    assert x is not None
    return x


def raising(error: Exception) -> Callable[..., Any]:
    """Return a function that accepts any arguments and raises this error."""

    def call(*_: object, **__: object) -> Any:
        raise error

    return call


def module_of(path: Path) -> ModuleType:
    """Load a script as a module."""
    spec = some(importlib.util.spec_from_file_location(path.stem, path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look up their module here
    some(spec.loader).exec_module(module)
    return module


def same_bits(got: Tensor | None, expected: Tensor) -> bool:
    """Tell whether two tensors hold the same bytes in the same shape."""
    if got is None or (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return False
    return torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def inside_of_an_element(x: Tensor) -> Tensor:
    """Copy the tensor to an address one byte after a multiple of the element size, which no element may start at."""
    memory = bytearray(x.nbytes + 2 * x.element_size())
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    here = torch.frombuffer(memory, dtype=x.dtype, offset=-start % x.element_size() + 1, count=x.numel())
    return here.as_strided(x.shape, x.stride()).copy_(x)


def misaligned(x: Tensor, num_bytes: int = 0) -> Tensor:
    """Copy values to an address `num_bytes` (by default one element) after a multiple of 16."""
    memory = torch.zeros(x.nbytes + 32, dtype=torch.uint8)
    first = -memory.data_ptr() % 16 + (num_bytes or x.element_size())
    return memory[first : first + x.nbytes].view(x.dtype).view(x.shape).copy_(x)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Draw numbers from a normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_ids(tokens: int, topk: int, num_experts: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Draw expert ids for each token's routes. Some ids are negative or too large, so these routes have no expert."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, num_experts + 2, (tokens, topk), generator=generator).to(dtype)


def random_fp8(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw E4M3 values of all magnitudes, without NaN, on the generator's device."""
    bits = torch.randint(0, 256, tuple(shape), generator=generator, dtype=torch.int32, device=generator.device)
    bits = torch.where(bits & 0x7F == 0x7F, bits & 0x80, bits)
    return bits.to(torch.uint8).view(torch.float8_e4m3fn)


def random_scales(
    shape: Sequence[int], generator: torch.Generator, low_exponent: int = -4, high_exponent: int = 4
) -> Tensor:
    """Draw positive FP32 scales with random mantissas and exponents, on the generator's device."""
    device = generator.device
    mantissas = 1 + torch.rand(tuple(shape), generator=generator, device=device)
    exponents = torch.randint(low_exponent, high_exponent + 1, tuple(shape), generator=generator, device=device)
    return torch.ldexp(mantissas, exponents)


def dequantize(values: Tensor, scales: Tensor, rows: int = 1) -> Tensor:
    """Multiply values `[..., m, k]` by their scales `[..., ceil(m / rows), ceil(k / 128)]` in FP64."""
    m, k = values.shape[-2:]
    spread = scales.double().repeat_interleave(rows, -2)[..., :m, :].repeat_interleave(128, -1)[..., :k]
    return values.double() * spread


def product_and_bound(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, sfb_rows: int) -> tuple[Tensor, Tensor]:
    """Return the exact A @ B.T in FP64, and how far FP32 arithmetic by the contract may be from the exact values.

    With u = 2^-24: a block's term T = scale * partial is rounded as the scale and the partial sum are computed, and in
    each addition from this block on. These are at most blocks + 2 roundings, each a factor within 1 +- u. A scale that
    underflows loses up to 2^-150, and each addition may lose as much.
    """
    m, k, n = *a.shape, b.shape[0]
    blocks = ceil_div(k, 128)
    exact, terms = torch.zeros(m, n, dtype=torch.float64), torch.zeros(m, n, dtype=torch.float64)
    bound = torch.full((m, n), blocks * 2.0**-150, dtype=torch.float64)
    sfb = sfb.repeat_interleave(sfb_rows, 0)[:n] if sfb_rows > 1 else sfb
    for block in range(blocks):
        ks = slice(block * 128, (block + 1) * 128)
        partial = a[:, ks].double() @ b[:, ks].double().t()
        term = partial * sfa[:, block, None].double() * sfb[None, :, block].double()
        exact, terms = exact + term, terms + term.abs()
        bound = bound + partial.abs() * 2.0**-150
    roundings = (blocks + 2) * FP32_UNIT
    return exact, bound + terms * roundings / (1 - roundings)


def tensor_core_bound(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, sfb_rows: int) -> Tensor:
    """Return how far sums of Hopper's FP8 tensor cores may be from exact sums, in the units of D."""
    return sum_of_magnitudes(a, sfa, b, sfb, Scales(sfb_rows, 128)) * TENSOR_CORES


def rounding_to(dtype: torch.dtype, exact: Tensor, bound: Tensor) -> Tensor:
    """Add one rounding to the output's type to the bound."""
    if dtype == torch.float32:
        return bound + (exact.abs() + bound) * FP32_UNIT
    return bound + (exact.abs() + bound) * BF16_UNIT + 2.0**-134


def assert_within(got: Tensor, exact: Tensor, bound: Tensor) -> None:
    """Check that every element is within its bound of the exact value; the error names the worst element."""
    excess = (got.double().cpu() - exact).abs() - bound
    if excess.numel() and not bool((excess <= 0).all()):
        worst = int(torch.where(excess.isnan(), torch.inf, excess).argmax())
        at = tuple(int(x) for x in torch.unravel_index(torch.tensor(worst), got.shape))
        raise AssertionError(f"at {at}: got {got[at].item()}, exact {exact[at].item()}, bound {bound[at].item():.3g}")


@contextmanager
def refused(words: str) -> Iterator[None]:
    """Expect an error that begins with `words`: a ValueError, unless the words begin with another error's name."""
    name, begin = re.fullmatch(r"(?:(\w+Error): )?(.*)", words, re.DOTALL).groups()  # type: ignore[union-attr]
    with pytest.raises(getattr(builtins, name or "ValueError"), match=f"^{re.escape(begin)}"):
        yield


@contextmanager
def group_of_one(folder: Path) -> Iterator[None]:
    """Make a group of one process over NCCL."""
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("nccl", init_method=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def host_never_waits() -> Iterator[None]:
    """Raise an error if the host waits for the GPU within the block."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def in_threads(call: Callable[[Any], object], given: Iterable[Any]) -> None:
    """Call a function with each of these values, each in its own thread, all at the same time."""
    threads = [Thread(target=call, args=(each,)) for each in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def as_new_process(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    """Set these environment variables and clear cached settings and kernels, so that both are read again."""
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    settings.cache_clear()
    jit._cache_of.cache_clear()


def count_calls(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *names: str) -> list[str]:
    """Record calls of these functions of a module: return a list that receives a function's name at each call."""
    called: list[str] = []

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            called.append(name)
            return function(*args, **more)

        return call

    for name in names:
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return called


def scales_between(sf: Tensor, of: Scales, first: int, end: int) -> Tensor:
    """Return the scales of the k-blocks from `first` up to, but without, `end`."""
    if not of.columns:
        return sf
    parts = 128 // of.columns
    return sf[:, first * parts : end * parts]


def sum_of_parts(p: Problem, cluster_k: int, run_k_blocks: int) -> Tensor:
    """Compute the exact bits of a product whose CTAs split k in whole runs: add the reference's sums of the parts."""
    total, k_blocks = torch.zeros(p.m, p.n, device=p.a.device), ceil_div(p.k, 128)
    runs = ceil_div(k_blocks, run_k_blocks)
    for rank in range(cluster_k):
        first, end = (min(runs * r // cluster_k * run_k_blocks, k_blocks) for r in (rank, rank + 1))
        if first == end:
            continue
        part = p._replace(
            a=p.a[:, first * 128 : end * 128].contiguous(),
            b=p.b[:, first * 128 : end * 128].contiguous(),
            sfa=scales_between(p.sfa, p.of_a or PER_ROW, first, end),
            sfb=scales_between(p.sfb, p.of_b or PER_BLOCK, first, end),
            d=torch.empty_like(total),
            c=None,
        )
        reference.compute(part)
        total += part.d
    if p.c is not None:
        total += p.c.float()
    return total.to(p.d.dtype)


def small_integers(config: Any, m: int, n: int, k: int, seed: int, device: str = "cpu") -> Problem:
    """Draw a dense product of small integers: its sums over a k-block need no more bits than the tensor cores keep."""
    g, by_row = torch.Generator(device).manual_seed(seed), config.sfb == PER_ROW
    a, b = (torch.randint(-2, 3, (rows, k), generator=g, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
    sfa, sfb = (random_scales((rows, ceil_div(k, 128)), g) for rows in (m, n if by_row else ceil_div(n, 128)))
    d = torch.full((m, n), torch.nan, dtype=torch.float32 if config.is_fp32 else torch.bfloat16, device=device)
    c = torch.randn(m, n, generator=g, device=device) if config.with_c else None
    c = c if c is None else c[0].clone() if config.c_is_fp32 else c.to(d.dtype)
    return dense_problem((a, sfa), (b, sfb), d, c, recipes=(RECIPE_1D1D if by_row else None, None, None))


@dataclass
class Framed:
    """Holds an output inside a larger buffer filled with a canary, so that a test can detect a write outside it."""

    buffer: Tensor
    view: Tensor

    def assert_untouched_outside(self) -> None:
        inside = torch.zeros_like(self.buffer, dtype=torch.bool)
        inside.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).fill_(True)
        outside = self.buffer[~inside]
        assert bool((outside == CANARY).all()), "a write outside the output"


def framed(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> Framed:
    """Return an output of this shape, surrounded by canaries in rows, columns and (in three dimensions) groups."""
    *outer, rows, columns = shape
    buffer = torch.full((*[x + 2 for x in outer], rows + 2, columns + 16), CANARY, dtype=dtype, device=device)
    inner = buffer[tuple(slice(1, x + 1) for x in outer)] if outer else buffer
    return Framed(buffer, inner[..., 1 : rows + 1, 8 : columns + 8])


def gemm_report(config: GemmConfig) -> KernelReport:
    """Compile the `fp8_gemm` kernel without a cache, and report on its machine code."""
    kernel = compile_cubin(FP8_GEMM.source, FP8_GEMM.headers(config), name=config.kernel_name)
    return report(kernel.cubin, kernel.log)


def assert_loads_nothing_early(compiled: CompiledKernel) -> None:
    """Check that the kernel loads nothing before the kernel ahead of it has ended.

    The compiler may move loads that are not volatile (`ptx::ld_global_nc_...`), but not before `griddepcontrol_wait`.
    """
    (code,) = read_kernels(compiled.cubin)
    mnemonics = [instruction.mnemonic for instruction in code.instructions]
    assert mnemonics.count("ACQBULK") == 1
    before = mnemonics[: mnemonics.index("ACQBULK")]
    assert [mnemonic for mnemonic in before if mnemonic in ("LDG", "STG", "UTMALDG", "UTMASTG")] == []


def assert_caught(mutation: Mutation, trials: Sequence[Trial]) -> None:
    """Check that a broken kernel compiles, and that some trial notices the mistake."""
    outcome = try_mutation(mutation, trials, first=first_trials.first_trial(mutation, trials))
    first_trials.note(mutation, trials, outcome.trial)
    assert outcome.verdict == CAUGHT, f"{outcome.verdict}: {outcome.reason}"


def pointer_members(params: Params) -> list[str]:
    """Return the members that hold addresses: each is a place of a plan, or its `numbers` set it to zero."""
    return [name for name, kind, *_ in params.fields if kind in (Kind.MAP, Kind.POINTER)]


def assert_right_on_gpu(p: Problem, d: Tensor, what: str = "") -> None:
    """Check D on the GPU: products within the tensor cores' bound; zeros and canaries to the bit."""
    right, allowed = (x.reshape(-1, p.n) for x in product.right_and_allowed(p, {"device": "cuda"}))
    mistakes = describe_mistakes(d.reshape(-1, p.n), right, allowed)
    assert mistakes is None, f"{what}: {mistakes}"


def checked_on_gpu(run: Callable[..., Any], p: Problem, config: Any = None) -> Tensor:
    """Run a product, check its result and return it; restore D's earlier values."""
    before = p.d.clone()
    run(p, config)
    after = p.d.clone()
    p.d.copy_(before)
    assert_right_on_gpu(p, after, config.name if config else "chosen")
    return after


def captured(call: Callable[..., Any], *args: Any, **more: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a call; return the graph and the call's result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call(*args, **more)
    return graph, made


def run_simulated(config: Any, p: Problem, **how: Any) -> product.Outcome:
    """Compute a product in the simulator."""
    return product.run(product.compile_config(config), config, p, **how)


def with_other_strides(p: Problem) -> Iterator[Problem]:
    """Yield problems whose A scales are stored by columns; B's scales by columns, or inside a wider tensor."""
    wide = torch.full((p.sfb.shape[0], p.sfb.shape[1] + 3), -1, dtype=p.sfb.dtype)
    wide[:, :-3] = p.sfb
    for sfb in (p.sfb.t().contiguous().t(), wide[:, :-3]):
        yield p._replace(sfb=sfb, sfa=p.sfa.t().contiguous().t())


def assert_same_bits_by(configs: Iterable[Any], p: Problem) -> None:
    """Check that configurations compute the same bits, as far as the simulator models the tensor cores."""
    first, *others = (run_simulated(of, p._replace(d=torch.empty_like(p.d)), truncate=True).d for of in configs)
    assert others
    assert all(torch.equal(d.view(torch.int16), first.view(torch.int16)) for d in others)


def text_sections(cubin: bytes) -> dict[str, bytes]:
    """Return all machine code of a cubin, by section."""
    return {name: s.bytes_of(cubin) for name, s in _sections(cubin).items() if name.startswith(".text")}


class Job(NamedTuple):
    """Holds the arguments of one `compile_cubin`."""

    name: str
    source: str
    headers: Mapping[str, str]
    options: tuple[str, ...] = DEFAULT_OPTIONS


def compile_many(jobs: Iterable[Job]) -> list[CompiledKernel]:
    """Compile all jobs in threads. Results are in the order of the jobs; the first failure is raised."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda j: compile_cubin(j.source, j.headers, name=j.name, options=j.options), jobs))
