"""Lets scripts of tests/ run from a checkout that is not installed: they can import the package, lab/ and all tests."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(path) for path in (ROOT, ROOT / "tests", *(ROOT / "tests").rglob("*")) if path.is_dir()]
