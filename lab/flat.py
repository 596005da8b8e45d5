"""One kernel for one configuration as one file: every header is pasted where it is first included."""

from __future__ import annotations

import re
from collections.abc import Mapping

INCLUDE = re.compile(r'#include (?:"(?P<file>[^"]+)"|(?P<macro>[A-Z_]+))$')
DEFINE = re.compile(r'#define (?P<macro>[A-Z_]+) "(?P<file>[^"]+)"$')


def flat(source: str, headers: Mapping[str, str]) -> str:
    """Give a source with each header where it is included first, as the compiler reads them."""
    files: dict[str, str] = {}
    seen: set[str] = set()

    def lines_of(text: str) -> list[str]:
        lines: list[str] = []
        for line in text.split("\n"):
            if found := DEFINE.match(line):
                files[found["macro"]] = found["file"]
            found = INCLUDE.match(line)
            if found is None:
                lines += [line] if line != "#pragma once" else []
                continue
            name = found["file"] or files[found["macro"]]
            if name in seen:
                continue
            if "#pragma once" in headers[name]:
                seen.add(name)
            lines += [f"// {name}", *lines_of(headers[name].strip("\n")), ""]
        return lines

    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines_of(source))) + "\n"
