"""Several models behind one gateway: requests go to instances of their model, and wait for no other model."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from proxy.balancer.backend_health import HealthState
from proxy.balancer.engines import EngineFacts, EngineIdentity
from proxy.common.backend import Backend
from proxy.common.errors import UnknownModel
from proxy.observe.metrics import render_exposition
from proxy.sim.engine import SimulatedEngine
from tests.asking import until
from tests.conftest import Deploy
from tests.deployment import Deployment, generations, releases

MESSAGES = [{"role": "user", "content": "What is it?"}]


def engines(role: str, *models: str, **options: Any) -> list[SimulatedEngine]:
    return [SimulatedEngine(role=role, model=model, **options) for model in models]


def chat(model: str | None, **fields: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    return {**named, "messages": MESSAGES, "max_tokens": 4, **fields}


async def two_models(deploy: Deploy, **sections: Any) -> Deployment:
    """Two prefillers and two decoders of each of two models, of which the gateway knows."""
    prefillers, decoders = engines("prefill", "a", "b", "a", "b"), engines("decode", "a", "b", "a", "b")
    gateway = await deploy(prefillers, decoders, **sections)
    await until(lambda: is_mixed(gateway), "the engines' models")
    return gateway


def is_mixed(gateway: Deployment) -> bool:
    """Return whether instances serve different models, after the pools were updated."""
    gateway.worker.pools.decode.eligible_backends()
    return gateway.worker.lanes.served_models.has_several_groups


def asked(gateway: Deployment) -> dict[str, list[int]]:
    """How many generation requests the engines of each model have seen: prefillers, then decoders."""
    counts: dict[str, list[int]] = {}
    for engine in gateway.engines:
        counts.setdefault(engine.options.model, []).append(len(generations(engine)))
    return counts


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_go_to_instances_of_their_model(deploy: Deploy, stream: bool) -> None:
    gateway = await two_models(deploy)
    for model in "aabb":
        answer = await gateway.ask(chat(model, stream=stream))
        assert answer.status == 200
        assert answer.is_done
    assert {model: sum(counts) for model, counts in asked(gateway).items()} == {"a": 4, "b": 4}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat("x")),
        ("/v1/completions", {"model": "x", "prompt": "Hi", "max_tokens": 4}),
        ("/v1/messages", chat("x")),
        ("/v1/responses", {"model": "x", "input": "Hi"}),
    ],
)
async def test_unknown_model_is_rejected_in_the_clients_dialect(
    deploy: Deploy, path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await two_models(deploy, models={"aliases": ["gpt-*=a", "best=b"]})
    caplog.set_level(logging.INFO)
    caplog.clear()
    async with gateway.session.post(gateway.url + path, json=body) as answer:
        error = (await answer.json())["error"]
        assert answer.status == 404
    assert error["message"] == "no instance serves a model called 'x'; GET /v1/models lists them: 'a', 'b', 'best'"
    assert error.get("code", error["type"]) in ("model_not_found", "not_found_error")
    assert asked(gateway) == {"a": [0] * 4, "b": [0] * 4}
    gateway.worker.metrics.settle_noted_values()
    assert [record.name for record in caplog.records if record.levelname != "DEBUG"] == ["proxy.access"]


async def test_request_without_a_model_is_rejected_when_models_differ(deploy: Deploy) -> None:
    gateway = await two_models(deploy)
    answer = await gateway.ask(chat(None))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "model_required", "model")
    assert "'a', 'b'" in answer.error["message"]


async def test_alias_leads_to_the_instances_of_its_model(deploy: Deploy) -> None:
    gateway = await two_models(deploy, models={"aliases": ["gpt-*=b", "*=a"]})
    for said, served in (("gpt-5", "b"), ("claude", "a"), (None, "a")):
        before = sum(asked(gateway)[served])
        answer = await gateway.ask(chat(said))
        assert answer.status == 200
        assert answer.json["model"] == (said or "a")
        assert sum(asked(gateway)[served]) == before + 2


async def test_models_are_listed_together_with_aliases(deploy: Deploy) -> None:
    gateway = await two_models(deploy, models={"aliases": ["best=b"]})
    async with gateway.session.get(gateway.url + "/v1/models") as answer:
        assert sorted(model["id"] for model in (await answer.json())["data"]) == ["a", "b", "best"]


async def test_only_the_model_without_a_decoder_is_rejected(deploy: Deploy) -> None:
    gateway = await two_models(deploy, admission={"wait_seconds": 0.05})
    await take_down(gateway, "b")
    answer = await gateway.ask(chat("b"))
    assert (answer.status, answer.error["code"]) == (503, "no_healthy_decode")
    assert answer.error["message"] == "no healthy decode instance is available for model 'b'"
    assert (await gateway.ask(chat("a"))).status == 200
    assert asked(gateway)["b"][2:] == [0, 0]
    for prefiller in gateway.prefillers:
        if prefiller.options.model == "b":
            for _ in range(10):
                gateway.worker.health.on_probe(backend_of(gateway, prefiller), False, "it is down")
    async with gateway.session.post(gateway.url + "/v1/messages/count_tokens", json=chat("b")) as told:
        assert "for model 'b'" in (await told.json())["error"]["message"]


async def test_readiness_is_reported_by_model(deploy: Deploy) -> None:
    gateway = await two_models(deploy)
    assert await ready(gateway) == (200, {"a": "ok", "b": "ok"})
    await take_down(gateway, "b")
    assert await ready(gateway) == (200, {"a": "ok", "b": "no healthy decode instance is available"})
    assert gateway.worker.lanes.is_any_ready()
    for model, status in (("a", 200), ("b", 503), ("x", 404)):
        assert (await ready(gateway, f"?model={model}"))[0] == status
    await take_down(gateway, "a")
    assert (await ready(gateway))[0] == 503


async def test_readiness_of_an_alias_is_that_of_its_model(deploy: Deploy) -> None:
    gateway = await two_models(deploy, models={"aliases": ["gpt=b"]})
    assert await ready(gateway, "?model=gpt") == (200, {"gpt": "ok"})
    await take_down(gateway, "b")
    assert (await ready(gateway, "?model=gpt"))[0] == 503


async def test_requests_for_one_model_do_not_wait_for_another(deploy: Deploy) -> None:
    prefillers = engines("prefill", "a", "b")
    decoders = engines("decode", "a", "b", decode_step_ms=5.0)
    gateway = await deploy(
        prefillers, decoders, admission={"max_running_decode": 1, "max_waiting": 1, "wait_seconds": 5.0}
    )
    await until(lambda: is_mixed(gateway), "the engines' models")
    async with gateway.asking(chat("a", max_tokens=10_000, stream=True, ignore_eos=True)) as running:
        await running.has_tokens(1)
        async with gateway.asking(chat("a", stream=True)):
            await until(lambda: waiting(gateway) == 1, "one that waits")
            full = await gateway.ask(chat("a"))
            assert (full.status, full.error["code"]) == (503, "queue_full")
            assert (await gateway.ask(chat("b"))).status == 200


async def test_answer_is_resumed_on_a_decoder_of_its_model(deploy: Deploy) -> None:
    prefillers, decoders = engines("prefill", "a", "b"), engines("decode", "b", "a", "b", "b", "a")
    gateway = await deploy(prefillers, decoders)
    await until(lambda: is_mixed(gateway), "the engines' models")
    whole = await gateway.ask(chat("a", max_tokens=20, stream=True, temperature=0))
    for decoder in (decoders[1], decoders[4]):
        decoder.faults.add("reset_after_tokens", tokens=3, times=1)
    broken = await gateway.ask(chat("a", max_tokens=20, stream=True, temperature=0))
    assert broken.is_done
    assert broken.text == whole.text
    assert sum(len(generations(decoder)) for decoder in (decoders[1], decoders[4])) > 2
    assert [len(generations(decoders[place])) for place in (0, 2, 3)] == [0, 0, 0]


@pytest.mark.parametrize("is_seen_down", [False, True])
async def test_engine_restarted_with_another_model_serves_it(deploy: Deploy, is_seen_down: bool) -> None:
    quick = {
        "interval_seconds": 0.02,
        "changing_interval_seconds": 0.02,
        "rise": 1,
        "fall": 1,
        "slow_start_seconds": 0.0,
    }
    gateway = await two_models(deploy, health={**quick, "models_interval_seconds": 0.0 if is_seen_down else 0.02})
    old = gateway.decoders[1]
    await old.__aexit__(None, None, None)
    if is_seen_down:
        await until(lambda: not gateway.worker.health.health_of(backend_of(gateway, old)).is_healthy, "a failed check")
        assert models_of(gateway, old) == {"b"}
    gateway.decoders[1] = new = SimulatedEngine(role="decode", model="a", port=old.port)
    async with new:
        await until(lambda: models_of(gateway, new) == {"a"}, "what it serves now")
        await until(
            lambda: len(gateway.worker.lanes.lane_of_model("a").pools.decode.eligible_backends()) == 3, "its new pool"
        )
        answers = await asyncio.gather(*(gateway.ask(chat(model)) for model in "aaaaaabb"))
        assert {answer.status for answer in answers} == {200}
        assert generations(new)
        assert {seen.body["model"] for seen in generations(new)} == {"a"}
        assert len(generations(gateway.decoders[3])) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat("x")),
        ("/v1/completions", {"model": "x", "prompt": "Hi", "max_tokens": 4, "stream": True}),
        ("/v1/messages", chat("x")),
        ("/v1/messages/count_tokens", {"model": "x", "messages": MESSAGES}),
        ("/tokenize", {"model": "x", "prompt": "Hi"}),
    ],
)
async def test_newly_loaded_adapter_is_served(deploy: Deploy, path: str, body: dict[str, Any]) -> None:
    """A name that is not known is a reason to ask the engines for their models."""
    gateway = await two_models(deploy)
    async with gateway.session.post(gateway.url + path, json=body) as answer:
        assert answer.status == 404
    for engine in (gateway.prefillers[0], gateway.decoders[0]):
        async with gateway.session.post(f"{engine.url}/v1/load_lora_adapter", json={"lora_name": "x"}) as loaded:
            assert loaded.status == 200
    async with gateway.session.post(gateway.url + path, json=body) as answer:
        assert answer.status == 200
    assert {engine.options.model for engine in gateway.engines if seen_model(engine, "x")} == {"a"}


def seen_model(engine: SimulatedEngine, name: str) -> bool:
    return any(isinstance(seen.body, dict) and seen.body.get("model") == name for seen in engine.requests)


async def test_requests_for_unknown_models_share_one_query_of_engines(deploy: Deploy) -> None:
    gateway = await two_models(deploy)
    before = [models_asked(engine) for engine in gateway.engines]
    found = await asyncio.gather(
        *(gateway.worker.lanes.find_lane(f"x{at}") for at in range(20)), return_exceptions=True
    )
    assert {type(error) for error in found} == {UnknownModel}
    assert [models_asked(engine) for engine in gateway.engines] == [count + 1 for count in before]


def models_asked(engine: SimulatedEngine) -> int:
    return sum(seen.path == "/v1/models" for seen in engine.requests)


async def until_asked(gateway: Deployment, condition: Callable[[], bool]) -> None:
    """Have the engines asked for their models until a condition holds. A round may have begun before."""
    while not condition():
        await gateway.worker.prober.refresh_models(is_patient=True)


async def test_adapter_of_some_engines_is_found_where_others_differ_in_adapters(deploy: Deploy) -> None:
    """Names that engines do not list go to any engine there, and are no reason to wait."""
    prefillers, decoders = engines("prefill", "a", "a"), engines("decode", "a", "a")
    gateway = await deploy(prefillers, decoders)
    for engine in (prefillers[0], decoders[0]):
        engine.options.adapters.append("y")
    await until_asked(gateway, lambda: is_mixed(gateway))
    assert (await gateway.ask(chat("anything"))).error["type"] == "NotFoundError", "an engine says so"
    for engine in (prefillers[1], decoders[1]):
        engine.options.adapters.append("x")
    asked = list(map(models_asked, gateway.engines))
    await until_asked(
        gateway, lambda: all(models_asked(e) > n + 1 for e, n in zip(gateway.engines, asked, strict=True))
    )
    for _ in range(4):
        assert (await gateway.ask(chat("x"))).status == 200
    assert not seen_model(prefillers[0], "x")


async def test_configured_models_of_instances_take_precedence(deploy: Deploy) -> None:
    """SGLang answers to any name."""
    gateway = await deploy(2, 2, connector="sglang_bootstrap")
    assert not is_mixed(gateway)
    said = [
        replace(backend_of(gateway, engine), models=(name,))
        for name, engine in zip("abab", gateway.engines, strict=True)
    ]
    gateway.roster.sync_origin("config", said, restores_removed=True)
    assert is_mixed(gateway)
    for model, status in (("a", 200), ("b", 200), ("sim", 404)):
        assert (await gateway.ask(chat(model))).status == status
    assert [[seen.body["model"] for seen in generations(engine)] for engine in gateway.engines] == [["a"], ["b"]] * 2
    body = {"text": "Hi", "sampling_params": {"max_new_tokens": 4}}
    for named, status in (({"model": "b"}, 200), ({}, 400), ({"model": "x"}, 404)):
        async with gateway.session.post(gateway.url + "/generate", json={**body, **named}) as answer:
            assert answer.status == status
    assert {seen.path for seen in gateway.decoders[1].requests if seen.body} >= {"/generate"}
    assert not any(seen.path == "/generate" for seen in gateway.decoders[0].requests)


async def test_lane_of_a_model_without_instances_is_removed(deploy: Deploy) -> None:
    gateway = await two_models(deploy, passthrough=["tokenizer", "pooling"])

    async def ask_all(model: str) -> None:
        for stream in (False, True):
            await gateway.ask(chat(model, stream=stream))
        async with gateway.session.post(gateway.url + "/tokenize", json={"model": model, "prompt": "Hi"}) as answer:
            await answer.read()

    await ask_all("b")
    gone = weakref.ref(gateway.worker.lanes.lane_of_model("b"))
    for engine in gateway.engines:
        if engine.options.model == "b":
            tell(gateway, engine, "c")
    assert is_mixed(gateway)
    await ask_all("c")
    await until(lambda: not gateway.leaks(), "quiet")
    gateway.worker.request_observers.flush_batch()
    gc.collect()
    assert gone() is None


async def test_unknown_model_is_passed_on_when_all_engines_serve_the_same(deploy: Deploy) -> None:
    gateway = await two_models(deploy)
    for engine in gateway.engines:
        if engine.options.model == "b":
            tell(gateway, engine, "a")
    assert not is_mixed(gateway)
    assert [lane.model_names for lane in gateway.worker.lanes] == [frozenset()]
    answer = await gateway.ask(chat("x"))
    assert answer.status == 404
    assert "does not exist" in answer.error["message"]  # vLLM's words


async def test_passed_through_requests_are_routed_by_model(deploy: Deploy) -> None:
    gateway = await two_models(deploy, passthrough=["tokenizer", "pooling"])
    for model in "ab":
        async with gateway.session.post(gateway.url + "/tokenize", json={"model": model, "prompt": "Hi"}) as answer:
            assert answer.status == 200
        body = {**chat(model), "max_tokens": 4}
        async with gateway.session.post(gateway.url + "/v1/messages/count_tokens", json=body) as answer:
            assert answer.status == 200
    tokenized = {
        engine.options.model: {seen.body["model"] for seen in engine.requests if seen.path == "/tokenize"}
        for engine in gateway.prefillers
        if any(seen.path == "/tokenize" for seen in engine.requests)
    }
    assert tokenized == {"a": {"a"}, "b": {"b"}}
    for body, status in (({"model": "x", "prompt": "Hi"}, 404), ({"prompt": "Hi"}, 400)):
        async with gateway.session.post(gateway.url + "/tokenize", json=body) as answer:
            assert answer.status == status


async def test_reload_reaches_the_queues_of_all_models(deploy: Deploy) -> None:
    gateway = await two_models(deploy)
    await gateway.ask(chat("b"))
    current = gateway.worker.current_snapshot
    admission = current.settings.admission.model_copy(update={"max_running_decode": 7})
    settings = current.settings.model_copy(update={"admission": admission})
    gateway.worker.lanes.apply_settings(settings)
    for lane in gateway.worker.lanes:
        assert {lane.pools.decode.running_limit(decoder) for decoder in lane.pools.decode.all_backends()} == {7}


async def test_metrics_show_instances_and_requests_by_model(deploy: Deploy) -> None:
    gateway = await two_models(deploy, models={"aliases": ["best=b"]})
    for said in ("a", "a", "best", "x"):
        await gateway.ask(chat(said))
    gateway.worker.metrics.settle_noted_values()
    assert gateway.metrics("pdproxy_model_requests_total") == {("200", "a"): 2, ("200", "b"): 1}
    await take_down(gateway, "b")
    instances = {("a", "prefill"): 2, ("a", "decode"): 2, ("b", "prefill"): 2}
    assert gateway.metrics("pdproxy_model_instances") == instances
    text = render_exposition(gateway.worker.metrics.collect(), "")[0].decode()
    assert {line for line in text.splitlines() if "model_instances{" in line} >= {
        'pdproxy_model_instances{model="b",role="decode"} 0.0'
    }


async def test_stalled_engine_is_compared_with_engines_of_its_model(deploy: Deploy) -> None:
    gateway = await deploy(engines("prefill", "a", "b"), engines("decode", "a", "b", "a"))
    await until(lambda: is_mixed(gateway), "the engines' models")
    first, last, _ = gateway.worker.pools.decode.all_backends()
    assert not stalls(gateway, gateway.decoders[1])  # the last one of its model
    gateway.worker.prober.probe_suspect(last)
    assert gateway.worker.health.health_of(last).is_eligible
    gateway.worker.prober.probe_suspect(first)
    assert not gateway.worker.health.health_of(first).is_eligible
    await until(
        lambda: gateway.worker.health.health_of(first).health_state is HealthState.PROBATION,
        "the answer to a health check",
    )
    assert (await gateway.ask(chat("a"))).status == 200
    assert stalls(gateway, gateway.decoders[0])


async def test_kv_is_released_by_decoders_of_its_model(deploy: Deploy) -> None:
    gateway = await deploy(
        engines("prefill", "a", "b", profile_name="v0.33"), engines("decode", "b", "a", "b", "b", profile_name="v0.33")
    )
    await until(lambda: is_mixed(gateway), "the engines' models")
    decoder = gateway.decoders[1]
    decoder.faults.add("refuse_status", status=500, times=1)
    await gateway.ask(chat("a"))
    await until(lambda: not gateway.worker.releaser.pending_count, "the release")
    assert [len(releases(engine)) for engine in gateway.decoders] == [0, 1, 0, 0]


async def ready(gateway: Deployment, query: str = "") -> tuple[int, Any]:
    async with gateway.session.get(f"{gateway.url}/readyz{query}") as answer:
        return answer.status, (await answer.json()).get("models")


def stalls(gateway: Deployment, engine: SimulatedEngine) -> bool:
    """Whether it is taken out for being silent."""
    backend = backend_of(gateway, engine)
    pool = gateway.worker.lanes.lane_of_backend(backend).pools.pool_of(backend.role)
    return pool.report_stall(backend)


def waiting(gateway: Deployment) -> int:
    return sum(lane.request_service.admission_queue.waiting_count for lane in gateway.worker.lanes)


async def take_down(gateway: Deployment, model: str) -> None:
    """All decoders of a model, as the prober would find them."""
    health = gateway.worker.health
    for decoder in gateway.worker.pools.decode.all_backends():
        if gateway.worker.lanes.served_models.names_of(decoder) == frozenset(model):
            for _ in range(10):
                health.on_probe(decoder, False, "it is down")
    is_mixed(gateway)


def models_of(gateway: Deployment, engine: SimulatedEngine) -> set[str]:
    """Return the models that an engine serves, as the gateway sees them."""
    is_mixed(gateway)
    return set(gateway.worker.lanes.served_models.names_of(backend_of(gateway, engine)))


def backend_of(gateway: Deployment, engine: SimulatedEngine) -> Backend:
    pools = gateway.worker.pools
    backends = (*pools.prefill.all_backends(), *pools.decode.all_backends())
    return next(backend for backend in backends if backend.port == engine.port)


def tell(gateway: Deployment, engine: SimulatedEngine, *models: str) -> None:
    """Set the models that a probe of this engine would report."""
    backend = backend_of(gateway, engine)
    facts = gateway.worker.health.health_of(backend).engine_facts
    version = (0, 30) if facts is None else facts.version
    gateway.worker.health.set_engine_facts(
        backend, EngineFacts(version, identity=EngineIdentity("vLLM", frozenset(models)))
    )
    is_mixed(gateway)
