"""What is asked for, and what goes wrong with engines, comes to the same on both roads."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import request

if TYPE_CHECKING:
    from tests.deployment import Deployment
    from tests.fast_path.roads import Roads
    from tests.talking import Clients

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

SHAPES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "one token": {"max_tokens": 1},
    "no limit": {"max_tokens": None},
    "usage": {"stream_options": {"include_usage": True}},
    "usage all along": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "no usage": {"stream_options": {"include_usage": False}},
    "token ids": {"return_token_ids": True},
    "stop strings": {"stop": ["a", "e"]},
    "log probabilities": {"logprobs": 1},
    "two samples": {"n": 2},
    "seed": {"seed": 7, "temperature": 0.5, "min_tokens": 3},
    "a user": {"user": "somebody", "unknown": {"a": [1, 2.50, None]}},
}
OF_CHATS: dict[str, dict[str, Any]] = {
    "tools": {"tools": [TOOL], "tool_choice": "required"},
    "a tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
    "reasoning": {"chat_template_kwargs": {"thinking": True}, "max_tokens": 30},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
    "hidden reasoning": {"chat_template_kwargs": {"thinking": True}, "include_reasoning": False, "max_tokens": 30},
    "format": {"response_format": {"type": "json_object"}},
    "bad": {"messages": 7},
}
REFUSED = ("bad", "token ids")
"""By both of SGLang's engines."""
# One leg after the other, one alone, two at a time.
CONNECTORS = ("vllm_pull", "plain", "sglang_bootstrap")
WRONG: list[tuple[str, str, dict[str, Any]]] = [
    *(
        (role, "refuse_status", {"status": status})
        for role, status in product(("prefill", "decode"), (400, 429, 500, 503))
    ),
    *((role, action, {}) for role in ("prefill", "decode") for action in ("reset_before_headers", "invalid_json")),
    *((role, action, {}) for role in ("prefill", "decode") for action in ("truncated_json", "kill", "close_reused")),
    *((role, "slow_headers", {"seconds": 0.003}) for role in ("prefill", "decode")),
    *((role, "hang_before_headers", {}) for role in ("prefill", "decode")),
    *((role, "hang_after_headers", {}) for role in ("prefill", "decode")),
    ("prefill", "missing_kv_params", {}),
    ("prefill", "lost_response", {}),
    ("decode", "reset_after_headers", {}),
    ("decode", "load_failure", {}),
    *(
        ("decode", action, {"tokens": tokens})
        for action, tokens in product(
            ("reset_after_tokens", "stall_after_tokens", "end_without_finish", "error_event", "recompute", "kill"),
            (0, 1, 3),
        )
    ),
    ("decode", "end_without_finish", {"tokens": 3, "done": True}),
    ("decode", "recompute", {"tokens": 3, "merged": 1}),
    ("decode", "drop_token_ids", {}),
    ("decode", "split_bytes", {"size": 1}),
    ("decode", "split_bytes", {"size": 7}),
    ("decode", "coalesce", {"size": 3}),
    ("decode", "crlf", {}),
    ("decode", "comments", {}),
]


def shapes() -> list[tuple[Api, bool, str, str]]:
    rows = []
    for api, stream, connector in product(OPENAI_APIS, (True, False), CONNECTORS):
        names = {**SHAPES, **(OF_CHATS if api is Api.CHAT else {})}
        # The samples of a stream come in any order.
        rows += [(api, stream, name, connector) for name in names if not (stream and name == "two samples")]
    return rows


@pytest.mark.covering("api stream shape connector", shapes())
async def test_an_answer_is_the_same(roads: Roads, api: Api, stream: bool, shape: str, connector: str) -> None:
    fields = (OF_CHATS if api is Api.CHAT and shape in OF_CHATS else SHAPES)[shape]

    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        body = {name: value for name, value in request(api, stream=stream, **fields).items() if value is not None}
        for number in range(2):
            await line.ask(body, X_Request_Id=f"r-{number}")

    def prepare(gateway: Deployment) -> None:
        if connector == "sglang_bootstrap" and shape in REFUSED:
            # What the first one says has the other one's leg given up: not before it was read, and always the same.
            for engines, seconds in ((gateway.prefillers, 0.02), (gateway.decoders, 0.05)):
                for engine in engines:
                    engine.faults.add("slow_headers", seconds=seconds)

    course = await roads.take(
        talk,
        connector=connector,
        before=prepare,
        is_fast=0 if "usage" in shape and not stream else 2,  # such requests are refused
        counts_reads=connector != "sglang_bootstrap",  # whose decoders have begun before
        resume={"mode": "exact" if stream else "off"},
    )
    assert len(course.answers[0]) == 2


def failures() -> list[tuple[str, str, str, dict[str, Any], bool, bool, str, str]]:
    return [
        (*wrong, stream, is_first, mode, connector)
        for wrong, stream, is_first, mode, connector in product(
            [(f"{role}-{action}-{fields}", role, action, fields) for role, action, fields in WRONG],
            (True, False),
            (True, False),
            ("exact", "restart-only"),
            ("vllm_pull", "sglang_bootstrap"),
        )
        # Where all decoders fail, it depends on who is faster whom a release still reaches, and whose turn is next.
        if (is_first or wrong[1] == "prefill")
        # SGLang's decoder waits for KV that does not come, for minutes.
        and not (connector == "sglang_bootstrap" and wrong[2] == "missing_kv_params")
    ]


@pytest.mark.covering("name role action fields stream is_first mode connector", failures())
async def test_what_fails_comes_to_the_same(
    roads: Roads,
    name: str,
    role: str,
    action: str,
    fields: dict[str, Any],
    stream: bool,
    is_first: bool,
    mode: str,
    connector: str,
) -> None:
    all_refuse = not is_first and fields.get("status") in (429, 503)

    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        body = request(Api.CHAT, stream=stream)
        await line.ask(body, X_Request_Id="r-0")
        await clients.rest()
        engines = clients.gateway.prefillers if role == "prefill" else clients.gateway.decoders
        for engine in engines[: 1 if is_first else None]:
            engine.faults.add(action, **fields)
        await line.ask(body, X_Request_Id="r-1")
        for engine in engines:
            engine.faults.clear()
        await clients.rest()
        if not all_refuse:  # or else they are not asked for a moment
            line = await clients.connect()
            await line.ask(body, X_Request_Id="r-2")

    def prepare(gateway: Deployment) -> None:
        gateway.may_stay_pinned = 2
        gateway.expects_inexact_pins = True
        gateway.expects_resent = True

    short = {f"{stage}_seconds": 0.5 for stage in ("prefill", "handoff", "first_token", "answer", "idle")}
    await roads.take(
        *(talk, 2, 2),
        connector=connector,
        counts_reads=connector != "sglang_bootstrap",
        before=prepare,
        resume={"mode": mode, "repeat_up_to_tokens": 0},
        timeouts=short if "hang" in action or "stall" in action else {},
        admission={"wait_seconds": 0.01 if all_refuse else 0.5},
    )
