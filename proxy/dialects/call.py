"""The Call: one parsed client request, immutable, with its estimated cost. The dialects make them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.pick import PickRequest
from proxy.common.backend import Backend, Load
from proxy.wire.document import Body, Document, strings_in
from proxy.wire.members import count_text_bytes
from proxy.wire.openai import Api
from proxy.wire.prefix import NO_PREFIX_KEYS, PrefixKeys, PromptPrefixes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from proxy.settings import Cost

# The fixed cost of a request for a prefiller, in tokens. vllm-ascend's example estimates a prefill as 0.0345 ms per
# token plus 120 ms, and 120.0745 / 0.0345 = 3480 tokens.
PREFILL_OVERHEAD_TOKENS: Final = 3480

_make_load: Final[Callable[[tuple[int, int]], Load]] = partial(tuple.__new__, Load)
"""Makes a Load from the pair (compute, kv). It is faster than the constructor, and each request makes two loads."""

# A larger limit says nothing about the length of the answer, and must not count as load.
MAX_OUTPUT_TOKENS: Final = 1 << 20

# The cost of one more sequence in a decoder's batch, besides its KV cache. It makes policies spread short prompts by
# number and long prompts by memory.
DECODE_OVERHEAD_TOKENS: Final = 256

TRACE_CONTEXT_HEADERS: Final = ("traceparent", "tracestate")
"""Names of the headers that identify the trace of a request (W3C Trace Context)."""

TTFT_DEADLINE_HEADER: Final = "x-ttft-deadline-ms"
"""Name of the header with the client's time limit for the first token, in milliseconds. Engines also get it."""

PRIORITY_HEADER: Final = "x-request-priority"
"""Name of the header with the priority in the gateway's queue. The gateway serves lower numbers first."""

SESSION_HEADER: Final = "x-session-id"
"""Name of the header with the client's name for a conversation; see Call.session_id."""

FORWARDED_HEADERS: Final = (*TRACE_CONTEXT_HEADERS, TTFT_DEADLINE_HEADER, PRIORITY_HEADER, SESSION_HEADER)
"""Names of the client's headers that engines get, besides the client's credential. All other headers are rebuilt or
dropped.

Dropped headers are hop-by-hop headers, and headers that control an engine, such as X-data-parallel-rank. An engine that
serves one rank at its address rejects that header with 400.
"""


@dataclass(slots=True, eq=False)
class Call:
    """One request to the engines. Its dialect splits it into calls with one prompt and one sample.

    It is immutable, but not a frozen dataclass, because setting a field of those costs a call.
    """

    api: Api
    document: Document
    prompt_tokens: int
    """Length of the prompt in tokens.

    Exact for token ids; estimated from the number of bytes for text; a fixed number for each image or audio.
    """
    output_tokens: int
    """Expected length of the answer in tokens: the client's limit, or the configured default."""
    stream: bool
    include_usage: bool
    """Whether the client asked for a usage chunk at the end of the stream."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Request headers that are passed on to the engines."""
    changes: Mapping[str, object] = field(default_factory=dict)
    """Members of the document that are replaced, or REMOVED, in the request of every leg."""
    prompt: PromptPrefixes | None = None
    """The prompt; None if it is not known.

    All samples of a prompt share it, and so does the rest of a resumed answer.
    """
    output_limit: int | None = None
    """The client's limit on output tokens; None if it gave none, or if only the engine reads the limit."""
    is_ordinary: bool = False
    """Whether the client uses only fields in `ORDINARY_FIELDS`. Checks for rare fields can then be skipped."""
    kv_params: Mapping[str, object] = field(default_factory=dict)
    """Members that are added to the `kv_transfer_params` of every leg."""
    model_alias: str | None = None
    """The client's name of the model; None if the engines use the same name."""
    answer_context: Any = None
    """Facts about the client's request that the dialect needs when it writes the answer; None if it needs none."""
    omitted_kinds: Sequence[str] = ()
    """Kinds of tools and content that the dialect omitted, because no engine can serve them."""
    values: Mapping[str, Any] = field(init=False, repr=False, compare=False)
    """The members of the document, with the values that engines read."""

    def __post_init__(self) -> None:
        self.values = self.document.values

    @property
    def needs_only_prefill(self) -> bool:
        """Whether the answer has at most one token, so that a prefiller can serve the whole call.

        Completions that only echo their prompt may ask for 0 tokens.
        """
        values = self.values
        limit = values.get("max_completion_tokens") if self.api is Api.CHAT else None
        return (values.get("max_tokens") if limit is None else limit) in (0, 1)

    def make_pick_request(self, avoid: Collection[Backend] = (), prefer: Backend | None = None) -> PickRequest:
        """Return the load of an attempt, and the backends that the attempt avoids or prefers; see PickRequest.

        A prefiller is charged compute until it answers, and kv until the decoder's first token. A decoder is charged
        both until the answer has ended.
        """
        tokens = self.prompt_tokens
        prefill = _make_load((tokens + PREFILL_OVERHEAD_TOKENS, tokens))
        decode = _make_load((DECODE_OVERHEAD_TOKENS, tokens + self.output_tokens))
        return PickRequest(prefill, decode, self, avoid, prefer)

    # The interface of pick.RoutingSubject.

    def request_texts(self) -> Sequence[str] | None:
        """Return all texts of the request, which an engine may quote in an error. None: its prompt has token ids."""
        return strings_in([self.document.load(), *self.changes.values()])

    @property
    def prefix_keys(self) -> PrefixKeys:
        """The keys of the prompt's prefixes; empty if the call has more than one prompt."""
        return NO_PREFIX_KEYS if self.prompt is None else self.prompt.keys

    @property
    def session_id(self) -> str | None:
        """The ID of the conversation; None if the request has none.

        The ID comes from the header `x-session-id`. Otherwise it is the first of these members that is present:
        `prompt_cache_key`, `session_id`, `metadata.user_id` (where Claude Code puts its session), and `user` (the older
        name of `prompt_cache_key`).
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
        """The header `x-ttft-deadline-ms` in seconds; None if it is missing or not a positive number."""
        try:
            seconds = float(self.headers[TTFT_DEADLINE_HEADER]) / 1000
        except (KeyError, ValueError):
            return None
        return seconds if 0 < seconds < math.inf else None

    def requested_priority(self, *, is_lower_first: bool) -> int | None:
        """Return the header `x-request-priority`, or otherwise the body's `priority`; None if both are missing.

        The result is lower for requests that go first. vLLM serves lower values of the body's member first
        (vllm/entrypoints/openai, `priority`), SGLang higher values (`--schedule-low-priority-values-first`).

        Args:
            is_lower_first: Whether the engines serve lower values of the body's member first.
        """
        try:
            return int(self.headers[PRIORITY_HEADER])
        except (KeyError, ValueError):
            asked = self.values.get("priority")
        if not isinstance(asked, int) or isinstance(asked, bool):
            return None
        return asked if is_lower_first else -asked

    # The client's options

    @property
    def model(self) -> object:
        """The client's name of the model, which may be any JSON value; None if the request has none."""
        return self.values.get("model") if self.model_alias is None else self.model_alias

    @property
    def served_model(self) -> object:
        """The engines' name of the model, after the aliases of the settings; None if the request has none."""
        return self.changes.get("model", self.values.get("model"))

    def read_members(self, names: Collection[str]) -> dict[str, Any]:
        """Return those members of the body that are present, with the values that engines get."""
        changes = {name: value for name, value in self.changes.items() if name in names}
        values = self.document.values
        return {name: values[name] for name in names if name in values} | changes

    @property
    def samples_per_prompt(self) -> int:
        """The number of answers that the client wants for each prompt (`n`)."""
        return self.values.get("n") or 1

    @property
    def sampling_members(self) -> Mapping[str, Any]:
        """The object whose members control sampling: the body, or its `sampling_params` in SGLang's own API."""
        if self.api is not Api.GENERATE:
            return self.values
        params = self.changes.get("sampling_params", self.values.get("sampling_params"))
        return params if isinstance(params, dict) else {}

    @property
    def stop_strings(self) -> Sequence[str]:
        """The stop strings of the request."""
        stop = self.sampling_members.get("stop")
        if isinstance(stop, list):
            return [text for text in stop if isinstance(text, str)]
        return [stop] if isinstance(stop, str) else []

    @property
    def wants_token_ids(self) -> bool:
        """Whether the client asks for token ids."""
        return self.api is Api.GENERATE or bool(self.values.get("return_token_ids"))

    @property
    def shows_token_details(self) -> bool:
        """Whether the client's answer has data for each token: token ids or log probabilities."""
        logprobs = self.values.get("logprobs")  # 0 in a completion asks for those of the answer's own tokens
        return self.wants_token_ids or (logprobs is not None and logprobs is not False)

    def make_body(self, changes: Mapping[str, object]) -> Body:
        """Return the JSON body of one leg: the client's bytes with the changes of this call and of the leg."""
        return self.document.merge_changes(self.changes, changes)

    def copy_with_changes(
        self,
        changes: Mapping[str, object],
        *,
        prompt_tokens: int | None = None,
        prompt: PromptPrefixes | None = None,
        stream: bool | None = None,
    ) -> Call:
        """Return a copy of this call with more changed members.

        Args:
            changes: Members of the body that are replaced, or REMOVED.
            prompt_tokens: The new length of the prompt in tokens; None: unchanged.
            prompt: The new prompt; None: unchanged.
            stream: Whether the answer is streamed; None: as the client asked.
        """
        # By position, because names take twice the time, and every request makes one of these.
        return Call(
            self.api,
            self.document,
            self.prompt_tokens if prompt_tokens is None else prompt_tokens,
            self.output_tokens,
            self.stream if stream is None else stream,
            self.include_usage,
            self.headers,
            {**self.changes, **changes} if self.changes else changes,
            prompt or self.prompt,
            self.output_limit,
            self.is_ordinary,
            self.kv_params,
            self.model_alias,
            self.answer_context,
        )

    def copy_with_trace_context(self, context: Mapping[str, str]) -> Call:
        """Return a copy of this call with the trace context in these headers, instead of the client's."""
        others = {name: value for name, value in self.headers.items() if name not in TRACE_CONTEXT_HEADERS}
        return replace(self, headers={**others, **context})

    def make_unit_call(self, changes: Mapping[str, object], prompt_tokens: int | None = None) -> Call:
        """Return the call for one sample of one prompt of this call.

        Args:
            changes: Members of the body that are replaced; see `copy_with_changes`.
            prompt_tokens: The length of its prompt in tokens; None: that of this call.
        """
        prompt = None if self.prompt is None else self.prompt.copy_with_changes(changes)
        return self.copy_with_changes(changes, prompt_tokens=prompt_tokens, prompt=prompt)


def measure_prompt(document: Document, cost: Cost) -> tuple[int, PromptPrefixes]:
    """Return the estimated prompt length in tokens, at least 1, and the prompt."""
    messages, length = document.excerpt_member("messages")
    total, has_reasoning, has_media = _measure_messages(messages, cost, length)
    values = document.values
    if "tools" in values:
        total += len(document.raw_member_view("tools")) // cost.bytes_per_token
    if "prompt" in values:
        ids = document.count_token_ids("prompt")
        if ids is None:
            text, length = document.excerpt_member("prompt")
            ids = estimate_text_tokens(text, cost, length)
        total += ids
    return total or 1, PromptPrefixes(document, None, has_reasoning, has_media)


def _measure_messages(messages: object, cost: Cost, length: Callable[[str], int]) -> tuple[int, bool, bool]:
    """Return the messages' estimated tokens, whether they have reasoning, and whether they have anything but text."""
    total, bytes_per_token = 0, cost.bytes_per_token
    has_reasoning = has_media = False
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        if isinstance(content, str):
            total += -(-length(content) // bytes_per_token)
        else:
            for part in _json_objects(content):
                total += _estimate_part_tokens(part, cost, length)
                has_media = has_media or "text" not in part
        if "reasoning_content" in message or "reasoning" in message:
            has_reasoning = True
    return total, has_reasoning, has_media


def estimate_text_tokens(prompt: object, cost: Cost, length: Callable[[str], int] = count_text_bytes) -> int:
    """Return the estimated number of tokens of a `prompt`: a text, token ids, or a list of either.

    Args:
        prompt: The member of the request.
        cost: The settings of the estimate.
        length: Returns the length of a text in bytes.
    """
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        return sum(_estimate_prompt_tokens(item, cost, length) for item in prompt)
    return _estimate_prompt_tokens(prompt, cost, length)


def _estimate_prompt_tokens(prompt: object, cost: Cost, length: Callable[[str], int]) -> int:
    if isinstance(prompt, str):
        return -(-length(prompt) // cost.bytes_per_token)
    return len(prompt) if isinstance(prompt, list) else 0


def _estimate_part_tokens(part: Mapping[str, Any], cost: Cost, length: Callable[[str], int]) -> int:
    """Return the estimated tokens of one part of a message's content. An image counts a fixed number of tokens."""
    kind = part.get("type")
    if kind == "text" or "text" in part:
        return estimate_text_tokens(part.get("text"), cost, length)
    return cost.audio_tokens if isinstance(kind, str) and "audio" in kind else cost.image_tokens


def _json_objects(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        return []
    for item in value:
        if not isinstance(item, dict):
            return [item for item in value if isinstance(item, dict)]
    return value


def read_output_limit(values: Mapping[str, Any]) -> int | None:
    """Return the client's limit on output tokens; None if it gave none.

    If both limits are present, `max_completion_tokens` is used instead of `max_tokens`, as in vLLM.
    """
    limit = values.get("max_completion_tokens")
    if type(limit) is not int or limit <= 0:
        limit = values.get("max_tokens")
        if type(limit) is not int or limit <= 0:
            return None
    return min(limit, MAX_OUTPUT_TOKENS)
