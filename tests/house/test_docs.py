"""The documents: the targets of links and named things exist, and parts written by scripts are up to date."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer.main
from helpers import module_of

import deep_gemm
from deep_gemm.__main__ import app
from lab.__main__ import app as lab_app
from lab.bench import fine
from lab.bench.contenders import BF16, OURS
from lab.bench.report import Report, Row, geometric_mean

APPS = {"deep_gemm": app, "lab": lab_app}
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
ARE_READ_NOW = [page for page in PAGES if page.name != "performance_log.md"]  # the log names files that no longer exist
FOLDERS = (
    "deep_gemm",
    "tests",
    "docs",
    "examples",
    "benchmarks",
    "core",
    "casts",
    "gemm",
    "linear",
    "moe",
    "indexer",
    "hyper",
    "across",
    "sim",
    "cli",
)


BEFORE_THE_CODE = {
    "grouped.md": """
import torch
from deep_gemm import k_grouped_cast_to_fp8, k_grouped_fp8_gemm_nt_contiguous
ks, m, n = [128, 0, 48], 16, 32
ks_on_gpu = torch.tensor(ks, dtype=torch.int32)
grad, x, d = torch.randn(sum(ks), m), torch.randn(sum(ks), n), torch.zeros(len(ks), m, n)
"""
}
"""Code that a page's examples assume has run."""


def python_on(page: Path) -> str:
    """Return all Python of a page, from top to bottom."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


# Some code is not run: simulator.md's is a pattern for kernels, own.md's an example, transformers.md's loads a model.
HAVE_CODE = [
    pytest.param(page, marks=[pytest.mark.host_compiler] if page.name == "torch_compile.md" else [])
    for page in PAGES
    if page.name not in ("simulator.md", "transformers.md", "own.md") and python_on(page)
]


def script(name: str) -> ModuleType:
    """Load a script of docs/ as a module."""
    return module_of(DOCS / f"{name}.py")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, in the form that GitHub makes."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("page", ARE_READ_NOW, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:[\w.*-]+/)+[\w.*-]*)`", page.read_text())
    for name in named:
        if name.split("/")[0] in FOLDERS and "-date-commit" not in name:
            found = [path for folder in (ROOT, ROOT / "deep_gemm", ROOT / "lab") for path in folder.glob(name)]
            assert found, name
    for name in re.findall(r"`([\w.-]+\.(?:py|cuh|h|json|cpp))`", page.read_text()):
        if name not in ("config.cuh", "params_layout.cuh", "wgmma_shapes.cuh"):  # generated, or written by the reader
            assert [*ROOT.glob(f"[!.]*/**/{name}")], name


@pytest.mark.parametrize("page", ARE_READ_NOW, ids=lambda page: page.name)
def test_commands_on_a_page_exist_with_their_options(page: Path) -> None:
    for program, name, rest in re.findall(r"python -m (deep_gemm|lab) ([a-z]+)((?: +[^\s|`#]+)*)", page.read_text()):
        commands: dict[str, Any] = vars(typer.main.get_command(APPS[program]))["commands"]
        assert name in commands and not commands[name].hidden
        known = {option for parameter in commands[name].params for option in parameter.opts} | {"--help"}
        assert {word for word in rest.split() if word.startswith("--")} <= known, f"{name}{rest}"


def test_every_kernel_has_a_walkthrough() -> None:
    kernels = {path.stem for path in (ROOT / "deep_gemm").glob("*/*.cuh") if "KERNEL(k" in path.read_text()}
    entries = (ROOT / "mkdocs.yml").read_text() + " ".join(page.name for page in DOCS.glob("*.md"))
    assert len(kernels) >= 9
    assert {name for name in kernels if not re.search(rf"\b{name}\b", entries)} == set()


def test_interface_names_every_public_function() -> None:
    named = set(re.findall(r"`(\w+)", (DOCS / "interface.md").read_text()))
    assert set(vars(deep_gemm)["__all__"]) - named == set()


@pytest.mark.parametrize("page", HAVE_CODE, ids=lambda page: page.name)
def test_code_on_a_page_runs_and_prints_what_the_page_says(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if page.name == "convert.md":
        pytest.importorskip("peft")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    code = python_on(page)
    exec(compile(BEFORE_THE_CODE.get(page.name, "") + code, page.name, "exec"), {})
    printed = iter(capsys.readouterr().out.splitlines())
    for said in re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE):
        assert said in printed, said  # in this order, among lines of prints without a comment


def test_code_on_the_page_of_layers_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(python_on(DOCS / "layers.md"), "layers.md", "exec"), {})
    of_linear, *are_equal = capsys.readouterr().out.splitlines()
    assert 0 < float(of_linear.removeprefix("tensor(").split(",")[0].rstrip(")")) < 1e-3
    assert are_equal == ["True"] * 7


@pytest.mark.parametrize(
    "name",
    [
        *("draw_gains", "draw_layers", "draw_layouts", "draw_parity", "draw_swizzle", "draw_training"),
        pytest.param("draw_ring", marks=pytest.mark.host_compiler),
    ],
)
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    drawing = script(name)
    assert drawing.PICTURE.read_text() == drawing.svg(), f"run: python docs/{name}.py"


def test_layers_take_twenty_lines_each() -> None:
    linear, mixture, *_ = re.findall(r"```python\n(.*?)```", (DOCS / "layers.md").read_text(), re.DOTALL)
    assert "class Linear" in linear
    assert "def mixture" in mixture
    for block in (linear, mixture):
        definition = block[block.index("class " if "class " in block else "def ") :].split("\n\n\n")[0]
        assert len([line for line in definition.splitlines() if line.strip()]) <= 20


@pytest.mark.release
def test_the_first_change_goes_as_told(tmp_path: Path) -> None:
    for folder in ("deep_gemm", "docs", "lab", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (lines,) = re.findall(r"<!-- first change -->\n```bash\n(.*?)\ngit diff ", CONTRIBUTING, re.DOTALL)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    for line in lines.splitlines():
        command, _, told = line.replace("python ", f"{sys.executable} ").partition("    # ")
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == told.startswith("fails"), done.stdout + done.stderr
    changed = [path.read_text() for path in tmp_path.glob("*/core/*settings.py")]
    assert sum(text.count("expected a bool, got") for text in changed) == 4


def test_the_map_from_source_to_tests_has_every_folder() -> None:
    rows = re.findall(r"^\| (`.*) \| (.*tests/.*) \|$", CONTRIBUTING, re.MULTILINE)
    sources, tests = (" ".join(column) for column in zip(*rows, strict=True))
    for path in (ROOT / "deep_gemm").iterdir():
        if path.name not in ("__pycache__", "__init__.py", "py.typed"):
            assert re.search(rf"[`/]{path.name}{'/' * path.is_dir()}`", sources), path.name
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    assert set(re.findall(r"`tests/(\w+)/`", tests)) == folders


def test_readme_lets_its_reader_run_something_soon_and_states_gains_that_were_measured() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert 60 <= len(lines) <= 90
    assert any(line.startswith("make demo") for line in lines[:35])
    assert "deep_gemm.fp8_gemm_nt(a, b)" in "\n".join(lines[:30])
    gains = script("draw_gains").gains()
    assert gains == tuple(sorted(gains, key=lambda gain: -gain.factor))
    measured = [f"{gain.factor:.1f}x" for gain in gains]
    on_h200 = [f"{gain.h200:.1f}x" for gain in gains if gain.h200]
    picture = next(line for line in lines if "docs/gains.svg" in line)
    assert re.findall(r"\d\.\dx", picture) == measured
    assert re.findall(r"\d\.\dx", " ".join(lines[:5])) == [measured[0], on_h200[0], measured[3], on_h200[2]]
    assert all(
        word in " ".join(lines[:10]) for word in ("H100", "torch 2.11", "DeepGEMM 2.5.0", "means", "random weights")
    )
    trained = Report.load(max((ROOT / "benchmarks" / "results").glob("training-h100-20*.json"))).rows
    steps = [row for row in trained if (row.kind, row.mode) == ("train_experts", "step")]
    us: dict[Any, Any] = {(row.shape, row.contender): row.us for row in steps}
    in_training = geometric_mean(us[shape, BF16] / ours for (shape, who), ours in us.items() if who == OURS)
    assert set(re.findall(r"\d\.\dx", "\n".join(lines))) == {*measured, on_h200[0], on_h200[2], f"{in_training:.1f}x"}


@pytest.mark.parametrize("name", ["dense", "decode", "grouped"])
def test_a_kernel_on_one_page_is_what_its_script_writes(name: str) -> None:
    assert (DOCS / "learn" / f"{name}.md").read_text() == script("write_kernels").page(name)


def test_the_pages_of_results_are_what_their_scripts_write() -> None:
    for writing, page in (("write_results", "results.md"), ("write_layer_results", "layer_results.md")):
        assert script(writing).page() == (DOCS / page).read_text()


def test_the_table_of_compilers_is_what_its_script_writes() -> None:
    writing = script("write_compilers")
    text = writing.PAGE.read_text()
    begin, end = text.index(writing.BEGIN) + len(writing.BEGIN), text.index(writing.END)
    assert writing.section(writing.newest()) == text[begin:end]


def test_the_model_of_nodes_is_what_its_script_writes_and_near_what_it_did_not_see() -> None:
    model = script("model_nodes")
    assert model.page() == model.PAGE.read_text()
    rows = json.loads(model.MEASURED.read_text())["rows"]
    line = model.Line.fit(list(model.points(rows, model.FITTED_HIDDEN)))
    mean, _ = model.error_of(line, list(model.points(rows, model.JUDGED_HIDDEN)))
    assert mean < 1.25
    judged = list(model.judged(model.LAYER, model.copies_to_a_peer(rows), model.product_tflops(model.LAYER)))
    assert {128, 1024, 4096} < {row[0] for row in judged}
    for tokens, products, alone, _, in_a_row, _, fused in judged:
        if 8 < tokens < 8192:  # the model uses the rate of 8192 tokens
            assert (products, in_a_row) == pytest.approx((alone, fused), rel=0.1), tokens
    exact = model.Line(10.0, 200.0)
    found = model.Line.fit([(x, exact.us(x)) for x in (1e3, 1e6, 1e8)])
    assert (found.start_us, found.gb_s) == pytest.approx((10.0, 200.0))
    two, many = ((model.copies_to_ranks(model.LAYER, n), model.copies_to_nodes(model.LAYER, n)) for n in (2, 64))
    for ranks, nodes in (two, many):
        assert nodes.beyond < ranks.beyond < model.LAYER.topk
        assert nodes.within >= ranks.within


def test_the_model_of_nodes_takes_the_newest_file_of_the_most_gpus_of_its_kind() -> None:
    model = script("model_nodes")

    def report(gpus: int, date: str, gpu: str = model.GPU) -> dict[str, Any]:
        return {"header": {"machine": {"gpu": gpu}, "date": date}, "rows": [{"config": f"{gpus} processes"}]}

    best = report(4, "2026-11-27")
    others = report(2, "2026-11-29"), report(4, "2026-11-26"), report(8, "2026-11-28", "NVIDIA H100 80GB HBM3")
    assert model.newest_of_most_gpus([others[0], best, *others[1:]]) is best


def test_the_model_of_a_lag_is_what_its_script_writes_and_near_what_it_did_not_see() -> None:
    script("model_nodes")  # model_lag imports this script
    model = script("model_lag")
    assert model.page() == model.PAGE.read_text()
    assert max(map(len, model.section().splitlines())) <= 80
    judged = [each for each in model.judge() if each.field == model.CALL]
    assert {each.ranks for each in judged} == {2, 4, 8}
    assert max(abs(each.error) for each in judged) < 0.11
    assert max(abs(each.error) for each in judged if each.tokens >= 4096) < 0.07
    built = [each for each in model.judge() if each.field == model.LAG]
    assert len(built) == 6
    assert max(abs(each.error) for each in built) < 0.1


def test_the_simulated_lag_keeps_its_order_and_its_bounds() -> None:
    script("model_nodes")
    model = script("model_lag")
    work = model.Work(4, 2, 1, 2.0, 3.0, 0.0, 0.0, 0.0, stores_beside=True, sms=1)
    blocks = [block for block, is_second in model.stream(work, 2) if is_second]
    assert blocks == [0, 1, 2, 3]
    assert list(model.stream(work, 2))[:6] == [(0, False)] * 2 + [(1, False)] * 2 + [(0, True), (2, False)]
    assert model.simulate(work) == model.simulate(work, 2, 2) == work.products_us == 28.0
    by_link = replace(work, first_us=4.0, results_us=4.0)
    assert model.simulate(by_link) == 8 * 4.0 + 3 + 4 * 4.0, "the link idles until the first results"
    assert model.simulate(by_link, 2, 4) == 49.0, "all results except the last are sent during the first product"
    assert model.simulate(by_link, 2, 2) > 49.0, "rows of later blocks wait for the ring"
    assert model.simulate(replace(work, tokens_us=9.0)) == 4 * 9.0 + 4 + 12, "the link delivers the last block's tokens"
    assert model.simulate(replace(work, store_us=2.0, stores_beside=False)) == 28.0 + 4 * 2.0
    with pytest.raises(ValueError, match="ring: expected at least 2 blocks for a lag of 2, got 1"):
        model.simulate(work, 2, 1)


def test_the_page_of_aims_is_what_its_script_writes() -> None:
    text = (DOCS / "aims.md").read_text()
    files = [ROOT / "benchmarks" / "results" / name for name in re.findall(r"`([\w.-]+\.json)`", text)]
    assert script("write_aims").page(files) == text


def test_aims_of_finer_scales_are_judged_on_each_gpu_that_ran_them() -> None:
    aims = script("write_aims").finer_scales
    assert all(line.count("|") == 4 for line in aims([]))

    def on(gpu: str, times: dict[str, float]) -> Report:
        rows = [
            Row("fine_dense", (m, 576, 5120), name, "cold", us=us, is_judged=judged)
            for m, judged in ((16, True), (4096, True), (1, False))
            for name, us in times.items()
        ]
        return Report({"machine": {"gpu": gpu}}, rows)

    times = dict.fromkeys(fine.SAID, 1.1) | {fine.USUAL: 1.0, BF16: 1.2}
    found = aims([on("H100", times), on("H200", times | {"deep_gemm_1x32": 1.25})])
    assert found[0].endswith("| H100 | H200 |")
    assert "| 1x32 | 128x128, m <= 64, geometric mean | at most 1.03 | 1.100, **missed** | 1.250, **missed** |" in found
    assert "| 32x32 by 1x128 | 128x128, m >= 1024, geometric mean | at most 1.15 | 1.100 | 1.100 |" in found
    assert any(line.startswith("| 1x32 | BF16") and line.endswith("| 0.917 | 1.042, **missed** |") for line in found)
    del times[BF16]
    with pytest.raises(ValueError, match="deep_gemm_32x32, m >= 1024: expected some shapes, got none"):
        aims([on("H100", times)])


def test_every_incident_has_tests_that_exist() -> None:
    rows = [line for line in (DOCS / "incidents.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    all_named = set()
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named, row
        for name, test in named:
            (file,) = (ROOT / "tests").rglob(name)
            assert f"\ndef {test}(" in file.read_text(), f"{name}::{test}"
        all_named.update(named)
    here = re.findall(
        r"^def (test_\w+)\(", (ROOT / "tests" / "core" / "test_gpu_incidents.py").read_text(), re.MULTILINE
    )
    assert {("test_gpu_incidents.py", test) for test in here} <= all_named
