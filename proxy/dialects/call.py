"""Call: one parsed client request, immutable, which knows what it costs. The dialects make them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.pick import PickRequest
from proxy.common.backend import Load
from proxy.wire.elision import text_bytes
from proxy.wire.openai import Api
from proxy.wire.prefix import NO_KEYS, PrefixKeys, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from proxy.common.backend import Backend
    from proxy.settings import Cost
    from proxy.wire.document import Body, Document

# What a request costs a prefiller besides its tokens. vllm-ascend's example estimates a prefill as
# 0.0345 ms per token + 120 ms, and 120.0745 / 0.0345 = 3480 tokens.
PREFILL_OVERHEAD_TOKENS: Final = 3480

_load: Final[Callable[[tuple[int, int]], Load]] = partial(tuple.__new__, Load)
"""Of its compute and kv. Its own constructor is written in Python: each request makes two."""

# A client's limit beyond this says nothing about its answer, and must not weigh as load.
MAX_OUTPUT_TOKENS: Final = 1 << 20

# What one more sequence in the batch costs a decoder besides the cache it holds: with it short prompts are spread by
# number and long ones by memory.
DECODE_OVERHEAD_TOKENS: Final = 256

# Whose trace a request belongs to (W3C Trace Context).
CONTEXT_HEADERS: Final = ("traceparent", "tracestate")

# How soon the client wants the first token, in milliseconds: for policies, and passed on.
FIRST_TOKEN_HEADER: Final = "x-ttft-deadline-ms"

# How urgent a request is, for the queue, whatever engines make of the member `priority`; lower goes first.
PRIORITY_HEADER: Final = "x-request-priority"

# What the client calls a conversation, see Call.session.
SESSION_HEADER: Final = "x-session-id"

PASSED_ON: Final = (*CONTEXT_HEADERS, FIRST_TOKEN_HEADER, PRIORITY_HEADER, SESSION_HEADER)
"""Request headers that mean the same to the engines, beside the client's credential. Everything else is rebuilt or
dropped: hop-by-hop headers, and those that steer an engine, such as X-data-parallel-rank, which an endpoint per rank
answers with 400."""


@dataclass(slots=True, eq=False)
class Call:
    """One unit of work for the engines: a single prompt and a single sample once its dialect has split it.

    Nothing of it is ever set again. It is not frozen because each of its fields would cost a call then.
    """

    api: Api
    document: Document
    prompt_tokens: int
    """Estimated from the text's bytes, exact for token ids; images and audio count a fixed number each."""
    output_tokens: int
    """The client's limit, or the configured guess."""
    stream: bool
    include_usage: bool
    """The client asked for a usage chunk at the end of the stream."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Request headers that are passed on to the engines."""
    changes: Mapping[str, object] = field(default_factory=dict)
    """Members of the document that are replaced or REMOVED on every leg."""
    prompt: Prompt | None = None
    """What the client wants answered, shared with the other units of one prompt and kept when the answer is resumed.
    None: not known."""
    output_limit: int | None = None
    """The client's own limit on output tokens; None when it gave none, or the engine alone knows it."""
    is_ordinary: bool = False
    """The client's fields are among `ORDINARY_FIELDS`, so there is nothing rare to look for."""
    kv_params: Mapping[str, object] = field(default_factory=dict)
    """Members added to the `kv_transfer_params` of every leg."""
    alias: str | None = None
    """What the client calls the model, if engines call it otherwise."""
    asked: Any = None
    """What its dialect keeps of the client's own words for the answer; None where it needs nothing."""
    left_out: Sequence[str] = ()
    """Kinds of tools and content that its dialect has left out, because no engine can serve them."""
    values: Mapping[str, Any] = field(init=False, repr=False, compare=False)
    """The client's fields, as engines take them: the document's."""

    def __post_init__(self) -> None:
        self.values = self.document.values

    @property
    def is_all_prompt(self) -> bool:
        """At most one token is to be generated, so an engine that prefills has done it all. 0 is what completions that
        only echo their prompt may ask for.
        """
        values = self.values
        limit = values.get("max_completion_tokens") if self.api is Api.CHAT else None
        return (values.get("max_tokens") if limit is None else limit) in (0, 1)

    def pick_request(self, avoid: Collection[Backend] = (), prefer: Backend | None = None) -> PickRequest:
        """What an attempt at it wants backends for; see PickRequest.

        A prefiller has the compute until it answers, and kv until the decoder's first token; a decoder has both until
        the answer has ended.
        """
        tokens = self.prompt_tokens
        prefill = _load((tokens + PREFILL_OVERHEAD_TOKENS, tokens))
        decode = _load((DECODE_OVERHEAD_TOKENS, tokens + self.output_tokens))
        return PickRequest(prefill, decode, self, avoid, prefer)

    # What policies may ask; see pick.Subject.

    @property
    def prefix_keys(self) -> PrefixKeys:
        """What the prompt's prefixes are called; empty where the request has no single prompt."""
        return NO_KEYS if self.prompt is None else self.prompt.keys

    @property
    def session(self) -> str | None:
        """The header `x-session-id`, or else OpenAI's `prompt_cache_key`, `session_id` as some clients send it,
        `metadata.user_id` (which Claude Code makes of its session), or `user`, which `prompt_cache_key` replaces.
        """
        values = self.values
        metadata = values.get("metadata")
        names = (
            self.headers.get(SESSION_HEADER),
            values.get("prompt_cache_key"),
            values.get("session_id"),
            metadata.get("user_id") if isinstance(metadata, dict) else None,
            values.get("user"),
        )
        return next((name for name in names if name and isinstance(name, str)), None)

    @property
    def first_token_seconds(self) -> float | None:
        """The client's header `x-ttft-deadline-ms`; None without one, or where it is no positive number."""
        try:
            seconds = float(self.headers[FIRST_TOKEN_HEADER]) / 1000
        except (KeyError, ValueError):
            return None
        return seconds if 0 < seconds < math.inf else None

    def priority(self, *, lower_first: bool) -> int | None:
        """The client's header `x-request-priority`, or else the body's `priority`, which vLLM serves lower first
        (vllm/entrypoints/openai, `priority`), and SGLang higher first (`--schedule-low-priority-values-first`).
        """
        try:
            return int(self.headers[PRIORITY_HEADER])
        except (KeyError, ValueError):
            asked = self.values.get("priority")
        if not isinstance(asked, int) or isinstance(asked, bool):
            return None
        return asked if lower_first else -asked

    # What the client asks for

    @property
    def model(self) -> object:
        """The name of the model, as the client says it, whatever that is; None when it says none."""
        return self.values.get("model") if self.alias is None else self.alias

    @property
    def served_model(self) -> object:
        """The name of the model as engines get it, with the aliases of the settings applied; None: there is none."""
        return self.changes.get("model", self.values.get("model"))

    def members(self, names: Collection[str]) -> dict[str, Any]:
        """The members of the body that have one of these names, with the values that engines get; absent ones are left
        out.
        """
        changes = {name: value for name, value in self.changes.items() if name in names}
        values = self.document.values
        return {name: values[name] for name in names if name in values} | changes

    @property
    def samples(self) -> int:
        """`n`: how many answers are wanted for each prompt."""
        return self.values.get("n") or 1

    @property
    def sampling(self) -> Mapping[str, Any]:
        """What says how tokens are chosen and when to stop: of SGLang's own API `sampling_params`."""
        if self.api is not Api.GENERATE:
            return self.values
        params = self.changes.get("sampling_params", self.values.get("sampling_params"))
        return params if isinstance(params, dict) else {}

    @property
    def stops(self) -> Sequence[str]:
        """The stop strings."""
        stop = self.sampling.get("stop")
        if isinstance(stop, list):
            return [text for text in stop if isinstance(text, str)]
        return [stop] if isinstance(stop, str) else []

    @property
    def wants_ids(self) -> bool:
        """Is the client to be told token ids?"""
        return self.api is Api.GENERATE or bool(self.values.get("return_token_ids"))

    @property
    def shows_single_tokens(self) -> bool:
        """Does the client see token ids, or log probabilities, of which there is one for each?"""
        logprobs = self.values.get("logprobs")  # of a completion 0 asks for those of the answer's own tokens
        return self.wants_ids or (logprobs is not None and logprobs is not False)

    def body(self, changes: Mapping[str, object]) -> Body:
        """The JSON body of one leg: the client's bytes with this call's and the leg's changes."""
        return self.document.with_both(self.changes, changes)

    def body_with_kv(self, params: bytes) -> Body:
        """The JSON body of one leg with these `kv_transfer_params` and this call's changes."""
        return self.document.with_written(self.changes, "kv_transfer_params", params)

    def changed(
        self,
        changes: Mapping[str, object],
        *,
        prompt_tokens: int | None = None,
        prompt: Prompt | None = None,
        stream: bool | None = None,
    ) -> Call:
        """The same call with more members changed, a new cost where the prompt has grown, another prompt, and the
        answer streamed or not whatever the client asked for.
        """
        return Call(  # by position, as names take twice the time, and each request takes one of these
            self.api,
            self.document,
            self.prompt_tokens if prompt_tokens is None else prompt_tokens,
            self.output_tokens,
            self.stream if stream is None else stream,
            self.include_usage,
            self.headers,
            self.document.together(self.changes, changes),
            prompt or self.prompt,
            self.output_limit,
            self.is_ordinary,
            self.kv_params,
            self.alias,
            self.asked,
        )

    def in_context(self, context: Mapping[str, str]) -> Call:
        """The same call in the trace that these headers tell of, whatever its client said."""
        others = {name: value for name, value in self.headers.items() if name not in CONTEXT_HEADERS}
        return replace(self, headers={**others, **context})

    def part(self, changes: Mapping[str, object], prompt_tokens: int | None = None) -> Call:
        """The call for one prompt and one sample of this one. `changes`: members of the body that are replaced, see
        `changed`. `prompt_tokens`: of its prompt; None: as many as this call has.
        """
        prompt = None if self.prompt is None else self.prompt.changed(changes)
        return self.changed(changes, prompt_tokens=prompt_tokens, prompt=prompt)


def measured_prompt(document: Document, cost: Cost) -> tuple[int, Prompt]:
    """Estimated prompt length in tokens, at least 1, and the prompt."""
    messages, length = document.excerpt("messages")
    total, has_reasoning, has_media = _measured_messages(messages, cost, length)
    values = document.values
    if "tools" in values:
        total += len(document.view("tools")) // cost.bytes_per_token
    if "prompt" in values:
        ids = document.count_token_ids("prompt")
        if ids is None:
            text, length = document.excerpt("prompt")
            ids = text_tokens(text, cost, length)
        total += ids
    return total or 1, Prompt(document, None, has_reasoning, has_media)


def _measured_messages(messages: object, cost: Cost, length: Callable[[str], int]) -> tuple[int, bool, bool]:
    """Their estimated tokens, and whether they hold reasoning, or more than text."""
    total, bytes_per_token = 0, cost.bytes_per_token
    has_reasoning = has_media = False
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        if isinstance(content, str):
            total += -(-length(content) // bytes_per_token)
        else:
            for part in _objects(content):
                total += _part_tokens(part, cost, length)
                has_media = has_media or "text" not in part
        if "reasoning_content" in message or "reasoning" in message:
            has_reasoning = True
    return total, has_reasoning, has_media


def text_tokens(prompt: object, cost: Cost, length: Callable[[str], int] = text_bytes) -> int:
    """Tokens of a `prompt`: text, token ids, or a list of either. `length` is that of a text in bytes."""
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        return sum(_single_prompt_tokens(item, cost, length) for item in prompt)
    return _single_prompt_tokens(prompt, cost, length)


def _single_prompt_tokens(prompt: object, cost: Cost, length: Callable[[str], int]) -> int:
    if isinstance(prompt, str):
        return -(-length(prompt) // cost.bytes_per_token)
    return len(prompt) if isinstance(prompt, list) else 0


def _part_tokens(part: Mapping[str, Any], cost: Cost, length: Callable[[str], int]) -> int:
    """Tokens of a part of a message's content. The bytes of an image say nothing about its tokens."""
    kind = part.get("type")
    if kind == "text" or "text" in part:
        return text_tokens(part.get("text"), cost, length)
    return cost.audio_tokens if isinstance(kind, str) and "audio" in kind else cost.image_tokens


def _objects(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        return []
    for item in value:
        if not isinstance(item, dict):
            return [item for item in value if isinstance(item, dict)]
    return value


def output_limit(values: Mapping[str, Any]) -> int | None:
    """The client's own limit on output tokens; chat prefers `max_completion_tokens` as vLLM does."""
    limit = values.get("max_completion_tokens")
    if type(limit) is not int or limit <= 0:
        limit = values.get("max_tokens")
        if type(limit) is not int or limit <= 0:
            return None
    return min(limit, MAX_OUTPUT_TOKENS)
