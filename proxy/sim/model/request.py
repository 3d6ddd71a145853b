"""Generation requests, the samples that they generate, and the errors with which engines answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from proxy.sim.model.tokenizer import END, Detokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.sim.model.grammar import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One validated generation request. Its prompts are token IDs."""

    is_chat: bool
    model: str
    prompts: list[list[int]]
    samples: int
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop: bool
    ignore_eos: bool
    keep_markers: bool
    spaces_markers: bool
    """Whether spaces surround the markers that are shown. Never in a chat, whose parsers need the exact text."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: int | None
    """The number of alternatives to report for each token; None: no logprobs."""
    return_token_ids: bool
    echo: bool
    kv_params: dict[str, Any]
    is_thinking: bool
    include_reasoning: bool
    calls_tools: bool
    names_tool: bool
    grammar: Grammar | None
    """The grammar of the answer; None if it has none."""
    one_call: bool
    """Whether only the first of several tool calls is reported (`parallel_tool_calls` false)."""
    media: tuple[str, ...] = ()
    """Hashes of the images, recordings and clips of a chat."""
    ec_params: dict[str, Any] = field(default_factory=dict)
    """Places of encoded media, by hash (`ec_transfer_params`)."""
    cache_salt: str = ""
    """A salt for the prefix cache. Equal prompts with different salts share no KV cache."""
    echo_only: bool = False
    """Whether the answer shows only the prompt. The engine still generates one token (vLLM `CompletionRequest`)."""
    prompt_logprobs: int | None = None
    """The number of alternatives to report for each token of the prompt; None: no logprobs."""
    phase_prompt: list[int] | None = None
    """Token IDs that decide, instead of the prompt, whether the answer begins in reasoning; None: the prompt decides.
    """
    dp_rank: int | None = None
    """The requested data-parallel rank of a vLLM engine; None: the engine chooses."""
    is_batch: bool = False
    """Whether the answer of SGLang's native API is a list, even if it has only one element."""
    prompt_logprobs_from: int = -1
    """The position in the prompt from which SGLang's native API reports logprobs; -1: it reports none."""

    @property
    def is_parsed(self) -> bool:
        """Whether a parser separates reasoning or tool calls from the content."""
        return self.is_chat and (self.is_thinking or self.calls_tools)


class EngineError(Exception):
    """An error with which the engine refuses a request.

    `late`: the handler refused it, and not the schema. Only then does an engine with `do_remote_prefill` parameters
    notify the prefiller (vLLM `_with_kv_transfer_rejection_cleanup`).
    """

    def __init__(self, status: int, message: str, kind: str, param: str | None = None, *, late: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.late = late

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}


def make_internal_error() -> EngineError:
    return EngineError(500, "Internal server error", "InternalServerError")


_FOREIGN_KV_TEXT: Final = b"[KV of another prompt] "


class TokenSource(Protocol):
    def next(self, *, may_end: bool = True) -> int: ...


class GarbageWriter:
    """The writer of a decoder that has loaded the KV of another prompt.

    Its text is always wrong and easy to recognise.
    """

    def __init__(self) -> None:
        self._at = -1

    def next(self, *, may_end: bool = True) -> int:
        self._at = (self._at + 1) % len(_FOREIGN_KV_TEXT)
        return _FOREIGN_KV_TEXT[self._at]


@dataclass(slots=True)
class Delta:
    """The parts that one step adds to one sample.

    Deltas that a slow reader has not taken are merged, as in the engine's output collector.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    fault: str | None = None

    def merge(self, later: Delta) -> None:
        self.text += later.text
        self.token_ids += later.token_ids
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.fault = later.fault


@dataclass(frozen=True, slots=True)
class StreamStrike:
    """A fault that happens when `tokens` tokens exist. The chunk with its finish also has the last `merged` of them."""

    kind: str
    tokens: int
    merged: int = 0


class TokenSequence:
    """One sample of one prompt. The scheduler owns it from `submit` until its end.

    `step` generates tokens and passes them to `emit`. It returns False when the sequence needs no further steps.
    """

    def __init__(
        self,
        index: int,
        prompt: list[int],
        ask: GenerationRequest,
        source: TokenSource,
        emit: Callable[[Delta], None],
        *,
        max_tokens: int,
        stream_interval: int = 1,
        ends_at_once: bool = False,
        strike: StreamStrike | None = None,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.source = source
        self.output: list[int] = []
        self.cached_tokens = 0
        self.prefill_tokens = 0
        self.ready_at = 0.0
        self.on_admitted: Callable[[], None] | None = None
        self.finish_reason: str | None = None
        self._ask = ask
        self._emit = emit
        self._max_tokens = max_tokens
        self._stream_interval = stream_interval
        self._ends_at_once = ends_at_once and ask.min_tokens == 0 and not ask.ignore_eos
        self._strike = strike
        self._detokenizer = Detokenizer(
            keep_markers=ask.keep_markers, spaced_after=prompt[-1] if ask.spaces_markers else None
        )
        self._pending = Delta(index, "", [])
        self._has_emitted = False
        self._text = ""
        self._emitted_chars = 0
        self._held_chars = 0 if ask.include_stop or not ask.stop else max(map(len, ask.stop)) - 1

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of the answer."""
        return self._max_tokens

    @property
    def cache_salt(self) -> str:
        return self._ask.cache_salt

    @property
    def is_live(self) -> bool:
        return self.finish_reason is None

    def step(self, count: int) -> bool:
        """Generate up to `count` tokens. Return False if the sequence has finished, or if a fault has stopped it."""
        for _ in range(count):
            if (strike := self._strike) is not None:
                if len(self.output) == strike.tokens - strike.merged:
                    self._emit_delta()
                if len(self.output) >= strike.tokens:
                    return self._apply_strike(strike)
            self._generate_token()
            if not self.is_live:
                break
        self._emit_delta()
        return self.is_live

    def fail(self) -> None:
        """End with an internal error, for example because the KV cannot be loaded."""
        self._finish_sequence("error")
        self._emit_delta()

    def abort(self) -> None:
        """End at the present token, without an error."""
        self._finish_sequence("abort")
        self._emit_delta()

    def _generate_token(self) -> None:
        may_end = len(self.output) >= self._ask.min_tokens
        token = END if self._ends_at_once and not self.output else self.source.next(may_end=may_end)
        self.output.append(token)
        self._pending.token_ids.append(token)
        if may_end and token == END and not self._ask.ignore_eos:
            self._finish_sequence("stop")
            return
        if may_end and token in self._ask.stop_token_ids:
            self._finish_sequence("stop", token)
            return
        self._add_text(self._detokenizer.feed(token))
        if self.is_live and len(self.output) >= self._max_tokens:
            self._finish_sequence("length")

    def _add_text(self, text: str) -> None:
        if not self._ask.stop:
            self._pending.text += text
            return
        self._text += text
        if len(self.output) > self._ask.min_tokens:
            self._find_stop(len(text))

    def _find_stop(self, new_chars: int) -> None:
        found: tuple[int, int, str] | None = None
        for stop in self._ask.stop:
            begin = self._text.find(stop, max(0, len(self._text) - new_chars - len(stop) + 1))
            if begin >= 0 and (found is None or begin + len(stop) < found[0]):
                found = (begin + len(stop), begin, stop)
        if found is not None:
            end, begin, stop = found
            self._text = self._text[: end if self._ask.include_stop else begin]
            self._finish_sequence("stop", stop)

    def _finish_sequence(self, finish_reason: str, stop_reason: int | str | None = None) -> None:
        self.finish_reason = finish_reason
        self._pending.finish_reason = finish_reason
        self._pending.stop_reason = stop_reason

    def _apply_strike(self, strike: StreamStrike) -> bool:
        if strike.kind == "recompute":
            self._finish_sequence("stop", "recomputed")
            self._emit_delta()
        elif strike.kind == "abort":
            self.abort()
        else:
            self._emit_delta(now=True)
            self._emit(Delta(self.index, "", [], fault=strike.kind))
        return False

    def _emit_delta(self, *, now: bool = False) -> None:
        if self.is_live and not now and self._must_wait():
            return
        if self._ask.stop:
            end = len(self._text) if not self.is_live else max(self._emitted_chars, len(self._text) - self._held_chars)
            self._pending.text += self._text[self._emitted_chars : end]
            self._emitted_chars = end
        pending, self._pending = self._pending, Delta(self.index, "", [])
        if pending.token_ids or pending.finish_reason:
            self._has_emitted = True
            self._emit(pending)

    def _must_wait(self) -> bool:
        strike = self._strike
        if strike is not None and len(self.output) > strike.tokens - strike.merged:
            return True
        return self._has_emitted and len(self._pending.token_ids) < self._stream_interval
