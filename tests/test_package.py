"""The package as a whole: what importing costs, what its wheel carries, and that its documentation's examples run."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

import deep_gemm
from deep_gemm import activation, dense, fp4, grouped, layers, quantize, routing, scales, testing
from deep_gemm.problem import layout
from deep_gemm.settings import read_settings
from deep_gemm.tools import demo

ROOT = Path(__file__).resolve().parents[1]
OF_LAYERS = [activation, layers, routing]
EXAMPLES = {"torch": torch, **{name: getattr(deep_gemm, name) for name in deep_gemm.__all__}}


@pytest.mark.parametrize("module", [dense, fp4, grouped, layout, quantize, scales, testing, *OF_LAYERS])
def test_examples_in_docstrings_run(module: ModuleType) -> None:
    names = {**EXAMPLES, **vars(module)}
    failed, attempted = doctest.testmod(module, extraglobs=names)
    assert attempted > 0
    assert failed == 0


@pytest.mark.parametrize("module", [dense, fp4, grouped, quantize, scales, *OF_LAYERS])
def test_every_public_product_cast_and_layer_has_an_example(module: ModuleType) -> None:
    for name in deep_gemm.__all__:
        function = vars(module).get(name)
        if getattr(function, "__module__", None) == module.__name__ and not name.startswith("cublaslt"):
            assert function is not None
            assert ">>>" in (function.__doc__ or ""), name


def test_importing_loads_no_cuda_library_and_little_besides_torch() -> None:
    code = (
        "import time, torch, sys; before = set(sys.modules); t = time.perf_counter(); import deep_gemm;"
        "print(time.perf_counter() - t);"
        "print([m for m in set(sys.modules) - before if m.split('.')[0] in ('cuda', 'rich', 'typer', 'matplotlib')]);"
        "print(torch.cuda.is_initialized())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    lines = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    assert float(lines[0]) < 0.5
    assert lines[1] == "[]"
    assert lines[2] == "False"


def test_modules_of_the_package_import_each_other_relatively() -> None:
    absolute = re.compile(r"^\s*(from|import) deep_gemm\b", re.MULTILINE)
    sources = (ROOT / "deep_gemm").rglob("*.py")
    assert [str(path.relative_to(ROOT)) for path in sources if absolute.search(path.read_text())] == []


def test_demo_finds_every_product_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run()
    out = capsys.readouterr().out
    assert out.count("right") == 7
    assert "wrong" not in out


def test_demo_says_so_where_a_product_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(a: object, b: object, **_: object) -> torch.Tensor:
        return torch.zeros(demo.ROWS, demo.N, dtype=torch.bfloat16)

    monkeypatch.setattr(demo, "fp8_gemm_nt", broken)
    assert not demo.run()
    assert "wrong" in capsys.readouterr().out


def test_wheel_is_pure_python_and_carries_every_file_of_the_package(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"deep_gemm-{deep_gemm.__version__}-py3-none-any.whl"
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("deep_gemm/")}
    source = ROOT / "deep_gemm"
    wanted = {
        str(path.relative_to(ROOT)) for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert carried == wanted


def test_the_version_is_stated_once() -> None:
    sources = (ROOT / "pyproject.toml", *(ROOT / "deep_gemm").rglob("*.py"))
    stating = [path for path in sources if f'"{deep_gemm.__version__}"' in path.read_text()]
    assert stating == [ROOT / "deep_gemm" / "__init__.py"]


def test_settings_come_from_the_environment() -> None:
    assert read_settings({"DG_CACHE_DIR": "/old"}).jit_cache_dir == Path("/old")
    assert read_settings({"DG_CACHE_DIR": "/old", "DG_JIT_CACHE_DIR": "/new"}).jit_cache_dir == Path("/new")
    with pytest.raises(ValueError, match="DG_JIT_DEBUG: expected 0 or 1, got 'yes'"):
        read_settings({"DG_JIT_DEBUG": "yes"})


def test_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})
    assert float(capsys.readouterr().out.removeprefix("tensor(").split(",")[0]) < 1e-3
