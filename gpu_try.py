import dataclasses, subprocess, sys
if len(sys.argv) == 1:
    for part, limit in (("check", 25), ("time", 45)):
        done = subprocess.run(["timeout", str(limit), sys.executable, "-u", __file__, part])
        print(f"{part}: rc {done.returncode}", flush=True)
    sys.exit(0)
import torch
from deep_gemm.benchmark.timing import L2Flush, cold, sustained
from deep_gemm.benchmark.yardsticks import yardsticks_of
from deep_gemm.indexer import reference
from deep_gemm.indexer.prefill import compute
from deep_gemm.kernels import fp8_mqa_logits as kernel
from deep_gemm.problem.indexer import mqa_logits_problem

def problem(S, T, H, D, clean=False, most=0, dtype=torch.float32, ranges="causal"):
    torch.manual_seed(S + T)
    q, k = (torch.randn(*s, device="cuda").to(torch.float8_e4m3fn) for s in ((S, H, D), (T, D)))
    w, sf = torch.randn(S, H, device="cuda"), torch.rand(T, device="cuda") + 0.5
    at = torch.arange(S, device="cuda", dtype=torch.int32)
    ks, ke = torch.zeros_like(at), at + (T - S) + 1
    if ranges == "random":
        ks, ke = (torch.randint(-50, T + 50, (S,), device="cuda", dtype=torch.int32) for _ in range(2))
    if ranges == "band":
        ks, ke = at * (T // S), at * (T // S) + 64
    return mqa_logits_problem(q, (k, sf), w, ks, ke, clean, most, dtype)

MARK = -12288.0 * 2**40  # no logit
def check(name, p):
    p.logits.fill_(MARK)
    compute(p); torch.cuda.synchronize()
    got = p.logits.clone()
    bits = got.view(torch.int32 if got.dtype == torch.float32 else torch.int16)
    for _ in range(5):
        p.logits.fill_(MARK); compute(p)
        if not torch.equal(p.logits.view(bits.dtype), bits): print(name, "NOT REPEATABLE")
    p.logits.fill_(MARK); reference.mqa_logits(p)
    a, b = got.double(), p.logits.double()
    same = ((a == -torch.inf) == (b == -torch.inf)).all() and ((a == MARK) == (b == MARK)).all()
    ok = b.isfinite() & (b != MARK)
    x, y = a[ok], b[ok]
    diff = (1 - 2 * (x * y).sum() / (x * x + y * y).sum()).item() if ok.any() else 0
    print(f"{name:44} mask {bool(same)} diff {diff:.2e}", flush=True)

if sys.argv[1] == "check":
    check("1x64 h64", problem(1, 64, 64, 128))
    check("5x200 h32", problem(5, 200, 32, 128))
    check("13x333 h64 clean", problem(13, 333, 64, 128, True))
    check("2048x4096 h64", problem(2048, 4096, 64, 128))
    check("2048x4096 h64 clean", problem(2048, 4096, 64, 128, True))
    check("777x5001 h32 clean random bf16", problem(777, 5001, 32, 128, True, 0, torch.bfloat16, "random"))
    check("777x5001 h16 d64 random", problem(777, 5001, 16, 64, False, 0, torch.float32, "random"))
    check("300x4000 h128 d32 compressed", problem(300, 4000, 128, 32, False, 1000, torch.float32, "random"))
    check("300x4000 h24 d64 compressed bf16", problem(300, 4000, 24, 64, False, 1000, torch.bfloat16, "random"))
    check("8192x8192 h64 d64 band clean", problem(8192, 8192, 64, 64, True, 0, torch.float32, "band"))
    sys.exit(0)

flush = L2Flush()
ordinary = kernel.config_of
VARIANTS = {"r4": (4, True), "r1": (1, True), "r2": (2, True), "r8": (8, True), "r4max": (4, False)}
UP = {(2048, 4096, 64, 128): 103, (2048, 8192, 64, 128): 225, (2048, 32768, 64, 128): 951, (8192, 8192, 64, 128): 506,
      (2048, 8192, 32, 128): 129, (2048, 65536, 32, 128): 1082, (2048, 8192, 64, 64): 173,
      (1, 4096, 64, 128): 16.7, (4, 8192, 64, 128): 30.6, (16, 65536, 64, 128): 227, (64, 65536, 64, 128): 232,
      (256, 65536, 64, 128): 248, (8192, 65536, 64, 128): 8378}

def using(variant):
    run, doubles = VARIANTS[variant]
    return lambda p: dataclasses.replace(ordinary(p), run_blocks=run, relu_doubles=doubles)

def calls_of(p, variants, prefix=""):
    def call(variant):
        kernel.config_of = using(variant)
        kernel.run(p)
    return {prefix + v: (lambda v=v: call(v)) for v in variants}

ALL = ((2048, 8192, 64, 128), (2048, 32768, 64, 128), (2048, 8192, 64, 64))
for shape, up in UP.items():
    S, T, H, D = shape
    p = problem(*shape)
    calls = calls_of(p, VARIANTS if shape in ALL else ["r4", "r1"])
    if shape == (2048, 32768, 64, 128):
        calls |= calls_of(problem(*shape, True), ["r4"], "clean ")
    times = cold(calls, flush, 2 if S * T > 1 << 28 else 7)
    ops = 2 * H * D * sum(T - S + i + 1 for i in range(S))
    text = "  ".join(f"{v} {t.us:.1f} ({t.us / up:.2f}, {ops / t.us / 1e6:.0f} TF)" for v, (t, _) in times.items())
    print(f"{shape}: up {up} | {text}", flush=True)
    del p, calls
p = problem(8192, 8192, 64, 64, True, 0, torch.float32, "band")
fill = torch.empty(8192, 8192, device="cuda")
t = cold({**calls_of(p, ["r4"]), "fill": lambda: fill.fill_(-torch.inf)}, flush, 5)
print("band clean 8192x8192:", {n: round(s.us, 1) for n, (s, _) in t.items()}, flush=True)
