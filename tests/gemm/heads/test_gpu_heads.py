"""Products of heads on a GPU: all forms, operands in callers' layouts, graphs, repeated calls."""

from __future__ import annotations

import pytest
import torch
from helpers import captured, framed, random_fp8, random_scales
from torch import Tensor

from deep_gemm import fp8_einsum, get_mn_major_tma_aligned_tensor, set_num_sms
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.layout import RECIPE_1D1D, RECIPE_1D2D, Recipe, ceil_div
from deep_gemm.gemm import reference
from deep_gemm.gemm.ask.heads import BY_HEADS as BHD
from deep_gemm.gemm.ask.heads import BY_HEADS_TURNED as BHR
from deep_gemm.gemm.ask.heads import heads_problem
from deep_gemm.gemm.problem import Problem
from lab.sim.product import right_and_allowed
from lab.sim.rounding import describe_mistakes

pytestmark = pytest.mark.gpu


def operands(
    sizes: dict[str, int], expr: str, recipe: Recipe = RECIPE_1D2D, seed: int = 0
) -> tuple[Operand, Operand, tuple[int, ...]]:
    """Return A and B of an expression, and the shape of D."""
    g = torch.Generator("cuda").manual_seed(seed)
    summed = "r" if expr == BHD else "d"
    stays = "d" if expr == BHD else "r"
    blocks = {"b": 1, "h": 1, summed: 128, stays: recipe[1]}
    made = []
    for axes in ("bh" + summed, "hdr"):
        shape = [sizes[axis] for axis in axes]
        of_scales = [ceil_div(sizes[axis], blocks[axis]) for axis in axes]
        made.append((random_fp8(shape, g), random_scales(of_scales, g)))
    return made[0], made[1], (sizes["b"], sizes["h"], sizes[stays])


def asked(of: str, a: Operand, b: Operand, d: Tensor, c: Tensor | None = None, recipe: Recipe = RECIPE_1D2D) -> Problem:
    return heads_problem(of, a, b, d, c, (recipe, None, None))


def assert_right(p: Problem, name: str = "chosen") -> None:
    """Check D of a problem whose C still holds its values from before the product."""
    right, allowed = right_and_allowed(p, {"device": "cuda"})
    mistakes = describe_mistakes(p.d.flatten(0, 1), right.flatten(0, 1), allowed.flatten(0, 1))
    assert mistakes is None, f"{name}: {mistakes}"


@pytest.mark.parametrize("b", [1, 4, 32, 128, 130, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_shape_of_deepseek_v4(b: int, dtype: torch.dtype) -> None:
    x, w, shape = operands({"b": b, "h": 8, "d": 1024, "r": 4096}, BHD, seed=b)
    frame = framed(shape, dtype, "cuda")
    for _ in range(2):  # first without a record, then by the record
        frame.view.fill_(float("nan"))
        fp8_einsum(BHD, x, w, frame.view)
        assert_right(asked(BHD, x, w, frame.view))
        frame.assert_untouched_outside()
    first = frame.view.clone()
    for _ in range(20):
        again = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
        fp8_einsum(BHD, x, w, again)
        assert torch.equal(again, first)
    laid = get_mn_major_tma_aligned_tensor(x[1].transpose(0, 1)).transpose(0, 1)
    fp8_einsum(BHD, (x[0], laid), w, frame.view)
    assert torch.equal(frame.view, first)


@pytest.mark.parametrize("expr", [BHD, BHR])
@pytest.mark.parametrize("recipe", [RECIPE_1D2D, RECIPE_1D1D])
@pytest.mark.parametrize("b", [16, 144, 1040])
def test_all_forms(expr: str, recipe: Recipe, b: int) -> None:
    x, w, shape = operands({"b": b, "h": 3, "d": 272, "r": 400}, expr, recipe)
    for dtype in (torch.bfloat16, torch.float32):
        d = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
        c = torch.randn(shape, device="cuda").to(dtype)
        before = c.clone()
        for addend in (None, c):
            fp8_einsum(expr, x, w, d, addend, recipe)
            assert_right(asked(expr, x, w, d, addend, recipe))
        fp8_einsum(expr, x, w, c, c, recipe)  # D is C itself
        assert_right(asked(expr, x, w, c, before, recipe))


@pytest.mark.parametrize("b", [4, 130])
def test_operands_as_callers_have_them(b: int) -> None:
    x, w, shape = operands({"b": b, "h": 4, "d": 264, "r": 528}, BHD)
    right = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    fp8_einsum(BHD, x, w, right)
    wide = torch.zeros(b, 6, 640, device="cuda").to(torch.float8_e4m3fn)
    wide[:, 1:5, 64:592].copy_(x[0])
    wide_sf = torch.full((b, 6, 7), float("nan"), device="cuda")
    wide_sf[:, 1:5, 1:6] = x[1]
    flat = w[0].view(4 * 264, 528).view(4, 264, 528)
    head_major = torch.empty(4, b, 264, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    for a in ((wide[:, 1:5, 64:592], x[1]), (x[0], wide_sf[:, 1:5, 1:6]), x):
        for d in (torch.empty_like(right), head_major):
            for _ in range(2):
                d.fill_(float("nan"))
                fp8_einsum(BHD, a, (flat, w[1]), d)
                assert torch.equal(d, right)


@pytest.mark.parametrize("b", [4, 32, 130])
def test_a_captured_graph_replays_with_other_inputs(b: int) -> None:
    sizes = {"b": b, "h": 8, "d": 512, "r": 1024}
    x, w, shape = operands(sizes, BHD)
    others = operands(sizes, BHD, seed=1)
    d = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    fp8_einsum(BHD, x, w, d)
    graph, _ = captured(fp8_einsum, BHD, x, w, d)
    right = torch.empty_like(d)
    fp8_einsum(BHD, others[0], others[1], right)
    for old, new in zip((*x, *w), (*others[0], *others[1]), strict=True):
        old.copy_(new)
    d.fill_(float("nan"))
    graph.replay()
    assert torch.equal(d, right)


def test_nothing_deep_is_c_or_zero_and_no_rows_are_nothing() -> None:
    x, w, shape = operands({"b": 4, "h": 3, "d": 16, "r": 0}, BHD)
    d = torch.full(shape, float("nan"), device="cuda")
    c = torch.randn(shape, device="cuda")
    fp8_einsum(BHD, x, w, d, c)
    assert torch.equal(d, c)
    fp8_einsum(BHD, x, w, d)
    assert not d.any()
    x, w, shape = operands({"b": 0, "h": 3, "d": 16, "r": 128}, BHD)
    assert fp8_einsum(BHD, x, w) is not None


def test_few_sms() -> None:
    x, w, shape = operands({"b": 12, "h": 5, "d": 264, "r": 528}, BHD)
    set_num_sms(3)
    d = torch.full(shape, float("nan"), device="cuda")
    fp8_einsum(BHD, x, w, d)
    assert_right(asked(BHD, x, w, d))


def test_the_reference_runs_on_the_gpu_too() -> None:
    x, w, shape = operands({"b": 12, "h": 2, "d": 264, "r": 528}, BHD)
    d = torch.empty(shape, device="cuda")
    reference.compute(asked(BHD, x, w, d))
    assert d.isfinite().all()
