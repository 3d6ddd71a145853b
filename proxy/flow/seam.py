"""The seam: how the stream of another decoder goes on in the client's stream without a trace. No IO.

One id, one role chunk, one finish, one usage: the chunks of a continuing stream are rewritten as those of the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.wire.openai import Api

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from proxy.dialects.grammars.base import Parser
    from proxy.flow.transcript import Transcript

_TEXTS: Final = ("reasoning", "reasoning_content", "content")


class Mismatch(Exception):
    """The decoder's stream is not the continuation of what the client has."""


class StopGuard:
    """Looks for stop strings that begin before the seam and end behind it.

    An engine keeps back text that may be the beginning of a stop string, but the engine that goes on has never seen it.
    So the gateway keeps it back in its stead until the new text tells. `held`: the text before the seam that the client
    does not have; `late`: how much of it comes with the first new text. `before`: what the client has and a stop string
    may begin in, only if the stop string itself is to be shown. `has_least`: the answer has a least length, and a stop
    string that is complete before the seam came before that.
    """

    def __init__(
        self,
        stops: Sequence[str],
        held: str,
        *,
        late: int = 0,
        before: str = "",
        shows_stop: bool = False,
        has_least: bool = False,
    ) -> None:
        self._stops = stops
        self._longest = max(map(len, stops))
        self._text = before + held
        self._seam = len(self._text) + late
        self._sent = len(before)
        # Without one it was written by two engines, and the gateway has not seen the end of it.
        self._had = self._seam if has_least else self._sent
        self._lag = 0
        self._shows_stop = shows_stop
        self.is_done = False

    @property
    def unsent(self) -> str:
        """What is kept back now."""
        return "" if self.is_done else self._text[self._sent :]

    def pass_over(self, text: str, tokens: int) -> None:
        """Take text before the answer has its least length: a stop string that is complete by then does not count."""
        self._text += text
        # The engine keeps back as much of what it has generated, which is a character per token at least.
        self._lag = min(self._longest - 1, self._lag + tokens)
        self._had = len(self._text) + (0 if self._shows_stop else self._lag)

    def push(self, text: str, *, is_last: bool, own_stop: str | None = None) -> tuple[str, str | None]:
        """Take new text: what can be shown now, and the stop string if one lies across the seam.

        With that, or with the last text, the guard is done. `own_stop`: the stop string that the engine ended with.
        """
        self._text += text
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
        """The stop string that is complete first, and of several the first in the list (vLLM `check_stop_strings`)."""
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


class Seam:
    """Rewrites what a continuing stream says. One for each continuation.

    `kept`: how many token ids of the answer were given to the engine as part of its prompt. `pending`: a chat delta
    (for completions `content` is the text) that belongs to them and the client does not have yet. `swallowed`: ids that
    the client has seen already and the engine generates once more. `channel`: the member of a delta that the answer
    broke off in; `guard` is for its text, and `deferred` is to be shown if more of it follows at all.
    `unstoppable_tokens`: a stop string may not end within so many; 0: nor at the seam; -1: it may. `parser`:
    the stream is that of a completion and becomes that of a chat, with `top_logprobs` alternatives; `keeps_length`:
    such a chat is finished by length even if it calls tools. `text_offset`: where the log probabilities of a completion
    go on, None: where its text does. `replays`: the stream begins the answer anew.
    """

    def __init__(
        self,
        api: Api,
        head: Mapping[str, Any],
        transcript: Transcript,
        *,
        kept: int,
        pending: Mapping[str, Any] | None = None,
        guard: StopGuard | None = None,
        deferred: str = "",
        channel: str = "content",
        unstoppable_tokens: int = -1,
        swallowed: Sequence[int] = (),
        parser: Parser | None = None,
        top_logprobs: int = 0,
        keeps_length: bool = True,
        text_offset: int | None = None,
        replays: bool = False,
    ) -> None:
        self.is_stopped = False
        """A stop string was found across the seam: the answer ends here, whatever the engine goes on to say."""
        self._api = api
        self._head = head
        self._kept = kept
        self._kept_reasoning = transcript.reasoning_among(kept)
        held = guard.unsent if guard is not None and channel == "content" else (pending or {}).get("content", "")
        shown = len(transcript.content) + len(held) if text_offset is None else text_offset
        self._text_offset = 0 if replays else shown
        self._pending = pending
        self._guard = guard
        self._deferred = deferred
        self._channel = channel
        self._unstoppable_tokens = unstoppable_tokens
        if guard is not None and unstoppable_tokens >= 0:
            guard.pass_over("", 0)
        self.swallowed = list(swallowed)
        """Ids the client has seen that the engine is still to repeat."""
        self._parser = parser
        self._top_logprobs = top_logprobs
        self._keeps_length = keeps_length
        self._calls_tools = bool(transcript.tools) or "tool_calls" in (pending or {})
        self._repeated = _Repeated(transcript) if replays else None

    def rewrite(self, payload: dict[str, Any], *, recomputed: bool) -> list[tuple[dict[str, Any], list[int]]]:
        """The chunks the client gets for one chunk of the engine, each with the ids it adds to the answer.

        `recomputed`: the engine breaks off with this chunk. Raises Mismatch.
        """
        choice = dict(payload["choices"][0])
        ids: list[int] = choice.get("token_ids") or []
        if self._parser is None:
            delta = dict(choice.get("delta") or {}) if self._api is Api.CHAT else {"content": choice.get("text") or ""}
            delta.pop("role", None)
            if recomputed:
                delta.pop("tool_calls", None)  # what closes them may be made up
        else:
            delta = self._parsed(choice, is_last=choice.get("finish_reason") is not None and not recomputed)
        _shift_offsets(choice.get("logprobs"), self._text_offset)
        seen = self._seen(ids)
        if self._repeated is not None:
            delta = self._repeated.beyond(delta)
            ids = ids[seen:]
            if choice.get("finish_reason") is not None and not recomputed and not self._repeated.is_exhausted:
                raise Mismatch
        if seen:
            choice["logprobs"] = _without_first(choice.get("logprobs"), seen)
            choice["token_ids"] = (choice.get("token_ids") or [])[seen:]
        if self._deferred and delta:
            if text := delta.get(self._channel):
                delta[self._channel] = self._deferred + text
            self._deferred = ""
        chunks: list[tuple[dict[str, Any], list[int]]] = []
        if self._guard is not None:
            self._guard_stop(self._guard, choice, delta, len(ids))
        if self._pending:
            chunks.append((self._chunk(payload, _bare(choice), self._pending), []))
            self._pending = None
        chunks.append((self._chunk(payload, choice, delta), ids))
        return chunks

    @property
    def unsent(self) -> str:
        """Text that the guard still keeps back."""
        return "" if self._guard is None else self._guard.unsent

    def ending(self) -> list[tuple[dict[str, Any], list[int]]]:
        """The chunks of an answer that ends here, since there is no room for more."""
        text: dict[str, Any] = {"text": ""} if self._api is Api.COMPLETIONS or self._parser else {"delta": {}}
        choice = {"index": 0, **text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        return self.rewrite({"choices": [choice]}, recomputed=False)

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage of the whole answer; the engine took a part of it for prompt."""
        corrected = {
            **usage,
            "prompt_tokens": (usage.get("prompt_tokens") or 0) - self._kept,
            "completion_tokens": (usage.get("completion_tokens") or 0) + self._kept,
        }
        details = usage.get("completion_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("reasoning_tokens"), int):
            reasoning = details["reasoning_tokens"] + self._kept_reasoning
            corrected["completion_tokens_details"] = {**details, "reasoning_tokens": reasoning}
        return corrected

    def _chunk(self, payload: dict[str, Any], choice: dict[str, Any], delta: Mapping[str, Any]) -> dict[str, Any]:
        if self._api is Api.CHAT:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        chunk = {**payload, **self._head, "choices": [choice]}
        if payload.get("usage"):
            chunk["usage"] = self.usage(payload["usage"])
        elif self._parser is not None:
            chunk.pop("usage", None)  # which old engines write as null in a completion, and not in a chat
        return chunk

    def _parsed(self, choice: dict[str, Any], *, is_last: bool) -> dict[str, Any]:
        """Turn a completion's choice into a chat's; its delta."""
        assert self._parser is not None
        delta = self._parser.feed(choice.pop("text", None) or "", finished=is_last)
        choice.pop("prompt_token_ids", None)
        if choice.get("logprobs") is not None:
            choice["logprobs"] = chat_logprobs(choice["logprobs"], self._top_logprobs)
        self._calls_tools |= "tool_calls" in delta
        hidden = ("stop",) if self._keeps_length else ("stop", "length")
        if choice.get("finish_reason") in hidden and self._calls_tools:
            choice["finish_reason"] = "tool_calls"
        return delta

    def _seen(self, ids: list[int]) -> int:
        """How many of these ids the client has already. Raises Mismatch when they are others."""
        known = self.swallowed if self._repeated is None else self._repeated.ids
        count = min(len(ids), len(known))
        if ids[:count] != known[:count]:
            raise Mismatch
        del known[:count]
        return count

    def _guard_stop(self, guard: StopGuard, choice: dict[str, Any], delta: dict[str, Any], tokens: int) -> None:
        is_last = choice.get("finish_reason") is not None or any(
            delta.get(name) for name in (*_TEXTS, "tool_calls") if name != self._channel
        )
        text = delta.get(self._channel) or ""
        self._unstoppable_tokens -= tokens
        if self._unstoppable_tokens >= 0:
            guard.pass_over(text, tokens)
            text = ""
        own_stop = choice.get("stop_reason")
        own_stop = own_stop if isinstance(own_stop, str) else None
        text, stop = guard.push(text, is_last=is_last, own_stop=own_stop)
        if stop is not None:
            self.is_stopped = True
            delta.clear()
            choice["finish_reason"], choice["stop_reason"] = "stop", stop
        delta[self._channel] = text
        if not text:
            del delta[self._channel]
        if guard.is_done:
            self._guard = None


class _Repeated:
    """What the client has and a stream that begins anew says once more."""

    def __init__(self, transcript: Transcript) -> None:
        self.ids = transcript.ids.tolist()
        self._texts = {transcript.reasoning_field: transcript.reasoning, "content": transcript.content}
        self._arguments = [call.arguments for call in transcript.tools]
        self._headers = [(call.id, call.name) for call in transcript.tools]
        self._calls_left = set(range(len(transcript.tools)))
        self._is_past_reasoning = bool(transcript.content or transcript.tools)

    @property
    def is_exhausted(self) -> bool:
        """All of it was said."""
        return not (any(self._texts.values()) or any(self._arguments) or self._calls_left)

    def beyond(self, delta: dict[str, Any]) -> dict[str, Any]:
        """What of a delta is new. Raises Mismatch when it is not what the client has."""
        new = {name: value for name, value in delta.items() if name not in (*_TEXTS, "tool_calls")}
        for name in _TEXTS:
            if text := delta.get(name):
                if name == "content" and any(self._texts[other] for other in self._texts if other != name):
                    raise Mismatch  # reasoning comes first
                rest, self._texts[name] = _after(text, self._texts.get(name, ""))
                if rest and name != "content" and self._is_past_reasoning:
                    raise Mismatch
                if rest:
                    new[name] = rest
        parts = [part for part in map(self._beyond_call, delta.get("tool_calls") or ()) if part]
        return new | {"tool_calls": parts} if parts else new

    def _beyond_call(self, part: dict[str, Any]) -> dict[str, Any] | None:
        index = part.get("index", 0)
        if index >= len(self._headers):
            return part
        self._calls_left.discard(index)
        function = part.get("function") or {}
        said = (part.get("id"), function.get("name"))
        if any(mine is not None and mine != its for mine, its in zip(said, self._headers[index], strict=True)):
            raise Mismatch
        rest, self._arguments[index] = _after(function.get("arguments") or "", self._arguments[index])
        return {"index": index, "function": {"arguments": rest}} if rest else None


def _after(text: str, known: str) -> tuple[str, str]:
    """What of `text` lies behind `known`, and what of `known` behind `text`. Raises Mismatch if neither begins so."""
    count = min(len(text), len(known))
    if text[:count] != known[:count]:
        raise Mismatch
    return text[count:], known[count:]


def beyond(transcript: Transcript, said: dict[str, Any]) -> dict[str, Any]:
    """What a delta, which tells the whole answer so far, says beyond what the client has. Raises Mismatch, also when it
    says less.
    """
    known = _Repeated(transcript)
    new = known.beyond(said)
    if not known.is_exhausted:
        raise Mismatch
    return new


def _bare(choice: dict[str, Any]) -> dict[str, Any]:
    """The same choice without what belongs to its own tokens."""
    bare = {**choice, "logprobs": None, "finish_reason": None}
    bare.pop("stop_reason", None)
    if "token_ids" in bare:
        bare["token_ids"] = []
    return bare


def _shift_offsets(logprobs: Any, offset: int) -> None:
    if offset and isinstance(logprobs, dict) and logprobs.get("text_offset"):
        logprobs["text_offset"] = [position + offset for position in logprobs["text_offset"]]


def _without_first(logprobs: Any, count: int) -> Any:
    """Log probabilities without those of the first tokens: lists, one entry for each token."""
    if not isinstance(logprobs, dict):
        return logprobs
    return {name: value[count:] if isinstance(value, list) else value for name, value in logprobs.items()}


def chat_logprobs(logprobs: dict[str, Any], top: int) -> dict[str, Any]:
    """The log probabilities of a completion in the shape of a chat's that names `top` alternatives of each token.

    Both begin with the token itself, and a completion names one more (vLLM `_create_completion_logprobs`).
    """
    alternatives = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    content = [
        {**_entry(token, logprob), "top_logprobs": [_entry(*ranked) for ranked in _first((others or {}).items(), top)]}
        for token, logprob, others in zip(logprobs["tokens"], logprobs["token_logprobs"], alternatives, strict=True)
    ]
    return {"content": content}


def _first(ranked: Iterable[tuple[str, float]], count: int) -> list[tuple[str, float]]:
    """The first so many; -1 is all."""
    return list(ranked)[: None if count < 0 else count]


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}
