"""What the site makes of pages and docstrings while it is built: mkdocs.yml names both halves of this file."""

from __future__ import annotations

import re
from typing import Any

import griffe

GUIDE = {"boost": 2}
SEARCH = {"Serve": GUIDE, "Train": GUIDE, "Learn": GUIDE, "Design": {"boost": 0.4}, "Project": {"exclude": True}}
"""What a search does with a tab's pages, if not what it does by itself: guides first, the log of the project never."""
RESULT = re.compile(r"Callable\[P, ([^\[\]]+)\]\]?$")
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1[^\n]+)*", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Tell the search what a page's tab says."""
    if page.ancestors:
        page.meta.setdefault("search", SEARCH.get(page.ancestors[-1].title, {}))
    return markdown


class Docstrings(griffe.Extension):
    """Shows examples as code, and what a decorated product gives to its caller."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the lines that begin with >>>, which Markdown takes for quotations."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)

    def on_function(self, *, func: griffe.Function, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Take the result's type from the decorator's own, for a product returns a request that is then run."""
        for decorator in func.decorators:
            path = decorator.callable_path
            if path.startswith("deep_gemm.compat.forms."):
                result = RESULT.search(str(loader.modules_collection[path].returns))
                if result and result[1] != "R":
                    func.returns = result[1]
