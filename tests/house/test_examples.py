"""The programs in examples/ run, on the CPU and on a GPU, and print the right things."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
Run = Callable[..., str]


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def printed_by(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    if request.param == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def errors_in(out: str) -> list[float]:
    return [float(error) for error in re.findall(r"relative error beside BF16: ([\d.]+)", out)]


def test_masked_rows_are_near_those_in_bf16_in_every_batch(printed_by: Run) -> None:
    errors = errors_in(printed_by("decode_masked"))
    assert len(errors) == 3
    assert all(0.01 < error < 0.08 for error in errors)


def test_a_tiny_checkpoint_is_made_and_loaded(printed_by: Run) -> None:
    pytest.importorskip("safetensors")
    out = printed_by("deepseek_checkpoint")
    assert [line.split(":")[0].split(".")[-1] for line in out.splitlines()[:3]] == ["down_proj", "gate_proj", "up_proj"]
    assert all(0.01 < error < 0.04 for error in errors_in(out))
    assert out.endswith(" bytes, 50% of BF16\n")


def test_a_checkpoint_that_is_there_is_read_in_part(printed_by: Run, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    runpy.run_path(str(EXAMPLES / "deepseek_checkpoint.py"))["write_tiny"](tmp_path)
    out = printed_by("deepseek_checkpoint", str(tmp_path), "--only", "model.layers.0.mlp.up")
    assert out.startswith("model.layers.0.mlp.up_proj: (384, 256)")
    assert len(out.splitlines()) == 2
    with pytest.raises(SystemExit, match="with weights and weight_scale_inv, got none"):
        printed_by("deepseek_checkpoint", str(tmp_path), "--only", "lm_head")


@pytest.mark.host_compiler
def test_one_graph_serves_all_batches(printed_by: Run) -> None:
    out = printed_by("compile_layer")
    assert out.endswith("graphs compiled: 1\n")
    errors = errors_in(out)
    assert len(errors) == 3
    assert all(0.003 < error < 0.03 for error in errors)


@pytest.mark.host_compiler
def test_a_kernel_of_ones_own_agrees_with_torch(printed_by: Run) -> None:
    assert "37 rows the kernel says the same as torch, to the bit, on " in printed_by("own_kernel")


def test_probabilities_of_samples_are_the_same_in_training(printed_by: Run) -> None:
    with pytest.raises(SystemExit) as ended:
        printed_by("exact_rl")
    assert ended.value.code == 0


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, printed_by: Run) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="expected to be started by torchrun"):
        printed_by("train_fsdp2")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="this example needs vLLM: pip install vllm"):
        printed_by("serve_vllm")


def test_kernels_are_listed_with_the_part_that_is_the_packages() -> None:
    table = runpy.run_path(str(EXAMPLES / "serve_vllm.py"))["table"]
    us = {"fp8_gemm_dense": 30.0, "void attention<int>": 60.0, "cast_rows": 10.0}
    assert table(us, ("fp8_gemm", "cast_rows")).splitlines() == [
        " 60.0%             void attention<int>",
        " 30.0%  deep_gemm  fp8_gemm_dense",
        " 10.0%  deep_gemm  cast_rows",
        " 40.0%  all kernels of deep_gemm",
    ]
    assert table({}, ("fp8_gemm",)) == "the profiler saw no kernel"


def test_every_example_has_a_test_and_a_row_and_says_what_it_prints_and_how_long_it_takes() -> None:
    rows = (ROOT / "docs" / "index.md").read_text()
    tests = sorted(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for example in EXAMPLES.glob("*.py"):
        named = re.compile(rf'"{example.stem}(\.py)?"')
        assert any(named.search(text) for text in tests), example.name
        assert f"\n| `examples/{example.name}` |" in rows
        top = example.read_text().split('"""')[1]
        assert re.search(r"Prints? ", top), example.name
        assert re.search(r"second|minute", top), example.name
