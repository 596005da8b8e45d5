"""The site is built from docs/, and its links have targets; a browser cuts nothing; words lead to users' pages.

The browser is the system's Chromium, which `.ci/run` installs if it can.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin
from urllib.parse import quote_plus, unquote, urlsplit

import pytest
from test_docs import script
from thorough import THOROUGH, one_in

import deep_gemm

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = 1400, 768, 390
OF_SOURCE = "learn/dense", "learn/decode", "learn/grouped"
"""Pages of whole kernels, whose lines of 120 columns scroll inside of their frames."""
PICTURED = "index", "vllm", "reference/products", "architecture"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LEADS_TO = {
    "vllm": "vllm.html",
    "lmdeploy": "lmdeploy.html",
    "masked": "grouped.html",
    "gradient": "reference/products.html",
    "install": "install.html",
    "mxfp4": "fp4_models.html",
    "driver": "troubleshooting.html",
    "torch.compile": "torch_compile.html",
    "indexer": "indexer.html",
    "moe": "grouped.html",
    "qwen3": "models.html",
    "H200": "install.html",
    **dict.fromkeys(("CUDA out of memory", "illegal memory access", "undefined symbol"), "troubleshooting.html"),
    **dict.fromkeys(("no kernel image", "hang", "float16"), "troubleshooting.html"),
}
"""Words that users search for, and the page that must be the first result."""
CUT = """() => [...document.querySelectorAll("pre > code")]
    .filter(code => code.scrollWidth > code.clientWidth + 1).map(code => code.innerText.slice(0, 60))"""
OVERFLOWS = "() => document.documentElement.scrollWidth > document.documentElement.clientWidth"
CUT_TABLES = """() => [...document.querySelectorAll(".md-typeset table")].filter(table =>
    table.rows[0].cells.length <= 4 && table.scrollWidth > table.closest(".md-typeset__scrollwrap").clientWidth + 1)
    .map(table => table.rows[0].innerText)"""
"""Tables of at most four columns that a telephone cannot show whole. Wider tables may scroll in their frames."""
BLANK = "() => [...document.images].filter(image => !image.naturalWidth).map(image => image.src)"


class Page(HTMLParser):
    """Collects a page's links, and the page's anchors, which links may name."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect links and names."""
        found = dict(attrs)
        self.places |= {name for name in (found.get("id"), found.get("name")) if name}
        self.links += [link for link in (found.get("href"), found.get("src")) if link]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site without a warning; return its folder."""
    for module in ("zensical", "mkdocstrings_handlers.python"):
        if not is_there(module):
            if THOROUGH:
                pytest.fail(f"CI builds the site, and {module} is not installed", pytrace=False)
            pytest.skip('the site needs Zensical and mkdocstrings: pip install "hopper-gemm[docs]"')
    folder = tmp_path_factory.mktemp("checkout")  # Zensical writes its cache and the site beside mkdocs.yml
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    (folder / "deep_gemm").symlink_to(ROOT / "deep_gemm")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "build" / "site"


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package around the module is missing
        return False


def pages(folder: Path, ending: str) -> set[str]:
    return {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob(f"*{ending}")}


def test_the_site_has_every_page_and_its_links_lead_somewhere(site: Path) -> None:
    wanted = pages(ROOT / "docs", ".md") - {"package"}
    assert pages(site, ".html") - {"404"} == wanted
    assert set(re.findall(r"([\w/]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) - {"package"} == wanted
    files = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    broken = []
    for path, page in files.items():
        for link in page.links:
            address = urlsplit(link)
            there = (path.parent / unquote(address.path)).resolve() if address.path else path
            places = {"", "__skip", *(files[there].places if there in files else ())}
            if not (address.scheme or address.netloc) and (not there.exists() or address.fragment not in places):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_the_reference_shows_every_public_name(site: Path) -> None:
    hooks = script("site_hooks")
    entries = [
        each for text in (*hooks.REFERENCE.values(), *hooks.UNLISTED.values()) for each in hooks.ENTRY.findall(text)
    ]
    shown = [each.rpartition(".")[::2] for each in entries]
    assert len(shown) == len(set(shown))
    things = [getattr(importlib.import_module(module), name) for module, name in shown]
    missing = [
        f"{module.__name__}.{name}"
        for module in (deep_gemm, deep_gemm.convert, deep_gemm.nn, deep_gemm.distributed)
        for name, thing in vars(module).items()
        if name in getattr(module, "__all__", dir(module)) and not name.startswith("_")
        if not isinstance(thing, ModuleType) and get_origin(thing) is None and not any(thing is each for each in things)
    ]
    assert missing == []
    made = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    assert "doc-module" not in made  # a folder of the same name hides a function, so pages must use whole paths
    assert made.count("doc-object doc-function") + made.count("doc-object doc-class") == len(shown)
    assert "-&gt; Request" not in made and "&gt;&gt;&gt;" not in re.sub(r"<code>.*?</code>", "", made, flags=re.DOTALL)


def test_functions_that_no_page_lists_are_put_behind_others(site: Path) -> None:
    hooks, page = script("site_hooks"), "reference/casts.md"
    without = hooks.REFERENCE[page].replace("::: deep_gemm.cast_both_to_fp8\n", "")
    assert "\n\n::: deep_gemm.cast_both_to_fp8\n" in hooks.unlisted(hooks.REFERENCE | {page: without})[page]


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site and return its address: a browser does not search in files."""

    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a Chromium without a window."""
    if CHROMIUM is None or not is_there("playwright.sync_api"):
        pytest.skip("this test needs the system's Chromium and Playwright, and one of them is missing")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def test_no_page_is_wider_than_the_window_and_no_diagram_is_cut(
    site: Path, address: str, browser: Any, tmp_path: Path
) -> None:
    wrong = []
    window = browser.new_page()
    window.route("**/search.json", lambda route: route.abort())  # otherwise each page would make its own index
    for name in {*PICTURED, *one_in(12, sorted(pages(site, ".html") - {"404"}))}:
        for width in WIDTHS:
            window.set_viewport_size({"width": width, "height": 900})
            if width == WIDTHS[0]:
                window.goto(f"{address}/{name}.html")
                if name not in OF_SOURCE:
                    wrong += [f"{name}: cut at {width}: {text}" for text in window.evaluate(CUT)]
                wrong += [f"{name}: {image} does not load" for image in window.evaluate(BLANK)]
            if width == WIDTHS[-1] and name != "aims":
                wrong += [f"{name}: a table is cut at {width}: {text}" for text in window.evaluate(CUT_TABLES)]
            if window.evaluate(OVERFLOWS):
                wrong.append(f"{name}: wider than {width}")
            if name in PICTURED:
                window.screenshot(path=tmp_path / f"{Path(name).name}_{width}.png")
    assert wrong == []
    assert len(list(tmp_path.glob("*.png"))) == len(PICTURED) * len(WIDTHS)


@pytest.fixture(scope="module")
def first_found(address: str, browser: Any) -> Callable[[str], str]:
    """Return a function that searches for words and returns the address of the first result."""
    window = browser.new_page(viewport={"width": WIDTHS[0], "height": 900})
    window.goto(f"{address}/index.html", wait_until="networkidle")
    window.keyboard.press("Control+k")

    def search(words: str) -> str:
        window.get_by_role("combobox").fill("")
        window.wait_for_selector("[role=option]", state="detached")  # wait until the previous words' answers are gone
        window.get_by_role("combobox").fill(words)
        first = f"[role=option][aria-posinset='1'][href*='h={quote_plus(words)}']"
        found: str = window.wait_for_selector(first).get_attribute("href")
        return found.removeprefix(f"{address}/")

    return search


def test_words_lead_first_to_pages_for_users(first_found: Callable[[str], str]) -> None:
    assert {words: first_found(words).split("?")[0] for words in LEADS_TO} == LEADS_TO


def test_the_name_of_a_function_leads_to_its_entry(first_found: Callable[[str], str]) -> None:
    public = sorted(set(vars(deep_gemm)["__all__"]) & script("site_hooks").SHOWN.keys())
    assert len(public) > 80
    found = {name: first_found(name).rpartition(".")[2] for name in one_in(4, public)}
    found["experts"] = found.get("experts", "Experts").lower()  # the page of the module `experts` is right too
    assert found == {name: name for name in found}
