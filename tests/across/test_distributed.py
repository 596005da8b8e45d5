"""Experts across processes, by Gloo on this machine: each case of across_cases.py in every process of a group."""

from __future__ import annotations

import os
from pathlib import Path

import across_cases
import forked
import pytest
import torch
from helpers import group_of_one, some
from mega_cases import weights_on_gpu
from thorough import THOROUGH

import deep_gemm

CASES = Path(__file__).parent / "across_cases.py"
WORLDS = list(across_cases.CASES)[: 3 if THOROUGH else 2]


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Run all groups of processes once, so that torch is imported once, and return the lines that they print."""
    environment = {"PYTHONPATH": str(CASES.parents[2]), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment |= {name: os.environ[name] for name in ("CI", "DG_TEST_ALL") if name in os.environ}
    done = forked.run(str(CASES), *map(str, WORLDS), env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("world", WORLDS)
def test_processes_together_give_what_one_gives(lines: list[str], world: int) -> None:
    for case in across_cases.CASES[world]:
        survivors = world - (case is across_cases.dies)  # one process ends there on purpose
        assert lines.count(f"{world}: {case.__name__} passed") == survivors


def test_the_example_agrees_and_would_say_if_not(lines: list[str]) -> None:
    assert across_cases.EXAMPLE.name == "experts_across_processes.py"
    assert lines.count("2: example passed") == lines.count("2: example_of_wrong_sums passed") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("is_invariant", [False, True])
def test_one_gpu_over_nccl_replays_the_decode_form(tmp_path: Path, is_invariant: bool) -> None:
    """Test calls in a group of one process, captured once and replayed with other tokens and routes."""
    deep_gemm.set_batch_invariant(is_invariant)
    with group_of_one(tmp_path):
        num, hidden, inter, topk, most = 8, 512, 256, 4, 32
        g = torch.Generator("cuda").manual_seed(0)
        w1, w2 = weights_on_gpu(num, hidden, inter, g)
        layer = deep_gemm.distributed.Experts(num, w1, w2, max_tokens=most)
        x = torch.randn(24, hidden, device="cuda", generator=g).bfloat16()
        ids = torch.randint(-1, num, (24, topk), device="cuda", generator=g)
        p = torch.rand(24, topk, device="cuda", generator=g)
        out = torch.empty_like(x)
        for _ in range(2):
            layer.decode(x, ids, p, out=out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog thread calls CUDA too
            layer.decode(x, ids, p, out=out)
        for _ in range(3):
            x.normal_(generator=g)
            ids.random_(-1, num, generator=g)
            out.fill_(torch.nan)
            graph.replay()
            right = some(deep_gemm.experts(x, ids, p, w1, w2))
            assert torch.equal(out, right)  # one rank adds, and its sum is rounded once
            assert torch.equal(layer(x, ids, p), right)


@pytest.mark.gpu
def test_one_gpu_over_nccl_gives_the_gradients_of_one_process_and_waits_for_none(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        torch.manual_seed(0)
        one = deep_gemm.nn.Experts(8, 512, 256, device="cuda", dtype=torch.bfloat16)
        layer = deep_gemm.distributed.Experts(8, one.w1.detach().clone(), one.w2.detach().clone())
        x = torch.randn(24, 512, device="cuda").bfloat16()
        ids, p = torch.randint(-1, 8, (24, 4), device="cuda"), torch.rand(24, 4, device="cuda")
        found: list[list[torch.Tensor]] = []
        for module in (one, layer, layer):
            leaves = x.clone().requires_grad_(), p.clone().requires_grad_(), module.w1, module.w2
            module.zero_grad()
            loss = module(leaves[0], ids, leaves[1]).float().square().sum()
            torch.cuda.set_sync_debug_mode("error" if len(found) == 2 else "default")  # the kernels are loaded by then
            try:
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            found.append([across_cases.gradient(leaf) for leaf in leaves])
        for of_one, *of_layer in zip(*found, strict=True):
            assert all(torch.equal(of_one, each) for each in of_layer)
