"""Shapes of many models that no choice was tuned to: one part for fitting, the rest for judging the fit.

The rule for dense shapes, stated only here:

- Weights `[n, k]` are the weights of one of 1, 2, 4 or 8 ranks of each model in `cli/models.py` and of the dense
  models below, experts' weights included, each once. Numbers of ranks that cannot share a model are left out.
  Weights of `cases.all_cases`, and weights that the cost model was fitted to, are left out: choices were tuned to them.
- Every other weight, in order of bytes, is used with three values of m, seven positions apart in `MS`. The next
  weight starts one position later, so that small and large weights meet every m. Products above `MOST_OPERATIONS`
  are left out. Every fifth used weight is for fitting, with all three m; the rest are only for judging.

The rule for groups:

- Weights `[n, k]` are FP8 weights of experts of each model in `cli/models.py`. Either 1, 8 or 32 ranks share out whole
  experts, or each of 2, 4 or 8 ranks has a part of every expert. Weights that choices were tuned to are left out.
- Every other weight, in order of bytes, is used with three kinds of groups, whose average rows are five positions
  apart in `ROWS`; the next weight starts with the next kind, one position later. Products above `MOST_OPERATIONS`
  are left out, and products whose largest tensor exceeds `MOST_BYTES`.
- Every fifth used weight is for fitting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from deep_gemm.cli.models import BLOCK, MODELS, Grouped, Weight, blocks_shared
from deep_gemm.core.check.layout import align

MS = (1, 3, 7, 16, 24, 48, 80, 128, 150, 200, 320, 500, 700, 1000, 1500, 2300, 3000, 4096, 5000, 8192)
RANKS = (1, 2, 4, 8)
EVERY = 2
"""Every other one of the sorted weights is used."""
MS_OF_A_WEIGHT, MS_APART = 3, 7
FITTED_EVERY = 5
MOST_OPERATIONS = 2e12
"""The FP64 check of a product with more operations would take a large part of the run."""
MOST_BYTES = 8 << 30
ROOM = 4096
"""Rows that each group of a masked product has space for."""
GROUPED_KINDS = ("contiguous", "contiguous_uneven", "masked", "k_grouped")
ROWS = (2, 5, 12, 24, 50, 100, 180, 300, 500, 800, 1300, 2500)
"""Average rows of each group; for groups along k, the average depth, rounded to at least one whole block."""
EXPERT_RANKS, WIDTH_RANKS = (1, 8, 32), (2, 4, 8)


class DenseModel(NamedTuple):
    """A model without experts."""

    hidden: int
    attention: Grouped
    mlp_width: int

    def weights(self, tp: int) -> Iterator[Weight]:
        """Yield the weights of a layer for one of `tp` ranks."""
        yield from self.attention.weights(self.hidden, tp)
        width = blocks_shared("width of a layer", self.mlp_width, tp)
        yield Weight("gate and up", 2 * width, self.hidden)
        yield Weight("down", self.hidden, width)


# Sizes from the `config.json` of each model.
DENSE_MODELS = {
    "Qwen/Qwen3-0.6B": DenseModel(1024, Grouped(16, 8, 128), 3072),
    "Qwen/Qwen3-1.7B": DenseModel(2048, Grouped(16, 8, 128), 6144),
    "Qwen/Qwen3-4B": DenseModel(2560, Grouped(32, 8, 128), 9728),
    "Qwen/Qwen3-8B": DenseModel(4096, Grouped(32, 8, 128), 12288),
    "Qwen/Qwen3-14B": DenseModel(5120, Grouped(40, 8, 128), 17408),
    "Qwen/Qwen3-32B": DenseModel(5120, Grouped(64, 8, 128), 25600),
    "meta-llama/Llama-3.1-8B": DenseModel(4096, Grouped(32, 8, 128), 14336),
    "meta-llama/Llama-3.1-70B": DenseModel(8192, Grouped(64, 8, 128), 28672),
}


class GridShape(NamedTuple):
    """One shape, and whether it is for judging or for fitting."""

    shape: tuple[int, int, int]
    is_judged: bool


def grid(tuned_to: Collection[tuple[int, ...]]) -> list[GridShape]:
    """List the shapes whose weights `[n, k]` are not in `tuned_to`."""
    found = []
    for place, (n, k) in enumerate([each for each in all_weights() if each not in tuned_to][::EVERY]):
        for turn in range(MS_OF_A_WEIGHT):
            m = MS[(place + MS_APART * turn) % len(MS)]
            if 2 * m * n * k <= MOST_OPERATIONS:
                found.append(GridShape((m, n, k), is_judged=place % FITTED_EVERY != 0))
    return found


class GroupedShape(NamedTuple):
    """Groups of one kind. `cases.Case` explains the numbers of `shape` for each kind."""

    kind: str
    shape: tuple[int, ...]
    is_judged: bool


def grouped_grid(tuned_to: Collection[tuple[int, ...]]) -> list[GroupedShape]:
    """List the grouped shapes whose weights `[n, k]` are not in `tuned_to`."""
    found = []
    weights = [each for each in expert_weights() if each[1:] not in tuned_to]
    for place, (groups, n, k) in enumerate(weights[::EVERY]):
        for turn in range(MS_OF_A_WEIGHT):
            kind = GROUPED_KINDS[(place + turn) % len(GROUPED_KINDS)]
            rows = ROWS[(place + 5 * turn) % len(ROWS)]
            if kind == "contiguous_uneven":
                shape = (groups, groups * rows, n, k)
            elif kind == "k_grouped":
                rows = align(rows, BLOCK)
                shape = (groups, n, k, rows)
            else:
                shape = (groups, rows, n, k)
            of_one = {"k_grouped": 4 * n * k, "masked": 2 * ROOM * n}.get(kind, n * k)
            if 2 * groups * rows * n * k <= MOST_OPERATIONS and groups * of_one <= MOST_BYTES:
                found.append(GroupedShape(kind, shape, is_judged=place % FITTED_EVERY != 0))
    return found


def expert_weights() -> list[tuple[int, int, int]]:
    """List the sizes `(groups, n, k)` of all models' FP8 weights of experts, in order of bytes."""
    found = {
        (weight.num_groups, weight.n, weight.k)
        for model in MODELS.values()
        for tp, ep in (*((1, ep) for ep in EXPERT_RANKS), *((tp, 1) for tp in WIDTH_RANKS))
        for weight in _shared_weights(lambda ranks, model=model, tp=tp: model.weights(tp, ranks), ep)  # type: ignore[misc]
        if weight.groups == "ids" and not weight.is_fp4
    }
    return sorted(found, key=lambda each: (each[0] * each[1] * each[2], each))


def all_weights() -> list[tuple[int, int]]:
    """List the sizes `(n, k)` of all models' FP8 weights, in order of bytes."""
    found = {
        (weight.n, weight.k)
        for weights_of in (each.weights for models in (MODELS, DENSE_MODELS) for each in models.values())
        for tp in RANKS
        for weight in _shared_weights(weights_of, tp)
        if not (weight.is_bf16 or weight.is_fp4) and weight.groups != "heads"
    }
    return sorted(found, key=lambda each: (each[0] * each[1], each))


def _shared_weights(weights_of: Callable[[int], Iterator[Weight]], tp: int) -> list[Weight]:
    try:
        return list(weights_of(tp))
    except ValueError:  # `tp` ranks cannot share this model
        return []
