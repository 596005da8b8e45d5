"""Calls of engines: every form returns the right values on the CPU, and calls are found in files like a wheel's."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import deep_gemm
from lab.__main__ import app
from lab.engines import operands
from lab.engines.forms import ELSEWHERE, FAMILIES, SGLANG, Family, Form, lacking, table
from lab.engines.places import PLUGINS, changed
from lab.engines.ran import ran
from lab.engines.wheels import uses, uses_in_wheel

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
BEGIN, END = "<!-- calls -->\n", "<!-- end of calls -->"


@pytest.fixture(autouse=True)
def settings_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pdl = deep_gemm.get_pdl()
    yield
    deep_gemm.set_pdl(pdl)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_of_a_release_gives_the_right_values(family: str) -> None:
    wrong = [form for form, is_right in FAMILIES[family].run() if not is_right]
    assert wrong == []


@pytest.mark.parametrize(
    ("draw", "function", "arguments", "right"),
    [
        ("dense", "fp8_gemm_nt", "(a, sfa), (b, 1.01 * sfb), d", "near(d, x, w)"),
        ("dense", "fp8_gemm_nt", "(a, sfa), (b, sfb), d.clone()", "near(d, x, w)"),
        ("stacked", "m_grouped_fp8_gemm_nt_contiguous", "(a, sfa), (b, sfb), d, 0 * ids", "near_rows(d, x, w, ids)"),
        (
            "counted",
            "m_grouped_fp8_gemm_nt_masked",
            "(a, sfa), (b, sfb), d, counts // 2",
            "near_counted(d, x, w, counts)",
        ),
        ("many_logits", "fp8_mqa_logits", "q, kv, weights, starts, ends - 1", "right_logits(free, result + 1)"),
        ("prenorm", "tf32_hc_prenorm_gemm", "a, b, d, squares, 4", "right_prenorm(d, 1.001 * squares, a, b)"),
    ],
)
def test_wrong_values_are_found(draw: str, function: str, arguments: str, right: str) -> None:
    family = Family(getattr(operands, draw), (Form(function, arguments, SGLANG, right),))
    assert [is_right for _, is_right in family.run()] == [False]


def test_the_page_shows_the_forms() -> None:
    text = PAGE.read_text()
    shown = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert shown == table(), "python -m lab engines --table"


def test_the_page_shows_what_ran() -> None:
    _, _, rest = PAGE.read_text().partition("<!-- ran -->\n")
    assert rest.partition("<!-- end of ran -->")[0] == ran(), "python -m lab engines --ran"
    assert "| SGLang 0.5.17 | H200 | 2026-11-29 | Qwen3 MoE, DeepSeek-V3 |  |" in ran()


def test_what_is_elsewhere_is_not_in_the_table_too() -> None:
    forms = [form for family in FAMILIES.values() for form in family.forms]
    said = {form.function for form in forms} | {f"{form.function} {word}" for form in forms for word in form.keywords}
    assert said & ELSEWHERE.keys() == set()


SOURCE = """
import deep_gemm.utils.layout
from deep_gemm import fp8_mqa_logits as logits
from engine.third_party import deep_gemm as dg
from engine.third_party.deep_gemm import fp8_einsum
from engine.utils.deep_gemm import fp8_gemm_nt
from .deep_gemm import Runner
_impl = getattr(_dg, "m_new", None) or getattr(_dg, "m_old", None)
def f(self):
    logits(q, clean=False)
    _impl(a, *b, recipe=1, **more)
    fp8_einsum("x", out=2)
    fp8_gemm_nt(a, later=3)
    self.dg.newest(sized=4)
    hasattr(deep_gemm, "gate")
    deep_gemm.utils.layout.packed(x)
    _import_deep_gemm().inside(y=5)
    self.other(z=6)
    return deep_gemm.attribute, deep_gemm.__version__
"""


def test_uses_are_seen_in_every_way_in_which_engines_write_them() -> None:
    found, passed = uses(SOURCE)
    assert found == {
        "fp8_mqa_logits": {"clean"},
        "m_new": set(),
        "m_old": {"recipe"},
        "fp8_einsum": {"out"},
        "newest": {"sized"},
        "gate": set(),
        "packed": set(),
        "inside": {"y"},
        "attribute": set(),
    }
    assert passed == {"fp8_gemm_nt": {"later"}}


def test_the_command_lists_what_the_table_lacks(tmp_path: Path) -> None:
    wheel = tmp_path / "engine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(
            "engine/a.py", "import deep_gemm\ndeep_gemm.fp8_gemm_nt(a, b, recipe=r, gone=1)\ndeep_gemm.mega_mhc()"
        )
        file.writestr("engine/b.py", "from engine.utils.deep_gemm import fp8_gemm_nt\nfp8_gemm_nt(a, more=2)")
        file.writestr("engine/third_party/deep_gemm/c.py", "deep_gemm.never_read()")
        file.writestr("engine/d.py", "import deep_gemm\ndeep_gemm.new_name(x=1)")
    assert lacking(uses_in_wheel(wheel)) == ["fp8_gemm_nt gone", "fp8_gemm_nt more", "new_name"]
    told = CliRunner().invoke(app, ["engines", str(wheel)])
    assert (told.exit_code, told.stdout.splitlines()) == (
        1,
        [f"{wheel.name}: 3 names, unknown:", "  fp8_gemm_nt gone", "  fp8_gemm_nt more", "  new_name"],
    )
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("engine/a.py", "import deep_gemm\ndeep_gemm.fp8_gemm_nt(a, b, recipe=r)")
    told = CliRunner().invoke(app, ["engines", str(wheel)])
    assert (told.exit_code, told.stdout) == (0, f"{wheel.name}: 1 names, all of them known\n")


PLACES = {
    "engine/__init__.py": "from .deep.inside import moved as of_us\n",
    "engine/deep/inside.py": "from .. import a\ndef moved(x, *, y): ...\n",
    "engine/a.py": "TABLE, OTHER = {}, 1\nfrom engine.deep.inside import moved\nclass Kind:\n"
    "    x: int\n    MODE = 3\n    @classmethod\n    def of(cls, x): ...\n    def run(self, x): ...\n",
}
"""The files of an engine's wheel."""


def test_places_of_a_plugin_are_found_in_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "engine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in PLACES.items():
            file.writestr(name, text)
    assert changed(wheel) is None
    there = {
        ("engine", "of_us"): ("x", "y"),
        ("engine.a", "moved"): ("x", "y"),
        ("engine.a", "OTHER"): None,
        ("engine.a", "Kind"): ("x",),
        ("engine.a", "Kind.MODE"): None,
        ("engine.a", "Kind.of"): ("x",),
        ("engine.a", "Kind.run"): ("self", "x", "later?"),
    }
    monkeypatch.setitem(PLUGINS, "engine", there)
    assert changed(wheel) == []
    told = CliRunner().invoke(app, ["engines", str(wheel)])
    assert (told.exit_code, told.stdout.splitlines()[1]) == (0, "  the plugin's places are as it knows them")
    others = {("engine.b", "x"): None, ("engine.a", "Kind.gone"): None, ("engine.a", "Kind.run"): ("self", "x", "y")}
    monkeypatch.setitem(PLUGINS, "engine", {**there, **others})
    found = ["engine.a.Kind.run: ('self', 'x')", "engine.b.x: gone", "engine.a.Kind.gone: gone"]
    assert changed(wheel) == found
    told = CliRunner().invoke(app, ["engines", str(wheel)])
    listed = ["  the plugin's places are others:", *(f"    {each}" for each in found)]
    assert (told.exit_code, told.stdout.splitlines()[1:]) == (1, listed)
