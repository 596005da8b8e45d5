"""The `fp8_gemm` kernel in the simulator, with the source, tensor maps and parameters of a GPU's launch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from deep_gemm.casts.fp8 import per_token_cast_to_fp8
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.layout import SCALE_BLOCK, UE8M0_PER_WORD, align, ceil_div
from deep_gemm.core.check.recipes import E2M1, MX, PER_BLOCK, PER_ROW, WHOLE, Scales
from deep_gemm.core.check.ue8m0 import FP32_MANTISSA_BITS, Words, words_of
from deep_gemm.core.kernel import Kernel
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM
from deep_gemm.gemm.kinds.works import DENSE
from deep_gemm.gemm.problem import Problem

from ..casts import cast_by_torch
from .product import ProductTrial, depth, drawn_words, draws, random_d_and_c, random_words, sides


def random_problem(config: GemmConfig | DecodeConfig, *sizes: Any, **more: Any) -> Problem:
    """Return the problem of a trial with these arguments."""
    return DenseTrial(config, *sizes, **more).problem()


def operands(
    config: GemmConfig | DecodeConfig,
    generator: torch.Generator,
    rows: tuple[int, ...],
    n: int,
    k: int,
    groups: tuple[int, ...] = (),
    *,
    any_scales: bool = False,
    words: Words = Words.NONE,
) -> tuple[Operand, Operand]:
    """Draw A `[*rows, k]` and B `[*groups, n, k]` for a configuration.

    `any_scales`: scales of an FP4 weight need not fold, and scales in words may be anything. `words`: the operands
    whose scales are words, if either operand has fine scales.
    """
    of_a, of_b = config.sfa or PER_ROW, config.sfb or PER_BLOCK
    x = torch.randn(*rows, k, generator=generator, dtype=torch.float32)
    # A single weight is drawn before the scales of A are varied, weights of groups after: old seeds keep their numbers.
    w = None if groups or config.b == E2M1 else torch.randn(n, k, generator=generator, dtype=torch.float32)
    if config.sfa == WHOLE:
        w = torch.randn(*groups, n, k, generator=generator, dtype=torch.float32) if w is None else w
        cast = [cast_by_torch(each, 1, k) for each in (x, w)]
        left, right = ((values, sf.repeat_interleave(2, -1)[..., :1]) for values, sf in cast)  # gaps between scales
        return left, right
    a, sfa = per_token_cast_to_fp8(x, gran_k=of_a.columns)
    sfa = varied(sfa, of_a, generator, Words.A in words, any_scales)
    if config.b == E2M1:
        packed = [random_packed(n, k, generator, any_scales) for _ in range(prod(groups))]
        b, sfb = (torch.stack(each) if groups else each[0] for each in zip(*packed, strict=True))
        return (a, sfa), (b, sfb)
    w = torch.randn(*groups, n, k, generator=generator, dtype=torch.float32) if w is None else w
    b, sfb = cast_by_torch(w, *of_b)
    return (a, sfa), (b.to(config.b.dtype), varied(sfb, of_b, generator, Words.B in words, any_scales))


def varied(scales: Tensor, of: Scales, generator: torch.Generator, in_words: bool, any_scales: bool) -> Tensor:
    """Return scales that `vary` has changed, or their exponents in words; scales of 128 vary only in words."""
    vary(scales, of, generator)
    if not in_words:
        return scales
    exponents = (scales.view(torch.int32) >> FP32_MANTISSA_BITS).to(torch.uint8)
    if of.columns == SCALE_BLOCK:
        exponents += torch.randint(0, 8, exponents.shape, generator=generator, dtype=torch.uint8)
    return random_words(exponents, generator, any_scales)


def vary(scales: Tensor, of: Scales, generator: torch.Generator) -> None:
    """Multiply fine scales by small factors, but in half of a tile's k-blocks keep scales equal along k."""
    if of.columns == SCALE_BLOCK:
        return
    scales *= torch.randint(1, 9, scales.shape, generator=generator)
    blocks, parts = ceil_div(SCALE_BLOCK, of.rows), SCALE_BLOCK // of.columns
    rows, groups = scales.shape[-2:]
    folds = torch.rand(ceil_div(rows, blocks), ceil_div(groups, parts), generator=generator, dtype=torch.float32) < 0.5
    folds = folds.repeat_interleave(blocks, 0)[:rows]
    folds |= torch.rand(folds.shape, generator=generator, dtype=torch.float32) < 0.5
    folds = folds.repeat_interleave(parts, 1)[:, :groups]
    first = scales[..., ::parts].repeat_interleave(parts, -1)[..., :groups]
    scales.copy_(torch.where(folds, first, scales))


def random_packed(n: int, k: int, generator: torch.Generator, any_scales: bool) -> tuple[Tensor, Tensor]:
    """Make an FP4 weight of all codes. Its scales are in words, and have a few different exponents.

    `any_scales`: in some groups of 32 rows of some groups of 128 rows, always in the first, some scales have any size.
    Single scales are NaN, the largest with zeros as values, near overflow, or the smallest (if k has several groups).
    In one of several k-blocks 32 rows have the smallest scales, and 32 rows the largest with zeros; each has a NaN.
    """
    values = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 130, (n, k // MX.columns), generator=generator, dtype=torch.uint8)
    if any_scales:
        others = torch.randint(70, 180, scales.shape, generator=generator, dtype=torch.uint8)
        likely = torch.ones(n, 1, dtype=torch.float32)
        for rows in (32, 128):
            some = torch.rand(ceil_div(n, rows), 1, generator=generator, dtype=torch.float32) < 0.6
            some[0] = True
            likely *= some.repeat_interleave(rows, 0)[:n]
        is_other = torch.rand(scales.shape, generator=generator, dtype=torch.float32) < 0.02 * likely
        scales = torch.where(is_other, others, scales)
        for scale in (0, 237, 254, 255):
            if scale > 0 or k > MX.columns:
                row = int(torch.randint(0, min(n, 128), (), generator=generator))
                group = int(torch.randint(0, scales.shape[1], (), generator=generator))
                scales[row, group] = scale
                if scale == 254:
                    values.view(n, -1, 16)[row, group] &= 0x88
        if k >= 2 * SCALE_BLOCK:
            block = 4 * int(torch.randint(0, k // SCALE_BLOCK, (), generator=generator))
            for least in (0, 251):
                row = int(torch.randint(0, n, (), generator=generator))
                part = slice(row // 32 * 32, row // 32 * 32 + 32), slice(block, block + 4)
                near = torch.randint(least, least + 4, (32, 4), generator=generator).byte()
                scales[part] = near[: n - row // 32 * 32]
                scales[row, block] = 255
                if least > 0:
                    values.view(n, -1, 16)[part] &= 0x88
    behind = torch.full((n, -scales.shape[1] % UE8M0_PER_WORD), 255, dtype=torch.uint8)  # padding
    return values, words_of(torch.cat([scales, behind], 1))


@dataclass(frozen=True)
class DenseTrial(ProductTrial):
    """One product."""

    kernel: ClassVar[Kernel[Any]] = FP8_GEMM
    config: GemmConfig | DecodeConfig
    m: int = 200
    n: int = 336
    k: int = 896
    seed: int = 0
    schedule: str | None = None
    in_place: bool = False
    """True: D is also C."""
    is_dependent: bool = False
    any_scales: bool = False
    """Scales of an FP4 weight need not fold, and scales in words may be anything."""
    words: Words = Words.NONE
    """Operands whose scales are words, if either operand has fine scales."""

    @classmethod
    def takes(cls, config: GemmConfig | DecodeConfig) -> bool:
        """Accept products that are not grouped and write all columns of D."""
        return config.work is DENSE and not (config.epilogue.skips_mid or config.epilogue.sums_blocks)

    @classmethod
    def drawn(cls, config: GemmConfig, seed: int) -> DenseTrial:
        """Draw sizes around a tile's edges."""
        draw = draws(config, seed)
        of_sides, k = sides(draw, config, blocks=2), depth(draw, config)
        words = drawn_words(draw, config)
        return cls(
            config,
            *of_sides,
            align(k, MX.columns) if config.converts_b else k,
            seed,
            in_place=config.with_c and not config.is_fp32 and draw.random() < 0.5,
            is_dependent=draw.random() < 0.5,
            any_scales=(config.converts_b or words != Words.NONE) and draw.random() < 0.5,
            words=words,
            num_sms=config.cluster_size * draw.randint(1, 3),
        )

    def operands(self, generator: torch.Generator) -> tuple[Operand, Operand]:
        """Draw A and B."""
        kinds: dict[str, Any] = {"any_scales": self.any_scales, "words": self.words}
        return operands(self.config, generator, (self.m,), self.n, self.k, **kinds)

    def problem(self) -> Problem:
        """Draw random matrices. D is NaN, unless it is also C (`in_place` or `adds_to_d`)."""
        generator = torch.Generator().manual_seed(self.seed)
        a, b = self.operands(generator)
        d, c = random_d_and_c(self.config, (self.m, self.n), generator, self.in_place)
        recipes = None, self.config.sfa, self.config.sfb
        return dense_problem(a, b, d, c, recipes=recipes)._replace(epilogue=self.config.epilogue)
