"""Findings: the results of checks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


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
    """The result of one check of one subject."""

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
