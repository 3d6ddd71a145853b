"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Severity(IntEnum):
    """How bad a finding is. The worst of all is the exit code: 0, 1 or 2."""

    OK = -1
    """All is well."""
    NOTE = 0
    """Worth knowing, and nothing to do."""
    WARNING = 1
    """It works, and not as it should."""
    FAILURE = 2
    """It does not work."""

    @property
    def word(self) -> str:
        """In a report: `ok`, `note`, `warning` or `failure`."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    severity: Severity
    check: str
    """What was looked at, in one word, for programs."""
    subject: str
    """Of what: `prefill 10.0.0.1:7100`, `10.0.0.1:7100 → 10.0.0.3:7100`, `gateway`."""
    words: str
    """What is the matter. No part of a key, a prompt or an answer is in it."""
    hint: str = ""
    """What to do about it; empty where the words say so, or all is well."""


def exit_code(findings: Iterable[Finding]) -> int:
    """0: all is well; 1: there are warnings; 2: there are failures."""
    return max((0, *(finding.severity for finding in findings)))
