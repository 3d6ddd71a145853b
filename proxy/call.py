"""Call: one parsed client request, immutable, which knows what it costs.

Only what the gateway decides by is read and checked here; every other field is the engine's business and reaches it
with the bytes the client sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from proxy.backend import Load
from proxy.balancer.pick import PickRequest
from proxy.errors import BadRequest
from proxy.wire import sglang
from proxy.wire.document import REMOVED, Document, InvalidDocument
from proxy.wire.lax import flag, whole_number
from proxy.wire.openai import RESERVED_FIELDS, Api
from proxy.wire.prefix import PrefixKeys, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence, Set

    from proxy.backend import Backend
    from proxy.settings import Cost

    _Reading = tuple[Callable[[object], object], str]

# What a request costs a prefiller besides its tokens. vllm-ascend's example estimates a prefill as
# 0.0345 ms per token + 120 ms, and 120.0745 / 0.0345 = 3480 tokens.
PREFILL_OVERHEAD_TOKENS: Final = 3480

# A client's limit beyond this says nothing about its answer, and must not weigh as load.
MAX_OUTPUT_TOKENS: Final = 1 << 20

# What one more sequence in the batch costs a decoder besides the cache it holds: with it short prompts are spread by
# number and long ones by memory.
DECODE_OVERHEAD_TOKENS: Final = 256

# How soon the client wants the first token, in milliseconds: for policies, and passed on.
FIRST_TOKEN_HEADER: Final = "x-ttft-deadline-ms"

# What the gateway acts on: how engines read it, and what it is to be.
_WHOLE_NUMBER: Final = (whole_number, "a whole number")
_FLAG: Final = (flag, "true or false")
_READINGS: Final[Mapping[str, _Reading]] = {
    **dict.fromkeys(
        (
            *("max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "seed", "top_logprobs"),
            *("prompt_logprobs", "thinking_token_budget"),
        ),
        _WHOLE_NUMBER,
    ),
    **dict.fromkeys(
        (
            *("echo", "use_beam_search", "return_token_ids", "include_reasoning", "include_stop_str_in_output"),
            "parallel_tool_calls",
        ),
        _FLAG,
    ),
}
_CHAT_READINGS: Final[Mapping[str, _Reading]] = {**_READINGS, "logprobs": _FLAG}
_COMPLETION_READINGS: Final[Mapping[str, _Reading]] = {**_READINGS, "logprobs": _WHOLE_NUMBER}
_NATIVE_READINGS: Final[Mapping[str, _Reading]] = dict.fromkeys(sglang.WHOLE_NUMBERS, _WHOLE_NUMBER)


@dataclass(frozen=True, slots=True)
class Call:
    """One unit of work for the engines: a single prompt and a single sample once `flow.fanout` has split it."""

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
    kv_params: Mapping[str, object] = field(default_factory=dict)
    """Members added to the `kv_transfer_params` of every leg."""
    prompt: Prompt | None = None
    """What the client wants answered, shared with the other units of one prompt and kept when the answer is resumed.
    None: not known."""

    @property
    def output_limit(self) -> int | None:
        """The client's own limit on output tokens; None when it gave none."""
        return _output_limit(self.values)

    @property
    def is_all_prompt(self) -> bool:
        """At most one token is to be generated, so an engine that prefills has done it all. 0 is what completions that
        only echo their prompt may ask for.
        """
        values = self.values
        limit = values.get("max_completion_tokens") if self.api is Api.CHAT else None
        return (values.get("max_tokens") if limit is None else limit) in (0, 1)

    @property
    def prefill_load(self) -> Load:
        """Held by a prefiller: compute until it answers, kv until the decoder's first token."""
        return Load(compute=self.prompt_tokens + PREFILL_OVERHEAD_TOKENS, kv=self.prompt_tokens)

    @property
    def decode_load(self) -> Load:
        """Held by a decoder until the answer has ended."""
        return Load(compute=DECODE_OVERHEAD_TOKENS, kv=self.prompt_tokens + self.output_tokens)

    def pick_request(self, avoid: Collection[Backend] = (), prefer: Backend | None = None) -> PickRequest:
        """What an attempt at it wants backends for; see PickRequest."""
        return PickRequest(self.prefill_load, self.decode_load, self, avoid, prefer)

    # What policies may ask; see pick.Subject.

    @property
    def prefix_keys(self) -> PrefixKeys:
        """What the prompt's prefixes are called; empty where the request has no single prompt."""
        return PrefixKeys() if self.prompt is None else self.prompt.keys

    @property
    def session(self) -> str | None:
        """OpenAI's `prompt_cache_key`, or `user`, which it replaces (API reference, chat completions)."""
        name = self.values.get("prompt_cache_key") or self.values.get("user")
        return name if isinstance(name, str) else None

    @property
    def first_token_seconds(self) -> float | None:
        """The client's header `x-ttft-deadline-ms`; None without one, or where it is no positive number."""
        try:
            seconds = float(self.headers[FIRST_TOKEN_HEADER]) / 1000
        except (KeyError, ValueError):
            return None
        return seconds if 0 < seconds < math.inf else None

    # What the client asks for

    @property
    def values(self) -> dict[str, Any]:
        """The client's fields as they were parsed."""
        return self.document.values

    @property
    def samples(self) -> int:
        """`n`: how many answers are wanted for each prompt."""
        return self.values.get("n") or 1

    @property
    def stops(self) -> Sequence[str]:
        """The stop strings."""
        stop = self.values.get("stop")
        return [stop] if isinstance(stop, str) else [text for text in stop or () if isinstance(text, str)]

    @property
    def shows_single_tokens(self) -> bool:
        """Does the client see token ids, or log probabilities, of which there is one for each?"""
        logprobs = self.values.get("logprobs")  # of a completion 0 asks for those of the answer's own tokens
        return bool(self.values.get("return_token_ids")) or (logprobs is not None and logprobs is not False)

    def body(self, changes: Mapping[str, object]) -> bytes:
        """The JSON body of one leg: the client's bytes with this call's and the leg's changes."""
        return self.document.with_changes({**self.changes, **changes})

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
        return Call(
            api=self.api,
            document=self.document,
            prompt_tokens=self.prompt_tokens if prompt_tokens is None else prompt_tokens,
            output_tokens=self.output_tokens,
            stream=self.stream if stream is None else stream,
            include_usage=self.include_usage,
            headers=self.headers,
            changes={**self.changes, **changes},
            kv_params=self.kv_params,
            prompt=prompt or self.prompt,
        )

    def part(self, changes: Mapping[str, object], prompt_tokens: int | None = None) -> Call:
        """One prompt and one sample of this call, by these changes."""
        prompt = None if self.prompt is None else self.prompt.changed(changes)
        return self.changed(changes, prompt_tokens=prompt_tokens, prompt=prompt)


def read(raw: bytes) -> Document:
    """The JSON of a request body, for `understand`. Raises BadRequest."""
    try:
        return Document.unchecked(raw)
    except InvalidDocument as error:
        raise BadRequest(str(error), code="invalid_json") from None


def parse(api: Api, raw: bytes, cost: Cost, headers: Mapping[str, str] | None = None) -> Call:
    """Parse a request body. Raises BadRequest for what no engine could make sense of."""
    return understand(api, read(raw), cost, headers)


def understand(api: Api, document: Document, cost: Cost, headers: Mapping[str, str] | None = None) -> Call:
    """The call that a request body makes. Raises BadRequest for what no engine could make sense of."""
    try:
        document.check()
    except InvalidDocument as error:
        raise BadRequest(str(error), code="invalid_json") from None
    if api is Api.GENERATE:
        return _native(document, cost, headers or {})
    values = document.values
    stream = _boolean(values, "stream")
    options = values.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", param="stream_options")
    if options and not stream:
        raise BadRequest("stream_options is only allowed when stream is true", param="stream_options")
    changes = _spell_alike(values, _CHAT_READINGS if api is Api.CHAT else _COMPLETION_READINGS)
    if values.get("n") is not None and values["n"] < 1:
        raise BadRequest("n must be a positive integer", param="n")
    include_usage = _boolean(options or {}, "include_usage")
    changes.update(_without_reserved(values, RESERVED_FIELDS))
    if stream and not include_usage:
        # The gateway counts tokens by the usage chunk, and takes it out again for clients that did not ask for it. What
        # else stands in their options (continuous_usage_stats) means nothing without it.
        changes["stream_options"] = {"include_usage": True}
    return Call(
        api=api,
        document=document,
        prompt_tokens=prompt_tokens(document, cost),
        output_tokens=_output_limit(values) or cost.default_output_tokens,
        stream=stream,
        include_usage=include_usage,
        headers=headers or {},
        changes=changes,
        prompt=Prompt(values),
    )


def _native(document: Document, cost: Cost, headers: Mapping[str, str]) -> Call:
    """A call of SGLang's own API. Its usage is part of every answer."""
    values = document.values
    changes: dict[str, object] = {}
    params = values.get("sampling_params")
    for each in params if isinstance(params, list) else [params]:
        if isinstance(each, dict) and _spell_alike(each, _NATIVE_READINGS):
            changes["sampling_params"] = params
    rows = sglang.embeddings(values)
    tokens = text_tokens(sglang.prompt_of(values), cost) if rows is None else rows
    tokens += (
        _media(values.get("image_data")) * cost.image_tokens + _media(values.get("audio_data")) * cost.audio_tokens
    )
    return Call(
        api=Api.GENERATE,
        document=document,
        prompt_tokens=max(1, tokens),
        output_tokens=min(sglang.output_limit(values.get("sampling_params")), MAX_OUTPUT_TOKENS),
        stream=_boolean(values, "stream"),
        include_usage=False,
        headers=headers,
        changes={**changes, **_without_reserved(values, sglang.RESERVED_FIELDS)},
        prompt=Prompt(values),
    )


def _spell_alike(values: dict[str, Any], readings: Mapping[str, _Reading]) -> dict[str, object]:
    """Let what the gateway acts on be what engines take it for; the members that were spelled otherwise, as they are
    now. Raises BadRequest for what engines take for nothing.
    """
    changes: dict[str, object] = {}
    for name, value in values.items():
        if name in readings and value is not None:
            read, what = readings[name]
            try:
                meant = read(value)
            except ValueError:
                raise BadRequest(f"{name} must be {what}", param=name) from None
            if meant is not value:
                changes[name] = meant
    values.update(changes)
    return changes


def _without_reserved(values: Mapping[str, Any], reserved: Set[str]) -> dict[str, object]:
    """Changes that take the reserved fields away, wherever engines read them.

    vLLM puts the members of `vllm_xargs` where it puts `kv_transfer_params`, too (`to_sampling_params`).
    """
    changes: dict[str, object] = {}
    if not reserved.isdisjoint(values):
        changes.update((name, REMOVED) for name in reserved if name in values)
    extra = values.get("vllm_xargs")
    if isinstance(extra, dict) and not reserved.isdisjoint(extra):
        changes["vllm_xargs"] = {name: value for name, value in extra.items() if name not in reserved}
    return changes


def _media(value: object) -> int:
    """How many pictures or sounds there are: one, or a list, or a list of lists."""
    if isinstance(value, list):
        return sum(map(_media, value))
    return int(value is not None)


def prompt_tokens(document: Document, cost: Cost) -> int:
    """Estimated prompt length in tokens, at least 1."""
    values = document.values
    total = 0
    for message in _objects(values.get("messages")):
        total += _content_tokens(message.get("content"), cost)
    if "tools" in values:
        total += len(document.raw_value("tools") or b"") // cost.bytes_per_token
    return max(1, total + text_tokens(values.get("prompt"), cost))


def text_tokens(prompt: object, cost: Cost) -> int:
    """Tokens of a `prompt`: text, token ids, or a list of either."""
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        return sum(_single_prompt_tokens(item, cost) for item in prompt)
    return _single_prompt_tokens(prompt, cost)


def _single_prompt_tokens(prompt: object, cost: Cost) -> int:
    if isinstance(prompt, str):
        length = len(prompt) if prompt.isascii() else len(prompt.encode())
        return -(-length // cost.bytes_per_token)
    return len(prompt) if isinstance(prompt, list) else 0


def _content_tokens(content: object, cost: Cost) -> int:
    """Tokens of a message's content: a string, or parts. The bytes of an image say nothing about its tokens."""
    if isinstance(content, str):
        return _single_prompt_tokens(content, cost)
    total = 0
    for part in _objects(content):
        kind = part.get("type")
        if kind == "text" or "text" in part:
            total += text_tokens(part.get("text"), cost)
        elif isinstance(kind, str) and "audio" in kind:
            total += cost.audio_tokens
        else:
            total += cost.image_tokens
    return total


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _boolean(values: Mapping[str, Any], name: str) -> bool:
    """A flag the gateway itself acts on, so it must not guess what `"yes"` means to the engine."""
    value = values.get(name)
    if value not in (None, 0, 1):  # True is 1, and engines take 1 for true
        raise BadRequest(f"{name} must be true or false", param=name)
    return bool(value)


def _output_limit(values: Mapping[str, Any]) -> int | None:
    """The client's own limit on output tokens; chat prefers `max_completion_tokens` as vLLM does."""
    for name in ("max_completion_tokens", "max_tokens"):
        limit = values.get(name)
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
            return min(limit, MAX_OUTPUT_TOKENS)
    return None
