"""Selection rules of other gateways, each by its distinctive choice."""

from __future__ import annotations

import pytest

from lab.replay.fleet import Subject
from lab.replay.policies import peers
from lab.replay.trace import Request
from proxy.balancer.pick import Candidate, PickRequest, Policy, PolicyContext
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Load, Role
from tests.lab.replay.conftest import MACHINE

PEERS = peers(MACHINE.cost)


class Bench:
    """Three idle prefillers, a policy, and the load of each prefiller."""

    def __init__(self, name: str) -> None:
        self.policy: Policy = PEERS[name][0](PolicyContext())
        self.scoreboard = Scoreboard(slots=3)
        self.row = self.scoreboard.load_row(0)
        self.backends = [Backend(Role.PREFILL, "p", 7000 + slot, slot) for slot in range(3)]
        self.candidates = [Candidate(backend, None, self.scoreboard) for backend in self.backends]

    def send(self, place: int, request: PickRequest) -> None:
        load = self.policy.load_of_request(self.backends[place], request)
        self.row.add_load(place, requests=1, running=1, compute=load.compute_tokens, kv=load.kv_tokens)
        self.policy.start_tracker(self.backends[place], request)

    def idle(self) -> None:
        for backend in self.backends:
            load, running = self.scoreboard.load_of(backend.slot), self.scoreboard.running_requests(backend.slot)
            self.row.add_load(
                backend.slot, requests=-running, running=-running, compute=-load.compute_tokens, kv=-load.kv_tokens
            )

    def chosen(self, request: PickRequest) -> int:
        return self.policy.choose_candidate(self.candidates, [0] * len(self.candidates), request).backend.slot


def prompt(tokens: int, *blocks: int) -> PickRequest:
    subject = Subject(Request(0.0, tokens, 1, blocks))
    return PickRequest(Load(tokens, tokens), Load(0, tokens), subject)


KNOWING = [name for name in PEERS if name not in ("round robin", "vllm-ascend example")]


@pytest.mark.parametrize("name", KNOWING)
def test_prompt_returns_to_its_prefiller_when_all_are_idle(name: str) -> None:
    bench = Bench(name)
    bench.send(1, prompt(1500, 1, 2, 3))
    bench.idle()
    assert bench.chosen(prompt(1500, 1, 2, 4)) == 1


@pytest.mark.parametrize("name", ["round robin", "vllm-ascend example"])
def test_rules_without_prompts_ignore_prompts(name: str) -> None:
    bench = Bench(name)
    bench.send(1, prompt(1500, 1, 2, 3))
    bench.idle()
    assert bench.chosen(prompt(1500, 1, 2, 4)) == 0


@pytest.mark.parametrize("name", ["dynamo", "mooncake", "llm-d", "production-stack"])
def test_queue_outweighs_a_cache(name: str) -> None:
    bench = Bench(name)
    for _ in range(8):
        bench.send(1, prompt(1500, 1, 2, 3))
    assert bench.chosen(prompt(1500, 1, 8, 9)) != 1


@pytest.mark.parametrize("name", ["cache_aware", "cache_aware, new"])
def test_cache_aware_follows_the_cache_up_to_64_requests(name: str) -> None:
    bench = Bench(name)
    for _ in range(64):
        bench.send(1, prompt(1500, 1, 2, 3))
    assert bench.chosen(prompt(1500, 1, 2, 4)) == 1
    bench.send(1, prompt(1500, 1, 2, 3))
    assert bench.chosen(prompt(1500, 1, 2, 4)) != 1


def test_unmatched_prompt_goes_to_smallest_tree_or_fewest_requests() -> None:
    for name, place in (("cache_aware", 2), ("cache_aware, new", 0)):
        bench = Bench(name)
        bench.send(0, prompt(1500, 1, 2, 3))
        bench.idle()
        bench.send(1, prompt(500, 4))
        bench.send(2, prompt(100))
        assert bench.chosen(prompt(500, 9)) == place


def test_smetric_leaves_the_cache_only_for_a_first_token_in_time() -> None:
    """A prompt of 1,500 tokens takes 1.6 s, which is longer than the limit of 1.1 s, and of its rest 0.6 s."""
    bench = Bench("smetric")
    bench.send(1, prompt(1500, 1, 2, 3))
    again = prompt(1500, 1, 2, 4)
    assert bench.chosen(again) == 1, "no prefiller has the first token in time"
    short = prompt(900, 1, 5)
    assert bench.chosen(short) == 0, "another one has it in time"


def test_mooncake_counts_seconds_and_dynamo_tokens() -> None:
    """Eight short prompts have fewer tokens than one long one, but take longer."""
    chosen = {}
    for name in ("mooncake", "dynamo"):
        bench = Bench(name)
        for _ in range(30):
            bench.send(0, prompt(10))
        bench.send(1, prompt(2000))
        for _ in range(50):
            bench.send(2, prompt(1000))
        chosen[name] = bench.chosen(prompt(10))
    assert chosen == {"mooncake": 1, "dynamo": 0}
