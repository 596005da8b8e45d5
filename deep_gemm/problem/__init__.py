"""What is asked of a product: its operands and sizes. Every mistake of a caller is raised here, in words.

Each function takes what a caller passed and returns a checked problem: shapes agree, types and addresses suit the
kernels, the output exists and overlaps nothing that it must not. Nothing is written before all checks have passed.
"""

from .checks import Operand
from .dense import DenseProblem, check_ordinary_matrices, dense_problem
from .depths import KGroupedProblem, k_grouped_problem
from .recipes import NO_RECIPES, Recipes
from .rows import ContiguousProblem, MaskedProblem, contiguous_problem, masked_problem

__all__ = [
    "NO_RECIPES",
    "ContiguousProblem",
    "DenseProblem",
    "KGroupedProblem",
    "MaskedProblem",
    "Operand",
    "Recipes",
    "check_ordinary_matrices",
    "contiguous_problem",
    "dense_problem",
    "k_grouped_problem",
    "masked_problem",
]
