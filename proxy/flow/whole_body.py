"""An engine's answer that has arrived whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.connectors.base import parse_answer
from proxy.wire.document import SHORT_BYTES, Document, joined
from proxy.wire.long_answer import LongAnswer

if TYPE_CHECKING:
    from proxy.connectors.attempt import Attempt
    from proxy.dialects.base import Dialect
    from proxy.dialects.openai import OpenAi


def checked_body(attempt: Attempt, body: bytes, dialect: OpenAi) -> bytes:
    """What the client gets for the body of an attempt's answer, in a dialect that waits for nothing: what an EngineBody
    comes to. Raises UpstreamError.
    """
    response = attempt.response
    attempt.kv_arrived()
    is_long = len(body) > SHORT_BYTES
    answer = parse_answer(LongAnswer, response, body) if is_long else parse_answer(Document, response, body)
    values = answer.values
    assert isinstance(values, dict)
    check_answer(attempt, values, dialect)
    corrections = dialect.corrected(values, attempt)
    if not corrections:
        return body
    changed = answer.with_changes(corrections)
    return joined(changed or parse_answer(Document, response, body).with_changes(corrections))


def check_answer(attempt: Attempt, values: dict[str, Any], dialect: Dialect) -> None:
    """See that they are an answer, and take in its usage. Raises UpstreamError."""
    dialect.check_answer(attempt.response, values)
    attempt.saw_usage(dialect.usage(values))
