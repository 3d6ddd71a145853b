"""Poison requests, which crash every engine that works on them, beside requests that must not fail.

However a poison request is repeated, resumed, split or sent again, it crashes two engines. Requests that every engine
answers with 500 eject none. `-rP` prints the figures of each case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import pytest

from proxy.connectors import CONNECTORS
from proxy.settings import CONNECTOR_TRAITS
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import Answer, answer_alone, request, until
from tests.conftest import Deploy
from tests.deployment import Deployment, generations

POISON = "poison"
"""Value of the member `user` of poison requests, which every leg contains."""
BYSTANDERS = 40
PACE: dict[str, Any] = {"eos_after": 1000, "default_max_tokens": 1000, "decode_step_ms": 10.0}
PATIENT: dict[str, Any] = {"deadline_seconds": 15.0}
ROLE_OF = {"prefill": "prefill", "decode": "decode", "middle": "decode"}
"""Places of the crash, with the crashing role: at a prefiller, at a decoder, or in the middle of the answer."""


def poison(**fields: Any) -> dict[str, Any]:
    return request(Api.CHAT, "Tell me", **{"max_tokens": 200, "user": POISON, **fields})


def add_poison_fault(gateway: Deployment, place: str) -> Sequence[SimulatedEngine]:
    """Make all engines of a role crash on poison requests, and return them. Their pinned KV is lost with them."""
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 1000, True
    engines = gateway.prefillers if ROLE_OF[place] == "prefill" else gateway.decoders
    for engine in engines:
        engine.faults.add("kill", user=POISON, tokens=5 if place == "middle" else 0)
    return engines


async def ask_repeatedly(gateway: Deployment, body: dict[str, Any], times: int = 3) -> list[Answer]:
    """Send a request again after failures, like clients that ignore the error."""
    return [await gateway.ask(body) for _ in range(times)]


async def is_served(gateway: Deployment, number: int) -> bool:
    """Return whether a bystander's request, streamed or not, is answered completely."""
    answer = await gateway.ask(request(Api.CHAT, f"Hello {number}", max_tokens=60, stream=number % 2 == 0))
    if not (answer.status == 200 and answer.is_done):
        print(f"bystander {number} got {answer.error}")
    return answer.status == 200 and answer.is_done


async def costs(gateway: Deployment, place: str, body: dict[str, Any]) -> tuple[int, int, list[Answer]]:
    """Send a poison request repeatedly. Return crashed engines, complete bystanders, and the client's answers."""
    engines = add_poison_fault(gateway, place)
    bystanders = [asyncio.create_task(is_served(gateway, number)) for number in range(BYSTANDERS)]
    await until(lambda: all(engine.state.live for engine in gateway.decoders), "the bystanders")
    answers = await ask_repeatedly(gateway, body)
    whole = sum(await asyncio.gather(*bystanders))
    lost = sum(not engine.is_running for engine in engines)
    codes = [answer.error["code"] if answer.error else answer.status for answer in answers]
    print(f"{len(engines)=} {place=} stream={body.get('stream')} n={body.get('n')} {lost=} {whole=} {codes=}")
    return lost, whole, answers


@pytest.mark.fault(55)
@pytest.mark.covering("engines place shape n", product((6, 12), ROLE_OF, ("stream", "whole"), (1, 8)))
async def test_poison_request_crashes_two_engines_and_fails_no_other_request(
    deploy: Deploy, engines: int, place: str, shape: str, n: int
) -> None:
    stream = shape == "stream"
    counts = (engines, 3) if place == "prefill" else (3, engines)
    gateway = await deploy(*counts, engine=PACE, resume=PATIENT)
    lost, whole, answers = await costs(gateway, place, poison(stream=stream, n=n))
    assert (lost, whole) == (2, BYSTANDERS)
    first, *others = answers
    assert first.error["code"] == "suspect_request"
    assert not first.is_done or first.status == 502
    for answer in others:
        assert (answer.status, answer.error["code"]) == (502, "suspect_request")
        assert answer.headers["x-should-retry"] == "false"
    assert gateway.metrics("pdproxy_suspect_requests_total") == {(): 1.0}
    assert gateway.metrics("pdproxy_rejected_total") == {("suspect_request",): 2.0}


@pytest.mark.fault(55)
@pytest.mark.parametrize("kinds", [1, 4], ids=["copies", "different"])
async def test_concurrent_poison_requests_crash_at_most_two_engines_each(deploy: Deploy, kinds: int) -> None:
    """Copies are recognised only after one of them has ended, so until then they cost as much as different requests."""
    gateway = await deploy(2, 12, engine=PACE, resume=PATIENT)
    engines = add_poison_fault(gateway, "middle")
    bodies = [poison(stream=True, max_tokens=200 + number % kinds) for number in range(4)]
    for _ in range(2):
        answers = await asyncio.gather(*(gateway.ask(body) for body in bodies))
        assert [answer.error["code"] for answer in answers] == ["suspect_request"] * 4
        assert sum(not engine.is_running for engine in engines) <= 8


@pytest.mark.fault(55)
@pytest.mark.covering(
    "connector place mode",
    [row for row in product(CONNECTORS, ROLE_OF, ("exact", "restart-only")) if row[:2] != ("plain", "prefill")],
)
async def test_poison_request_crashes_at_most_two_engines_with_every_connector(
    deploy: Deploy, connector: str, place: str, mode: str
) -> None:
    gateway = await deploy(4, 6, engine=PACE, connector=connector, resume={"mode": mode, **PATIENT})
    lost, whole, _ = await costs(gateway, place, poison(stream=True))
    assert lost <= 2
    if mode == "exact" and CONNECTOR_TRAITS[connector].engine != "SGLang":  # its sampled chats are not resumed
        assert whole == BYSTANDERS


@pytest.mark.fault(55)
async def test_stopped_poison_request_is_logged_once_with_its_engines(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await deploy(1, 4, engine=PACE)
    engines = add_poison_fault(gateway, "decode")
    await ask_repeatedly(gateway, poison())
    [line] = [record for record in caplog.records if record.name == "proxy.flow.suspects"]
    gone = sorted(f"{engine.host}:{engine.port}" for engine in engines if not engine.is_running)
    assert line.levelname == "WARNING"
    assert line.fields["instances"] == ", ".join(gone)  # type: ignore[attr-defined]


@pytest.mark.fault(55)
async def test_engine_that_reports_its_death_counts_as_crashed(deploy: Deploy) -> None:
    """While vLLM's EngineCore is dead, its API server answers 500 to all requests, and 503 to health checks."""
    gateway = await deploy(1, 6, engine=PACE)
    gateway.expects_inexact_pins, gateway.may_stay_pinned = True, 100
    for engine in gateway.decoders:
        engine.faults.add("error_event", tokens=3, user=POISON)
        engine.faults.add("refuse_status", path="/health", status=503)
    await ask_repeatedly(gateway, poison(stream=True))
    assert sum(bool(generations(engine)) for engine in gateway.decoders) == 2


# Requests that are not poison


@pytest.mark.fault(56)
async def test_answer_survives_crashes_if_engines_served_it_long_enough(deploy: Deploy) -> None:
    gateway = await deploy(1, 5, engine=PACE)
    gateway.expects_inexact_pins, gateway.may_stay_pinned = True, 10
    body = request(Api.CHAT, "Go on", max_tokens=600, stream=True)
    asking = asyncio.create_task(gateway.ask(body))
    for tokens in (5, 150):  # the next engine serves it long enough to clear it
        [engine] = await only_one_at_work(gateway)
        reached = engine.state.tokens_generated + tokens
        await engine.wait_until(lambda state, reached=reached: state.tokens_generated >= reached)
        await engine.kill()
    answer = await asking
    assert answer.is_done
    assert answer.text == await answer_alone(body)
    assert not gateway.metrics("pdproxy_suspect_requests_total")


async def only_one_at_work(gateway: Deployment) -> list[SimulatedEngine]:
    def at_work() -> list[SimulatedEngine]:
        return [engine for engine in gateway.decoders if engine.is_running and engine.state.live]

    await until(lambda: len(at_work()) == 1, "a decoder")
    return at_work()


@pytest.mark.fault(56)
async def test_unrelated_crashes_make_no_request_suspect(deploy: Deploy) -> None:
    gateway = await deploy(2, 6, engine=PACE)
    gateway.expects_inexact_pins, gateway.may_stay_pinned = True, 100
    bystanders = [asyncio.create_task(is_served(gateway, number)) for number in range(BYSTANDERS)]
    await until(lambda: all(engine.state.live for engine in gateway.decoders), "the bystanders")
    await asyncio.gather(gateway.decoders[0].kill(), gateway.decoders[1].kill())
    assert all(await asyncio.gather(*bystanders))
    assert not gateway.metrics("pdproxy_suspect_requests_total")


@pytest.mark.fault(56)
async def test_request_is_not_blamed_when_only_one_engine_crashed(deploy: Deploy) -> None:
    gateway = await deploy(1, 2, engine=PACE)
    gateway.expects_inexact_pins, gateway.may_stay_pinned = True, 10
    first, second = gateway.decoders
    first.faults.add("kill", user=POISON)
    second.faults.add("refuse_status", user=POISON, status=503)
    refused = await gateway.ask(poison())
    assert (refused.status, gateway.metrics("pdproxy_suspect_requests_total")) == (503, {})
    second.faults.clear()
    answer = await gateway.ask(poison())
    while answer.status == 503:  # the engine is passed over for a moment
        answer = await gateway.ask(poison())
    assert answer.status == 200
    assert gateway.worker.request_service.suspects.suspect_memory.is_empty


def resumes(gateway: Deployment) -> float:
    return sum(gateway.metrics("pdproxy_resumes_total").values())


@pytest.mark.fault(116)
@pytest.mark.parametrize("copies", [False, True], ids=["different", "copies"])
async def test_successive_crashes_do_not_mark_requests_as_poison(deploy: Deploy, copies: bool) -> None:
    """Three of four decoders are killed while the answers of the previous one are being resumed."""
    gateway = await deploy(2, 4, engine=PACE, resume=PATIENT, hearing_seconds=5.0)
    gateway.expects_inexact_pins, gateway.may_stay_pinned = True, 100

    async def ask(number: int) -> Answer:
        return await gateway.ask(request(Api.CHAT, f"Hello {copies or number}", max_tokens=200, stream=True))

    asking = [asyncio.create_task(ask(number)) for number in range(48)]
    await until(lambda: all(engine.state.tokens_generated > 100 for engine in gateway.decoders), "tokens")
    for decoder, following in pairwise(gateway.decoders):
        resumed, sent = resumes(gateway), following.state.tokens_generated
        await decoder.kill()
        await until(lambda resumed=resumed: resumes(gateway) > resumed, "a resume")
        await following.wait_until(lambda state, sent=sent: state.tokens_generated > sent + 20)
    answers = await asyncio.gather(*asking)
    assert [answer.error for answer in answers if not answer.is_done] == []
    assert not gateway.metrics("pdproxy_suspect_requests_total")
    assert (await ask(0)).is_done


@pytest.mark.fault(116)
async def test_suspect_request_is_cleared_when_a_copy_is_served(deploy: Deploy) -> None:
    """Both decoders crashed for another reason, as the served copy shows."""
    gateway = await deploy(1, 3, engine=PACE, resume=PATIENT, hearing_seconds=12.0)
    gateway.expects_inexact_pins, gateway.may_stay_pinned = True, 10
    first, second, _ = gateway.decoders
    for decoder in (first, second):
        decoder.faults.add("kill", tokens=5, user=POISON)
    asking = asyncio.create_task(gateway.ask(poison(stream=True)))
    await until(lambda: not first.is_running and not second.is_running, "the kills")
    assert (await gateway.ask(poison(stream=True))).is_done
    assert (await asking).is_done
    assert not gateway.metrics("pdproxy_suspect_requests_total")


# Requests that fail everywhere and break nothing


@pytest.mark.fault(57)
@pytest.mark.parametrize("place", ["prefill", "decode"])
async def test_requests_with_500_on_every_engine_eject_none(deploy: Deploy, place: str) -> None:
    gateway = await deploy(4, 4, kv={"release": "never"})
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 10_000, True
    for engine in gateway.prefillers if place == "prefill" else gateway.decoders:
        engine.faults.add("refuse_status", status=500, user=POISON)

    async def insist() -> set[int]:
        return {(await gateway.ask(poison(n=n))).status for n in (1, 1, 1, 4) for _ in range(5)}

    async def serve() -> set[int]:
        return {(await gateway.ask(request(Api.CHAT, f"Hello {number}"))).status for number in range(40)}

    *insisted, served = await asyncio.gather(*(insist() for _ in range(12)), serve())
    assert (set().union(*insisted), served) == ({500}, {200})
    assert not gateway.metrics("pdproxy_instance_ejected_total")
    assert not gateway.metrics("pdproxy_suspect_requests_total")


@pytest.mark.fault(57)
async def test_two_failing_engines_are_ejected(deploy: Deploy) -> None:
    gateway = await deploy(4, 1)
    failing = gateway.prefillers[:2]
    for engine in failing:
        engine.faults.add("refuse_status", status=500)
    while sum(gateway.metrics("pdproxy_instance_ejected_total").values()) < 2:
        await asyncio.gather(*(gateway.ask(request(Api.CHAT)) for _ in range(4)))
    ejected = {name for name, *_ in gateway.metrics("pdproxy_instance_ejected_total")}
    assert ejected == {f"{engine.host}:{engine.port}" for engine in failing}


@pytest.mark.fault(173)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("connector", sorted(CONNECTORS.keys() - {"plain"}))
async def test_prefills_wait_while_no_decoder_is_left(deploy: Deploy, connector: str, stream: bool) -> None:
    """The only decoder of an interrupted answer does not return, so no decoder could fetch the KV of a prefill."""
    gateway = await deploy(1, 1, connector=connector, resume={"deadline_seconds": 1.0})
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 1000, True
    gateway.decoders[0].faults.add("kill", tokens=70)
    answer = await gateway.ask(request(Api.COMPLETIONS, stream=stream, max_tokens=100))
    assert answer.error["message"].endswith("the answer could not be resumed: no instance could continue it")
    # Without the wait there were five. One more is possible if a late event loop takes the decoder for busy.
    assert len(generations(*gateway.prefillers)) <= 2


@pytest.mark.fault(173)
@pytest.mark.parametrize("connector", sorted(CONNECTORS.keys() - {"plain"}))
async def test_answer_is_resumed_when_the_only_decoder_returns(deploy: Deploy, connector: str) -> None:
    gateway = await deploy(1, 1, connector=connector)
    decoder = gateway.decoders[0]
    decoder.faults.add("kill", tokens=20, times=1)
    body = request(Api.COMPLETIONS, stream=True, max_tokens=100)
    asking = asyncio.create_task(gateway.ask(body))
    await decoder.wait_until(lambda state: state.kills == 1)
    await decoder.start()
    answer = await asking
    assert (answer.is_done, answer.text) == (True, await answer_alone(body))
