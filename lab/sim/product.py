"""A product in the simulator: its launch, the right D, and random sizes of problems."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.casts.gating import Gating, activated
from deep_gemm.core.check.layout import SCALE_BLOCK, UE8M0_PER_WORD, align, ceil_div
from deep_gemm.core.check.ue8m0 import NO_NUMBER, Words, words_of
from deep_gemm.core.kernel import Config
from deep_gemm.gemm import launch, reference
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import BLOCK_K, GemmConfig
from deep_gemm.gemm.kernel import kernel_of
from deep_gemm.gemm.kinds.epilogues import TO_D, write_heads
from deep_gemm.gemm.kinds.works import Work
from deep_gemm.gemm.problem import Problem

from .launcher import How, Stage, is_on_gpu
from .library import HostKernel, compiled
from .rounding import (
    EXACT_STEPS,
    FP32_UNIT,
    TENSOR_CORES,
    UNITS_OF_STEP,
    allowed_difference,
    describe_mistakes,
    excess,
    within_units,
)
from .simulate import Result
from .trial import Trial


@dataclass(frozen=True)
class Outcome:
    """D from the simulator and from the reference, and the difference of elements that rounding allows."""

    d: Tensor
    right: Tensor
    allowed: Tensor
    mistakes: str | None
    """Mistakes in D, as text; None if D is right."""
    result: Result

    @property
    def worst(self) -> float:
        """Return the largest difference relative to the allowed one: up to 1 is right; NaN counts as infinite."""
        return float(excess(self.d, self.right, self.allowed).amax())

    def checked(self) -> Outcome:
        """Raise a ValueError if there are mistakes."""
        if self.mistakes is not None:
            raise ValueError(self.mistakes)
        return self


class ProductTrial(Trial):
    """A trial that compares D with the right D, within the error of rounding."""

    works: ClassVar[tuple[Work, ...]] = ()
    """The kinds of work that this trial covers, if a kernel has several trials; empty: every kind."""
    is_dependent: bool = False
    """True: the previous kernel may still run."""
    weight_is_ready: bool = False
    """True: the previous kernel writes neither B nor the layout of groups."""

    @classmethod
    def takes(cls, config: Any) -> bool:
        """Accept products of these kinds of work."""
        return not cls.works or (config.work in cls.works and not config.epilogue.sums_blocks)

    @abstractmethod
    def problem(self) -> Problem:
        """Draw the operands."""

    def outcome(self, kernel: HostKernel | None = None) -> Outcome:
        """Run the compiled kernel on the problem, and compare."""
        ahead: dict[str, Any] = {"is_dependent": self.is_dependent, "weight_is_ready": self.weight_is_ready}
        return run(kernel, self.config, self.problem(), **ahead, **self.how)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare D with the right D."""
        return self.outcome(kernel).checked().worst

    def passed(self) -> Outcome:
        """Compile the kernel, check it, and return the outcome."""
        return self.outcome(self.compiled()).checked()


OF_SIGMOID = 2.0**-16
"""Allowed relative error of an activation: a GPU's sigmoid is within 2^-17."""


def partial_sums(how: How) -> float:
    """Return the allowed error of partial sums, relative to an element's sum of magnitudes."""
    return TENSOR_CORES if how.get("truncate") or is_on_gpu(how) else EXACT_STEPS


def units_of_step(how: How) -> float:
    """Return the allowed error of a step of 16 along k, in units of the magnitudes' sum."""
    return UNITS_OF_STEP if is_on_gpu(how) else 1.0


def stage_of(
    config: Config,
    p: Any,
    aligned: Mapping[str, int] | None = None,
    *,
    is_dependent: bool = False,
    ready: Collection[str] = (),
    more: Mapping[str, Tensor] | None = None,
    read: Mapping[str, Tensor | None] | None = None,
    **how: Unpack[How],
) -> Stage:
    """Place a problem's operands in memory, aligned to 16 bytes by default; D and `more` are writable.

    `is_dependent`: the previous kernel may still write operands, except `ready` ones. `read`: more inputs by name,
    which replace the problem's.
    """
    in_place = p.c is not None and p.c.data_ptr() == p.d.data_ptr()
    names = ("a", "b", "sfa", "sfb", "c", "bias")
    operands = {name: getattr(p, name, None) for name in names if name != "c" or not in_place}
    given, written = {**operands, **(read or {})}, {"d": p.d, **(more or {})}
    everything = {**given, **written}
    aligned = dict.fromkeys(everything, 16) | dict(aligned or {})
    stage = Stage(config, given, written, aligned, ready=ready if is_dependent else everything, **how)
    if in_place:
        stage.at["c"] = stage.at["d"]
    return stage


def random_d_and_c(
    config: GemmConfig | DecodeConfig, shape: Sequence[int], generator: torch.Generator, in_place: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Make D full of NaN, and C if the kernel reads C. D is random if D is also C (`in_place` or `adds_to_d`)."""
    d = torch.full(tuple(shape), float("nan"), dtype=torch.float32 if config.is_fp32 else torch.bfloat16)
    if isinstance(config, GemmConfig) and config.adds_to_d:
        return d, d.normal_(generator=generator)
    if not config.with_c:
        return d, None
    if config.c_is_fp32:
        return d, torch.randn(d.shape[-1], generator=generator, dtype=torch.float32)
    return d, d.normal_(generator=generator) if in_place else torch.randn(
        d.shape, generator=generator, dtype=torch.float32
    ).to(d.dtype)


def run(
    kernel: HostKernel | None,
    config: Any,
    problem: Problem,
    *,
    is_dependent: bool = False,
    weight_is_ready: bool = False,
    layout: Tensor | None = None,
    **how: Unpack[How],
) -> Outcome:
    """Compute a product on simulated SMs and by the reference. The kernel gets `layout` instead of the problem's.

    `is_dependent`: the previous kernel may still run. `weight_is_ready`: it writes neither B nor a layout.
    """
    if (reason := launch.why_unfit(config, problem)) is not None:
        raise ValueError(f"config: {config.name} {reason}")
    p, has_rows = launch.prepared(problem, config), problem.work.groups_rows
    is_decode = isinstance(config, DecodeConfig)
    aligned = {"sfb": 16 if not is_decode and config.loads_sfb else 4, "sfa": 4 if is_decode and not has_rows else 16}
    aligned["c"] = 4 if has_rows and not p.work.reads_ids else 16
    ready = () if not weight_is_ready else ("b", "c") if has_rows else ("b",)
    read = None if layout is None else {"c": layout}
    stage = stage_of(config, p, aligned, read=read, is_dependent=is_dependent, ready=ready, **how)
    with stage.launches({kernel_of(config): kernel}):
        launch.start(stage.placed(p), config, stage.num_sms, weight_is_ready=int(weight_is_ready))
    return outcome(stage.result(), *right_and_allowed(problem, how, config), tile_of(config))


def tile_of(config: Any) -> tuple[int, int]:
    """Return the rows and columns of a tile; errors name the tile of a wrong element."""
    return config.block_tokens if isinstance(config, DecodeConfig) else config.block_m, config.block_n


Part = tuple[Any, Problem]
"""A product of one A and one B: its position in D, and its problem without a D."""


def parts_of(p: Problem, ks: Sequence[int] = ()) -> Iterator[Part]:
    """Yield the products of one A and one B in a problem. `ks`: depths of groups along k."""
    one = p._replace(sfa=None, sfb=None)

    def of(a: Tensor, sfa: Tensor | None, group: Any, c: Tensor | None = None) -> Problem:
        sfb = None if p.sfb is None else p.sfb[group]
        return one._replace(a=a, sfa=sfa, b=p.b[group], sfb=sfb, c=c)

    if p.work.groups_rows:
        ids = ids_of(p)
        for group in range(p.groups):
            rows = ids == group
            if bool(rows.any()):
                c = None if p.bias is None else p.bias[group]
                yield rows, of(p.a[rows], None if p.sfa is None else p.sfa[rows], group, c)
    elif p.work.may_be_empty:
        yield from _parts_along_k(p, ks)
    elif p.work.has_planes:
        for head in range(p.groups):
            c = None if p.c is None else p.c[head]
            yield head, of(p.a[head], None if p.sfa is None else p.sfa[head], head, c)
    else:
        yield ..., p


def _parts_along_k(p: Problem, ks: Sequence[int]) -> Iterator[Part]:
    first = block = 0
    for group, k in enumerate(ks):
        blocks = slice(block, block + ceil_div(k, SCALE_BLOCK))
        a, b = reference.depth_of(p.a, p.m, first, k), reference.depth_of(p.b, p.n, first, k)
        sfa, sfb = (None if p.sfb is None or sf is None else sf[:, blocks] for sf in (p.sfa, p.sfb))
        c = None if p.c is None else p.c[group]
        yield group, p._replace(a=a, sfa=sfa, b=b, sfb=sfb, c=c)
        first, block = first + k, blocks.stop


def ids_of(p: Problem) -> Tensor:
    """Return the group of each row, or -1 for none; with counts the shape is `[groups, rows]`."""
    if not p.work.has_planes:
        return p.ids
    is_row = torch.arange(p.m, device=p.c.device) < p.c[:, None]
    return torch.where(is_row, torch.arange(p.groups, device=p.c.device)[:, None], -1)


def right_and_allowed(
    p: Problem, how: How, config: Any = None, ks: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the right D, and the allowed error of each element, which is zero outside of all products.

    FP8 is compared with the reference, BF16 with FP64. `ks`: depths of groups along k instead of the problem's.
    """
    right = p.d.clone()
    if ks is None:
        ks = p.ks if p.ks is not None else p.ks_tensor.tolist() if p.ks_tensor is not None else ()
    if p.of_b is not None or p.work.groups_rows:
        reference.compute(p._replace(d=right))
    allowed = torch.full_like(right, torch.finfo(torch.float64).tiny, dtype=torch.float64)
    for place, part in parts_of(p, ks):
        if part.of_b is not None:
            d = torch.empty(part.m, part.n, dtype=right.dtype, device=right.device) if p.heads else right[place]
            if p.heads is not None:
                reference.compute(part._replace(d=d, heads=None, epilogue=TO_D))
            of_part = allowed_difference(part, d, partial_sums(how))
        elif p.epilogue.activates:
            of_part = of_activations(part, right[place], p.limit)
        else:
            slices = 0 if p.work.groups_rows else getattr(config, "slices", 1)
            right[place], of_part = exact_and_allowed(part, right.dtype, slices, units_of_step(how))
        if p.heads is None:
            allowed[place] = of_part
            continue
        write_heads(p._replace(d=allowed), of_part)
    return right, allowed


def of_activations(p: Problem, right: Tensor, limit: float | None) -> Tensor:
    """Return the allowed error of silu(gate) * up for exact sums: the error of the sigmoid."""
    exact = activated((p.a.double() @ p.b.double().mT).bfloat16(), Gating(limit=limit))
    low, high = ((exact * (1 + share)).to(right.dtype).double() for share in (-OF_SIGMOID, OF_SIGMOID))
    return torch.maximum((low - right).abs(), (high - right).abs()).clamp_min(torch.finfo(torch.float64).tiny)


def exact_and_allowed(p: Problem, dtype: torch.dtype, slices: int, of_step: float) -> tuple[Tensor, Tensor]:
    """Return D of BF16 operands in FP64, and the allowed error of its elements.

    The error has `of_step` units for each 16 of k, one for each slice, and one for C.
    """
    a, b = p.a.double(), p.b.double()
    exact, magnitudes = a @ b.mT, a.abs() @ b.mT.abs()
    if p.c is not None:
        exact, magnitudes = exact + p.c.double(), magnitudes + p.c.double().abs()
    roundings = ceil_div(p.a.shape[-1], 16) * of_step + slices + 2
    right = exact.to(dtype)
    return right, within_units(right, magnitudes * (roundings * FP32_UNIT))


def outcome(result: Result, right: Tensor, allowed: Tensor, tile: tuple[int, int] | None = None) -> Outcome:
    """Compare the D of a simulation with the right D."""
    d = result.buffers["d"]
    flat_d, flat_right, flat_allowed = (x.flatten(0, -2) for x in (d, right, allowed))
    return Outcome(d, right, allowed, describe_mistakes(flat_d, flat_right, flat_allowed, tile), result)


def compile_config(config: Any, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile a configuration's kernel for the host; `edits` replaces sources by name, for mutations."""
    return compiled(kernel_of(config), config, edits)


SOME = 0.02
"""The fraction of scales in words that `any_scales` replaces by extreme scales or NaN."""


def random_words(exponents: Tensor, generator: torch.Generator, any_scales: bool) -> Tensor:
    """Make words of these exponents, MN-major or not. NaN fills up a row's last word; no result may depend on it.

    `any_scales`: some exponents are extreme, or NaN.
    """
    if any_scales:
        others = torch.tensor([0, 1, 60, 180, 255], dtype=torch.uint8)
        some = torch.rand(exponents.shape, generator=generator, dtype=torch.float32) < SOME
        exponents = torch.where(some, others[torch.randint(0, 5, exponents.shape, generator=generator)], exponents)
    words = words_of(F.pad(exponents, (0, -exponents.shape[-1] % UE8M0_PER_WORD), value=NO_NUMBER))
    return words.mT.contiguous().mT if torch.rand((), generator=generator, dtype=torch.float32) < 0.5 else words


def draws(config: Config, seed: int) -> random.Random:
    """Return the random generator for problems of a configuration."""
    return random.Random(f"{config.name} {seed}")


def drawn_words(draw: random.Random, config: GemmConfig) -> Words:
    """Draw which operands' scales are words of UE8M0: none, unless some are finer than 128 columns and B is E4M3."""
    return Words(draw.randint(0, 3)) if config.parts > 1 and not config.converts_b else Words.NONE


def near_edge(draw: random.Random, block: int, multiple: int = 1, blocks: int = 2) -> int:
    """Draw a size of up to slightly more than `blocks` blocks, often exactly at the edge of a block or next to it."""
    beside = draw.choice((0, 0, multiple, -multiple, draw.randrange(block)))
    return max(align(draw.choice((0, *range(1, blocks + 1), 1)) * block + beside, multiple), multiple)


def sides(
    draw: random.Random, config: GemmConfig | DecodeConfig, *, blocks: int = 1, of_m: int = 1, of_n: int = 1
) -> tuple[int, int]:
    """Draw m and n, multiples of `of_m` and `of_n`, around the edges of the part that a cluster computes at a time."""
    if isinstance(config, DecodeConfig):
        rows, columns = config.block_tokens, config.block_n
    else:
        rows, columns = config.block_m * config.cluster_m, config.block_n * config.cluster_n
    return near_edge(draw, rows, of_m, blocks), near_edge(draw, columns, max(of_n, 4 if config.is_fp32 else 8), blocks)


def depth(draw: random.Random, config: GemmConfig | DecodeConfig) -> int:
    """Draw a k that an FP8 kernel supports. `fp8_gemm` needs whole runs of k-blocks, unless it has a tail."""
    if isinstance(config, DecodeConfig):
        blocks = draw.randint(1, 2 * config.cluster_k + config.num_stages)
    else:
        run = config.run_k_blocks
        most = run * config.cluster_k + 2
        blocks = draw.randint(1, most) if config.has_tail else run * draw.randint(1, -(-most // run))
    return blocks * BLOCK_K - draw.choice((0, 16 * draw.randrange(BLOCK_K // 16)))


def sizes(draw: random.Random, groups: int, most: int) -> list[int]:
    """Draw the sizes of groups: zero, small, around 64 and 128, and others."""
    return [min(draw.choice((0, 1, 3, 63, 65, 128, 129, draw.randint(0, most))), most) for _ in range(groups)]
