"""Record which trial notices each mutation. Tests run this trial first to save time; if it passes, all the rest run.

    python tests/lab/first_trials.py [-k "dense: or rows:"]

runs the tests of all mutations, or of some lists, with each list's trials in order, and stores the trials that notice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lab.sim.mutate import Mutation
    from lab.sim.trial import Trial

HERE = Path(__file__).resolve().parent
FILE = HERE / "first_trials.json"
"""The number of the noticing trial, unless it is the first, by the module of its class and the mutation's name."""
NOTES = "DG_NOTE_TRIALS"
"""The environment variable that names the file to which tests add their outcomes."""

KNOWN: dict[str, dict[str, int]] = json.loads(FILE.read_text())


def first_trial(mutation: Mutation, trials: Sequence[Trial]) -> int | None:
    """Return the number of the trial to begin with, or None if no number is known."""
    return None if NOTES in os.environ else KNOWN.get(_of(trials), {}).get(mutation.name)


def note(mutation: Mutation, trials: Sequence[Trial], number: int) -> None:
    """Add an outcome to the file of notes, if the environment names one."""
    if path := os.environ.get(NOTES):
        with Path(path).open("a") as file:
            file.write(json.dumps([_of(trials), mutation.name, number]) + "\n")


def _of(trials: Sequence[Trial]) -> str:
    return type(trials[0]).__module__


def learned(lines: Sequence[str], known: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return the known numbers of trials, updated by the notes in `lines`."""
    found = defaultdict(dict, {module: dict(of_module) for module, of_module in known.items()})
    for module, name, number in map(json.loads, lines):
        found[module].pop(name, None)
        if number:
            found[module][name] = number
    return {module: dict(sorted(of_module.items())) for module, of_module in sorted(found.items()) if of_module}


def main(arguments: Sequence[str]) -> int:
    files = sorted(str(path) for path in HERE.glob("test_mutat*.py"))
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        environment = {**os.environ, NOTES: str(notes), "CI": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "--numprocesses", "auto", *files, *arguments]
        status = subprocess.run(command, env=environment, check=False).returncode
        lines = notes.read_text().splitlines()
    FILE.write_text(json.dumps(learned(lines, KNOWN), indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
