# ruff: noqa
"""Products into heads on a GPU: right?, and how long beside the plain product. Tried once, then dropped."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch

import deep_gemm
from deep_gemm.benchmark import yardsticks
from deep_gemm.benchmark.timing import L2Flush, cold
from deep_gemm.choose.skip_head_mid import select_skipping, skipping
from deep_gemm.gpus import gpu_of
from deep_gemm.kernels import dense, skip_head_mid
from deep_gemm.problem import dense_problem, skip_problem
from deep_gemm.problem.skip_head_mid import parts


def say(*words: object) -> None:
    print(*words, flush=True)


def operands(m: int, n: int, k: int):
    a = deep_gemm.per_token_cast_to_fp8(torch.randn(m, k, device="cuda"))
    a = a[0], deep_gemm.get_mn_major_tma_aligned_tensor(a[1])
    return a, deep_gemm.per_block_cast_to_fp8(torch.randn(n, k, device="cuda"))


def output(m: int, n: int, splits):
    return torch.full((m, n // (splits[0] + splits[2]) * sum(splits)), 42.0, device="cuda", dtype=torch.bfloat16)


torch.manual_seed(0)
say(torch.cuda.get_device_name())
gpu = gpu_of(0)
flush = L2Flush()
rows = yardsticks.measure(flush)
now = yardsticks.Yardsticks(torch.cuda.get_device_name(), rows[0].us or 0, rows[1].us or 0)
say(f"-- copy {now.copy_us:.1f} us, bf16 {now.bf16_dense_us:.1f} us")
say("-- cold us: skipping, plain (same call count), ratio; upstream today, ratio; config")
for n, k, all_splits in (
    (32768, 512, ((128, 64, 128),)),
    (8192, 512, ((128, 64, 128),)),
    (32768, 512, ((64, 32, 192), (96, 16, 160), (112, 16, 144))),
):
    for m in (1, 16, 64, 128, 512, 1024, 4096):
        a, b = operands(m, n, k)
        plain = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        calls = {"plain": lambda: deep_gemm.fp8_gemm_nt(a, b, plain)}
        for splits in all_splits:
            d = output(m, n, splits)
            calls[str(splits)] = lambda d=d, splits=splits: deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, d, splits)
        times = {name: spread.us for name, (spread, _) in cold(calls, flush, 12).items()}
        base = times.pop("plain")
        up = now.upstream_us("skip_head_mid", (m, n, k))
        line = "  ".join(f"{us:7.2f} {us / base:.3f}" for us in times.values())
        vs = f"up {up:.1f} {next(iter(times.values())) / up:.3f}" if up else ""
        say(f"{m:5} {n:6}  {base:7.2f} | {line} | {select_skipping(m, n, k, 64, gpu).name[:16]} {vs}")

say("-- other tiles for 128 and 4096 x 32768 x 512, (128, 64, 128)")
from deep_gemm.choose.config_of_tile import tile_config
from deep_gemm.choose.output import Output

for m in (128, 4096):
    n, k = 32768, 512
    a, b = operands(m, n, k)
    calls = {}
    d = output(m, n, (128, 64, 128))
    plain = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    p = skip_problem(a, b, d, (128, 64, 128), recipes=(None, None, None))
    q = dense_problem(a, b, plain, None)
    for tile in ((128, 128), (128, 192), (128, 256), (256, 128), (192, 128), (64, 256)):
        try:
            config = tile_config(*tile, Output(), k=k)
            if config.why_illegal():
                continue
            at = skip_head_mid.run(p, skipping(config, 64)), dense.run(q, config)
        except Exception as error:
            say(tile, repr(error)[:80])
            continue
        from deep_gemm.kernels.plan import addresses_of

        calls[f"{tile} skip"] = lambda plan=at[0]: plan.launch(addresses_of(p))
        calls[f"{tile} plain"] = lambda plan=at[1]: plan.launch(addresses_of(q))
    times = {name: spread.us for name, (spread, _) in cold(calls, flush, 12).items()}
    say(m, "  ".join(f"{name} {us:.2f}" for name, us in times.items()))

say("-- host us of a warm call")
import time

a, b = operands(64, 8192, 512)
d, plain = output(64, 8192, (128, 64, 128)), torch.empty(64, 8192, device="cuda", dtype=torch.bfloat16)
for name, call in (
    ("skip", lambda: deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, d, (128, 64, 128))),
    ("plain", lambda: deep_gemm.fp8_gemm_nt(a, b, plain)),
):
    best = 1e9
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(50):
            call()
        best = min(best, (time.perf_counter() - begin) / 50 * 1e6)
        torch.cuda.synchronize()
    say(name, round(best, 2))
say("-- bits of the plain product with the same tile, canaries between (wrong parts, touched middles)")
for splits in ((128, 64, 128), (64, 32, 192), (96, 16, 32), (32, 8, 48), (16, 8, 16), (16, 64, 208), (16, 0, 32)):
    told = []
    for m, heads, k in ((1, 3, 512), (77, 5, 512), (130, 9, 528), (600, 7, 512), (4096, 4, 512), (33, 32, 512)):
        n = heads * (splits[0] + splits[2])
        a, b = operands(m, n, k)
        d, plain = output(m, n, splits), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        p = skip_problem(a, b, d, splits, recipes=(None, None, None))
        config = skip_head_mid.choice(p, gpu)
        skip_head_mid.run(p, config)
        from dataclasses import replace

        dense.run(dense_problem(a, b, plain, None), replace(config, skips_mid=False))
        try:
            torch.cuda.synchronize()
        except Exception:
            say("TRAPPED", splits, m, n, k, config)
            raise
        left, right = parts(d, p.heads)
        whole = plain.view(m, heads, -1)
        bad = int((left != whole[..., : splits[0]]).sum() + (right != whole[..., splits[0] :]).sum())
        mid = d.view(m, heads, -1)[..., splits[0] : splits[0] + splits[1]]
        told.append((bad, int((mid != 42).sum())))
    say(splits, told)

say("done")
