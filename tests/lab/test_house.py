"""Ceilings of the tree's size: counts stay below their ceilings, and no commit raises a ceiling."""

import ast
import re
import subprocess

import pytest
from helpers import some
from test_docs import ROOT

from lab import house
from lab.house import CEILINGS, Grant

WHEEL, LAB, TESTS = (f"lines of Python in {where}" for where in ("the wheel", "lab/", "tests/"))
CUDA = "lines of CUDA in the wheel"


def ceilings_in(text: str) -> dict[str, int]:
    """Read the ceilings from the text of a version of lab/house.py."""
    found = some(re.search(r"^CEILINGS = (\{.*?^\})", text, re.MULTILINE | re.DOTALL))
    ceilings: dict[str, int] = ast.literal_eval(found[1])
    return ceilings


def versions() -> list[str]:
    """Return the text of lab/house.py in each commit since it has ceilings; an empty list without git's history."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    try:
        commits = git("log", "--format=%H", "--", "lab/house.py").split()
        return [text for commit in commits if "GRANTS" in (text := git("show", f"{commit}:lab/house.py"))]
    except (OSError, subprocess.CalledProcessError):
        return []


def test_the_house_is_no_larger_than_its_ceilings() -> None:
    """`python -m lab.house` prints all counts."""
    assert house.excess(house.counts()) == {}


def test_no_commit_raises_a_ceiling() -> None:
    earlier = versions() or pytest.skip("needs git, and the history of lab/house.py")
    assert [house.raised(ceilings_in(text)) for text in earlier] == [{}] * len(earlier)


def test_a_raised_ceiling_is_seen() -> None:
    lower = CEILINGS | {WHEEL: CEILINGS[WHEEL] - 1}
    assert house.raised(ceilings_in(f"CEILINGS = {{\n{str(lower)[1:-1]}\n}}\n")) == {WHEEL: 1}
    assert house.raised({}) == {}, "a new count is no raised ceiling"


@pytest.mark.parametrize(
    ("grants", "more", "excess"),
    [
        ((), {WHEEL: 1}, {WHEEL: 1}),
        ((Grant("an issue", 10),), {WHEEL: 6, CUDA: 4, TESTS: 20, LAB: 10}, {}),
        ((Grant("an issue", 10),), {WHEEL: 7, CUDA: 4, LAB: 10}, {WHEEL: 7, CUDA: 4}),
        ((Grant("an issue", 10),), {TESTS: 21, LAB: 11}, {TESTS: 21, LAB: 11}),
        ((Grant("an issue", 10), Grant("another", 10)), {TESTS: 40, LAB: 20}, {}),
        ((Grant("an issue", 10, kernels=1),), {"files in the wheel": 2}, {}),
        ((Grant("an issue", 10),), {"files in the wheel": 1}, {"files in the wheel": 1}),
        ((Grant("an issue", 10, kernels=1),), {"rooms": 1}, {"rooms": 1}),
    ],
)
def test_a_grant_leaves_room_for_its_lines(
    grants: tuple[Grant, ...], more: dict[str, int], excess: dict[str, int]
) -> None:
    counted = {what: ceiling + more.get(what, 0) for what, ceiling in CEILINGS.items()}
    assert house.excess(counted, grants) == excess
