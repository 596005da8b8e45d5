"""Run every kernel under NVIDIA's compute-sanitizer, with few small problems. Needs a Hopper GPU.

    python tests/lab/sanitized_gpu.py --out FILE            all tools over all parts, and a table
    python tests/lab/sanitized_gpu.py --tool racecheck --part logits
    python tests/lab/sanitized_gpu.py --run logits          only the problems, as they run under a tool

Sizes are chosen so that rings wrap, CTAs compute several tiles, and tiles are cut at the edges.

The exit code is 1 unless every tool ran every part to its end and found only known false reports. Two tools report
falsely; for each of these tools a separate run proves the explanation:

- racecheck treats an mbarrier as an order of only the threads that arrive before the threads that wait. If one lane
  arrives for its warp, after a barrier of the warp, racecheck does not see that the other lanes have finished reading.
  So it runs kernels that are edited so that every lane arrives.
- initcheck does not see TMA's stores, so it reports kernels that read a product's output. In the part "stored" it also
  reports PyTorch's sum of an output, although the sum is right. (PyTorch also reads undefined logits, to hide them.)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

TOOLS = {
    "memcheck": ("--report-api-errors", "no"),  # cuda-bindings requests functions that this driver lacks
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": (),
    "synccheck": (),
}
SECONDS = 300
AT_ONCE = 6
FOUND = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
REPORT = re.compile(r"^========= (?=\S)", re.MULTILINE)
IS_NO_REPORT = re.compile(
    r"COMPUTE-SANITIZER|\w+ SUMMARY|Target application returned|Error: process did| ?\d+ errors were skipped"
)
PLACE = re.compile(r"^=========     (?:(?:Read|Write) Thread .* )?at (.+?)\+0x[0-9a-f]+", re.MULTILINE)

READ_WHAT_TMA_STORED = re.compile(
    r": (cast_rows|gather_weighted(_many)?|sum_slices|at::.*)$|^Warning: Error buffer overflow"
)
"""Reports that are explained. If they fill a tool's buffer, the tool warns once for each launch, and counts this."""
EVERY_LANE_ARRIVES = {
    "work/rows.cuh": {
        "queue.init(kNumMathWarps + kStoringWarps + 1": "queue.init((kNumMathWarps + kStoringWarps) * 32 + 1",
        "kConvertGroups * kConvertWarps + kScalingWarps);": "(kConvertGroups * kConvertWarps + kScalingWarps) * 32);",
        "!kIsWarp || ptx::lane_index() == 0": "true",
    },
    "work/rows_twice.cuh": {
        "queue.init(kNumMathWarps + kStoringWarps + 1)": "queue.init((kNumMathWarps + kStoringWarps) * 32 + 1)",
        "!kIsWarp || ptx::lane_index() == 0": "true",
    },
    "fp8_gemm.cuh": {"shared.ring.init(kFinishingWarps)": "shared.ring.init(kFinishingWarps * 32)"},
    "convert/e2m1.cuh": {"if (lane == 0) ptx::mbarrier_arrive(&shared.ring": "ptx::mbarrier_arrive(&shared.ring"},
    "convert/scales_of_blocks.cuh": {"if (ptx::lane_index() == 0) ptx::mbarrier_arrive": "ptx::mbarrier_arrive"},
    "epilogue/silu_or_rows.cuh": {
        f"{read}\n{indent}if (ptx::lane_index() == 0) ": f"{read}\n{indent}"
        for read, indent in (("have read their copies", "  "), ("have read the rows, and stored them", "    "))
    },
    "epilogue/store_rows.cuh": {
        "ptx::mbarrier_init(&ready[i], 4), ptx::mbarrier_init(&free[i], 1)": (
            "ptx::mbarrier_init(&ready[i], 4 * 32), ptx::mbarrier_init(&free[i], 32)"
        ),
        "else if (lane == 0) ptx::mbarrier_arrive(&barriers.ready": "else ptx::mbarrier_arrive(&barriers.ready",
        "if (ptx::lane_index() == 0) ptx::mbarrier_arrive(&barriers.ready": "ptx::mbarrier_arrive(&barriers.ready",
        "if (ptx::lane_index() == 0) ptx::mbarrier_arrive(&barriers.free": "ptx::mbarrier_arrive(&barriers.free",
    },
    "work/depths.cuh": {
        "queue.init(kNumMathWarps)": "queue.init(kNumMathWarps * 32)",
        "dealt.x, ptx::lane_index() == 0": "dealt.x, true",
    },
    "experts_few.cuh": {
        "mbarrier_init(&shared.full[stage], 2)": "mbarrier_init(&shared.full[stage], kIsFp8 ? 33 : 2)",
        "mbarrier_init(&shared.empty[stage], kNumMathWarps)": "mbarrier_init(&shared.empty[stage], kNumMathWarps * 32)",
        "if (caster.lane == 0) ptx::mbarrier_arrive": "ptx::mbarrier_arrive",
        "of_rows[1], lane == 0": "of_rows[1], true",
    },
    "gather_weighted_many.cuh": {
        "shared.ring.init();": (
            "for (uint32_t i = 0; i < kNumStages; ++i)\n"
            "    ptx::mbarrier_init(&shared.ring.full[i], 1),\n"
            "      ptx::mbarrier_init(&shared.ring.empty[i], kNumMathWarps * 32);\n"
            "  if (ptx::thread_index() == 0) ptx::fence_mbarrier_init();"
        ),
        "release(shared.ring, at, lane, ptx::shfl_sync(ptx::float_of(row[kPanels - 1].w), 0));": (
            "ptx::mbarrier_arrive_after(&shared.ring.empty[at.stage], ptx::float_of(row[kPanels - 1].w), true);"
        ),
    },
    "logits/tiles.cuh": {
        "if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty": "ptx::mbarrier_arrive(&shared.q_empty",
        "q_empty[slot], kNumMathWarps)": "q_empty[slot], kNumMathWarps * 32)",
    },
}
PARTS: dict[str, Callable[[], None]] = {}


def part(run: Callable[[], None]) -> Callable[[], None]:
    PARTS[run.__name__] = run
    return run


def _random(*shape: int) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().cuda()


def _rows(*shape: int) -> Any:
    import deep_gemm

    return deep_gemm.per_token_cast_to_fp8(_random(*shape), mn_major=True)


def _blocks(*shape: int) -> Any:
    import deep_gemm

    return deep_gemm.per_block_cast_to_fp8(_random(*shape))


@part
def operators() -> None:
    """Call every public function with a few rows."""
    import ops_cases
    import torch
    from torch.utils._pytree import tree_map

    def on_gpu(given: Any) -> Any:
        return tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, given)

    for name, value in vars(ops_cases).items():
        if name.isupper() and name != "CASES":
            setattr(ops_cases, name, on_gpu(value))
    counts = ops_cases.counts
    ops_cases.counts = lambda: counts().cuda()  # type: ignore[assignment, misc]
    for case in ops_cases.CASES:
        for m in (6, 130):
            print(case.name, m, flush=True)
            inputs = on_gpu(case.inputs(m))
            with torch.device("cuda"):
                case.call(*inputs)


@part
def dense() -> None:
    import torch

    import deep_gemm

    deep_gemm.set_num_sms(4)
    for m, n, k in ((300, 392, 1168), (1040, 256, 640), (70, 512, 4096)):
        deep_gemm.fp8_gemm_nt(_rows(m, k), _blocks(n, k))
        deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(_rows(m, k), _rows(n, k), torch.zeros(m, n, device="cuda"))
    deep_gemm.fp8_gemm_nt_skip_head_mid(_rows(200, 512), _blocks(256, 512), _random(200, 320), (64, 32, 64))
    deep_gemm.fp8_einsum("bhr,hdr->bhd", deep_gemm.per_token_cast_to_fp8(_random(150, 4, 512)), _blocks(4, 128, 512))


@part
def few_rows() -> None:
    import deep_gemm

    for m, n, k in ((13, 136, 2064), (32, 576, 7168)):
        deep_gemm.fp8_gemm_nt(_rows(m, k), _blocks(n, k))
        deep_gemm.linear(_random(m, k), _blocks(n, k))
    deep_gemm.fp8_einsum("bhr,hdr->bhd", deep_gemm.per_token_cast_to_fp8(_random(5, 4, 512)), _blocks(4, 128, 512))


@part
def groups() -> None:
    import torch

    import deep_gemm
    from deep_gemm.casts.rules import empty_scales, empty_values
    from deep_gemm.gemm.api.grouped import product_of_rows_by_64
    from deep_gemm.moe.activation import activated_product_of_rows

    deep_gemm.set_num_sms(6)
    w, ids = _blocks(3, 264, 640), torch.tensor([0] * 130 + [-1] * 5 + [2] * 301, dtype=torch.int32, device="cuda")
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(_rows(436, 640), w, grouped_layout=ids)
    counts = torch.tensor([130, 0, 257], dtype=torch.int32, device="cuda")
    deep_gemm.m_grouped_fp8_gemm_nt_masked(_rows(3, 260, 640), w, masked_m=counts, expected_m=128)
    d = empty_values((436, 256), ids), empty_scales((436,), 256, ids, mn_major=True, gran_k=64)
    ends = torch.tensor([130, 130, 436], dtype=torch.int32, device="cuda")
    activated_product_of_rows(_rows(436, 640), _blocks(3, 512, 640), d, ends, torch.rand(436, device="cuda"))
    product_of_rows_by_64(d, _blocks(3, 264, 256), _random(436, 264), ids)
    ks = [384, 0, 128, 208]
    a, b = (deep_gemm.k_grouped_cast_to_fp8(_random(x, sum(ks)), ks, mn_major=True) for x in (200, 264))
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, ks=ks)
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, ks_tensor=torch.tensor(ks, dtype=torch.int32, device="cuda"))


@part
def bf16() -> None:
    import torch

    import deep_gemm

    deep_gemm.set_num_sms(6)
    for m, n, k in ((296, 392, 1168), (24, 264, 2048)):
        a, b = _random(m, k), _random(n, k)
        deep_gemm.bf16_gemm_nt(a, b)
        deep_gemm.bf16_gemm_tt(_random(k, m), b)
        deep_gemm.bf16_gemm_nn(a, b.t().contiguous(), torch.zeros(m, n, device="cuda"))
    w, ids = _random(3, 264, 640), torch.tensor([0] * 130 + [-1] * 5 + [2] * 301, dtype=torch.int32, device="cuda")
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(_random(436, 640), w, grouped_layout=ids)
    counts = torch.tensor([130, 0, 257], dtype=torch.int32, device="cuda")
    deep_gemm.m_grouped_bf16_gemm_nt_masked(_random(3, 260, 640), w, masked_m=counts, expected_m=128)
    ks = [384, 0, 128, 200]
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(_random(sum(ks), 200), _random(sum(ks), 264), ks_cpu=ks)
    deep_gemm.einsum("bmk,bnk->mn", _random(40, 136, 128), _random(40, 264, 128))
    deep_gemm.einsum("bhr,hdr->bhd", _random(200, 4, 512), _random(4, 128, 512))
    deep_gemm.einsum("bhd,hdr->bhr", _random(200, 4, 128), _random(4, 128, 512))


@part
def hyper_connections() -> None:
    import torch

    import deep_gemm

    for m in (13, 137, 300, 1024):
        for splits in (None, 3):
            shape = (m,) if splits is None else (splits, m)
            d, sqr_sum = torch.empty(*shape, 24, device="cuda"), torch.empty(*shape, device="cuda")
            deep_gemm.tf32_hc_prenorm_gemm(_random(m, 1984), _random(24, 1984).float(), d, sqr_sum, splits)


@part
def logits() -> None:
    import torch

    from deep_gemm.indexer.api import compute
    from lab.sim import logits as cases

    for dtype in (torch.float32, torch.bfloat16):
        for heads in (32, 64):
            contexts = [[900, 901], [0, 0], [65, 64], [3000, 3001], [1, 2]]
            compute(cases.paged_problem(contexts, 2, heads, shares=6, dtype=dtype, device="cuda"))
            alone = [[x] for x, _ in contexts]
            compute(cases.paged_problem(alone, 1, heads, shares=6, dtype=dtype, device="cuda"))
            shape = 200, 1500, heads, 128
            compute(cases.problem(shape, cases.anywhere(200, 1500), dtype=dtype, device="cuda"))
            few = 5, 1500, heads, 128
            compute(cases.problem(few, cases.causal(5, 1500), clean=True, dtype=dtype, device="cuda"))


@part
def casts() -> None:
    import torch

    import deep_gemm

    x = _random(517, 1168)
    deep_gemm.per_channel_cast_to_fp8(x)
    deep_gemm.cast_both_to_fp8(x)
    _blocks(3, 517, 1168)
    ids = torch.randint(-1, 16, (517, 6), generator=torch.Generator().manual_seed(0)).cuda()
    weights = torch.rand(517, 6, generator=torch.Generator().manual_seed(1)).cuda()
    deep_gemm.expert_rows(ids.repeat(4, 1), 16)
    rows = deep_gemm.expert_rows(ids, 16)
    deep_gemm.gather_weighted(_random(517 * 6, 512), rows, weights)
    deep_gemm.gather_weighted(_random(517 * 6, 16384), rows, weights)
    deep_gemm.experts(x[:, :512].contiguous(), ids, weights, _blocks(16, 512, 512), _blocks(16, 512, 256))
    deep_gemm.experts(x[:3, :512].contiguous(), ids[:3], weights[:3], _blocks(16, 512, 512), _blocks(16, 512, 256))


@part
def ranks() -> None:
    """Run a node of one rank in each form of its products, mega MoE, and the kernels for rows sent by collectives."""
    from unittest import mock

    import pytest
    import torch
    from mega_cases import FORMS, Model, result, take

    from deep_gemm.across import message, plan_sends
    from deep_gemm.across.by_peers import Peers
    from deep_gemm.core.meeting import Room
    from deep_gemm.distributed import Experts
    from deep_gemm.moe.routing import stack_routes, sum_rows

    tokens, hidden, topk, experts = 300, 512, 4, 8
    x, w1, w2 = _random(tokens, hidden), _blocks(experts, 512, hidden), _blocks(experts, hidden, 256)
    ids = torch.randint(-1, experts, (tokens, topk), generator=torch.Generator().manual_seed(0)).cuda()
    weights, model = torch.rand(tokens, topk, generator=torch.Generator().manual_seed(1)).cuda(), Model(512, 256, 8, 4)
    for form in FORMS:
        room = Room(1, tokens, hidden, topk)
        memory = torch.zeros(room.num_bytes, dtype=torch.uint8, device="cuda")
        with mock.patch.multiple(torch.distributed, get_rank=lambda _: 0, get_world_size=lambda _: 1):
            layer = Experts(experts, w1, w2, max_tokens=tokens, peer_memory=True)
        layer._peers = Peers(memory, (memory.data_ptr(),), room, 0, 60.0, experts)
        take(form, pytest.MonkeyPatch())  # until this process ends
        for _ in range(2):  # by tensors, then prepared
            layer.decode(x, ids, weights)
        result(model.buffer(tokens), model.tokens(tokens, "cuda"), *model.weights("cuda"))
    row_of = torch.empty(tokens, topk, dtype=torch.int32, device="cuda")
    told = torch.empty(plan_sends.NUM_FACTS + 2 * 4, dtype=torch.int64, device="cuda")
    plan_sends.run(ids, [0] * plan_sends.NUM_FACTS, row_of, told, experts // 4, 4)
    sent = int(told[plan_sends.NUM_FACTS :][:4].sum())
    arrived = message.Arrived(message.pack(x, ids, weights, row_of, tokens * 4)[:sent], hidden, topk)
    rows = stack_routes(arrived.ids, experts // 4, experts // 4)
    message.gather(arrived, rows)
    sum_rows(_random(len(rows.ids), hidden), rows.row_of, arrived.weights)


@part
def stored() -> None:
    """Sum a product's output. The sum is right, but initcheck must report its reads: this proves our explanation."""
    import torch

    import deep_gemm

    a, b = torch.ones(128, 256, device="cuda").bfloat16(), torch.ones(256, 256, device="cuda").bfloat16()
    d: Any = deep_gemm.bf16_gemm_nt(a, b)
    assert d.float().sum().item() == 128 * 256 * 256


def edited_sources() -> dict[str, str]:
    """Edit sources so that every lane arrives at the mbarriers where one lane would arrive for its warp."""
    from deep_gemm.core.sources import cuda_sources

    edited = {}
    for name, edits in EVERY_LANE_ARRIVES.items():
        edited[name] = cuda_sources()[name]
        for old, new in edits.items():
            assert edited[name].count(old) == 1, f"{name}: expected {old!r} once"
            edited[name] = edited[name].replace(old, new)
    return edited


def run(name: str, every_lane: bool) -> None:
    import torch

    if every_lane:
        from deep_gemm.core.sources import cuda_sources

        cuda_sources().update(edited_sources())
    tests = HERE.parent
    sys.path[:0] = map(str, (tests.parent, tests, tests / "across", tests / "core"))  # parts import from these
    PARTS[name]()
    torch.cuda.synchronize()
    print("done", flush=True)


def reports_of(text: str) -> dict[str, int]:
    """Count reports, grouped by their text and kernels."""
    counts: Counter[str] = Counter()
    for report in REPORT.split(text)[1:]:
        kernels = dict.fromkeys(name.split("<")[0].removeprefix("void ") for name in PLACE.findall(report))
        said = re.sub(r" at __shared__.*| in block.*|0x[0-9a-f]+", "", report.split("\n")[0])
        if kernels or not IS_NO_REPORT.match(said):
            counts[f"{said}: {', '.join(kernels)}"] += 1
    return dict(counts)


def sanitize(tool: str, name: str, seconds: float, logs: Path | None) -> dict[str, Any]:
    """Run a part under a tool; return the tool's findings."""
    command = ("compute-sanitizer", "--tool", tool, *TOOLS[tool], "--print-limit", "100000", "--show-backtrace", "no")
    every_lane = ("--every-lane",) if tool == "racecheck" else ()
    given = (*command, sys.executable, __file__, "--run", name, *every_lane)
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # otherwise the tool knows no bounds of tensors
    start, pipe = time.monotonic(), subprocess.PIPE
    try:
        done = subprocess.run(
            given, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False
        )
        text = done.stdout
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode()
    if logs is not None:
        (logs / f"{tool}-{name}.log").write_text(text)
    match = FOUND.search(text)
    found = None if match is None else int(match[1] or match[2])
    row = judged(tool, name, "\ndone\n" in text, found, reports_of(text))
    return {**row, "seconds": round(time.monotonic() - start, 1)}


def judged(tool: str, name: str, finished: bool, found: int | None, reports: dict[str, int]) -> dict[str, Any]:
    """Judge a tool's run of a part: it must have reached the end, with no report except explained ones."""
    explained = sum(
        count for said, count in reports.items() if tool == "initcheck" and READ_WHAT_TMA_STORED.search(said)
    )
    is_control = tool == "initcheck" and name == "stored"
    return {
        "tool": tool,
        "part": name,
        "is_good": finished and found == explained and bool(found) >= is_control,
        "finished": finished,
        "found": found,
        "explained": explained,
        "reports": reports,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", choices=PARTS, help="run this part's problems without a tool")
    parser.add_argument("--every-lane", action="store_true", help="with --run: every lane arrives at mbarriers")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="run only this tool; may be repeated")
    parser.add_argument("--part", action="append", choices=PARTS, help="run only this part; may be repeated")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the time limit of a part under a tool")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="the number of processes at a time")
    parser.add_argument("--logs", type=Path, help="a folder for the tools' output")
    parser.add_argument("--out", type=Path, help="write a record to this file")
    parser.add_argument("--commit", help="the commit's name in the record, if this is no checkout")
    asked = parser.parse_args()
    if asked.run:
        run(asked.run, asked.every_lane)
        return 0
    wanted = [(tool, name) for tool in asked.tool or TOOLS for name in asked.part or PARTS]
    if asked.logs is not None:
        asked.logs.mkdir(parents=True, exist_ok=True)
    rows = []
    with ThreadPoolExecutor(asked.at_once) as pool:
        for row in pool.map(lambda each: sanitize(each[0], each[1], asked.seconds, asked.logs), wanted):
            rows.append(row)
            end = "" if row["finished"] else ", did not end"
            counts = f"{row['found']} found, {row['explained']} explained"
            print(
                f"{'good' if row['is_good'] else 'BAD ':4} {row['tool']:9} {row['part']:17} {counts}{end}", flush=True
            )
            if not row["is_good"]:
                for said, count in row["reports"].items():
                    print(f"       {count} {said}", flush=True)
    if asked.out:
        from lab.bench.machine import header

        version = subprocess.run(("compute-sanitizer", "--version"), capture_output=True, text=True, check=True).stdout
        method = f"{__doc__} {version.strip()}"
        asked.out.write_text(json.dumps({**header("sanitizers", method, asked.commit), "rows": rows}, indent=1) + "\n")
    return 0 if all(row["is_good"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
