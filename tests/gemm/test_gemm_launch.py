"""The kernel that a dense product launches, its parameters, and the calls that a record serves. No driver is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, on_gpu, recorded_alike
from helpers import as_new_process, misaligned, some
from test_sim_heads import OUTPUTS
from torch import Tensor

import deep_gemm
from deep_gemm import fp8_einsum, per_block_cast_to_fp8, per_token_cast_to_fp8, set_batch_invariant, set_num_sms
from deep_gemm.casts import lay_scales
from deep_gemm.casts.scales import get_mn_major_tma_aligned_packed_ue8m0_tensor, get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.layout import RECIPE_1D1D, align, ceil_div
from deep_gemm.core.check.recipes import PER_BLOCK, PER_ROW
from deep_gemm.core.check.ue8m0 import Words, words_of
from deep_gemm.core.gpu import H200
from deep_gemm.gemm import kernel as fp8_gemm
from deep_gemm.gemm import launch
from deep_gemm.gemm.api.dense import BEHIND_CAST
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.ask.heads import BY_HEADS, heads_problem
from deep_gemm.gemm.choose.fp8 import choose, select
from deep_gemm.gemm.choose.tiles import TILES_OF_HEADS as TILES
from deep_gemm.gemm.choose.tiles import Tile
from deep_gemm.gemm.config.decode import DecodeConfig, decode_config
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM_DECODE, params_of
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output, Sizes
from deep_gemm.gemm.problem import Problem
from deep_gemm.gemm.product import run
from lab.configs import reachable_heads as reachable

DECODE, LARGE = (8, 2112, 7168), (2048, 2112, 1024)
Operand = tuple[Tensor, Tensor]
NO_RECIPES = ((None, None, None),)
DENSE_PARAMS = params_of(Tile(64, 64).config(Output(), 512))
DECODE_PARAMS = params_of(Tile(8, 64, is_decode=True).config(Output(), 512))


def operands(m: int, n: int, k: int, *, by_row: bool = False) -> tuple[Operand, Operand, Tensor]:
    a = torch.zeros(m, k, dtype=torch.float8_e4m3fn), torch.ones(m, ceil_div(k, 128))
    b = torch.zeros(n, k, dtype=torch.float8_e4m3fn), torch.ones(n if by_row else ceil_div(n, 128), ceil_div(k, 128))
    return (on_gpu(a[0]), get_mn_major_tma_aligned_tensor(a[1])), b, on_gpu(torch.zeros(m, n, dtype=torch.bfloat16))


def problem(m: int, n: int, k: int) -> Problem:
    a, b, d = operands(m, n, k)
    return dense_problem(a, b, d, None)


def addresses(gpu: FakeGpu) -> tuple[int, ...]:
    """Return the addresses of a, sfa, b, sfb and d in the last launch."""
    words = gpu.last.words
    if gpu.last.kernel == "fp8_gemm_decode":
        return words[0], words[32], words[16], words[33], words[34]
    return words[0], words[32], words[16], words[80], words[48]


def pointers(a: Operand, b: Operand, d: Tensor) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in (*a, *b, d))


# Records


@pytest.mark.parametrize(("shape", "name"), [(DECODE, "fp8_gemm_decode"), (LARGE, "fp8_gemm_dense")])
def test_calls_run_the_kernel_that_is_chosen_each_at_its_own_addresses(gpu: FakeGpu, shape: Any, name: str) -> None:
    for a, b, d in [operands(*shape) for _ in range(3)]:
        assert deep_gemm.fp8_gemm_nt(a, b, d) is None
        assert addresses(gpu) == pointers(a, b, d)
    assert [each.kernel for each in gpu.launches] == [name] * 3
    assert gpu.records == 1


def test_a_new_m_compiles_nothing_where_the_configuration_is_known(gpu: FakeGpu) -> None:
    for m in range(1000, 1024):
        a, b, d = operands(m, 4096, 512)
        deep_gemm.fp8_gemm_nt(a, b, d)
    assert gpu.records == 1
    assert len(gpu.compiled) == 1


@pytest.mark.parametrize("shape", [DECODE, LARGE])
@pytest.mark.parametrize("which", ["a", "b", "d", "c"])
def test_a_seen_call_at_wrong_addresses_is_refused_as_a_new_one_is(gpu: FakeGpu, shape: Any, which: str) -> None:
    (a, sfa), (b, sfb), d = operands(*shape)
    c = torch.zeros_like(d)
    deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d, c)
    moved = {"a": a, "b": b, "d": d, "c": c}
    moved[which] = on_gpu(misaligned(moved[which], 8))
    with pytest.raises(ValueError, match=f"{which}: expected an address that is a multiple of 16 bytes"):
        deep_gemm.fp8_gemm_nt((moved["a"], sfa), (moved["b"], sfb), moved["d"], moved["c"])
    assert len(gpu.launches) == 1


@pytest.mark.parametrize("shape", [DECODE, LARGE])
def test_a_seen_call_whose_output_overlaps_an_input_is_refused(gpu: FakeGpu, shape: tuple[int, int, int]) -> None:
    a, b, d = operands(*shape)
    c = torch.zeros_like(d)
    for each in (None, c):
        deep_gemm.fp8_gemm_nt(a, b, d, each)
    over_a = on_gpu(torch.zeros(d.numel() + a[0].numel(), dtype=torch.bfloat16))
    inside = over_a.view(torch.float8_e4m3fn)[: a[0].numel()].view(a[0].shape)
    with pytest.raises(ValueError, match="d: expected memory that does not overlap a"):
        deep_gemm.fp8_gemm_nt((on_gpu(inside), a[1]), b, on_gpu(over_a[: d.numel()].view(d.shape)))
    room = on_gpu(torch.zeros(d.shape[0] + 1, d.shape[1], dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="c: expected d itself or memory that does not overlap it"):
        deep_gemm.fp8_gemm_nt(a, b, on_gpu(room[1:]), room[:-1])
    assert len(gpu.launches) == 2


# Records of another m


def of_several_m(n: int, k: int, tile: Tile, output: Output, extra: int = 0) -> Iterator[Callable[[], Any]]:
    """Yield calls with one weight. `extra`: elements between the rows of A, and of D."""
    by_row, k_blocks = output.sfb == PER_ROW, ceil_div(k, 128)
    dtype = torch.float32 if output.is_fp32 else torch.bfloat16
    b = torch.zeros(n, k, dtype=torch.float8_e4m3fn), torch.ones(n if by_row else ceil_div(n, 128), k_blocks)
    b = b[0], get_mn_major_tma_aligned_tensor(b[1])
    for m in (300, 2, 303, 256, 1000, 300, 1, 5):
        a = on_gpu(torch.zeros(m, k + extra, dtype=torch.float8_e4m3fn)[:, :k])
        pitch = align(m, 4) + 4 * extra
        sfa = torch.ones(pitch * k_blocks).as_strided((m, k_blocks), (1, pitch))
        d = on_gpu(torch.zeros(m, n + extra, dtype=dtype)[:, :n])
        c = d if output.adds_to_d else torch.zeros_like(d) if output.with_c else None
        recipe = RECIPE_1D1D if by_row else None
        yield partial(deep_gemm.fp8_gemm_nt, (a, sfa), b, d, c, recipe)


@pytest.mark.parametrize("extra", [0, 32])
@pytest.mark.parametrize(
    ("n", "k", "tile", "output"),
    [
        (576, 1152, Tile(64, 64), Output()),
        (576, 1152, Tile(256, 128), Output(with_c=True)),
        (576, 1152, Tile(128, 128), Output(is_fp32=True)),
        (576, 1152, Tile(128, 128), Output(is_fp32=True, adds_to_d=True)),
        (576, 1152, Tile(128, 128), Output(sfb=PER_ROW)),
        (8, 128, Tile(64, 64), Output()),
        (8, 48, Tile(64, 64), Output(with_c=True)),
        (576, 1152, Tile(16, 64, is_decode=True), Output()),
        (576, 1152, Tile(8, 128, is_decode=True), Output(with_c=True)),
    ],
)
def test_a_record_of_another_m_launches_what_a_call_without_any_does(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, n: int, k: int, tile: Tile, output: Output, extra: int
) -> None:
    monkeypatch.setattr(launch, "choose", lambda sizes, *_, **__: tile.config(output, sizes.k))
    calls = [*of_several_m(n, k, tile, output, extra)]
    assert recorded_alike(gpu, calls) < len(calls)


# Kernels that are compiled, and lines that are printed


def test_compiling_alone_launches_nothing_and_keeps_the_kernel(gpu: FakeGpu) -> None:
    a, b, d = operands(*LARGE)
    deep_gemm.set_compile_mode(1)
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert (len(gpu.compiled), gpu.launches) == (1, [])
    deep_gemm.set_compile_mode(0)
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert (len(gpu.compiled), len(gpu.launches)) == (1, 1)


def test_the_configuration_is_printed_once_for_each_m_where_that_is_asked_for(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_new_process(monkeypatch, DG_PRINT_CONFIGS=1)
    a, b, d = operands(*LARGE)
    for _ in range(2):
        deep_gemm.fp8_gemm_nt(a, b, d)
    others = [operands(m, 2112, 1024) for m in (2047, 8, 2047, 2046)]  # same kernel, another kernel, seen m, new m
    for a, b, d in others:
        deep_gemm.fp8_gemm_nt(a, b, d)
    out, err = capsys.readouterr()
    assert out == "", "an engine's standard output may be its protocol"
    names = [gpu.compiled[0].name, gpu.compiled[0].name, gpu.compiled[1].name, gpu.compiled[0].name]
    told = zip((2048, 2047, 8, 2046), names, strict=True)
    assert err.splitlines() == [f"deep_gemm: {m} x 2112 x 1024 runs {name}" for m, name in told]


# Scales


def test_decode_reads_scales_of_a_as_they_lie(gpu: FakeGpu) -> None:
    a, b, d = operands(*DECODE)
    a = a[0], a[1].contiguous()
    for _ in range(2):
        deep_gemm.fp8_gemm_nt(a, b, d)
        assert addresses(gpu) == pointers(a, b, d)
    assert gpu.records == 1


def test_scales_that_tma_cannot_load_are_copied_for_each_call(gpu: FakeGpu) -> None:
    a, b, d = operands(*LARGE)
    a = a[0], a[1].contiguous()
    for _ in range(2):
        deep_gemm.fp8_gemm_nt(a, b, d)
        at_sfa = addresses(gpu)[1]
        assert at_sfa != a[1].data_ptr()


def fine_operands(m: int, n: int, k: int, form: str) -> tuple[Operand, Operand, Tensor]:
    """Make A with a UE8M0 scale for each 32 columns and B for each 32 x 32: as bytes, or as MN-major words."""
    (a, _), (b, _), d = operands(m, n, k)
    of_a, of_b = (torch.full((rows, k // 32), 127, dtype=torch.uint8) for rows in (m, n // 32))
    if form == "words":
        return (a, get_mn_major_tma_aligned_packed_ue8m0_tensor(of_a)), (b, words_of(of_b).t().contiguous().t()), d
    return (a, of_a.view(torch.float8_e8m0fnu)), (b, of_b), d


@pytest.mark.parametrize("form", ["words", "bytes"])
def test_exponents_are_read_as_they_lie_or_laid_out_by_one_kernel(gpu: FakeGpu, form: str) -> None:
    """A record of calls with words must not serve calls with FP32 scales."""
    for shape, kernel in ((DECODE, DECODE_PARAMS), (LARGE, DENSE_PARAMS)):
        kept = [fine_operands(*shape, form) for _ in range(3)]
        for a, b, d in kept:
            deep_gemm.fp8_gemm_nt(a, b, d, recipe=(1, 32, 32))
            found, given = addresses(gpu), pointers(a, b, d)
            assert found[:1] + found[2:] == given[:1] + given[2:]
            assert (found[1] == given[1]) == (shape == DECODE)
            words = gpu.last.words[kernel.offset("words") // 8] >> kernel.offset("words") % 8 * 8
            assert words & 0xFFFFFFFF == (Words.A | Words.B if shape == DECODE else Words.B)
        m, n, k = shape
        fp32 = torch.ones(m, k // 32), torch.ones(n // 32, k // 32)
        deep_gemm.fp8_gemm_nt((a[0], fp32[0]), (b[0], fp32[1]), d, recipe=(1, 32, 32))
        words = gpu.last.words[kernel.offset("words") // 8] >> kernel.offset("words") % 8 * 8
        assert words & 0xFFFFFFFF == 0


@pytest.mark.parametrize("k", [288, 1056, 7168])
def test_a_record_of_few_rows_with_words_serves_others(gpu: FakeGpu, k: int) -> None:
    product: Any = deep_gemm.fp8_gemm_nt
    kept = [fine_operands(m, 2112, k, "words") for m in (8, 7, 1, 5, 8)]
    assert recorded_alike(gpu, [partial(product, *each, recipe=(1, 32, 32)) for each in kept]) <= 3


@pytest.mark.parametrize("by_row", [False, True])
def test_a_copy_of_scales_has_a_map_of_the_strides_of_the_copy(gpu: FakeGpu, by_row: bool) -> None:
    """Scales have the same strides twice: first at an address for TMA, then four bytes later, which needs a copy."""
    m, n, k = 64, 512, 1024
    a, b, d = operands(m, n, k, by_row=by_row)
    recipe = RECIPE_1D1D if by_row else None
    room = torch.ones(8 * 1024 + 1)
    config = tile_config(64, 64, Output(sfb=PER_ROW if by_row else PER_BLOCK), k=k)
    for first, pitch_bytes in ((0, 4096), (1, m * 4)):
        sfa = room.as_strided((m, 8), (1, 1024), first)
        p = dense_problem((a[0], sfa), b, d, None, recipes=(recipe, None, None))
        launch.run(p, config)
        assert gpu.last.maps[2].strides == (pitch_bytes,)


# Settings


@pytest.mark.parametrize("shape", [DECODE, LARGE])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_dependent_launch_is_what_set_pdl_says(gpu: FakeGpu, shape: tuple[int, int, int], enabled: bool) -> None:
    deep_gemm.set_pdl(enabled)
    deep_gemm.fp8_gemm_nt(*operands(*shape))
    assert gpu.last.is_dependent is enabled


@pytest.mark.parametrize("is_enabled", [False, True])
@pytest.mark.parametrize("m", [8, 512])
def test_a_product_behind_a_cast_is_a_dependent_launch_whatever_set_pdl_says(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, m: int, is_enabled: bool
) -> None:
    """Launches by records of other m are dependent too. The decode kernel knows only after a cast that B is ready."""
    deep_gemm.set_pdl(is_enabled)

    def weight_is_ready() -> int | None:
        if gpu.last.kernel != FP8_GEMM_DECODE.name:
            return None
        word, half = divmod(DECODE_PARAMS.offset("weight_is_ready"), 8)
        return gpu.last.words[word] >> 8 * half & 0xFFFFFFFF

    for rows in (m, m - 4, m):
        a, b, d = operands(rows, 4096, 7168)
        run(BEHIND_CAST, a, b, d, None, NO_RECIPES)
        assert weight_is_ready() == (1 if m == 8 else None)
        assert gpu.last.is_dependent
        deep_gemm.fp8_gemm_nt(a, b, d)
        assert weight_is_ready() == (0 if m == 8 else None)
        assert gpu.last.is_dependent is is_enabled
    # If the call copies scales, that copy is the kernel ahead, so the weight is not ready.
    monkeypatch.setattr(launch, "prepared", lambda p, _: p._replace(sfb=p.sfb.clone()))
    launch.run(problem(m, 4096, 7168), is_behind_cast=True)
    assert weight_is_ready() == (0 if m == 8 else None)


@pytest.mark.parametrize("num_sms", [1, 2, 7, 33, 66, 112, 131])
def test_no_more_sms_are_used_than_allowed(gpu: FakeGpu, num_sms: int) -> None:
    """The hardware spreads CTAs over all SMs, so CTAs must not outnumber SMs, even if one SM has room for several."""
    deep_gemm.set_num_sms(num_sms)
    for n, k in ((576, 7168), (2112, 7168), (7168, 512), (24576, 1536)):
        for m in (1, 16, 64, 128, 512, 2048):
            deep_gemm.fp8_gemm_nt(*operands(m, n, k))
            assert gpu.last.grid <= num_sms, f"{m} x {n} x {k}: {gpu.compiled[-1].name}"


def test_fewer_sms_leave_the_decode_kernel_to_products_whose_grid_fits(gpu: FakeGpu) -> None:
    p = problem(1, 576, 7168)
    chosen = choose(p.sizes, Output(), gpu.gpu)
    assert isinstance(chosen, DecodeConfig)
    needs = chosen.ctas(p.m, p.n)
    deep_gemm.set_num_sms(needs)
    assert choose(p.sizes, Output(), gpu.gpu) == chosen
    deep_gemm.set_num_sms(needs - 1)
    assert isinstance(choose(p.sizes, Output(), gpu.gpu), GemmConfig)


def test_fewer_sms_than_a_cluster_has_ctas_run_its_tile_without_a_cluster(gpu: FakeGpu) -> None:
    p = problem(512, 7168, 16384)
    for num_sms in (1, 2, 7):
        deep_gemm.set_num_sms(num_sms)
        config = choose(p.sizes, Output(), gpu.gpu)
        assert isinstance(config, GemmConfig)
        assert config.cluster_size <= num_sms
        assert config.why_illegal() is None
        assert fp8_gemm.why_unfit(config, p.k, Output()) is None


@pytest.mark.parametrize(("n", "k"), [(576, 7168), (2112, 7168), (4096, 512)])
def test_batch_invariance_is_to_split_no_k_whatever_m_is(gpu: FakeGpu, n: int, k: int) -> None:
    names = set()
    for enabled in (False, True):
        deep_gemm.set_batch_invariant(enabled)
        gpu.compiled.clear()
        for m in (1, 8, 16, 33, 64, 128, 200, 512):
            deep_gemm.fp8_gemm_nt(*operands(m, n, k))
        assert all(config.cluster_k == 1 for config in gpu.compiled) or not enabled
        names.add(tuple(config.name for config in gpu.compiled))
    assert len(names) == 2 or k < 1024, "a product of few tiles and a long k is split where it may be"


def test_batch_invariance_is_what_the_environment_says_until_it_is_set(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_new_process(monkeypatch, DG_BATCH_INVARIANT=1)
    deep_gemm.fp8_gemm_nt(*operands(*DECODE))
    assert gpu.last.cluster == 1
    deep_gemm.set_batch_invariant(False)
    deep_gemm.fp8_gemm_nt(*operands(*DECODE))
    assert gpu.last.cluster > 1


# Configurations that a caller passes


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tile_config(64, 64, Output(is_fp32=True)), "is for another output: is_fp32"),
        (tile_config(64, 64, Output(sfb=PER_ROW)), "is for another output: sfb"),
        (tile_config(64, 64, Output(), k=512), "has no code for the tail of 9 blocks of k in runs of 4"),
        (decode_config(8, 1, 1, 1, with_c=True), "is for another output: with_c"),
    ],
)
def test_a_given_configuration_that_computes_something_else_is_refused(gpu: FakeGpu, config: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"config: .* {reason}"):
        launch.run(problem(8, 512, 1152), config)
    assert gpu.launches == []


def test_the_decode_kernel_is_refused_scales_of_b_by_row(gpu: FakeGpu) -> None:
    a, b, d = operands(8, 512, 512, by_row=True)
    p = dense_problem(a, b, d, None, recipes=(RECIPE_1D1D, None, None))
    with pytest.raises(ValueError, match="is for another output: sfb"):
        launch.run(p, decode_config(8, 1, 1, 1))


# The host's decisions for products of heads on a GPU, tested without a GPU.


BF16 = Output(work=works.HEADS)
HEADS_PARAMS = params_of(Tile(64, 64).config(BF16, 512))


def test_few_tokens_go_to_the_decode_kernel_and_many_to_large_tiles() -> None:
    chosen = {m: select(Sizes(m, 1024, 4096, 8), BF16, H200) for m in (1, 4, 32, 128, 4096)}
    assert all(isinstance(chosen[m], DecodeConfig) for m in (1, 4, 32))
    assert isinstance(chosen[128], GemmConfig)
    assert isinstance(chosen[4096], GemmConfig)
    assert chosen[4096].block_m * chosen[4096].block_n == 256 * 128


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.name)
def test_what_is_chosen_is_reachable(output: Output) -> None:
    known = {*reachable()}
    for heads in (1, 8, 128):
        for m in (1, 100, 5000):
            for k in (16, 512, 4096):
                assert select(Sizes(m, 136, k, heads), output, H200) in known


def test_bits_that_depend_on_a_row_alone_have_no_split_of_k() -> None:
    for heads in (1, 2, 8):
        config = select(Sizes(4, 512, 4096, heads), BF16, H200, split_k=False)
        assert config.cluster_k == 1
    set_batch_invariant(True)
    assert choose(Sizes(4, 512, 4096, 2), BF16, H200).cluster_k == 1


def test_few_sms_are_kept_to() -> None:
    config = select(Sizes(4, 64, 4096, 2), BF16, H200)
    assert isinstance(config, DecodeConfig)
    ctas = 2 * config.cluster_k
    set_num_sms(ctas)
    assert isinstance(choose(Sizes(4, 1024, 4096, 8), BF16, H200), GemmConfig)
    assert choose(Sizes(4, 64, 4096, 2), BF16, H200) == config
    set_num_sms(ctas - 1)
    assert isinstance(choose(Sizes(4, 64, 4096, 2), BF16, H200), GemmConfig)
    set_num_sms(1)
    alone = choose(Sizes(4096, 1024, 4096, 8), BF16, H200)
    assert isinstance(alone, GemmConfig)
    assert alone.cluster_size == 1


def operands_of_heads(b: int, h: int = 3, d: int = 256, r: int = 512) -> tuple[Any, Any]:
    (x, sx), w = per_token_cast_to_fp8(torch.randn(b, h, r)), per_block_cast_to_fp8(torch.randn(h, d, r))
    return (on_gpu(x), sx), w


def test_a_configuration_for_other_products_is_refused(gpu: FakeGpu) -> None:
    p = heads_problem(BY_HEADS, *operands_of_heads(4), None)
    for tile in TILES:
        with pytest.raises(ValueError, match="is for another output: work"):
            launch.run(p, tile.config(Output(), p.k))
    with pytest.raises(ValueError, match="is for another output: "):
        launch.run(p, Tile(64, 64).config(Output(is_fp32=True, work=works.HEADS), p.k))


def test_scales_are_laid_out_by_a_kernel_in_each_call_and_only_where_they_must(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lay_scales, "has_kernel", lambda _: True)
    params = lay_scales.KERNEL.params
    for b, kernels in ((4, []), (300, ["lay_scales"])):
        d = on_gpu(torch.empty(b, 3, 256, dtype=torch.bfloat16))
        for _ in range(3):
            (x, sx), w = operands_of_heads(b)
            gpu.launches.clear()
            fp8_einsum(BY_HEADS, (x, sx), w, d)
            assert [each.kernel for each in gpu.launches[:-1]] == kernels
            assert all(each.words[params.offset("sf") // 8] == sx.data_ptr() for each in gpu.launches[:-1])
    m_major = get_mn_major_tma_aligned_tensor(sx.transpose(0, 1)).transpose(0, 1)
    gpu.launches.clear()
    for _ in range(3):
        fp8_einsum(BY_HEADS, (x, m_major), w, d)
        assert gpu.last.words[HEADS_PARAMS.offset("map_sfa") // 8] == m_major.data_ptr()
    assert len(gpu.launches) == 3


@pytest.mark.parametrize("b", [4, 300])
def test_an_output_that_is_made_is_contiguous_for_callers(gpu: FakeGpu, b: int) -> None:
    for _ in range(2):
        d = some(fp8_einsum(BY_HEADS, *operands_of_heads(b)))
        assert d.shape == (b, 3, 256)
        assert d.is_contiguous()
