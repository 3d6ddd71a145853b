"""`least_load` chooses as if it scored all instances, in fleets where most of them are idle, busy or slow."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from proxy.balancer.engines import EngineFacts
from proxy.balancer.health import Health
from proxy.balancer.lease import Lease
from proxy.balancer.pick import PickRequest, Policy, PolicyContext, pick_reason
from proxy.balancer.policies.handoff_times import HandoffTimes
from proxy.balancer.policies.least_decode_seconds import LeastDecodeSeconds
from proxy.balancer.policies.least_seconds import LeastSeconds
from proxy.balancer.pool import Pool, PoolLimits, Pools
from proxy.balancer.roster import Roster
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Load, Role
from proxy.common.errors import Failure, NoBackendAvailable, UpstreamError
from proxy.settings import HealthChecks
from proxy.wire.prefix import NO_PREFIX_KEYS, PrefixKeys
from tests.balancer.policies.full_scan import ScanningDecodeSeconds, ScanningSeconds
from tests.balancer.policies.test_least_seconds import PIECE, Subject
from tests.clock import Clock
from tests.pools import make_pool

pytestmark = pytest.mark.interpreted

SIZE = 24
"""Instances of each role."""
STEPS = 900
SLOW = (0, 7)
"""Ports of prefillers with slow links to all decoders."""


@dataclass
class World:
    """A worker with both pools. Worlds in which the same happens differ only in their policies."""

    scans: bool
    worker: int
    kv_tokens: int | None
    open: list[tuple[Lease, Lease | None, PickRequest]] = field(default_factory=list)
    waiting: list[PickRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = Clock()
        checks = HealthChecks(slow_start_seconds=5.0, eject_seconds=5.0)
        self.health = Health(lambda: checks, self.clock, random.Random(1))
        self.scoreboard = Scoreboard(2, slots=4 * SIZE)
        ports = [range(first, first + SIZE) for first in (0, 100)]
        self.roster = Roster([("p", port) for port in ports[0]], [("d", port) for port in ports[1]], self.scoreboard)
        self.handoffs = HandoffTimes(PolicyContext(clock=self.clock))
        prefill = ScanningSeconds if self.scans else LeastSeconds
        decode = ScanningDecodeSeconds if self.scans else LeastDecodeSeconds
        self.prefill_policy = prefill(self.context(Role.PREFILL))
        self.pools = Pools(
            self.pool(self.prefill_policy),
            self.pool(decode(self.context(Role.DECODE))),
            handoff_times=self.handoffs,
        )

    def context(self, role: Role) -> PolicyContext:
        return PolicyContext(
            self.worker,
            random.Random(1),
            clock=self.clock,
            role=role,
            facts_of_engine=lambda _: EngineFacts(kv_memory_tokens=self.kv_tokens),
            handoff_predictions=self.handoffs,
        )

    def pool(self, policy: Policy) -> Pool:
        return make_pool(
            policy.context.role,
            self.roster,
            self.scoreboard,
            policy=policy,
            health=self.health,
            handoff_times=self.handoffs,
            clock=self.clock,
            random_source=random.Random(1),
            pool_limits=PoolLimits(max_running=40),
        )

    def ask(self, request: PickRequest) -> list[object]:
        """Ask for room, and lease instances or queue the request. Return all that was decided."""
        prefill, decode = self.pools.prefill, self.pools.decode
        rooms: list[object] = [
            prefill.has_room(lambda: request),
            decode.has_room(lambda: request),
            prefill.soonest_completion_seconds(request),
        ]
        if not all(rooms[:2]):
            self.waiting.append(request)
            return [
                *rooms,
                prefill.predict_work_seconds(request),
                prefill.policy.max_hold_seconds(request, len(self.waiting)),
            ]
        return [*rooms, *self.lease(request)]

    def look(self) -> list[object]:
        """Let one of the queued requests go."""
        if not self.waiting:
            return []
        for prompt in self.prefill_policy._waiting_costs.values():
            prompt.costs_by_prefiller.clear()  # costs predicted when it began to wait may differ by now
        place = self.pools.prefill.index_to_admit(self.waiting)
        if place is None:
            return [None]
        request = self.waiting.pop(place)
        self.pools.prefill.on_left_queue(request)
        return [place, *self.lease(request)]

    def lease(self, request: PickRequest) -> list[object]:
        try:
            prefiller, decoder = self.pools.enter_both_leases(request)
        except NoBackendAvailable:
            return ["none"]
        self.open.append((prefiller, decoder, request))
        return [
            prefiller.backend.name,
            pick_reason(prefiller.backend_pick),
            decoder.backend.name,
            pick_reason(decoder.backend_pick),
        ]

    def end(self, number: int, share: float, failure: Failure | None) -> None:
        """End a prefill, or an answer whose prefill has ended. `share`: the part of the prompt that was cached."""
        prefiller, decoder, request = self.open.pop(number)
        if failure is not None:
            error = UpstreamError(failure, prefiller.backend, "failed")
            prefiller.__exit__(type(error), error, None)
        elif decoder is not None:
            prefiller.record_usage(request.prompt_tokens, int(share * request.prompt_tokens))
            prefiller.release_compute()
            decoder.confirm_beginning()
            self.handoffs.record_handoff(
                prefiller.backend,
                decoder.backend,
                request.prompt_tokens,
                self.clock.now - (2.0 if decoder.backend.port == 100 or prefiller.backend.port in SLOW else 0.1),
                self.clock.now,
            )
            self.open.append((decoder, None, request))
            prefiller.release_kv()
            prefiller.__exit__(None, None, None)
            return
        else:
            prefiller.answer_tokens = 20
            prefiller.__exit__(None, None, None)
        if failure is not None and decoder is not None:
            decoder.__exit__(RuntimeError, RuntimeError(), None)

    def instance(self, number: int) -> Backend:
        return [member.backend for role in (Role.PREFILL, Role.DECODE) for member in self.roster.members_of_role(role)][
            number
        ]

    def change(self, kind: str, number: int) -> None:
        """Change an instance."""
        backend = self.instance(number)
        role, host, port = backend.role, backend.host, backend.port
        if kind == "disable":
            self.roster.disable_backend(role, host, port)
        elif kind == "enable":
            self.roster.enable_backend(role, host, port)
        elif kind == "weight":
            self.roster.set_backend_weight(role, host, port, 30)
        elif kind == "full weight":
            self.roster.set_backend_weight(role, host, port, 100)
        elif kind == "down":
            self.health.on_outcome(backend, UpstreamError(Failure.CONNECT, backend, "refused"))
        elif kind == "up":
            self.health.on_probe(backend, True, "test")
        elif kind == "press":
            pool = self.pools.pool_of(role)
            pool.report_outcome(backend, UpstreamError(Failure.RECOMPUTED, backend, "recomputed"))
        elif kind == "other load":  # of another worker
            self.scoreboard.load_row(1).add_load(backend.slot, 1, 1, 5000 if role is Role.PREFILL else 0, 3000)
        elif kind == "no other load":
            self.scoreboard.erase_row(1)
        elif kind == "computes in order":
            for prefiller in self.prefill_policy._prefillers.prefillers_by_key.values():
                prefiller.concurrency_estimate.computes_in_order = True
                prefiller.concurrency_estimate._remaining_validity = 1000
                prefiller.shared_step_seconds = 0.05 * (number % 3)
        elif kind == "limits sessions":
            sets = self.prefill_policy._session_limits
            sets.are_limits_active = not sets.are_limits_active


CHANGES = (
    *("disable", "enable", "enable", "weight", "full weight", "full weight"),
    *("down", "up", "up", "press", "other load", "no other load"),
    *("computes in order", "computes in order", "limits sessions"),
)


def requests(rng: random.Random) -> PickRequest:
    """Return a short request, one with a prefix of which others have a part, or one that is passed through."""
    kind = rng.random()
    if kind < 0.05:
        return PickRequest.make_for_load(Load(rng.choice([0, 500]), 700))
    tokens = rng.randint(1, 200) if kind < 0.4 else PIECE * rng.randint(1, 12)
    session = None if rng.random() < 0.7 else f"session {rng.randrange(5)}"
    keys = NO_PREFIX_KEYS
    if kind > 0.5:
        length = tokens // PIECE
        chain = (rng.randrange(4), *(rng.choice([0, 0, 0, number]) for number in range(length - 1)))
        pieces = [hash(chain[: place + 1]) & 0xFFFFFFFFFFFF for place in range(length)]
        keys = PrefixKeys(pieces, [4 * PIECE * (place + 1) for place in range(length)])
    load = Load(tokens + 3480, tokens)
    return PickRequest(load, Load(0, tokens + 100), Subject(tokens, keys, 100, session))


@pytest.mark.parametrize("seed", range(8))
def test_choices_are_those_of_a_scan_of_all_instances(seed: int) -> None:
    rng = random.Random(seed)
    worker, kv_tokens = seed % 2, rng.choice([None, 20_000, 10**6])
    worlds = [World(scans, worker, kv_tokens) for scans in (False, True)]
    for world in worlds:
        for pool in (world.pools.prefill, world.pools.decode):
            for backend in pool.all_backends():
                pool.record_success(backend)
    decided: set[object] = set()
    in_flight = rng.choice([4, 20, 120])
    for step in range(STEPS):
        if step % 150 == 0:
            in_flight = rng.choice([4, 20, 120])
        count = len(worlds[0].open)
        if rng.random() < count / (2 * in_flight):
            number, share = rng.randrange(count), rng.random()
            failure = Failure.CONNECT if rng.random() < 0.03 else None
            for world in worlds:
                world.end(number, share, failure)
        elif rng.random() < 0.06 and step > 100:
            change, number = rng.choice(CHANGES), rng.randrange(2 * SIZE)
            for world in worlds:
                world.change(change, number)
        else:
            request = requests(rng)
            indexed, scanned = (world.ask(request) for world in worlds)
            assert indexed == scanned, f"step {step}"
            decided.update(map(str, indexed))
        indexed, scanned = (world.look() for world in worlds)
        assert indexed == scanned, f"step {step}, from the queue"
        passed = rng.expovariate(20 / in_flight)
        for world in worlds:
            world.clock.now += passed
    assert {"equal", "least_seconds", "cached_prefix"} <= decided
