"""Parts that `import deep_gemm` loads later, without a visible difference. Each process imports the package once."""

from __future__ import annotations

from pathlib import Path

import forked
from thorough import one_in

ROOT = Path(__file__).resolve().parents[2]
OPERATOR = "torch.ops.deep_gemm.per_token_cast_to_fp8"
X = "torch.ones(2, 128, dtype=torch.bfloat16)"


def run(code: str) -> str:
    lines = f"import sys, torch, deep_gemm\nassert 'deep_gemm.ops' not in sys.modules\n{code}"
    done = forked.run("-c", lines, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_operators_and_symmetric_memory_are_not_imported_yet() -> None:
    assert run("print('torch.distributed._symmetric_memory' in sys.modules)") == "False\n"


COMPILED = [
    f"torch.compile(lambda x: {OPERATOR}(x), fullgraph=True, backend='eager')({X})",
    f"torch.compile(deep_gemm.per_token_cast_to_fp8, fullgraph=True, backend='aot_eager')({X})",
]
USES = [
    f"{OPERATOR}({X})",
    "getattr(torch.ops.deep_gemm, 'fp8_gemm_nt').default",
    "from deep_gemm import ops; ops.gemm",
    "deep_gemm.ops.gemm",
    "import deep_gemm.ops as ops; ops.gemm",
    "assert 'fp8_gemm_nt' in dir(torch.ops.deep_gemm)",
    "assert 'fp8_gemm_nt' in list(torch.ops.deep_gemm)",
    "assert not hasattr(torch.ops.deep_gemm, 'no_such_product')",
    "torch.library.register_vmap('deep_gemm::expert_rows', print)",
    *one_in(2, COMPILED),
]
FORKED = """
import os
for use in USES:
    child = os.fork()  # in which nothing is imported yet
    if not child:
        try:
            exec(use)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, use
"""


def test_whoever_looks_for_an_operator_finds_it() -> None:
    run(FORKED.replace("USES", repr(USES)))


def test_a_program_that_was_exported_finds_its_operators(tmp_path: Path) -> None:
    file = str(tmp_path / "program.pt2")
    run(
        "class Cast(torch.nn.Module):\n"
        "    def forward(self, x): return deep_gemm.per_token_cast_to_fp8(x)\n"
        f"torch.export.save(torch.export.export(Cast(), ({X},)), {file!r})"
    )
    assert run(f"print(torch.export.load({file!r}).module()({X})[0].dtype)") == "torch.float8_e4m3fn\n"


def test_threads_find_operators_at_the_same_time() -> None:
    names = ("fp8_gemm_nt", "experts", "linear", "expert_rows", "nn_experts", "fp8_einsum")
    code = """
import threading
sys.setswitchinterval(1e-6)
go, found = threading.Barrier(6), []
def find(name):
    go.wait()
    found.append(getattr(torch.ops.deep_gemm, name).default)
threads = [threading.Thread(target=find, args=(name,)) for name in NAMES]
for each in threads: each.start()
for each in threads: each.join()
"""
    assert run(code.replace("NAMES", repr(names)) + "print(len(found))") == "6\n"
