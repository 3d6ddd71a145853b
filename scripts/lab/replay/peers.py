"""Other gateways' rules for choosing, as policies, as far as they can be read from their sources.

They are their rules and not their programs: each has the index of prefixes that this file keeps, which knows what was
sent where and forgets the least recently used, and none has a stale view of its own requests. Where a program has
options, these are its defaults.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from lab.replay.trace import BLOCK_TOKENS
from proxy.balancer.pick import Candidate, PickRequest, Policy, PolicyContext, Tracker
from proxy.balancer.policies.least_tokens import LeastTokens, RoundRobin
from proxy.common.backend import Backend, Load
from proxy.sim.hardware.cost import Cost

_MICROSECONDS: Final = 1e6


class Sent:
    """Which blocks of prompts were sent to each backend, the latest `blocks` of them."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._by_backend: dict[Backend, OrderedDict[int, None]] = {}

    def tokens(self, backend: Backend, request: PickRequest) -> int:
        """How much of a prompt, from its beginning, was sent there before; never all of it."""
        sent = self._by_backend.get(backend, ())
        hits = 0
        for key in request.prefix_keys.keys:
            if key not in sent:
                break
            hits += 1
        return min(hits * BLOCK_TOKENS, (request.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)

    def add(self, backend: Backend, request: PickRequest) -> None:
        """A prompt is sent there. Its tail is forgotten before its head."""
        sent = self._by_backend.setdefault(backend, OrderedDict())
        for key in reversed(request.prefix_keys.keys):
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > self._blocks:
            sent.popitem(last=False)

    def size(self, backend: Backend) -> int:
        """How many blocks it is thought to have."""
        return len(self._by_backend.get(backend, ()))


class _Knowing(Policy):
    """Knows what was sent where."""

    blocks = 1_000_000 // BLOCK_TOKENS
    """Of each backend's cache: what these engines have, if the program can know it."""

    def __init__(self, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self._sent = Sent(self.blocks)

    def track(self, backend: Backend, request: PickRequest) -> Tracker:
        """Remember it at once."""
        tracker = super().track(backend, request)
        self._sent.add(backend, request)
        return tracker

    def match(self, candidate: Candidate, request: PickRequest) -> float:
        """The share of the prompt that was sent there before."""
        return self._sent.tokens(candidate.backend, request) / max(1, request.prompt_tokens)


class LeastRequests(LeastTokens):
    """The fewest requests; equal ones take turns."""

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """The request does not matter."""
        fewest = min(candidate.running for candidate in candidates)
        return self._take_turn([candidate for candidate in candidates if candidate.running == fewest])


class CacheAware(_Knowing):
    """sglang-router 0.3.2 and vllm-router 0.1.17 (`policies/cache_aware.rs`), in their defaults: the fewest requests
    while these differ by more than 64 and by half; else the best match if it is more than 0.3; else the smallest tree.
    """

    # max_tree_size is 2^24 characters.
    blocks = 2**24 // (4 * BLOCK_TOKENS)

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """See above."""
        running = [candidate.running for candidate in candidates]
        if max(running) - min(running) > 64 and max(running) > 1.5 * min(running):
            return candidates[running.index(min(running))]
        best = max(candidates, key=lambda candidate: self.match(candidate, request))
        if self.match(best, request) > 0.3:
            return best
        return self._of_misses(candidates)

    def _of_misses(self, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda candidate: self._sent.size(candidate.backend))


class CacheAwareLeastLoad(CacheAware):
    """The same in newer sources of SGLang's router: what matches nowhere goes where there are the fewest requests."""

    def _of_misses(self, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda candidate: candidate.running)


class AscendExample(Policy):
    """vllm-ascend's `load_balance_proxy_server_example.py`: 0.0345 ms a token and 120 ms for each prompt under way, and
    0.3 of that for each whose KV is held; of equals the first.
    """

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """See above."""
        return min(candidates, key=lambda candidate: candidate.load.compute + 0.3 * candidate.load.kv)

    def cost_of(self, backend: Backend, request: PickRequest) -> Load:
        """In nanoseconds, to stay in integers."""
        cost = 34_500 * request.prompt_tokens + 120_074_500
        return Load(cost, cost)


class AscendExampleDecode(AscendExample):
    """Its decoders: the prompts' lengths."""

    def cost_of(self, backend: Backend, request: PickRequest) -> Load:
        """In tokens."""
        return Load(request.prompt_tokens, 0)


class _LeastSum(_Knowing):
    """The least of what is under way there and of what this prompt would cost there."""

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """See above."""
        return min(candidates, key=lambda each: each.load.compute + self.cost_of(each.backend, request).compute)


class Dynamo(_LeastSum):
    """Dynamo's KV router (`scheduling/selector/default.rs`), its prefill term: tokens to compute, of all that are under
    way there and of this one, less what of it is cached there.
    """

    def cost_of(self, backend: Backend, request: PickRequest) -> Load:
        """What is cached does not count."""
        return Load(request.prompt_tokens - self._sent.tokens(backend, request), request.prompt_tokens)


class LeastKv(LeastTokens):
    """Dynamo's decoders: the fewest blocks in use; equal ones take turns."""

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """The request does not matter."""
        fewest = min(candidate.load.kv for candidate in candidates)
        return self._take_turn([candidate for candidate in candidates if candidate.load.kv == fewest])

    def cost_of(self, backend: Backend, request: PickRequest) -> Load:
        """The prompt's blocks: those of the answer are not counted by default."""
        return Load(0, request.prompt_tokens)


class LlmD(_Knowing):
    """llm-d's scheduler with the scorers of its guides: 3 × the matched share, 2 × the shorter queue, 2 × free KV."""

    # The approximate index has 31,250 blocks of 64 tokens for each endpoint.
    blocks = 31_250 * 64 // BLOCK_TOKENS
    kv_tokens = 1_000_000

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """See above."""
        running = [candidate.running for candidate in candidates]
        least, most = min(running), max(running)

        def score(candidate: Candidate) -> float:
            queue = 1.0 if most == least else (most - candidate.running) / (most - least)
            free = 1 - candidate.load.kv / self.kv_tokens
            return 3 * self.match(candidate, request) + 2 * queue + 2 * free

        return max(candidates, key=score)


class LoadAware(_Knowing):
    """production-stack's `loadaware` router: the matched share less what the load is above the mean, as its part."""

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """See above."""
        mean = sum(candidate.running for candidate in candidates) / len(candidates) or 1.0
        return max(candidates, key=lambda each: self.match(each, request) - (each.running - mean) / mean)


class Mooncake(_LeastSum):
    """Mooncake's Algorithm 1 (FAST'25): the least sum of the predicted seconds of what is queued there and of this
    prompt, less what is cached. Its model of the engine, fitted offline, is taken to be exact.
    """

    def __init__(self, cost: Cost, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self._cost = cost

    def cost_of(self, backend: Backend, request: PickRequest) -> Load:
        """In microseconds."""
        cached = self._sent.tokens(backend, request)
        seconds = self._cost.prefill(request.prompt_tokens - cached, cached)
        return Load(round(_MICROSECONDS * seconds), request.prompt_tokens)


def peers(cost: Cost) -> dict[str, tuple[Callable[[PolicyContext], Policy], Callable[[PolicyContext], Policy]]]:
    """The rules for prefillers and for decoders, by what they are called in reports."""
    return {
        "round robin": (RoundRobin, RoundRobin),
        "vllm-ascend example": (AscendExample, AscendExampleDecode),
        "cache_aware": (CacheAware, LeastRequests),
        "cache_aware, new": (CacheAwareLeastLoad, LeastRequests),
        "production-stack": (LoadAware, LeastRequests),
        "llm-d": (LlmD, LeastRequests),
        "dynamo": (Dynamo, LeastKv),
        "mooncake": (lambda context: Mooncake(cost, context), LeastRequests),
    }
