"""The texts of a request that an engine may quote in an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.gateway.delivery import Delivery


def quotable_texts(delivery: Delivery) -> Sequence[str] | None:
    """Return the texts of a request and of its answer so far.

    None: some text is unknown, such as that of token ids, or of an answer that is not recorded.
    """
    if delivery.has_output and (delivery.is_transcript_incomplete or not delivery.is_observed):
        return None
    texts, transcript = delivery.call.request_texts(), delivery.transcript
    if texts is None:
        return None
    tools = [text for tool in transcript.tools for text in (tool.name, tool.arguments)]
    return [*texts, transcript.content_text, transcript.reasoning_text, *tools]
