"""Ways to break the host's half of a BF16 product's launch, and trials: `host_mutations.py` runs them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from deep_gemm.choose.bf16 import SUM_OUTPUT
from deep_gemm.choose.config_bf16 import MOST_COUNTED, Bf16Config, Majors, bf16_config
from deep_gemm.choose.output import Groups, Output

MODULES = ("bf16_gemm", "bf16", "bf16_rows", "bf16_depths", "bf16_counted", "sum_slices", "bf16_sums")
SIMULATED = ("bf16", "bf16_rows", "bf16_depths", "bf16_counted", "bf16_sums")
TURNED = Majors(True, True)


# Trials. Strides differ wherever two could be mistaken for each other.


def wider(x: torch.Tensor, extra: int) -> torch.Tensor:
    """The same numbers in rows that lie further apart."""
    room = torch.zeros(*x.shape[:-1], x.shape[-1] + extra, dtype=x.dtype)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


def expect_no_mistakes(outcome: Any) -> None:
    if outcome.mistakes is not None:
        raise ValueError(outcome.mistakes)


def product_trial(config: Bf16Config, m: int, n: int, k: int) -> None:
    from lab.sim import bf16 as sim

    p = sim.random_problem(config, m, n, k, planes=3, gap=8)
    p = p._replace(b=p.b if config.majors.b_is_mn else wider(p.b, 16))
    if p.c is not None and p.c is not p.d:
        p = p._replace(c=wider(p.c, 8))
    expect_no_mistakes(sim.run(sim.compile_config(config), config, p, num_sms=2 * config.cluster_size))


def rows_trial(groups: Groups, layout: list[int], rows: int | None = None, b_is_mn: bool = False) -> None:
    from lab.sim import bf16, bf16_rows

    config = bf16_config(64, 64, Output(groups=groups), Majors(b_is_mn=b_is_mn))
    zero_padding = groups != Groups.COUNTS
    p = bf16_rows.random_problem(config, layout, 136, 200, rows=rows, alignment=32, zero_padding=zero_padding)
    p = p._replace(a=wider(p.a, 8), b=p.b if b_is_mn else wider(p.b, 16))
    expect_no_mistakes(bf16_rows.run(bf16.compile_config(config), config, p))


def depths_trial() -> None:
    from lab.sim import bf16, bf16_depths

    config = bf16_config(64, 64, Output(True, with_c=True, groups=Groups.DEPTHS), TURNED)
    p = bf16_depths.random_problem(config, (64, 0, 192), 72, 136)
    assert p.c is not None
    p = p._replace(a=wider(p.a, 8), b=wider(p.b, 16), c=wider(p.c, 8))
    expect_no_mistakes(bf16_depths.run(bf16.compile_config(config), config, p))


def counted_trial(on_gpu_alone: bool, ks: tuple[int, ...] = (70, 0, 129), m: int = 72, n: int = 136) -> None:
    from lab.sim import bf16, bf16_counted

    config = bf16_config(64, 64, Output(True, with_c=True, groups=Groups.COUNTED_DEPTHS), TURNED)
    p = bf16_counted.random_problem(config, ks, m, n, on_gpu_alone=on_gpu_alone, gap=8)
    assert p.c is not None
    p = p._replace(b=wider(p.b, 16), c=wider(p.c, 8))
    expect_no_mistakes(bf16_counted.run(bf16.compile_config(config), config, p))


def sum_trial(is_turned: bool) -> None:
    from deep_gemm.kernels.sum_slices import SlicesConfig
    from lab.sim import bf16, bf16_sums

    config = bf16_config(64, 64, SUM_OUTPUT, TURNED if is_turned else Majors())
    output = SlicesConfig(True, adds_to_d=True)
    p = bf16_sums.random_problem(config, 5, 72, 136, 192, output, gap=8)
    if not is_turned:
        p = p._replace(b=wider(p.b, 16))
    adder = bf16_sums.compile_slices(output)
    expect_no_mistakes(bf16_sums.run(bf16.compile_config(config), adder, config, 4, p))


HEADS_OUTPUT = Output(is_fp32=True, with_c=True, groups=Groups.HEADS)
TRIALS: dict[str, Callable[[], None]] = {
    "bf16": partial(product_trial, bf16_config(64, 64, Output(with_c=True)), 72, 136, 200),
    "bf16 turned": partial(product_trial, bf16_config(64, 64, Output(True), TURNED), 72, 136, 200),
    "bf16 split": partial(product_trial, bf16_config(64, 32, Output(with_c=True), cluster_k=2, slices=2), 72, 136, 200),
    "bf16 sharing B": partial(product_trial, bf16_config(64, 64, Output(), cluster_m=2), 200, 136, 200),
    "bf16 heads": partial(product_trial, bf16_config(64, 64, HEADS_OUTPUT), 72, 136, 200),
    "bf16 ids": partial(rows_trial, Groups.IDS, [-1, *[0] * 70, -1, *[1] * 20]),
    "bf16 ends": partial(rows_trial, Groups.ENDS, [70, 100], 130, b_is_mn=True),
    "bf16 counts": partial(rows_trial, Groups.COUNTS, [3, 70, 0], 75),
    "bf16 along k": depths_trial,
    "bf16 along k, counted": partial(counted_trial, True),
    "bf16 along k, counted from the host": partial(counted_trial, False),
    "bf16 along k, many": partial(counted_trial, True, tuple(i % 3 for i in range(MOST_COUNTED + 5)), 8, 8),
    "bf16 sum": partial(sum_trial, False),
    "bf16 sum, turned": partial(sum_trial, True),
}


# Mutations: module, text, what it becomes, trials of which one must notice

ONE, TURNED_ONE, SPLIT, HEADS = "bf16", "bf16 turned", "bf16 split", "bf16 heads"
ROWS = ("bf16 ids", "bf16 ends", "bf16 counts")
DEPTHS, MANY = "bf16 along k", "bf16 along k, many"
LATE_MAP = " * element.value\n    return TensorMap(element, (columns, box[0], rows), (pitch"
COUNTED = ("bf16 along k, counted", "bf16 along k, counted from the host")
SUMS = ("bf16 sum", "bf16 sum, turned")
NO_C = "0 if p.c is None else p.c"

SWAPS: list[tuple[str, ...]] = [
    # Products
    ("bf16", '"m": m,\n        "n": n', '"m": n,\n        "n": m', ONE),
    ("bf16", '"n": n,\n        "k": k', '"n": k,\n        "k": n', ONE),
    ("bf16", '"k": k,\n', '"k": k - 8,\n', ONE),
    ("bf16", f'"c_pitch": {NO_C}.stride(-2)', '"c_pitch": n', ONE, HEADS),
    ("bf16", '"d_pitch": p.d.stride(-2)', '"d_pitch": n + 8', SPLIT),
    ("bf16", f"c_stride = {NO_C}.stride(0)", "c_stride = m * n", HEADS),
    ("bf16", '"heads.count": planes', '"heads.count": 1', HEADS),
    ("bf16", 'Place("map_a", A)', 'Place("map_a", B)', ONE),
    ("bf16", 'Place("map_b", B)', 'Place("map_b", A)', ONE),
    ("bf16", 'Place("map_d", D)', 'Place("map_d", C)', ONE),
    ("bf16", 'Place("c", C)', 'Place("c", A)', ONE),
    ("bf16", 'Place("d", D)', 'Place("d", C)', SPLIT),
    ("bf16", "min(config.box_rows_of_a, m)", "config.box_rows_of_a // 2", ONE),
    ("bf16", "config.block_n // config.cluster_m", "config.block_n", "bf16 sharing B"),
    ("bf16", "x.mT, (BLOCK_K, WGMMA_ROWS)", "x.mT, (WGMMA_ROWS // 2, BLOCK_K)", TURNED_ONE),
    ("bf16", "return cluster_tiles * config.cluster_k", "return config.cluster_k", SPLIT),
    # Rows
    ("bf16_rows", '"groups.count": groups', '"groups.count": 1', *ROWS),
    ("bf16_rows", '"groups.rows": m', '"groups.rows": m - 1', "bf16 ids"),
    ("bf16_rows", '"groups.alignment": p.alignment', '"groups.alignment": 1', "bf16 ids", "bf16 ends"),
    ("bf16_rows", '"groups.zeroes_padding": int(p.zero_padding)', '"groups.zeroes_padding": 0', *ROWS),
    ("bf16_rows", '"d_pitch": row_pitch(p.d)', '"d_pitch": row_pitch(p.a)', "bf16 ids", "bf16 ends"),
    ("bf16_rows", "config.box_rows_of_a * row_pitch(p.a)", "config.box_rows_of_a * k", *ROWS),
    ("bf16_rows", "WGMMA_ROWS * row_pitch(p.d)", "WGMMA_ROWS * row_pitch(p.a)", *ROWS),
    ("bf16_rows", 'Place("map_whole_d", D)', 'Place("map_whole_d", A)', "bf16 counts"),
    ("bf16_rows", 'Place("d", D)', 'Place("d", A)', "bf16 ids", "bf16 ends"),
    ("bf16_rows", 'Place("groups.layout", C)', 'Place("groups.layout", B)', *ROWS),
    ("bf16_rows", 'Place("map_b", B)', 'Place("map_b", A)', *ROWS),
    # Groups along k
    ("bf16_depths", "first += k // BLOCK_K", "first += 1", DEPTHS),
    ("bf16_depths", "Part(first, k // BLOCK_K, group)", "Part(first, k // BLOCK_K, 0)", DEPTHS),
    ("bf16_depths", f'"c_pitch": {NO_C}.stride(1)', '"c_pitch": n', DEPTHS),
    ("bf16_depths", f'"parts.c_stride": {NO_C}.stride(0)', '"parts.c_stride": m * n', DEPTHS),
    ("bf16_depths", '"parts.count": len(parts)', '"parts.count": len(parts) - 1', DEPTHS),
    ("bf16_depths", '"m": m,\n        "n": n', '"m": n,\n        "n": m', DEPTHS),
    ("bf16_depths", '"parts.first_k_block": first_k_block', '"parts.first_k_block": num_k_blocks', DEPTHS),
    ("bf16_depths", '"parts.num_k_blocks": num_k_blocks', '"parts.num_k_blocks": first_k_block', DEPTHS),
    ("bf16_depths", '"parts.group": group', '"parts.group": first_k_block', DEPTHS),
    ("bf16_depths", 'Place("map_a", A), Place("map_b", B)', 'Place("map_a", B), Place("map_b", A)', DEPTHS),
    ("bf16_depths", 'Place("c", C)', 'Place("c", D)', DEPTHS),
    # Groups along k that the GPU counts
    ("maps", "(columns, box[0], rows), (pitch, pitch)", "(columns, box[0], rows - 1), (pitch, pitch)", *COUNTED),
    ("maps", "(columns, box[0], rows), (pitch, pitch)", "(columns, box[0] - 1, rows), (pitch, pitch)", *COUNTED),
    ("maps", f"row_pitch(x){LATE_MAP}", f"columns{LATE_MAP}", *COUNTED),
    ("bf16_counted", 'Place("map_a", A)', 'Place("map_a", B)', *COUNTED),
    ("bf16_counted", 'Place("map_b", B)', 'Place("map_b", A)', *COUNTED),
    ("bf16_counted", 'Place("c", C)', 'Place("c", D)', *COUNTED),
    ("bf16_counted", 'Place("depths.counts", SFA)', 'Place("depths.counts", A)', COUNTED[0]),
    ("bf16_counted", 'numbers["depths.counts"] = 0', 'numbers["depths.counts"] = p.a.data_ptr()', COUNTED[1]),
    ("bf16_counted", 'struct.pack(f"<{groups}i", *p.ks)', 'struct.pack(f"<{groups}i", *p.ks[::-1])', COUNTED[1]),
    ("bf16_counted", f'"c_pitch": {NO_C}.stride(1)', '"c_pitch": n', *COUNTED),
    ("bf16_counted", f'"depths.c_stride": {NO_C}.stride(0)', '"depths.c_stride": m * n', *COUNTED),
    ("bf16_counted", '"depths.groups": groups', '"depths.groups": groups - 1', *COUNTED),
    ("bf16_counted", '"depths.rows": p.a.shape[0]', '"depths.rows": p.a.shape[0] - 1', *COUNTED),
    ("bf16_counted", '"depths.first": first', '"depths.first": 0', MANY),
    ("bf16_counted", '"depths.count": count', '"depths.count": count - 1', *COUNTED),
    ("bf16_counted", "count = min(groups - first, MOST_COUNTED)", "count = MOST_COUNTED", MANY),
    ("bf16_counted", "range(0, p.d.shape[0], MOST_COUNTED)", "range(1)", MANY),
    ("bf16_counted", '"m": m,\n        "n": n', '"m": n,\n        "n": m', *COUNTED),
    # Sums over products
    ("bf16_sums", '"m": m,\n        "n": n', '"m": n,\n        "n": m', *SUMS),
    ("bf16_sums", '"k": k,\n', '"k": k - BLOCK_K,\n', *SUMS),
    ("bf16_sums", '"sum.products": products', '"sum.products": products - 1', *SUMS),
    ("bf16_sums", '"sum.slices": slices', '"sum.slices": slices - 1', *SUMS),
    ("bf16_sums", 'Place("map_a", A)', 'Place("map_a", B)', *SUMS),
    ("bf16_sums", 'Place("map_b", B)', 'Place("map_b", A)', *SUMS),
    ("bf16_sums", 'Place("map_d", D)', 'Place("map_d", A)', *SUMS),
    ("bf16_sums", "output_map(config, workspace)", "output_map(config, p.d)", *SUMS),
    ("bf16_sums", "min(config.box_rows_of_a, m)", "config.box_rows_of_a // 2", SUMS[0]),
    ("bf16_sums", "(slices, m, n), p.d.stride(0)", "(slices, m, n), n + 8", *SUMS),
    ("sum_slices", '"slices": slices.data_ptr(), "d": d', '"slices": d, "d": slices.data_ptr()', *SUMS),
    ("sum_slices", '"d_pitch": pitch', '"d_pitch": pitch + 8', *SUMS),
    ("sum_slices", '"count": count', '"count": count - 1', *SUMS),
    ("sum_slices", '"m": m, "n": n', '"m": n, "n": m', *SUMS),
    ("sum_slices", "return m * ceil_div(n, COLUMNS)", "return m * (n // COLUMNS)", *SUMS),
]
