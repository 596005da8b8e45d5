"""Write the times of this package and its rivals, from lab/bench/peers.json, as Markdown.

python docs/write_results.py > docs/results.md
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable

from lab.bench.compare import Comparison, comparisons, summaries
from lab.bench.contenders import BF16, BLOCKWISE, FAST, OURS
from lab.bench.peers import DEEPGEMM, host_times, sessions
from lab.bench.report import Row, geometric_mean

Product = tuple[str, tuple[int, ...]]

H200, H100 = sessions()
NAMES = {OURS: "deep_gemm", DEEPGEMM: "DeepGEMM", FAST: "fast", BLOCKWISE: "blockwise", BF16: "BF16"}
KINDS = {
    "dense_1d1d": "weight gradients, m x n x k",
    "contiguous": "experts with equal rows",
    "contiguous_uneven": "experts with uneven rows",
    "masked": "experts, masked",
    "k_grouped": "weight gradients of experts",
}
HOST_CALL = "dense m=4096"

Kind = Callable[[Row], bool]
EXAMPLES: tuple[tuple[str, Product, Kind], ...] = (
    (
        "dense, 16 x 4096 x 7168",
        ("dense", (16, 4096, 7168)),
        lambda row: row.kind == "dense" and row.shape[0] <= 128,
    ),
    (
        "dense, 4096 x 4096 x 7168",
        ("dense", (4096, 4096, 7168)),
        lambda row: row.kind == "dense" and row.shape[0] > 128,
    ),
    (
        "32 experts, 2048 rows unevenly, 4096 x 7168",
        ("contiguous_uneven", (32, 2048, 4096, 7168)),
        lambda row: row.kind.startswith("contiguous"),
    ),
    (
        "masked, 4 experts of about 256 rows, 4096 x 7168",
        ("masked", (4, 256, 4096, 7168)),
        lambda row: row.kind == "masked",
    ),
    (
        "weight gradients of 8 experts, 7168 x 2048, k = 4096, FP32",
        ("k_grouped", (8, 7168, 2048, 4096)),
        lambda row: row.kind in ("dense_1d1d", "k_grouped"),
    ),
)


def _examples() -> str:
    """Tabulate five products and the host time of a call, and the mean speedup over DeepGEMM for each kind."""
    us = _times(H200)
    compared = [comparisons(sessions()[gpu]) for gpu in (H200, H100)]
    lines = [
        "| one call on an H200 | deep_gemm | DeepGEMM | cuBLASLt fast | mean speedup, H200 | H100 |",
        "|---|---|---|---|---|---|",
    ]
    for name, product, belongs in EXAMPLES:
        inside = [[each for each in every if belongs(each.row)] for every in compared]
        times = [_us(us[product].get(who)) for who in (OURS, DEEPGEMM, FAST)]
        lines.append(_line(name, *times, f"{_speedup(inside[0])} ({len(inside[0])})", _speedup(inside[1])))
    hosts = [host_times(gpu)[HOST_CALL] for gpu in (H200, H100)]
    times = [_us(hosts[0][who]) for who in (OURS, DEEPGEMM, "torch._scaled_mm")]
    lines.append(_line("host time of a dense call", *times, *(f"{host[DEEPGEMM] / host[OURS]:.2f}x" for host in hosts)))
    return "\n".join(lines)


def page() -> str:
    """Return the text of docs/results.md."""
    header = sessions()[H200].header
    measured = (
        "{date} at commit {commit} on an {machine[gpu]} ({machine[software]})".format(**each.header)
        for each in sessions().values()
    )
    return "\n".join(
        [
            "# Results",
            "",
            "How fast is the package compared with DeepGEMM and cuBLASLt, for each shape and GPU?",
            "",
            "![speed beside DeepGEMM, product by product](peers.png)",
            "",
            *_wrapped(
                f"Measured {' and '.join(measured)}. Method: {header['method']}. Uneven experts: DeepGEMM gets rows "
                "padded to 128 for each expert, this package gets the rows without padding."
            ),
            "",
            *_wrapped(
                "`docs/write_results.py` writes this page, and `docs/draw_peers.py` draws the picture, from "
                "`lab/bench/peers.json`. [benchmark.md](benchmark.md) describes how the package measures itself, "
                "and [aims.md](aims.md) lists the aims."
            ),
            "",
            "## Six calls",
            "",
            "The L2 is cold. *Mean speedup* is over DeepGEMM, for all products of a kind; their number is in brackets.",
            "cuBLASLt fast is `torch._scaled_mm` with a scale for each tensor: it does less work. Its time is our aim.",
            "",
            _examples(),
            "",
            "## Means",
            "",
            "These are geometric means of our time over the other's time: below 1 this package is faster.",
            "",
            *_means(),
            "",
            "## Host time",
            "",
            "The table has the microseconds of one call on the caller's thread.",
            "",
            *_hosts(),
            "",
            "## Time of one call",
            "",
            "The table has microseconds on the GPU, L2 cold. `fast` is `torch._scaled_mm`, with one scale for a tensor",
            "and fast accumulation, `blockwise` is cuBLASLt's product with scales by block, `BF16` is torch's in BF16.",
            "",
            *_every_time(),
            "",
        ]
    )


def _means() -> list[str]:
    lines = ["| products | number | DeepGEMM, H200 | H100 | cuBLASLt fast, H200 | H100 |", "|---|---|---|---|---|---|"]
    each_gpu = [summaries(comparisons(sessions()[gpu])) for gpu in (H200, H100)]
    for first, second in zip(*each_gpu, strict=True):
        figures = (first.to_deepgemm, second.to_deepgemm, first.to_fast, second.to_fast)
        lines.append(
            _line(
                KINDS.get(first.regime, first.regime),
                str(first.count),
                *("" if each is None else f"{each:.3f}" for each in figures),
            )
        )
    return lines


def _hosts() -> list[str]:
    who = (OURS, DEEPGEMM, "torch._scaled_mm")
    lines = [
        "| call | " + " | ".join(f"{NAMES.get(name, name)}, {gpu}" for gpu in ("H200", "H100") for name in who) + " |",
        "|---" * 7 + "|",
    ]
    for call, times in host_times(H200).items():
        both = (times, host_times(H100)[call])
        lines.append(_line(call, *("" if name not in us else f"{us[name]}" for us in both for name in who)))
    return lines


def _every_time() -> list[str]:
    on_h100 = (OURS, DEEPGEMM, FAST)
    headings = [f"{name}, H200" for name in NAMES.values()] + [f"{NAMES[who]}, H100" for who in on_h100]
    lines = [_line("product", *headings), "|---" * (len(headings) + 1) + "|"]
    h200, h100 = _times(H200), _times(H100)
    for (kind, shape), us in h200.items():
        name = "x".join(map(str, shape)) if kind == "dense" else f"{kind} {'x'.join(map(str, shape))}"
        times = [us.get(who) for who in NAMES] + [h100[kind, shape].get(who) for who in on_h100]
        lines.append(_line(name, *(_figure(each) for each in times)))
    return lines


def _times(gpu: str) -> dict[Product, dict[str, float]]:
    times: dict[Product, dict[str, float]] = {}
    for row in sessions()[gpu].rows:
        if row.us:
            times.setdefault((row.kind, row.shape), {})[row.contender] = row.us
    return times


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_on_hyphens=False)


def _speedup(compared: Iterable[Comparison]) -> str:
    mean = geometric_mean(1 / each.to_deepgemm for each in compared if each.to_deepgemm)
    return "" if mean is None else f"{mean:.2f}x"


def _us(us: float | None) -> str:
    return f"{_figure(us)} us" if us else ""


def _figure(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")
