"""Draws one call of `deep_gemm.distributed.Experts` on the GPUs of a node, by collectives and by peer memory.

python docs/draw_timeline.py --record FILE   with several GPUs: records the kernels of a call by torch's profiler
python docs/draw_timeline.py docs/experts_timeline.png   draws the newest record in benchmarks/results
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch.multiprocessing.spawn import spawn

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
SHAPES = ((256, 6, 128, 4096, 2048, 0), (256, 6, 4096, 4096, 2048, 0))
"""Shapes as in `bench distributed`: experts, top-k, tokens of each process, hidden, intermediate, Zipf's exponent."""
WARM_UPS = 5
KINDS = (
    ("products", "#2f6fb0", ("gemm",)),
    ("between GPUs", "#c8502d", ("post_rows", "ncclDevKernel", "meet_ranks")),
    ("routes", "#8a8a8a", ("count_routes", "route_rows", "plan_sends")),
    ("copies and casts", "#e0a030", ("gather_rows", "cast_rows", "pack_rows", "lay_scales")),
    ("sums", "#5c9e52", ("gather_weighted", "gather_weighted_many")),
)
OTHER = ("small operations of torch", "#c9b6d9")
Kernel = tuple[str, float, float]
"""A kernel's name, and its beginning and duration in microseconds."""


def record(path: Path) -> None:
    """Record a call by collectives and by peer memory for each shape, on all GPUs of this machine."""
    count = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_process, (count, folder), count)  # type: ignore[no-untyped-call]
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]
    from lab.bench import machine

    header = {
        "date": str(date.today()),
        "gpus": f"{count} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "commit": machine.git_state()[0],
        "method": "torch's profiler on each process; one call of each way after others, behind a fill of 512 MB and an "
        "all_reduce; microseconds from each GPU's first kernel on, since clocks of GPUs are not compared",
    }
    lines = [json.dumps({"rank": rank, **each}) for rank, of_rank in enumerate(ranks) for each in of_rank]
    path.write_text(f'{{"header": {json.dumps(header)},\n"calls": [\n' + ",\n".join(lines) + "\n]}\n")


def _process(rank: int, count: int, folder: str) -> None:
    from lab.bench.distributed import Clock, Work, _replayed, _weights

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=count, timeout=timedelta(seconds=120)
    )
    clock, found = Clock(device), []
    for shape in SHAPES:
        work = Work(shape, _weights(shape[0], shape[3], shape[4], device), device)
        for way, call in _calls(work, _replayed).items():
            once = partial(clock._once, call)
            for _ in range(WARM_UPS):
                once()
            found.append({"shape": shape, "way": way, "kernels": _kernels(once)})
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _calls(work: Any, replayed: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """Return the layer's call by collectives, and its graph by peer memory."""
    tokens = work.x, work.ids, work.p
    calls = {"collectives": partial(work.layer, *tokens)}
    if work.fused is not None:
        calls["peer memory"] = replayed(partial(work.fused.decode, *tokens), work.device)
    return calls


def _kernels(call: Callable[[], Any]) -> list[Kernel]:
    """Record the kernels of a call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    on_gpu = [each for each in profiler.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    on_gpu = sorted(on_gpu, key=lambda each: each.time_range.start)
    return behind_all_reduce([(e.name[:80], e.time_range.start, e.time_range.elapsed_us()) for e in on_gpu])


def behind_all_reduce(kernels: list[Kernel]) -> list[Kernel]:
    """Keep the kernels after the last all-reduce, which belong to the call; times count from the first kernel."""
    begin = max((i + 1 for i, (name, _, _) in enumerate(kernels) if "AllReduce" in name), default=0)
    first = kernels[begin][1]
    return [(name, at - first, duration) for name, at, duration in kernels[begin:]]


def draw(path: Path, source: Path | None = None) -> None:
    """Draw the calls of a record, with a bar for each GPU."""
    source = source or max(RESULTS.glob("timeline-*.json"))
    found = json.loads(source.read_text())
    calls = found["calls"]
    shapes = list(dict.fromkeys(tuple(call["shape"]) for call in calls))
    ways = list(dict.fromkeys(call["way"] for call in calls))
    ranks = 1 + max(call["rank"] for call in calls)
    figure = Figure(figsize=(12, 1.2 + 0.42 * len(shapes) * len(ways) * (ranks + 1)), layout="constrained")
    for axes, shape in zip(figure.subplots(len(shapes), squeeze=False)[:, 0], shapes, strict=True):
        _draw_shape(axes, [call for call in calls if tuple(call["shape"]) == shape], ways, ranks)
    colours = [*((name, colour) for name, colour, _ in KINDS), OTHER]
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours], loc="outside upper center", ncols=6
    )
    header = found["header"]
    figure.supxlabel(f"{header['gpus']}, {header['date']}, commit {header['commit']}", fontsize=9)
    figure.savefig(path, dpi=120)


def _draw_shape(axes: Axes, calls: list[dict[str, Any]], ways: list[str], ranks: int) -> None:
    labels, places = [], []
    for call in calls:
        place = ways.index(call["way"]) * (ranks + 0.6) + call["rank"]
        labels.append(f"{call['way']}, GPU {call['rank']}")
        places.append(place)
        for name, begin, duration in call["kernels"]:
            axes.barh(place, duration, left=begin, height=0.8, color=_colour(name), linewidth=0)
        end = max(begin + duration for _, begin, duration in call["kernels"])
        axes.text(end, place, f" {end:.0f} us", va="center", fontsize=8)
    axes.set_yticks(places, labels, fontsize=8)
    axes.invert_yaxis()
    experts, topk, tokens, hidden, intermediate, _ = calls[0]["shape"]
    axes.set_title(
        f"{tokens} tokens for each GPU, top-{topk} of {experts} experts of {hidden} x {intermediate}", fontsize=9
    )
    axes.margins(x=0.08)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)


def _colour(name: str) -> str:
    for _, colour, parts in KINDS:
        if any(part in name for part in parts):
            return colour
    return OTHER[1]


if __name__ == "__main__":
    if sys.argv[1] == "--record":
        record(Path(sys.argv[2]))
    else:
        draw(Path(sys.argv[1]))
