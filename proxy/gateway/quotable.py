"""The texts of a request that an engine may quote in an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.gateway.delivery import Delivery

_MIN_TOKEN_IDS: Final = 3


def quotable_texts(delivery: Delivery) -> Sequence[str] | None:
    """Return the texts of a request and of its answer so far.

    None: some text is unknown. A prompt of token ids has an unknown text, and so has an answer that is not recorded.
    """
    if delivery.has_output and (delivery.has_lost_track or not delivery.is_observed):
        return None
    call, transcript = delivery.call, delivery.transcript
    texts = strings_in([call.document.load(), *call.changes.values()])
    if texts is not None:
        texts += (transcript.content, transcript.reasoning)
        texts += (text for tool in transcript.tools for text in (tool.name, tool.arguments))
    return texts


def strings_in(values: Any) -> list[str] | None:
    """Return all strings in a JSON value, with the names of members. None: it contains token ids."""
    found: list[str] = []
    pending = [values]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            found += value.keys()
            pending += value.values()
        elif isinstance(value, list | tuple):
            if len(value) >= _MIN_TOKEN_IDS and isinstance(value[0], int):
                return None
            pending += value
    return found
