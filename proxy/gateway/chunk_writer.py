"""How a chunk of a decoder is written for the client. No IO.

As long as nothing has to be changed it keeps the engine's own bytes, without what only the gateway asked for: token
ids, which are written as `null`, with as many blanks behind it as it is shorter. So a chunk keeps its length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.wire.engine_members import without_engine_members
from proxy.wire.openai import data_event

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.dialects.call import Call
    from proxy.dialects.segment import Segment
    from proxy.wire.sse import Event

_TOKEN_IDS: Final = b'"token_ids":['
_NO_TOKEN_IDS: Final = b'"token_ids":null'


class ChunkWriter:
    """Writes the chunks of one answer.

    `is_observed`: the answer has one choice and comes with token ids. `rewrite`: turns each payload into the bytes to
    send, in place of the engine's.
    """

    def __init__(self, call: Call, rewrite: Callable[[dict[str, Any]], bytes] | None, *, is_observed: bool) -> None:
        self.last_payload: dict[str, Any] = {}
        """The last payload given out; a pattern for a merged usage chunk."""
        self.wants_ids = call.wants_ids
        """The client asked for token ids."""
        self.hides_reasoning = is_observed and call.values.get("include_reasoning") is False
        self.rewrites = rewrite is not None
        self.keeps_bytes = rewrite is None and not self.hides_reasoning
        """Chunks of the first decoder keep the engine's bytes, except for token ids."""
        self._is_observed = is_observed
        self._rewrite = rewrite

    def as_it_came(self, segment: Segment, event: Event, payload: dict[str, Any]) -> bytes:
        """An event as the engine wrote it, without the ids that the client did not ask for."""
        if self._rewrite is not None:
            self.last_payload = payload
            return self._rewrite(payload)
        if not self._is_observed or self.wants_ids:
            if not segment.has_engine_members:
                return event.raw
            data = event.data
            assert data is not None
        else:
            assert segment.data is not None
            data = without_token_ids(segment.data)
        if segment.has_engine_members:
            data = without_engine_members(data)
        if data is event.data:
            return event.raw
        return b"data: %b\n\n" % data.replace(b"\n", b"\ndata: ")

    def untouched(self, segment: Segment, event: Event) -> bytes:
        """An event of which only the members for engines are left out."""
        if not segment.has_engine_members:
            return event.raw
        assert event.data is not None
        return b"data: %b\n\n" % without_engine_members(event.data).replace(b"\n", b"\ndata: ")

    def put_back_prompt_ids(self, payload: dict[str, Any], ids: bytes) -> None:
        """Return the prompt's ids, which the Segment has cut out, to a payload that is written anew: if the client
        asked for them.
        """
        if self.wants_ids:
            owner = payload if "prompt_token_ids" in payload else payload["choices"][0]
            owner["prompt_token_ids"] = orjson.Fragment(ids)

    def anew(self, payload: dict[str, Any], choice: dict[str, Any]) -> bytes:
        """A payload that was changed; `choice` is its only choice. Empty when it has nothing for the client."""
        delta = choice.get("delta")
        if self.hides_reasoning and delta:
            delta = {name: value for name, value in delta.items() if not name.startswith("reasoning")}
            if not delta and choice.get("finish_reason") is None:
                return b""
            choice = {**choice, "delta": delta}
        if not self.wants_ids and "token_ids" in choice:
            choice = {**choice, "token_ids": None}
        payload = {**payload, "choices": [choice]}
        self.last_payload = payload
        return self._rewrite(payload) if self._rewrite else data_event(payload)


def without_token_ids(data: bytes) -> bytes:
    """The data of an event, or an event of one line, with `null` in place of its token ids, if it has any."""
    before, name, behind = data.partition(_TOKEN_IDS)
    if not name:
        return data
    ids, _, rest = behind.partition(b"]")
    return before + _NO_TOKEN_IDS.ljust(len(ids) + len(b'"token_ids":[]')) + rest


def has_only_ids(choice: dict[str, Any]) -> bool:
    """A chat chunk that carries token ids and nothing else: without them there would be no chunk."""
    return choice.get("delta") == {} and choice.get("finish_reason") is None and choice.get("logprobs") is None
