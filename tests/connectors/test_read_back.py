"""KV caches of answers that decoders keep, and that the prefiller of the next turn reads."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.connectors import read_back
from proxy.connectors.sequential import VllmPull
from proxy.settings import Cost
from proxy.wire.openai import Api
from tests.asking import Answer, answer_alone, request, until
from tests.clock import Clock
from tests.conftest import Deploy
from tests.deployment import Deployment
from tests.parsing import parse

TEXT = "once upon a time in a land far away a gateway counted the tokens of its decoders " * 8
BOTH: dict[str, Any] = {
    "engine": {"profile_name": "v0.33", "dev_mode": True, "bidirectional_kv_xfer": True, "block_size": 16}
}


def turn(prompt: str, **fields: Any) -> dict[str, Any]:
    return request(Api.COMPLETIONS, **{"max_tokens": 40, "stream": True, **fields}) | {"prompt": prompt}


async def start(deploy: Deploy, prefillers: int = 1, decoders: int = 1, **options: Any) -> Deployment:
    gateway = await deploy(prefillers, decoders, **{**BOTH, **options})
    gateway.may_stay_pinned = 20  # decoders keep the KV cache of each answer
    return gateway


def answer_ids(answer: Answer) -> list[int]:
    """Return the token ids of an answer."""
    payloads = [each for each in answer.events if isinstance(each, dict)] if answer.is_stream else [answer.json]
    return [number for each in payloads for choice in each["choices"] for number in choice["token_ids"] or ()]


def read_backs(gateway: Deployment) -> int:
    return sum(engine.state.read_backs for engine in gateway.prefillers)


@pytest.mark.parametrize("session", [{}, {"prompt_cache_key": "s-1"}], ids=["by prompt", "by session"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_next_turn_reads_the_previous_answer(deploy: Deploy, session: dict[str, str], stream: bool) -> None:
    """Turns go to two prefillers alternately, whose prefix caches are separate."""
    gateway = await start(deploy, prefillers=2, balance={"prefill_policy": "round_robin"})
    prompt = [*TEXT.encode()]
    for turn in range(3):
        body = request(Api.COMPLETIONS, max_tokens=40, stream=stream, **session) | {"prompt": prompt}
        answer = await gateway.ask({**body, "return_token_ids": True})
        assert (answer.status, answer.text) == (200, await answer_alone(body))
        prompt = [*prompt, *answer_ids(answer), *b" and then " * 3]
        assert read_backs(gateway) == turn
    assert gateway.metrics("pdproxy_read_backs_total") == {("read",): 2.0}
    assert len(gateway.decoders[0].pins) == 1  # that of the last answer


async def ask_twice(gateway: Deployment, answer: str = "") -> None:
    """Ask a prompt and one that goes on after its answer. `answer`: the text to go on after; empty: the real answer."""
    said = await gateway.ask(turn(TEXT))
    assert (said.status, said.text) == (200, await answer_alone(turn(TEXT)))
    second = turn(f"{TEXT}{answer or said.text}, and then?")
    said = await gateway.ask(second)
    assert (said.status, said.text) == (200, await answer_alone(second))


async def test_prompt_of_text_is_tokenized_once_to_compare_it(deploy: Deploy) -> None:
    gateway = await start(deploy)
    await ask_twice(gateway)
    assert read_backs(gateway) == 1
    assert [seen.path for seen in gateway.prefillers[0].requests].count("/tokenize") == 1
    await gateway.ask(turn("something else " * 80))
    assert [seen.path for seen in gateway.prefillers[0].requests].count("/tokenize") == 1


async def test_other_conversation_of_a_session_costs_no_tokenization(deploy: Deploy) -> None:
    gateway = await start(deploy)
    said = await gateway.ask(turn(TEXT, user="all"))
    await gateway.ask(turn("something else " * 80, user="all", max_tokens=1))
    assert not any(seen.path == "/tokenize" for seen in gateway.prefillers[0].requests)
    await gateway.ask(turn(f"{TEXT}{said.text}, and then?", user="all"))
    assert read_backs(gateway) == 1


async def test_short_prompt_of_a_session_reads_the_previous_answer(deploy: Deploy) -> None:
    gateway = await start(deploy)
    said = await gateway.ask(turn("once upon a time", user="all"))
    second = turn(f"once upon a time{said.text}, and then?", user="all")
    assert (await gateway.ask(second)).text == await answer_alone(second)
    assert read_backs(gateway) == 1


async def test_chat_that_is_rendered_otherwise_in_the_next_turn_is_computed(deploy: Deploy) -> None:
    """The template of Kimi K2 ends a prompt with markers that it leaves out when the answer is history."""
    gateway = await start(deploy)
    first = request(Api.CHAT, TEXT, stream=True)
    said = await gateway.ask(first)
    history = [*first["messages"], {"role": "assistant", "content": said.text}, {"role": "user", "content": "and?"}]
    second = first | {"messages": history}
    assert (await gateway.ask(second)).text == await answer_alone(second)
    assert read_backs(gateway) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"kv": {"read_back": "off"}},
        {"prefiller": {"bidirectional_kv_xfer": False}},  # it would wait forever
        {"prefiller": {"dev_mode": False}},
        {"decoder": {"bidirectional_kv_xfer": False}},
        {"resume": {"mode": "restart-only"}},  # the token ids of answers are not known
    ],
    ids=["off", "prefiller without it", "prefiller of unknown setup", "decoder without it", "unknown ids"],
)
async def test_no_cache_is_read_unless_both_engines_have_the_option(deploy: Deploy, options: dict[str, Any]) -> None:
    gateway = await start(deploy, **options)
    await ask_twice(gateway)
    assert read_backs(gateway) == 0


async def test_no_cache_is_read_behind_other_tokens(deploy: Deploy) -> None:
    gateway = await start(deploy)
    await ask_twice(gateway, "something else")
    assert read_backs(gateway) == 0
    assert gateway.metrics("pdproxy_read_backs_total") == {}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"tools": [], "tool_choice": "auto", "chat_template_kwargs": {"thinking": True}, "seed": 1}, True),
        ({"tool_choice": "none"}, False),
        ({"reasoning_effort": "low"}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"documents": []}, False),
        ({"truncate_prompt_tokens": 9}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, False),
    ],
    ids=str,
)
def test_tokens_of_a_chat_are_certain_without_rare_members(fields: dict[str, Any], expected: bool) -> None:
    call = parse(Api.CHAT, orjson.dumps(request(Api.CHAT) | fields), Cost())
    assert read_back._is_rendered_alike(call) is expected


@pytest.mark.fault(171)
async def test_prompt_is_computed_if_the_decoder_has_lost_its_cache(deploy: Deploy) -> None:
    gateway = await start(deploy)
    first = turn(TEXT)
    said = await gateway.ask(first)
    decoder = gateway.decoders[0]
    for name in [*decoder.pins]:
        decoder.core.protocol._take_pin(name, "release")  # type: ignore[attr-defined]
    second = turn(f"{TEXT}{said.text}, and then?")
    answer = await gateway.ask(second)
    assert (answer.status, answer.text) == (200, await answer_alone(second))
    assert gateway.metrics("pdproxy_read_backs_total") == {("failed",): 1.0}
    assert {labels[1] for labels in gateway.metrics("pdproxy_instance_requests_total")} == {"ok"}
    gateway.expects_inexact_pins = True


async def test_kept_caches_are_counted_until_they_are_read(deploy: Deploy) -> None:
    gateway = await start(deploy)
    first = turn(TEXT)
    said = await gateway.ask(first)
    (pin,) = gateway.worker.pinned_kv.current_pins()
    assert (pin.backend, pin.expires_at - pin.pinned_at) == (gateway.worker.pools.decode.all_backends()[0], 480.0)
    assert pin.pinned_tokens == next(iter(gateway.decoders[0].pins.values())).prompt_tokens
    await gateway.ask(turn(f"{TEXT}{said.text}, and then?"))
    (other,) = gateway.worker.pinned_kv.current_pins()  # that of the second answer
    assert other is not pin


async def test_kept_cache_is_not_read_after_its_time(deploy: Deploy) -> None:
    gateway = await start(deploy)
    clock = Clock()
    connector = gateway.worker.lanes.whole_lane.connector
    assert isinstance(connector, VllmPull)
    connector._kept_answers._clock = clock  # type: ignore[union-attr]
    said = await gateway.ask(turn(TEXT))
    clock.now += 451.0
    await gateway.ask(turn(f"{TEXT}{said.text}, and then?"))
    assert read_backs(gateway) == 0


async def test_cache_of_a_removed_decoder_is_not_read(deploy: Deploy) -> None:
    gateway = await start(deploy, decoders=2, health={"changing_interval_seconds": 0.01})
    said = await gateway.ask(turn(TEXT))
    (keeper,) = (engine for engine in gateway.decoders if engine.pins)
    (backend,) = (each for each in gateway.worker.pools.decode.all_backends() if each.port == keeper.port)
    gateway.roster.remove_backend(backend.role, backend.host, backend.port)
    await until(lambda: len(gateway.worker.pools.decode.all_backends()) == 1, "the removal")
    second = turn(f"{TEXT}{said.text}, and then?")
    assert (await gateway.ask(second)).text == await answer_alone(second)
    assert read_backs(gateway) == 0
    gateway.expects_inexact_pins = True
