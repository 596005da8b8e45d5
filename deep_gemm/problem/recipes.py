"""Recipes: how many rows and columns share a scale, as callers state it."""

from __future__ import annotations

import torch

from .layout import PER_BLOCK, PER_ROW, RECIPE_1D1D, RECIPE_1D2D, SCALE_BLOCK, Recipe, recipe_numbers

Recipes = tuple[Recipe | None, Recipe | None, Recipe | None]
"""A caller's recipes: for both sides, for A alone, for B alone."""
NO_RECIPES: Recipes = (None, None, None)


def sfb_rows_of(recipes: Recipes) -> int:
    """Rows of B under one scale, from the recipe for both sides or the one for B."""
    if all(recipe is None for recipe in recipes):  # by identity: == of numpy arrays has no truth value
        return SCALE_BLOCK
    names = ("recipe", "recipe_a", "recipe_b")
    allowed = ((RECIPE_1D2D, RECIPE_1D1D), (PER_ROW,), (PER_ROW, PER_BLOCK))
    stated: list[tuple[int, ...] | None] = []
    for name, recipe in zip(names, recipes, strict=True):
        stated.append(None if recipe is None else recipe_numbers(name, recipe))
    for name, numbers, known in zip(names, stated, allowed, strict=True):
        if numbers is not None and numbers not in known:
            raise NotImplementedError(f"{name}: expected {' or '.join(map(str, known))}, got {numbers}")
    both, _, of_b = stated
    if both is None:
        return of_b[0] if of_b is not None else SCALE_BLOCK
    if of_b is not None and of_b[0] != both[1]:
        raise ValueError(f"recipe_b: expected what recipe {both} says, got {of_b}")
    return both[1]


def whole_recipe(recipes: Recipes) -> Recipe | None:
    """Give the one recipe that says what a caller's three say; None for the usual one."""
    return RECIPE_1D1D if sfb_rows_of(recipes) == 1 else None


def default_dtype(sfb_rows: int) -> torch.dtype:
    """Type of a D that the caller left out."""
    return torch.float32 if sfb_rows == 1 else torch.bfloat16
