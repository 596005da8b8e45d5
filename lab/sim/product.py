"""A product in the simulator: its operands as buffers, the launch of its plan, and sizes for problems to draw."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.core.check.layout import UE8M0_PER_WORD, align, ceil_div
from deep_gemm.core.check.ue8m0 import NO_NUMBER, Words, words_of
from deep_gemm.core.kernel import Config, Kernel
from deep_gemm.gemm.config import BLOCK_K, GemmConfig
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.plan import Plan, addresses_of

from .launcher import How, Stage, is_on_gpu
from .library import HostKernel
from .rounding import EXACT_STEPS, TENSOR_CORES, UNITS_OF_STEP
from .simulate import Result


def partial_sums(how: How) -> float:
    """Give the share of an element's magnitudes by which its partial sums may be off."""
    return TENSOR_CORES if how.get("truncate") or is_on_gpu(how) else EXACT_STEPS


def units_of_step(how: How) -> float:
    """Give how many units of the magnitudes' sum a step of 16 along k may be off."""
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
    """Lay out a problem's operands, aligned to 16 bytes unless said otherwise; D, and `more`, are writable.

    `is_dependent`: the kernel ahead may still write them, but for those that are `ready`. `read`: further tensors, or
    others than the problem's.
    """
    in_place = p.c is not None and p.c.data_ptr() == p.d.data_ptr()
    operands = {name: getattr(p, name) for name in ("a", "b", "sfa", "sfb", "c") if name != "c" or not in_place}
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
    """D full of NaN, and C if there is one. D is random if it is C: `in_place`, or because the kernel adds to it."""
    d = torch.full(tuple(shape), float("nan"), dtype=torch.float32 if config.is_fp32 else torch.bfloat16)
    if isinstance(config, GemmConfig) and config.adds_to_d:
        return d, d.normal_(generator=generator)
    if not config.with_c:
        return d, None
    return d, d.normal_(generator=generator) if in_place else torch.randn(
        d.shape, generator=generator, dtype=torch.float32
    ).to(d.dtype)


def run_plan(
    kernel: HostKernel | None,
    of: Kernel[Any],
    config: Any,
    p: Any,
    plans_of: Callable[[Any, Any, int, Any], Plan | list[Plan]],
    stage: Stage,
) -> Result:
    """Launch a problem's plan, or several, where its operands lie."""
    k = p.a.shape[-1]
    if isinstance(config, GemmConfig) and not config.has_tail and ceil_div(k, BLOCK_K) % config.run_k_blocks:
        raise ValueError(f"k: expected runs of {config.run_k_blocks} k-blocks, as there is no code for a tail, got {k}")
    placed = stage.placed(p)
    found = plans_of(placed, config, stage.num_sms, stage.launcher(of, kernel, config))
    for plan in [found] if isinstance(found, Plan) else found:
        plan.launch(addresses_of(placed))
    return stage.result()


SOME = 0.02
"""The part of scales in words that is of any size, and of which some are no numbers."""


def random_words(exponents: Tensor, generator: torch.Generator, any_scales: bool) -> Tensor:
    """Give words of these exponents, MN-major or not, and NaN behind a row's last, which nobody is to look at.

    `any_scales`: some are of any size, or no numbers.
    """
    if any_scales:
        others = torch.tensor([0, 1, 60, 180, 255], dtype=torch.uint8)
        some = torch.rand(exponents.shape, generator=generator, dtype=torch.float32) < SOME
        exponents = torch.where(some, others[torch.randint(0, 5, exponents.shape, generator=generator)], exponents)
    words = words_of(F.pad(exponents, (0, -exponents.shape[-1] % UE8M0_PER_WORD), value=NO_NUMBER))
    return words.mT.contiguous().mT if torch.rand((), generator=generator, dtype=torch.float32) < 0.5 else words


def draws(config: Config, seed: int) -> random.Random:
    """Give what problems of a configuration are drawn by."""
    return random.Random(f"{config.name} {seed}")


def drawn_words(draw: random.Random, config: GemmConfig) -> Words:
    """Draw the sides of E4M3 whose scales are words, if any are fine."""
    return Words(draw.randint(0, 3)) if config.parts > 1 and not config.converts_b else Words.NONE


def near_edge(draw: random.Random, block: int, multiple: int = 1, blocks: int = 2) -> int:
    """Draw a size of up to so many blocks and a bit: often at the edge of a block, or beside it."""
    beside = draw.choice((0, 0, multiple, -multiple, draw.randrange(block)))
    return max(align(draw.choice((0, *range(1, blocks + 1), 1)) * block + beside, multiple), multiple)


def sides(
    draw: random.Random, config: GemmConfig | DecodeConfig, *, blocks: int = 1, of_m: int = 1, of_n: int = 1
) -> tuple[int, int]:
    """Draw m and n, multiples of `of_m` and `of_n`, around the edges of what a cluster computes at a time."""
    if isinstance(config, DecodeConfig):
        rows, columns = config.block_tokens, config.block_n
    else:
        rows, columns = config.block_m * config.cluster_m, config.block_n * config.cluster_n
    return near_edge(draw, rows, of_m, blocks), near_edge(draw, columns, max(of_n, 4 if config.is_fp32 else 8), blocks)


def depth(draw: random.Random, config: GemmConfig | DecodeConfig) -> int:
    """Draw a k that a kernel for FP8 has code for: of `fp8_gemm` runs of k-blocks, with a tail if it has one."""
    if isinstance(config, DecodeConfig):
        blocks = draw.randint(1, 2 * config.cluster_k + config.num_stages)
    else:
        run = config.run_k_blocks
        most = run * config.cluster_k + 2
        blocks = draw.randint(1, most) if config.has_tail else run * draw.randint(1, -(-most // run))
    return blocks * BLOCK_K - draw.choice((0, 16 * draw.randrange(BLOCK_K // 16)))


def sizes(draw: random.Random, groups: int, most: int) -> list[int]:
    """Draw the sizes of groups: none, few, around 64 and 128, and others."""
    return [min(draw.choice((0, 1, 3, 63, 65, 128, 129, draw.randint(0, most))), most) for _ in range(groups)]
