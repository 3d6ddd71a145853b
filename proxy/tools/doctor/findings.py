"""Findings: the results of checks."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import orjson

from proxy.common.terms import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Severity(IntEnum):
    """Severity of a finding. The highest one is the exit code: 0, 1 or 2."""

    OK = -1
    """No problem."""
    NOTE = 0
    """Information that requires no action."""
    WARNING = 1
    """It works, but with limitations."""
    FAILURE = 2
    """It does not work."""

    @property
    def word(self) -> str:
        """Return the name in reports: `ok`, `note`, `warning` or `failure`."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of the doctor."""

    severity: Severity
    check: str
    """Name of the check, one word, for programs."""
    subject: str
    """Checked object: `prefill 10.0.0.1:7100`, `10.0.0.1:7100 → 10.0.0.3:7100`, `gateway`."""
    words: str
    """Description of the result. Contains no part of a key, prompt or answer."""
    hint: str = ""
    """Recommended action; empty if none is needed or the description has it."""

    @classmethod
    def of_text(cls, severity: Severity, check: str, subject: str, text: str, hint: str = "") -> Finding:
        """Return a finding from the text `description: action` of a log line. `hint`: action if the text has none."""
        words, _, action = text.partition(": ")
        return cls(severity, check, subject, words, action or hint)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 without problems, 1 with warnings, 2 with failures."""
    return max((0, *(finding.severity for finding in findings)))


# Reports of findings: a table for people, JSON for programs.


_MARKS: Final = {Severity.OK: "✓", Severity.NOTE: "·", Severity.WARNING: "!", Severity.FAILURE: "✗"}
_COLOURS: Final = {Severity.OK: "32", Severity.NOTE: "2", Severity.WARNING: "33", Severity.FAILURE: "31;1"}
_LEAST_WORDS: Final = 40
# Above this number, pairs without problems are summarized in one line.
_MANY: Final = 8


def findings_as_table(findings: Sequence[Finding], width: int, *, coloured: bool) -> str:
    """Return a table of findings, worst last, so that it stays visible. `width`: in characters."""
    shown = sorted(_summarize_pairs(findings), key=lambda finding: finding.severity)
    subjects = min(44, max((len(finding.subject) for finding in shown), default=0))
    lines = [line for finding in shown for line in _finding_lines(finding, subjects, width, coloured=coloured)]
    return "\n".join([*lines, "", _summary_line(findings)])


def findings_as_json(findings: Sequence[Finding]) -> bytes:
    """Return a JSON object with the exit code and all findings."""
    told = [
        {
            "severity": finding.severity.word,
            "check": finding.check,
            "subject": finding.subject,
            "words": finding.words,
            "hint": finding.hint,
        }
        for finding in findings
    ]
    return orjson.dumps({"exit_code": exit_code(findings), "findings": told}, option=orjson.OPT_INDENT_2)


def _finding_lines(finding: Finding, subjects: int, width: int, *, coloured: bool) -> Iterator[str]:
    indent = " " * (subjects + 4)
    room = max(_LEAST_WORDS, width - len(indent))
    mark = _MARKS[finding.severity]
    if coloured:
        mark = f"\x1b[{_COLOURS[finding.severity]}m{mark}\x1b[0m"
    first, *others = textwrap.wrap(_without_control_characters(finding.words), room) or [""]
    yield f"{mark} {finding.subject:{subjects}}  {first}".rstrip()
    yield from (indent + line for line in others)
    for number, line in enumerate(textwrap.wrap(_without_control_characters(finding.hint), room - 2)):
        yield f"{indent}{'→' if not number else ' '} {line}"


def _without_control_characters(text: str) -> str:
    """Replace control characters: model names come from engines and could move the cursor."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _summarize_pairs(findings: Sequence[Finding]) -> list[Finding]:
    """Summarize pairs without problems in one finding if there are many."""
    many = [finding for finding in findings if finding.check == "kv" and finding.severity is Severity.OK]
    if len(many) <= _MANY:
        return list(findings)
    rest = [finding for finding in findings if finding not in many]
    return [*rest, Finding(Severity.OK, "kv", f"{len(many)} pairs", "KV was fetched, and the answers are correct")]


def _summary_line(findings: Sequence[Finding]) -> str:
    counts = {s: sum(finding.severity is s for finding in findings) for s in (Severity.FAILURE, Severity.WARNING)}
    told = [format_count(count, severity.word) for severity, count in counts.items() if count]
    return " and ".join(told) or "no problems found"
