"""Reasoning and tool calls that break off after every token: the client assembles the same answer.

The tests run with a version whose chats are resumed as completions, and with versions that take token ids for a chat.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from proxy.common.backend import Backend, Role
from proxy.sim.engine import SimulatedEngine
from tests.asking import until
from tests.conformance.resuming import (
    ENGINE,
    WITH_USAGE,
    actions,
    content_of,
    difference,
    differences,
    generated,
    serving,
    story,
    thoughts,
    uninterrupted,
)

HOW = [("v0.23", "auto"), ("v0.33", "auto"), ("v0.27", "completions")]


@pytest.mark.parametrize(("profile", "chats"), HOW)
async def test_tool_calls_are_complete_wherever_they_break(profile: str, chats: str) -> None:
    body = story(**WITH_USAGE)
    expected = await uninterrupted(profile, body)
    calls = expected["choices"][0]["tool_calls"]
    assert [call["id"] for call in calls] == ["functions.find:0", "functions.show:1"]
    assert [list(orjson.loads(call["arguments"])) for call in calls] == [["q"], ["at"]]
    assert not await differences(profile, body, range(len(generated(body))), chats=chats)


@pytest.mark.parametrize(("profile", "chats"), HOW)
async def test_suppressed_parallel_call_stays_suppressed_after_a_resume(profile: str, chats: str) -> None:
    body = story(**WITH_USAGE, parallel_tool_calls=False)
    expected = await uninterrupted(profile, body)
    assert [call["id"] for call in expected["choices"][0]["tool_calls"]] == ["functions.find:0"]
    assert not await differences(profile, body, range(0, len(generated(body)), 3), chats=chats)


@pytest.mark.parametrize("profile", ["v0.23", "v0.33"])
async def test_json_document_is_complete_wherever_it_breaks(profile: str) -> None:
    """The document is bound to a grammar, which cannot start in its middle. So it is replayed and compared."""
    properties = {"names": {"type": "array", "minItems": 4, "items": {"type": "string"}}, "size": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["names", "size"]}
    form = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    body = thoughts(**WITH_USAGE, temperature=0, max_tokens=120, response_format=form)
    (choice,) = (await uninterrupted(profile, body))["choices"].values()
    document = orjson.loads(choice["content"])
    assert (len(document["names"]) >= 4, isinstance(document["size"], int)) == (True, True)
    tokens = len(choice["reasoning"]) + len(choice["content"])
    assert not await differences(profile, body, range(0, tokens, 5))


@pytest.mark.parametrize(("profile", "chats"), HOW)
async def test_reasoning_is_complete_wherever_it_breaks(profile: str, chats: str) -> None:
    body = thoughts("Go on", **WITH_USAGE, return_token_ids=True, max_tokens=60)
    assert (await uninterrupted(profile, body))["choices"][0]["reasoning"]
    assert not await differences(profile, body, range(60), chats=chats)


@pytest.mark.parametrize(("profile", "chats"), HOW)
@pytest.mark.parametrize("engine", [{"tokens_per_step": 3}, {"stream_interval": 8}], ids=["steps", "intervals"])
async def test_chunks_of_several_tokens_are_counted_correctly(profile: str, chats: str, engine: dict[str, Any]) -> None:
    """Speculative decoding writes such chunks, and so does an engine with a stream interval."""
    body = story(**WITH_USAGE)
    assert not await differences(profile, body, range(1, len(generated(body)), 4), engine=engine, chats=chats)


@pytest.mark.parametrize("profile", ["v0.18", "v0.30"])
async def test_tool_calls_are_complete_when_they_break_twice(profile: str) -> None:
    body = story(**WITH_USAGE)
    tools = range(60, len(generated(body)) - 15, 3)
    assert not await differences(profile, body, tools, then=13)


async def test_engine_of_unknown_version_does_not_change_resumed_answers() -> None:
    """While a version is unknown, answers are resumed as completions, although another engine began them."""
    body = story(**WITH_USAGE, max_tokens=100)  # which ends inside a call's id
    expected = await uninterrupted("v0.33", body)
    async with (
        SimulatedEngine(role="prefill", profile_name="v0.33", **ENGINE) as silent,
        serving("v0.33", decoders=1, resume={"pressure_seconds": 0.0}) as gateway,
    ):
        silent.faults.add("hang_before_headers", path="/version")
        gateway.roster.add_for_administrator(Backend(Role.PREFILL, silent.host, silent.port))
        (_, backend), (decoder,) = gateway.worker.pools.prefill.all_backends(), gateway.decoders
        joining = asyncio.create_task(gateway.worker.prober.on_backend_joined(backend, "it answers"))
        await until(lambda: gateway.worker.health.health_of(backend).is_confirmed_healthy, "the silent one")
        for place in (3, 42, 43, 60):
            decoder.faults.clear()
            decoder.faults.add("recompute", tokens=place, times=1)
            assert not difference(content_of(await gateway.ask(dict(body))), expected)
        assert actions(gateway) == ["raw_tokens"] * 4
        joining.cancel()
