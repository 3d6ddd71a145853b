"""Decides what the client gets of the decoders' streams of one answer. No IO."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson

from proxy.common.terms import Action
from proxy.dialects.segment import Segment
from proxy.resume.engines import VLLM, has_media_parts
from proxy.resume.overlap import AnswerMismatch
from proxy.resume.seam import remove_possible_stop, remove_tool_calls, split_off_finish_reason
from proxy.resume.transcript import Transcript
from proxy.wire.chat_members import UnreadableMember
from proxy.wire.openai import Api, cut_engine_members, data_event, replace_prompt_details
from proxy.wire.sse import TokenShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.dialects.call import Call
    from proxy.resume.engines import Engine
    from proxy.resume.seam import Seam
    from proxy.resume.situation import Resumption
    from proxy.wire.sse import Event


_NOT_COMMON: Final = frozenset({"choices", "usage", "prompt_token_ids", "system_fingerprint", "prompt_text"})


MAX_ATTEMPTS: Final = 8
"""Attempts to learn a shape. Some streams have none, and each attempt costs more than to parse a token."""


_TOKEN_IDS: Final = b'"token_ids":['
_NO_TOKEN_IDS: Final = b'"token_ids":null'


class ChunkWriter:
    """Writes the chunks of one streamed answer."""

    def __init__(self, call: Call, rewrite: Callable[[dict[str, Any]], bytes] | None, *, is_observed: bool) -> None:
        """Create the chunk writer.

        Args:
            call: The call of the client.
            rewrite: Turns each payload into the bytes to send. None: the client gets events in the engine's form.
            is_observed: Whether the answer has one choice, and token ids that the client may not have requested.
        """
        self.last_payload: dict[str, Any] = {}
        """The last payload sent: a pattern for a merged usage chunk."""
        self.wants_token_ids = call.wants_token_ids
        """Whether the client requested token ids."""
        self.hides_reasoning = is_observed and call.values.get("include_reasoning") is False
        """Whether the client does not get the reasoning."""
        self.rewrites_chunks = rewrite is not None
        """Whether `rewrite` writes all events."""
        self.keeps_engine_bytes = rewrite is None and not self.hides_reasoning
        """Whether chunks of the first decoder keep the engine's bytes, except for token ids."""
        self._is_observed = is_observed
        self._rewrite_chunk = rewrite

    def make_event_without_ids(self, segment: Segment, event: Event, payload: dict[str, Any]) -> bytes:
        """Return an event with the engine's bytes, but without token ids that the client did not request."""
        if self._rewrite_chunk is not None:
            self.last_payload = payload
            return self._rewrite_chunk(payload)
        if not self._is_observed or self.wants_token_ids:
            if not segment.has_engine_only_members:
                return event.raw
            data = event.data
            assert data is not None
        else:
            assert segment.event_data is not None
            data = without_token_ids(segment.event_data)
        if segment.has_engine_only_members:
            data = cut_engine_members(data)
        if data is event.data:
            return event.raw
        return b"data: %b\n\n" % data.replace(b"\n", b"\ndata: ")

    def make_event_without_engine_members(self, segment: Segment, event: Event) -> bytes:
        """Return an event with the engine's bytes, but without the members that are for engines only."""
        if not segment.has_engine_only_members:
            return event.raw
        assert event.data is not None
        return b"data: %b\n\n" % cut_engine_members(event.data).replace(b"\n", b"\ndata: ")

    def put_back_prompt_ids(self, payload: dict[str, Any], ids: bytes) -> None:
        """Put the ids of the prompt, which the Segment has cut out, back into a payload if the client wants them."""
        if self.wants_token_ids:
            owner = payload if "prompt_token_ids" in payload else payload["choices"][0]
            owner["prompt_token_ids"] = orjson.Fragment(ids)

    def make_changed_event(self, payload: dict[str, Any], choice: dict[str, Any]) -> bytes:
        """Return a changed payload as an event, or empty bytes if it has nothing for the client.

        `choice`: the only choice of the payload.
        """
        delta = choice.get("delta")
        if self.hides_reasoning and delta:
            delta = {name: value for name, value in delta.items() if not name.startswith("reasoning")}
            if not delta and choice.get("finish_reason") is None:
                return b""
            choice = {**choice, "delta": delta}
        if not self.wants_token_ids and "token_ids" in choice:
            choice = {**choice, "token_ids": None}
        payload = {**payload, "choices": [choice]}
        self.last_payload = payload
        return self._rewrite_chunk(payload) if self._rewrite_chunk else data_event(payload)


def without_token_ids(data: bytes) -> bytes:
    """Return the data of an event with `null` in place of its token ids. `data`: may also be an event of one line."""
    before, name, behind = data.partition(_TOKEN_IDS)
    if not name:
        return data
    ids, _, rest = behind.partition(b"]")
    return before + _NO_TOKEN_IDS.ljust(len(ids) + len(b'"token_ids":[]')) + rest


def has_only_token_ids(choice: dict[str, Any]) -> bool:
    """Return whether a chat chunk has token ids and nothing else."""
    return choice.get("delta") == {} and choice.get("finish_reason") is None and choice.get("logprobs") is None


class AnswerCollector(Protocol):
    """Assembles an answer that is not streamed to the client."""

    def add_chunk(self, payload: dict[str, Any]) -> bytes:
        """Add the next chunk to the collected answer."""

    def truncate_to_tokens(self, tokens: int) -> None:
        """Forget everything after the first `tokens` tokens."""


class Delivery:
    """Tracks what the client has of one answer, and turns events of decoders into bytes for the client."""

    def __init__(
        self,
        call: Call,
        make_segment: Callable[[], Segment] = Segment,
        *,
        is_observed: bool,
        reports_token_ids: bool = True,
        keeps_bytes: bool = True,
        engine: Engine = VLLM,
        rewrite_chunk: Callable[[dict[str, Any]], bytes] | None = None,
        collector: AnswerCollector | None = None,
    ) -> None:
        """Create the delivery.

        Args:
            call: The call of the client.
            make_segment: Returns the reader for a decoder's stream.
            is_observed: Whether the answer has one choice, whose text is recorded so that the answer can be resumed.
            reports_token_ids: Whether an observed answer has token ids.
            keeps_bytes: Whether the reader gets the bytes of the engine unchanged.
            engine: The kind of the engines.
            rewrite_chunk: Turns each payload into the bytes to send. The usage chunk is then written by its owner.
                None: the client gets events in the engine's form.
            collector: Collects an answer that is not streamed to the client. None: the answer is streamed.
        """
        self.transcript = Transcript(engine.reasoning_field)
        self.has_output = False
        """Whether the client has a part of the answer, so that it would notice a new beginning."""
        self.is_finished = False
        """Whether the client has the finish reason."""
        self.is_transcript_incomplete = False
        """Whether an unreadable event has made it unknown what the client has."""
        self.is_answer_changed = False
        """Whether the present decoder has sent a part of the answer, so that the request cannot just be repeated."""
        self.current_segment: Segment | None = None
        """The present decoder's stream. None before the first one."""
        self.last_usage: dict[str, Any] | None = None
        """The usage of the whole answer. None before its end, and if engines send neither usage nor token ids."""
        self.counts_reasoning = False
        """Whether engines count reasoning tokens in the usage of a chat."""
        self.system_fingerprint: str | None = None
        """The member `system_fingerprint` of the usage chunk. None: there was none."""
        self.head: dict[str, Any] = {}
        """The members of the first chunk that all chunks have in common."""
        self.tail: dict[str, Any] = {}
        """Other members of a whole answer, such as the text of the prompt, or metrics."""
        self.call = call
        self.is_observed = is_observed
        self.reports_token_ids = is_observed and reports_token_ids
        self.engine = engine
        self._make_segment = make_segment
        self._collector = collector
        self.writer = writer = ChunkWriter(
            call, rewrite_chunk if collector is None else collector.add_chunk, is_observed=is_observed
        )
        self.seam: Seam | None = None
        """Joins the next decoder's stream to the answer so far. None: the next stream begins the answer."""
        self._expected_prompt_ids: bytes | None = None
        """The prompt ids that a continuing decoder must report. None: any."""
        self._is_checked = False
        """Whether the present decoder's prompt ids were checked."""
        self._current_shape: TokenShape | None = None
        """The shape of the present decoder's last token. None: unknown."""
        self.shape_attempts_left = MAX_ATTEMPTS
        """Attempts to learn another shape of the present decoder's tokens."""
        self._held_events: list[bytes] = []
        """Events before the first output. They are sent together with it."""
        self._wants_ids = writer.wants_token_ids
        writer.keeps_engine_bytes &= keeps_bytes
        self._keeps_bytes = keeps_bytes
        self._learns_shapes = (
            keeps_bytes and not writer.hides_reasoning and (rewrite_chunk is None or collector is not None)
        )

    @property
    def is_stopped(self) -> bool:
        """Whether the answer ended at a stop string that no single engine could find."""
        return self.seam is not None and self.seam.is_stopped

    @property
    def token_shape(self) -> TokenShape | None:
        """The shape of tokens that may bypass this delivery. None: no token may."""
        return None if self._held_events and self._collector is None else self._current_shape

    def can_continue_elsewhere(self) -> bool:
        """Return whether another decoder can probably continue the answer exactly.

        `resume.plan` decides that when the decoder is lost, and may ask engines. This only excludes the answers that it
        refuses without asking, and those whose tokens it would only repeat.
        """
        if not self.has_output:
            return True
        call, engine, transcript = self.call, self.engine, self.transcript
        if self.is_transcript_incomplete or not self.is_observed or transcript.tools or not transcript.ids:
            return False
        if transcript.prompt_ids is None and call.api is not Api.GENERATE:
            return False
        return not has_media_parts(call) and not engine.is_structured(call) and engine.why_inexact(call) is None

    def all_token_ids(self) -> array[int] | None:
        """Return the token ids of the prompt and of the whole answer; None if they are not known for certain."""
        transcript = self.transcript
        if (
            not self.is_observed
            or self.is_transcript_incomplete
            or self.seam is not None
            or transcript.prompt_ids is None
        ):
            return None
        try:
            ids = array("I", orjson.loads(transcript.prompt_ids))
        except (orjson.JSONDecodeError, TypeError, OverflowError):
            return None
        ids.extend(transcript.ids)
        return ids

    def quotable_texts(self) -> Sequence[str] | None:
        """Return the texts of the request and of its answer so far, which an engine may quote in an error.

        None: some text is unknown, such as that of token ids, or of an answer that is not recorded.
        """
        if self.has_output and (self.is_transcript_incomplete or not self.is_observed):
            return None
        texts, transcript = self.call.request_texts(), self.transcript
        if texts is None:
            return None
        tools = [text for tool in transcript.tools for text in (tool.name, tool.arguments)]
        return [*texts, transcript.content_text, transcript.reasoning_text, *tools]

    # Attempts

    def restart_answer(self) -> None:
        """Forget the answer so far, of which the client has nothing."""
        self.transcript = Transcript(self.engine.reasoning_field)
        self.head, self.tail = {}, {}
        self._held_events.clear()
        self.seam = self._expected_prompt_ids = None
        self.is_answer_changed = self.is_finished = self.is_transcript_incomplete = False
        if self._collector is not None:
            self._collector.truncate_to_tokens(0)

    def prepare_to_continue(self, resumption: Resumption) -> None:
        """Prepare for a stream that continues the answer."""
        assert resumption.seam is not None
        self.seam = resumption.seam
        self._expected_prompt_ids = resumption.prompt_ids
        self.is_answer_changed = False
        if resumption.action is not Action.REPLAY:
            self.transcript.truncate_to_ids(resumption.kept_ids)
            if self._collector is not None:
                self._collector.truncate_to_tokens(resumption.kept_ids)

    def mark_transcript_incomplete(self) -> None:
        """Record that the transcript is incomplete, so that the answer can only begin again."""
        self.is_transcript_incomplete = self.is_answer_changed = True

    def begin_stream(self) -> Segment:
        """Return the reader for the stream of another decoder."""
        seam = self.seam
        self.current_segment = segment = (
            Segment() if seam is not None and seam.reads_completion else self._make_segment()
        )
        self.last_usage = None
        self._is_checked = False
        self._current_shape = None
        self.shape_attempts_left = MAX_ATTEMPTS
        return segment

    # Events of a decoder

    def take_role_chunk(self, segment: Segment, event: Event) -> None:
        """Take the role chunk. Raises AnswerMismatch if the engine has another prompt than it was given."""
        self._check_prompt(segment)
        if self.seam is None:
            self._keep_answer_head(segment.payload)
            self._held_events.append(self.writer.make_event_without_ids(segment, event, segment.payload))

    def take_content(self, segment: Segment, event: Event) -> bytes:
        """Take a part of the answer. Return the bytes for the client, which may be empty. Raises AnswerMismatch."""
        self.is_answer_changed = True
        if not self._is_checked:
            self._check_prompt(segment)
        if not self.is_observed:
            choices = segment.payload.get("choices")
            if self._learns_shapes and choices and len(choices) == 1:
                self._learn_token_shape(segment, event, choices[0])
            return self._with_held_events(self.writer.make_event_without_ids(segment, event, segment.payload))
        if self.seam is not None:
            return self._with_held_events(self._seam_output(segment, recomputed=False))
        payload = segment.payload
        choice = payload["choices"][0]
        if not self.head:
            self._keep_answer_head(payload)
        ids = choice.get("token_ids")
        shows = self.is_transcript_incomplete or self._add_choice(choice, ids)
        if choice.get("finish_reason") is not None:
            self.is_finished = True
        if self._learns_shapes:
            self._learn_token_shape(segment, event, choice)
        if not shows and ids and not self._wants_ids and has_only_token_ids(choice):
            return b""
        if not self.writer.keeps_engine_bytes:
            return self._with_held_events(self.writer.make_changed_event(payload, choice))
        return self._with_held_events(self.writer.make_event_without_ids(segment, event, payload))

    def _add_choice(self, choice: dict[str, Any], ids: Any) -> bool:
        """Add a choice to the transcript. Return whether it shows anything.

        After an unreadable choice a streamed answer continues, but it cannot be resumed. A whole answer cannot be
        assembled: raises UnreadableMember.
        """
        try:
            return self.transcript.add_choice(choice, ids)
        except UnreadableMember:
            if self._collector is not None:
                raise
            self.mark_transcript_incomplete()
            return True

    def _learn_token_shape(self, segment: Segment, event: Event, choice: dict[str, Any]) -> None:
        """Learn the shape of the next tokens from an event, if it differs from the present shape."""
        # After tool calls, tokens may differ in more than their text.
        is_token = choice.get("finish_reason") is None and choice.get("logprobs") is None and not self.transcript.tools
        raw, shape = event.raw, self._current_shape
        if is_token and shape is not None and shape.has_same_frame(raw):
            return
        self._current_shape = None
        if is_token and self.shape_attempts_left and segment.event_data is event.data:  # parsed without a change
            self.shape_attempts_left -= 1
            self._current_shape = TokenShape.recognise(raw)

    def take_recompute_chunk(self, segment: Segment) -> bytes:
        """Take the last chunk of a decoder that gives up. Its text counts, its finish and tool calls do not."""
        if not self.is_observed:
            return b""
        self.is_answer_changed = True
        if not self._is_checked:
            self._check_prompt(segment, is_rewritten=True)
        if self.seam is not None:
            return self._with_held_events(self._seam_output(segment, recomputed=True))
        if not self.head:
            self._keep_answer_head(segment.payload)
        payload, choice = split_off_finish_reason(segment.payload)
        remove_tool_calls(choice)
        remove_possible_stop([choice], self.call)
        shows = self._add_choice(choice, choice.get("token_ids"))
        if not shows and not (self.call.shows_token_details and choice.get("token_ids")):
            return b""
        return self._with_held_events(self.writer.make_changed_event(payload, choice))

    def take_usage_chunk(
        self, segment: Segment, event: Event, prompt_tokens_details: dict[str, Any] | None, *, is_handed_over: bool
    ) -> bytes:
        """Take the usage chunk. Return the bytes for the client, which are empty if it did not request usage.

        Args:
            segment: The reader of the stream.
            event: The event.
            prompt_tokens_details: The `prompt_tokens_details` of the prefiller. None: it sent none.
            is_handed_over: Whether the KV cache was handed over, so that the details of the prefiller count.
        """
        self.system_fingerprint = segment.payload.get("system_fingerprint") or self.system_fingerprint
        if self._collector is not None and self.seam is None:
            self.tail.update(_members_beside_usage(segment.payload, self.head))
        if not segment.is_finished:
            return b""  # the stream ended without an answer
        engine_usage = segment.usage or {}
        usage = engine_usage if self.seam is None else self.seam.count_whole_usage(engine_usage)
        if self.seam is not None:
            self._count_reasoning(usage)
        self.last_usage = replace_prompt_details(usage, prompt_tokens_details) if is_handed_over else usage
        if not self.call.include_usage or self.writer.rewrites_chunks:
            return b""  # not requested, or written by the owner of `rewrite`
        if self.last_usage is engine_usage and self._keeps_bytes:
            return self.writer.make_event_without_engine_members(segment, event)
        return data_event({**segment.payload, **(self.head if self.seam else {}), "usage": self.last_usage})

    def total_usage(self, usage: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the usage of the whole answer from that of the present decoder. None: it sent none."""
        return usage if self.seam is None or usage is None else self.seam.count_whole_usage(usage)

    def pass_other_event(self, segment: Segment, event: Event) -> bytes:
        """Take a comment or unknown data, which is for the client to interpret. It is held before the first token."""
        if self.writer.rewrites_chunks:
            return b""
        raw = self.writer.make_event_without_engine_members(segment, event)
        if not self.has_output:
            self._held_events.append(raw)
            return b""
        return raw

    def make_missing_end(self, prompt_tokens_details: dict[str, Any] | None) -> bytes:
        """Return the missing end of an answer: finish reason and usage, unless an engine has sent them."""
        parts = []
        if self.seam is not None and not self.is_finished:
            for payload, _ in self.seam.make_ending_chunks():
                self.transcript.add_choice(payload["choices"][0], None)
                parts.append(self.writer.make_changed_event(payload, payload["choices"][0]))
        if self.last_usage is None:
            self.last_usage = self._usage_or_count(prompt_tokens_details)
            # If the answer is not observed, the client has all chunks of the engine.
            if (
                self.last_usage is not None
                and self.head
                and self.call.include_usage
                and not self.writer.rewrites_chunks
            ):
                parts.append(data_event({**self.head, "choices": [], "usage": self.last_usage}))
        return self._with_held_events(b"".join(parts))

    def estimate_partial_usage(self) -> dict[str, Any] | None:
        """Return the usage of the answer so far, by its token ids. None: engines do not report them."""
        return None if self.is_transcript_incomplete else self.transcript.estimate_usage()

    def _usage_or_count(self, details: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the usage from the last chunk, or count the token ids. None: there are neither.

        Text is not counted, because only the engine knows how many tokens it is.
        """
        segment = self.current_segment
        if self.seam is None and segment is not None and segment.usage and len(segment.finish_reasons) == 1:
            return replace_prompt_details(segment.usage, details)
        if self.is_transcript_incomplete or (usage := self.transcript.estimate_usage()) is None:
            return None
        self._count_reasoning(usage)
        return replace_prompt_details(usage, details)

    # Writing

    def _seam_output(self, segment: Segment, *, recomputed: bool) -> bytes:
        assert self.seam is not None
        payload = split_off_finish_reason(segment.payload)[0] if recomputed else segment.payload
        parts = []
        chunks = self.seam.rewrite_chunk(payload, recomputed=recomputed)
        if recomputed and not self.seam.withheld_text and not self.is_stopped:
            remove_possible_stop([chunk["choices"][0] for chunk, _ in chunks], self.call)
        for chunk, ids in chunks:
            choice = chunk["choices"][0]
            is_last = choice.get("finish_reason") is not None
            self.is_finished |= is_last
            shows = self.transcript.add_choice(choice, ids)
            if chunk.get("usage"):
                self._count_reasoning(chunk["usage"])
            if shows or is_last or (self.call.shows_token_details and choice.get("token_ids")):
                parts.append(self.writer.make_changed_event(chunk, choice))
        return b"".join(parts)

    def _count_reasoning(self, usage: dict[str, Any]) -> None:
        """Add the count of reasoning tokens, which completions and our own usage lack."""
        if self.counts_reasoning and usage.get("completion_tokens_details") is None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.transcript.count_reasoning_ids}

    def _with_held_events(self, output: bytes) -> bytes:
        """Return the output with the events held before it. From now on the client has a part of the answer."""
        if not output:
            return output
        self.has_output = True
        if self._held_events:
            output = b"".join((*self._held_events, output))
            self._held_events.clear()
        return output

    def _keep_answer_head(self, payload: dict[str, Any]) -> None:
        self.head = head = payload.copy()
        for name in _NOT_COMMON:
            head.pop(name, None)
        if "prompt_text" in payload:
            self.tail["prompt_text"] = payload["prompt_text"]

    def _check_prompt(self, segment: Segment, *, is_rewritten: bool = False) -> None:
        """Record the prompt ids of the first decoder, or check those of a continuing one. Raises AnswerMismatch."""
        self._is_checked = True
        prompt_ids = segment.prompt_ids
        if self._expected_prompt_ids is not None:
            if prompt_ids is None or (
                prompt_ids != self._expected_prompt_ids
                and orjson.loads(prompt_ids) != orjson.loads(self._expected_prompt_ids)
            ):
                raise AnswerMismatch
        elif self.seam is None and prompt_ids is not None:
            self.transcript.prompt_ids = prompt_ids
            if is_rewritten or not self.writer.keeps_engine_bytes:
                self.writer.put_back_prompt_ids(segment.payload, prompt_ids)


def _members_beside_usage(usage_chunk: dict[str, Any], head: dict[str, Any]) -> dict[str, Any]:
    """Return the members of a usage chunk that belong to the whole answer and to no other chunk."""
    return {name: value for name, value in usage_chunk.items() if name not in head and name not in _NOT_COMMON}
