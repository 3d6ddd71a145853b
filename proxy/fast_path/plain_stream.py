"""A streamed answer as nearly all of them are: one sequence of text, in events of well-known kinds. No IO.

What an unusual answer takes is not made for it: a Delivery, and the Relay that reads whatever an engine may send. As
soon as it turns out to be one of these, or is not to end well, they are made. They read once more what began the
answer and what has ended it so far; what the client has of that they write once more, and FastStream passes it over.
What was between is in the transcript, which they go on with. So all that is done here comes to what they would do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson

from proxy.dialects.segment import PROMPT_IDS
from proxy.flow.bypass import Bypass
from proxy.flow.chunk_writer import without_token_ids
from proxy.flow.relay import END_MARK_SECONDS
from proxy.flow.token_shapes import TokenShapes
from proxy.resume.transcript import Transcript
from proxy.wire.openai import DONE, data_event, with_prompt_details

if TYPE_CHECKING:
    from proxy.call import Call
    from proxy.connectors.attempt import Attempt
    from proxy.errors import UpstreamError
    from proxy.fast_path.stream import FastStream
    from proxy.flow.relay import Relay
    from proxy.flow.token_clock import TokenClock
    from proxy.resume.engine import Watching

_MOST_PARTS: Final = 2
"""Of an answer that is kept as it came. What is asked for more has a transcript."""
_MOST_BYTES: Final = 16 * 1024
"""Of an event that is read here, but for the prompt's ids."""
_BEGIN: Final = b"data: "
_END: Final = b"\n\n"
"""Of an event that is one line of data."""
_LF, _CR, _BRACKET, _BRACE = b"\n\r[{"
_NO_PROMPT_IDS: Final = b'"prompt_token_ids":null'
_CHOICES: Final = b',"choices":['
_OPENING: Final = _CHOICES + (
    b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
)
"""What vLLM's role chunks say behind the members that all chunks of an answer have in common."""
_PROMPT: Final = b"," + PROMPT_IDS
_OPENING_WITHOUT_IDS: Final = _OPENING + b"," + _NO_PROMPT_IDS + b"}"
# What a delta of text says. Calls of tools, and whatever else there may be, are not read here.
_TEXTS: Final = frozenset({"role", "content", "reasoning", "reasoning_content"})
_ODD_SHAPES: Final = (AttributeError, LookupError, TypeError, ValueError)


_Part = tuple[dict[str, Any], bytes, bytes]
"""The choice of an event that holds part of the answer, the event's data, and what of that was read."""


class Owner(Protocol):
    """Whose answer it is."""

    def first_output(self) -> None:
        """The decoder has begun to answer."""

    def read_by_relay(self) -> Relay:
        """Have a Relay take the answer, beginning with `seen`."""

    def finished(self) -> None:
        """The answer is whole."""


class _Odd(Exception):
    """An event is not of the kinds that are read here."""


class PlainStream(Bypass):
    """A Sink for the decoder's answer to a call for one sequence, in the engine's own bytes."""

    __slots__ = (
        *("clock", "seen", "sent_bytes", "transcript", "unsent", "usage"),
        *("_attempt", "_client", "_owner", "_relay", "_shapes", "_watching"),
        *("_hides_ids", "_include_usage", "_idle_seconds", "_is_short"),
        *("_held", "_parts", "_prompt_ids", "_is_finished", "_is_done", "_is_whole", "_has_prompt"),
    )

    def __init__(
        self,
        attempt: Attempt,
        call: Call,
        client: FastStream,
        owner: Owner,
        clock: TokenClock,
        idle_seconds: float,
        watching: Watching,
    ) -> None:
        """`call`: as the client sent it."""
        super().__init__()
        self.clock = clock
        self.seen: list[bytes] = []
        """What has arrived, but for what is between the first part and the last one of an answer with a transcript."""
        self.sent_bytes = 0
        """How much was written for it, without framing."""
        self.transcript: Transcript | None = None
        """Of all parts of the answer; None: `seen` has them, or nobody will ask."""
        self.unsent = b""
        """The end of a whole answer, which is to be written before the end mark."""
        self.usage: dict[str, Any] | None = None
        """The usage of the whole answer; None: it was not told yet."""
        self._attempt = attempt
        self._client = client
        self._owner = owner
        self._relay: Relay | None = None
        self._shapes: TokenShapes | None = None
        """None before a part of an answer that is not short."""
        self._watching = watching
        self._hides_ids = watching.is_close and not call.values.get("return_token_ids")
        """What the decoder tells of ids is not for the client."""
        self._is_short = call.output_tokens <= _MOST_PARTS
        """It is not worth while to let tokens pass."""
        self._include_usage = call.include_usage
        self._idle_seconds = idle_seconds
        self._held = b""
        """The role chunk, until there is a part of the answer."""
        self._parts = 0
        self._prompt_ids: bytes | None = None
        """The token ids of the prompt, as a JSON array, until the transcript has them."""
        self._is_finished = self._is_done = self._is_whole = self._has_prompt = False

    # Sink

    def received(self, data: bytes) -> bool:
        if self._relay is not None:
            return self._relay.received(data)
        if self._is_bypassed:
            assert self._shapes is not None
            self._look_back(self.clock, self._shapes)
        before = self._parts
        try:
            output = self._read(data)
        except _Odd:
            relay = self._leave()
            self._attempt.response.pass_on(None)  # before it has read this nothing can bypass it
            return relay.received(data)
        has_parts = self._parts > before
        if has_parts:
            self.clock.tick()
        if self._is_whole:
            self.unsent = output
            return has_parts
        if self._client.write(output):
            self._hold()
        elif self._shapes is not None and not self._is_finished:
            self._forward_tokens(self._shapes)
        return has_parts

    def ended(self, error: UpstreamError | None) -> None:
        if self._relay is not None:
            self._relay.ended(error)
        elif self._is_done:  # the answer is whole, whatever becomes of the connection
            self._owner.finished()
        else:
            self._leave().ended(error)

    # How

    def _forward_tokens(self, shapes: TokenShapes) -> None:
        """Have the next events bypass this stream, if they are tokens that look like one before."""
        shape, client = shapes.current, self._client
        if shape is not None and self._let_pass(
            shape, self._attempt.response, client, self.clock, self.transcript, hides_ids=self._hides_ids
        ):
            client.protocol.on_full = self._hold

    def _hold(self) -> None:
        """The client reads too slowly."""
        if self._relay is None:
            self._leave(passing=1)
        assert self._relay is not None
        self._relay.hold()

    def _leave(self, passing: int = 0) -> Relay:
        """From now on a Relay takes the answer. `passing`: so many tokens are just being passed on."""
        if self._is_bypassed:
            assert self._shapes is not None
            self._look_back(self.clock, self._shapes)
            self.clock.index += passing
            self._attempt.response.pass_on(None)
        relay = self._relay = self._owner.read_by_relay()
        return relay

    def _read(self, data: bytes) -> bytes:
        """What the client gets of whole events. Raises _Odd, and then nothing has happened.

        One function for all of them, as each function that is called costs more than what it does.
        """
        if self._is_done or data[:6] != _BEGIN or data[-2:] != _END or _CR in data:
            raise _Odd
        parts, is_finished, has_prompt = self._parts, self._is_finished, self._has_prompt
        held, usage = self._held, self.usage
        output: list[bytes] = []
        taken: list[_Part] = []
        events = data[6:-2].split(_END + _BEGIN)
        is_done = events[-1] == DONE
        if is_done:
            events.pop()
        if not parts and not held and len(events) > 1 and (opening := _opening(events[0], events[1])):
            shown, self._prompt_ids = opening
            has_prompt = self._prompt_ids is not None
            held = _BEGIN + (shown if self._hides_ids else events[0]) + _END
            del events[0]
        for shown in events:
            if _LF in shown:  # more than one line
                raise _Odd
            told = shown
            if not has_prompt:  # see Segment
                before, name, behind = shown.partition(PROMPT_IDS)
                if name:
                    has_prompt = True
                    prompt_ids, bracket, behind = behind.partition(b"]")
                    self._prompt_ids = b"[" + prompt_ids + bracket
                    told = before + _NO_PROMPT_IDS + behind
                    if self._hides_ids:
                        shown = told
            if len(told) > _MOST_BYTES:
                raise _Odd
            try:
                payload = orjson.loads(told)
                choices = payload.get("choices")
                of_all = payload.get("usage")
                if choices:
                    (choice,) = choices
                    delta, ids, reason = choice.get("delta"), choice.get("token_ids"), choice.get("finish_reason")
                    if delta is None:
                        has_text = choice["text"] != ""
                        if type(choice["text"]) is not str:
                            raise _Odd
                    else:
                        has_text = False
                        for member, value in delta.items():
                            if member not in _TEXTS or (value is not None and type(value) is not str):
                                raise _Odd
                            if value and member != "role":
                                has_text = True
                    if ids:
                        if type(ids) is not list or (reason is None and delta is not None and not delta):
                            raise _Odd
                        for token_id in ids:
                            if type(token_id) is not int:
                                raise _Odd
                    is_opening = reason is None and not ids and not has_text
                    if (
                        choice.get("stop_reason") == "recomputed"
                        or choice.get("index", 0) != 0
                        or of_all
                        or is_finished
                        or choice.get("logprobs") is not None
                        or (is_opening and (delta is None or "role" not in delta or parts or held))
                    ):
                        raise _Odd
                    is_finished = reason is not None
                elif (
                    payload.get("error")
                    or not (type(of_all) is dict and of_all)
                    or not is_finished
                    or usage is not None
                ):
                    raise _Odd
                else:
                    attempt = self._attempt
                    usage = of_all
                    if attempt.kv_handed_over:
                        usage = with_prompt_details(of_all, attempt.timeline.usage.prompt_details)
                    if self._include_usage:
                        payload["usage"] = usage
                        output.append(_BEGIN + shown + _END if usage is of_all else data_event(payload))
                    continue
            except _ODD_SHAPES:
                raise _Odd from None
            raw = _BEGIN + (without_token_ids(shown) if self._hides_ids else shown) + _END
            if is_opening:
                held = raw
                continue
            parts += 1
            if not self._is_short:
                taken.append((choice, shown, told))
            if held:
                raw, held = held + raw, b""
            output.append(raw)
        if (self._is_short and parts > _MOST_PARTS and not is_finished) or (
            is_done and (not is_finished or usage is None)
        ):
            raise _Odd
        attempt = self._attempt
        if parts and not self._parts:
            attempt.kv_arrived()
            self._owner.first_output()
            if not is_done:
                attempt.response.limit_silence(self._idle_seconds)
        if is_done:
            self._is_whole = attempt.response.is_whole
            if not self._is_whole:
                attempt.response.limit_silence(END_MARK_SECONDS)
        written = b"".join(output)
        if not self._parts or self._is_short or is_finished:
            self.seen.append(data)
            if not self._is_whole:
                self.sent_bytes += len(written)
        if taken and not is_done:
            self._note(taken)
        self._parts, self._is_finished, self._is_done, self._has_prompt = parts, is_finished, is_done, has_prompt
        self._held, self.usage = held, usage
        return written

    def _note(self, parts: list[_Part]) -> None:
        """Take them into the transcript, and learn from them what the next ones look like."""
        shapes = self._shapes
        if shapes is None:
            shapes = self._shapes = TokenShapes()
            if self._watching.is_close:
                transcript = self.transcript = Transcript(self._watching.engine.reasoning_field)
                ids = transcript.prompt_ids = self._prompt_ids
                if ids is not None and self._hides_ids:  # they are as long as the prompt: once is enough
                    self.seen = [b"".join(self.seen).replace(PROMPT_IDS[:-1] + ids, _NO_PROMPT_IDS, 1)]
            self._prompt_ids = None
        for choice, raw, told in parts:
            if self.transcript is not None:
                self.transcript.take(choice, choice.get("token_ids"))
            is_token = choice.get("finish_reason") is None
            shapes.learn(_BEGIN + raw + _END, is_token=is_token, is_whole=raw is told)


def _opening(event: bytes, following: bytes) -> tuple[bytes, bytes | None] | None:
    """The first event without the prompt's ids, and these as a JSON array, if its bytes are those of a usual role
    chunk. None: it has to be read.

    It is JSON if the event behind it is, which will be read: what both begin with is flat, so `choices` is a member of
    the object itself. In a string its quotes would be escaped.
    """
    common, opening, rest = event.partition(_OPENING)
    if not opening or not following.startswith(common + _CHOICES) or _BRACKET in common or _BRACE in common[1:]:
        return None
    if rest == b"}":
        return event, None
    if rest[: len(_PROMPT)] != _PROMPT or rest.find(b"]") != len(rest) - 2 or rest[-1:] != b"}" or _LF in rest:
        return None
    return common + _OPENING_WITHOUT_IDS, rest[len(_PROMPT) - 1 : -1]
