"""A call sent in such a way that its answer can be continued on another engine. No IO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.resume.call_options import is_structured
from proxy.wire.document import REMOVED

if TYPE_CHECKING:
    from proxy.call import Call


def can_be_observed(call: Call) -> bool:
    """Whether the answer stays the same if it is streamed with its token ids."""
    values = call.values
    if values.get("prompt_logprobs") is not None or values.get("echo"):
        return False  # vLLM refuses the one with `stream`, and the other with `return_token_ids` for a prompt of ids
    # Engines hide what belongs to reasoning, and which that is only they know; and without reasoning to be shown a
    # grammar begins at once (vLLM `resolve_reasoning_ended`).
    hides = values.get("include_reasoning") is False
    return not (hides and (call.shows_single_tokens or is_structured(call)))


def observed(call: Call) -> Call:
    """The call as it is sent so that its answer can be continued: streamed, with token ids, with all that is generated.

    Costs some bytes per token, and the prompt's ids once.
    """
    values = call.values
    options = values.get("stream_options") if call.include_usage else None
    changes: dict[str, object] = {
        "stream": True,
        "return_token_ids": True,
        "stream_options": {**(options or {}), "include_usage": True},
    }
    if values.get("include_reasoning") is False:
        changes["include_reasoning"] = REMOVED  # its ids would be missing
    return call.changed(changes, stream=True)
