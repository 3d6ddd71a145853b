"""Reasoning and tool calls, broken off behind every single token: what the client puts together is the same.

For one version whose chats go on as completions, for one that takes token ids for a chat, and for one that could.
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
    differences,
    generated,
    got,
    serving,
    story,
    thoughts,
    uninterrupted,
    unlike,
)

HOW = [("v0.23", "auto"), ("v0.33", "auto"), ("v0.27", "completions")]


@pytest.mark.parametrize(("profile", "chats"), HOW)
async def test_tool_calls_are_whole_wherever_they_break_off(profile: str, chats: str) -> None:
    body = story(**WITH_USAGE)
    expected = await uninterrupted(profile, body)
    calls = expected["choices"][0]["tool_calls"]
    assert [call["id"] for call in calls] == ["functions.find:0", "functions.show:1"]
    assert [list(orjson.loads(call["arguments"])) for call in calls] == [["q"], ["at"]]
    assert not await differences(profile, body, range(len(generated(body))), chats=chats)


@pytest.mark.parametrize(("profile", "chats"), HOW)
async def test_a_call_that_may_not_be_told_is_not_wherever_the_answer_breaks_off(profile: str, chats: str) -> None:
    body = story(**WITH_USAGE, parallel_tool_calls=False)
    expected = await uninterrupted(profile, body)
    assert [call["id"] for call in expected["choices"][0]["tool_calls"]] == ["functions.find:0"]
    assert not await differences(profile, body, range(0, len(generated(body)), 3), chats=chats)


@pytest.mark.parametrize("profile", ["v0.23", "v0.33"])
async def test_a_document_is_whole_wherever_it_breaks_off(profile: str) -> None:
    """It is bound to a grammar, which would begin anew: the same is generated again, and compared."""
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
async def test_reasoning_is_whole_wherever_it_breaks_off(profile: str, chats: str) -> None:
    body = thoughts("Go on", **WITH_USAGE, return_token_ids=True, max_tokens=60)
    assert (await uninterrupted(profile, body))["choices"][0]["reasoning"]
    assert not await differences(profile, body, range(60), chats=chats)


@pytest.mark.parametrize(("profile", "chats"), HOW)
@pytest.mark.parametrize("engine", [{"tokens_per_step": 3}, {"stream_interval": 8}], ids=["steps", "intervals"])
async def test_several_tokens_in_a_chunk_are_none_too_many(profile: str, chats: str, engine: dict[str, Any]) -> None:
    """As speculative decoding writes them, or an engine that streams now and then."""
    body = story(**WITH_USAGE)
    assert not await differences(profile, body, range(1, len(generated(body)), 4), engine=engine, chats=chats)


@pytest.mark.parametrize("profile", ["v0.18", "v0.30"])
async def test_tool_calls_are_whole_though_they_break_off_twice(profile: str) -> None:
    body = story(**WITH_USAGE)
    tools = range(60, len(generated(body)) - 15, 3)
    assert not await differences(profile, body, tools, then=13)


async def test_one_that_has_not_told_yet_what_it_is_changes_nothing() -> None:
    """The answer goes on as a completion then, but it was not that engine that began it."""
    body = story(**WITH_USAGE, max_tokens=100)  # which ends inside a call's id
    expected = await uninterrupted("v0.33", body)
    async with (
        SimulatedEngine(role="prefill", profile_name="v0.33", **ENGINE) as silent,
        serving("v0.33", decoders=1, resume={"pressure_seconds": 0.0}) as gateway,
    ):
        silent.faults.add("hang_before_headers", path="/version")
        gateway.roster.add(Backend(Role.PREFILL, silent.host, silent.port))
        (_, backend), (decoder,) = gateway.worker.pools.prefill.backends(), gateway.decoders
        joining = asyncio.create_task(gateway.worker.prober.joined(backend, "it answers"))
        await until(lambda: gateway.worker.health.of(backend).is_confirmed, "the silent one")
        for place in (3, 42, 43, 60):
            decoder.faults.clear()
            decoder.faults.add("recompute", tokens=place, times=1)
            assert not unlike(got(await gateway.ask(dict(body))), expected)
        assert actions(gateway) == ["raw_tokens"] * 4
        joining.cancel()
