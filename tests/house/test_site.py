"""The site is built from docs/, and every link and anchor in it leads somewhere."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from thorough import THOROUGH

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        if THOROUGH:
            pytest.fail("CI builds the site, and mkdocs is not installed", pytrace=False)
        pytest.skip('the site needs mkdocs-material: pip install "hopper-gemm[docs]"')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"package"}
    assert pages <= {page.stem for page in tmp_path.glob("*.html")}
