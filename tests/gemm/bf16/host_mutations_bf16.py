"""Mistakes in the host's half of a BF16 product's launch, and their trials, which `host_mutations.py` runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deep_gemm.gemm.choose.bf16 import SUM_OUTPUT
from deep_gemm.gemm.config.bf16 import Bf16Config, bf16_config
from deep_gemm.gemm.config.tall import Majors
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.epilogues import SILU_IN_BF16
from deep_gemm.gemm.kinds.output import Output
from deep_gemm.gemm.kinds.works import MOST_COUNTED
from lab.casts import wider

TURNED = Majors(True, True)


# Trials. Two strides that could be confused always differ.


def spread(p: Any, **more: int) -> Any:
    """Copy these operands to memory whose contiguous lines are longer by `more[name]` elements."""
    wide = {
        name: wider(x, extra) if x.dim() < 2 or x.stride(-1) == 1 else wider(x.mT, extra).mT
        for name, extra in more.items()
        if extra and (x := getattr(p, name)) is not None
    }
    return p._replace(**wide)


def product_trial(config: Bf16Config, m: int, n: int, k: int) -> None:
    from lab.sim import bf16 as sim
    from lab.sim import product

    p = sim.random_problem(config, m, n, k, planes=3, gap=8)
    p = spread(p, b=0 if config.majors.b_is_mn else 16, c=0 if p.c is p.d else 8)
    product.run(product.compile_config(config), config, p).checked()


def rows_trial(groups: works.Work, layout: list[int], rows: int | None = None, b_is_mn: bool = False) -> None:
    from lab.sim import bf16_rows, product

    config = bf16_config(64, 64, Output(work=groups), Majors(b_is_mn=b_is_mn))
    zero_padding = groups != works.COUNTS
    p = bf16_rows.random_problem(config, layout, 136, 200, rows=rows, alignment=32, zero_padding=zero_padding)
    p = spread(p, a=8, b=0 if b_is_mn else 16)
    product.run(product.compile_config(config), config, p).checked()


def experts_trial() -> None:
    from lab.sim.bf16_rows import Bf16RowsTrial

    config = bf16_config(64, 256, Output(work=works.ENDS, epilogue=SILU_IN_BF16))
    Bf16RowsTrial(config, (70, 100), n=136, alignment=1, limit=0.5).run()


def depths_trial() -> None:
    from lab.sim import bf16_depths, product

    config = bf16_config(64, 64, Output(is_fp32=True, with_c=True, work=works.PARTS), TURNED)
    p = spread(bf16_depths.Bf16DepthsTrial(config, (64, 0, 192), 72, 136).problem(), a=8, b=16, c=8)
    bf16_depths.run(product.compile_config(config), config, p).checked()


def counted_trial(on_gpu_alone: bool, ks: tuple[int, ...] = (70, 0, 129), m: int = 72, n: int = 136) -> None:
    from lab.sim import bf16_counted, bf16_depths, product

    config = bf16_config(64, 64, Output(is_fp32=True, with_c=True, work=works.COUNTED), TURNED)
    p = spread(bf16_counted.Bf16CountedTrial(config, ks, m, n, on_gpu_alone=on_gpu_alone).problem(), b=16, c=8)
    bf16_depths.run(product.compile_config(config), config, p, ks=ks).checked()


def sum_trial(is_turned: bool) -> None:
    from deep_gemm.gemm.sum_slices import SlicesConfig
    from lab.sim import bf16_sums, product

    config = bf16_config(64, 64, SUM_OUTPUT, TURNED if is_turned else Majors())
    output = SlicesConfig(True, adds_to_d=True)
    p = spread(bf16_sums.SumTrial(config, 4, 5, 72, 136, 192, output=output).problem(), b=0 if is_turned else 16)
    adder = bf16_sums.SlicesTrial(output).compiled()
    bf16_sums.run(product.compile_config(config), adder, config, 4, p).checked()


HEADS_OUTPUT = Output(is_fp32=True, with_c=True, work=works.HEADS)
TRIALS: dict[str, Callable[[], None]] = {
    "bf16": partial(product_trial, bf16_config(64, 64, Output(with_c=True)), 72, 136, 200),
    "bf16 turned": partial(product_trial, bf16_config(64, 64, Output(is_fp32=True), TURNED), 72, 136, 200),
    "bf16 split": partial(product_trial, bf16_config(64, 32, Output(with_c=True), cluster_k=2, slices=2), 72, 136, 200),
    "bf16 sharing B": partial(product_trial, bf16_config(64, 64, Output(), cluster_m=2), 200, 136, 200),
    "bf16 heads": partial(product_trial, bf16_config(64, 64, HEADS_OUTPUT), 72, 136, 200),
    "bf16 ids": partial(rows_trial, works.IDS, [-1, *[0] * 70, -1, *[1] * 20]),
    "bf16 ends": partial(rows_trial, works.ENDS, [70, 100], 130, b_is_mn=True),
    "bf16 counts": partial(rows_trial, works.COUNTS, [3, 70, 0], 75),
    "bf16 experts": experts_trial,
    "bf16 along k": depths_trial,
    "bf16 along k, counted": partial(counted_trial, True),
    "bf16 along k, counted from the host": partial(counted_trial, False),
    "bf16 along k, many": partial(counted_trial, True, tuple(i % 3 for i in range(MOST_COUNTED + 5)), 8, 8),
    "bf16 sum": partial(sum_trial, False),
    "bf16 sum, turned": partial(sum_trial, True),
}


# Mutations: a module, a text, its replacement, and trials. One of the trials must notice the mistake.

ONE, TURNED_ONE, SPLIT, HEADS = "bf16", "bf16 turned", "bf16 split", "bf16 heads"
ROWS = ("bf16 ids", "bf16 ends", "bf16 counts")
DEPTHS, MANY = "bf16 along k", "bf16 along k, many"
LATE_MAP = " * element.value\n    return TensorMap(element, (columns, box[0], rows), (pitch"
LATE_A = '\n        return {"map_a": Mapped(map_a'
COUNTED = ("bf16 along k, counted", "bf16 along k, counted from the host")
SUMS = ("bf16 sum", "bf16 sum, turned")

SWAPS: list[tuple[str, ...]] = [
    # Products
    ("gemm.launch", "p.a.stride(-1) != 1", "False", TURNED_ONE),
    ("gemm.launch", "p.a, min(config.box_rows_of_a, p.m)", "p.a, config.box_rows_of_a // 2", ONE),
    ("gemm.launch", "config.box_rows_of_b // config.cluster_m", "config.box_rows_of_b", "bf16 sharing B"),
    ("gemm.launch", "else d_pitch", "else p.n + 8", SPLIT),
    ("gemm.maps", "x.mT, (columns, WGMMA_ROWS)", "x.mT, (WGMMA_ROWS // 2, columns)", TURNED_ONE),
    ("gemm.config.tall", "at_once = clusters if self.starts_alone", "at_once = 1 if self.starts_alone", SPLIT),
    ("gemm.launch", '"c_stride": c_stride', '"c_stride": p.m', HEADS, DEPTHS),
    ("gemm.launch", '"count": p.groups', '"count": 1', HEADS, *ROWS),
    ("gemm.launch", "config.box_rows_of_a * row_pitch(p.a)", "config.box_rows_of_a * p.k", *ROWS),
    # The first product of experts
    ("gemm.config.tall", "self.block_n // 2 if epilogue.gates_apart", "64 if epilogue.gates_apart", "bf16 experts"),
    ("gemm.launch", "math.inf if p.limit is None else p.limit", "math.inf", "bf16 experts"),
    # Groups along k, by depths of the host
    ("gemm.bf16_depths", "accumulate(blocks, initial=0)", "range(len(blocks))", DEPTHS),
    ("gemm.bf16_depths", "blocks, range(len(blocks)), strict", "blocks, [0] * len(blocks), strict", DEPTHS),
    ("gemm.bf16_depths", '"count": len(some)', '"count": len(some) - 1', DEPTHS),
    ("gemm.bf16_depths", 'firsts, "num_k_blocks": blocks', 'blocks, "num_k_blocks": firsts', DEPTHS),
    # Groups along k, by depths on the GPU
    ("gemm.maps", "(columns, box[0], rows), (pitch, pitch)", "(columns, box[0], rows - 1), (pitch, pitch)", *COUNTED),
    ("gemm.maps", "(columns, box[0], rows), (pitch, pitch)", "(columns, box[0] - 1, rows), (pitch, pitch)", *COUNTED),
    ("gemm.maps", f"row_pitch(x){LATE_MAP}", f"columns{LATE_MAP}", *COUNTED),
    ("gemm.launch", f"128){LATE_A}, p.a)", f"128){LATE_A}, p.b)", *COUNTED),
    ("gemm.bf16_depths", '"counts": p.sfa', '"counts": p.a', *COUNTED),
    ("gemm.bf16_depths", "p.ks or ()", "(p.ks or ())[::-1]", COUNTED[1]),
    ("gemm.bf16_depths", '"groups": p.groups', '"groups": p.groups - 1', *COUNTED),
    ("gemm.bf16_depths", '"rows": p.k', '"rows": p.k // 2', *COUNTED),
    ("gemm.bf16_depths", '"first": first', '"first": 0', MANY),
    ("gemm.bf16_depths", '"count": count', '"count": count - 1', *COUNTED),
    ("gemm.bf16_depths", "count = min(p.groups - first, MOST_COUNTED)", "count = MOST_COUNTED", MANY),
    ("gemm.bf16_depths", "range(0, p.groups, MOST_COUNTED)", "range(1)", MANY),
    # Sums over products
    ("gemm.launch", '"products": p.groups', '"products": p.groups - 1', *SUMS),
    ("gemm.sum_slices", "slices, slices=slices)", "slices, slices=slices - 1)", *SUMS),
    ("gemm.sum_slices", "p._replace(d=workspace, c=None)", "p._replace(c=None)", *SUMS),
    ("gemm.sum_slices", '"slices": slices, "d": d,', '"slices": d, "d": slices,', *SUMS),
    ("gemm.sum_slices", '"d_pitch": d.stride(0)', '"d_pitch": d.stride(0) + 8', *SUMS),
    ("gemm.sum_slices", '"count": count', '"count": count - 1', *SUMS),
    ("gemm.sum_slices", '"m": m, "n": n', '"m": n, "n": m', *SUMS),
    ("gemm.sum_slices", "return m * ceil_div(n, COLUMNS)", "return m * (n // COLUMNS)", *SUMS),
]
