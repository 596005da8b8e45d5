# ruff: noqa
import subprocess, sys

if len(sys.argv) == 1:
    for part, limit in (("check", 25), ("time", 35)):
        done = subprocess.run(["timeout", str(limit), sys.executable, "-u", __file__, part])
        print(f"{part}: rc {done.returncode}", flush=True)
    sys.exit(0)
sys.path.insert(0, "tests")
import dataclasses, torch, deep_gemm
from deep_gemm.benchmark.timing import L2Flush, cold
from deep_gemm.indexer.paged import compute, get_paged_mqa_logits_metadata as plan
from deep_gemm.kernels import fp8_paged_mqa_logits as kernel
from deep_gemm.problem.paged import paged_logits_problem
from paged_cases import mistakes, problem

sms = deep_gemm.get_num_sms()
if sys.argv[1] == "check":
    for n, h, d, page, dtype in (
        (1, 64, 128, 64, torch.float32),
        (2, 64, 128, 64, torch.bfloat16),
        (3, 64, 128, 32, torch.float32),
        (4, 64, 128, 64, torch.float32),
        (4, 32, 64, 32, torch.bfloat16),
        (3, 16, 32, 64, torch.float32),
    ):
        for shares in (sms, sms // 2):
            p = problem(
                [[(b * 911 + t * 37) % 3000 if b % 5 else 0 for t in range(n)] for b in range(40)],
                n,
                h,
                d,
                page=page,
                room=16,
                shares=shares,
                dtype=dtype,
                device="cuda",
            )
            p.logits.fill_(-1.5 * 2.0**53)
            compute(p)
            torch.cuda.synchronize()
            first = p.logits.clone()
            wrong = mistakes(p, first, -1.5 * 2.0**53, 2.0**-11)
            same = all((compute(p), torch.equal(p.logits, first))[1] for _ in range(5))
            print(
                n,
                h,
                d,
                page,
                dtype,
                shares,
                "right" if wrong is None else wrong,
                "same" if same else "NOT REPEATABLE",
                flush=True,
            )
    for b in (1, 256, 4096):
        lens = torch.randint(0, 9000, (b, 2), dtype=torch.int32)
        print("plan", b, torch.equal(plan(lens.cuda(), 64, sms).cpu(), plan(lens, 64, sms)), flush=True)
    sys.exit(0)
flush, ordinary = L2Flush(), kernel.config_of


def using(p, run):
    kernel.config_of = lambda p: dataclasses.replace(ordinary(p), run_blocks=run)
    kernel.run(p)


for b, n, h, mean, up in (
    (1, 1, 64, 8192, 3.87),
    (16, 1, 64, 8192, 9.57),
    (64, 1, 64, 8192, 25.3),
    (64, 2, 64, 8192, 27.0),
    (256, 1, 64, 8192, 77.6),
    (256, 2, 64, 8192, 84.3),
    (256, 4, 64, 8192, 0),
    (256, 1, 32, 8192, 77.5),
    (256, 4, 32, 8192, 0),
    (64, 1, 64, 65536, 145.4),
    (1, 1, 64, 131072, 7.81),
    (4, 1, 64, 131072, 28.9),
):
    lens = (
        (torch.rand(b, 1, device="cuda") * 0.6 + 0.7).mul(mean).int().expand(b, n).contiguous()
        if b > 1
        else torch.full((1, n), mean, dtype=torch.int32, device="cuda")
    )
    pages = -(-int(lens.max()) // 64)
    cache = torch.randint(0, 100, (b * pages, 64, 1, 132), dtype=torch.uint8, device="cuda")
    table = torch.randperm(b * pages, device="cuda").int().view(b, pages)
    q = torch.randn(b, n, h, 128, device="cuda").to(torch.float8_e4m3fn)
    w = torch.randn(b * n, h, device="cuda")
    p = paged_logits_problem(q, cache, w, lens, table, plan(lens, 64, sms), int(lens.max()), False, torch.float32)
    calls = {f"r{run}": (lambda run=run: using(p, run)) for run in (2, 4, 1)}
    calls["plan"] = lambda: plan(lens, 64, sms)
    print((b, n, h, mean), "up", up, {k: round(t.us, 2) for k, (t, _) in cold(calls, flush, 7).items()}, flush=True)
    del p, cache
