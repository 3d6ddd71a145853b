"""A page's blocks: what is to be run, what is shown as output, and what is neither."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

_INDENT = "    "
_FENCE = "```"
_note = re.compile(r"<!-- *(not run|output of|file)(?:: *(.*?))? *-->").fullmatch
_is_command = re.compile(r"(?:[A-Z_]+=\S* )*(?:pdproxy|curl|pip|python3|scripts/[\w-]+)(?: .*)?").fullmatch
_NUMBER = re.compile(r"(?<![\w.-])(?:\d[\d,.]*|-)(?![\w-])(?: (?:ms|s|%)(?!\w))?|(?<=[ ,(])\d[\d,.]*(?=[%×/x])")
_ADDRESS = re.compile(r"[\w.-]+:\d{2,5}\b")


class PageError(Exception):
    """A page that cannot be followed: the text says where, and what to do."""


class Kind(Enum):
    """What a block is."""

    COMMANDS = "commands"
    NOT_RUN = "not run"
    OUTPUT = "output of"
    FILE = "file"
    PICTURE = "picture"


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    place: str
    """`README.md:12`, of its first line."""
    kind: Kind
    told: str
    """What its note says: why it is not run, of which command it is the output, the name of the file."""
    text: str
    """Without the indent that makes it a block."""

    @property
    def commands(self) -> list[str]:
        """One for each line, with the lines that it goes on in."""
        return _joined(self.text)


def blocks(name: str, text: str) -> list[Block]:
    """Those of a page, indented or fenced, in order. Raises PageError for one that is of no kind."""
    return [_block(f"{name}:{number}", note, lines) for number, note, lines in _raw(text.splitlines())]


def without_comment(command: str) -> str:
    """A command as it is named elsewhere."""
    return re.sub(r"\s+#.*$", "", command, flags=re.MULTILINE).strip()


def likeness(line: str) -> str:
    """What two lines of output have in common that differ in their numbers and addresses, and so in their columns."""
    return re.sub(r"\s+", " ", _NUMBER.sub("N", _ADDRESS.sub("A", line))).strip()


def unlike(output: str, shown: str) -> list[str]:
    """The lines of an output that a page does not show the like of."""
    known = {likeness(line) for line in shown.splitlines()}
    return [line for line in output.splitlines() if line.strip() and likeness(line) not in known]


def _block(place: str, note: re.Match[str] | None, lines: list[str]) -> Block:
    text = "\n".join(lines)
    if note is not None:
        kind, told = Kind(note[1]), note[2] or ""
        if not told:
            raise PageError(f"{place}: the note before it does not say what comes behind `{kind.value}`")
        return Block(place, kind, told, text)
    if "│" in text:
        return Block(place, Kind.PICTURE, "", text)
    if odd := [command for command in _joined(text) if not _is_command(command.partition("\n")[0])]:
        raise PageError(f"{place}: is `{odd[0]}` a command? If not, a note says what it is: see scripts/test-docs")
    return Block(place, Kind.COMMANDS, "", text)


def _joined(text: str) -> list[str]:
    """The commands, each with the lines that it goes on in."""
    return [line.replace("\0", "\\\n") for line in text.replace("\\\n", "\0").splitlines() if line.strip()]


def _raw(lines: list[str]) -> Iterator[tuple[int, re.Match[str] | None, list[str]]]:
    """Number of the first line, the note before it, and the lines of each block."""
    note: re.Match[str] | None = None
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(_FENCE):
            end = next(number for number in range(at + 1, len(lines)) if lines[number].startswith(_FENCE))
            yield at + 2, note, lines[at + 1 : end]
            at, note = end + 1, None
        elif line.startswith(_INDENT) and not (lines[at - 1].strip() and _note(lines[at - 1]) is None):
            end = at
            while end < len(lines) and (lines[end].startswith(_INDENT) or not lines[end].strip()):
                end += 1
            found = [line.removeprefix(_INDENT) for line in lines[at:end]]
            while not found[-1].strip():
                found.pop()
            yield at + 1, note, found
            at, note = end, None
        else:
            if line.strip():
                note = _note(line)
            at += 1
