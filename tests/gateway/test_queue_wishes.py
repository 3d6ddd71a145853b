"""Priorities of requests and keys, deadlines for the first token and early rejection, in a whole gateway."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from proxy.settings.client_keys import ClientKey
from proxy.sim.engine import SimulatedEngine
from proxy.sim.state import RecordedRequest
from proxy.wire.openai import Api
from tests.asking import Answer, request, until
from tests.conftest import Deploy
from tests.deployment import Deployment, generations


class Busy:
    """A gateway whose only decoder writes an endless stream, until its client leaves."""

    def __init__(self, gateway: Deployment, client: Any) -> None:
        self.gateway = gateway
        self.asked: dict[str, asyncio.Task[Answer]] = {}
        self._client = client

    async def queue(self, name: str, body: dict[str, Any] | None = None, **headers: str) -> None:
        """Queue a request with this text and further members."""
        whole = request(Api.CHAT, name, stream=True, max_tokens=1) | (body or {})
        self.asked[name] = asyncio.create_task(self.gateway.ask(whole, **headers))
        waiting = {(): float(len(self.asked))}
        await until(lambda: self.gateway.metrics("pdproxy_queued_requests") == waiting, f"{name} in the queue")

    async def refused(self, body: dict[str, Any] | None = None, **headers: str) -> Answer:
        """Return the answer to a request that is rejected."""
        answer = await self.gateway.ask(request(Api.CHAT, stream=True, max_tokens=1) | (body or {}), **headers)
        assert not generations(*self.gateway.prefillers)[1:]
        return answer

    async def served(self) -> list[str]:
        """Free the decoder, and return the texts in the order in which it got them."""
        await self._client.leave()
        answers = await asyncio.gather(*self.asked.values())
        assert [answer.status for answer in answers] == [200] * len(answers)
        texts = [seen.body["messages"][0]["content"] for seen in generations(*self.gateway.decoders)]
        return [text for text in texts if text in self.asked]


@asynccontextmanager
async def busy(deploy: Deploy, keys: dict[str, int] | None = None, **sections: Any) -> AsyncIterator[Busy]:
    """`keys`: the priorities of client keys, each of which is called `sk-` and its name."""
    limits = {"max_running_decode": 1, "wait_seconds": 5.0, **sections.pop("admission", {})}
    gateway = await deploy(1, 1, engine={"decode_step_ms": 20.0}, admission=limits, **sections)
    async with gateway.asking(request(Api.CHAT, stream=True, max_tokens=10_000)) as client:
        await client.has_tokens(1)
        if keys:
            digests = {name: hashlib.sha256(f"sk-{name}".encode()).hexdigest() for name in keys}
            known = tuple(
                ClientKey(name=name, key_sha256=digests[name], priority=priority) for name, priority in keys.items()
            )
            slots = {name: slot for slot, name in enumerate(keys)}
            gateway.worker.apply_snapshot(
                replace(gateway.worker.current_snapshot, client_keys=known, slots_by_key=slots)
            )
        yield Busy(gateway, client)
    await until(lambda: not gateway.leaks(), "quiet")


@pytest.mark.parametrize("prefill_policy", ["least_load", "least_tokens"])
async def test_less_urgent_request_goes_later(deploy: Deploy, prefill_policy: str) -> None:
    async with busy(deploy, balance={"prefill_policy": prefill_policy}) as queue:
        await queue.queue("later", x_request_priority="5")
        await queue.queue("as usual")
        await queue.queue("no number", x_request_priority="high")
        await queue.queue("urgent", x_request_priority="-1")
        assert await queue.served() == ["urgent", "as usual", "no number", "later"]


@pytest.mark.parametrize(("connector", "first"), [("vllm_pull", "low"), ("sglang_bootstrap", "high")])
async def test_priority_in_a_body_is_read_as_engines_do(deploy: Deploy, connector: str, first: str) -> None:
    async with busy(deploy, connector=connector) as queue:
        await queue.queue("later", x_request_priority="5")
        await queue.queue("high", {"priority": 2})
        await queue.queue("low", {"priority": -2})
        await queue.queue("no priority", {"priority": True})
        last = "low" if first == "high" else "high"
        assert await queue.served() == [first, "no priority", last, "later"]
        bodies = [seen.body for seen in generations(*queue.gateway.engines) if seen.body["messages"][0]["content"]]
        assert {body["priority"] for body in bodies if body["messages"][0]["content"] == "low"} == {-2}


async def test_request_can_only_lower_the_configured_priority_of_its_key(deploy: Deploy) -> None:
    async with busy(deploy, keys={"batch": 3, "chat": 0}) as queue:
        await queue.queue("batch", authorization="Bearer sk-batch")
        await queue.queue("pushes", authorization="Bearer sk-batch", x_request_priority="-9")
        await queue.queue("stands back", {"priority": 4}, authorization="Bearer sk-chat")
        await queue.queue("chat", authorization="Bearer sk-chat")
        assert await queue.served() == ["chat", "batch", "pushes", "stands back"]


@pytest.mark.parametrize("prefill_policy", ["least_load", "least_tokens"])
async def test_request_with_an_impossible_deadline_reaches_no_engine(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, prefill_policy: str
) -> None:
    caplog.set_level(logging.INFO)
    async with busy(deploy, balance={"prefill_policy": prefill_policy}) as queue:
        answer = await queue.refused(x_ttft_deadline_ms="50")
        assert (answer.status, answer.error["code"]) == (504, "queue_deadline")
        assert "0.05 s" in answer.error["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert queue.gateway.metrics("pdproxy_rejected_total") == {("queue_deadline",): 1}
        await queue.queue("has time", x_ttft_deadline_ms="60000")
        assert await queue.served() == ["has time"]
    (line,) = [
        vars(r)["fields"] for r in caplog.records if r.name == "proxy.access" and vars(r)["fields"]["code"] == 504
    ]
    assert (line["term"], line["attempts"]) == ("PQ", 0)


async def test_request_with_a_long_predicted_wait_is_rejected_when_configured(deploy: Deploy) -> None:
    # Less than on any machine one request takes.
    async with busy(deploy, admission={"max_predicted_wait_seconds": 1e-6}) as queue:
        for number in range(12):  # of which the last are refused when the first have shown how long it takes
            await queue.queue(f"{number}")
        assert len(await queue.served()) == 12
    async with queue.gateway.asking(request(Api.CHAT, stream=True, max_tokens=10_000)) as client:
        await client.has_tokens(1)
        first = asyncio.create_task(queue.gateway.ask(request(Api.CHAT, max_tokens=1)))
        await until(lambda: queue.gateway.metrics("pdproxy_queued_requests"), "the queue")
        answer = await queue.gateway.ask(request(Api.CHAT, max_tokens=1))
        assert (answer.status, answer.error["code"]) == (429, "queue_predicted")
        assert 1 <= int(answer.headers["retry-after"]) <= 5
        await client.leave()
        assert (await first).status == 200


async def test_queue_is_limited_in_requests_and_bytes(deploy: Deploy) -> None:
    async with busy(deploy, admission={"max_waiting": 3, "max_buffered_bytes": 40_000}) as queue:
        tasks = len(asyncio.all_tasks())
        for name in "ab":
            await queue.queue(name * 16_000)
        waiting = len(asyncio.all_tasks())
        answer = await queue.gateway.ask(request(Api.CHAT, "c" * 16_000))
        assert (answer.status, answer.error["code"]) == (503, "buffers_full")
        await queue.queue("short")
        answer = await queue.gateway.ask(request(Api.CHAT, "short, too"))
        assert (answer.status, answer.error["code"]) == (503, "queue_full")
        assert waiting - tasks <= 2 * 3  # a client's, its connection's and the handler's for each: looking costs none
        assert len(await queue.served()) == 3


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4},
}


def legs(engine: SimulatedEngine) -> list[RecordedRequest]:
    return [*generations(engine), *(seen for seen in engine.requests if seen.path == "/generate")]


@pytest.mark.parametrize("fast_path", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("connector", "best", "allowed", "later"),
    [("vllm_pull", -1000, 5, 7), ("plain", -1000, 5, 7), ("sglang_bootstrap", 1000, -5, -7)],
)
async def test_engines_get_no_priority_above_that_of_the_key(
    deploy: Deploy, connector: str, best: int, allowed: int, later: int, stream: bool, fast_path: bool
) -> None:
    """However the number is spelled, in the body as in the header, and in the bodies of both legs."""
    gateway = await deploy(1, 1, connector=connector, listen={"fast_path": fast_path})
    key = ClientKey(name="low", key_sha256=hashlib.sha256(b"sk-low").hexdigest(), priority=5)
    gateway.worker.apply_snapshot(replace(gateway.worker.current_snapshot, client_keys=(key,), slots_by_key={"low": 0}))
    asks: list[tuple[dict[str, Any], dict[str, str], Any, str | None]] = [
        ({}, {}, None, None),
        ({"priority": best}, {}, allowed, None),
        ({"priority": float(best)}, {}, allowed, None),
        ({"priority": str(best)}, {}, allowed, None),
        ({"priority": float(best) * 1e30}, {}, allowed, None),
        ({"priority": later}, {"x-request-priority": "7"}, later, "7"),
        ({"priority": best}, {"x-request-priority": "-1000"}, allowed, "5"),
        ({}, {"x-request-priority": "-1_0.0"}, None, None),
    ]
    generate: dict[str, Any] = {"/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 4}}}
    for path, body in {**BODIES, **(generate if connector == "sglang_bootstrap" else {})}.items():
        for more, headers, told, told_in_header in asks:
            before = [len(legs(engine)) for engine in gateway.engines]
            asked = {"model": "sim", **body, **more, "stream": stream}
            shown = {"Authorization": "Bearer sk-low", **headers}
            async with gateway.session.post(gateway.url + path, json=asked, headers=shown) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            seen = [each for engine, old in zip(gateway.engines, before, strict=True) for each in legs(engine)[old:]]
            assert len(seen) == (1 if connector == "plain" else 2)
            assert {each.body.get("priority") for each in seen} == {told}, (path, more)
            assert {each.headers.get("x-request-priority") for each in seen} == {told_in_header}, (path, headers)


async def test_passed_through_request_has_no_priority_above_that_of_the_key(deploy: Deploy) -> None:
    gateway = await deploy(1, 1)
    key = ClientKey(name="low", key_sha256=hashlib.sha256(b"sk-low").hexdigest(), priority=5)
    gateway.worker.apply_snapshot(replace(gateway.worker.current_snapshot, client_keys=(key,), slots_by_key={"low": 0}))
    for priority, told in ((-1000, 5), ("-1000", 5), (7, 7), (None, None)):
        body = {"model": "sim", "input": "Hi", "priority": priority}
        shown = {"Authorization": "Bearer sk-low", "x-request-priority": "-1000"}
        async with gateway.session.post(f"{gateway.url}/v1/embeddings", json=body, headers=shown) as answer:
            assert answer.status == 200
        seen = [each for each in gateway.prefillers[0].requests if each.path == "/v1/embeddings"][-1]
        assert (seen.body["priority"], seen.headers.get("x-request-priority")) == (told, None)
