"""The differences that are meant, each with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import isclose

from lab.differential.differences import CLIENT, DECODE, LEGS, PREFILL, STATUS, Difference

_RESERVED = frozenset(
    {
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "request_id", "rid"),
        *(f"kv_transfer_params.{name}" for name in ("do_remote_prefill", "remote_host", "remote_port")),
    }
)
_OF_THE_TOKENS = frozenset({"logprobs", "top_logprobs", "return_token_ids"})
_DROPPED_HEADERS = frozenset({"header cookie", "header x-custom", "header x-data-parallel-rank"})
_BATCHED = "kv_transfer_params.batch_kv_transfer_params."
_USAGE = ("stream_options", "stream_options.include_usage")
_TRACING = frozenset({"header traceparent", "header tracestate"})
_ADDED_DEFAULTS = {
    "continue_final_message": "false",
    "echo": "false",
    "ignore_eos": "false",
    "include_reasoning": "true",
    "logprobs": "false",
    "no_stop_trim": "false",
    "return_hidden_states": "false",
    "separate_reasoning": "true",
    "skip_special_tokens": "true",
    "stream": "false",
    "stream_reasoning": "true",
    **dict.fromkeys(("background", "no_logs", "return_bytes", "return_entropy", "return_text_in_logprobs"), "false"),
    "log_metrics": "true",
    "model": "null",
    "tool_choice": '"auto"',
}


_TYPED = {"vllm-router": ("messages[", "tools[", "stream_options."), "sglang-router": ("",)}
_REFUSED = ("chat: prompt log probabilities", "chat: beam search")


@dataclass(frozen=True, slots=True)
class Correction:
    """Something that is done otherwise here, or by the other program, and why that is right."""

    title: str
    reason: str
    covers: Callable[[Difference], bool]


def correction(difference: Difference) -> Correction | None:
    """The one that covers a difference; None when nobody has explained it."""
    return next((each for each in CORRECTIONS if each.covers(difference)), None)


CORRECTIONS = (
    Correction(
        "refused here",
        "prompt log probabilities are only the prefiller's to tell, and beam search has many sequences: neither can be "
        "served by two engines, and the others answer without",
        lambda d: (d.leg, d.member, d.ours) == (CLIENT, STATUS, "400") and d.request in _REFUSED,
    ),
    Correction(
        "fan-out",
        "one hand-over carries the KV of one sequence, so several prompts and samples are split; each part must be "
        "what the other program sends, with one prompt, its own seed and no n",
        lambda d: d.member == LEGS and _split_is_right(d),
    ),
    Correction(
        "one dictionary for all prompts",
        "for prompts that the layerwise example leaves together it puts every decoder's words into one request",
        lambda d: _is(d, "ascend_layerwise", PREFILL) and d.member.startswith(_BATCHED) and d.ours is None,
    ),
    Correction(
        "rank",
        "vLLM's own proxy for its MooncakeConnector names the data-parallel rank whose engine both legs speak of",
        lambda d: (
            _is(d, "mooncake_bootstrap", PREFILL) and d.member == "header x-data-parallel-rank" and d.ours == '"0"'
        ),
    ),
    Correction(
        "own ids",
        "each attempt has an id of the gateway's, by which it can be found in logs and aborted",
        lambda d: d.member in ("rid", "header x-request-id") and d.ours == '"an id"' and d.peers is None,
    ),
    Correction(
        "reserved members",
        "from a client they could send a decoder to any host, or collide with a live request, so they are removed",
        lambda d: d.member in _RESERVED and d.ours is None and d.peers == d.sent,
    ),
    Correction(
        "only one token",
        "a prefiller's token is thrown away, so that its log probabilities and ids are asked for nothing",
        lambda d: d.leg == PREFILL and d.member in _OF_THE_TOKENS and d.ours is None and d.peers == d.sent,
    ),
    Correction(
        "token ids",
        "an answer whose decoder is lost goes on from its token ids",
        lambda d: d.leg == DECODE and d.member == "return_token_ids" and d.ours == "true" and d.peers is None,
    ),
    Correction(
        "streamed inside",
        "an answer that is not streamed can only go on elsewhere if the gateway has what there is of it",
        lambda d: d.leg == DECODE and d.member == "stream" and d.ours == "true" and d.sent in (None, "false", "null"),
    ),
    Correction(
        "usage chunk",
        "tokens are counted by it; clients that did not ask for it do not see it",
        lambda d: (
            (d.leg == DECODE or _is(d, "sglang_bootstrap", PREFILL))
            and d.member in _USAGE
            and d.ours in ("true", None)
            and d.sent != "true"
        ),
    ),
    Correction(
        "credentials",
        "the client's own, or the gateway's key, and never an empty or invented one",
        lambda d: d.member == "header authorization" and d.ours == d.sent,
    ),
    Correction(
        "trace context",
        "engines join the client's trace",
        lambda d: d.member in _TRACING and d.ours == d.sent is not None,
    ),
    Correction(
        "other headers",
        "cookies are not the engines' business, and an engine of one rank answers 400 to X-data-parallel-rank",
        lambda d: d.member in _DROPPED_HEADERS and d.ours is None and d.peers == d.sent,
    ),
    Correction(
        "theirs: defaults",
        "the routers in Rust read a body into types of their own and write out what they think are its defaults",
        lambda d: _is_router(d) and d.ours == d.sent is None and d.peers == _ADDED_DEFAULTS.get(d.member, d.ours),
    ),
    Correction(
        "theirs: numbers",
        "they write numbers again, as 32-bit or as floating ones; here the client's own digits arrive",
        lambda d: _is_router(d) and d.ours == d.sent and _is_nearly(d.peers, d.ours),
    ),
    Correction(
        "theirs: left out",
        "they keep what their types know, vllm-router of nested members and sglang-router of all; here all arrives",
        lambda d: (
            _is_router(d) and d.ours == d.sent and d.peers is None and d.member.startswith(_TYPED[d.pair.peer.name])
        ),
    ),
    Correction(
        "theirs: reasoning",
        "vllm-router calls a message's reasoning_content by vLLM's newer name; vLLM takes both since 0.23",
        lambda d: d.pair.peer.name == "vllm-router" and d.member.endswith("].reasoning") and d.ours == d.sent is None,
    ),
    Correction(
        "theirs: max_completion_tokens",
        "sglang-router calls a chat's max_tokens by OpenAI's newer name; SGLang takes both",
        lambda d: (
            d.pair.peer.name == "sglang-router" and d.member == "max_completion_tokens" and d.ours == d.sent is None
        ),
    ),
)


def _is(difference: Difference, connector: str, leg: str) -> bool:
    """Whether it is of this leg of this connector."""
    return (difference.pair.connector, difference.leg) == (connector, leg)


def _is_router(difference: Difference) -> bool:
    """Whether the other program is one in Rust."""
    return difference.pair.peer.name in _TYPED


def _split_is_right(difference: Difference) -> bool:
    """Parts are compared one by one, and so is their number, with what the request stands for."""
    return "as split" not in (difference.peers or "")


def _is_nearly(peers: str | None, ours: str | None) -> bool:
    """Whether both are numbers, and almost the same one."""
    one, other = (None if value is None else json.loads(value) for value in (peers, ours))
    numbers = int | float
    return isinstance(one, numbers) and isinstance(other, numbers) and isclose(one, other, rel_tol=2**-23)
