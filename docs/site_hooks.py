"""What the site makes of pages and docstrings while it is built: mkdocs.yml names both halves of this file."""

from __future__ import annotations

import re
from collections import Counter
from copy import copy
from pathlib import Path
from typing import Any

import griffe

GUIDE = {"boost": 2}
SEARCH = {"Serve": GUIDE, "Train": GUIDE, "Learn": GUIDE, "Design": {"boost": 0.4}, "Project": {"exclude": True}}
"""What a search does with a tab's pages, if not what it does by itself: guides first, the log of the project never."""
RESULT = re.compile(r"Callable\[P, ([^\[\]]+)\]\]?$")
NAME = re.compile(r"(?<!\[)`(\w+)`(?!\])")
ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1[^\n]+)*", re.MULTILINE)
DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "deep_gemm"


def unlisted(pages: dict[str, str]) -> dict[str, str]:
    """Give entries of public functions that no page of the reference shows, by the page that shows most of a family."""
    front = (PACKAGE / "__init__.py").read_text()
    public = set(re.findall(r'^    "(\w+)",$', front, re.MULTILINE))
    homes = {
        name: module
        for module, many, one in re.findall(r"^    from \.([\w.]+) import (?:\(([^)]+)\)|(.+))$", front, re.MULTILINE)
        for name in re.findall(r"\w+", many or one)
    }
    shown = {path.rpartition(".")[2]: uri for uri, text in pages.items() for path in ENTRY.findall(text)}
    added: dict[str, str] = {}
    for name in sorted(public & homes.keys() - shown.keys()):
        file = PACKAGE / f"{homes[name].replace('.', '/')}.py"
        source, family = file.read_text() if file.exists() else "", homes[name].partition(".")[0]
        if re.search(rf"^(def|class) {name}\b", source, re.MULTILINE):  # else it is another name of one that is shown
            beside = Counter(uri for other, uri in shown.items() if homes.get(other, "").startswith(f"{family}."))
            (uri, _), *_ = beside.most_common(1)
            added[uri] = added.get(uri, "") + f"\n\n::: deep_gemm.{name}\n"
    return added


REFERENCE = {f"reference/{page.name}": page.read_text() for page in sorted((DOCS / "reference").glob("*.md"))}
UNLISTED = unlisted(REFERENCE)
SHOWN = {
    path.rpartition(".")[2]: path for text in (*REFERENCE.values(), *UNLISTED.values()) for path in ENTRY.findall(text)
}
"""Names that the reference shows, each with its path."""


def on_config(config: Any) -> None:
    """Put kernels' pages that no entry of the navigation names behind those that it does."""
    design: list[Any] = next(tab["Design"] for tab in config.nav if "Design" in tab)
    kernels: list[Any] = next(entry["Kernels"] for entry in design if "Kernels" in entry)
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    sources = sorted({path.stem for path in PACKAGE.glob("*/*.cuh")})
    kernels += [
        {name: f"{name}.md"} for name in sources if f"{name}.md" not in named and (DOCS / f"{name}.md").exists()
    ]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Tell the search what a page's tab says, link names on the map of functions, and complete the reference."""
    if page.ancestors:
        page.meta.setdefault("search", SEARCH.get(page.ancestors[-1].title, {}))
    markdown += UNLISTED.get(page.file.src_uri, "")
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
