"""Clients that leave, requests that wait for their turn, and a gateway that ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Final

from proxy.wire.openai import Api
from tests.asking import request, until
from tests.deployment import Deployment
from tests.dialects import messages
from tests.recorded.conversation import Conversation, Talk
from tests.talking import Clients, Line, raw

BODIES: Final = {
    "stream": raw(request(Api.CHAT, stream=True, max_tokens=4)),
    "whole": raw(request(Api.COMPLETIONS, max_tokens=4)),
    "message": raw(messages.question(stream=True, max_tokens=4), "/v1/messages"),
}
PHASES: Final[dict[str, tuple[str, str, dict[str, Any], Callable[[Deployment], bool]]]] = {
    "prefill": ("prefill", "hang_before_headers", {}, lambda gateway: gateway.prefillers[0].state.live == 1),
    "handoff": ("decode", "hang_before_headers", {}, lambda gateway: gateway.decoders[0].state.live == 1),
    "answer": (
        *("decode", "stall_after_tokens", {"tokens": 3}),
        lambda gateway: gateway.decoders[0].state.tokens_generated >= 3,
    ),
}
ENDLESS: Final = raw(request(Api.CHAT, "endless", stream=True))
THIRD_TOKEN: Final = b'"finish_reason":null,"token_ids'
QUEUE: Final = "pdproxy_queued_requests"


def ending(body: str, phase: str, how: str) -> Talk:
    role, action, fields, is_there = PHASES[phase]

    async def talk(clients: Clients) -> None:
        gateway = clients.gateway
        engine = gateway.prefillers[0] if role == "prefill" else gateway.decoders[0]
        engine.faults.add(action, times=1, **fields)
        line = await clients.connect()
        line.send(BODIES[body])
        await engine.wait_until(lambda _: is_there(gateway))
        if how == "leaves":
            line.leave()
        else:
            gateway.worker.drain_manager.cut_off_all()
            await line.answer()
        await clients.rest()

    return talk


async def occupied(clients: Clients) -> Line:
    """Connect a client whose answer occupies the decoder until it leaves."""
    clients.gateway.decoders[0].faults.add("stall_after_tokens", times=1, tokens=1)
    line = await clients.connect()
    line.send(ENDLESS)
    await clients.gateway.decoders[0].wait_until(lambda state: state.tokens_generated >= 1)
    return line


async def queued(clients: Clients, body: str, number: int = 1) -> Line:
    line = await clients.connect()
    line.send(BODIES[body])
    await until(lambda: clients.gateway.metrics(QUEUE) == {(): float(number)}, "a request to wait")
    return line


def waiting(body: str, how: str) -> Talk:
    async def talk(clients: Clients) -> None:
        first = await occupied(clients)
        second = await queued(clients, body)
        if how == "its-turn-comes":
            first.leave()
            await second.answer()
            second.send(BODIES[body])
            await second.answer()
        elif how == "leaves":
            second.leave()
            await until(lambda: clients.gateway.metrics(QUEUE) in ({}, {(): 0.0}), "an empty queue")
            first.leave()
        elif how == "too-long":
            await second.answer()
            first.leave()
        else:
            refused = await clients.connect()
            refused.send(BODIES[body])
            await refused.answer()
            first.leave()
            await second.answer()

    return talk


def conversations() -> Iterator[Conversation]:
    options: dict[str, Any] = {"settings": {"resume": {"mode": "off"}}, "loses_kv": True}
    for phase, body, how in product(PHASES, BODIES, ("leaves", "is-cut-off")):
        if phase == "answer" or body != "message":
            yield Conversation(name=f"{how}-in-{phase}-{body}", talk=ending(body, phase, how), **options)
    for body, how in product(BODIES, ("its-turn-comes", "leaves", "too-long", "no-place")):
        admission: dict[str, Any] = {"max_running_decode": 1, "wait_seconds": 0.2 if how == "too-long" else 5.0}
        if how == "no-place":
            admission["max_waiting"] = 1
        settings = {"resume": {"mode": "off"}, "admission": admission}
        yield Conversation(name=f"waits-{how}-{body}", talk=waiting(body, how), settings=settings, loses_kv=True)


CONVERSATIONS: Final = tuple(conversations())
