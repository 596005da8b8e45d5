"""Casts by their kernels, in the simulator and on a GPU, give the reference's bits.

Activated values may differ from the reference by one step of FP8.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, TypeVar

import pytest
import torch
from helpers import some
from torch import Tensor

import deep_gemm
from deep_gemm.casts import by_kernels, cast_depths, cast_rows, cast_tiles, depths
from deep_gemm.casts.config import INPUTS
from deep_gemm.casts.depths import GroupedRows, cast_along_groups, cast_silu_gradient
from deep_gemm.casts.gating import Gating
from deep_gemm.casts.rules import Quantized
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.layout import rows_of_counts, rows_of_groups
from deep_gemm.core.check.recipes import Scales
from deep_gemm.linear.backward import cast_both_ways, cast_transposed
from deep_gemm.moe import activation, routing
from deep_gemm.moe.check import activation_problem
from deep_gemm.moe.routing import expert_rows
from lab.casts import MOST_OTHERS, assert_near, assert_same_bits, wild
from lab.sim import cast_depths as sim_depths
from lab.sim import cast_rows as sim_rows
from lab.sim import cast_tiles as sim_tiles
from lab.sim.cast_depths import OF_BF16, of_groups
from lab.sim.cast_rows import GIVEN
from lab.sim.library import compiled

T = TypeVar("T")
CASTING: tuple[Any, ...] = (by_kernels, depths, activation, routing)
"""Modules that query whether kernels are available."""
SHAPES = [(1, 1), (1, 128), (128, 1), (5, 300), (129, 127), (130, 264), (384, 2048), (1008, 4104), (4100, 1111)]
_RNG = random.Random(0)
SHAPES += [(_RNG.randint(1, 700), _RNG.randint(1, 1500) * _RNG.choice([1, 8])) for _ in range(10)]


class Kernels:
    """The kernels on a GPU or in the simulator. In the simulator it records the name of each kernel that ran."""

    def __init__(self, device: str) -> None:
        self.device, self.names = device, list[str]()

    def pick(self, few: T, many: T) -> T:
        """Return few cases for the simulator, many for a GPU."""
        return few if self.device == "cpu" else many

    def ran(self, *names: str) -> None:
        """Check the names of the kernels that ran since the last check. A GPU does not report any names."""
        assert self.names == [*names] or self.device != "cpu"
        self.names.clear()

    def ran_times(self, number: int) -> None:
        """Check the number of kernels that ran since the last check."""
        self.ran(*self.names[:number], *[""] * (number - len(self.names)))

    def layouts(self, x: Tensor, *more: Tensor) -> list[Tensor]:
        """Return a matrix in all layouts."""
        x = x.to(self.device)
        beside = torch.cat([x, x], 1)[:, x.shape[1] :]
        apart = x.repeat_interleave(2, 1)[:, ::2]
        return [x, x.t().contiguous().t(), beside, apart, *(each.to(self.device) for each in more)]


def simulated(names: list[str]) -> dict[Any, Callable[..., None]]:
    """Return the simulator's launches by the modules whose launches they replace."""

    def run(module: Any, sim: Any, name: Callable[[Any], str], p: Any, **how: Any) -> None:
        if p.x.numel() > 0 and (p.values is None or p.values.numel() > 0):
            config = module.config_of(p, 2) if module is cast_rows else module.config_of(p)
            names.append(name(config))
            sim.run_cast(compiled(module.KERNEL, config), config, p)

    def own(config: Any) -> str:
        return str(config.name)

    return {
        cast_rows: partial(run, cast_rows, sim_rows, lambda _: "rows"),
        cast_tiles: partial(run, cast_tiles, sim_tiles, own),
        cast_depths: partial(run, cast_depths, sim_depths, own),
    }


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.host_compiler), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Use a GPU's kernels, or the simulator's kernels in place of the reference."""
    found = Kernels(request.param)
    if found.device == "cpu":
        for module in CASTING:
            monkeypatch.setattr(module, "has_kernels", lambda x: isinstance(x, Tensor) and x.numel() > 0)
        for module, run in simulated(found.names).items():
            monkeypatch.setattr(module, "run", run)
    return found


def reference(cast: Callable[..., Any], x: Any, *args: object, **options: object) -> Any:
    """Cast the same operand on the CPU, without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for module in CASTING:
            patch.setattr(module, "has_kernels", lambda _: False)
        return cast(x, *args, **options)


def used(found: Quantized, right: Quantized, is_there: Tensor) -> tuple[Quantized, Quantized]:
    """Check that both results have the same shapes and strides; return each result's rows that are in use."""
    assert [each.shape for each in found] == [each.shape for each in right]
    assert found[1].stride() == right[1].stride()
    return (found[0].cpu()[is_there], found[1].cpu()[is_there]), (right[0][is_there], right[1][is_there])


def near(found: Quantized, right: Quantized, is_there: Tensor | None = None) -> None:
    is_there = torch.ones(found[0].shape[:-1], dtype=torch.bool) if is_there is None else is_there
    assert assert_near(*used(found, right, is_there)) <= MOST_OTHERS


three_casts = pytest.mark.parametrize("name", [f"per_{of}_cast_to_fp8" for of in ("channel", "block", "token")])


def assert_matrices(
    kernels: Kernels, cast: Any, few: Sequence[tuple[int, int]], many: Sequence[tuple[int, int]] = SHAPES, **said: Any
) -> None:
    """Compare a cast of one launch with the reference, for matrices in all layouts, some with `min_amax`."""
    block_rows = said.get("gran_k") or 1
    for dtype in kernels.pick((torch.bfloat16,), INPUTS):
        for seed, shape in enumerate(kernels.pick(few, many)):
            x, least = wild(*shape, dtype, seed, block_rows=1 if seed % 2 else block_rows), 1e-3 * (seed % 2)
            right = reference(cast, x, min_amax=least, **said)
            for same in kernels.layouts(x):
                found = cast(same, min_amax=least, **said)
                kernels.ran_times(1)
                assert found[1].stride() == right[1].stride()
                assert_same_bits(found, right)


@three_casts
@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("gran_k", [32, 64, 128])
def test_matrices_in_all_layouts(kernels: Kernels, name: str, gran_k: int, use_ue8m0: bool) -> None:
    assert_matrices(kernels, getattr(deep_gemm, name), [(192, 136), (130, 40)], use_ue8m0=use_ue8m0, gran_k=gran_k)


@three_casts
@pytest.mark.parametrize("gran_k", [32, 128])
@pytest.mark.parametrize(
    ("shape", "launches"), [((3, 128, 136), 1), ((3, 130, 40), 3), ((2, 2, 5, 3), 4), ((1, 1), 1), ((3, 0, 128), 0)]
)
def test_batches_are_one_matrix_where_they_can_be(
    kernels: Kernels, name: str, shape: tuple[int, ...], launches: int, gran_k: int
) -> None:
    cast = getattr(deep_gemm, name)
    rows = torch.Size(shape).numel() // shape[-1]
    x = wild(max(rows, 1), shape[-1], torch.bfloat16, 1)[:rows].view(shape)
    found = cast(x.to(kernels.device), gran_k=gran_k)
    kernels.ran_times(min(launches, 1) if name.startswith("per_token") else launches)
    assert all(each.is_contiguous() for each in found)
    assert_same_bits(found, reference(cast, x, gran_k=gran_k))


@three_casts
def test_views_of_batches(kernels: Kernels, name: str) -> None:
    cast, (m, k) = getattr(deep_gemm, name), kernels.pick((32, 48), (256, 400))
    x = torch.stack([wild(m, k, torch.float16, seed) for seed in range(3)]).to(kernels.device)
    views = [x, x[:, : m // 2 + 2], x[:, 1 : m // 2, 3:], x[:, ::2, ::2], x[2, :, 8 : k // 4], x[1].t()]
    for view in (*views, x.transpose(1, 2), x.transpose(0, 1), x[1:], x[:0], x[:, :0], x[:, :, :0]):
        assert_same_bits(cast(view), reference(cast, view.cpu()))


@pytest.mark.parametrize("mn_major", [False, True])
def test_the_transpose_of_rows_is_cast_as_columns(kernels: Kernels, mn_major: bool) -> None:
    x = wild(144, 264, torch.bfloat16, 3).t()
    found = deep_gemm.per_token_cast_to_fp8(x.to(kernels.device), min_amax=1e-3, mn_major=mn_major)
    kernels.ran("columns by 16, bfloat16 by 8")
    right = reference(deep_gemm.per_token_cast_to_fp8, x, min_amax=1e-3, mn_major=mn_major)
    assert_same_bits(found, right)
    assert found[1].stride() == right[1].stride()


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_both_from_one_read(kernels: Kernels, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(kernels.pick([(144, 264), (130, 133), (1, 7), (7, 1), (131, 136), (256, 5)], SHAPES)):
        x, use_ue8m0 = wild(*shape, dtype, seed, block_rows=1 if seed % 2 else 128), seed % 4 == 0
        least = (0.0, 1e-3, 1e30)[seed % 3]
        rights = [reference(deep_gemm.per_token_cast_to_fp8, of, use_ue8m0, min_amax=least) for of in (x, x.t())]
        for same in kernels.layouts(x):
            both = deep_gemm.cast_both_to_fp8(same, use_ue8m0, min_amax=least)
            kernels.ran_times(1)
            for found, right in zip(both, rights, strict=True):
                assert_same_bits(found, right)
                assert found[0].is_contiguous()
                assert get_mn_major_tma_aligned_tensor(found[1]) is found[1]


@pytest.mark.parametrize("ks", [[128, 128], [16, 144, 0, 272], [0, 16], [300], [5, 130], [1040, 0, 400]], ids=str)
@pytest.mark.parametrize("mn_major", [False, True])
def test_groups_along_k_are_cast_to_their_places(kernels: Kernels, ks: list[int], mn_major: bool) -> None:
    said: dict[str, Any] = {"use_ue8m0": True, "min_amax": 1e-3, "mn_major": mn_major}
    for dtype, m in kernels.pick([(torch.bfloat16, 70)], [(dtype, m) for dtype in INPUTS for m in (1, 5, 130, 768)]):
        x = wild(m, sum(ks), dtype, m)
        right = reference(deep_gemm.k_grouped_cast_to_fp8, x, ks, **said)
        of_wider = torch.cat([x, x], 1).t().contiguous().t()[:, : sum(ks)]
        for same in kernels.layouts(x, of_wider):
            found = deep_gemm.k_grouped_cast_to_fp8(same, ks, **said)
            kind = "rows" if (same.stride(1) != 1 and same.stride(0) != 1) or same.stride(1) == 1 else "columns"
            assert {name.split(" ")[0] for name in kernels.names} <= {kind}
            kernels.ran_times(sum(k > 0 for k in ks))
            assert_same_bits(found, right)
            assert get_mn_major_tma_aligned_tensor(found[1]) is found[1] if mn_major else found[1].is_contiguous()
    for empty, none in ((x[:, :0], [0]), (x[:0], ks)):
        found = deep_gemm.k_grouped_cast_to_fp8(empty.to(kernels.device), none)
        assert_same_bits(found, reference(deep_gemm.k_grouped_cast_to_fp8, empty, none))


def test_other_blocks_are_the_references(kernels: Kernels) -> None:
    x = wild(70, 100, torch.bfloat16, 5).to(kernels.device)
    deep_gemm.per_channel_cast_to_fp8(x, gran_k=16)
    deep_gemm.per_block_cast_to_fp8(x, gran_k=96)
    deep_gemm.per_token_cast_to_fp8(x, gran_k=256)
    deep_gemm.per_token_cast_to_fp8(x[None], gran_k=64, masked_m=COUNTS[1:2].to(kernels.device))
    for gran_k in (2, 16, 64, 256):
        deep_gemm.per_token_cast_to_fp4(x, gran_k=gran_k)
    kernels.ran()


@pytest.mark.parametrize("gran_k", [32, 64, 128])
@pytest.mark.parametrize("mn_major", [False, True])
def test_packed_scales(kernels: Kernels, gran_k: int, mn_major: bool) -> None:
    said: dict[str, Any] = {"gran_k": gran_k, "mn_major": mn_major, "use_packed_ue8m0": True}
    assert_matrices(kernels, deep_gemm.per_token_cast_to_fp8, [(24, 264)], use_ue8m0=True, **said)
    x = wild(24, 264, torch.bfloat16, 23)
    right = reference(deep_gemm.per_token_cast_to_fp8, x, True, **said)
    three = deep_gemm.per_token_cast_to_fp8(x.to(kernels.device).view(2, 12, 264), True, **said)
    assert_same_bits((three[0].view(24, 264), three[1].reshape(right[1].shape)), right)


# Whole rows, and all of a tensor

WIDE = (2, 1024), (3, 4104), (1, 8200), (1, 16392)


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("mn_major", [False, True])
def test_rows_under_one_scale(kernels: Kernels, mn_major: bool, use_ue8m0: bool) -> None:
    """Test each number of lanes that share a row, and rows that are too long for a team's registers."""
    cast, said = deep_gemm.per_token_cast_to_fp8, {"use_ue8m0": use_ue8m0, "gran_k": 0, "mn_major": mn_major}
    assert_matrices(kernels, cast, [(24, 264), *WIDE], [*SHAPES, *WIDE, (5, 40000)], **said)
    x = wild(24, 264, torch.bfloat16, 23).view(2, 3, 4, 264)
    right = reference(deep_gemm.per_token_cast_to_fp8, x, gran_k=0)
    assert_same_bits(deep_gemm.per_token_cast_to_fp8(x.to(kernels.device), gran_k=0), right)


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_tensors_under_one_scale(kernels: Kernels, use_ue8m0: bool) -> None:
    """Test more rows than the CTAs that find the amax read at a time, batches, and views of any strides."""
    for dtype in kernels.pick((torch.bfloat16,), INPUTS):
        for seed, shape in enumerate(kernels.pick([(24, 264), (4099, 8), (3, 4104), (1, 1)], SHAPES)):
            x, least = wild(*shape, dtype, seed), 1e-3 * (seed % 2)
            right = reference(deep_gemm.per_tensor_cast_to_fp8, x, use_ue8m0=use_ue8m0, min_amax=least)
            for same in kernels.layouts(x, x.view(1, 1, *shape)):
                values, scale = deep_gemm.per_tensor_cast_to_fp8(same, use_ue8m0=use_ue8m0, min_amax=least)
                kernels.ran("rows", "rows", "rows")
                assert (values.shape, scale.shape) == (same.shape, (1,))
                assert_same_bits((values.view(shape), scale), right)


@pytest.mark.parametrize("scale", GIVEN)
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_tensors_by_a_given_scale(kernels: Kernels, dtype: torch.dtype, scale: float) -> None:
    x, given = wild(130, 264, dtype, 3), torch.tensor(scale, dtype=torch.float32)
    right = reference(deep_gemm.per_tensor_cast_to_fp8, x, given)
    for same in kernels.layouts(x):
        for its in (given.to(kernels.device), given.to(kernels.device).view(1, 1)):
            values, same_scale = deep_gemm.per_tensor_cast_to_fp8(same, its)
            kernels.ran("rows")
            assert same_scale is its
            assert torch.equal(values.cpu().view(torch.uint8), right[0].view(torch.uint8))


# FP4


@pytest.mark.parametrize("gran_k", [32, 128])
@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_rows_in_fp4(kernels: Kernels, gran_k: int, use_ue8m0: bool) -> None:
    for dtype in kernels.pick((torch.bfloat16,), INPUTS):
        for seed, (m, k) in enumerate(kernels.pick([(24, 264)], SHAPES)):
            x, said = wild(m, k + k % 2, dtype, seed), (use_ue8m0, gran_k, use_ue8m0 and seed % 2 == 0)
            right = reference(deep_gemm.per_token_cast_to_fp4, x, *said)
            for same in kernels.layouts(x, x.view(-1, 1, m, x.shape[1])):
                values, scales = deep_gemm.per_token_cast_to_fp4(same, *said)
                kernels.ran("rows")
                assert values.dtype == torch.int8
                assert (values.shape, scales.shape[:-1]) == ((*same.shape[:-1], right[0].shape[1]), same.shape[:-1])
                assert_same_bits((values.view(right[0].shape), scales.view(right[1].shape)), right)


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_weights_in_mxfp4(kernels: Kernels, dtype: torch.dtype) -> None:
    for seed, (n, k) in enumerate(kernels.pick([(24, 288)], [(1, 32), (130, 288), (576, 7168), (4096, 4096)])):
        w = wild(n, k, dtype, seed)
        right = reference(deep_gemm.quantize_mxfp4, w)
        for same in kernels.layouts(w, w.view(1, n, k), w.t().contiguous().t()[None]):
            found = deep_gemm.quantize_mxfp4(same)
            kernels.ran("rows")
            assert all(torch.equal(one.view(its.shape).cpu(), its) for one, its in zip(found, right, strict=True))
    assert right[1].amax() == 255


# Groups of rows


COUNTS = torch.tensor([0, 9, 4, 1], dtype=torch.int32)


def layouts_of_groups(kernels: Kernels, x: Tensor) -> Sequence[Tensor]:
    x = x.to(kernels.device)
    return x, torch.cat([x, x], 2)[..., : x.shape[2]], x.mT.contiguous().mT


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("gran_k", [0, 128])
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_the_first_rows_of_groups(kernels: Kernels, dtype: torch.dtype, gran_k: int, mn_major: bool) -> None:
    x, is_there = wild(36, 264, dtype, 9).view(4, 9, 264), rows_of_counts(COUNTS, 9)
    said: dict[str, Any] = {"min_amax": 1e-3, "mn_major": mn_major, "gran_k": gran_k}
    right = reference(deep_gemm.per_token_cast_to_fp8, x, **said)
    for same in layouts_of_groups(kernels, x.masked_fill(~is_there[..., None], torch.nan)):
        found = deep_gemm.per_token_cast_to_fp8(same, masked_m=COUNTS.to(kernels.device), **said)
        kernels.ran("rows")
        assert_same_bits(*used(found, right, is_there))


@pytest.mark.parametrize("shape", [(3, 12, 264), (1, 5, 16), (2, 4, 128)])
def test_batches_whose_scales_lie_as_products_load_them(kernels: Kernels, shape: tuple[int, int, int]) -> None:
    x = wild(shape[0] * shape[1], shape[2], torch.bfloat16, 10).view(shape)
    found = deep_gemm.per_token_cast_to_fp8(x.to(kernels.device), mn_major=True)
    kernels.ran(*["rows"] * shape[0])
    assert get_mn_major_tma_aligned_tensor(found[1]) is found[1]
    assert_same_bits(found, reference(deep_gemm.per_token_cast_to_fp8, x, mn_major=True))


def test_more_groups_than_a_kernel_counts_are_the_references(kernels: Kernels) -> None:
    counts, x = torch.ones(1025, dtype=torch.int32), wild(1025, 16, torch.bfloat16, 16).view(1025, 1, 16)
    on_device = x.to(kernels.device), counts.to(kernels.device)
    found = deep_gemm.per_token_cast_to_fp8(on_device[0], masked_m=on_device[1])
    kernels.ran()
    assert_same_bits(found, reference(deep_gemm.per_token_cast_to_fp8, x, masked_m=counts))
    assert deep_gemm.silu_mul_cast_to_fp8(on_device[0], masked_m=on_device[1])[0].shape == (1025, 1, 8)
    assert set(kernels.names) <= {"rows"}


# Activations


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_activations_of_any_strides(kernels: Kernels, dtype: torch.dtype, mn_major: bool) -> None:
    x, weights = wild(21, 2 * 136, dtype, 11), torch.randn(21, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"limit": 2.0, "use_ue8m0": True, "min_amax": 1e-3, "mn_major": mn_major}
    right, its = reference(activation.silu_mul_cast_to_fp8, x, weights, **options), weights.to(kernels.device)
    for same in kernels.layouts(x):
        for same_weights in (its, its.repeat_interleave(3)[::3]):
            found = activation.silu_mul_cast_to_fp8(same, same_weights, **options)
            kernels.ran("rows")
            near(found, right)


@pytest.mark.parametrize(
    "said", [{"alpha": 1.702, "beta": 1.0, "limit": 7.0}, {"activation": "situ"}, {"activation": "situ", "alpha": 2.0}]
)
def test_activations_of_models(kernels: Kernels, said: dict[str, Any]) -> None:
    x = wild(21, 2 * 136, torch.bfloat16, 20)
    found = activation.silu_mul_cast_to_fp8(x.to(kernels.device), **said)
    near(found, reference(activation.silu_mul_cast_to_fp8, x, **said))
    kernels.ran("rows")


def test_batches_are_activated_at_once(kernels: Kernels) -> None:
    given = wild(24, 2 * 72, torch.bfloat16, 12).view(2, 3, 4, 144), torch.rand(2, 3, 4)
    found = activation.silu_mul_cast_to_fp8(*(each.to(kernels.device) for each in given))
    near(found, reference(activation.silu_mul_cast_to_fp8, *given))
    kernels.ran("rows")


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("gran_k", [0, 32, 64, 128])
def test_first_rows_of_groups_are_activated(kernels: Kernels, gran_k: int, has_weights: bool, mn_major: bool) -> None:
    """No kernel has scales of 64 columns here, so torch's operations compute this cast."""
    x, is_there = wild(36, 2 * 136, torch.bfloat16, 13).view(4, 9, 272), rows_of_counts(COUNTS, 9)
    weights = torch.rand(4, 9) if has_weights else None
    said: dict[str, Any] = {"mn_major": mn_major, "gran_k": gran_k, "use_ue8m0": gran_k < 128}
    right = reference(activation.silu_mul_cast_to_fp8, x, weights, masked_m=COUNTS, **said)
    x = x.masked_fill(~is_there[..., None], torch.nan).to(kernels.device)
    weights = None if weights is None else weights.masked_fill(~is_there, torch.nan).to(kernels.device)
    found = activation.silu_mul_cast_to_fp8(x, weights, masked_m=COUNTS.to(kernels.device), **said)
    if gran_k != 64:
        kernels.ran("rows")
    near(found, right, is_there)


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("columns", [0, 128])
@pytest.mark.parametrize(("ends", "alignment"), [((3, 3, 20), 8), ((5, 12, 24), 1), ((0, 0), 8), ((), 8)])
def test_groups_that_follow_each_other_are_activated(
    kernels: Kernels, ends: tuple[int, ...], alignment: int, columns: int, mn_major: bool
) -> None:
    x, of_groups = wild(24, 2 * 136, torch.bfloat16, 14), torch.tensor(ends, dtype=torch.int32)
    is_there = rows_of_groups(of_groups, 24, alignment)
    p = activation_problem(x, None, None, of_groups, Gating(), alignment)
    said: dict[str, Any] = {"mn_major": mn_major, "scaled": Scales(1, columns)}
    right = reference(activation.cast_activated, p, **said)
    p = p._replace(x=x.masked_fill(~is_there[:, None], torch.nan).to(kernels.device), ends=of_groups.to(kernels.device))
    found = activation.cast_activated(p, **said)
    kernels.ran("rows")
    near(found, right, is_there)


# Routes


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("gran_k", [0, 32, 64, 128])
def test_tokens_are_cast_to_the_rows_of_their_routes(kernels: Kernels, gran_k: int, mn_major: bool) -> None:
    """No kernel has scales of 64 columns here, so torch's operations compute this cast."""
    options: dict[str, Any] = {"use_ue8m0": True, "min_amax": 1e-3, "mn_major": mn_major, "gran_k": gran_k}
    few = [(23, 3, 264, torch.bfloat16), (1, 1, 264, torch.bfloat16), (9, 20, 264, torch.bfloat16)]
    sizes = (1, 1, 16), (57, 8, 264), (300, 3, 4104), (1000, 8, 7168), (9, 40, 133)
    for tokens, topk, k, dtype in kernels.pick(few, [(*size, dtype) for size in sizes for dtype in INPUTS]):
        ids = torch.randint(-1, 7, (tokens, topk), generator=torch.Generator().manual_seed(15))
        rows, x = routing.expert_rows(ids, 7), wild(tokens, k, dtype, 15)
        right, is_used = reference(routing.gather_cast_to_fp8, x, rows, **options), rows.token_of >= 0
        its = routing.ExpertRows(*(each.to(kernels.device) for each in rows))
        apart = its._replace(row_of=its.row_of.t().contiguous().t())
        for same, its_rows in zip(kernels.layouts(x)[:2], (its, apart), strict=True):
            found = routing.gather_cast_to_fp8(same, its_rows, **options)
            if gran_k != 64:
                kernels.ran("rows")
            assert_same_bits(*used(found, right, is_used))


def test_inputs_that_require_a_gradient_give_no_graph(kernels: Kernels) -> None:
    x = wild(4, 136, torch.float32, 6).to(kernels.device).requires_grad_()
    results = [*deep_gemm.per_block_cast_to_fp8(x), *deep_gemm.per_channel_cast_to_fp8(x)]
    results += [tensor for one in deep_gemm.cast_both_to_fp8(x) for tensor in one]
    results += deep_gemm.k_grouped_cast_to_fp8(x, [128, 8])
    kernels.ran_times(5)
    assert not any(result.requires_grad for result in results)


# Casts for trained layers


@pytest.mark.parametrize("shape", [(16, 8), (144, 136), (3, 144, 136), (2, 1, 16, 8), (2048, 1536), (128, 256, 768)])
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_blocks_are_transposed_at_once(kernels: Kernels, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if kernels.pick(prod(shape) > 100_000, False):
        pytest.skip("slow in the simulator")
    w = wild(prod(shape[:-1]), shape[-1], dtype, 3, block_rows=32).view(shape)
    right, right_scales = reference(cast_transposed, w)
    in_order, turned = cast_both_ways(w.to(kernels.device))
    kernels.ran_times(1)
    assert by_kernels.can_turn_blocks(w.to(kernels.device))
    assert_same_bits(in_order, reference(deep_gemm.per_block_cast_to_fp8, w))
    for values, scales in (turned, cast_transposed(w.to(kernels.device))):
        assert scales.stride() == right_scales.stride()
        assert_same_bits((values, scales.contiguous()), (right, right_scales))
    kernels.ran_times(1)


def test_blocks_that_lie_apart_or_are_ragged_are_transposed_by_torch(kernels: Kernels) -> None:
    for w in (torch.randn(32, 48)[:, :40], torch.randn(40, 32), torch.randn(32, 48).t(), torch.randn(32, 42)):
        values, scales = cast_transposed(w.to(kernels.device))
        right, of_right = reference(cast_transposed, w)
        assert_same_bits((values, scales.contiguous()), (right, of_right))
        assert not [name for name in kernels.names if "columns" in name]


def grouped_rows() -> GroupedRows:
    rows = expert_rows(torch.randint(-1, 4, (90, 2), generator=torch.Generator().manual_seed(0)), 4)
    return GroupedRows(rows.counts, rows.ends, rows.token_of)


def on_device(kernels: Kernels, groups: GroupedRows) -> GroupedRows:
    return GroupedRows(*(each.to(kernels.device) for each in groups))


def of_used(columns: Quantized, groups: GroupedRows) -> Quantized:
    values, scales = of_groups(columns, groups)
    return values.cpu(), scales.cpu()


@pytest.mark.parametrize("dtype", [*INPUTS, torch.float64], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_tokens_are_cast_along_groups(kernels: Kernels, dtype: torch.dtype, weighted: bool) -> None:
    groups, x = grouped_rows(), wild(90, 160, torch.float32, 5).to(dtype)
    weights = torch.rand(180, generator=torch.Generator().manual_seed(1)) if weighted else None
    right = reference(cast_along_groups, x, groups, weights)
    its = None if weights is None else weights.to(kernels.device)
    for same in kernels.layouts(x, torch.cat([x[:, :1], x], 1).to(kernels.device)[:, 1:]):
        found = cast_along_groups(same, on_device(kernels, groups), its)
        kernels.ran_times(1)
        assert_same_bits(of_used(found, groups), right)


@pytest.mark.parametrize(("i", "name"), [(144, "silu bfloat16"), (128, "silu_at_once bfloat16")])
@pytest.mark.parametrize(("gradient", "activation"), [(True, True), (True, False), (False, True)])
def test_the_gradient_of_silu_is_cast(kernels: Kernels, gradient: bool, activation: bool, i: int, name: str) -> None:
    groups, p = grouped_rows(), torch.rand(180, generator=torch.Generator().manual_seed(2))
    h, ds = (torch.randn(180, n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (2 * i, i))
    said: dict[str, Any] = {"limit": 1.0, "gradient_too": gradient, "activation_too": activation}
    right, there = reference(cast_silu_gradient, h, ds, groups, p, **said), on_device(kernels, groups)
    h, ds, p = (each.to(kernels.device) for each in (h, ds, p))
    found: Any = cast_silu_gradient(h, ds, there, p, **said)
    kernels.ran(name)
    assert [each is None for each in found] == [each is None for each in right]
    end = int(groups.ends[-1])
    if gradient:
        assert found.rows[1].stride() == right.rows[1].stride()
        of_rows, right_rows = ((q[0][:end].cpu(), q[1][:end].cpu()) for q in (found.rows, right.rows))
        assert assert_near(of_rows, right_rows, OF_BF16) <= MOST_OTHERS
        assert assert_near(of_used(found.columns, groups), right.columns, OF_BF16) <= MOST_OTHERS
    alone = cast_silu_gradient(h, None, there, p, 1.0, gradient_too=False)
    if activation:
        assert assert_near(of_used(found.activated, groups), right.activated, OF_BF16) <= MOST_OTHERS
        torch.testing.assert_close(found.of_weights.sum(0)[:end].cpu(), right.of_weights[0, :end], rtol=1e-4, atol=1e-4)
        assert_same_bits(of_used(some(alone.activated), groups), of_used(found.activated, groups))


@pytest.mark.parametrize("tokens", [5, 0])
def test_groups_without_any_row_launch_nothing_that_is_wrong(kernels: Kernels, tokens: int) -> None:
    rows = expert_rows(torch.full((tokens, 2), -1), 3)
    groups = GroupedRows(rows.counts, rows.ends, rows.token_of)
    found = cast_along_groups(torch.ones(tokens, 32, device=kernels.device), on_device(kernels, groups))
    assert [each.numel() for each in of_groups(found, groups)] == [0, 0]
