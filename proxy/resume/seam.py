"""Joins the stream of another decoder to the client's stream. The client does not notice the change of decoder. No IO.

The client gets one id, one role chunk, one finish reason and one usage. StopGuard finds stop strings that begin before
the seam and end after it. The other functions change the last chunk of a decoder that gave up for lack of KV memory:
its text counts, its finish reason does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proxy.resume.engines import VLLM
from proxy.resume.overlap import TEXT_MEMBERS, AnswerMismatch, ReplayedAnswer, count_repeated_ids
from proxy.wire.openai import Api, read_usage_counts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.dialects.call import Call
    from proxy.resume.chat_as_completion import CompletionToChat
    from proxy.resume.engines import Engine
    from proxy.resume.transcript import Transcript


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SeamPlan:
    """The client's stream, the stream that continues its answer, and how a Seam joins the two."""

    api: Api
    """The API of the client whose stream continues."""
    head: Mapping[str, Any]
    """The members that all chunks of the client's stream have in common."""
    transcript: Transcript
    """The client's answer so far."""
    kept: int = 0
    """The number of the answer's token ids that the engine got as part of its prompt."""
    pending: Mapping[str, Any] | None = None
    """A chat delta that belongs to the kept ids and that the client does not have yet; None if there is none.

    In completions, `content` is the text.
    """
    channel: str = "content"
    """The member of the delta in which the answer broke off."""
    guard: StopGuard | None = None
    """Looks for stop strings in the text of `channel`; None if no stop string can lie across the seam."""
    deferred: str = ""
    """White space that is shown only if more text of `channel` follows."""
    swallowed: Sequence[int] = ()
    """Token ids that the client has seen and that the engine generates again."""
    known: str = ""
    """Text that the client has seen and that the engine generates again."""
    as_chat: CompletionToChat | None = None
    """Converts a completion's stream to a chat's stream; None if the stream already has the client's format."""
    text_offset: int | None = None
    """Offset in the text at which the log probabilities of a completion continue; None: the end of the text."""
    replays: bool = False
    """Whether the stream repeats the answer from its beginning."""
    engine: Engine = VLLM
    """The engine software that writes the stream."""


class Seam:
    """Rewrites the chunks of a stream that continues an answer. Each continuation has its own Seam."""

    def __init__(self, plan: SeamPlan) -> None:
        self.reads_completion = plan.as_chat is not None
        """Whether the stream is a completion's, even if the client asked for a chat."""
        self.is_stopped = False
        """Whether a stop string was found across the seam. The answer then ends, even if the engine sends more."""
        transcript, guard = plan.transcript, plan.guard
        self._api = plan.api
        self._head = plan.head
        self._kept = plan.kept
        self._kept_reasoning = transcript.reasoning_among(plan.kept)
        if guard is not None and plan.channel == "content":
            held = guard.withheld_text
        else:
            held = (plan.pending or {}).get("content", "")
        shown = len(transcript.content) + len(held) if plan.text_offset is None else plan.text_offset
        self._text_offset = 0 if plan.replays or not plan.engine.reports_offsets else shown
        self._pending = plan.pending
        self._guard = guard
        self._deferred = plan.deferred
        self._channel = plan.channel
        self.swallowed = list(plan.swallowed)
        """Token ids that the client has seen and that the engine has not repeated yet."""
        self._as_chat = plan.as_chat
        self._overlap = ReplayedAnswer(transcript) if plan.replays else None
        self._known = plan.known
        self._engine = plan.engine

    def rewrite(self, payload: dict[str, Any], *, recomputed: bool) -> list[tuple[dict[str, Any], list[int]]]:
        """Convert one chunk of the engine to chunks for the client. Each is returned with its new token ids.

        `recomputed`: whether the engine gives up with this chunk. Raises Mismatch.
        """
        choice = dict(payload["choices"][0])
        ids: list[int] = choice.get("token_ids") or []
        if self._as_chat is None:
            delta = dict(choice.get("delta") or {}) if self._api is Api.CHAT else {"content": choice.get("text") or ""}
            delta.pop("role", None)
            if recomputed:
                delta.pop("tool_calls", None)  # what closes them may be made up
        else:
            delta = self._as_chat.delta(choice, is_last=choice.get("finish_reason") is not None and not recomputed)
        _shift_offsets(choice.get("logprobs"), self._text_offset)
        seen = count_repeated_ids(ids, self.swallowed if self._overlap is None else self._overlap.ids)
        if self._overlap is not None:
            delta = self._overlap.new_part(delta)
            ids = ids[seen:]
            if choice.get("finish_reason") is not None and not recomputed and not self._overlap.is_exhausted:
                raise AnswerMismatch
        if seen:
            choice["logprobs"] = _without_first_logprobs(choice.get("logprobs"), seen)
            choice["token_ids"] = (choice.get("token_ids") or [])[seen:]
        if self._known:
            self._skip_known(delta, is_last=choice.get("finish_reason") is not None)
        if self._deferred and delta:
            if text := delta.get(self._channel):
                delta[self._channel] = self._deferred + text
            self._deferred = ""
        chunks: list[tuple[dict[str, Any], list[int]]] = []
        if self._guard is not None:
            self._guard_stop(self._guard, choice, delta, len(ids))
        if self._pending:
            chunks.append((self._chunk(payload, self._without_token_members(choice), self._pending), []))
            self._pending = None
        chunks.append((self._chunk(payload, choice, delta), ids))
        return chunks

    @property
    def withheld_text(self) -> str:
        """The text that the guard still holds back."""
        return "" if self._guard is None else self._guard.withheld_text

    def make_ending_chunks(self) -> list[tuple[dict[str, Any], list[int]]]:
        """Return the last chunks of an answer that ends because the engine's context has no room for more tokens."""
        self._known = ""
        text: dict[str, Any] = {"text": ""} if self._api is not Api.CHAT or self._as_chat else {"delta": {}}
        choice = {"index": 0, **text, "logprobs": None, "finish_reason": "length", self._engine.stop_member: None}
        return self.rewrite({"choices": [choice]}, recomputed=False)

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the usage of the whole answer. The engine counted a part of the answer as prompt."""
        tokens = read_usage_counts(usage)
        corrected = {
            **usage,
            "prompt_tokens": (tokens.prompt or 0) - self._kept,
            "completion_tokens": (tokens.completion or 0) + self._kept,
        }
        if tokens.reasoning is not None:
            details = {
                **usage["completion_tokens_details"],
                "reasoning_tokens": tokens.reasoning + self._kept_reasoning,
            }
            corrected["completion_tokens_details"] = details
        return corrected

    def _chunk(self, payload: dict[str, Any], choice: dict[str, Any], delta: Mapping[str, Any]) -> dict[str, Any]:
        if self._api is Api.CHAT:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        chunk = {**payload, **self._head, "choices": [choice]}
        if isinstance(payload.get("usage"), dict) and payload["usage"]:
            chunk["usage"] = self.usage(payload["usage"])
        elif self._as_chat is not None:
            chunk.pop("usage", None)  # which old engines write as null in a completion, and not in a chat
        return chunk

    def _without_token_members(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a choice without the members that describe its tokens."""
        bare = {**choice, "logprobs": None, "finish_reason": None}
        bare.pop(self._engine.stop_member, None)
        if self._engine.names_stop_always:
            bare[self._engine.stop_member] = None
        if "token_ids" in bare:
            bare["token_ids"] = []
        return bare

    def _skip_known(self, delta: dict[str, Any], *, is_last: bool) -> None:
        """Remove from a delta the text that the client already has.

        Raises Mismatch if the engine's text differs or ends too early.
        """
        text = delta.get(self._channel) or ""
        count = min(len(text), len(self._known))
        if text[:count] != self._known[:count] or (is_last and count < len(self._known)):
            raise AnswerMismatch
        self._known = self._known[count:]
        if count:
            delta[self._channel] = text[count:]

    def _guard_stop(self, guard: StopGuard, choice: dict[str, Any], delta: dict[str, Any], tokens: int) -> None:
        is_last = choice.get("finish_reason") is not None or any(
            delta.get(name) for name in (*TEXT_MEMBERS, "tool_calls") if name != self._channel
        )
        text = delta.get(self._channel) or ""
        own_stop = choice.get(self._engine.stop_member)
        own_stop = own_stop if isinstance(own_stop, str) else None
        text, stop = guard.add_text(text, tokens=tokens, is_last=is_last, own_stop=own_stop)
        if stop is not None:
            self.is_stopped = True
            delta.clear()
            choice["finish_reason"], choice[self._engine.stop_member] = "stop", stop
        delta[self._channel] = text
        if not text:
            del delta[self._channel]
        if guard.is_done:
            self._guard = None


def _shift_offsets(logprobs: Any, offset: int) -> None:
    if offset and isinstance(logprobs, dict) and logprobs.get("text_offset"):
        logprobs["text_offset"] = [position + offset for position in logprobs["text_offset"]]


def _without_first_logprobs(logprobs: Any, count: int) -> Any:
    """Return log probabilities without the first `count` tokens. Their lists have one entry for each token."""
    if not isinstance(logprobs, dict):
        return logprobs
    return {name: value[count:] if isinstance(value, list) else value for name, value in logprobs.items()}


def split_off_finish_reason(payload: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a copy of a payload without a finish reason, and its only choice."""
    choice = {**payload["choices"][0], "finish_reason": None}
    choice.pop("stop_reason", None)
    return {**payload, "choices": [choice]}, choice


def remove_tool_calls(choice: dict[str, Any]) -> None:
    """Remove the tool calls from the choice of a chat.

    Old parsers invent the end of the arguments (vLLM 0.18, `chat_completion/serving.py`).
    """
    if "delta" in choice:
        choice["delta"] = {name: value for name, value in choice["delta"].items() if name != "tool_calls"}


def remove_possible_stop(choices: Sequence[dict[str, Any]], call: Call) -> None:
    """Remove the end of the text that may be the beginning of a stop string.

    The engine held it back until it gave up.
    """
    if call.values.get("include_stop_str_in_output"):
        return
    missing = max(map(len, call.stops), default=1) - 1
    for choice in reversed(choices):
        fields = choice.get("delta", choice)
        name = next((name for name in ("text", "content", "reasoning", "reasoning_content") if fields.get(name)), "")
        if name and missing:
            cut = max(0, len(fields[name]) - missing)
            missing -= len(fields[name]) - cut
            fields[name] = fields[name][:cut]


class StopGuard:
    """Looks for stop strings that begin before the seam and end after it.

    An engine holds back text that may be the beginning of a stop string, but the next engine has never seen that text.
    So the gateway holds it back until the new text shows whether it is one.
    """

    def __init__(
        self,
        stops: Sequence[str],
        held: str,
        *,
        late: int = 0,
        before: str = "",
        shows_stop: bool = False,
        tokens_to_minimum: int | None = None,
    ) -> None:
        """Store the state of the stop strings at the seam.

        Args:
            stops: The stop strings.
            held: The text before the seam that the client does not have.
            late: The number of characters of this text that arrive with the first new text.
            before: The client's text in which a stop string may begin. Needed only with `shows_stop`.
            shows_stop: Whether the stop string is a part of the answer.
            tokens_to_minimum: The number of tokens that the answer still needs to reach its minimum; stop strings do
                not count before. Negative if it has more; None if there is no minimum.
        """
        self._stops = stops
        self._longest = max(map(len, stops))
        self._text = before + held
        self._seam = len(self._text) + late
        self._sent = len(before)
        self._unstoppable_tokens = -1 if tokens_to_minimum is None else tokens_to_minimum
        # A stop string that ends before this position does not count. Without a minimum such a one was written by two
        # engines, and the gateway has not seen its end yet.
        self._had = self._sent
        if tokens_to_minimum is not None:
            self._had = self._seam if tokens_to_minimum < 0 else len(self._text)
        self._lag = 0
        self._shows_stop = shows_stop
        self.is_done = False

    @property
    def withheld_text(self) -> str:
        """The text that is held back because it may begin a stop string."""
        return "" if self.is_done else self._text[self._sent :]

    def add_text(
        self, text: str, *, tokens: int = 0, is_last: bool, own_stop: str | None = None
    ) -> tuple[str, str | None]:
        """Add new text of the answer. Return the text to show, and the stop string across the seam, or None.

        After a stop string, or after the last text, the guard is done.

        Args:
            text: The new text.
            tokens: The number of tokens of the new text.
            is_last: Whether the answer ends with this text.
            own_stop: The stop string at which the engine ended; None if there is none.
        """
        self._text += text
        self._unstoppable_tokens -= tokens
        if self._unstoppable_tokens >= 0:
            # The engine keeps back that much of its text, which has at least one character per token.
            self._lag = min(self._longest - 1, self._lag + tokens)
            self._had = len(self._text) + (0 if self._shows_stop else self._lag)
        if (found := self._find(own_stop)) is not None:
            begin, end, stop = found
            self.is_done = True
            return self._text[self._sent : end if self._shows_stop else begin], stop
        if is_last or len(self._text) - self._seam >= self._longest - 1:
            self.is_done = True
            return self._text[self._sent :], None
        shown_to = len(self._text) if self._shows_stop else max(self._sent, len(self._text) - self._longest + 1)
        shown, self._sent = self._text[self._sent : shown_to], shown_to
        return shown, None

    def _find(self, own_stop: str | None) -> tuple[int, int, str] | None:
        """Return the position of the first complete stop string across the seam, or None.

        Of several, return the first in the list (`check_stop_strings`).
        """
        text = self._text if own_stop is None or self._shows_stop else self._text + own_stop
        found = []
        for rank, stop in enumerate(self._stops):
            begin = text.find(stop, max(0, self._had - len(stop) + 1))
            if 0 <= begin < self._seam:
                found.append((begin + len(stop), rank, begin, stop))
        if own_stop is not None and own_stop in self._stops:
            found.append((len(text), self._stops.index(own_stop), -1, own_stop))
        end, _, begin, stop = min(found, default=(0, 0, -1, ""))
        return None if begin < 0 else (begin, end, stop)
