"""Recipes: with a recipe, a caller states how many rows and how many columns share a scale."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from .layout import RECIPES, RECIPES_OF_A, RECIPES_OF_B, SCALE_BLOCK, Recipe, either, recipe_numbers

Recipes = tuple[Recipe | None, Recipe | None, Recipe | None]
"""A caller's recipes: for both operands, for A only, for B only."""
NO_RECIPES: Recipes = (None, None, None)


class Scales(NamedTuple):
    """A way to scale an operand: `rows` rows and `columns` columns share a scale."""

    rows: int
    columns: int


class Values(NamedTuple):
    """A format of numbers: its name in PTX, its bits, and the type of tensors that hold such numbers."""

    name: str
    bits: int
    exponent_bits: int
    dtype: torch.dtype


VALUES = E4M3, E2M1, BFLOAT16 = (
    Values("e4m3", 8, 4, torch.float8_e4m3fn),
    Values("e2m1", 4, 2, torch.uint8),  # FP4: two values in a byte
    Values("bf16", 16, 8, torch.bfloat16),  # without scales
)
PER_ROW = Scales(1, SCALE_BLOCK)
"""A scale for 128 columns of each row: usual for A; for A and B ("1D1D") in gradients of weights."""
PER_BLOCK = Scales(SCALE_BLOCK, SCALE_BLOCK)
"""A scale for each 128x128 block: usual for B ("1D2D")."""
PER_64 = Scales(1, 64)
"""A scale for 64 columns of each row: a product with an activation makes these scales for the rows that it writes."""
MX = Scales(1, 32)
"""A scale for 32 columns of each row: for FP4 (powers of two in UE8M0) and for MXFP8."""
WHOLE, TENSOR = Scales(1, 0), Scales(0, 0)
"""A scale for all columns of each row, and a scale for a whole tensor. 0 means "all"."""
_KNOWN = RECIPES, (*RECIPES_OF_A, (1, 0), (0, 0)), (*RECIPES_OF_B, (1, 0), (0, 0))
BLOCKS_OF_32, BLOCKS_OF_64 = Scales(32, 32), Scales(64, 64)
"""Blocks of B that are finer than the usual 128x128."""
USUAL = PER_ROW, PER_BLOCK
"""The scales of A and of B if the caller states no recipe."""
FOR_ROWS_OF_B = "; recipe=(1, 1, 128) takes a scale for each row"


def scales_of(recipes: Recipes, finest: int = 0) -> tuple[Scales, Scales]:
    """Return the scales of A and of B that a caller states. Refuse scales of fewer columns than `finest`."""
    if all(recipe is None for recipe in recipes):  # by `is`, because == of numpy arrays has no truth value
        return USUAL
    names = ("recipe", "recipe_a", "recipe_b")
    stated: list[tuple[int, ...] | None] = []
    for name, recipe in zip(names, recipes, strict=True):
        stated.append(None if recipe is None else recipe_numbers(name, recipe))
    for name, numbers, known in zip(names, stated, _KNOWN, strict=True):
        allowed = [each for each in known if each[-1] >= finest]
        if numbers is not None and numbers not in allowed:
            raise NotImplementedError(f"{name}: expected {either(allowed)}, got {numbers}")
    both, *sides = stated
    if both is None:
        of_a, of_b = (usual if side is None else Scales(*side) for usual, side in zip(USUAL, sides, strict=True))
        return of_a, of_b
    whole = Scales(both[0], both[2]), Scales(both[1], both[2])
    for name, side, expected in zip(names[1:], sides, whole, strict=True):
        if side is not None and side != expected:
            raise ValueError(f"{name}: expected agreement with recipe {both}, got {side}")
    return whole


@cache
def taken(of_a: Scales, of_b: Scales) -> tuple[Scales, Scales]:
    """Return the scales that kernels read. If only one operand has a scale for all of k, it is repeated along k."""
    if not of_a.columns and not of_b.columns:
        return WHOLE, WHOLE
    repeated = PER_ROW if of_b.rows else PER_BLOCK
    return of_a if of_a.columns else PER_ROW, of_b if of_b.columns else repeated


def scales_of_b(recipes: Recipes) -> Scales:
    """Return the scales of B that a caller states, for a product whose B has scales of 128x128 blocks or of rows."""
    return scales_of(recipes, SCALE_BLOCK)[1]


def whole_recipe(recipes: Recipes) -> Recipe | None:
    """Merge a caller's recipes into one: None for the usual scales, four numbers if the operands' columns differ."""
    of_a, of_b = found = scales_of(recipes)
    if found == USUAL:
        return None
    return (of_a.rows, *of_b) if of_a.columns == of_b.columns > 0 else (*of_a, *of_b)


def recipes_of(recipe: Recipe | None) -> Recipes:
    """Return the three recipes that `whole_recipe` merged. Of four numbers, the first two are A's, the last two B's."""
    if recipe is not None and len(recipe) == 4:
        return None, recipe[:2], recipe[2:]
    return recipe, None, None


def default_dtype(of_b: Scales) -> torch.dtype:
    """Return the type of D if the caller passes no D."""
    return torch.float32 if of_b.rows == 1 and of_b != WHOLE else torch.bfloat16
