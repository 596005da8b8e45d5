"""Requests for products: their operands and sizes. Every mistake of a caller is raised here, in words.

Each function takes what a caller passed and returns a checked problem: shapes agree, types and addresses suit the
kernels, the output exists and overlaps nothing that it must not. Nothing is written before all checks have passed.
"""

from .activation import ActivationProblem, activation_problem, check_counts
from .checks import Operand, cuts_gradient
from .dense import DenseProblem, check_ordinary_matrices, dense_problem, no_alpha
from .depths import KGroupedProblem, k_grouped_problem
from .experts import ExpertsProblem, experts_problem
from .heads import HeadsProblem, heads_problem
from .linear import LinearProblem, linear_problem
from .recipes import NO_RECIPES, Recipes
from .routing import ExpertRows, check_gather, check_routes, check_weighted
from .rows import ContiguousProblem, MaskedProblem, contiguous_problem, masked_problem
from .rows_silu import SiluRowsProblem, silu_rows_problem
from .skip_head_mid import HeadParts, SkipProblem, skip_problem

__all__ = [
    "NO_RECIPES",
    "ActivationProblem",
    "ContiguousProblem",
    "DenseProblem",
    "ExpertRows",
    "ExpertsProblem",
    "HeadParts",
    "HeadsProblem",
    "KGroupedProblem",
    "LinearProblem",
    "MaskedProblem",
    "Operand",
    "Recipes",
    "SiluRowsProblem",
    "SkipProblem",
    "activation_problem",
    "check_counts",
    "check_gather",
    "check_ordinary_matrices",
    "check_routes",
    "check_weighted",
    "contiguous_problem",
    "cuts_gradient",
    "dense_problem",
    "experts_problem",
    "heads_problem",
    "k_grouped_problem",
    "linear_problem",
    "masked_problem",
    "no_alpha",
    "silu_rows_problem",
    "skip_problem",
]
