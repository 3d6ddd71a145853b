"""All that takes part in a replay, by name: the own policies, other gateways' rules, and one that knows all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from lab.replay.engines import Engine
from lab.replay.fleet import Fleet, MakePolicy, Subject
from lab.replay.peers import peers
from lab.replay.trace import BLOCK_TOKENS
from proxy.balancer.pick import Candidate, PickRequest, Policy, PolicyContext
from proxy.balancer.policies.least_tokens import make_policy
from proxy.common.backend import Backend, Load
from proxy.settings import POLICIES
from proxy.sim.hardware.cost import Cost
from proxy.sim.hardware.machines import MACHINES, Machine

# A prefiller that has no more to do than this gets the next prompt.
_AHEAD_SECONDS: Final = 0.05
_MOST_CROWDING: Final = 6.0
_BUSY_STEP: Final = 0.02


class Clairvoyant(Policy):
    """For prefillers. `engines` may be filled after this is made."""

    def __init__(self, engines: Mapping[Backend, Engine], cost: Cost, context: PolicyContext) -> None:
        """`cost`: of all prefillers but a slow one, whose time is worth less to those behind."""
        super().__init__(context)
        self._engines = engines
        self._cost = cost
        self._busy = 0.0

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """The least score."""
        return candidates[self._best(candidates, self._waits(candidates), request)]

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        """Whether one is almost done."""
        return min(self._waits(candidates)) < _AHEAD_SECONDS

    def work_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        """Where it takes least."""
        return min(self._own(candidate, request) for candidate in candidates)

    def first_to_go(self, candidates: Sequence[Candidate], waiting: Sequence[PickRequest]) -> int | None:
        """The first that does best where there is room; those before it wait for what they do best with."""
        waits = self._waits(candidates)
        self._busy += _BUSY_STEP * (1 - waits.count(0.0) / len(waits) - self._busy)
        free = [wait < _AHEAD_SECONDS for wait in waits]
        for place, request in enumerate(waiting):
            best = self._best(candidates, waits, request)
            if free[best]:
                return place
            waits[best] += self._own(candidates[best], request)
        return None

    def _best(self, candidates: Sequence[Candidate], waits: Sequence[float], request: PickRequest) -> int:
        crowding = min(_MOST_CROWDING, self._busy / max(1e-9, 1 - self._busy))
        scores = []
        for candidate, wait in zip(candidates, waits, strict=True):
            cached = self._cached(candidate, request)
            work = self._cost.prefill(request.prompt_tokens - cached, cached)
            scores.append(wait + self._own(candidate, request) + crowding * work)
        return scores.index(min(scores))

    def _waits(self, candidates: Sequence[Candidate]) -> list[float]:
        return [self._engines[candidate.backend].seconds_left for candidate in candidates]

    def _own(self, candidate: Candidate, request: PickRequest) -> float:
        cached = self._cached(candidate, request)
        return self._engines[candidate.backend].cost.prefill(request.prompt_tokens - cached, cached)

    def _cached(self, candidate: Candidate, request: PickRequest) -> int:
        names = request.prefix_keys.keys[: (request.prompt_tokens - 1) // BLOCK_TOKENS]
        return BLOCK_TOKENS * self._engines[candidate.backend].hit(names)


class ClairvoyantDecode(Policy):
    """For decoders: the shortest step, below the knee and where there is memory for the whole answer."""

    def __init__(self, machine: Machine, context: PolicyContext) -> None:
        super().__init__(context)
        self._cost = machine.cost
        self._kv_tokens = machine.decode.kv_tokens
        self._most = min(machine.decode.max_num_seqs, machine.cost.knee or machine.decode.max_num_seqs)

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """Of those with memory, if there are any, the one with the shortest step."""
        kv_tokens = self._kv_tokens - self.cost_of(candidates[0].backend, request).kv
        roomy = [each for each in candidates if each.load.kv <= kv_tokens]
        return min(roomy or candidates, key=lambda each: self._cost.decode(each.running + 1, each.load.kv))

    def cost_of(self, backend: Backend, request: PickRequest) -> Load:
        """All tokens that there will be."""
        assert isinstance(request.subject, Subject)
        return Load(0, request.prompt_tokens + request.subject.request.output_tokens)

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        """Whether one is below the knee."""
        return any(candidate.running < self._most for candidate in candidates)


OURS: Final = "least_load"
TODAY: Final = "today"
"""Tokens are counted, for both roles: what the gateway did by default before it counted seconds."""
CLAIRVOYANT: Final = "clairvoyant"


def policies(fleet: Fleet, decode_policy: str) -> dict[str, tuple[MakePolicy, MakePolicy]]:
    """For prefillers and for decoders. `decode_policy`: beside each of the gateway's own."""
    own = {name: (_of_table(name), _of_table(decode_policy)) for name in POLICIES}
    others = {name: (_blind(prefill), _blind(decode)) for name, (prefill, decode) in _peers(fleet).items()}

    def knowing(context: PolicyContext, engines: Mapping[Backend, Engine]) -> Policy:
        return Clairvoyant(engines, fleet.prefill_machine.cost, context)

    decoding = _blind(partial(ClairvoyantDecode, fleet.decode_machine))
    today = {TODAY: (_of_table("least_tokens"), _of_table("least_tokens"))}
    return own | today | others | {CLAIRVOYANT: (knowing, decoding)}


def peer_names() -> list[str]:
    """Of other gateways' rules."""
    return list(peers(next(iter(MACHINES.values())).cost))


def policy_names() -> list[str]:
    """Of all."""
    return [*POLICIES, TODAY, *peer_names(), CLAIRVOYANT]


def _peers(fleet: Fleet) -> dict[str, tuple[Callable[[PolicyContext], Policy], Callable[[PolicyContext], Policy]]]:
    return peers(fleet.prefill_machine.cost)


def _of_table(name: str) -> MakePolicy:
    return _blind(partial(make_policy, name))


def _blind(make: Callable[[PolicyContext], Policy]) -> MakePolicy:
    """One that does not look into engines."""
    return lambda context, _engines: make(context)
