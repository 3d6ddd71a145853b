"""Tests of the example policy over real sockets."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from proxy.balancer.pick import LeaseTracker, PickRequest
from proxy.common.backend import Backend
from proxy.settings import POLICIES
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from proxy.wire.prefix import PrefixKeys, PromptPrefixes
from tests.asking import request, until
from tests.balancer.policies.prefix_affinity import PrefixAffinity
from tests.conftest import Deploy
from tests.deployment import Deployment, generations

CHOOSING: dict[str, Any] = {"balance": {"prefill_policy": "prefix_affinity"}}
LONG = "A long text that everything else is about. " * 400


@pytest.fixture(autouse=True)
def in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the policy to the table."""
    monkeypatch.setitem(POLICIES, "prefix_affinity", "tests.balancer.policies.prefix_affinity:PrefixAffinity")


def policy_of(gateway: Deployment) -> PrefixAffinity:
    policy = gateway.worker.pools.prefill.policy
    assert isinstance(policy, PrefixAffinity)
    return policy


def turn(*messages: str, **fields: Any) -> dict[str, Any]:
    """Return a chat with these alternating messages."""
    said = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(messages)]
    return {"model": "sim", "messages": said, "max_tokens": 2, **fields}


def who_prefilled(gateway: Deployment) -> list[int]:
    return [len(generations(engine)) for engine in gateway.prefillers]


def backend_of(gateway: Deployment, engine: SimulatedEngine) -> Backend:
    return next(each for each in gateway.worker.pools.prefill.all_backends() if each.port == engine.port)


async def test_turns_of_a_conversation_go_to_one_prefiller(deploy: Deploy) -> None:
    gateway = await deploy(3, 1, **CHOOSING)
    for length in (1, 3, 5, 7):
        for name in ("one", "two", "three"):
            messages = [f"{name} {number} {LONG}" for number in range(length)]
            assert (await gateway.ask(turn(*messages))).is_done
    assert who_prefilled(gateway) == [4, 4, 4]
    for engine in gateway.prefillers:
        firsts = Counter(seen.body["messages"][0]["content"].split()[0] for seen in generations(engine))
        assert list(firsts.values()) == [4]
    assert policy_of(gateway).under_way == 0


@pytest.mark.interpreted
async def test_samples_of_a_request_share_the_keys_of_its_prompt(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[PrefixKeys] = []
    compute = PromptPrefixes._compute_keys

    def counting(prompt: PromptPrefixes) -> PrefixKeys:
        computed.append(compute(prompt))
        return computed[-1]

    monkeypatch.setattr(PromptPrefixes, "_compute_keys", counting)
    gateway = await deploy(2, 1, **CHOOSING)
    assert (await gateway.ask(turn(LONG, n=4))).is_done
    assert sum(who_prefilled(gateway)) == 4
    (keys,) = computed
    policy = policy_of(gateway)
    has = [policy.keys_of(backend_of(gateway, engine)) for engine in gateway.prefillers if generations(engine)]
    assert has == [set(keys.keys)] * len(has)


@pytest.mark.interpreted
async def test_prefix_keys_are_not_computed_for_other_policies(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptPrefixes, "_compute_keys", None)
    gateway = await deploy(balance={"prefill_policy": "least_tokens"})
    assert (await gateway.ask(turn(LONG))).is_done


async def test_each_prompt_of_a_list_has_its_own_keys(deploy: Deploy) -> None:
    gateway = await deploy(2, 1, **CHOOSING)
    prompts = [f"{number} {LONG}" for number in range(2)]
    assert (await gateway.ask({"model": "sim", "prompt": prompts, "max_tokens": 2})).is_done
    assert who_prefilled(gateway) == [1, 1]
    policy = policy_of(gateway)
    first, second = (policy.keys_of(backend_of(gateway, engine)) for engine in gateway.prefillers)
    assert len(first) == len(second) > 1
    assert first.isdisjoint(second)


async def test_prefiller_is_charged_for_uncached_tokens(deploy: Deploy) -> None:
    gateway = await deploy(2, 1, **CHOOSING)
    await gateway.ask(turn(LONG))
    (again,) = (engine for engine in gateway.prefillers if generations(engine))
    again.faults.add("hang_before_headers", path=Api.CHAT.path)
    slot = backend_of(gateway, again).slot
    async with gateway.asking(turn(LONG)):
        await until(lambda: len(generations(again)) == 2, "the second prefill")
        charged = gateway.scoreboard.load_of(slot)
        assert (charged.compute_tokens, charged.kv_tokens > len(LONG) // 8) == (3480, True)


@pytest.mark.parametrize("is_the_clients_doing", [False, True])
async def test_failed_prefill_is_not_remembered(deploy: Deploy, is_the_clients_doing: bool) -> None:
    gateway = await deploy(1, 1, **CHOOSING)
    (engine,) = gateway.prefillers
    backend, policy = backend_of(gateway, engine), policy_of(gateway)
    await gateway.ask(turn("Something else"))
    before = set(policy.keys_of(backend))
    if is_the_clients_doing:
        engine.faults.add("hang_before_headers", path=Api.CHAT.path)
        async with gateway.asking(turn(LONG)):
            await until(lambda: len(generations(engine)) == 2, "the second prefill")
            assert policy.keys_of(backend) > before  # a prompt counts as soon as it is sent
        await until(lambda: not policy.under_way, "the end of the lease")
    else:
        engine.faults.add("refuse_status", path=Api.CHAT.path, status=500)
        assert (await gateway.ask(turn(LONG))).status == 500
    assert policy.keys_of(backend) == before


async def test_client_headers_reach_the_policy(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PickRequest] = []

    def track(policy: PrefixAffinity, backend: Backend, request: PickRequest) -> LeaseTracker:
        seen.append(request)
        return LeaseTracker(policy.load_of_request(backend, request))

    monkeypatch.setattr(PrefixAffinity, "start_tracker", track)
    gateway = await deploy(**CHOOSING)
    await gateway.ask(turn(LONG, prompt_cache_key="a conversation"), x_ttft_deadline_ms="1500")
    (wanted,) = seen
    assert (wanted.session, wanted.first_token_seconds, wanted.output_tokens) == ("a conversation", 1.5, 2)
    assert wanted.prompt_tokens > 1000


async def test_reload_with_the_same_policy_keeps_learned_values(deploy: Deploy) -> None:
    gateway = await deploy(2, 1, **CHOOSING)
    await gateway.ask(request(Api.CHAT, LONG))
    worker, policy = gateway.worker, policy_of(gateway)
    worker.apply_snapshot(worker.current_snapshot)
    assert policy_of(gateway) is policy
