"""What the site makes of pages and docstrings while it is built: mkdocs.yml names both halves of this file."""

from __future__ import annotations

import re
from copy import copy
from pathlib import Path
from typing import Any

import griffe

GUIDE = {"boost": 2}
SEARCH = {"Serve": GUIDE, "Train": GUIDE, "Learn": GUIDE, "Design": {"boost": 0.4}, "Project": {"exclude": True}}
"""What a search does with a tab's pages, if not what it does by itself: guides first, the log of the project never."""
RESULT = re.compile(r"Callable\[P, ([^\[\]]+)\]\]?$")
NAME = re.compile(r"(?<!\[)`(\w+)`(?!\])")
SHOWN = {
    path.rpartition(".")[2]: path
    for page in sorted(Path(__file__).with_name("reference").glob("*.md"))
    for path in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
}
"""Names that the reference shows, each with its path."""
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1[^\n]+)*", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Tell the search what a page's tab says, and link the names on the map of functions."""
    if page.ancestors:
        page.meta.setdefault("search", SEARCH.get(page.ancestors[-1].title, {}))
    return linked(markdown) if page.file.src_uri == "interface.md" else markdown


def linked(text: str) -> str:
    """Make each name that the reference shows a link to it."""
    return NAME.sub(lambda found: f"[{found[0]}][{SHOWN[found[1]]}]" if found[1] in SHOWN else found[0], text)


class Docstrings(griffe.Extension):
    """Shows examples as code, numbers for constants, and what a decorated product gives to its caller."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Link other functions, and fence the lines that begin with >>>, which Markdown takes for quotations."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", linked(obj.docstring.value))

    def on_function(self, *, func: griffe.Function, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Show numbers for constants, and the decorator's result for a product's: a request that it then runs.

        What is `like` another function has its parameters, but for the defaults that are given.
        """
        for decorator in func.decorators:
            if decorator.callable_path == "deep_gemm.compat.forms.like":
                model, *instead = decorator.value.arguments
                shown = loader.modules_collection[model.canonical_path]
                self.on_function(func=shown, loader=loader)
                func.parameters, func.returns = griffe.Parameters(*map(copy, shown.parameters)), shown.returns
                for each in instead:
                    if each.name in func.parameters:
                        func.parameters[each.name].default = each.value
        for parameter in func.parameters:
            if isinstance(parameter.default, griffe.ExprName) and parameter.default.name.isupper():
                module, _, name = parameter.default.canonical_path.rpartition(".")
                constant = loader.modules_collection[module].members.get(name)
                if constant is not None:  # one that is assigned alone
                    parameter.default = constant.value
        for decorator in func.decorators:
            path = decorator.callable_path
            if path.startswith("deep_gemm.compat.forms."):
                result = RESULT.search(str(loader.modules_collection[path].returns))
                if result and result[1] != "R":
                    func.returns = result[1]
