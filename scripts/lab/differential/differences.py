"""Differences between two records of the same request, by member and by header.

Values that differ each time, such as rooms, ids and the program's address, are replaced by a word.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from typing import Any
from urllib.parse import urlsplit

from lab.differential.pairs import Pair
from lab.differential.protocols import EngineRequest, is_several, units
from lab.differential.requests import Request

CLIENT, PREFILL, DECODE = "client", "prefill", "decode"
STATUS, LEGS, RULES = "(status)", "(requests)", "(rules)"

# Headers of a connection instead of a request.
_OF_THE_CONNECTION = frozenset(
    {"accept", "accept-encoding", "connection", "content-length", "host", "transfer-encoding", "user-agent"}
)
_IDS = frozenset(
    {
        *("rid", "header x-request-id"),
        *(f"kv_transfer_params.{name}" for name in ("remote_request_id", "request_id", "transfer_id")),
    }
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A header, or a member of a body by its path. Values are JSON, and None if absent."""

    pair: Pair
    request: str
    leg: str
    member: str
    peers: str | None
    ours: str | None
    sent: str | None = None
    """The client's value."""


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one request: the client's status, the requests to engines, and violations of the protocol."""

    status: int
    requests: Sequence[EngineRequest]
    problems: Sequence[str]


def compare(pair: Pair, request: Request, peers: Record, ours: Record) -> Iterator[Difference]:
    """Yield the differences, if the other program accepted the request."""
    for problem in ours.problems:
        yield Difference(pair, request.name, CLIENT, RULES, None, problem)
    if not 200 <= peers.status < 300:
        return
    if peers.status != ours.status:
        yield Difference(pair, request.name, CLIENT, STATUS, str(peers.status), str(ours.status))
        return
    sent = _Leg(request.path, request.headers, json.loads(request.body)).members
    for leg in (PREFILL, DECODE):
        theirs, own = (_legs(record, leg) for record in (peers, ours))
        if any(is_several(each.body) for each in theirs) and not any(is_several(each.body) for each in own):
            yield Difference(pair, request.name, leg, LEGS, str(len(theirs)), str(len(own)))
            theirs = [replace(each, body=unit) for each in theirs for unit in units(each.body)]
        if len(theirs) != len(own):
            yield Difference(pair, request.name, leg, LEGS, f"{len(theirs)} as split", str(len(own)))
            continue
        # Parts run concurrently, so their order is arbitrary.
        for one, other in zip(sorted(theirs, key=_Leg.order), sorted(own, key=_Leg.order), strict=True):
            theirs_by_name, own_by_name = one.members, other.members
            for name in sorted({*theirs_by_name, *own_by_name}):
                values = theirs_by_name.get(name), own_by_name.get(name)
                if values[0] != values[1]:
                    yield Difference(pair, request.name, leg, name, *values, sent.get(name))


@dataclass(frozen=True, slots=True)
class _Leg:
    """The parts of a request to an engine, or of the client's request."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]

    @property
    def members(self) -> dict[str, str]:
        """Everything to compare, as JSON by name."""
        headers = {f"header {name.lower()}": value for name, value in self.headers.items()}
        parts = {"(path)": self.path, **headers, **dict(_leaves("", self.body))}
        of_the_connection = {f"header {name}" for name in _OF_THE_CONNECTION}
        return {name: _as_json(name, value) for name, value in parts.items() if name not in of_the_connection}

    def order(self) -> str:
        """Return a sort key that is equal for equal parts."""
        return json.dumps([self.body.get(name) for name in ("prompt", "seed", "text", "input_ids")])


def _legs(record: Record, leg: str) -> list[_Leg]:
    requests = [requests for requests in record.requests if requests.role == leg]
    return [_Leg(each.path, each.headers, json.loads(each.body)) for each in requests]


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested members by their path. Empty objects and arrays are values."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else key, inner)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(f"{name}[{index}]", inner)
    else:
        yield name, value


def _as_json(name: str, value: Any) -> str:
    """Return a value as JSON, in which 1, 1.0 and true differ."""
    if name in _IDS:
        value = "an id"
    elif name.partition("[")[0] == "bootstrap_room":
        value = "a room"
    elif name == "kv_transfer_params.metaserver":
        value = urlsplit(value).path
    return json.dumps(value, ensure_ascii=False)


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
    """A difference of pdproxy or of the other program, and the reason why it is accepted."""

    title: str
    reason: str
    covers: Callable[[Difference], bool]


def correction(difference: Difference) -> Correction | None:
    """Return the correction that covers a difference, or None."""
    return next((each for each in CORRECTIONS if each.covers(difference)), None)


CORRECTIONS = (
    Correction(
        "rejected here",
        "only the prefiller knows prompt log probabilities, and beam search has many sequences, so two engines can "
        "serve neither; the other programs omit them silently",
        lambda d: (d.leg, d.member, d.ours) == (CLIENT, STATUS, "400") and d.request in _REFUSED,
    ),
    Correction(
        "fan-out",
        "a handoff carries the KV of one sequence, so several prompts and samples are split; each part must equal the "
        "other program's request, with one prompt, a separate seed and no n",
        lambda d: d.member == LEGS and _split_is_right(d),
    ),
    Correction(
        "one dictionary for all prompts",
        "the layerwise example sends several prompts together, with the parameters of every decoder in one request",
        lambda d: _is(d, "ascend_layerwise", PREFILL) and d.member.startswith(_BATCHED) and d.ours is None,
    ),
    Correction(
        "rank",
        "vLLM's own proxy for its MooncakeConnector names the data-parallel rank of the engine in both legs",
        lambda d: (
            _is(d, "mooncake_bootstrap", PREFILL) and d.member == "header x-data-parallel-rank" and d.ours == '"0"'
        ),
    ),
    Correction(
        "own ids",
        "the gateway gives each attempt an id, for logs and for aborting it",
        lambda d: d.member in ("rid", "header x-request-id") and d.ours == '"an id"' and d.peers is None,
    ),
    Correction(
        "reserved members",
        "a client could send a decoder to any host, or collide with a live request, so they are removed",
        lambda d: d.member in _RESERVED and d.ours is None and d.peers == d.sent,
    ),
    Correction(
        "only one token",
        "a prefiller's token is discarded, so its log probabilities and ids are not requested",
        lambda d: d.leg == PREFILL and d.member in _OF_THE_TOKENS and d.ours is None and d.peers == d.sent,
    ),
    Correction(
        "token ids",
        "an answer whose decoder is lost is resumed from its token ids",
        lambda d: d.leg == DECODE and d.member == "return_token_ids" and d.ours == "true" and d.peers is None,
    ),
    Correction(
        "streamed inside",
        "the gateway can resume an answer without a stream only if it has received a part of it",
        lambda d: d.leg == DECODE and d.member == "stream" and d.ours == "true" and d.sent in (None, "false", "null"),
    ),
    Correction(
        "usage chunk",
        "the gateway counts tokens by it, and removes it for clients that did not request it",
        lambda d: (
            (d.leg == DECODE or _is(d, "sglang_bootstrap", PREFILL))
            and d.member in _USAGE
            and d.ours in ("true", None)
            and d.sent != "true"
        ),
    ),
    Correction(
        "credentials",
        "the client's or the gateway's key is sent, never an empty or invented one",
        lambda d: d.member == "header authorization" and d.ours == d.sent,
    ),
    Correction(
        "trace context",
        "engines join the client's trace",
        lambda d: d.member in _TRACING and d.ours == d.sent is not None,
    ),
    Correction(
        "other headers",
        "engines do not need cookies, and an engine with one rank answers 400 to X-data-parallel-rank",
        lambda d: d.member in _DROPPED_HEADERS and d.ours is None and d.peers == d.sent,
    ),
    Correction(
        "theirs: defaults",
        "the routers in Rust parse a body into typed structures and write the defaults of missing members",
        lambda d: _is_router(d) and d.ours == d.sent is None and d.peers == _ADDED_DEFAULTS.get(d.member, d.ours),
    ),
    Correction(
        "theirs: numbers",
        "they rewrite numbers as 32-bit or floating ones; pdproxy keeps the client's digits",
        lambda d: _is_router(d) and d.ours == d.sent and _is_nearly(d.peers, d.ours),
    ),
    Correction(
        "theirs: left out",
        "they drop members that their types lack, vllm-router nested ones and sglang-router all; pdproxy keeps them",
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
    """Return whether a difference is in this leg of this connector."""
    return (difference.pair.connector, difference.leg) == (connector, leg)


def _is_router(difference: Difference) -> bool:
    """Return whether the other program is a router in Rust."""
    return difference.pair.peer.name in _TYPED


def _split_is_right(difference: Difference) -> bool:
    """Return whether the number of parts is right. The parts themselves are compared one by one."""
    return "as split" not in (difference.peers or "")


def _is_nearly(peers: str | None, ours: str | None) -> bool:
    """Return whether both are nearly equal numbers."""
    one, other = (None if value is None else json.loads(value) for value in (peers, ours))
    numbers = int | float
    return isinstance(one, numbers) and isinstance(other, numbers) and isclose(one, other, rel_tol=2**-23)
