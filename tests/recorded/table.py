"""All conversations."""

from __future__ import annotations

from typing import Final

from tests.recorded import answers, failures, leaving, refusals

CONVERSATIONS: Final = (
    *answers.CONVERSATIONS,
    *refusals.CONVERSATIONS,
    *failures.CONVERSATIONS,
    *leaving.CONVERSATIONS,
)
