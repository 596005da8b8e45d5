"""Mistakes in the host's half of a launch, and the trials that must notice them: they run kernels with its parameters.

A mutation replaces some text of one module of the package. A process of its own imports the package with that module
broken, so that the simulator's launches run the broken code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import broken
import host_mutations_bf16 as of_bf16
import host_mutations_depths as of_depths
import host_mutations_fine as of_fine
import host_mutations_sends as of_sends
import torch
from forked import SERVER
from host_mutations_bf16 import spread

import deep_gemm
from deep_gemm.casts import cast_rows, cast_tiles, lay_scales
from deep_gemm.casts.gating import Gating
from deep_gemm.casts.rules import UNSCALED, Target
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.check.recipes import BLOCKS_OF_32, E2M1, MX, PER_64, PER_ROW
from deep_gemm.core.check.ue8m0 import Words
from deep_gemm.gemm.choose.tiles import Tile, skipping
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds import epilogues, works
from deep_gemm.gemm.kinds.output import Output
from lab import silu
from lab.casts import assert_same_bits, wider, wild

ROOT = Path(deep_gemm.__file__).parents[1]
SECONDS = 120


# Trials. Two strides that could be confused always differ.


def check(config: Any, p: Any, **more: int) -> None:
    """Compute a product after adding `more[name]` elements to the pitch of the operand of that name."""
    from lab.sim import product

    product.run(product.compile_config(config), config, spread(p, **more)).checked()


def dense_trial(config: GemmConfig | DecodeConfig, mnk: tuple[int, int, int], words: Words = Words.NONE) -> None:
    from lab.sim.dense import random_problem

    p, is_decode = random_problem(config, *mnk, words=words), isinstance(config, DecodeConfig)
    sfb = 2 if is_decode else 0 if config.sfb == PER_ROW else 3
    check(config, p, a=32, b=16, sfa=3 if is_decode else 0, sfb=sfb, c=0 if p.c is p.d else 8)


def skip_trial(config: GemmConfig | DecodeConfig, splits: tuple[int, int, int]) -> None:
    from lab.sim.skip_head_mid import SkipTrial

    check(config, SkipTrial(config, 72, 5, splits, k=400).problem(), a=32, b=16, sfb=3)


def rows_trial(
    config: GemmConfig, layout: list[int], rows: int | None = None, alignment: int = 128, words: Words = Words.NONE
) -> None:
    from lab.sim.rows import random_problem

    p = random_problem(config, layout, 264, 400, rows=rows, alignment=alignment, words=words)
    check(config, p, b=16, sfb=0 if config.sfb == PER_ROW else 3)


def silu_trial(has_weights: bool) -> None:
    from lab.sim import product
    from lab.sim import rows_silu as sim

    config = tile_config(64, 128, Output(work=works.ENDS, epilogue=epilogues.SILU), k=400)
    p = sim.random_problem([70, 22], 512, 400, has_weights=has_weights, limit=0.5)
    p = spread(p, b=16, sfb=3, d=32)
    got, _ = sim.run(product.compile_config(config), config, p)
    silu.checked(p, got)


def depths_trial(config: GemmConfig, on_gpu_alone: bool) -> None:
    from lab.sim import depths as sim

    p = sim.random_problem(config, (272, 16, 400), 72, 136, on_gpu_alone=on_gpu_alone)
    sim.run(sim.compile_both(config), config, spread(p, c=8 if config.with_c else 0)).checked()


def heads_trial(tile: Tile, output: Output) -> None:
    from lab.sim.heads import random_problem

    config = tile.config(output, 400)
    p = random_problem(config, 3, 72, 264, 400, gap=16)
    sfa, sfb = 5 if isinstance(config, DecodeConfig) else 0, 0 if p.of_b == PER_ROW else 3
    check(config, p, sfa=sfa, sfb=sfb)


ROUNDED: dict[str, Any] = {"data": "wild", "min_amax": 0.25, "rounds_up": True, "is_m_major": False}


def row_cast_trial(
    m: int,
    k: int,
    groups: str = "NONE",
    activates: bool = False,
    to_routes: bool = False,
    is_bf16: bool = False,
    **more: Any,
) -> None:
    from lab.casts import MOST_OTHERS
    from lab.sim.cast_rows import RowTrial, problem, run_cast, verdict
    from lab.sim.library import compiled

    rows = cast_rows.Groups[groups]  # the package was imported anew, so its enum is a new one
    to = UNSCALED if is_bf16 else Target()
    which = cast_rows.cast_config(torch.bfloat16, True, False, activates, rows, to_routes, to)
    asked = RowTrial(which, m, k, **{"data": "ordinary", **more})
    p = problem(asked)
    config = cast_rows.config_of(p, 2)
    run_cast(compiled(cast_rows.KERNEL, config), config, p)
    assert verdict(asked, p) <= MOST_OTHERS  # checks the cast that was requested, whatever configuration was found


def cast_tiles_trial(x: torch.Tensor, alone: bool = False) -> None:
    from lab.sim import cast_tiles as sim
    from lab.sim.library import compiled

    m, k = x.shape
    values, columns = (
        wider(torch.zeros(shape, dtype=torch.uint8), extra).view(torch.float8_e4m3fn)
        for shape, extra in (((m, k), 16), ((k, m), 192 - m))
    )
    scales = wider(torch.zeros(m, ceil_div(k, 128)), 3)
    of_columns = wider(torch.zeros(ceil_div(m, 128), k), 4).t()
    p = cast_tiles.TileCast(x, Target(use_ue8m0=True, min_amax=0.25), values, scales, columns, of_columns)
    p = p._replace(values=None, scales=None) if alone else p
    config = cast_tiles.config_of(p)
    sim.run_cast(compiled(cast_tiles.KERNEL, config), config, p)
    for found, of in (((columns, of_columns), x.t()), ((values, scales), x))[: 1 if alone else 2]:
        assert_same_bits(found, deep_gemm.per_token_cast_to_fp8(of, True, min_amax=0.25))


def route_trial(*, by_parts: bool) -> None:
    from deep_gemm.moe.route_rows import Totals, config_of
    from lab.sim.route_rows import RouteTrial

    RouteTrial(config_of(4, 65, Totals.OF_PARTS if by_parts else Totals.COUNTED), 300, 4, 65, first=9).run()


def gather_trial(*, is_many: bool) -> None:
    from deep_gemm.moe.gather_weighted import GatherConfig, ManyConfig
    from lab.sim.gather_weighted import GatherTrial, ManyTrial

    kind, config = (ManyTrial, ManyConfig) if is_many else (GatherTrial, GatherConfig)
    kind(config(torch.float32), 5, 3, 4104).run()


def layers_trial() -> None:
    """Compare layers with finer scales to the same layers computed part by part."""
    of: Any = deep_gemm
    x, ids, p = torch.randn(9, 144), torch.arange(18).view(9, 2) % 3, torch.rand(9, 2)
    w1, w2, w = torch.randn(3, 192, 144), torch.randn(3, 144, 96), torch.randn(40, 48)
    c1, c2 = torch.randn(3, 192), torch.randn(3, 144)
    by_32, by_64, exponents = (of.per_block_cast_to_fp8(each, True, g) for each, g in ((w1, 32), (w2, 64), (w, 64)))
    said = ({"recipe_a": (1, 32), "recipe_b": (32, 32)}, {"recipe_a": (1, 64), "recipe_b": (64, 64)})
    for columns in (None, 128):
        beside = columns or 32, columns or 64
        recipes = [{**each, "recipe_a": (1, g)} for each, g in zip(said, beside, strict=True)]
        rows = of.expert_rows(ids, 3)
        a = of.gather_cast_to_fp8(x, rows, gran_k=beside[0])
        h = of.m_grouped_fp8_gemm_nt_contiguous(a, by_32, grouped_layout=rows.ids, bias=c1, **recipes[0])
        a = of.silu_mul_cast_to_fp8(h, gran_k=beside[1])
        y = of.m_grouped_fp8_gemm_nt_contiguous(a, by_64, grouped_layout=rows.ids, bias=c2, **recipes[1])
        right = of.gather_weighted(y, rows, p)
        assert torch.equal(of.experts(x, ids, p, by_32, by_64, gran_k=columns, w1_bias=c1, w2_bias=c2), right)
        w_of_one = by_32[0][0], by_32[1][0]
        a = of.per_token_cast_to_fp8(x, gran_k=beside[0])
        right = of.fp8_gemm_nt(a, w_of_one, **recipes[0])
        assert torch.equal(of.linear(x, w_of_one, gran_k=columns), right)
    in_ue8m0 = exponents[0], exponents[1].to(torch.float8_e8m0fnu)
    right = of.linear(x[:, :48], exponents)
    assert torch.equal(of.linear(x[:, :48], in_ue8m0), right)
    words = by_32[0][0, :32, :128].contiguous(), torch.zeros(1, 1, dtype=torch.int32)  # scales of 32x32 or 64x64
    try:
        of.linear(x[:, :128], words)
    except ValueError as error:
        assert str(error).startswith("recipe_b: expected")
    else:
        raise AssertionError("words of ambiguous scales were accepted")


def scales_trial(is_m_major: bool) -> None:
    from lab.sim.lay_scales import ScalesTrial

    ScalesTrial(3, 70, 40, is_m_major).run()
    ScalesTrial(3, 70, 38, is_m_major, are_words=True).run()


def records_trial() -> None:
    """Compare calls by records, also for other numbers of rows, to calls without records; check views and rooms."""
    import pytest
    import test_call
    import test_shadow
    from fake_gpu import install

    for name in ("linear of 512 rows", "linear of 3 rows", "cast of both", "sums of rows into others", "logits"):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(lay_scales, "has_kernel", lambda _: True)
            test_call.test_other_rows_have_their_own_numbers(name, install(monkeypatch), monkeypatch)
    for view in test_shadow.VIEWS:
        test_shadow.test_views_lie_where_torchs_do(view)
    test_shadow.test_random_rooms_never_meet_while_both_are_used()


WITH_C, IN_PLACE = (
    tile_config(
        64, 64, Output(is_fp32=True, with_c=with_c, adds_to_d=not with_c, sfb=PER_ROW, work=works.DEPTHS), k=128
    )
    for with_c in (True, False)
)
TRIALS: dict[str, Callable[[], None]] = {
    "dense": lambda: dense_trial(tile_config(64, 64, Output(with_c=True), k=400), (72, 264, 400)),
    "by row": lambda: dense_trial(tile_config(64, 64, Output(is_fp32=True, sfb=PER_ROW), k=400), (72, 136, 400)),
    "split": lambda: dense_trial(tile_config(64, 64, Output(with_c=True), cluster_k=3, k=1040), (72, 264, 1040)),
    "decode": lambda: dense_trial(DecodeConfig(16, 4, 1, 2, with_c=True), (9, 264, 1040)),
    "decode of FP4": lambda: dense_trial(DecodeConfig(16, 4, 1, 2, b=E2M1, sfb=MX), (9, 264, 1056)),
    "fine": lambda: dense_trial(tile_config(64, 128, Output(sfb=BLOCKS_OF_32), k=400), (72, 264, 400), Words.B),
    "fine by row": lambda: dense_trial(tile_config(64, 128, Output(sfa=MX, sfb=MX), k=400), (72, 264, 400), Words.A),
    "fine, few rows": lambda: dense_trial(DecodeConfig(16, 4, 1, 2, sfa=MX, sfb=MX), (9, 264, 1040), Words.A),
    "fine ids": lambda: rows_trial(
        tile_config(64, 128, Output(sfb=BLOCKS_OF_32, work=works.IDS), k=400), [-1, *[0] * 70, 1], words=Words.B
    ),
    "into heads": lambda: skip_trial(skipping(tile_config(64, 64, Output(), k=400), 16), (16, 8, 48)),
    "into heads, few rows": lambda: skip_trial(skipping(DecodeConfig(16, 4, 1, 2), 16), (16, 8, 48)),
    "ids": lambda: rows_trial(tile_config(64, 64, Output(work=works.IDS), k=400), [-1, *[0] * 70, -1, *[1] * 20]),
    "ends": lambda: rows_trial(tile_config(64, 64, Output(work=works.ENDS), k=400), [70, 100], 130, alignment=32),
    "counts": lambda: rows_trial(tile_config(64, 64, Output(work=works.COUNTS), k=400), [3, 70, 0], 75),
    "rows by row": lambda: rows_trial(
        tile_config(64, 64, Output(is_fp32=True, sfb=PER_ROW, work=works.COUNTS), k=400), [3, 70, 0], 75
    ),
    "rows by 64": lambda: rows_trial(
        tile_config(64, 64, Output(work=works.IDS, sfa=PER_64), k=400), [-1, *[0] * 70, -1, *[1] * 20]
    ),
    "activated rows": lambda: silu_trial(True),
    "activated rows without weights": lambda: silu_trial(False),
    "heads": lambda: heads_trial(Tile(64, 64), Output(with_c=True, work=works.HEADS)),
    "heads by row": lambda: heads_trial(Tile(64, 64), Output(is_fp32=True, sfb=PER_ROW, work=works.HEADS)),
    "heads of few rows": lambda: heads_trial(
        Tile(16, 64, cluster_k=2, is_decode=True), Output(with_c=True, work=works.HEADS)
    ),
    "along k": lambda: depths_trial(WITH_C, False),
    "along k, on the GPU": lambda: depths_trial(IN_PLACE, True),
    "cast of rows": lambda: row_cast_trial(37, 1288, **ROUNDED, padding=24, padding_of_x=16),
    "cast of odd rows": lambda: row_cast_trial(5, 264, **ROUNDED, padding=16, padding_of_x=3),
    "cast of odd columns": lambda: row_cast_trial(1, 261, **ROUNDED, padding=0),
    "cast of counted rows": lambda: row_cast_trial(60, 264, "COUNTS", sizes=(0, 12, 5, 1, 11)),
    "activation with weights": lambda: row_cast_trial(21, 264, activates=True, has_weights=True),
    "activation with a limit": lambda: row_cast_trial(21, 264, activates=True, gating=Gating(limit=1.0)),
    "activation of gpt-oss": lambda: row_cast_trial(21, 264, activates=True, gating=Gating("swiglu", 1.702, 1.0, 7.0)),
    "activation with bounds": lambda: row_cast_trial(21, 264, activates=True, gating=Gating("situ", 4.0, 25.0)),
    "activation of groups": lambda: row_cast_trial(
        60, 128, "ENDS", True, sizes=(5, 5, 17, 50), alignment=8, has_weights=True, gating=Gating(limit=1.0)
    ),
    "cast to routes": lambda: row_cast_trial(23, 264, to_routes=True),
    "BF16 to routes": lambda: row_cast_trial(23, 264, to_routes=True, is_bf16=True),
    "activation in BF16": lambda: row_cast_trial(60, 264, "UNTIL", True, is_bf16=True, sizes=(5, 40)),
    "cast of both": lambda: cast_tiles_trial(wider(wild(144, 264, torch.bfloat16, 0), 24)),
    "cast of columns": lambda: cast_tiles_trial(wider(wild(136, 264, torch.bfloat16, 0), 24), alone=True),
    "routes": lambda: route_trial(by_parts=False),
    "routes by parts": lambda: route_trial(by_parts=True),
    "weighted sums": lambda: gather_trial(is_many=False),
    "weighted sums of many": lambda: gather_trial(is_many=True),
    "layers of finer scales": layers_trial,
    "records": records_trial,
    "scales": lambda: scales_trial(False),
    "m-major scales": lambda: scales_trial(True),
    **of_bf16.TRIALS,
    **of_fine.TRIALS,
    **of_sends.TRIALS,
    **of_depths.TRIALS,
}


# Mutations


@dataclass(frozen=True)
class Mutation:
    """Replaces `old` by `new` in a module of the package. One of these trials must notice the mistake."""

    name: str
    module: str
    old: str
    new: str
    trials: tuple[str, ...]

    def text(self) -> str:
        """Return the broken module's text. Raise a ValueError unless `old` occurs once: otherwise the list is stale."""
        text = (ROOT / "deep_gemm" / self.module.replace(".", "/")).with_suffix(".py").read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: expected one {self.old!r} in {self.module}.py, got {text.count(self.old)}")
        return text.replace(self.old, self.new)


LAUNCH, OF_DEPTHS, OF_LINEAR = "gemm.launch", "gemm.depths", "linear.check"
CASTS, CAST_ROWS, CAST_TILES = "casts.config", "casts.cast_rows", "casts.cast_tiles"
LAY_SCALES, ROUTE_ROWS, GATHER = "casts.lay_scales", "moe.route_rows", "moe.gather_weighted"
HEADS = "heads"
DENSE, SPLIT, BY_ROW, DECODE = "dense", "split", "by row", "decode"
INTO_HEADS = "into heads", "into heads, few rows"
ROWS, DEPTHS = ("ids", "ends", "counts"), ("along k", "along k, on the GPU")
OF_GPT_OSS, BOUNDED = "activation of gpt-oss", "activation with bounds"
WEIGHTED = "activation with weights"
CAST, ACTIVATED, TO_ROUTES = "cast of rows", "activation of groups", "cast to routes"
SILU = "activated rows"
BOTH, ROUTES, SUMS, SCALES = "cast of both", "routes", "weighted sums", "scales"
RECORDS = "records"
SUMS_OF_MANY, LAYERS = "weighted sums of many", "layers of finer scales"
OF_A_BY_B = 'majors.a_is_mn)\n    return {"map_a": Mapped(map_a, p.b)'
SWAPPED_WEIGHTS = 'row_weights": p.scales, "activation.scales": p.row_weights'
SWAPS: list[tuple[str, ...]] = [
    # The members of a struct
    ("core.params", "yield from others", "yield from others[::-1]", DENSE),
    ("core.params", "int(names.get(each[3], each[3] or 1))", "1", DEPTHS[0]),
    ("core.params", "before = -at % max(field.of_base, field.kind.alignment)", "before = 0", ROUTES),
    ("core.params", "at += before + field.num_bytes", "at += before + field.kind.size", DEPTHS[0]),
    # Products
    (LAUNCH, '"sfb_stride_n": 0 if loads_sfb else sfb_stride_n', '"sfb_stride_n": 0', DENSE),
    (LAUNCH, "else sfb_stride_k", "else sfb_stride_n", DENSE),
    (LAUNCH, '"sfa_stride_m": sfa_stride_m', '"sfa_stride_m": sfa_stride_k', DECODE),
    (LAUNCH, '"sfa_stride_k": sfa_stride_k', '"sfa_stride_k": sfa_stride_m', DECODE),
    (LAUNCH, '"c_pitch": c_pitch', '"c_pitch": p.n', DENSE),
    (LAUNCH, "else d_pitch", "else p.n + 8", SPLIT),
    (LAUNCH, '"m": p.m,\n        "n": p.n', '"m": p.n,\n        "n": p.m', DENSE),
    (LAUNCH, '"n": p.n,\n        "k": 0', '"n": p.k,\n        "k": 0', DENSE),
    (LAUNCH, "may_be_empty else p.k", "may_be_empty else p.k - 16", DENSE),
    (LAUNCH, "sides_in_words(p.sfa, p.sfb)", "sides_in_words(p.sfb, p.sfa)", "fine", "fine, few rows"),
    (LAUNCH, "ceil_div(k, of.columns)", "4 * sf.shape[-1]", "fine by row"),
    (LAUNCH, '"c_stride": c_stride', '"c_stride": p.m', HEADS, DEPTHS[0]),
    (LAUNCH, '"d_stride": d_stride', '"d_stride": d_pitch', "heads of few rows"),
    (LAUNCH, '"sfa_stride": sfa_stride', '"sfa_stride": sfa_stride_m', "heads of few rows"),
    (LAUNCH, '"sfb_stride": sfb_stride', '"sfb_stride": sfb_stride_n', HEADS, *ROWS),
    (LAUNCH, '"count": p.groups', '"count": p.groups - 1', HEADS, *ROWS),
    (LAUNCH, '"rows": p.m', '"rows": p.m - 1', "ids"),
    (LAUNCH, '"alignment": p.alignment', '"alignment": 1', "ids", "ends"),
    (LAUNCH, '"zeroes_padding": int(p.zero_padding)', '"zeroes_padding": 0', "ids", "ends"),
    (LAUNCH, '"d_pitch": row_pitch(p.d)', '"d_pitch": row_pitch(p.a)', "ids", "ends"),
    (LAUNCH, "math.inf if p.limit is None else p.limit", "1.0", SILU),
    (LAUNCH, '"scales_pitch": 0 if p.scales is None else p.scales.stride(-1)', '"scales_pitch": p.m', SILU),
    (LAUNCH, "p.planes if planes is None", "1 if planes is None", "heads of few rows"),
    # Maps and addresses
    (LAUNCH, "config.block_k), p.b),", "config.block_k), p.a),", DECODE),
    (LAUNCH, '{"sfa": p.sfa, "sfb"', '{"sfa": p.sfb, "sfb"', DECODE),
    (LAUNCH, '"sfb": p.sfb, "d": p.d}', '"sfb": p.sfb, "d": p.c}', DECODE),
    (LAUNCH, 'majors.a_is_mn)\n    return {"map_a": Mapped(map_a, p.a)', OF_A_BY_B, DENSE),
    (LAUNCH, "Mapped(map_a, p.a, before)", "Mapped(map_a, p.a)", *ROWS),
    (LAUNCH, "p.output.scale_parts), p.sfa)", "p.output.scale_parts), p.sfb)", DENSE, HEADS, *DEPTHS),
    (LAUNCH, "scale_parts_of_b), p.sfb)", "scale_parts_of_b), p.sfa)", BY_ROW, "rows by row", "heads by row"),
    (LAUNCH, 'of["sfb"] = p.sfb', 'of["sfb"] = p.sfa', DENSE),
    (LAUNCH, "panel), p.d)}\n    map_d", "panel), p.c)}\n    map_d", DENSE, HEADS),
    (LAUNCH, 'return of | {"d": p.d', 'return of | {"d": p.c', SPLIT),
    (LAUNCH, '"layout": p.c if has_rows', '"layout": p.a if has_rows', *ROWS),
    (LAUNCH, '"c": p.bias if has_rows else p.c', '"c": p.bias if has_rows else p.a', DENSE, SPLIT),
    (LAUNCH, "WGMMA_ROWS * row_pitch(p.d)", "WGMMA_ROWS * row_pitch(p.a)", *ROWS),
    (LAUNCH, "config.box_rows_of_a * row_pitch(p.a)", "config.block_m // 2 * row_pitch(p.a)", *ROWS),
    (LAUNCH, "output_map(d, panel), p.d)} if", "output_map(d, panel), p.a)} if", "counts"),
    (LAUNCH, 'row_weights": p.row_weights, "activation.scales": p.scales', SWAPPED_WEIGHTS, SILU),
    (LAUNCH, 'row_weights": p.row_weights', 'row_weights": p.sfb', "activated rows without weights"),
    # Maps
    (LAUNCH, "scales_map(p.sfb, config.block_n", "scales_map(p.sfa, config.block_n", BY_ROW, "heads by row"),
    (LAUNCH, "config.box_rows_of_b // config.cluster_m", "config.box_rows_of_b // 2", DENSE),
    (LAUNCH, "config.box_rows_of_sfa(p.m), p.output.scale_parts)", "config.box_rows_of_sfa(p.m), 1)", "rows by 64"),
    ("gemm.config.decode", "min(self.block_tokens, m) * self", "self.block_tokens * self", DECODE),
    ("gemm.config.decode", "self.slot_blocks + min", "1 + min", "decode of FP4"),
    # Into heads
    (LAUNCH, "-(p.heads.left + p.heads.mid) * p.d.element_size()", "-p.heads.left * p.d.element_size()", INTO_HEADS[0]),
    (LAUNCH, "part_map(p.d, right, panel)", "part_map(p.d, left, panel)", INTO_HEADS[0]),
    ("gemm.maps", "part.stride(1) * 2, row_pitch(d) * 2", "row_pitch(d) * 2, part.stride(1) * 2", INTO_HEADS[0]),
    (LAUNCH, '"left": p.heads.left, "mid": p.heads.mid', '"left": p.heads.mid, "mid": p.heads.left', INTO_HEADS[1]),
    (LAUNCH, '"columns": p.heads.columns}', '"columns": p.heads.columns_of_d}', *INTO_HEADS),
    (LAUNCH, "Mapped(map_right, p.d, before)", "Mapped(map_right, p.d)", INTO_HEADS[0]),
    (LAUNCH, '"multiplier": multiplier, "shift": shift', '"multiplier": shift, "shift": shift', *INTO_HEADS),
    # Depths
    (OF_DEPTHS, '"sum_k": p.a.numel() // p.m', '"sum_k": p.a.numel() // p.m - 16', *DEPTHS),
    (OF_DEPTHS, '"num_k_blocks": p.sfa.shape[1]', '"num_k_blocks": p.sfa.shape[1] - 1', *DEPTHS),
    (OF_DEPTHS, '"a": p.a, "b": p.b', '"a": p.b, "b": p.a', *DEPTHS),
    (OF_DEPTHS, '"ks": None if are_inline else depths', '"ks": p.a', *DEPTHS),
    (OF_DEPTHS, "by_depth=room", "by_depth=p.a", *DEPTHS),
    (OF_DEPTHS, '("map_a", p.a, p.m', '("map_a", p.a, p.n', *DEPTHS),
    # Records
    ("core.shadow", "self.behind + behind, at)", "self.behind, at)", RECORDS),
    ("core.shadow", "self.index(x.behind - before)", "self.index(0)", RECORDS),
    ("core.shadow", "at, size, self.index(value))", "at, size, self.index(value.value))", RECORDS),
    ("core.shadow", "self.index(grid), params", "self.index(plain(grid)), params", RECORDS),
    ("core.shadow", "if slot[1] < first]", "if slot[1] <= first]", RECORDS),
    ("core.shadow", "most(slot[0], size), room.last", "slot[0], room.last", RECORDS),
    ("core.shadow", "self.conditions[Condition(relation, i, j, outcome)] = None", "pass", RECORDS),
    ("core.replay", "values[launch.grid], words", "1, words", RECORDS),
    # Launches without a record
    ("core.kernel", "launcher.hold(params, grid)", "launcher.hold(params, 1)", RECORDS),
    # Casts of rows
    (CASTS, "x.stride(dim) * x.element_size()", "x.stride(dim)", CAST, BOTH),
    (CASTS, "getattr(problem, name) for name in", "problem[0] for name in", CAST, BOTH),
    (CAST_ROWS, "self.ends if self.counts is None", "self.ends if True", "cast of counted rows"),
    (CAST_ROWS, "self.ends if self.counts is None", "self.ends if False", ACTIVATED),
    (CAST_ROWS, '"x_pitch": pitch(p.x, 0) if m', '"x_pitch": 2 * p.x.shape[1] if m', CAST),
    (CAST_ROWS, '"values_pitch": pitch(p.values, 0)', '"values_pitch": pitch(p.x, 0)', CAST),
    (CAST_ROWS, '"scales_stride_m": pitch(scales, -2)', '"scales_stride_m": pitch(scales, -1)', CAST),
    (CAST_ROWS, '"scales_stride_k": pitch(scales, -1)', '"scales_stride_k": pitch(scales, -2)', CAST),
    (CAST_ROWS, "pitch(scales, 0) - scales.shape[1]", "pitch(scales, 0) - 0", "cast of counted rows"),
    (CAST_ROWS, '"scales_stride_g": further', '"scales_stride_g": 0', "cast of counted rows"),
    (CAST_ROWS, '"m": m', '"m": m - 1', CAST),
    (CAST_ROWS, '"k": k', '"k": k - 8', CAST),
    (CAST_ROWS, "(1 << 32) // ceil_div(k, block)", "(1 << 32) // (k // block)", CAST),
    (CAST_ROWS, "block), (1 << 32) - 1)", "block), 1 << 32)", ACTIVATED),
    (CAST_ROWS, "is None else p.sizes.numel()", "is None else p.sizes.numel() - 1", ACTIVATED),
    (CAST_ROWS, '"alignment": p.alignment', '"alignment": 1', ACTIVATED),
    (CAST_ROWS, "p.row_of.shape[1]", "p.row_of.shape[0]", TO_ROUTES),
    (CAST_ROWS, '"min_amax": p.to.min_amax', '"min_amax": 0', CAST),
    (CAST_ROWS, "math.inf if gating.limit is None else gating.limit", "math.inf", ACTIVATED),
    (CAST_ROWS, "gating != Gating() or is_weighted", "gating != Gating()", WEIGHTED),
    (CAST_ROWS, "gating != Gating() or is_weighted", "is_weighted", "activation with a limit"),
    (CAST_ROWS, '"alpha": gating.alpha', '"alpha": 1.0', OF_GPT_OSS, BOUNDED),
    (CAST_ROWS, '"beta": gating.beta or -0.0', '"beta": -0.0', OF_GPT_OSS),
    (CAST_ROWS, '"alpha_reciprocal": 1 / gating.alpha', '"alpha_reciprocal": 1.0', BOUNDED),
    (CAST_ROWS, "1 / gating.beta if gating.beta else 0.0", "0.04 / 2", BOUNDED),
    (CAST_ROWS, '2 if gating.name == "situ"', '1 if gating.name == "situ"', BOUNDED),
    (CAST_ROWS, '"rounds_up": int(p.to.use_ue8m0)', '"rounds_up": 0', CAST),
    (CAST_ROWS, '"kHasScales": self.to.format != BF16', '"kHasScales": True', "BF16 to routes"),
    (CAST_ROWS, '"kHasScales": self.to.format != BF16', '"kHasScales": False', CAST),
    (CAST_ROWS, "else Groups.UNTIL", "else Groups.NONE", "activation in BF16"),
    (CAST_ROWS, "activates=p.gating is not None", "activates=False", WEIGHTED),
    (CAST_ROWS, "p.counts is None else Groups.COUNTS", "p.counts is None else Groups.NONE", "cast of counted rows"),
    (CAST_ROWS, "Groups.ENDS if has_gaps", "Groups.NONE if has_gaps", ACTIVATED),
    (CAST_ROWS, "to_routes=p.row_of is not None", "to_routes=False", TO_ROUTES),
    (CAST_ROWS, "x.stride(0) % elements == 0", "True", "cast of odd rows"),
    (CAST_ROWS, "values.shape[1] % stored == 0", "True", "cast of odd columns"),
    # Casts of tiles
    (CAST_TILES, '"x_pitch": pitch(p.x, 0)', '"x_pitch": k', BOTH),
    (CAST_TILES, "pitch(p.values, 0)", "k", BOTH),
    (CAST_TILES, "pitch(p.columns, -2)", "m", BOTH),
    (CAST_TILES, "pitch(p.scales, 0)", "pitch(p.scales, 1) * 2", BOTH),
    (CAST_TILES, "pitch(p.scales, 1)", "pitch(p.scales, 0) + 4", BOTH),
    (CAST_TILES, "pitch(p.column_scales, 1)", "pitch(p.column_scales, 0) + 4", BOTH),
    (CAST_TILES, "pitch(p.column_scales, 0)", "pitch(p.column_scales, 1) * 2", BOTH),
    (CAST_TILES, '"m": m if p.columns is None else p.columns.shape[-1]', '"m": m - 16', BOTH),
    (CAST_TILES, '"k": k', '"k": k - 8', BOTH),
    (CAST_TILES, '"min_amax": p.to.min_amax', '"min_amax": 0', BOTH),
    (CAST_TILES, '"rounds_up": int(p.to.use_ue8m0)', '"rounds_up": 0', BOTH),
    (CAST_TILES, "columns.stride(-2), columns.shape[-1])", "columns.stride(-2))", "cast of columns"),
    # Rows of experts
    (ROUTE_ROWS, "**p.rows._asdict(),", "**p.rows._replace(counts=p.rows.ends, ends=p.rows.counts)._asdict(),", ROUTES),
    (ROUTE_ROWS, "**p.rows._asdict(),", "**p.rows._replace(row_of=p.rows.ids)._asdict(),", ROUTES),
    (ROUTE_ROWS, "**p.rows._asdict(),", "**p.rows._replace(token_of=p.rows.ids)._asdict(),", ROUTES),
    (ROUTE_ROWS, '"num_routes": p.topk_ids.numel()', '"num_routes": p.topk_ids.numel() - 1', ROUTES),
    (ROUTE_ROWS, '"topk": p.topk_ids.shape[1]', '"topk": p.topk_ids.shape[0]', ROUTES),
    (ROUTE_ROWS, "p.topk_ids.stride(0) - p.topk_ids.shape[1] if", "0 if", ROUTES),
    (ROUTE_ROWS, '"first": p.first', '"first": 0', ROUTES),
    (ROUTE_ROWS, '"num_experts": p.num_experts', '"num_experts": p.num_experts - 1', ROUTES),
    (ROUTE_ROWS, '"of_parts": of_parts', '"of_parts": p.rows.ids', "routes by parts"),
    (ROUTE_ROWS, "    part = PART", "    part = PART // 2", "routes by parts"),
    (ROUTE_ROWS, "ceil_div(num_routes, PART)", "num_routes // PART", ROUTES),
    (ROUTE_ROWS, "if num_experts <= most", "if num_experts <= 2 * most", ROUTES),
    (GATHER, '"y": y,', '"y": out,', SUMS),
    (GATHER, '"row_of": row_of,', '"row_of": weights,', SUMS),
    (GATHER, '"weights": weights,', '"weights": row_of,', SUMS),
    (GATHER, "else weights.stride(0)", "else weights.shape[1]", SUMS),
    (GATHER, '"y_pitch": y.stride(0)', '"y_pitch": out.stride(0)', SUMS),
    (GATHER, '"out_pitch": out.stride(0)', '"out_pitch": y.stride(0)', SUMS),
    (GATHER, '"topk": row_of.shape[1]', '"topk": row_of.shape[1] - 1', SUMS),
    (GATHER, '"n": out.shape[1]', '"n": out.shape[1] - 8', SUMS),
    (GATHER, "ceil_div(n // COLUMNS, config.num_threads)", "n // COLUMNS // config.num_threads", SUMS),
    (GATHER, "self.panels * self.num_math_warps * 32 * COLUMNS", "self.num_math_warps * 256", SUMS_OF_MANY),
    # Layers
    (OF_LINEAR, "_scales_of_rows(gran_k, of_w.columns)", "_scales_of_rows(None, of_w.columns)", LAYERS),
    (OF_LINEAR, "_scales_of_rows(gran_k, of_w.columns)", "_scales_of_rows(gran_k, SCALE_BLOCK)", LAYERS),
    (OF_LINEAR, "return found[-1]", "return found[0]", LAYERS),
    (OF_LINEAR, "k > found[-1].columns", "k > SCALE_BLOCK", LAYERS),
    (OF_LINEAR, "of_word > 1 and", "of_word > 4 and", LAYERS),
    ("linear.api", "a = cast_checked(p.x, Target(*of_x,", "a = cast_checked(p.x, Target(", LAYERS),
    ("linear.api", "c, of_b=of_b, of_a=of_a)", "c)", LAYERS),
    ("moe.api", "p.x, rows, of_x,", "p.x, rows, of_middle,", LAYERS),
    ("moe.api", "recipes, of_middle, p.w1", "recipes, of_x, p.w1", LAYERS),
    ("moe.api", "(p.second), p.w2_bias", "(p.second), None", LAYERS),
    ("moe.api", "rows, recipes_for(p.second),", "rows, recipes_for(p.first),", LAYERS),
    ("gemm.kinds.output", "(None, *operands[1:])", "(None, PER_ROW, operands[2])", LAYERS),
    # Scales
    (LAY_SCALES, '"sf": sf,', '"sf": out,', SCALES),
    (LAY_SCALES, '"out": out,', '"out": sf,', SCALES),
    (LAY_SCALES, "group_strides[0] if group_strides else 0", "0", SCALES),
    (LAY_SCALES, '"stride_m": stride_m', '"stride_m": stride_k', SCALES),
    (LAY_SCALES, '"stride_k": stride_k', '"stride_k": stride_m', SCALES, "m-major scales"),
    (LAY_SCALES, '"pitch": out.stride(-1)', '"pitch": sf.shape[-2]', SCALES),
    (LAY_SCALES, '"m": out.shape[-2]', '"m": out.shape[-2] - 1', SCALES),
    (LAY_SCALES, '"k_blocks": out.shape[-1]', '"k_blocks": sf.shape[-1]', SCALES),
    (LAY_SCALES, '"are_words": int(sf.dtype == torch.int32)', '"are_words": 0', SCALES),
    (LAY_SCALES, "(groups[0] if groups else 1) *", "1 *", SCALES),
    (LAY_SCALES, "ceil_div(m, config.rows)", "m // config.rows", SCALES),
    *of_bf16.SWAPS,
    *of_fine.SWAPS,
    *of_sends.SWAPS,
    *of_depths.SWAPS,
]
MUTATIONS = [
    Mutation(f"{module}: {one} becomes {other}", module, one, other, tuple(trials))
    for module, one, other, *trials in SWAPS
]


# Running


def why_noticed(mutation: Mutation | None, trial: str) -> str | None:
    """Run a trial in a process of its own with the broken module; return the text of the error it raises, or None."""
    receiver, sender = SERVER.Pipe(duplex=False)
    changed = None if mutation is None else (f"deep_gemm.{mutation.module}", mutation.text())
    process = SERVER.Process(target=broken.run, args=(changed, trial, sender))
    process.start()
    sender.close()
    try:
        found: str | None = receiver.recv() if receiver.poll(SECONDS) else f"no end after {SECONDS} s"
    except EOFError:
        process.join()
        if process.exitcode == 1:  # an error of Python: the package cannot be imported at all
            raise RuntimeError(f"{mutation}: expected a module that Python can import, see stderr") from None
        found = f"the process crashed with exit code {process.exitcode}"
    process.kill()
    process.join()
    return found
