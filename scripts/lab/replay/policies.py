"""All policies of a replay by name: pdproxy's, other gateways' rules, and a clairvoyant one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from lab.replay.engines import Engine
from lab.replay.fleet import Fleet, MakePolicy, Subject
from lab.replay.trace import BLOCK_TOKENS
from proxy.balancer.pick import Candidate, LeaseTracker, PickRequest, Policy, PolicyContext
from proxy.balancer.policies.least_tokens import LeastTokens, RoundRobin, make_policy
from proxy.common.backend import Backend, Load
from proxy.settings import POLICIES
from proxy.settings.model import Balance
from proxy.sim.hardware.cost import Cost
from proxy.sim.hardware.machines import MACHINES, Machine

_MICROSECONDS: Final = 1e6


class SentBlocks:
    """The latest `blocks` prompt blocks that were sent to each backend."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._by_backend: dict[Backend, OrderedDict[int, None]] = {}

    def tokens(self, backend: Backend, request: PickRequest) -> int:
        """Return how many leading tokens of a prompt were sent to a backend before, at most all but one block."""
        sent = self._by_backend.get(backend, ())
        hits = 0
        for key in request.prefix_keys.keys:
            if key not in sent:
                break
            hits += 1
        return min(hits * BLOCK_TOKENS, (request.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)

    def add(self, backend: Backend, request: PickRequest) -> None:
        """Record a prompt. Its last block is forgotten first."""
        sent = self._by_backend.setdefault(backend, OrderedDict())
        for key in reversed(request.prefix_keys.keys):
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > self._blocks:
            sent.popitem(last=False)

    def size(self, backend: Backend) -> int:
        """Return the number of blocks that a backend is assumed to cache."""
        return len(self._by_backend.get(backend, ()))


class _PrefixAware(Policy):
    """A policy that knows which prompts were sent to which backend."""

    blocks = 1_000_000 // BLOCK_TOKENS
    """Blocks of each backend's cache: the capacity of the simulated engines, for programs that can know it."""

    def __init__(self, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self._sent = SentBlocks(self.blocks)

    def start_tracker(self, backend: Backend, request: PickRequest) -> LeaseTracker:
        tracker = super().start_tracker(backend, request)
        self._sent.add(backend, request)
        return tracker

    def match(self, candidate: Candidate, request: PickRequest) -> float:
        """Return the share of the prompt that was sent to this backend before."""
        return self._sent.tokens(candidate.backend, request) / max(1, request.prompt_tokens)


class LeastRequests(LeastTokens):
    """Chooses the fewest requests. Equal backends take turns."""

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        fewest = min(candidate.running_requests for candidate in candidates)
        return self._choose_in_turn([candidate for candidate in candidates if candidate.running_requests == fewest])


class CacheAware(_PrefixAware):
    """The default of sglang-router 0.3.2 and vllm-router 0.1.17 (`policies/cache_aware.rs`).

    Chooses the fewest requests while these differ by more than 64 and by half, otherwise the best match if it is more
    than 0.3, otherwise the smallest tree.
    """

    # max_tree_size is 2^24 characters.
    blocks = 2**24 // (4 * BLOCK_TOKENS)

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        running = [candidate.running_requests for candidate in candidates]
        if max(running) - min(running) > 64 and max(running) > 1.5 * min(running):
            return candidates[running.index(min(running))]
        best = max(candidates, key=lambda candidate: self.match(candidate, request))
        if self.match(best, request) > 0.3:
            return best
        return self._of_misses(candidates)

    def _of_misses(self, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda candidate: self._sent.size(candidate.backend))


class CacheAwareLeastLoad(CacheAware):
    """The rule of newer SGLang routers: without a match, choose the fewest requests."""

    def _of_misses(self, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda candidate: candidate.running_requests)


class AscendExample(Policy):
    """The rule of vLLM-Ascend's `load_balance_proxy_server_example.py` for prefillers.

    Each prompt in flight costs 0.0345 ms per token and 120 ms, and 0.3 of that while its KV cache is held. The first of
    equals is chosen.
    """

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        return min(
            candidates,
            key=lambda candidate: candidate.charged_load.compute_tokens + 0.3 * candidate.charged_load.kv_tokens,
        )

    def load_of_request(self, backend: Backend, request: PickRequest) -> Load:
        """Return the cost in nanoseconds, which are integers."""
        cost = 34_500 * request.prompt_tokens + 120_074_500
        return Load(cost, cost)


class AscendExampleDecode(AscendExample):
    """The rule of the same example for decoders: the sum of prompt lengths."""

    def load_of_request(self, backend: Backend, request: PickRequest) -> Load:
        return Load(request.prompt_tokens, 0)


class _LeastSum(_PrefixAware):
    """Chooses the least sum of the cost in flight and the cost of this prompt."""

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        return min(
            candidates,
            key=lambda each: (
                each.charged_load.compute_tokens + self.load_of_request(each.backend, request).compute_tokens
            ),
        )


class Dynamo(_LeastSum):
    """Dynamo's KV router for prefillers (`scheduling/selector/default.rs`): uncached tokens to compute."""

    def load_of_request(self, backend: Backend, request: PickRequest) -> Load:
        return Load(request.prompt_tokens - self._sent.tokens(backend, request), request.prompt_tokens)


class LeastKv(LeastTokens):
    """Dynamo's rule for decoders: the fewest blocks in use. Equal backends take turns."""

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        fewest = min(candidate.charged_load.kv_tokens for candidate in candidates)
        return self._choose_in_turn(
            [candidate for candidate in candidates if candidate.charged_load.kv_tokens == fewest]
        )

    def load_of_request(self, backend: Backend, request: PickRequest) -> Load:
        return Load(0, request.prompt_tokens)


class LlmD(_PrefixAware):
    """llm-d's scheduler with the weights of its guides: 3 × match, 2 × shorter queue, 2 × free KV."""

    # llm-d's approximate index has 31,250 blocks of 64 tokens per endpoint.
    blocks = 31_250 * 64 // BLOCK_TOKENS
    kv_tokens = 1_000_000

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        running = [candidate.running_requests for candidate in candidates]
        least, most = min(running), max(running)

        def score(candidate: Candidate) -> float:
            queue = 1.0 if most == least else (most - candidate.running_requests) / (most - least)
            free = 1 - candidate.charged_load.kv_tokens / self.kv_tokens
            return 3 * self.match(candidate, request) + 2 * queue + 2 * free

        return max(candidates, key=score)


class LoadAware(_PrefixAware):
    """production-stack's `loadaware` router: the match less the load's relative excess over the mean."""

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        mean = sum(candidate.running_requests for candidate in candidates) / len(candidates) or 1.0
        return max(candidates, key=lambda each: self.match(each, request) - (each.running_requests - mean) / mean)


class Mooncake(_LeastSum):
    """Mooncake's Algorithm 1 (FAST'25): the least sum of predicted queue and prefill seconds.

    Its model of the engine, fitted offline, is taken to be exact.
    """

    def __init__(self, cost: Cost, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self._cost = cost

    def load_of_request(self, backend: Backend, request: PickRequest) -> Load:
        """Return the cost in microseconds."""
        cached = self._sent.tokens(backend, request)
        seconds = self._cost.prefill(request.prompt_tokens - cached, cached)
        return Load(round(_MICROSECONDS * seconds), request.prompt_tokens)


class SMetric(Mooncake):
    """vllm-router's `smetric` rule (`policies/smetric.rs`): the longest match while its first token is in time.

    Otherwise the least predicted prefill work in the queue. Its learned prefill rate is taken to be exact. It keeps the
    match of later turns only; here a prompt is one if more than half of it matches.
    """

    # max_tree_size is 2^24 characters.
    blocks = 2**24 // (4 * BLOCK_TOKENS)
    hit_ratio = 0.5
    slo_seconds = 1.0
    slo_seconds_per_token = 62.5e-6

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        queued = [
            each.charged_load.compute_tokens + self.load_of_request(each.backend, request).compute_tokens
            for each in candidates
        ]
        limit = _MICROSECONDS * (self.slo_seconds + self.slo_seconds_per_token * request.prompt_tokens)
        matches = [self.match(each, request) for each in candidates]
        best = matches.index(max(matches))
        is_in_time = queued[best] <= limit or min(queued) > limit
        if matches[best] > self.hit_ratio and is_in_time:
            return candidates[best]
        return candidates[queued.index(min(queued))]


def peers(cost: Cost) -> dict[str, tuple[Callable[[PolicyContext], Policy], Callable[[PolicyContext], Policy]]]:
    """Return the rules for prefillers and decoders, by the names of reports."""
    return {
        "round robin": (RoundRobin, RoundRobin),
        "vllm-ascend example": (AscendExample, AscendExampleDecode),
        "cache_aware": (CacheAware, LeastRequests),
        "cache_aware, new": (CacheAwareLeastLoad, LeastRequests),
        "production-stack": (LoadAware, LeastRequests),
        "llm-d": (LlmD, LeastRequests),
        "dynamo": (Dynamo, LeastKv),
        "mooncake": (lambda context: Mooncake(cost, context), LeastRequests),
        "smetric": (lambda context: SMetric(cost, context), LeastRequests),
    }


# A prefiller with less work than this gets the next prompt.
_AHEAD_SECONDS: Final = 0.05
_MAX_CROWDING: Final = 6.0
_BUSY_STEP: Final = 0.02


class Clairvoyant(Policy):
    """Chooses prefillers by their true state. `engines` may be filled after construction."""

    def __init__(self, engines: Mapping[Backend, Engine], cost: Cost, context: PolicyContext) -> None:
        """Create the policy. `cost`: of a normal prefiller, also used to weigh the time of a slow one."""
        super().__init__(context)
        self._engines = engines
        self._cost = cost
        self._busy = 0.0

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        return candidates[self._best(candidates, self._waits(candidates), request)]

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        return min(self._waits(candidates)) < _AHEAD_SECONDS

    def shortest_work_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        return min(self._own(candidate, request) for candidate in candidates)

    def index_to_admit(self, candidates: Sequence[Candidate], waiting_requests: Sequence[PickRequest]) -> int | None:
        """Return the first request whose best prefiller has room. Earlier ones wait for theirs."""
        waits = self._waits(candidates)
        self._busy += _BUSY_STEP * (1 - waits.count(0.0) / len(waits) - self._busy)
        free = [wait < _AHEAD_SECONDS for wait in waits]
        for place, request in enumerate(waiting_requests):
            best = self._best(candidates, waits, request)
            if free[best]:
                return place
            waits[best] += self._own(candidates[best], request)
        return None

    def _best(self, candidates: Sequence[Candidate], waits: Sequence[float], request: PickRequest) -> int:
        crowding = min(_MAX_CROWDING, self._busy / max(1e-9, 1 - self._busy))
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
    """Chooses the decoder with the shortest step among those with memory for the whole answer."""

    def __init__(self, machine: Machine, context: PolicyContext) -> None:
        super().__init__(context)
        self._cost = machine.cost
        self._kv_tokens = machine.decode.kv_tokens
        self._max_running = min(machine.decode.max_num_seqs, machine.cost.knee or machine.decode.max_num_seqs)

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        kv_tokens = self._kv_tokens - self.load_of_request(candidates[0].backend, request).kv_tokens
        roomy = [each for each in candidates if each.charged_load.kv_tokens <= kv_tokens]
        return min(
            roomy or candidates,
            key=lambda each: self._cost.decode(each.running_requests + 1, each.charged_load.kv_tokens),
        )

    def load_of_request(self, backend: Backend, request: PickRequest) -> Load:
        """Return all tokens of the prompt and the answer."""
        assert isinstance(request.request_subject, Subject)
        return Load(0, request.prompt_tokens + request.request_subject.request.output_tokens)

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        return any(candidate.running_requests < self._max_running for candidate in candidates)


OURS: Final = "least_load"
AFFINITY: Final = "affinity"
"""Name of pdproxy's default without working sets, which shows how many sessions fit into the caches."""
TODAY: Final = "today"
"""Name of the former default: counting tokens for both roles."""
CLAIRVOYANT: Final = "clairvoyant"


def policies(fleet: Fleet, decode_policy: str) -> dict[str, tuple[MakePolicy, MakePolicy]]:
    """Return policies for prefillers and decoders by name. `decode_policy`: beside pdproxy's own."""
    own = {name: (_of_table(name), _of_table(decode_policy)) for name in POLICIES}
    others = {name: (_blind(prefill), _blind(decode)) for name, (prefill, decode) in _peers(fleet).items()}

    def knowing(context: PolicyContext, engines: Mapping[Backend, Engine]) -> Policy:
        return Clairvoyant(engines, fleet.prefill_machine.cost, context)

    decoding = _blind(partial(ClairvoyantDecode, fleet.decode_machine))
    affinity = {AFFINITY: (_without_working_sets(OURS), _of_table(decode_policy))}
    today = {TODAY: (_of_table("least_tokens"), _of_table("least_tokens"))}
    return own | affinity | today | others | {CLAIRVOYANT: (knowing, decoding)}


def peer_names() -> list[str]:
    """Return the names of other gateways' rules."""
    return list(peers(next(iter(MACHINES.values())).cost))


def policy_names() -> list[str]:
    """Return the names of all policies."""
    return [*POLICIES, AFFINITY, TODAY, *peer_names(), CLAIRVOYANT]


def _peers(fleet: Fleet) -> dict[str, tuple[Callable[[PolicyContext], Policy], Callable[[PolicyContext], Policy]]]:
    return peers(fleet.prefill_machine.cost)


def _of_table(name: str) -> MakePolicy:
    return _blind(partial(make_policy, name))


def _without_working_sets(name: str) -> MakePolicy:
    off = Balance(working_sets=False)
    return lambda context, _engines: make_policy(name, replace(context, get_balance_options=lambda: off))


def _blind(make: Callable[[PolicyContext], Policy]) -> MakePolicy:
    """Wrap a policy that does not look into engines."""
    return lambda context, _engines: make(context)
