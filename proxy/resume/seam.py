"""Joins the stream of another decoder to the client's stream. The client does not notice the change of decoder. No IO.

The client gets one id, one role chunk, one finish reason and one usage. StopGuard finds stop strings that begin before
the seam and end after it. The other functions change the last chunk of a decoder that gave up for lack of KV memory:
its text counts, its finish reason does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proxy.resume.engines import VLLM, Engine
from proxy.resume.overlap import TEXT_MEMBERS, AnswerMismatch, ReplayedAnswer, count_repeated_ids
from proxy.wire.openai import Api, read_usage_counts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.dialects.call import Call
    from proxy.resume.chat_as_completion import CompletionToChat
    from proxy.resume.transcript import Transcript


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SeamPlan:
    """The client's stream, the stream that continues its answer, and how a Seam joins the two."""

    api: Api
    """The API of the client whose stream continues."""
    answer_head: Mapping[str, Any]
    """The members that all chunks of the client's stream have in common."""
    transcript: Transcript
    """The client's answer so far."""
    kept_ids: int = 0
    """The number of the answer's token ids that the engine got as part of its prompt."""
    pending_delta: Mapping[str, Any] | None = None
    """A chat delta that belongs to the kept ids and that the client does not have yet; None if there is none.

    In completions, `content` is the text.
    """
    channel: str = "content"
    """The member of the delta in which the answer broke off."""
    stop_guard: StopGuard | None = None
    """Looks for stop strings in the text of `channel`; None if no stop string can lie across the seam."""
    deferred_text: str = ""
    """White space that is shown only if more text of `channel` follows."""
    defers_blanks: bool = False
    """Whether an engine shows white space in `channel` only if more text of it follows."""
    swallowed_ids: Sequence[int] = ()
    """Token ids that the client has seen and that the engine generates again."""
    known_text: str = ""
    """Text that the client has seen and that the engine generates again."""
    chat_translator: CompletionToChat | None = None
    """Converts a completion's stream to a chat's stream; None if the stream already has the client's format."""
    text_offset: int | None = None
    """Offset in the text at which the log probabilities of a completion continue; None: the end of the text."""
    replays_answer: bool = False
    """Whether the stream repeats the answer from its beginning."""
    engine: Engine = VLLM
    """The engine software that writes the stream."""


class Seam:
    """Rewrites the chunks of a stream that continues an answer. Each continuation has its own Seam."""

    def __init__(self, plan: SeamPlan) -> None:
        self.reads_completion = plan.chat_translator is not None
        """Whether the stream is a completion's, even if the client asked for a chat."""
        self.is_stopped = False
        """Whether a stop string was found across the seam. The answer then ends, even if the engine sends more."""
        transcript, guard = plan.transcript, plan.stop_guard
        self._api = plan.api
        self._answer_head = plan.answer_head
        self._kept_ids = plan.kept_ids
        self._kept_reasoning_ids = transcript.count_reasoning_among(plan.kept_ids)
        if guard is not None and plan.channel == "content":
            held = guard.withheld_text
        else:
            held = (plan.pending_delta or {}).get("content", "")
        shown = len(transcript.content_text) + len(held) if plan.text_offset is None else plan.text_offset
        self._text_offset = 0 if plan.replays_answer or not plan.engine.reports_offsets else shown
        self._pending_delta = plan.pending_delta
        self._stop_guard = guard
        self._deferred_text = plan.deferred_text
        self._defers_blanks = plan.defers_blanks
        self._blanks_after_guard = ""
        """White space that the guard has shown and that is shown only if more text of the channel follows."""
        self._channel = plan.channel
        self.swallowed_ids = list(plan.swallowed_ids)
        """Token ids that the client has seen and that the engine has not repeated yet."""
        self._chat_translator = plan.chat_translator
        self._overlap = ReplayedAnswer(transcript) if plan.replays_answer else None
        self._known_text = plan.known_text
        self._engine = plan.engine

    def rewrite_chunk(self, payload: dict[str, Any], *, recomputed: bool) -> list[tuple[dict[str, Any], list[int]]]:
        """Convert one chunk of the engine to chunks for the client. Each is returned with its new token ids.

        `recomputed`: whether the engine gives up with this chunk. Raises AnswerMismatch.
        """
        choice = dict(payload["choices"][0])
        ids: list[int] = choice.get("token_ids") or []
        if self._chat_translator is None:
            delta = dict(choice.get("delta") or {}) if self._api is Api.CHAT else {"content": choice.get("text") or ""}
            delta.pop("role", None)
            if recomputed:
                delta.pop("tool_calls", None)  # what closes them may be made up
        else:
            delta = self._chat_translator.make_chat_delta(
                choice, is_last=choice.get("finish_reason") is not None and not recomputed
            )
        _shift_offsets(choice.get("logprobs"), self._text_offset)
        seen = count_repeated_ids(ids, self.swallowed_ids if self._overlap is None else self._overlap.ids)
        if self._overlap is not None:
            delta = self._overlap.cut_repeated_part(delta)
            ids = ids[seen:]
            if choice.get("finish_reason") is not None and not recomputed and not self._overlap.is_exhausted:
                raise AnswerMismatch
        if seen:
            choice["logprobs"] = _without_first_logprobs(choice.get("logprobs"), seen)
            choice["token_ids"] = (choice.get("token_ids") or [])[seen:]
        if self._known_text:
            self._skip_known_text(delta, is_last=choice.get("finish_reason") is not None)
        if self._deferred_text and delta:
            if text := delta.get(self._channel):
                delta[self._channel] = self._deferred_text + text
            self._deferred_text = ""
        chunks: list[tuple[dict[str, Any], list[int]]] = []
        if self._stop_guard is not None:
            self._apply_stop_guard(self._stop_guard, choice, delta, len(ids))
            if self._defers_blanks:
                self._defer_blanks(delta, is_guarded=True)
        elif self._blanks_after_guard:
            self._defer_blanks(delta, is_guarded=False)
        if self._pending_delta:
            chunks.append((self._make_chunk(payload, self._without_token_members(choice), self._pending_delta), []))
            self._pending_delta = None
        chunks.append((self._make_chunk(payload, choice, delta), ids))
        return chunks

    @property
    def withheld_text(self) -> str:
        """The text that the guard still holds back."""
        return "" if self._stop_guard is None else self._stop_guard.withheld_text

    def make_ending_chunks(self) -> list[tuple[dict[str, Any], list[int]]]:
        """Return the last chunks of an answer that ends because the engine's context has no room for more tokens."""
        self._known_text = ""
        text: dict[str, Any] = {"text": ""} if self._api is not Api.CHAT or self._chat_translator else {"delta": {}}
        choice = {"index": 0, **text, "logprobs": None, "finish_reason": "length", self._engine.stop_member: None}
        return self.rewrite_chunk({"choices": [choice]}, recomputed=False)

    def count_whole_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the usage of the whole answer. The engine counted a part of the answer as prompt."""
        tokens = read_usage_counts(usage)
        corrected = {
            **usage,
            "prompt_tokens": (tokens.prompt_tokens or 0) - self._kept_ids,
            "completion_tokens": (tokens.completion_tokens or 0) + self._kept_ids,
        }
        if tokens.reasoning_tokens is not None:
            details = {
                **usage["completion_tokens_details"],
                "reasoning_tokens": tokens.reasoning_tokens + self._kept_reasoning_ids,
            }
            corrected["completion_tokens_details"] = details
        return corrected

    def _make_chunk(self, payload: dict[str, Any], choice: dict[str, Any], delta: Mapping[str, Any]) -> dict[str, Any]:
        if self._api is Api.CHAT:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        chunk = {**payload, **self._answer_head, "choices": [choice]}
        if isinstance(payload.get("usage"), dict) and payload["usage"]:
            chunk["usage"] = self.count_whole_usage(payload["usage"])
        elif self._chat_translator is not None:
            chunk.pop("usage", None)  # which old engines write as null in a completion, and not in a chat
        return chunk

    def _without_token_members(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a choice without the members that describe its tokens."""
        bare = {**choice, "logprobs": None, "finish_reason": None}
        bare.pop(self._engine.stop_member, None)
        if self._engine.always_reports_stop:
            bare[self._engine.stop_member] = None
        if "token_ids" in bare:
            bare["token_ids"] = []
        return bare

    def _skip_known_text(self, delta: dict[str, Any], *, is_last: bool) -> None:
        """Remove from a delta the text that the client already has.

        Raises AnswerMismatch if the engine's text differs or ends too early.
        """
        text = delta.get(self._channel) or ""
        count = min(len(text), len(self._known_text))
        if text[:count] != self._known_text[:count] or (is_last and count < len(self._known_text)):
            raise AnswerMismatch
        self._known_text = self._known_text[count:]
        if count:
            delta[self._channel] = text[count:]

    def _defer_blanks(self, delta: dict[str, Any], *, is_guarded: bool) -> None:
        """Show white space before a stop string as the engine does, which has not seen the text before the seam.

        `is_guarded`: whether the text comes from the guard, and not from an engine that defers white space itself.
        """
        if text := delta.get(self._channel):
            text = self._blanks_after_guard + text
            shown = text.rstrip() if is_guarded else text
            self._blanks_after_guard = text[len(shown) :]
            delta[self._channel] = shown
            if not shown:
                del delta[self._channel]
        elif delta:
            self._blanks_after_guard = ""

    def _apply_stop_guard(self, guard: StopGuard, choice: dict[str, Any], delta: dict[str, Any], tokens: int) -> None:
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
        if guard.is_finished:
            self._stop_guard = None


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
    missing = max(map(len, call.stop_strings), default=1) - 1
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
        self._longest_stop = max(map(len, stops))
        self._examined_text = before + held
        self._seam_position = len(self._examined_text) + late
        self._sent_length = len(before)
        self._unstoppable_tokens = -1 if tokens_to_minimum is None else tokens_to_minimum
        # A stop string that ends before this position does not count. Without a minimum such a one was written by two
        # engines, and the gateway has not seen its end yet.
        self._earliest_end = self._sent_length
        if tokens_to_minimum is not None:
            self._earliest_end = self._seam_position if tokens_to_minimum < 0 else len(self._examined_text)
        self._text_lag = 0
        self._shows_stop = shows_stop
        self.is_finished = False

    @property
    def withheld_text(self) -> str:
        """The text that is held back because it may begin a stop string."""
        return "" if self.is_finished else self._examined_text[self._sent_length :]

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
        self._examined_text += text
        self._unstoppable_tokens -= tokens
        if self._unstoppable_tokens >= 0:
            # The engine keeps back that much of its text, which has at least one character per token.
            self._text_lag = min(self._longest_stop - 1, self._text_lag + tokens)
            self._earliest_end = len(self._examined_text) + (0 if self._shows_stop else self._text_lag)
        if (found := self._find_stop(own_stop)) is not None:
            begin, end, stop = found
            self.is_finished = True
            return self._examined_text[self._sent_length : end if self._shows_stop else begin], stop
        if is_last or len(self._examined_text) - self._seam_position >= self._longest_stop - 1:
            self.is_finished = True
            return self._examined_text[self._sent_length :], None
        shown_to = (
            len(self._examined_text)
            if self._shows_stop
            else max(self._sent_length, len(self._examined_text) - self._longest_stop + 1)
        )
        shown, self._sent_length = self._examined_text[self._sent_length : shown_to], shown_to
        return shown, None

    def _find_stop(self, own_stop: str | None) -> tuple[int, int, str] | None:
        """Return the position of the first complete stop string across the seam, or None.

        Of several, return the first in the list (`check_stop_strings`).
        """
        text = self._examined_text if own_stop is None or self._shows_stop else self._examined_text + own_stop
        found = []
        for rank, stop in enumerate(self._stops):
            begin = text.find(stop, max(0, self._earliest_end - len(stop) + 1))
            if 0 <= begin < self._seam_position:
                found.append((begin + len(stop), rank, begin, stop))
        if own_stop is not None and own_stop in self._stops:
            found.append((len(text), self._stops.index(own_stop), -1, own_stop))
        end, _, begin, stop = min(found, default=(0, 0, -1, ""))
        return None if begin < 0 else (begin, end, stop)
