"""Explain why a kernel was chosen: list every tile of a product, its estimated time, and why it was not chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

import torch

from ..core.check import checks
from ..core.check.layout import Recipe
from ..core.check.numbers import integer_in_range
from ..core.check.recipes import E2M1, E4M3, MX, PER_ROW, WHOLE, Recipes, default_dtype, scales_of, scales_of_b, taken
from ..core.gpu import GPUS, H200, Gpu, gpu_of
from . import packed
from .ask.depths import check_depths_recipe
from .choose.cost import Estimate, bytes_of_weight, estimate, row_bytes
from .choose.fp8 import chosen_tile, menu_of, tiles_for_rows
from .choose.tiles import DEPTHS_TILES, SHARING_A, tiles_for
from .choose.timings import timings_of
from .kinds.output import Output, Sizes
from .kinds.works import COUNTS, DENSE, DEPTHS, ENDS, HEADS, IDS

GROUPS = {work.name: work for work in (IDS, ENDS, COUNTS, DEPTHS, HEADS)}
"""Kinds of groups, by their names."""
WIDTH = 80
LEGEND = (
    "A tile is rows x columns of D. /m2, /n2: pairs of CTAs share B, or A; /k3: three split k; 2/SM: the decode "
    "kernel, two CTAs on an SM, columns x rows. In a round each SM computes a tile. Total and bar: the launch, and "
    "multiplying and memory, which overlap; by ids at least the time to find groups. A weight has a menu of a few "
    "tiles for all m, so that few kernels are compiled and kept."
)


@dataclass(frozen=True)
class Question:
    """A product, described by all that decides which configuration is chosen."""

    m: int
    n: int
    k: int
    output: Output
    num_groups: int
    gpu: Gpu

    @property
    def sizes(self) -> Sizes:
        """Sizes, in the form that the choice needs."""
        rows = self.m / self.num_groups if self.output.work.is_stacked else self.m
        return Sizes(rows, self.n, self.k, self.num_groups)

    def candidates(self) -> list[Estimate]:
        """List all candidates, the best first; candidates that cannot run the product come last."""
        output, work, timings = self.output, self.output.work, timings_of(self.gpu)
        tiles = (*DEPTHS_TILES, SHARING_A) if work.is_along_k else tiles_for(output)
        tiles = tuple(tiles_for_rows(output, self.sizes.m)) if work.groups_rows else tiles
        estimates = [estimate(tile, self.sizes, output, self.gpu, timings) for tile in tiles]
        found = [one._replace(config=one.tile.config(output, self.k)) for one in estimates]
        return sorted(found, key=lambda candidate: candidate.cost_us)

    def megabytes(self) -> float:
        """Count megabytes that move between DRAM and the SMs: A, B, D, and C if it is added."""
        m, n, k = self.m, self.n, self.k
        weight, of_row = bytes_of_weight(n, k, self.output), row_bytes(n, k, self.output)
        if self.output.work.groups_rows:
            rows = self.sizes.m
            return self.num_groups * (min(rows, 1.0) * weight + rows * of_row) / 1e6
        return self.num_groups * (weight + m * of_row) / 1e6

    def title(self) -> str:
        """Describe the product in words."""
        d_type = "FP32" if self.output.is_fp32 else "BF16"
        by_row = ", a scale for each row of B" if self.output.sfb == PER_ROW else ""
        fine = [f"{side.rows}x{side.columns}" for side in (self.output.sfa, self.output.sfb) if side is not None]
        by_row = f", scales of {' by '.join(fine)}" if self.output.parts > 1 else by_row
        by_row = ", a scale for each whole row" if self.output.sfb == WHOLE else by_row
        scales = ", B is FP4" if self.output.b == E2M1 else by_row
        addition = ", added to D" if self.output.adds_to_d else ", C added" if self.output.with_c else ""
        sizes = f"{self.m} x {self.n} x {self.k}"
        work = self.output.work
        if work.is_along_k:
            sizes = f"{self.num_groups} groups of {self.m} x {self.n}, {self.k} deep on average"
        elif work.is_stacked:
            sizes = f"{self.m} rows in {self.num_groups} groups, by {self.n} x {self.k}"
        elif work.groups_rows:
            sizes = f"{self.num_groups} groups of about {self.m} rows, by {self.n} x {self.k}"
        elif work.has_planes:
            sizes = f"{self.num_groups} heads of {sizes}"
        return f"{sizes}, {d_type}{scales}{addition}"


def explain(
    m: int,
    n: int,
    k: int,
    d_dtype: torch.dtype | None = None,
    *,
    with_c: bool = False,
    accumulate: bool = False,
    recipe: Recipe | None = None,
    recipe_a: Recipe | None = None,
    recipe_b: Recipe | None = None,
    groups: str | None = None,
    num_groups: int = 1,
    gpu: str | None = None,
    fp4: bool = False,
) -> list[Estimate]:
    """Print and return every candidate for a product, best first, with its estimated time and why it lost.

    - `with_c`: C is another tensor, which is added; `accumulate`: C is D itself.
    - `recipe`, `recipe_a`, `recipe_b`: as for the products; (1, 0) for both sides means one scale for each whole row.
    - `groups`: "ids" or "ends" for `m` stacked rows of `num_groups` groups, "counts" for groups of about `m` rows each
      ("masked"), "heads" for products of `m` rows each (`fp8_einsum`), "depths" for groups along k that are `k` deep on
      average.
    - `gpu`: "H200", "H100" or "H20"; None means the current GPU, or, without one, an H200.
    - `fp4`: B is FP4 (MXFP4) with scales in bytes or words, as for `fp8_fp4_gemm_nt`.

    >>> explain(4096, 7168, 2048)[0].config.name  # doctest: +SKIP
    '256x128 bf16'
    """
    recipes = recipe, recipe_a, recipe_b
    question = asked(m, n, k, d_dtype, with_c, accumulate, recipes, groups, num_groups, gpu, fp4)
    found, choice = question.candidates(), chosen_tile(question.sizes, question.output, question.gpu)
    chosen = next(candidate for candidate in found if candidate.tile == choice)
    print("\n".join(_page(question, found, chosen)))
    return found


def asked(
    m: int,
    n: int,
    k: int,
    d_dtype: torch.dtype | None,
    with_c: bool,
    accumulate: bool,
    recipes: Recipes,
    groups: str | None,
    num_groups: int,
    gpu: str | None,
    fp4: bool = False,
) -> Question:
    """Check the arguments of `explain` under the names of the products' arguments."""
    kinds = {name: work for name, work in GROUPS.items() if not fp4 or work.groups_rows}
    if groups is not None and (not isinstance(groups, str) or groups not in kinds):
        raise ValueError(f"groups: expected {', '.join(kinds)} or None, got {groups!r}")
    kind = DENSE if groups is None else kinds[groups]
    sizes = (("m", m), ("n", n), ("k", k), ("num_groups", num_groups))
    m, n, k, num_groups = (integer_in_range(name, size, 1) for name, size in sizes)
    if kind.is_along_k:
        check_depths_recipe(recipes[0])
        _, of_a, of_b = recipes
        for side, scales in zip("ab", scales_of((None, of_a or PER_ROW, of_b or PER_ROW)), strict=True):
            if scales != PER_ROW:
                expected, got = (f"({x.rows}, {x.columns})" for x in (PER_ROW, scales))
                raise NotImplementedError(f"recipe_{side}: expected {expected} for a k-grouped product, got {got}")
    if fp4:
        packed.scales_beside(recipes)
        packed.whole_groups("k", k)
    sfa, sfb = PER_ROW, MX if fp4 else PER_ROW
    if kind is HEADS:
        sfb = scales_of_b(recipes)
    elif not kind.is_along_k and not fp4:
        sfa, sfb = taken(*scales_of(recipes))
    if with_c and accumulate:
        raise ValueError("accumulate: expected C to be D itself or, with_c, another tensor, got both")
    dtype = d_dtype or (torch.bfloat16 if fp4 else default_dtype(sfb))
    needs_fp32 = kind.is_along_k and (with_c or accumulate)
    allowed = (torch.float32,) if needs_fp32 else checks.OUTPUT_TYPES
    if dtype not in allowed:
        raise ValueError(f"d_dtype: expected {' or '.join(map(str, allowed))}, got {dtype}")
    if (with_c or accumulate) and kind.groups_rows:
        raise ValueError(f"groups: expected no C for groups of rows ({groups}), got one")
    if num_groups > 1 and kind is DENSE:
        raise ValueError(f"num_groups: expected 1 without groups, got {num_groups}")
    checks.columns(n, dtype)
    checks.depth(k)
    is_fp32, b = dtype == torch.float32, E2M1 if fp4 else E4M3
    with_c, adds_to_d = with_c or (accumulate and not is_fp32), accumulate and is_fp32
    output = Output(is_fp32=is_fp32, with_c=with_c, adds_to_d=adds_to_d, b=b, sfa=sfa, sfb=sfb, work=kind)
    return Question(m, n, k, output, num_groups, _gpu_asked_for(gpu))


def _page(question: Question, found: Sequence[Estimate], chosen: Estimate) -> list[str]:
    """Return the lines to print, at most 80 columns wide."""
    gpu = question.gpu
    rounds = "1 round" if chosen.rounds == 1 else f"{_number(chosen.rounds)} rounds"
    sentence = (
        f"On an {gpu.name} with {gpu.num_sms} SMs {chosen.tile.name} moves {question.megabytes():.1f} MB in "
        f"{chosen.memory_us:.1f} us and multiplies {_number(chosen.tiles)} tiles in {rounds} in "
        f"{chosen.multiply_us:.1f} us; with the launch that takes about {chosen.cost_us:.1f} us."
    )
    able = [candidate for candidate in found if candidate.why_not is None]
    shown = able
    if question.output.work is DENSE:  # only dense products have a menu
        menu = menu_of(question.n, question.k, question.output, question.gpu)
        tiles = {chosen.tile, *(offer.tile for offer in menu.offers)}
        shown = [candidate for candidate in able if candidate.tile in tiles]
    others = [candidate for candidate in able if candidate not in shown]
    width = max(13, *(len(candidate.tile.name) for candidate in found))
    cheaper = others and others[0].cost_us < chosen.cost_us
    less = f"; {others[0].tile.name} would take {others[0].cost_us:.1f} us" if cheaper else ""
    reasons = Counter(candidate.why_not for candidate in found if candidate.why_not is not None)
    return [
        *wrap(question.title(), WIDTH),
        *wrap(sentence, WIDTH),
        "",
        f"{'tile':{width}} {'tiles':>6} {'rounds':>6} {'multiply':>8} {'memory':>7} {'total us':>8}",
        *_lines(shown, chosen, width),
        *([f"{len(others)} more are not on the menu of this weight{less}"] if others else ()),
        *(f"{count} more cannot run it: {reason}" for reason, count in reasons.items()),
        "",
        *wrap(LEGEND, WIDTH),
    ]


def _lines(shown: Sequence[Estimate], chosen: Estimate, width: int) -> list[str]:
    """Return a line for each candidate, with a bar for its total; the longest bar fills the 80 columns."""
    texts = [
        f"{one.tile.name:{width}} {_number(one.tiles):>6} {_number(one.rounds):>6} "
        f"{one.multiply_us:>8.1f} {one.memory_us:>7.1f} {one.cost_us:>8.1f}  "
        for one in shown
    ]
    verdicts = [_verdict(one, chosen) for one in shown]
    room = max(WIDTH - 1 - max(map(len, texts)) - max(map(len, verdicts)), 0)
    us = [one.cost_us for one in shown]
    bars = [_bar(round(8 * room * each / max(us))).ljust(room) for each in us]
    return [f"{text}{bar} {verdict}" for text, bar, verdict in zip(texts, bars, verdicts, strict=True)]


def _bar(eighths: int) -> str:
    """Draw a bar; its length is in eighths of a column.

    >>> _bar(20)
    '██▌'
    """
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _verdict(candidate: Estimate, chosen: Estimate) -> str:
    if candidate is chosen:
        return "chosen"
    times = candidate.cost_us / chosen.cost_us
    return f"{times:.1f} times" if times >= 2 else f"{times - 1:.0%} more" if times >= 1 else f"{1 - times:.0%} less"


def _number(value: float) -> str:
    """Format a count; an expected count below 100 has one decimal.

    >>> _number(3), _number(2.46), _number(1234.5)
    ('3', '2.5', '1234')
    """
    return f"{value:.0f}" if value == int(value) or value >= 100 else f"{value:.1f}"


def _gpu_asked_for(name: str | None) -> Gpu:
    if name is None:
        return gpu_of(torch.cuda.current_device()) if torch.cuda.is_available() else H200
    gpu = next((gpu for gpu in GPUS if gpu.name == name), None)
    if gpu is None:
        raise ValueError(f"gpu: expected {', '.join(gpu.name for gpu in GPUS)} or None, got {name!r}")
    return gpu
