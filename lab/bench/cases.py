"""The products to measure, as data: shapes, sizes of groups, and a lower limit of each product's time."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.gemm.choose import timings
from deep_gemm.gemm.config.tall import BLOCK_K

from .grid import ROOM, grid, grouped_grid

Shape = tuple[int, ...]

KINDS = ("dense", "dense_1d1d", "contiguous", "contiguous_uneven", "masked", "k_grouped")
FP4_DENSE = "fp4_dense"
FP4_KINDS = (FP4_DENSE, "fp4_masked", "fp4_contiguous")
"""Products with FP4 weights; fp4.py lists their cases. A shape has the form of the kind without "fp4_"."""
FINE_DENSE = "fine_dense"
FINE_KINDS = (FINE_DENSE, "fine_masked")
"""Products with scales below 128x128; fine.py lists their cases. A shape has the form of the kind without "fine_"."""
PEERS_FILE = Path(__file__).with_name("peers.json")
RESULTS_FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
PITCHED = (1536, 4096)
"""A weight that was used to try the cost model at several pitches; no file of times has it."""

# Sustained rate of FP8 WGMMA with operands resident in shared memory, on random data: H200, 700 W.
PEAK_TFLOPS = 1640
# Times of bulk copies from DRAM into shared memory with a cold L2: (MiB, us), on the same machine.
COLD_COPY_US = ((1, 2.4), (4, 3.6), (11, 5.7), (15, 6.9), (30, 12.1), (60, 21.4), (117, 37.0), (500, 124.6))

# Dense shapes for kinds that lack a tensorwise product: the dense times show the GPU's speed on that day.
ANCHOR, ANCHOR_SHORT_K = (4096, 4096, 7168), (4096, 7168, 2048)

# Sizes that occur in practice and suit no tile: m, n or k is not a multiple of 128.
ODD_SHAPES = (
    (7, 1040, 528),
    (77, 2128, 7184),
    (129, 520, 1040),
    (333, 4112, 4112),
    (1000, 1008, 3840),
    (3000, 2112, 7168),
    (4095, 7184, 2064),
    (4097, 4096, 7168),
)
# The peers were not measured at m = 2048.
UNKNOWN_TO_PEERS = (
    *((2048, n, 7168) for n in (2112, 4096, 576)),
    *((2048, 24576, 1536), (2048, 32768, 512), (2048, 7168, 16384), (2048, 7168, 2048)),
)

ROOM_FEW = 512
"""Rows that each group of a masked product with FP4 weights or fine scales has space for: enough for all cases."""

QUICK: dict[str, tuple[Shape, ...]] = {
    "dense": (
        (1, 576, 7168),
        (1, 7168, 16384),
        (16, 2112, 7168),
        (64, 24576, 1536),
        (128, 4096, 7168),
        (512, 7168, 16384),
        (1024, 7168, 2048),
        (4096, 576, 7168),
        ANCHOR,
        ANCHOR_SHORT_K,
        (4096, 7168, 16384),
        (8192, 8192, 8192),
    ),
    "dense_1d1d": ((4096, 7168, 4096),),
    "contiguous": ((8, 4096, 4096, 7168), (32, 256, 7168, 2048)),
    "contiguous_uneven": ((32, 2048, 4096, 7168), (8, 512, 7168, 2048)),
    "masked": ((32, 20, 4096, 7168), (32, 192, 7168, 2048)),
    "k_grouped": ((4, 7168, 2048, 8192),),
}


NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}


@dataclass(frozen=True)
class Case:
    """One product to measure. `peers.json` explains the numbers of `shape` for each kind."""

    kind: str
    shape: Shape
    sizes: tuple[int, ...] = ()
    """Rows of each group; for k_grouped, k of each group."""
    is_judged: bool | None = field(default=None, compare=False)
    """True: a case for judging, to which no choice was tuned; False: a case for tuning; None: a new shape."""

    @property
    def name(self) -> str:
        """Return a short name for tables."""
        text = "x".join(map(str, self.shape))
        return text if self.kind == "dense" else f"{self.kind} {text}"

    @property
    def fast_shape(self) -> Shape:
        """Return the dense shape whose fast cuBLASLt product this case is compared with: for groups, a fixed shape."""
        if self.kind == "dense":
            return self.shape
        short_k = self.kind != "k_grouped" and self.shape[-2:] == ANCHOR_SHORT_K[1:]
        return ANCHOR_SHORT_K if short_k else ANCHOR

    @property
    def output_is_fp32(self) -> bool:
        """Tell whether it is a weight gradient: it adds to an FP32 D, and each row's 128 columns have a scale."""
        return self.kind in ("dense_1d1d", "k_grouped")

    @property
    def is_fp4(self) -> bool:
        """Tell whether B is FP4."""
        return self.kind in FP4_KINDS

    @property
    def has_own_rivals(self) -> bool:
        """Tell whether it is compared with other products of the same weights, not with cuBLASLt's fast product."""
        return self.is_fp4 or self.kind in FINE_KINDS

    @property
    def operations(self) -> int:
        """Count the floating-point operations of the product: two for each multiplication."""
        m, n, k = self._mnk
        return 2 * m * n * k

    @property
    def bytes(self) -> int:
        """Count the bytes that must move at least once: operands with scales, and D (twice if it is added to)."""
        m, n, k = self._mnk
        k_blocks = ceil_div(k, BLOCK_K)
        a = m * (k + 4 * k_blocks)
        if self.output_is_fp32:
            outputs = len(self.sizes) or 1
            return a + n * (k + 4 * k_blocks) + outputs * m * n * 4 * 2
        weights = sum(1 for size in self.sizes if size) if self.sizes else 1
        if self.is_fp4:
            return a + weights * (n * k // 2 + n * ceil_div(k, 32)) + m * n * 2
        return a + weights * (n * k + 4 * ceil_div(n, 128) * k_blocks) + m * n * 2

    @property
    def floor_us(self) -> float:
        """Return a lower limit of the time."""
        return floor_of(self.operations, self.bytes)

    @property
    def max_m(self) -> int:
        """Return the rows that each group of a masked product has space for."""
        return ROOM_FEW if self.has_own_rivals else 1024 if self.shape[0] == 1 else ROOM

    @property
    def _mnk(self) -> tuple[int, int, int]:
        """Return the sizes of a dense product with the same work: the sum of the groups' rows, or of their k."""
        if self.kind in ("dense", "dense_1d1d", FP4_DENSE, FINE_DENSE):
            m, n, k = self.shape
            return m, n, k
        if self.kind == "k_grouped":
            return self.shape[1], self.shape[2], sum(self.sizes)
        return sum(self.sizes), self.shape[2], self.shape[3]


def floor_of(operations: float, num_bytes: float) -> float:
    """Return the longer of two times: that of the operations at peak rate, and that of a bulk copy of the bytes."""
    return max(operations / (PEAK_TFLOPS * 1e6), cold_copy_us(num_bytes))


def cold_copy_us(num_bytes: float) -> float:
    """Return the microseconds of a bulk copy with a cold L2, interpolated between the measured sizes.

    Beyond the largest size, the copy has the largest size's rate, 4.2 TB/s.
    """
    mib = num_bytes / (1 << 20)
    largest_mib, largest_us = COLD_COPY_US[-1]
    if mib >= largest_mib:
        return mib * largest_us / largest_mib
    above = next(i for i, (x, _) in enumerate(COLD_COPY_US) if mib <= x)
    (x0, y0), (x1, y1) = COLD_COPY_US[max(above, 1) - 1], COLD_COPY_US[max(above, 1)]
    return y0 + (mib - x0) * (y1 - y0) / (x1 - x0)


@cache
def all_cases() -> tuple[Case, ...]:
    """List the cases that choices were tuned to: `peers.json` in order, then shapes without a peer's time."""
    peers = json.loads(PEERS_FILE.read_text())
    found = dict.fromkeys(
        (row["kind"], tuple(row["shape"])) for session in peers["sessions"] for row in session["rows"]
    )
    known = [Case(kind, shape, sizes_of(kind, shape, peers["uneven_groups"]), is_judged=False) for kind, shape in found]
    return (*known, *(Case("dense", shape, is_judged=False) for shape in UNKNOWN_TO_PEERS + ODD_SHAPES))


@cache
def grid_cases() -> tuple[Case, ...]:
    """List cases of weights that no choice was tuned to; grid.py has the rule, and marks the cases for judging."""
    tuned_to = tuned_weights()
    return (
        *(Case("dense", each.shape, is_judged=each.is_judged) for each in grid(tuned_to)),
        *(
            Case(each.kind, each.shape, sizes_of(each.kind, each.shape, {}), each.is_judged)
            for each in grouped_grid(tuned_to)
        ),
    )


@cache
def tuned_weights() -> frozenset[Shape]:
    """Return the weights `(n, k)` of `all_cases`, and of the products that the cost model was fitted to on any GPU.

    gemm/choose/timings.json names the files of times of these products.
    """
    of_cases = {
        case.shape[1:] if case.kind in KINDS[:2] else case.shape[1:3] if case.kind == "k_grouped" else case.shape[2:]
        for case in all_cases()
    }
    made_by = str(json.loads(timings.FILE.read_text())["made_by"])
    files = (RESULTS_FOLDER / name for name in made_by.split() if name.endswith(".json"))
    rows = (row for file in files for row in json.loads(file.read_text())["rows"])
    return frozenset({*of_cases, PITCHED, *((row["n"], row["k"]) for row in rows if row["fitted"])})


def cases_of(
    command: str, *, quick: bool = False, shapes: Sequence[Shape] = (), is_judged: bool | None = None
) -> list[Case]:
    """Return the cases of `bench dense` or `bench grouped`.

    `shapes` selects cases; dense shapes may be new. `is_judged` selects one part. Grouped cases include the dense
    anchors for their comparison.
    """
    kinds = {"dense": KINDS[:2], "grouped": KINDS[2:]}.get(command, ())
    cases = [case for case in (*all_cases(), *grid_cases()) if case.kind in kinds]
    if is_judged is not None:
        cases = [case for case in cases if case.is_judged == is_judged]
    if shapes:
        cases = [case for shape in shapes for case in _asked_for(shape, cases, command)]
    elif quick:
        cases = [case for case in cases if case.shape in QUICK[case.kind]]
    if command == "grouped":
        anchors = {case.fast_shape for case in cases}
        cases = [case for case in all_cases() if case.kind == "dense" and case.shape in anchors] + cases
    return cases


def case_of(kind: str, shape: Shape, fitted: Collection[Shape]) -> Case:
    """Make a case of a kind with its own rivals; it is for judging unless `fitted` has its weight `(n, k)`."""
    return Case(kind, shape, sizes_of(kind.partition("_")[2], shape, {}), is_judged=shape[-2:] not in fitted)


def chosen_of(
    kind: str,
    every: Sequence[Case],
    few: Sequence[Shape],
    *,
    quick: bool = False,
    shapes: Sequence[Shape] = (),
    is_judged: bool | None = None,
) -> list[Case]:
    """Choose cases of a kind: all, the `few`, the judged or the tuned cases, or given shapes, which may be new."""
    known = {case.shape: case for case in every}
    length, meaning = (3, "(m, n, k)") if kind.endswith("_dense") else (4, "(groups, rows, n, k)")
    for shape in shapes:
        if len(shape) != length:
            raise ValueError(f"shapes: expected {meaning} for bench {kind}, got {shape}")
    if shapes:
        return [known.get(shape) or replace(case_of(kind, shape, ()), is_judged=None) for shape in shapes]
    chosen = [known[shape] for shape in few] if quick else every
    return [case for case in chosen if is_judged is None or case.is_judged == is_judged]


def parse_shapes(
    text: str, lengths: Sequence[int] = (3, 4), example: str = "64,2112,7168", least_last: int = 1, meaning: str = ""
) -> list[Shape]:
    """Read shapes like `m,n,k;m,n,k`. A shape has one of `lengths` numbers; the last one is at least `least_last`.

    `meaning`, if given, explains the numbers in errors.

    >>> parse_shapes("64,2112,7168; 4096,7168,2048")
    [(64, 2112, 7168), (4096, 7168, 2048)]
    """
    count = " or ".join(NUMBERS[length] for length in lengths)
    shapes = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        try:
            shape = tuple(int(number) for number in part.split(","))
        except ValueError:
            shape = ()
        if len(shape) not in lengths or min(*shape[:-1], shape[-1] + 1 - least_last) < 1:
            integers = "positive integers" if least_last else "integers (the last may be 0)"
            named = f" ({meaning})" if meaning else ""
            raise ValueError(f"shapes: expected {count} {integers} like {example}{named}, got {part!r}")
        shapes.append(shape)
    if not shapes:
        raise ValueError(f"shapes: expected at least one shape like {example}, got none")
    return shapes


def _asked_for(shape: Shape, cases: Iterable[Case], command: str) -> list[Case]:
    found = [case for case in cases if case.shape == shape]
    if command == "dense" and len(shape) != 3:
        raise ValueError(f"shapes: expected (m, n, k) for bench dense, got {shape}")
    if command == "dense" and not any(case.kind == "dense" for case in found):
        found.insert(0, Case("dense", shape))
    if not found:
        known = ", ".join(f"{case.kind} {','.join(map(str, case.shape))}" for case in cases)
        raise ValueError(f"shapes: {shape} is none of the grouped cases: {known}")
    return found


def sizes_of(kind: str, shape: Shape, uneven_groups: dict[str, list[int]]) -> tuple[int, ...]:
    """Return the sizes of the groups. `peers.json` states the rule, and lists the sizes of uneven groups."""
    if kind == "contiguous":
        return (shape[1],) * shape[0]
    if kind == "contiguous_uneven":
        return tuple(uneven_groups.get(f"{shape[0]}x{shape[1]}") or _zipf(shape[0], shape[1]))
    if kind == "k_grouped":
        return (shape[3],) * shape[0]
    if kind == "masked":
        generator = random.Random(1)
        return tuple(int(shape[1] * generator.uniform(0.7, 1.3)) for _ in range(shape[0]))
    return ()


def _zipf(groups: int, rows: int) -> list[int]:
    """Divide all rows by Zipf's law among groups in a random order, which is always the same.

    >>> _zipf(4, 50)
    [8, 6, 12, 24]
    """
    places = random.Random(f"{groups}x{rows}").sample(range(1, groups + 1), groups)
    ends, total = 0.0, sum(1 / place for place in places)
    cuts = [0]
    for place in places:
        ends += rows / place / total
        cuts.append(round(ends))
    return [end - begin for begin, end in pairwise(cuts)]
