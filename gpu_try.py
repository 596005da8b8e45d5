"""A trial on a GPU: python gpu_try.py. Each part runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time

H, R, D = 8, 4096, 1024
UPSTREAM = {4: 16.67, 32: 16.83, 128: 17.76, 4096: 212.5}
PARTS = ("right", "4", "32", "128", "4096")


def main() -> None:
    for part in PARTS:
        begin = time.time()
        try:
            code = subprocess.run([sys.executable, __file__, part], timeout=60).returncode
        except subprocess.TimeoutExpired:
            code = "timeout"
        print(f"[{part}: {code}, {time.time() - begin:.1f} s]", flush=True)


def right() -> None:
    import torch

    import deep_gemm
    from deep_gemm.testing import calc_diff

    def cast(x, rows):
        return deep_gemm.per_token_cast_to_fp8(x) if rows == 1 else deep_gemm.per_block_cast_to_fp8(x)

    def check(name, expr, a, b, d, right, c=None, recipe=(1, 128, 128)):
        try:
            deep_gemm.fp8_einsum(expr, a, b, d, c, recipe)
            first = d.clone()
            if c is not d:
                deep_gemm.fp8_einsum(expr, a, b, d, c, recipe)  # by the plan
            torch.cuda.synchronize()
            same = torch.equal(first, d)
            print(f"  {name:34} diff {calc_diff(first.double(), right.double()):.1e} same {same}", flush=True)
        except Exception as error:
            print(f"  {name:34} {type(error).__name__}: {str(error)[:60]}", flush=True)

    torch.manual_seed(0)
    for b, h, r, d in (
        (1, 3, 400, 136),
        (4, 8, 4096, 1024),
        (32, 8, 1024, 512),
        (130, 3, 400, 136),
        (130, 8, 4096, 1024),
    ):
        x, w = torch.randn(b, h, r, device="cuda"), torch.randn(h, d, r, device="cuda")
        a, bb = cast(x, 1), cast(w, 128)
        exact = torch.einsum("bhr,hdr->bhd", x.double(), w.double())
        out = torch.full((b, h, d), float("nan"), dtype=torch.bfloat16, device="cuda")
        check(f"bhd {b, h, r, d}", "bhr,hdr->bhd", a, bb, out, exact)
        c = torch.randn(b, h, d, device="cuda")
        check("  fp32 +c", "bhr,hdr->bhd", a, bb, torch.empty_like(c), exact + c, c)
        d0 = c.clone()
        check("  fp32 +d", "bhr,hdr->bhd", a, bb, d0, exact + c, d0)
        check("  1d1d fp32", "bhr,hdr->bhd", a, cast(w, 1), torch.empty_like(c), exact, None, (1, 1, 128))
    b, h, r, d = 160, 4, 512, 256
    x, w = torch.randn(b, h, d, device="cuda"), torch.randn(h, d, r, device="cuda")
    out = torch.empty(b, h, r, dtype=torch.bfloat16, device="cuda")
    check("bhr", "bhd,hdr->bhr", cast(x, 1), cast(w, 128), out, torch.einsum("bhd,hdr->bhr", x.double(), w.double()))
    y = torch.randn(b, h, r, device="cuda")

    def along_b(x):
        values, scales = deep_gemm.per_channel_cast_to_fp8(x.flatten(1))
        return values.view(x.shape), scales.view(-1, *x.shape[1:])

    grad = torch.zeros(h, d, r, device="cuda")
    exact = torch.einsum("bhd,bhr->hdr", x.double(), y.double())
    check("hdr", "bhd,bhr->hdr", along_b(x), along_b(y), grad, exact, None, (1, 1, 128))


def times(b: int) -> None:
    import torch

    from deep_gemm import per_block_cast_to_fp8, per_token_cast_to_fp8
    from deep_gemm.benchmark.timing import L2Flush, cold
    from deep_gemm.benchmark.tune import compile_all
    from deep_gemm.choose.config_decode import decode_config
    from deep_gemm.choose.heads import chosen_tile
    from deep_gemm.choose.output import Groups, Output
    from deep_gemm.choose.tiles import Tile
    from deep_gemm.gpus import gpu_of
    from deep_gemm.kernels import heads
    from deep_gemm.kernels.plan import addresses_of
    from deep_gemm.problem import heads_problem

    output = Output(groups=Groups.HEADS)
    a = per_token_cast_to_fp8(torch.randn(b, H, R, device="cuda"))
    w = per_block_cast_to_fp8(torch.randn(H, D, R, device="cuda"))
    d = torch.empty(b, H, D, dtype=torch.bfloat16, device="cuda")
    laid = torch.empty(H, R // 128, -(-b // 4) * 4, device="cuda").permute(2, 0, 1)[:b]
    laid.copy_(a[1])
    configs = {}
    tiles = (64, 64), (64, 128), (128, 64), (128, 96), (128, 128), (128, 192), (128, 256), (192, 128), (256, 128)
    if b <= 128:
        for tokens in (8, 16, 24, 32, 48, 64, 96, 128):
            for warpgroups in (1, 2):
                for split in (1, 2, 3, 4):
                    for per_sm in (1, 2):
                        config = decode_config(tokens, warpgroups, split, per_sm, heads=True)
                        if config is None or not (b <= tokens <= 4 * b or tokens * 2 == b):
                            continue
                        configs[config.name.replace(" bf16 by heads", "")] = config
        tiles = tiles[:5]
    for m, n in tiles:
        if m <= max(64, b):
            configs[f"{m}x{n}"] = Tile(m, n).config(output, R)
    if b > 256:
        for more in ({"cluster_m": 2}, {"cluster_n": 2}):
            for m, n in ((128, 256), (256, 128), (128, 128)):
                tile = Tile(m, n, **more)
                if (config := tile.config(output, R)).why_illegal() is None:
                    configs[tile.name] = config
    gpu = gpu_of(0)
    print(f"b = {b}: chosen {chosen_tile(H, b, D, R, output, gpu).name}; upstream took {UPSTREAM[b]}", flush=True)
    compile_all(list(configs.values()), lambda _: None)
    calls = {}
    for name, config in configs.items():
        p = heads_problem("bhr,hdr->bhd", a, w, d)
        ready = p._replace(sfa=laid.permute(1, 0, 2))
        try:
            plan = heads.run(ready, config)
            torch.cuda.synchronize()
        except Exception as error:
            print(name, type(error).__name__, str(error)[:70], flush=True)
            continue
        calls[name] = lambda plan=plan, at=addresses_of(ready): plan.launch(at)

    import deep_gemm

    calls["call, row-major scales"] = lambda: deep_gemm.fp8_einsum("bhr,hdr->bhd", a, w, d)
    calls["copy of the weights' bytes"] = lambda x=torch.empty_like(w[0].view(torch.uint8)): x.copy_(
        w[0].view(torch.uint8)
    )
    found = cold(calls, L2Flush(), 12 if b > 1000 else 20)
    ordered = sorted((spread.us, name) for name, (spread, _) in found.items())
    rows = [f"{name:24}{us:8.2f}" for us, name in ordered]
    rows = rows[:20] + [row for row in rows[20:] if row.startswith(("call", "copy"))]
    half = -(-len(rows) // 2)
    for i in range(half):
        print("  " + rows[i] + "   |   " + (rows[half + i] if half + i < len(rows) else ""), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "right":
        right()
    else:
        times(int(sys.argv[1]))
