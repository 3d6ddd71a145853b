"""Removes secrets from log lines: a second line of defence, because callers should not log them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

MASK: Final = "***"

_LEAST_CHARS: Final = 8
"""Minimum length of a secret. Shorter ones would be found in ordinary words."""

# The token is RFC 6750's b64token, so that no pattern includes the quote at the end of a JSON string.
_TOKENS: Final = re.compile(
    rf"\b(bearer\s+)[A-Za-z0-9._~+/=-]{{{_LEAST_CHARS},}}|(?<![A-Za-z0-9])(sk-)[A-Za-z0-9_-]{{{_LEAST_CHARS},}}",
    re.IGNORECASE,
)


class Redaction:
    """Masks bearer tokens, keys in OpenAI's form (`sk-…`), and configured secrets."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        spellings = {spelling for secret in secrets if len(secret) >= _LEAST_CHARS for spelling in _spellings(secret)}
        # the longest first, because a secret may be the beginning of another
        self._secrets = sorted(spellings, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, MASK)
        # A search for strings takes a twentieth of the time of the expression.
        lower = text.lower()
        if "sk-" in lower or "bearer" in lower:
            text = _TOKENS.sub(lambda found: f"{found[1] or found[2]}{MASK}", text)
        return text


def _spellings(secret: str) -> set[str]:
    """Return a secret as it is, and as JSON writes it."""
    return {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
