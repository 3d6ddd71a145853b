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
from proxy.wire.engine_members import has_engine_members, remove_engine_members, without_engine_members
from proxy.wire.finish import WHOLE
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
_MOST_BEGUN_BYTES: Final = 16 * 1024 * 1024
"""Of reads that are kept until all of the prompt's ids are there."""
_BEGIN: Final = b"data: "
_END: Final = b"\n\n"
"""Of an event that is one line of data."""
_LF, _CR, _BRACKET, _BRACE = b"\n\r[{"
_END_OF_IDS: Final = b"]"
_NO_IDS: Final = b"null"
_CHOICES: Final = b',"choices":['
_OPENING: Final = _CHOICES + (
    b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
)
"""What vLLM's role chunks say behind the members that all chunks of an answer have in common."""
_OPENING_ENDS: Final = (b"}", b',"prompt_token_ids":null}')
"""What may stand behind that, the prompt's ids taken out."""
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
        *("_begun", "_held", "_parts", "_prompt_ids"),
        *("_is_finished", "_is_done", "_is_whole", "_has_prompt"),
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
        self._begun: list[bytes] = []
        """Reads that end amid the prompt's ids, which are as long as the prompt."""
        self._held = b""
        """The role chunk, until there is a part of the answer."""
        self._parts = 0
        self._prompt_ids: tuple[int, int] | None = None
        """Where the token ids of the prompt, a JSON array, begin and end in all that is in `seen`."""
        self._is_finished = self._is_done = self._is_whole = self._has_prompt = False

    # Sink

    def received(self, data: bytes) -> bool:
        if self._relay is not None:
            return self._relay.received(data)
        if self._is_bypassed:
            assert self._shapes is not None
            self._look_back(self.clock, self._shapes)
        before = self._parts
        reads = [data]
        if not self._has_prompt and (self._begun or data[-2:] != _END) and not self._has_begun(reads):
            return False
        try:
            output = self._read(reads)
        except _Odd:
            relay = self._leave()
            self._attempt.response.pass_on(None)  # before it has read this nothing can bypass it
            return relay.received(b"".join(reads))
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
            relay = self._leave()
            if self._begun:
                relay.received(b"".join(self._begun))
            relay.ended(error)

    # How

    def _has_begun(self, reads: list[bytes]) -> bool:
        """Whether there is something to read, which `reads` is then. False: it ends amid the prompt's ids, and is kept
        until all of them are there.
        """
        begun = self._begun
        (data,) = reads
        if not begun:
            at = data.find(PROMPT_IDS, 0, _MOST_BYTES)
            if at < 0 or data.find(_END_OF_IDS, at) >= 0:
                return True
        begun.append(data)
        if len(begun) == 1 or (_END_OF_IDS not in data and sum(map(len, begun)) < _MOST_BEGUN_BYTES):
            return False
        reads[:] = begun
        begun.clear()
        return True

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

    def _read(self, reads: list[bytes]) -> bytes:
        """What the client gets of whole events. `reads`: one, or several of which the first ends amid the prompt's ids
        and the last begins there. Raises _Odd, and then nothing has happened.

        One function for all of them, as each function that is called costs more than what it does.
        """
        first, last = reads[0], reads[-1]
        if self._is_done or first[:6] != _BEGIN or last[-2:] != _END:
            raise _Odd
        for data in reads:
            if _CR in data:
                raise _Odd
        parts, is_finished, has_prompt = self._parts, self._is_finished, self._has_prompt
        held, usage = self._held, self.usage
        output: list[bytes] = []
        taken: list[_Part] = []
        ids_at, ids_end, short = -1, 0, first
        if not has_prompt and (ids_at := first.find(PROMPT_IDS)) >= 0:  # cut out unparsed, see Segment
            ids_at += len(PROMPT_IDS) - 1
            ids_end = last.find(_END_OF_IDS, ids_at if last is first else 0) + 1
            if not ids_end:
                raise _Odd
            for data in reads:
                begin, end = ids_at if data is first else 0, ids_end if data is last else len(data)
                if data.find(_LF, begin, end) >= 0:  # the array is of one event, and that of one line
                    raise _Odd
            short = first[:ids_at] + _NO_IDS + last[ids_end:]
            has_prompt = True
        events = all_shown = short[6:-2].split(_END + _BEGIN)
        if ids_end and not self._hides_ids:
            all_shown = b"".join(reads)[6:-2].split(_END + _BEGIN)
        is_done = events[-1] == DONE
        count = len(events) - is_done
        begin = 0
        if not parts and not held and count > 1 and _is_opening(events[0], events[1]):
            held, begin = _BEGIN + all_shown[0] + _END, 1
        for place in range(begin, count):
            told, shown = events[place], all_shown[place]
            if _LF in told or len(told) > _MOST_BYTES:  # more than one line, or long
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
                            if type(token_id) is not int or token_id >> 32:  # of 32 bits and no sign
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
                    if is_finished and reason not in WHOLE:
                        raise _Odd
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
                        if has_engine_members(payload):
                            shown = without_engine_members(shown)
                            remove_engine_members(payload)
                        payload["usage"] = usage
                        output.append(_BEGIN + shown + _END if usage is of_all else data_event(payload))
                    continue
            except _ODD_SHAPES:
                raise _Odd from None
            seen = without_token_ids(shown) if self._hides_ids else shown
            if has_engine_members(payload):
                seen = without_engine_members(seen)
            raw = _BEGIN + seen + _END
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
                attempt.response.limit_silence(self._idle_seconds, True)
        if is_done:
            self._is_whole = attempt.response.is_whole
            if not self._is_whole:
                attempt.response.limit_silence(END_MARK_SECONDS)
        written = b"".join(output)
        if not self._parts or self._is_short or is_finished:
            if ids_end:
                before_bytes = sum(map(len, self.seen))
                end = before_bytes + ids_end + sum(map(len, reads[:-1]))
                self._prompt_ids = before_bytes + ids_at, end
            self.seen += reads
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
                self.transcript = Transcript(self._watching.engine.reasoning_field)
                if self._prompt_ids is not None:
                    begin, end = self._prompt_ids
                    seen = b"".join(self.seen)
                    self.transcript.prompt_ids = seen[begin:end]
                    if self._hides_ids:  # they are as long as the prompt: once is enough
                        self.seen = [seen[:begin] + _NO_IDS + seen[end:]]
        for choice, raw, told in parts:
            if self.transcript is not None:
                self.transcript.take(choice, choice.get("token_ids"))
            is_token = choice.get("finish_reason") is None
            shapes.learn(_BEGIN + raw + _END, is_token=is_token, is_whole=raw is told or raw == told)


def _is_opening(event: bytes, following: bytes) -> bool:
    """Whether the first event has the bytes of a usual role chunk, the prompt's ids taken out; if not, it must be read.

    It is JSON if the event behind it is, which will be read: what both begin with is flat, so `choices` is a member of
    the object itself. In a string its quotes would be escaped.
    """
    common, opening, rest = event.partition(_OPENING)
    return (
        bool(opening)
        and rest in _OPENING_ENDS
        and following.startswith(common + _CHOICES)
        and _BRACKET not in common
        and _BRACE not in common[1:]
    )
