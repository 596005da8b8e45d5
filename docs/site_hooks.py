"""Changes pages and docstrings while Zensical builds the site: mkdocs.yml names both extensions in this file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import griffe
from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

UNSEARCHED = "Project"
"""The tab with pages that the search ignores, because they are the project's log, not guides."""
RESULT = re.compile(r"Callable\[P, ([^\[\]]+)\]\]?$")
NAME = re.compile(r"(?<!\[)`(\w+)`(?!\])")
ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1[^\n]+)*", re.MULTILINE)
DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "deep_gemm"


def unlisted(pages: dict[str, str]) -> dict[str, str]:
    """Return entries for public functions that no reference page shows, by the page with most of their family."""
    # The package exports names by "as", in its front or in two modules from which it takes all names.
    front = "".join((PACKAGE / file).read_text() for file in ("__init__.py", "utils/layout.py", "utils/math.py"))
    homes = {
        name: module
        for module, many, one in re.findall(r"^ *from \.+([\w.]+) import (?:\(([^)]+)\)|(.+))$", front, re.MULTILINE)
        for name in re.findall(r"(\w+) as \1\b", many or one)
    }
    shown = {path.rpartition(".")[2]: uri for uri, text in pages.items() for path in ENTRY.findall(text)}
    added: dict[str, str] = {}
    for name in sorted(homes.keys() - shown.keys()):
        file = PACKAGE / f"{homes[name].replace('.', '/')}.py"
        source, family = file.read_text() if file.exists() else "", homes[name].partition(".")[0]
        if re.search(rf"^(def|class) {name}\b", source, re.MULTILINE):  # else it is an alias
            beside = Counter(uri for other, uri in shown.items() if homes.get(other, "").startswith(f"{family}."))
            (uri, _), *_ = beside.most_common(1)
            added[uri] = added.get(uri, "") + f"\n\n::: deep_gemm.{name}\n"
    return added


REFERENCE = {f"reference/{page.name}": page.read_text() for page in sorted((DOCS / "reference").glob("*.md"))}
UNLISTED = unlisted(REFERENCE)
SHOWN = {
    path.rpartition(".")[2]: path for text in (*REFERENCE.values(), *UNLISTED.values()) for path in ENTRY.findall(text)
}
"""The path of each name that the reference shows."""


class Pages(Preprocessor):
    """Links names on the map of functions, completes the reference, and hides a tab from the search.

    It also receives each docstring as a part of its page: a docstring has no entries, but has the page's context.
    """

    def run(self, lines: list[str]) -> list[str]:
        """Change the lines of one page."""
        from zensical.extensions.context import ContextPreprocessor  # a test reads this file without Zensical

        context: Any = ContextPreprocessor.from_markdown(self.md)
        page, nav = context.page, context.config["nav"]
        if page.path in {path for tab in nav if tab["title"] == UNSEARCHED for path in _paths(tab)}:
            page.meta["search"] = {"exclude": True}
        if page.path == "interface.md":
            return linked("\n".join(lines)).split("\n")
        if any(map(ENTRY.match, lines)):
            return [*lines, *UNLISTED.get(page.path, "").split("\n")]
        return lines


def _paths(entry: dict[str, Any]) -> Iterator[str]:
    yield entry["url"]
    for child in entry["children"]:
        yield from _paths(child)


class PagesExtension(Extension):
    """Registers `Pages` with Python-Markdown."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  # Python-Markdown's name
        """Make `Pages` the first preprocessor of a page."""
        md.preprocessors.register(Pages(md), "deep_gemm_pages", 100)


def makeExtension(**options: Any) -> PagesExtension:  # noqa: N802  # Python-Markdown's name
    """Make the extension; Python-Markdown calls this function."""
    return PagesExtension(**options)


def linked(text: str) -> str:
    """Turn each name that the reference shows into a link to the reference."""
    return NAME.sub(lambda found: f"[{found[0]}][{SHOWN[found[1]]}]" if found[1] in SHOWN else found[0], text)


class Docstrings(griffe.Extension):
    """Shows examples as code, constants as numbers, and the result type that a decorated product returns."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Link other functions, and fence lines that begin with >>>, which Markdown would treat as quotations."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", linked(obj.docstring.value))

    def on_function(self, *, func: griffe.Function, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Show constants as numbers, and the decorator's result type: it runs the request that a product returns.

        A function that is `like` another function has its parameters, except for the defaults that `like` replaces.
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
                constant = loader.modules_collection[module].members.get(name) if module else None
                if constant is not None:  # it is assigned separately, not with other names
                    parameter.default = constant.value
        for decorator in func.decorators:
            path = decorator.callable_path
            if path.startswith("deep_gemm.compat.forms."):
                result = RESULT.search(str(loader.modules_collection[path].returns))
                if result and result[1] != "R":
                    func.returns = result[1]
