"""Prints a kernel with one configuration on one page: constants are folded into branches, and unused code is removed.

The pages in docs/learn compile to the machine code of the kernels themselves (tests/lab/test_fold.py). A page of any
other configuration has as many of each instruction in `OPCODES` of inspect.py as the kernel. Their order may
differ, and so may the code that computes addresses: the page has a number for a call like `skipped_scales(tile)`,
so the compiler inlines no call, and numbers its values differently. PTX wrappers stay in their headers. Folding
relies on the form of our sources: a template's brackets touch its name, and operators have spaces on both sides.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, pairwise
from typing import Any

from .flat import flat

TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*) | (?P<directive>^\ *\#[^\n]*) | (?P<text>"(?:\\.|[^"\\])*") | (?P<number>\d[\w.]*)
    | (?P<word>[A-Za-z_]\w*) | (?P<mark>\.\.\.|->|::|&&|\|\||<<|(?<=\ )>>|<=|>=|==|!=|\+\+|--|[-+*/%&|^]=|[^\s\w])""",
    re.VERBOSE | re.MULTILINE,
)
CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}
ENDS_OF_OPERANDS = {*",;=?:([{", "return", "+=", "-=", "|=", "&=", "^="}
"""Tokens that precede or follow an operand of `?`, `&&` or `||`."""
EFFECTS = {"(", "=", "++", "--", "+=", "-=", "{"}
"""Tokens that show a possible effect of an argument, so that the argument must stay."""
NOT_TYPES = {"return", "else", "if", "for", "while", "do", "constexpr", "namespace", "using", "const", "static"}
PYTHON = {"&&": "and", "||": "or", "!": "not", "/": "//", "true": "1", "false": "0"}
PLAIN = r"&?[\w:]+(?:(?:\.|->)\w+)*"
"""A pattern for a literal, a name, or a member of a member."""
RESULT = re.compile(rf"(?:{PLAIN}(?:\((?:{PLAIN}(?:,{PLAIN})*)?\))?)?")
"""A pattern for an empty text, a `PLAIN` expression, or a call with `PLAIN` arguments."""
CONTROLS = {"if", "for", "while", "constexpr"}
NAMED = re.compile(r"`(\w+)`|\b(k[A-Z]\w+)|\b([A-Z_]{7,})\b|(\w+)\.cuh")
LIBRARY = ("ptx/", "types.cuh")
"""Headers that a page includes: PTX wrappers, and the types of every source."""
FILE = "// ======== "


Edit = tuple[int, int, str]
"""A part of a source, as two offsets, and the text that replaces it."""


class Source:
    """A source, its tokens without comments, and its pairs of brackets."""

    def __init__(self, text: str) -> None:
        """Split a source into tokens, and match its brackets."""
        self.text = text
        found = [each for each in TOKEN.finditer(text) if each.lastgroup != "comment"]
        self.words = [each.group() for each in found]
        self.kinds = [each.lastgroup for each in found]
        self.starts, self.ends = [each.start() for each in found], [each.end() for each in found]
        self.match: dict[int, int] = {}
        stack: list[int] = []
        for i, word in enumerate(self.words):
            touches = i > 0 and self.ends[i - 1] == self.starts[i]
            is_template = word == "<" and self.is_word(i - 1) and (touches or self.words[i - 1] == "template")
            if word in ("(", "[", "{") or is_template:
                stack.append(i)
            elif word in (")", "]", "}") or (word == ">" and touches and stack and self.words[stack[-1]] == "<"):
                opening = stack.pop()
                assert CLOSING[self.words[opening]] == word, self.span(opening, i + 1)
                self.match[opening], self.match[i] = i, opening

    def is_word(self, i: int) -> bool:
        """Tell whether a token is a name or a keyword."""
        return self.kinds[i] == "word"

    def after(self, i: int) -> int:
        """Return the token after token `i`; if `i` opens brackets, after these."""
        return max(self.match.get(i, i), i) + 1

    def outside(self, first: int, end: int) -> Iterator[int]:
        """Yield tokens, but skip the insides of brackets."""
        while first < end:
            yield first
            first = self.after(first)

    def find(self, word: str, first: int) -> int:
        """Find the next occurrence of a word outside of brackets."""
        return next((at for at in self.outside(first, len(self.words)) if self.words[at] == word), len(self.words))

    def span(self, first: int, end: int) -> str:
        """Return the text of tokens `first` to `end - 1`."""
        return self.text[self.starts[first] : self.ends[end - 1]]

    def items(self, opening: int) -> list[tuple[int, int]]:
        """Return the first token and the end token of each item between brackets."""
        commas = [i for i in self.outside(opening + 1, self.match[opening]) if self.words[i] == ","]
        bounds = [opening, *commas, self.match[opening]]
        return [(a + 1, b) for a, b in pairwise(bounds) if a + 1 < b]

    def statement_end(self, i: int) -> int:
        """Find the token after the statement that begins at token `i`."""
        word = self.words[i]
        if self.kinds[i] == "directive":
            return self.statement_end(i + 1)
        if word == "{":
            return self.after(i)
        if word == "if":
            end = self.statement_end(self.after(i + 1 + (self.words[i + 1] == "constexpr")))
            return self.statement_end(end + 1) if self.words[end] == "else" else end
        if word in ("for", "while"):
            return self.statement_end(self.after(i + 1))
        return self.find(";", i) + 1

    def edited(self, edits: Iterable[Edit]) -> str:
        """Return the text with all edits; of two overlapping edits, only the outer one is made."""
        parts, at = [], 0
        for start, end, text in sorted(edits, key=lambda edit: (edit[0], -edit[1])):
            if start >= at:
                parts += [self.text[at:start], text]
                at = end
        return "".join([*parts, self.text[at:]])

    def replaced(self, first: int, end: int, text: str) -> Edit:
        """Replace tokens with a text."""
        start, stop = self.starts[first], self.ends[end - 1]
        if not text:
            if self.text[start - 1] in " (<":
                stop += self.text[stop] == " "
            start -= self.text[start - 1] == " " and self.text[stop] in ",;)>" and self.text[stop - 1] != " "
        return (start, stop, text)

    def removed(self, first: int, end: int) -> Edit:
        """Remove tokens; if they fill whole lines, remove these lines and the comment directly above."""
        while first and self.words[first - 1].lstrip().startswith("#pragma"):
            first -= 1
        lines, rest = self.text[: self.starts[first]].split("\n"), self.text[self.ends[end - 1] :].partition("\n")[0]
        if lines.pop().strip() or rest.partition("//")[0].strip():
            return (self.starts[first], self.ends[end - 1], "")
        while lines and lines[-1].lstrip().startswith("//"):
            lines.pop()
        return (len("\n".join([*lines, ""])), self.ends[end - 1] + len(rest) + 1, "")


class Node:
    """A declaration: a function, type, constant or macro, or a type's member."""

    def __init__(self, source: Source, first: int, end: int, owner: Node | None) -> None:
        """Read the names that the declaration declares."""
        self.first, self.end, self.owner = first, end, owner
        self.template = first + 1 if source.words[first] == "template" else None
        self.head = source.after(self.template) if self.template else first
        self.body = min(source.find("{", self.head), end)
        text = source.span(self.head, max(self.body, self.head + 1))
        typed = re.match(r"(?:struct|union) (?:alignas\(\d+\) )?(\w*)|using (\w+) =|#define (\w+)|static_assert", text)
        text = re.sub(r"(?<!struct )alignas\([^)]*\)|__align__\(\d+\)|KERNEL\(.*?\)", "", text)
        called = re.search(r"(\w+)(<[^()]*>)?\(", text)
        self.is_type = text.startswith(("struct", "union")) and self.body < end
        self.is_function = typed is None and called is not None and not re.search(r"=|\[", text[: called.start()])
        if self.is_function and called:
            self.names = [called[1]]
            name = next(i for i in range(self.head, end) if source.words[i] == called[1])
            self.parameters = next(i for i in range(name, end) if source.words[i] == "(")
        else:
            named = r"(\w+) =(?!=)" if " =" in text else r"(\w+)(?=\[|;|, )"
            self.names = [*filter(None, typed.groups())] if typed else re.findall(named, text)
        self.is_maker = self.is_function and owner is not None and self.names[0] in (*owner.names, "operator")


def nodes_of(source: Source) -> list[Node]:
    """List all declarations outside of functions; members follow their types."""
    found: list[Node] = []

    def read(i: int, end: int, owner: Node | None) -> None:
        while i < end:
            if source.words[i] == "namespace":
                opening = source.find("{", i)
                read(opening + 1, source.match[opening], owner)
                i = source.after(opening)
                continue
            ends = (at for at in source.outside(i, end) if source.words[at] in (";", "{") or source.words[at][0] == "#")
            stop = next(at for at in ends if source.words[source.after(at) : end][:1] not in ([";"], [","]))
            node = Node(source, i, source.after(stop), owner)
            found.append(node)
            if node.is_type:
                read(node.body + 1, source.match[node.body], node)
            i = node.end

    read(0, len(source.words), None)
    return found


class Folding:
    """One round over a source: each method except the helpers yields edits."""

    def __init__(self, text: str) -> None:
        """Read the declarations and constants of a source."""
        self.source = Source(text)
        self.words, self.match = self.source.words, self.source.match
        self.nodes = nodes_of(self.source)
        self.values: dict[str, Any] = {"ceil_div": lambda x, y: -(-x // y), "greatest_common_divisor": math.gcd}
        for node in self.nodes:
            if node.owner is None and self.words[node.head] == "constexpr":
                for i in self.source.outside(node.first, node.end):
                    if self.words[i] == "=":
                        end = min(self.source.find(",", i), node.end - 1)
                        self.values[self.words[i - 1]] = self.value(i + 1, end)
        self.values = {name: value for name, value in self.values.items() if value is not None}

    def value(self, first: int, end: int, hidden: Iterable[str] = ()) -> int | None:
        """Evaluate tokens; return None if they depend on more than constants, or on a `hidden` name."""
        code = " ".join(PYTHON.get(word, re.sub(r"(?<=\d)u$", "", word)) for word in self.words[first:end])
        try:
            known = {name: value for name, value in self.values.items() if name not in hidden}
            return int(eval(code, {"__builtins__": {}, **known}))
        except (NameError, SyntaxError, TypeError, AttributeError, ValueError, ArithmeticError):
            return None

    def hidden(self, node: Node) -> set[str]:
        """Return the names that a declaration redefines: template parameters and local constants."""
        found = self.hidden(node.owner) if node.owner else set()
        for i in range(node.first + 1, node.body if node.is_type else node.end):
            is_typed = self.source.is_word(i - 1) and self.words[i - 1] not in NOT_TYPES
            if self.source.is_word(i) and (is_typed or self.words[i - 1 : i + 2 : 2] == [",", "="]):
                found.add(self.words[i])
        return found

    def folds(self) -> Iterator[Edit]:
        """Decide branches by constants, and replace calls with their results."""
        results = self.results()
        named = {name for name, _ in results}
        for node in self.nodes:
            if node.is_type:
                continue
            if self.words[node.first] == "using" and node.end == node.first + 5 and node.owner is None:
                places = [i for i, word in enumerate(self.words) if word in node.names and i != node.first + 1]
                yield from (self.source.replaced(i, i + 1, self.words[node.end - 2]) for i in places)
            hidden = self.hidden(node)
            for i in range(node.first, node.end):
                word = self.words[i]
                if word == "if":
                    yield from self.fold_if(i, hidden)
                elif word in ("?", "&&", "||"):
                    yield from self.fold_operator(i, node, hidden)
                elif word in ("*", "/", "%", "+", "+="):
                    yield from self.fold_arithmetic(i, hidden)
                elif word == "return" and self.words[i - 1] in (";", "{", "}"):
                    yield from self.fold_return(i)
                elif word == "do" and self.words[self.source.after(i + 1) + 2] == "false":
                    yield self.in_place(i, self.source.statement_end(i), i + 1, self.source.after(i + 1))
                elif i >= node.body and word in named:
                    yield from self.expand(i, results)

    def fold_if(self, i: int, hidden: set[str]) -> Iterator[Edit]:
        """Replace an `if` by the branch that a constant selects."""
        opening = i + 1 + (self.words[i + 1] == "constexpr")
        then, end = self.source.after(opening), self.source.statement_end(i)
        then_end = self.source.statement_end(then)
        value = self.value(opening + 1, self.match[opening], hidden)
        if value is not None:
            first, stop = (then, then_end) if value else (then_end + 1, end)
            if first < stop and self.words[first:stop] != ["{", "}"]:
                yield self.in_place(i, end, first, stop)
            elif self.words[i - 1] == ")":
                yield self.source.replaced(i, end, "{}")
            else:
                yield self.source.removed(i - (self.words[i - 1] == "else"), end)

    def in_place(self, i: int, end: int, first: int, stop: int) -> Edit:
        """Replace the statement of tokens `i` to `end - 1` with that of `first` to `stop - 1`, at its indentation."""
        source = self.source
        is_statement = self.words[i - 1] in (";", "{", "}") or source.kinds[i - 1] == "directive"
        if is_statement and self.words[first] == "{":
            first, stop = first + 1, stop - 1
        start = source.starts[first]
        if (comment := source.text[source.ends[first - 1] : start]).strip():
            start -= len(comment.lstrip())
        piece = source.text[start : source.ends[stop - 1]]
        lines = [source.text[source.text.rfind("\n", 0, at) + 1 :] for at in (start, source.starts[i])]
        own, depth = (len(line) - len(line.lstrip(" ")) for line in lines)
        return source.replaced(i, end, re.sub(rf"\n {{{own}}}(?=.)", "\n" + " " * depth, piece))

    def fold_operator(self, i: int, node: Node, hidden: set[str]) -> Iterator[Edit]:
        """Replace an expression by the operand that a constant selects."""
        source, word = self.source, self.words[i]
        stops = ENDS_OF_OPERANDS | ({"||"} if word == "&&" else set())
        first, end = i, i + 1
        while first > node.first and (first - 1 in self.match or self.words[first - 1] not in stops):
            if self.match.get(first - 1, 0) > i:
                break
            first = self.match.get(first - 1, first - 1)
        stops -= {"(", "[", "{", *("?:" if word == "?" else "")}
        while self.words[end] not in stops and self.match.get(end, end) >= end:
            end = source.after(end)
        left, right = self.value(first, i, hidden), self.value(i + 1, end, hidden)
        if word == "?" and left is not None:
            colon = source.find(":", i)
            while self.words[i + 1 : colon].count("?") > self.words[i + 1 : colon].count(":"):
                colon = source.find(":", colon + 1)
            chosen = (i + 1, colon) if left else (colon + 1, end)
            in_brackets = self.match.get(first - 1) == end and not source.is_word(first - 2)
            around = int(in_brackets and chosen[1] - chosen[0] == 1)
            yield source.replaced(first - around, end + around, source.span(*chosen))
        elif word != "?" and (left, right) != (None, None):
            known, other = (left, (i + 1, end)) if left is not None else (right, (first, i))
            decides = bool(known) == (word == "||")
            yield source.replaced(first, end, str(bool(known)).lower() if decides else source.span(*other))

    def fold_arithmetic(self, i: int, hidden: set[str]) -> Iterator[Edit]:
        """Remove factors of 1, and zeros."""
        source, word = self.source, self.words[i]
        products = {"*", "/", "%"}
        before, after = self.words[i - 2], self.words[source.after(i + 1)]
        is_name = source.kinds[i + 1] in ("word", "number") and after not in {".", "->", "(", "[", "::", "{"}
        left = self.value(i - 1, i, hidden) if before in {*ENDS_OF_OPERANDS, "+", "-", "<", ">"} else None
        right = self.value(i + 1, i + 2, hidden) if is_name else None
        if word == "+=" and right == 0 and after == ";":
            start = max(at for at in range(i) if self.words[at] in (";", "{", "}")) + 1
            yield source.removed(start, i + 3)
        elif (word in ("*", "/") and right == 1) or (word == "+" and right == 0 and after not in products):
            yield source.replaced(i, i + 2, "")
        elif (word == "*" and left == 1) or (word == "+" and left == 0 and before not in ("+", "-")):
            yield source.replaced(i - 1, i + 1, "")
        elif word in ("*", "/") and left == 0:
            yield source.replaced(i - 1, source.after(i + 1), "0")
        elif word == "%" and right == 1 and source.is_word(i - 1) and before in ENDS_OF_OPERANDS | {"+"}:
            yield source.replaced(i - 1, i + 2, "0")

    def fold_return(self, i: int) -> Iterator[Edit]:
        """Remove the rest of a block after a `return`, and a `return` that ends a function."""
        end = self.source.statement_end(i)
        closing = self.source.find("}", end)
        before = self.match[closing] - 1
        controls = self.words[before] == ")" and self.words[self.match[before] - 1] in CONTROLS
        if closing > end:
            yield self.source.removed(end, closing)
        elif end == i + 2 and self.words[before] in (")", "const") and not controls:
            yield self.source.removed(i, end)

    def results(self) -> dict[tuple[str, int], tuple[list[str], list[str]]]:
        """Return parameters and results of functions with one simple expression, by name and number of arguments."""
        found: dict[tuple[str, int], list[tuple[list[str], list[str]] | None]] = {}
        for node in self.nodes:
            if node.is_function and node.body < node.end:
                items = self.source.items(node.parameters)
                names = [self.words[end - 1] for _, end in items]
                inner = self.words[node.body + 1 : node.end - 1]
                result = inner[inner[:1] == ["return"] : -1]
                is_own = node.owner and {word for word in result if word.isidentifier()} - {*names, "true", "false"}
                calls_argument = result[1:2] == ["("] and result[0] in names
                is_once = all(result.count(name) <= 1 for name in names) and not calls_argument
                is_simple = RESULT.fullmatch("".join(result)) and is_once and not is_own and not node.is_maker
                least = sum("=" not in self.words[a:b] for a, b in items)
                for count in range(least, len(names) + 1) if "..." not in names else [-1]:
                    found.setdefault((node.names[0], count), []).append((names, result) if is_simple else None)
        agreed = {key: each[0] for key, each in found.items() if each[0] and all(other == each[0] for other in each)}
        counts = {name: [n for other, n in found if other == name] for name, _ in found}
        return {key: each for key, each in agreed.items() if -1 not in counts[key[0]] or len(counts[key[0]]) == 1}

    def expand(self, i: int, results: Mapping[tuple[str, int], tuple[list[str], list[str]]]) -> Iterator[Edit]:
        """Replace a call with the function's result. Arguments that the result does not use must have no effects."""
        source, first = self.source, i
        opening = source.after(i + 1) if self.words[i + 1] == "<" else i + 1
        if self.words[opening] != "(":
            return
        end, items = source.after(opening), source.items(opening)
        names, result = results.get((self.words[i], -1)) or results.get((self.words[i], len(items))) or ([], [";"])
        while self.words[first - 1] in (".", "::", "->") and source.is_word(first - 2):
            first -= 2
        given = {name: source.span(*item) for name, item in zip(names, items, strict=False)}
        dropped = [item for name, item in zip(names + names * len(items), items, strict=False) if name not in result]
        has_effects = any(EFFECTS & {*self.words[a:b]} for a, b in dropped)
        is_plain = "(" in result or all(re.fullmatch(PLAIN, given.get(word, "a")) for word in result)
        if has_effects or not is_plain or result == [";"] or self.words[first - 1] in (".", "->", "::"):
            return
        text = "".join(given.get(word, word) + " " * (word == ",") for word in result)
        if text:
            yield source.replaced(first, end, text)
        elif self.words[end] == ";" and self.words[first - 1] not in (")", "else"):
            yield source.removed(first, end + 1)

    def specialized(self) -> Iterator[Edit]:
        """Replace a template's parameter with its argument if all uses have the same argument."""
        names = [node.names[:1] for node in self.nodes if not node.is_maker]
        for node in self.nodes:
            inside = range(node.first, node.parameters if node.is_function else node.body)
            uses = [i for i, word in enumerate(self.words) if word in node.names and i not in inside]
            uses = [i for i in uses if self.words[i + 1] == "<" or (node.is_function and self.words[i + 1] == "(")]
            for number, (first, end) in enumerate(self.source.items(node.template) if node.template else []):
                edits: list[Edit] = []
                if self.words[first + 1] == "...":
                    edits = self.without_pack(node, uses)
                elif names.count(node.names[:1]) == 1:
                    edits = self.with_argument(node, uses, number, first, end)
                if edits:
                    yield from edits
                    return

    def with_argument(self, node: Node, uses: list[int], number: int, first: int, end: int) -> list[Edit]:
        """Replace a parameter with a template's argument if all uses agree; else return no edits."""
        source, is_type = self.source, self.words[first] == "typename"
        lists = [(i + 1, source.items(i + 1) if self.words[i + 1] == "<" else []) for i in uses]
        known = {"true", "false", *(name for each in self.nodes if each.first < node.first for name in each.names)}
        found: dict[str, int | None] = {}
        for _, given in lists:
            a, b = given[number] if number < len(given) else (first + 3, end)
            around = next((each for each in self.nodes if each.first <= a < each.end and not each.is_type), node)
            value = self.value(a, b, self.hidden(around)) if a < b and not is_type else None
            is_known = b == a + 1 and self.words[a] in known - self.hidden(around)
            if value is None and not (is_type and is_known):
                return []
            found[source.span(a, b) if is_known else str(value)] = value
        if len({*found.values()}) != 1 or (is_type and len(found) > 1):
            return []
        text, value = found.popitem()
        text = text if not found else str(bool(value)).lower() if self.words[first] == "bool" else str(value)
        name, lists = self.words[first + 1], [(node.template or 0, source.items(node.template or 0)), *lists]
        places = [i for i in range(end, node.end) if self.words[i] == name and first + 1 < end]
        return [source.replaced(i, i + 1, text) for i in places] + [
            self.without_item(opening, items, number) for opening, items in lists if number < len(items)
        ]

    def without_item(self, opening: int, items: list[tuple[int, int]], number: int) -> Edit:
        """Remove an item of a list in brackets; with the last item, remove the brackets."""
        first, end = items[number]
        if len(items) > 1:
            return self.source.replaced(first - (number > 0), end + (number == 0), "")
        if self.words[opening - 1] == "template":
            return (self.source.starts[opening - 1], self.source.starts[self.match[opening] + 1], "")
        stays = self.words[opening] == "("
        return self.source.replaced(opening + stays, self.match[opening] + 1 - stays, "")

    def without_pack(self, node: Node, uses: list[int]) -> list[Edit]:
        """Remove a pack of template parameters if every call leaves it empty."""
        items, types = self.source.items(node.parameters), self.source.items(node.template or 0)
        openings = [self.source.after(i + 1) if self.words[i + 1] == "<" else i + 1 for i in uses]
        if any(len(self.source.items(i)) >= len(items) for i in openings):
            return []
        pack = [i for i in range(node.body, node.end) if self.words[i] == self.words[items[-1][1] - 1]]
        return [
            self.without_item(node.template or 0, types, len(types) - 1),
            self.without_item(node.parameters, items, len(items) - 1),
            *(self.source.replaced(i - 1, i + 2, "") for i in pack if self.words[i + 1] == "..."),
            *(self.source.replaced(i - 3, i + 2, "0") for i in pack if self.words[i - 3] == "sizeof"),
        ]

    def prunings(self) -> Iterator[Edit]:
        """Remove declarations that the kernel does not use, and assertions, which are true."""
        kept: set[Node] = set()
        pending = self.nodes
        used: set[str | Node] = {each for each in self.nodes if self.words[each.first] == "KERNEL"}
        used |= {each for each in self.nodes if each.owner and (each.is_maker or not each.is_function)}
        while ready := [each for each in pending if each.owner in {None, *kept} and used & {each, *each.names}]:
            kept.update(ready)
            pending = [node for node in pending if node not in kept]
            for node in ready:
                apart = [each for each in self.nodes if each.owner is node and each.is_function and not each.is_maker]
                inside = {*range(node.first, node.end)} - {i for each in apart for i in range(each.first, each.end)}
                words = " ".join(self.words[i].partition(" ")[2] or self.words[i] for i in inside)
                used.update(re.findall(r"\w+", words))
        yield from (self.source.removed(node.first, node.end) for node in pending if node.owner in {None, *kept})
        for i, word in enumerate(self.words):
            is_early = word == "struct" and self.words[i + 2] == ";"
            later = self.words.index(self.words[i + 1], i + 2) if is_early else 0
            if word == "static_assert" or (later and self.words[later - 1] == word):
                yield self.source.removed(i, self.source.statement_end(i))


def tidied(text: str) -> str:
    """Pack constants into few lines, and remove comments on absent code or above nothing."""
    text = re.sub(r"(?<=\{)\s*\n *(?=\})|^ *// ----.*\n|\n(?=\n *\}|\n +)|(?<=\{\n)\n+", "", text, flags=re.MULTILINE)
    text = re.sub(r"(?:^constexpr uint32_t \w+ = \d+;\n){2,}", _packed, text, flags=re.MULTILINE)
    known = {*re.findall(r"\w+", re.sub(rf"^ *// (?!{FILE[3:]}).*", "", text, flags=re.MULTILINE))}
    text = re.sub(r"^( *)//(?: \w.*\n(?:\1// \S.*\n)*|  .*\n)", partial(_known, known=known), text, flags=re.MULTILINE)
    text = re.sub(r"((?:^|\n)(?! *//).*\n) *//\n", r"\1", text)
    paragraphs = [each.strip("\n") for each in re.split(r"\n{2,}", text) if each.strip()]
    pairs = pairwise([*paragraphs, FILE])
    kept = [each for each, after in pairs if not after.startswith(FILE) or re.search(r"(?m)^ *(?!//)[^/ ]", each)]
    result = "\n\n".join(kept) + "\n"
    if result != text:
        return tidied(result)
    text = re.sub(rf"^{FILE}(.*)\n// ", rf"{FILE}\1: ", text, flags=re.MULTILINE)
    text = re.sub(rf"^({FILE}.*\n)\n| =\n +", lambda found: found[1] or " = ", text, flags=re.MULTILINE)
    return re.sub(r"(?<=[};])\n\n(?=// [^=])", "\n", text)


def _packed(found: re.Match[str]) -> str:
    names = ", ".join(re.findall(r"\w+ = \d+", found[0])).replace(" = ", "~")
    return textwrap.fill(f"constexpr uint32_t {names};", 118, subsequent_indent="    ").replace("~", " = ") + "\n"


def _known(found: re.Match[str], known: set[str]) -> str:
    """Remove sentences of a comment that name code outside of the page."""
    sentences = re.split(r"(?<=[.)]) (?=[A-Z(`])", " ".join(line.strip()[3:] for line in found[0].splitlines()))
    kept = [each for each in sentences if {*filter(None, chain(*NAMED.findall(each)))} <= known]
    lines = textwrap.wrap(" ".join(kept), 117 - len(found[1]))
    return found[0] if kept == sentences else "".join(f"{found[1]}// {line}\n" for line in lines)


def page(source: str, headers: Mapping[str, str]) -> str:
    """Return a kernel's source with constants folded, and without the code that this configuration does not use."""
    own = {name: "" if name.startswith(LIBRARY) else text for name, text in headers.items()}
    text = re.sub(rf"^( *#include|{FILE}(ptx/|types)).*\n", "", flat(source, own, mark=FILE), flags=re.MULTILINE)
    text, before = re.sub(r"^(#pragma.*\n)( *)", r"\2\1\2", text, flags=re.MULTILINE), ""
    while text != before:
        before = text
        for step in (Folding.prunings, Folding.folds, Folding.specialized):
            folding = Folding(text)
            text = folding.source.edited(step(folding))
    used = {*re.findall(r"ptx::(\w+)", text)} - {"smem_address", "opaque", "dynamic_shared"}
    given = {name: re.findall(r"\w+(?=\(| \{)", each) for name, each in headers.items() if name.startswith("ptx/")}
    needed = ["types.cuh", *sorted(name for name in given if used & {*given[name]})]
    return "".join(f'#include "{name}"\n' for name in needed) + "\n" + tidied(text)
