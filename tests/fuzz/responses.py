"""OpenAI's Responses API."""

from __future__ import annotations

from typing import Final

from proxy.dialects.responses import Responses
from tests.fuzz.translated import check_translated

_RESPONSES: Final = Responses()
_QUESTION: Final = b'{"model":"m","max_output_tokens":50,"input":"Hi"}'


def check_responses(data: bytes) -> None:
    """Check the API by check_translated."""
    check_translated(_RESPONSES, _QUESTION, data)
