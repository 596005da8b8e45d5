"""Other distributions whose module has this package's name: finding them, the messages, and the cost of a search."""

from __future__ import annotations

import base64
import hashlib
import sys
import time
import warnings
from pathlib import Path

import pytest

from deep_gemm.compat import installed

FOREIGN = "__version__ = '2.1.1'\n"


def install(site: Path, name: str, version: str, files: dict[str, str], **infos: str) -> Path:
    """Write a distribution's files, and pip's record of them."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    record = []
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(text)}\n")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    for file, text in ({"METADATA": metadata, "RECORD": "".join(record)} | infos).items():
        (info / file.replace("_txt", ".txt")).write_text(text)
    return info


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with this package, the only folder that is searched for installed distributions."""
    site = tmp_path / "site"
    install(site, "hopper-gemm", "0.1.0", {"deep_gemm/__init__.py": "ours\n", "deep_gemm/core/gpu.py": "ours\n"})
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.setattr(installed, "FOLDER", (site / "deep_gemm").resolve())
    return site


def mixed(site: Path, names: str, origin: str = "hopper-gemm") -> str:
    listed = names.replace(" ", ", ")
    return (
        f"{listed} and hopper-gemm have their files in one folder, {(site / 'deep_gemm').resolve()}. "
        f"Run: pip uninstall -y {names} hopper-gemm; then: pip install {origin}"
    )


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        installed.warn_of_others()
    assert all(warning.category is UserWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def test_alone_nothing_is_said(site: Path) -> None:
    assert (warned(), installed.to_mend(), installed.changed()) == ([], [], [])


@pytest.mark.parametrize("name", ["deep-gemm", "deep_gemm", "DeepGEMM", "sgl-deep-gemm", "deep.gemm"])
def test_one_named_alike_is_warned_of_at_import_with_the_commands_that_mend_it(site: Path, name: str) -> None:
    info = install(site, name, "2.1.1", {"deep_gemm/_C.cpython-311-x86_64-linux-gnu.so": ""})
    assert warned() == [mixed(site, name.replace("-", "_"))]
    assert installed.to_mend() == [mixed(site, name)]
    assert installed.changed() == []
    info.rename(site / f"{name}.egg-info")  # the name that older tools use
    assert warned() == [mixed(site, name)]


def test_several_are_named_in_one_sentence(site: Path) -> None:
    install(site, "deep-gemm", "2.1.1", {"deep_gemm/a.py": ""})
    install(site, "sgl-deep-gemm", "0.3", {"deep_gemm/b.py": ""})
    (sentence,) = installed.to_mend()
    assert sorted(sentence.partition(" and hopper-gemm")[0].split(", ")) == ["deep-gemm", "sgl-deep-gemm"]
    assert len(warned()) == 1


@pytest.mark.parametrize("infos", [{}, {"top_level_txt": "deep_gemm_tools\n"}])
def test_a_name_alone_is_no_claim(site: Path, infos: dict[str, str]) -> None:
    install(site, "deep-gemm-tools", "1", {"deep_gemm_tools/__init__.py": "", "vllm/deep_gemm/a.py": ""}, **infos)
    (site / "deep_gemm_old-1.egg-info").write_text("a file, as distutils wrote it")
    assert (warned(), installed.to_mend()) == ([], [])


@pytest.mark.parametrize("infos", [{}, {"RECORD": "", "top_level_txt": "deep_gemm\n"}])
def test_any_other_name_is_found_by_what_it_brings(site: Path, infos: dict[str, str]) -> None:
    install(site, "kernels-of-somebody", "1", {"deep_gemm/jit/a.py": ""}, **infos)
    assert installed.to_mend() == [mixed(site, "kernels-of-somebody")]


def test_one_elsewhere_is_told_apart(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "FOLDER", tmp_path / "checkout" / "deep_gemm")
    install(site, "deep-gemm", "2.1.1", {"deep_gemm/a.py": ""})
    assert installed.to_mend() == [
        "deep-gemm: another deep_gemm, which programs may import instead. Run: pip uninstall -y deep-gemm"
    ]


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ('{"url": "file:///a/checkout", "dir_info": {}}', "file:///a/checkout"),
        ('{"url": "https://a.b/c", "vcs_info": {"vcs": "git", "commit_id": "1"}}', "git+https://a.b/c"),
    ],
)
def test_it_is_installed_again_from_where_it_came(site: Path, url: str, origin: str) -> None:
    (site / "hopper_gemm-0.1.0.dist-info" / "direct_url.json").write_text(url)
    install(site, "deep-gemm", "2.1.1", {"deep_gemm/a.py": ""})
    assert warned() == [mixed(site, "deep_gemm", origin)]


def test_files_that_are_gone_or_another_s_are_found(site: Path) -> None:
    (site / "deep_gemm/__init__.py").write_text(FOREIGN)
    (site / "deep_gemm/core/gpu.py").unlink()
    assert installed.changed() == ["deep_gemm/__init__.py", "deep_gemm/core/gpu.py"]
    assert installed.to_mend() == [
        "2 of hopper-gemm's files are gone or changed: deep_gemm/__init__.py, deep_gemm/core/gpu.py. "
        "Run: pip uninstall -y hopper-gemm; then: pip install hopper-gemm"
    ]
    install(site, "deep-gemm", "2.1.1", {"deep_gemm/__init__.py": FOREIGN})
    assert installed.to_mend() == [mixed(site, "deep-gemm")]


def test_a_checkout_has_no_list_of_its_files(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "deep_gemm/__init__.py").write_text(FOREIGN)
    monkeypatch.setattr(installed, "FOLDER", tmp_path / "checkout" / "deep_gemm")
    assert installed.changed() == []


def test_a_look_at_import_takes_about_a_millisecond(site: Path) -> None:
    for number in range(1000):
        (site / f"package_{number}-1.0.dist-info").mkdir()
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        installed.warn_of_others()
        times.append(time.perf_counter() - begin)
    assert min(times) < 2e-3
