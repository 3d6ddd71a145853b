"""Any mixture of failures and leaving clients.

Requests of all kinds run concurrently. Engines fail every few requests in some way, and clients leave at arbitrary
moments. Each answer is compared with that of a single engine, and nothing may stay behind.
"""

from __future__ import annotations

import asyncio
import random
from itertools import product
from typing import Any

import pytest

from proxy.connectors import CONNECTORS
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import Answer, answer_alone, request, until
from tests.conftest import Deploy
from tests.selection.covering import values

REQUESTS = 150

FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("refuse_status", {"status": 500}),
    ("refuse_status", {"status": 503}),
    ("refuse_status", {"status": 400}),
    ("reset_before_headers", {}),
    ("reset_after_headers", {}),
    ("reset_after_tokens", {"tokens": 3}),
    ("end_without_finish", {"tokens": 2, "done": True}),
    ("error_event", {"tokens": 4}),
    ("recompute", {"tokens": 1}),
    ("load_failure", {}),
    ("missing_kv_params", {}),
    ("invalid_json", {}),
    ("truncated_json", {}),
    ("lost_response", {}),
    ("slow_headers", {"seconds": 0.005}),
    ("split_bytes", {"size": 5}),
    ("crlf", {}),
]

# With connectors that use both engines at once, a decoder waits in vain if its prefiller returns no KV parameters.
PATIENCE: dict[str, Any] = {
    "timeouts": {"prefill_seconds": 5.0, "first_token_seconds": 5.0, "answer_seconds": 5.0},
    "layerwise": {"callback_seconds": 5.0},
}


@pytest.mark.covering("connector seed", product(CONNECTORS, range(3)), values)
async def test_answers_are_correct_under_any_mixture_of_faults(deploy: Deploy, connector: str, seed: int) -> None:
    chance = random.Random(seed)
    gateway = await deploy(3, 3, connector=connector, engine={"decode_step_ms": 0.3, "block_size": 4}, **PATIENCE)
    for engine in gateway.engines:
        add_faults(engine, chance)
    bodies = [a_request(chance) for _ in range(REQUESTS)]
    # The expected texts are computed first, so that nothing else runs during the requests.
    texts = [await expected_texts(body) for body in bodies]

    room = asyncio.Semaphore(24)
    leaving_after = [chance.choice([None] * 4 + [0.0, 0.001, 0.004, 0.01]) for _ in bodies]

    async def one(body: dict[str, Any], seconds: float | None) -> Answer | None:
        async with room:
            if seconds is None:
                return await gateway.ask(body)
            async with gateway.asking(body):
                await asyncio.sleep(seconds)
            return None

    answers = await asyncio.gather(*map(one, bodies, leaving_after))
    for body, answer, expected in zip(bodies, answers, texts, strict=True):
        if answer is not None:
            check(body, answer, expected)
    assert sum(answer is not None and answer.status == 200 for answer in answers) > REQUESTS / 5
    # Prefill answers were lost, and releases failed like other requests.
    await until(lambda: not gateway.worker.releaser.pending_count, "the last release")
    gateway.expects_pinned = sum(len(engine.pins) for engine in gateway.engines)
    gateway.expects_inexact_pins = True
    gateway.expects_resent = True


def add_faults(engine: SimulatedEngine, chance: random.Random) -> None:
    for action, fields in FAULTS:
        if action == "recompute" and engine.options.profile.is_sglang:
            continue  # its engines wait for memory
        engine.faults.add(action, every=chance.randint(7, 60), skip=chance.randint(0, 6), **fields)


def a_request(chance: random.Random) -> dict[str, Any]:
    api = chance.choice(list(OPENAI_APIS))
    fields: dict[str, Any] = {"stream": chance.random() < 0.6, "max_tokens": chance.choice([1, 5, 30])}
    if chance.random() < 0.2:
        fields["n"] = 3
    if api is Api.COMPLETIONS and chance.random() < 0.3:
        fields["prompt"] = [f"prompt {number}" for number in range(chance.randint(1, 4))]
    return request(api, f"question {chance.randint(0, 9)}", **fields)


async def expected_texts(body: dict[str, Any]) -> list[str]:
    prompts = body.get("prompt")
    single = [body] if not isinstance(prompts, list) else [{**body, "prompt": prompt} for prompt in prompts]
    samples = body.get("n", 1)
    texts = [await answer_alone({name: value for name, value in one.items() if name != "n"}) for one in single]
    return [text for text in texts for _ in range(samples)]


def check(body: dict[str, Any], answer: Answer, expected: list[str]) -> None:
    """Check for the whole answer, or a part of it with an error, or an error."""
    if answer.status != 200:
        assert answer.error or answer.json["object"] == "error"  # SGLang's are flat
        assert answer.is_whole
        return
    if answer.is_done:
        assert answer.texts == dict(enumerate(expected))
        return
    assert body["stream"]
    assert not answer.is_whole
    assert b"[DONE]" not in answer.body
    assert answer.error
    assert all(expected[index].startswith(text) for index, text in answer.texts.items())
