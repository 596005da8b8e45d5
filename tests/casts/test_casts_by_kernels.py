"""What the casts ask of their kernels on a GPU, with the simulator in its place: the reference's bits.

Activations are within a step of FP8.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from deep_gemm import casts as quantize
from deep_gemm.casts import by_kernels, cast_depths, cast_rows, cast_tiles, depths, fp4, fp8
from deep_gemm.casts.cast_depths import DepthsCast
from deep_gemm.casts.cast_rows import RowCast
from deep_gemm.casts.cast_tiles import TileCast
from deep_gemm.casts.depths import GroupedRows, cast_along_groups, cast_silu_gradient
from deep_gemm.casts.gating import Gating
from deep_gemm.casts.rules import Quantized
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.layout import rows_of_counts, rows_of_groups
from deep_gemm.linear.backward import cast_transposed
from deep_gemm.moe import activation, routing
from deep_gemm.moe.check import activation_problem
from deep_gemm.moe.routing import expert_rows
from lab.casts import MOST_OTHERS, assert_near, assert_same_bits, wild
from lab.sim import cast_depths as sim_depths
from lab.sim import cast_rows as sim_rows
from lab.sim import cast_tiles as sim_tiles
from lab.sim.cast_depths import OF_BF16, of_groups
from lab.sim.library import compiled

pytestmark = pytest.mark.host_compiler


CASTING: tuple[Any, ...] = (by_kernels, depths, fp4, fp8, activation, routing)
"""Modules that ask whether there are kernels."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels take the place of the reference; the names of those that ran."""
    names: list[str] = []

    def run_rows(p: RowCast, _: object = None, *, is_dependent: bool = False) -> tuple[None, int]:
        if p.x.numel() > 0 and p.values.numel() > 0:
            names.append("rows")
            config = cast_rows.config_of(p, 2)
            sim_rows.run_cast(compiled(cast_rows.KERNEL, config), config, p)
        return None, 0

    def run_tiles(p: TileCast, _: object = None) -> tuple[None, int]:
        if p.x.numel() > 0:
            config = cast_tiles.config_of(p)
            names.append(config.name)
            sim_tiles.run_cast(compiled(cast_tiles.KERNEL, config), config, p)
        return None, 0

    def run_depths(p: DepthsCast, _: object = None) -> tuple[None, int]:
        config = cast_depths.config_of(p)
        names.append(config.name)
        sim_depths.run_cast(compiled(cast_depths.KERNEL, config), config, p)
        return None, 0

    for module in CASTING:
        monkeypatch.setattr(module, "has_kernels", lambda x: isinstance(x, Tensor) and x.numel() > 0)
    monkeypatch.setattr(cast_rows, "run", run_rows)
    monkeypatch.setattr(cast_tiles, "run", run_tiles)
    monkeypatch.setattr(cast_depths, "run", run_depths)
    return names


def reference(cast: Callable[..., Any], x: Any, *args: object, **options: object) -> Any:
    """The same cast without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for module in CASTING:
            patch.setattr(module, "has_kernels", lambda _: False)
        return cast(x, *args, **options)


@pytest.mark.parametrize(
    ("shape", "launches"),
    [((130, 264), 1), ((3, 128, 136), 1), ((3, 130, 40), 3), ((2, 2, 5, 3), 4), ((1, 1), 1), ((3, 0, 128), 0)],
)
@pytest.mark.parametrize("name", ["per_channel_cast_to_fp8", "per_block_cast_to_fp8"])
@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_batches_are_one_matrix_where_they_can_be(
    launched: list[str], name: str, shape: tuple[int, ...], launches: int, use_ue8m0: bool
) -> None:
    cast = getattr(quantize, name)
    rows = torch.Size(shape).numel() // shape[-1]
    x = wild(max(rows, 1), shape[-1], torch.bfloat16, 1)[:rows].view(shape)
    found = cast(x, use_ue8m0)
    assert len(launched) == launches
    assert found[0].is_contiguous()
    assert found[1].is_contiguous()
    assert_same_bits(found, reference(cast, x, use_ue8m0))


@pytest.mark.parametrize("name", ["per_channel_cast_to_fp8", "per_block_cast_to_fp8", "per_token_cast_to_fp8"])
def test_any_strides(launched: list[str], name: str) -> None:
    cast = getattr(quantize, name)
    x = wild(140, 152, torch.float16, 2)
    right = reference(cast, x)
    wider = torch.cat([x, x], 1)
    for same in (x.t().contiguous().t(), x.repeat_interleave(2, 1)[:, ::2], wider[:, :152], wider[:, 152:]):
        assert_same_bits(cast(same), right)
    batch = torch.stack([x, x], 1).transpose(0, 1)
    assert_same_bits(cast(batch[1:]), (right[0][None], right[1][None]))
    assert launched


@pytest.mark.parametrize("mn_major", [False, True])
def test_the_transpose_of_rows_is_cast_as_columns(launched: list[str], mn_major: bool) -> None:
    x = wild(144, 264, torch.bfloat16, 3).t()
    found = quantize.per_token_cast_to_fp8(x, min_amax=1e-3, mn_major=mn_major)
    assert launched == ["columns by 16, bfloat16 by 8"]
    right = reference(quantize.per_token_cast_to_fp8, x, min_amax=1e-3, mn_major=mn_major)
    assert_same_bits(found, right)
    assert found[1].stride() == right[1].stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(144, 264), (130, 133), (1, 7), (7, 1), (131, 136), (256, 5)])
def test_both_from_one_read(launched: list[str], shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = wild(*shape, dtype, 4)
    for same in (x, x.t().contiguous().t(), x.repeat_interleave(2, 1)[:, ::2]):
        launched.clear()
        both = quantize.cast_both_to_fp8(same, True, min_amax=1e-3)
        assert len(launched) == 1
        for found, of in zip(both, (x, x.t()), strict=True):
            right = reference(quantize.per_token_cast_to_fp8, of, True, min_amax=1e-3)
            assert_same_bits(found, right)
            assert found[0].is_contiguous()
            assert get_mn_major_tma_aligned_tensor(found[1]) is found[1]


@pytest.mark.parametrize("ks", [[128, 128], [16, 144, 0, 272], [0, 16], [300], [5, 130]], ids=str)
@pytest.mark.parametrize("mn_major", [False, True])
def test_groups_along_k_are_cast_to_their_places(launched: list[str], ks: list[int], mn_major: bool) -> None:
    m, with_depth = 70, sum(k > 0 for k in ks)
    x = wild(m, sum(ks), torch.bfloat16, 7)
    right = reference(quantize.k_grouped_cast_to_fp8, x, ks, True, min_amax=1e-3, mn_major=mn_major)
    wider = torch.cat([x, x], 1)
    for same in (x, x.t().contiguous().t(), wider[:, sum(ks) :], wider.t().contiguous().t()[:, : sum(ks)]):
        launched.clear()
        found = quantize.k_grouped_cast_to_fp8(same, ks, True, min_amax=1e-3, mn_major=mn_major)
        kinds = {name.split(" ")[0] for name in launched}
        assert (len(launched), kinds) == (with_depth, {"rows" if same.stride(1) == 1 else "columns"})
        assert_same_bits(found, right)
        assert get_mn_major_tma_aligned_tensor(found[1]) is found[1] if mn_major else found[1].is_contiguous()


def test_groups_of_columns_that_lie_apart_are_copied_first(launched: list[str]) -> None:
    x = wild(3, 40, torch.float32, 8)
    apart = x.repeat_interleave(2, 1)[:, ::2]
    assert_same_bits(
        quantize.k_grouped_cast_to_fp8(apart, [16, 24]), reference(quantize.k_grouped_cast_to_fp8, x, [16, 24])
    )
    assert launched == ["rows", "rows"]


def test_other_blocks_are_the_references(launched: list[str]) -> None:
    x = wild(70, 100, torch.bfloat16, 5)
    quantize.per_channel_cast_to_fp8(x, gran_k=16)
    quantize.per_block_cast_to_fp8(x, gran_k=96)
    quantize.per_token_cast_to_fp8(x, gran_k=256)
    quantize.per_token_cast_to_fp8(x[None], gran_k=64, masked_m=COUNTS[1:2])
    assert launched == []


# Scales of fewer than 128 rows or columns


@pytest.mark.parametrize("gran_k", [32, 64])
@pytest.mark.parametrize("name", ["per_channel_cast_to_fp8", "per_block_cast_to_fp8", "per_token_cast_to_fp8"])
def test_finer_scales(launched: list[str], name: str, gran_k: int) -> None:
    cast, x = getattr(quantize, name), wild(192, 136, torch.bfloat16, 21)
    right = reference(cast, x, True, gran_k, min_amax=1e-3)
    wider = torch.cat([x, x], 1)
    for same in (x, x.t().contiguous().t(), wider[:, 136:], x.repeat_interleave(2, 1)[:, ::2], x.view(3, 64, 136)):
        launched.clear()
        values, scales = cast(same, True, gran_k, min_amax=1e-3)
        assert len(launched) == 1
        assert_same_bits((values.view(192, 136), scales.view(right[1].shape)), right)
    launched.clear()
    batch = wild(260, 40, torch.float32, 22).view(2, 130, 40)
    assert_same_bits(cast(batch, False, gran_k), reference(cast, batch, False, gran_k))
    assert len(launched) == (1 if name == "per_token_cast_to_fp8" else 2)


@pytest.mark.parametrize("gran_k", [32, 64, 128])
@pytest.mark.parametrize("mn_major", [False, True])
def test_packed_scales(launched: list[str], gran_k: int, mn_major: bool) -> None:
    x = wild(24, 264, torch.bfloat16, 23)
    said: dict[str, Any] = {"mn_major": mn_major, "use_packed_ue8m0": True}
    right = reference(quantize.per_token_cast_to_fp8, x, True, gran_k, **said)
    for same in (x, x.t().contiguous().t(), torch.cat([x, x], 1)[:, 264:]):
        launched.clear()
        found = quantize.per_token_cast_to_fp8(same, True, gran_k, **said)
        assert launched == ["rows"]
        assert found[1].stride() == right[1].stride()
        assert_same_bits(found, right)
    three = quantize.per_token_cast_to_fp8(x.view(2, 12, 264), True, gran_k, **said)
    assert_same_bits((three[0].view(24, 264), three[1].reshape(right[1].shape)), right)


@pytest.mark.parametrize("gran_k", [32, 64])
def test_rows_of_experts_with_finer_scales(launched: list[str], gran_k: int) -> None:
    """64 columns share a scale in torch's operations."""
    ids = torch.randint(-1, 7, (23, 3), generator=torch.Generator().manual_seed(24))
    rows, x = routing.expert_rows(ids, 7), wild(23, 264, torch.bfloat16, 24)
    options: dict[str, Any] = {"use_ue8m0": True, "mn_major": True, "gran_k": gran_k}
    right, used = reference(routing.gather_cast_to_fp8, x, rows, **options), rows.token_of >= 0
    found = routing.gather_cast_to_fp8(x, rows, **options)
    assert found[1].stride() == right[1].stride()
    assert_same_bits((found[0][used], found[1][used]), (right[0][used], right[1][used]))
    h, is_there = wild(36, 2 * 136, torch.bfloat16, 25).view(4, 9, 272), rows_of_counts(COUNTS, 9)
    options |= {"masked_m": COUNTS}
    near(
        activation.silu_mul_cast_to_fp8(h, **options),
        reference(activation.silu_mul_cast_to_fp8, h, **options),
        is_there,
    )
    assert gran_k == 64 or launched == ["rows"] * 2


# FP4


@pytest.mark.parametrize("gran_k", [32, 128])
@pytest.mark.parametrize("use_packed_ue8m0", [False, True])
def test_rows_in_fp4(launched: list[str], gran_k: int, use_packed_ue8m0: bool) -> None:
    x = wild(24, 264, torch.bfloat16, 17)
    said = use_packed_ue8m0, gran_k, use_packed_ue8m0
    right = reference(quantize.per_token_cast_to_fp4, x, *said)
    wider = torch.cat([x, x], 1)
    for same in (x, x.view(2, 3, 4, 264), x.t().contiguous().t(), wider[:, 264:], x.repeat_interleave(2, 1)[:, ::2]):
        launched.clear()
        values, scales = quantize.per_token_cast_to_fp4(same, *said)
        assert launched == ["rows"]
        assert values.dtype == torch.int8
        assert (values.shape, scales.shape[:-1]) == ((*same.shape[:-1], 132), same.shape[:-1])
        assert_same_bits((values.view(24, 132), scales.view(24, -1)), right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_in_mxfp4(launched: list[str], dtype: torch.dtype) -> None:
    w = wild(24, 288, dtype, 19).view(2, 12, 288)
    right = reference(quantize.quantize_mxfp4, w)
    for same in (w, w.mT.contiguous().mT):
        launched.clear()
        found = quantize.quantize_mxfp4(same)
        assert launched == ["rows"]
        assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
    assert right[1].amax() == 255


def test_odd_blocks_in_fp4_are_the_references(launched: list[str]) -> None:
    for gran_k in (2, 16, 64, 256):
        quantize.per_token_cast_to_fp4(wild(7, 100, torch.bfloat16, 18), gran_k=gran_k)
    assert launched == []


# Groups of rows


COUNTS = torch.tensor([0, 9, 4, 1], dtype=torch.int32)


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_first_rows_of_groups(launched: list[str], dtype: torch.dtype, mn_major: bool) -> None:
    x, is_there = wild(36, 264, dtype, 9).view(4, 9, 264), rows_of_counts(COUNTS, 9)
    right = reference(quantize.per_token_cast_to_fp8, x, min_amax=1e-3, mn_major=mn_major)
    x = x.masked_fill(~is_there[..., None], torch.nan)
    for same in (x, torch.cat([x, x], 2)[..., :264], x.mT.contiguous().mT):
        launched.clear()
        found = quantize.per_token_cast_to_fp8(same, min_amax=1e-3, mn_major=mn_major, masked_m=COUNTS)
        assert launched == ["rows"]
        assert found[1].stride() == right[1].stride()
        assert_same_bits((found[0][is_there], found[1][is_there]), (right[0][is_there], right[1][is_there]))


@pytest.mark.parametrize("shape", [(3, 12, 264), (1, 5, 16), (2, 4, 128)])
def test_batches_whose_scales_lie_as_products_load_them(launched: list[str], shape: tuple[int, int, int]) -> None:
    x = wild(shape[0] * shape[1], shape[2], torch.bfloat16, 10).view(shape)
    found = quantize.per_token_cast_to_fp8(x, mn_major=True)
    right = reference(quantize.per_token_cast_to_fp8, x, mn_major=True)
    assert set(launched) == {"rows"}
    assert get_mn_major_tma_aligned_tensor(found[1]) is found[1]
    assert_same_bits(found, right)


# Activations


def near(found: Quantized, right: Quantized, is_there: Tensor) -> None:
    assert found[0].shape == right[0].shape
    assert found[1].shape == right[1].shape
    assert found[1].stride() == right[1].stride()
    share = assert_near((found[0][is_there], found[1][is_there]), (right[0][is_there], right[1][is_there]))
    assert share <= MOST_OTHERS


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_activations_of_any_strides(launched: list[str], dtype: torch.dtype, mn_major: bool) -> None:
    x, weights = wild(21, 2 * 136, dtype, 11), torch.randn(21, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"limit": 2.0, "use_ue8m0": True, "min_amax": 1e-3, "mn_major": mn_major}
    right = reference(activation.silu_mul_cast_to_fp8, x, weights, **options)
    for same in (x, torch.cat([x, x], 1)[:, 272:], x.t().contiguous().t(), x.repeat_interleave(2, 1)[:, ::2]):
        for same_weights in (weights, weights.repeat_interleave(3)[::3]):
            launched.clear()
            found = activation.silu_mul_cast_to_fp8(same, same_weights, **options)
            assert launched == ["rows"]
            near(found, right, torch.ones(21, dtype=torch.bool))


@pytest.mark.parametrize(
    "said", [{"alpha": 1.702, "beta": 1.0, "limit": 7.0}, {"activation": "situ"}, {"activation": "situ", "alpha": 2.0}]
)
def test_activations_of_models(launched: list[str], said: dict[str, Any]) -> None:
    x = wild(21, 2 * 136, torch.bfloat16, 20)
    right = reference(activation.silu_mul_cast_to_fp8, x, **said)
    near(activation.silu_mul_cast_to_fp8(x, **said), right, torch.ones(21, dtype=torch.bool))
    assert launched == ["rows"]


def test_batches_are_activated_at_once(launched: list[str]) -> None:
    x, weights = wild(24, 2 * 72, torch.bfloat16, 12).view(2, 3, 4, 144), torch.rand(2, 3, 4)
    near(
        activation.silu_mul_cast_to_fp8(x, weights),
        reference(activation.silu_mul_cast_to_fp8, x, weights),
        torch.ones(2, 3, 4, dtype=torch.bool),
    )
    assert launched == ["rows"]


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
def test_the_first_rows_of_groups_are_activated(launched: list[str], has_weights: bool, mn_major: bool) -> None:
    x, is_there = wild(36, 2 * 136, torch.bfloat16, 13).view(4, 9, 272), rows_of_counts(COUNTS, 9)
    weights = torch.rand(4, 9) if has_weights else None
    right = reference(activation.silu_mul_cast_to_fp8, x, weights, masked_m=COUNTS, mn_major=mn_major)
    x = x.masked_fill(~is_there[..., None], torch.nan)
    weights = None if weights is None else weights.masked_fill(~is_there, torch.nan)
    found = activation.silu_mul_cast_to_fp8(x, weights, masked_m=COUNTS, mn_major=mn_major)
    assert launched == ["rows"]
    near(found, right, is_there)


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize(("ends", "alignment"), [((3, 3, 20), 8), ((5, 12, 24), 1), ((0, 0), 8), ((), 8)])
def test_groups_that_follow_each_other_are_activated(
    launched: list[str], ends: tuple[int, ...], alignment: int, mn_major: bool
) -> None:
    x, of_groups = wild(24, 2 * 136, torch.bfloat16, 14), torch.tensor(ends, dtype=torch.int32)
    is_there = rows_of_groups(of_groups, 24, alignment)
    p = activation_problem(x, None, None, of_groups, Gating(), alignment)
    right = reference(activation.cast_activated, p, mn_major=mn_major)
    p = p._replace(x=x.masked_fill(~is_there[:, None], torch.nan))
    found = activation.cast_activated(p, mn_major=mn_major)
    assert launched == ["rows"]
    near(found, right, is_there)


# Routes


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize(("tokens", "topk"), [(23, 3), (1, 1), (9, 20)])
def test_tokens_are_cast_to_the_rows_of_their_routes(
    launched: list[str], tokens: int, topk: int, mn_major: bool
) -> None:
    ids = torch.randint(-1, 7, (tokens, topk), generator=torch.Generator().manual_seed(15))
    rows, x = routing.expert_rows(ids, 7), wild(tokens, 264, torch.bfloat16, 15)
    options: dict[str, Any] = {"use_ue8m0": True, "min_amax": 1e-3, "mn_major": mn_major}
    right, used = reference(routing.gather_cast_to_fp8, x, rows, **options), rows.token_of >= 0
    apart = rows._replace(row_of=rows.row_of.t().contiguous().t())
    for same, its_rows in ((x, rows), (x.t().contiguous().t(), apart)):
        launched.clear()
        found = routing.gather_cast_to_fp8(same, its_rows, **options)
        assert launched == ["rows"]
        assert found[1].stride() == right[1].stride()
        assert_same_bits((found[0][used], found[1][used]), (right[0][used], right[1][used]))


def test_more_groups_than_a_kernel_counts_are_the_references(launched: list[str]) -> None:
    counts = torch.ones(1025, dtype=torch.int32)
    x = wild(1025, 16, torch.bfloat16, 16).view(1025, 1, 16)
    assert_same_bits(
        quantize.per_token_cast_to_fp8(x, masked_m=counts),
        reference(quantize.per_token_cast_to_fp8, x, masked_m=counts),
    )
    assert activation.silu_mul_cast_to_fp8(x, masked_m=counts)[0].shape == (1025, 1, 8)
    assert set(launched) <= {"rows"}


def test_inputs_that_require_a_gradient_give_no_graph(launched: list[str]) -> None:
    x = wild(4, 136, torch.float32, 6).requires_grad_()
    results = [*quantize.per_block_cast_to_fp8(x), *quantize.per_channel_cast_to_fp8(x)]
    results += [tensor for one in quantize.cast_both_to_fp8(x) for tensor in one]
    results += quantize.k_grouped_cast_to_fp8(x, [128, 8])
    assert launched
    assert not any(result.requires_grad for result in results)


# What trained layers ask for


@pytest.mark.parametrize("shape", [(144, 136), (3, 144, 136), (2, 1, 16, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_are_transposed_at_once(launched: list[str], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    w = wild(prod(shape[:-1]), shape[-1], dtype, 3, block_rows=32).view(shape)
    values, scales = cast_transposed(w)
    assert len(launched) == 1
    right, of_right = reference(cast_transposed, w)
    assert scales.stride() == of_right.stride()
    assert_same_bits((values, scales.contiguous()), (right, of_right))


def test_blocks_that_lie_apart_or_are_ragged_are_transposed_by_torch(launched: list[str]) -> None:
    for w in (torch.randn(32, 48)[:, :40], torch.randn(40, 32), torch.randn(32, 48).t(), torch.randn(32, 42)):
        values, scales = cast_transposed(w)
        right, of_right = reference(cast_transposed, w)
        assert_same_bits((values, scales.contiguous()), (right, of_right))
        assert not [name for name in launched if "columns" in name]


def grouped_rows() -> GroupedRows:
    rows = expert_rows(torch.randint(-1, 4, (90, 2), generator=torch.Generator().manual_seed(0)), 4)
    return GroupedRows(rows.counts, rows.ends, rows.token_of)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_tokens_are_cast_along_groups(launched: list[str], dtype: torch.dtype, weighted: bool) -> None:
    groups, x = grouped_rows(), wild(90, 160, torch.float32, 5).to(dtype)
    weights = torch.rand(180, generator=torch.Generator().manual_seed(1)) if weighted else None
    for lies in (x, torch.cat([x, x], 1)[:, :160], torch.cat([x[:, :1], x], 1)[:, 1:], x.t().contiguous().t()):
        found = cast_along_groups(lies, groups, weights)
        assert len(launched) == 1
        launched.clear()
        assert_same_bits(of_groups(found, groups), reference(cast_along_groups, lies, groups, weights))


@pytest.mark.parametrize(("i", "name"), [(144, "silu bfloat16"), (128, "silu_at_once bfloat16")])
@pytest.mark.parametrize(("gradient_too", "activation_too"), [(True, True), (True, False), (False, True)])
def test_the_gradient_of_silu_is_cast(
    launched: list[str], gradient_too: bool, activation_too: bool, i: int, name: str
) -> None:
    groups, p = grouped_rows(), torch.rand(180, generator=torch.Generator().manual_seed(2))
    h, ds = (torch.randn(180, n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (2 * i, i))
    said: dict[str, Any] = {"limit": 1.0, "gradient_too": gradient_too, "activation_too": activation_too}
    found: Any = cast_silu_gradient(h, ds, groups, p, **said)
    right = reference(cast_silu_gradient, h, ds, groups, p, **said)
    assert launched == [name]
    assert [each is None for each in found] == [each is None for each in right]
    end = int(groups.ends[-1])
    if gradient_too:
        assert found.rows[1].stride() == right.rows[1].stride()
        of_rows, right_rows = ((q[0][:end], q[1][:end]) for q in (found.rows, right.rows))
        assert assert_near(of_rows, right_rows, OF_BF16) <= MOST_OTHERS
        assert assert_near(of_groups(found.columns, groups), right.columns, OF_BF16) <= MOST_OTHERS
    if activation_too:
        assert assert_near(of_groups(found.activated, groups), right.activated, OF_BF16) <= MOST_OTHERS
        torch.testing.assert_close(found.of_weights[:end], right.of_weights[:end], rtol=1e-4, atol=1e-4)
    alone = cast_silu_gradient(h, None, groups, p, 1.0, gradient_too=False)
    assert alone.activated is not None
    if activation_too:
        assert_same_bits(of_groups(alone.activated, groups), of_groups(found.activated, groups))


def test_groups_without_any_row_launch_nothing_that_is_wrong(launched: list[str]) -> None:
    rows = expert_rows(torch.full((5, 2), -1), 3)
    groups = GroupedRows(rows.counts, rows.ends, rows.token_of)
    values, scales = of_groups(cast_along_groups(torch.ones(5, 32), groups), groups)
    assert values.numel() == scales.numel() == 0
    rows = expert_rows(torch.zeros(0, 2, dtype=torch.long), 3)
    groups = GroupedRows(rows.counts, rows.ends, rows.token_of)
    values, scales = cast_along_groups(torch.ones(0, 32), groups)
    assert values.numel() == scales.numel() == 0
