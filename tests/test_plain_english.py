"""Count the turns of phrase of plain_english.yaml; run as a program, lower the bounds to the present counts."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PATTERNS_FILE = ROOT / "tests" / "plain_english.yaml"
# Below these directories and in the documents beside them is everything that people write and read.
ROOTS = ("configs", "docs", "proxy", "scripts", "tests")
SUFFIXES = {"", ".css", ".html", ".js", ".json", ".md", ".mjs", ".py", ".sh", ".toml", ".yaml", ".yml"}
# Shorter strings are names and values.
MIN_STRING_LENGTH = 25
MAX_SHOWN_HITS = 40

PYTHON_TEXT = re.compile(
    r"""
    \#[^\n]*
    | (?:\b[rbufRBUF]{1,2})? (?: \"{3}.*?(?<!\\)\"{3} | '{3}.*?(?<!\\)'{3} )
    | (?:\b[rbufRBUF]{1,2})? (?: "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' )
    | \bdef\ test_\w+
    """,
    re.VERBOSE | re.DOTALL,
)
SCRIPT_TEXT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`", re.DOTALL)
HTML_TAG = re.compile(r"<[^>]*>")
CODE_BLOCK = re.compile(r"```.*?```|<!--.*?-->", re.DOTALL)
CODE_SPAN = re.compile(r"`[^`]*`")


class Text(NamedTuple):
    """A comment, string, test name or line of prose, with the line of the file where it begins."""

    line: int
    content: str
    is_docstring: bool = False


class Pattern(NamedTuple):
    """One row of `patterns`."""

    name: str
    expression: re.Pattern[str]
    instead: str
    only_docstrings: bool


class Hit(NamedTuple):
    """A text that a pattern matches. `path` is relative to the project's root."""

    path: str
    line: int
    pattern: Pattern
    excerpt: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.pattern.name}: …{self.excerpt}…\n    write {self.pattern.instead}"


@functools.cache
def patterns() -> tuple[Pattern, ...]:
    rows = yaml.safe_load(PATTERNS_FILE.read_text())["patterns"]
    return tuple(
        Pattern(row["name"], re.compile(row["pattern"], re.MULTILINE), row["instead"], row.get("where") == "docstring")
        for row in rows
    )


def bounds() -> dict[str, int]:
    found: dict[str, int] = yaml.safe_load(PATTERNS_FILE.read_text())["bounds"]
    return found


def python_texts(source: str) -> Iterator[Text]:
    """Find comments, strings and test names by one regular expression, since `tokenize` takes ten times as long."""
    line, end = 1, 0
    for match in PYTHON_TEXT.finditer(source):
        line += source.count("\n", end, match.start())
        end = match.start()
        content = match.group()
        if content.startswith("def "):
            yield Text(line, content[4:].replace("_", " "))
        elif content.startswith("#"):
            yield Text(line, content.lstrip("# "))
        elif content.endswith(('"""', "'''")):
            opens_a_line = not source[source.rfind("\n", 0, end) + 1 : end].strip()
            is_an_expression = source[:end].rstrip()[-1:] in {*"([{,=+\\"}
            yield Text(line, content.lstrip("rbufRBUF")[3:-3].strip(), opens_a_line and not is_an_expression)
        elif len(content) > MIN_STRING_LENGTH:
            yield Text(line, content)


def script_texts(source: str) -> Iterator[Text]:
    """Find comments and strings of JavaScript, CSS and JSON with at least three words."""
    for match in SCRIPT_TEXT.finditer(source):
        if len(match.group().split()) > 2:
            yield Text(source.count("\n", 0, match.start()) + 1, match.group())


def line_texts(source: str, suffix: str) -> Iterator[Text]:
    """Find the prose of Markdown and HTML, and the comments and long values of YAML, TOML and shell, line by line."""
    if suffix == ".html":
        source = HTML_TAG.sub(" ", source)
    elif suffix == ".md":
        source = CODE_BLOCK.sub(lambda match: "\n" * match.group().count("\n"), source)
    for number, line in enumerate(source.splitlines(), 1):
        if suffix == ".html" or (suffix == ".md" and not line.startswith("    ")):
            yield Text(number, CODE_SPAN.sub("X", line))
        elif suffix != ".md" and "#" in line:
            yield Text(number, line.split("#", 1)[1].lstrip())
        elif suffix in {".yaml", ".yml", ".toml"} and len(line.split(": ", 1)[-1].split()) > 4:
            yield Text(number, line.split(": ", 1)[-1])
        elif suffix in {"", ".sh"} and line.count('"') > 1 and len(line.split()) > 4:
            yield Text(number, line.split('"', 1)[1])


def texts(source: str, suffix: str) -> Iterator[Text]:
    if suffix == ".py":
        return python_texts(source)
    if suffix in {".css", ".js", ".json", ".mjs"}:
        return script_texts(source)
    return line_texts(source, suffix)


def hits_of(path: str, found: Iterator[Text]) -> Iterator[Hit]:
    for text in found:
        for pattern in patterns():
            if pattern.only_docstrings and not text.is_docstring:
                continue
            for match in pattern.expression.finditer(text.content):
                excerpt = text.content[max(0, match.start() - 20) : match.end() + 40].strip()
                line = text.line + text.content.count("\n", 0, match.start())
                yield Hit(path, line, pattern, " ".join(excerpt.split()))


def group_of(path: Path) -> str:
    """Return the package below proxy or tests, or the directory or document itself."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] in {"proxy", "tests"} and len(parts) > 2 else parts[0]


@functools.cache
def hits_of_groups() -> dict[str, list[Hit]]:
    """Read all files, and return the hits of each group, of those without a hit, too."""
    files = [ROOT / "pyproject.toml", *ROOT.glob("*.md")]
    files += [path for root in ROOTS for path in (ROOT / root).rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    groups: dict[str, list[Hit]] = {}
    for path in sorted(files):
        # The patterns and their examples are the hits that are meant. A corpus has bytes instead of prose.
        if path.stem.endswith("plain_english") or {"corpus", "__pycache__"} & {*path.parts}:
            continue
        hits = groups.setdefault(group_of(path), [])
        hits += hits_of(str(path.relative_to(ROOT)), texts(path.read_text(), path.suffix))
    return groups


def changed_lines() -> set[tuple[str, int]]:
    """Return the lines that differ from the commit before HEAD, as (path, line); nothing outside a git repository."""
    command = ["git", "diff", "--unified=0", "HEAD~1", "--", *ROOTS, "*.md", "pyproject.toml"]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    lines, path = set(), ""
    for row in diff.splitlines():
        if row.startswith("+++ "):
            path = row[6:]
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", row):
            start, count = int(match[1]), int(match[2] or 1)
            lines |= {(path, line) for line in range(start, start + count)}
    return lines


def explanation(group: str, hits: list[Hit], bound: int) -> str:
    changed = changed_lines()
    new = [hit for hit in hits if (hit.path, hit.line) in changed]
    shown = (new or hits)[:MAX_SHOWN_HITS]
    which = "those in changed lines" if new else f"the first {len(shown)}"
    return "\n".join(
        [
            f"{group} has {len(hits)} turns of phrase that are hard to read; its bound is {bound}. These are {which}:",
            *map(str, shown),
            "docs/contributing/style.md has the rules. Do not raise the bound, and do not write around the pattern:",
            "choose the noun, name the actor, and say it in a short sentence.",
        ]
    )


def test_every_group_of_files_has_a_bound() -> None:
    assert sorted(bounds()) == sorted(hits_of_groups())


@pytest.mark.parametrize("group", sorted(bounds()))
def test_group_stays_within_its_bound(group: str) -> None:
    hits, bound = hits_of_groups().get(group, []), bounds()[group]
    if len(hits) > bound:
        pytest.fail(explanation(group, hits, bound), pytrace=False)


SOURCE = '''"""Of a module."""
# What is sent is
# told by nobody.
def test_whoever_asks() -> None:
    """Return the value.

    It is none.
    """
    print(f"a long string, which tells {'no'} thing; that is of no use", 'none: of whom')
'''


def test_python_hits_have_their_lines_and_patterns() -> None:
    found = [(hit.line, hit.pattern.name) for hit in hits_of("a.py", python_texts(SOURCE))]
    assert found == [
        (1, "docstring begins with a preposition"),
        (2, "what-clause"),
        (3, "tells, told"),
        (3, "who for a thing"),
        (4, "who for a thing"),
        (7, "be it, is none"),
        (9, "in words, well, sick"),
    ]


@pytest.mark.parametrize(
    ("suffix", "source", "lines"),
    [
        (".md", "Nobody.\n```\nNobody.\n```\n`nobody`\n    nobody\nsick\n", [1, 7]),
        (".yaml", "key: nobody  # anew\nhelp: nobody ever reads all of it\nshort: nobody\n", [1, 2]),
        (".js", 'f("nobody", "nobody reads this")\n// sick of this\n', [1, 2]),
        (".html", "<p>nobody</p>\n<a title='nobody'>text</a>\n", [1]),
        ("", "# anew\nsay 'x'\n", [1]),
    ],
)
def test_texts_of_other_formats_are_read(suffix: str, source: str, lines: list[int]) -> None:
    assert [hit.line for hit in hits_of("a", texts(source, suffix))] == lines


def lower_bounds() -> None:
    """Write the present counts as bounds where they are lower, and for groups that are new."""
    before = bounds()
    counts = {group: len(hits) for group, hits in sorted(hits_of_groups().items())}
    rows = [f"  {group}: {min(count, before.get(group, count))}\n" for group, count in counts.items()]
    head = re.split(r"^bounds:", PATTERNS_FILE.read_text(), flags=re.MULTILINE)[0]
    PATTERNS_FILE.write_text(f"{head}bounds:\n{''.join(rows)}")


if __name__ == "__main__":
    lower_bounds()
