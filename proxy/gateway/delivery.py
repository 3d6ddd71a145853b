"""One answer on its way to the client, whichever decoders work on it: what of their streams the client gets. No IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson

from proxy.common.terms import Action
from proxy.dialects.segment import Segment
from proxy.resume.engines import VLLM
from proxy.resume.overlap import Mismatch
from proxy.resume.seam import unfinished, withhold, without_tool_calls
from proxy.resume.transcript import Transcript
from proxy.wire.chat_members import UnreadableMember
from proxy.wire.engine_members import without_engine_members
from proxy.wire.openai import data_event, with_prompt_details
from proxy.wire.token import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.dialects.call import Call
    from proxy.resume.engines import Engine
    from proxy.resume.seam import Seam
    from proxy.resume.situation import Resumption
    from proxy.wire.sse import Event


_NOT_COMMON: Final = frozenset({"choices", "usage", "prompt_token_ids", "system_fingerprint", "prompt_text"})


# Some streams have no shape, and an attempt to learn one costs more than parsing a token.
_MAX_ATTEMPTS: Final = 8


class TokenShapes:
    """The shapes that the tokens of one decoder's stream have, one after the other."""

    __slots__ = ("_attempts_left", "current")

    def __init__(self) -> None:
        self.current: Shape | None = None
        """The shape of the present tokens, as long as they add to the same text; None while it is not known."""
        self._attempts_left = _MAX_ATTEMPTS

    def learn(self, raw: bytes, *, is_token: bool, is_whole: bool) -> None:
        """Learn what the next tokens look like if this event, which was parsed, looks different from those before it.

        `is_token`: it shows text, and what comes behind it may differ in no more than its text. `is_whole`: it was
        parsed as it came.
        """
        if is_token and self.current is not None and self.current.is_around(raw):
            return
        self.current = None
        if is_token and self._attempts_left and is_whole:
            self._attempts_left -= 1
            self.current = Shape.of(raw)

    def was_right(self) -> None:
        """Tokens had the present shape, so another one is worth learning when they change: SGLang's chunks tell the
        second in which they were written.
        """
        self._attempts_left = _MAX_ATTEMPTS


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


class Collector(Protocol):
    """Puts an answer together that is not streamed to the client."""

    def add(self, payload: dict[str, Any]) -> bytes:
        """Take the next chunk."""

    def cut(self, tokens: int) -> None:
        """Forget what belongs to tokens behind the first `tokens`."""


class Delivery:
    """What the client has of one answer, and the only one who gives it more.

    `is_observed`: the answer has one choice, and its text is kept; `tells_ids`: it comes with token ids. `rewrite`:
    turns each payload into the bytes to send when the stream is merged with others, whose usage chunk is the merger's.
    `keeps_bytes`: what the segments read is what the engine wrote.
    `whole`: collects an answer that is not streamed to the client.
    """

    def __init__(
        self,
        call: Call,
        new_segment: Callable[[], Segment] = Segment,
        *,
        is_observed: bool,
        tells_ids: bool = True,
        keeps_bytes: bool = True,
        engine: Engine = VLLM,
        rewrite: Callable[[dict[str, Any]], bytes] | None = None,
        whole: Collector | None = None,
    ) -> None:
        self.transcript = Transcript(engine.reasoning_field)
        self.has_output = False
        """The client was given a part of the answer: from now on it cannot begin anew unnoticed."""
        self.is_finished = False
        """The client has the finish reason, whether usage and `[DONE]` come or not."""
        self.has_lost_track = False
        """What was read last made no sense, so it is not known any more what the client has."""
        self.is_touched = False
        """The present decoder has said something that counts: the answer cannot simply be asked for again."""
        self.segment: Segment | None = None
        """The present decoder's stream; None before the first."""
        self.usage: dict[str, Any] | None = None
        """The usage of the whole answer, once it has ended; None where engines tell neither usage nor token ids."""
        self.counts_reasoning = False
        """Engines tell in a chat's usage how many tokens are reasoning."""
        self.fingerprint: str | None = None
        """`system_fingerprint`, which engines put on the usage chunk if there is one."""
        self.head: dict[str, Any] = {}
        """The members that all chunks have in common, of the first chunk."""
        self.tail: dict[str, Any] = {}
        """What else a whole answer has beside its choices and usage, such as the prompt's text, or metrics."""
        self.call = call
        self.is_observed = is_observed
        self.tells_ids = is_observed and tells_ids
        self.engine = engine
        self._new_segment = new_segment
        self._whole = whole
        self.writer = writer = ChunkWriter(call, rewrite if whole is None else whole.add, is_observed=is_observed)
        self.seam: Seam | None = None
        """Joins the next decoder's stream to the answer so far. None: the next stream begins the answer."""
        self._expected: bytes | None = None
        self._is_checked = False
        self.shapes: TokenShapes
        """Of the present decoder's tokens, once there is one."""
        self._held: list[bytes] = []
        self._wants_ids = writer.wants_ids
        writer.keeps_bytes &= keeps_bytes
        self._keeps_bytes = keeps_bytes
        self._tells_shapes = keeps_bytes and not writer.hides_reasoning and (rewrite is None or whole is not None)

    @property
    def ahead(self) -> Sequence[int]:
        """Ids the client has seen and the present decoder has not generated again yet."""
        return () if self.seam is None else self.seam.swallowed

    @property
    def told(self) -> dict[str, Any] | None:
        """The last usage that the present decoder has told; None: it has told none."""
        return None if self.segment is None else self.segment.usage

    @property
    def passes_bytes(self) -> bool:
        """Whether the client gets the engine's own bytes, also of an event that cannot be read."""
        return self.seam is None and self.writer.keeps_bytes

    @property
    def is_stopped(self) -> bool:
        """A stop string was found that no engine could see."""
        return self.seam is not None and self.seam.is_stopped

    @property
    def shape(self) -> Shape | None:
        """What tokens look like that may bypass this delivery: the client gets all of their bytes, without the ids that
        it did not ask for, and the transcript their text and id. None: none may.
        """
        return None if self._held and self._whole is None else self.shapes.current

    # Attempts

    def begin_anew(self) -> None:
        """What came so far, if anything, the client never saw."""
        self.transcript = Transcript(self.engine.reasoning_field)
        self.head, self.tail = {}, {}
        self._held.clear()
        self.seam = self._expected = None
        self.is_touched = self.is_finished = self.has_lost_track = False
        if self._whole is not None:
            self._whole.cut(0)

    def go_on(self, resumption: Resumption) -> None:
        """The next stream is the continuation that was decided on."""
        assert resumption.seam is not None
        self.seam = resumption.seam
        self._expected = resumption.prompt_ids
        self.is_touched = False
        if resumption.action is not Action.REPLAY:
            self.transcript.cut(resumption.kept)
            if self._whole is not None:
                self._whole.cut(resumption.kept)

    def lose_track(self) -> None:
        """The transcript cannot be relied on: the answer can only begin anew."""
        self.has_lost_track = self.is_touched = True

    def begin_stream(self) -> Segment:
        """Another decoder begins to answer: what reads its stream."""
        seam = self.seam
        self.segment = segment = Segment() if seam is not None and seam.reads_completion else self._new_segment()
        self.usage = None
        self._is_checked = False
        self.shapes = TokenShapes()
        return segment

    # What a decoder says

    def opening(self, segment: Segment, event: Event) -> None:
        """The role chunk. Raises Mismatch when the engine has another prompt than it was given."""
        self._check_prompt(segment)
        if self.seam is None:
            self._note_head(segment.payload)
            self._held.append(self.writer.as_it_came(segment, event, segment.payload))

    def content(self, segment: Segment, event: Event) -> bytes:
        """A part of the answer; empty when there is nothing in it for the client. Raises Mismatch."""
        self.is_touched = True
        if not self._is_checked:
            self._check_prompt(segment)
        if not self.is_observed:
            choices = segment.payload.get("choices")
            if self._tells_shapes and choices and len(choices) == 1:
                self._learn(segment, event, choices[0])
            return self._given(self.writer.as_it_came(segment, event, segment.payload))
        if self.seam is not None:
            return self._given(self._stitched(segment, recomputed=False))
        payload = segment.payload
        choice = payload["choices"][0]
        if not self.head:
            self._note_head(payload)
        ids = choice.get("token_ids")
        shows = self.has_lost_track or self._take(choice, ids)
        if choice.get("finish_reason") is not None:
            self.is_finished = True
        if self._tells_shapes:
            self._learn(segment, event, choice)
        if not shows and ids and not self._wants_ids and has_only_ids(choice):
            return b""
        if not self.writer.keeps_bytes:
            return self._given(self.writer.anew(payload, choice))
        return self._given(self.writer.as_it_came(segment, event, payload))

    def _take(self, choice: dict[str, Any], ids: Any) -> bool:
        """Have the transcript take a choice; whether it shows anything.

        One that it cannot take costs the client nothing, unless the answer is put together from the transcript: the
        answer goes on, and cannot be resumed.
        """
        try:
            return self.transcript.take(choice, ids)
        except UnreadableMember:
            if self._whole is not None:
                raise
            self.lose_track()
            return True

    def _learn(self, segment: Segment, event: Event, choice: dict[str, Any]) -> None:
        """Learn what tokens look like from one of them. Where tools were called they may differ in more than text."""
        is_token = choice.get("finish_reason") is None and choice.get("logprobs") is None and not self.transcript.tools
        self.shapes.learn(event.raw, is_token=is_token, is_whole=segment.data is event.data)

    def recomputed(self, segment: Segment) -> bytes:
        """The chunk with which a decoder gives up: its text counts, its finish does not, nor do its tool calls."""
        if not self.is_observed:
            return b""
        self.is_touched = True
        if not self._is_checked:
            self._check_prompt(segment, is_rewritten=True)
        if self.seam is not None:
            return self._given(self._stitched(segment, recomputed=True))
        if not self.head:
            self._note_head(segment.payload)
        payload, choice = unfinished(segment.payload)
        without_tool_calls(choice)
        withhold([choice], self.call)
        shows = self._take(choice, choice.get("token_ids"))
        if not shows and not (self.call.shows_single_tokens and choice.get("token_ids")):
            return b""
        return self._given(self.writer.anew(payload, choice))

    def usage_chunk(
        self, segment: Segment, event: Event, details: dict[str, Any] | None, *, handed_over: bool
    ) -> bytes:
        """The usage chunk; empty when the client did not ask for it. `details`: what the prefiller told of the prompt,
        which counts when the KV cache was handed over.
        """
        self.fingerprint = segment.payload.get("system_fingerprint") or self.fingerprint
        if self._whole is not None and self.seam is None:
            self.tail.update(_beside(segment.payload, self.head))
        if not segment.is_finished:
            return b""  # of a stream that ends without an answer
        told = segment.usage or {}
        usage = told if self.seam is None else self.seam.usage(told)
        if self.seam is not None:
            self._count_reasoning(usage)
        self.usage = with_prompt_details(usage, details) if handed_over else usage
        if not self.call.include_usage or self.writer.rewrites:
            return b""  # not asked for, or the merger's
        if self.usage is told and self._keeps_bytes:
            return self.writer.untouched(segment, event)
        return data_event({**segment.payload, **(self.head if self.seam else {}), "usage": self.usage})

    def of_all(self, told: dict[str, Any] | None) -> dict[str, Any] | None:
        """The usage of the whole answer by what the present decoder told of its part."""
        return told if self.seam is None or told is None else self.seam.usage(told)

    def other(self, segment: Segment, event: Event) -> bytes:
        """A comment, or data this gateway does not know: the client judges. Before the first token it is held, too."""
        if self.writer.rewrites:
            return b""
        raw = self.writer.untouched(segment, event)
        if not self.has_output:
            self._held.append(raw)
            return b""
        return raw

    def closing(self, details: dict[str, Any] | None) -> bytes:
        """What is missing at the end of an answer: the finish, and usage, unless they were told."""
        parts = []
        if self.seam is not None and not self.is_finished:
            for payload, _ in self.seam.ending():
                self.transcript.take(payload["choices"][0], None)
                parts.append(self.writer.anew(payload, payload["choices"][0]))
        if self.usage is None:
            self.usage = self._counted(details)
            # Of an answer that is not observed the client has all that was told.
            if self.usage is not None and self.head and self.call.include_usage and not self.writer.rewrites:
                parts.append(data_event({**self.head, "choices": [], "usage": self.usage}))
        return self._given(b"".join(parts))

    def _counted(self, details: dict[str, Any] | None) -> dict[str, Any] | None:
        """Usage where there was no usage chunk: what the finish said of it, or else by the token ids.

        None where engines tell neither. Text is not counted: how many tokens it is only the engine knows.
        """
        segment = self.segment
        if self.seam is None and segment is not None and segment.usage and len(segment.finish_reasons) == 1:
            return with_prompt_details(segment.usage, details)
        if self.has_lost_track or (usage := self.transcript.counted_usage()) is None:
            return None
        self._count_reasoning(usage)
        return with_prompt_details(usage, details)

    # Writing

    def _stitched(self, segment: Segment, *, recomputed: bool) -> bytes:
        assert self.seam is not None
        payload = unfinished(segment.payload)[0] if recomputed else segment.payload
        parts = []
        chunks = self.seam.rewrite(payload, recomputed=recomputed)
        if recomputed and not self.seam.unsent and not self.is_stopped:
            withhold([chunk["choices"][0] for chunk, _ in chunks], self.call)
        for chunk, ids in chunks:
            choice = chunk["choices"][0]
            is_last = choice.get("finish_reason") is not None
            self.is_finished |= is_last
            shows = self.transcript.take(choice, ids)
            if chunk.get("usage"):
                self._count_reasoning(chunk["usage"])
            if shows or is_last or (self.call.shows_single_tokens and choice.get("token_ids")):
                parts.append(self.writer.anew(chunk, choice))
        return b"".join(parts)

    def _count_reasoning(self, usage: dict[str, Any]) -> None:
        """Add what the usage of a completion, or one of ours, does not tell."""
        if self.counts_reasoning and usage.get("completion_tokens_details") is None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.transcript.reasoning_ids}

    def _given(self, output: bytes) -> bytes:
        """The output with what was held back before it; from now on the client has a part of the answer."""
        if not output:
            return output
        self.has_output = True
        if self._held:
            output = b"".join((*self._held, output))
            self._held.clear()
        return output

    def _note_head(self, payload: dict[str, Any]) -> None:
        self.head = head = payload.copy()
        for name in _NOT_COMMON:
            head.pop(name, None)
        if "prompt_text" in payload:
            self.tail["prompt_text"] = payload["prompt_text"]

    def _check_prompt(self, segment: Segment, *, is_rewritten: bool = False) -> None:
        """Note the prompt's ids, or see that they are those a continuing engine was given. Raises Mismatch."""
        self._is_checked = True
        told = segment.prompt_ids
        if self._expected is not None:
            if told is None or (told != self._expected and orjson.loads(told) != orjson.loads(self._expected)):
                raise Mismatch
        elif self.seam is None and told is not None:
            self.transcript.prompt_ids = told
            if is_rewritten or not self.writer.keeps_bytes:
                self.writer.put_back_prompt_ids(segment.payload, told)


def _beside(usage_chunk: dict[str, Any], head: dict[str, Any]) -> dict[str, Any]:
    """The members of a usage chunk that belong to the whole answer, and that no other chunk has."""
    return {name: value for name, value in usage_chunk.items() if name not in head and name not in _NOT_COMMON}
