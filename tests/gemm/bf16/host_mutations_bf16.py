"""Ways to break the host's half of a BF16 product's launch, and trials: `host_mutations.py` runs them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deep_gemm.gemm.bf16.choose import SUM_OUTPUT
from deep_gemm.gemm.bf16.config import MOST_COUNTED, Bf16Config, Majors, bf16_config
from deep_gemm.gemm.output import Groups, Output
from lab.casts import wider

TURNED = Majors(True, True)


# Trials. Strides differ wherever two could be mistaken for each other.


def spread(p: Any, **more: int) -> Any:
    """Lay the rows of these operands further apart, by so many elements. One that lies along its rows stays."""
    wide = {
        name: wider(getattr(p, name), extra) for name, extra in more.items() if extra and getattr(p, name) is not None
    }
    return p._replace(**wide)


def product_trial(config: Bf16Config, m: int, n: int, k: int) -> None:
    from lab.sim import bf16 as sim

    p = sim.random_problem(config, m, n, k, planes=3, gap=8)
    p = spread(p, b=0 if config.majors.b_is_mn else 16, c=0 if p.c is p.d else 8)
    sim.run(sim.compile_config(config), config, p).checked()


def rows_trial(groups: Groups, layout: list[int], rows: int | None = None, b_is_mn: bool = False) -> None:
    from lab.sim import bf16, bf16_rows

    config = bf16_config(64, 64, Output(groups=groups), Majors(b_is_mn=b_is_mn))
    zero_padding = groups != Groups.COUNTS
    p = bf16_rows.random_problem(config, layout, 136, 200, rows=rows, alignment=32, zero_padding=zero_padding)
    p = spread(p, a=8, b=0 if b_is_mn else 16)
    bf16_rows.run(bf16.compile_config(config), config, p).checked()


def depths_trial() -> None:
    from lab.sim import bf16, bf16_depths

    config = bf16_config(64, 64, Output(is_fp32=True, with_c=True, groups=Groups.DEPTHS), TURNED)
    p = spread(bf16_depths.random_problem(config, (64, 0, 192), 72, 136), a=8, b=16, c=8)
    bf16_depths.run(bf16.compile_config(config), config, p).checked()


def counted_trial(on_gpu_alone: bool, ks: tuple[int, ...] = (70, 0, 129), m: int = 72, n: int = 136) -> None:
    from lab.sim import bf16, bf16_counted

    config = bf16_config(64, 64, Output(is_fp32=True, with_c=True, groups=Groups.COUNTED_DEPTHS), TURNED)
    p = spread(bf16_counted.random_problem(config, ks, m, n, on_gpu_alone=on_gpu_alone, gap=8), b=16, c=8)
    bf16_counted.run(bf16.compile_config(config), config, p).checked()


def sum_trial(is_turned: bool) -> None:
    from deep_gemm.gemm.bf16.sum_slices import SlicesConfig
    from lab.sim import bf16, bf16_sums

    config = bf16_config(64, 64, SUM_OUTPUT, TURNED if is_turned else Majors())
    output = SlicesConfig(True, adds_to_d=True)
    p = spread(bf16_sums.random_problem(config, 5, 72, 136, 192, output, gap=8), b=0 if is_turned else 16)
    adder = bf16_sums.SlicesTrial(output).compiled()
    bf16_sums.run(bf16.compile_config(config), adder, config, 4, p).checked()


HEADS_OUTPUT = Output(is_fp32=True, with_c=True, groups=Groups.HEADS)
TRIALS: dict[str, Callable[[], None]] = {
    "bf16": partial(product_trial, bf16_config(64, 64, Output(with_c=True)), 72, 136, 200),
    "bf16 turned": partial(product_trial, bf16_config(64, 64, Output(is_fp32=True), TURNED), 72, 136, 200),
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
    ("gemm.bf16.launch", '"m": m,\n        "n": n', '"m": n,\n        "n": m', ONE),
    ("gemm.bf16.launch", '"n": n,\n        "k": k', '"n": k,\n        "k": n', ONE),
    ("gemm.bf16.launch", '"k": k,\n', '"k": k - 8,\n', ONE),
    ("gemm.bf16.launch", f'"c_pitch": {NO_C}.stride(-2)', '"c_pitch": n', ONE, HEADS),
    ("gemm.bf16.launch", '"d_pitch": p.d.stride(-2)', '"d_pitch": n + 8', SPLIT),
    ("gemm.bf16.launch", f"c_stride = {NO_C}.stride(0)", "c_stride = m * n", HEADS),
    ("gemm.bf16.launch", '"heads.count": planes', '"heads.count": 1', HEADS),
    ("gemm.bf16.launch", "map_a=A", "map_a=B", ONE),
    ("gemm.bf16.launch", " map_b=B", " map_b=A", ONE),
    ("gemm.bf16.launch", " map_d=D", " map_d=C", ONE),
    ("gemm.bf16.launch", " c=C", " c=A", ONE),
    ("gemm.bf16.launch", " d=D", " d=C", SPLIT),
    ("gemm.bf16.launch", "p.a, min(config.box_rows_of_a, m)", "p.a, config.box_rows_of_a // 2", ONE),
    ("gemm.bf16.launch", "config.block_n // config.cluster_m", "config.block_n", "bf16 sharing B"),
    ("gemm.bf16.launch", "x.mT, (BLOCK_K, WGMMA_ROWS)", "x.mT, (WGMMA_ROWS // 2, BLOCK_K)", TURNED_ONE),
    ("gemm.bf16.launch", "return cluster_tiles * config.cluster_k", "return config.cluster_k", SPLIT),
    # Rows
    ("gemm.bf16.rows", '"groups.count": groups', '"groups.count": 1', *ROWS),
    ("gemm.bf16.rows", '"groups.rows": m', '"groups.rows": m - 1', "bf16 ids"),
    ("gemm.bf16.rows", '"groups.alignment": p.alignment', '"groups.alignment": 1', "bf16 ids", "bf16 ends"),
    ("gemm.bf16.rows", '"groups.zeroes_padding": int(p.zero_padding)', '"groups.zeroes_padding": 0', *ROWS),
    ("gemm.bf16.rows", '"d_pitch": row_pitch(p.d)', '"d_pitch": row_pitch(p.a)', "bf16 ids", "bf16 ends"),
    ("gemm.bf16.rows", "config.box_rows_of_a * row_pitch(p.a)", "config.box_rows_of_a * k", *ROWS),
    ("gemm.bf16.rows", "WGMMA_ROWS * row_pitch(p.d)", "WGMMA_ROWS * row_pitch(p.a)", *ROWS),
    ("gemm.bf16.rows", 'Place("map_whole_d", D)', 'Place("map_whole_d", A)', "bf16 counts"),
    ("gemm.bf16.rows", 'Place("d", D)', 'Place("d", A)', "bf16 ids", "bf16 ends"),
    ("gemm.bf16.rows", 'Place("groups.layout", C)', 'Place("groups.layout", B)', *ROWS),
    ("gemm.bf16.rows", 'Place("map_b", B)', 'Place("map_b", A)', *ROWS),
    # Groups along k
    ("gemm.bf16.depths", "first += k // BLOCK_K", "first += 1", DEPTHS),
    ("gemm.bf16.depths", "Part(first, k // BLOCK_K, group)", "Part(first, k // BLOCK_K, 0)", DEPTHS),
    ("gemm.bf16.depths", f'"c_pitch": {NO_C}.stride(1)', '"c_pitch": n', DEPTHS),
    ("gemm.bf16.depths", f'"parts.c_stride": {NO_C}.stride(0)', '"parts.c_stride": m * n', DEPTHS),
    ("gemm.bf16.depths", '"parts.count": len(parts)', '"parts.count": len(parts) - 1', DEPTHS),
    ("gemm.bf16.depths", '"m": m,\n        "n": n', '"m": n,\n        "n": m', DEPTHS),
    ("gemm.bf16.depths", '"parts.first_k_block": first_k_block', '"parts.first_k_block": num_k_blocks', DEPTHS),
    ("gemm.bf16.depths", '"parts.num_k_blocks": num_k_blocks', '"parts.num_k_blocks": first_k_block', DEPTHS),
    ("gemm.bf16.depths", '"parts.group": group', '"parts.group": first_k_block', DEPTHS),
    ("gemm.bf16.depths", 'Place("map_a", A), Place("map_b", B)', 'Place("map_a", B), Place("map_b", A)', DEPTHS),
    ("gemm.bf16.depths", 'Place("c", C)', 'Place("c", D)', DEPTHS),
    # Groups along k that the GPU counts
    ("gemm.maps", "(columns, box[0], rows), (pitch, pitch)", "(columns, box[0], rows - 1), (pitch, pitch)", *COUNTED),
    ("gemm.maps", "(columns, box[0], rows), (pitch, pitch)", "(columns, box[0] - 1, rows), (pitch, pitch)", *COUNTED),
    ("gemm.maps", f"row_pitch(x){LATE_MAP}", f"columns{LATE_MAP}", *COUNTED),
    ("gemm.bf16.counted", 'Place("map_a", A)', 'Place("map_a", B)', *COUNTED),
    ("gemm.bf16.counted", 'Place("map_b", B)', 'Place("map_b", A)', *COUNTED),
    ("gemm.bf16.counted", 'Place("c", C)', 'Place("c", D)', *COUNTED),
    ("gemm.bf16.counted", 'Place("depths.counts", SFA)', 'Place("depths.counts", A)', COUNTED[0]),
    ("gemm.bf16.counted", 'numbers["depths.counts"] = 0', 'numbers["depths.counts"] = p.a.data_ptr()', COUNTED[1]),
    ("gemm.bf16.counted", 'struct.pack(f"<{groups}i", *p.ks)', 'struct.pack(f"<{groups}i", *p.ks[::-1])', COUNTED[1]),
    ("gemm.bf16.counted", f'"c_pitch": {NO_C}.stride(1)', '"c_pitch": n', *COUNTED),
    ("gemm.bf16.counted", f'"depths.c_stride": {NO_C}.stride(0)', '"depths.c_stride": m * n', *COUNTED),
    ("gemm.bf16.counted", '"depths.groups": groups', '"depths.groups": groups - 1', *COUNTED),
    ("gemm.bf16.counted", '"depths.rows": p.a.shape[0]', '"depths.rows": p.a.shape[0] - 1', *COUNTED),
    ("gemm.bf16.counted", '"depths.first": first', '"depths.first": 0', MANY),
    ("gemm.bf16.counted", '"depths.count": count', '"depths.count": count - 1', *COUNTED),
    ("gemm.bf16.counted", "count = min(groups - first, MOST_COUNTED)", "count = MOST_COUNTED", MANY),
    ("gemm.bf16.counted", "range(0, p.d.shape[0], MOST_COUNTED)", "range(1)", MANY),
    ("gemm.bf16.counted", '"m": m,\n        "n": n', '"m": n,\n        "n": m', *COUNTED),
    # Sums over products
    ("gemm.bf16.sums", '"m": m,\n        "n": n', '"m": n,\n        "n": m', *SUMS),
    ("gemm.bf16.sums", '"k": k,\n', '"k": k - BLOCK_K,\n', *SUMS),
    ("gemm.bf16.sums", '"sum.products": products', '"sum.products": products - 1', *SUMS),
    ("gemm.bf16.sums", '"sum.slices": slices', '"sum.slices": slices - 1', *SUMS),
    ("gemm.bf16.sums", 'Place("map_a", A)', 'Place("map_a", B)', *SUMS),
    ("gemm.bf16.sums", 'Place("map_b", B)', 'Place("map_b", A)', *SUMS),
    ("gemm.bf16.sums", 'Place("map_d", D)', 'Place("map_d", A)', *SUMS),
    ("gemm.bf16.sums", "output_map(config, workspace)", "output_map(config, p.d)", *SUMS),
    ("gemm.bf16.sums", "min(config.box_rows_of_a, m)", "config.box_rows_of_a // 2", SUMS[0]),
    ("gemm.bf16.sums", "(slices, m, n), p.d.stride(0)", "(slices, m, n), n + 8", *SUMS),
    ("gemm.bf16.sum_slices", '"slices": slices.data_ptr(), "d": d', '"slices": d, "d": slices.data_ptr()', *SUMS),
    ("gemm.bf16.sum_slices", '"d_pitch": pitch', '"d_pitch": pitch + 8', *SUMS),
    ("gemm.bf16.sum_slices", '"count": count', '"count": count - 1', *SUMS),
    ("gemm.bf16.sum_slices", '"m": m, "n": n', '"m": n, "n": m', *SUMS),
    ("gemm.bf16.sum_slices", "return m * ceil_div(n, COLUMNS)", "return m * (n // COLUMNS)", *SUMS),
]
