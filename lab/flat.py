"""Writes one kernel with one configuration as one file: each header is pasted at its first inclusion."""

from __future__ import annotations

import re
from collections.abc import Mapping

INCLUDE = re.compile(r'#include (?:"(?P<file>[^"]+)"|(?P<macro>[A-Z_]+))$')
DEFINE = re.compile(r'#define (?P<macro>[A-Z_]+) "(?P<file>[^"]+)"$')


def flat(source: str, headers: Mapping[str, str], mark: str = "") -> str:
    """Return a source with each header pasted at its first inclusion, in the compiler's order.

    With a `mark`, the mark and a header's name precede its own first line, after the headers that it includes.
    """
    files: dict[str, str] = {}
    seen: set[str] = set()

    def lines_of(text: str, name: str) -> list[str]:
        lines: list[str] = []
        heading: list[str] = [f"{mark or '// '}{name}"] if name else []
        for line in text.split("\n"):
            if found := DEFINE.match(line):
                files[found["macro"]] = found["file"]
            found = INCLUDE.match(line.partition("//")[0].rstrip() if mark else line)
            if found is None:
                if mark and heading and (line.startswith(("//", "#")) or not line):
                    heading.append(line if line != "#pragma once" else "")
                elif line != "#pragma once":
                    lines, heading = [*lines, *heading, line], []
                continue
            if not mark:
                lines, heading = [*lines, *heading], []
            name = found["file"] or files[found["macro"]]
            if name in seen:
                continue
            if "#pragma once" in headers[name]:
                seen.add(name)
            lines += [*lines_of(headers[name].strip("\n"), name), ""]
        return lines + heading

    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines_of(source, ""))) + "\n"
