"""Breaks a kernel's source on purpose, in many ways, to test whether the simulator notices.

A mutation replaces one text in one header. Trials run it with some configuration, problem, seed and schedule
(tests/mutated.py). A mutation that no trial notices shows a gap in the trials or in the simulator, or a line that the
kernel does not need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """Replace `old` by `new` in `header`: the only occurrence, or with `everywhere` all occurrences.

    Trials of the configuration `shows_in` run first. This saves time if few kernels show the mutation, and changes
    nothing else: all other trials follow.
    """

    name: str
    header: str
    old: str
    new: str
    everywhere: bool = False
    shows_in: object = None

    def apply(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers with the mutation applied; raise a ValueError if `old` is missing: the list is stale."""
        count = headers[self.header].count(self.old)
        if count == 0 or (count > 1 and not self.everywhere):
            raise ValueError(f"mutation {self.name!r}: expected one {self.old!r} in {self.header}, got {count}")
        return {**headers, self.header: headers[self.header].replace(self.old, self.new)}
