"""The gateway's balancer and admission queue in front of simulated engines."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

from lab.replay.engines import Engine
from lab.replay.gateways import FIRST_PORT, Gateway, KvEventRelay, Plan, SharedStore, Worker
from lab.replay.trace import BLOCK_TOKENS, Request
from proxy.balancer.engines import EngineFacts
from proxy.balancer.lease import Lease
from proxy.balancer.local_prefill import FirstToken, LocalPrefill
from proxy.balancer.pick import PickRequest, Policy, PolicyContext
from proxy.balancer.policies.prefill_cost import make_prompt_costs
from proxy.balancer.pool import Pools
from proxy.common.backend import Backend, Load, Role
from proxy.common.errors import NoBackendAvailable, Overloaded
from proxy.dialects.call import DECODE_OVERHEAD_TOKENS, PREFILL_OVERHEAD_TOKENS
from proxy.process.loop_lag import LoopLag
from proxy.settings.model import Cost as CostSettings
from proxy.settings.model import Kv
from proxy.sim.hardware.machines import Machine
from proxy.sim.hardware.work import Work
from proxy.wire.prefix import PrefixKeys

MakePolicy = Callable[[PolicyContext, Mapping[Backend, Engine]], Policy]

TRANSFER_SECONDS_PER_TOKEN: Final = 2.8e-6
"""Time to transfer the KV cache of one token: 70 KB at 25 GB/s."""
_BYTES_PER_TOKEN: Final = CostSettings().bytes_per_token
# vLLM's `decoder_kv_blocks_ttl` (nixl/base_scheduler.py): decoders free the KV cache of an answer that nothing reads.
_KEPT_SECONDS: Final = 480.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Number and hardware of the engines."""

    prefillers: int
    decoders: int
    prefill_machine: Machine
    decode_machine: Machine
    slow: float | None = None
    """Speed of the first prefiller relative to the others. None: equal."""
    speed: float = 1.0
    """Speed of all engines relative to their machines, so that runs over real sockets are short."""
    link_seconds: float = TRANSFER_SECONDS_PER_TOKEN
    """Time to transfer the KV cache of one token, at speed 1."""
    slow_links: int = 0
    """Number of pairs of a prefiller and a decoder whose link is slow. The seed of a run decides which."""
    slow_factor: float = 10.0
    """How many times as long transfers take over these links."""

    @property
    def prefiller_facts(self) -> EngineFacts | None:
        """Facts that each prefiller reports about itself."""
        return None

    def engines(self, role: Role) -> Iterator[Engine]:
        """Yield new engines of a role on the running loop."""
        machine = self.prefill_machine if role is Role.PREFILL else self.decode_machine
        shape = machine.prefill if role is Role.PREFILL else machine.decode
        for number in range(self.prefillers if role is Role.PREFILL else self.decoders):
            slow = self.slow if self.slow is not None and role is Role.PREFILL and number == 0 else 1.0
            yield Engine(machine.cost.faster(self.speed * slow), shape, self.link_seconds / self.speed)

    def slow_pairs(self, seed: int) -> set[tuple[int, int]]:
        """Return the numbers of prefiller and decoder of each slow link."""
        pairs = [(prefiller, decoder) for prefiller in range(self.prefillers) for decoder in range(self.decoders)]
        return set(random.Random(seed).sample(pairs, min(self.slow_links, len(pairs))))

    @property
    def name(self) -> str:
        """The text that `parse_fleet` reads."""
        return f"{self.prefillers}P{self.decoders}D" + ("" if self.slow is None else f":{self.slow:g}")

    @property
    def capacity(self) -> float:
        """Number of prefillers, the slow one weighted by its speed."""
        return self.prefillers - 1 + (1.0 if self.slow is None else self.slow)

    def work_seconds(self, request: Request) -> float:
        """Return the seconds that a prompt takes on an empty prefiller at speed 1."""
        return self.prefill_machine.cost.prefill(request.input_tokens)


def parse_fleet(text: str) -> tuple[int, int, float | None]:
    """Parse a text like 8P8D or 8P8D:0.5 into prefillers, decoders and `Fleet.slow`. Raises ValueError."""
    found = re.fullmatch(r"(\d+)P(\d+)D(?::(\d*\.?\d+))?", text, re.IGNORECASE)
    slow = None if found is None or found[3] is None else float(found[3])
    if found is None or not int(found[1]) or not int(found[2]) or slow == 0:
        raise ValueError(
            f"{text!r} is not a fleet: write the number of prefillers and decoders, as in 8P8D, or 8P8D:0.5 for one"
            " prefiller at half speed"
        )
    return int(found[1]), int(found[2]), slow


@dataclass(frozen=True, slots=True)
class Subject:
    """The gateway's view of a request: its prompt, without the length of the answer."""

    request: Request
    session_id: str | None = None
    first_token_seconds: float | None = None

    def requested_priority(self, *, is_lower_first: bool) -> None:
        return None

    def request_texts(self) -> None:
        return None

    @property
    def prompt_tokens(self) -> int:
        return self.request.input_tokens

    @property
    def output_tokens(self) -> int:
        return CostSettings().default_output_tokens

    @property
    def prefix_keys(self) -> PrefixKeys:
        request = self.request
        ends = [BLOCK_TOKENS * (index + 1) for index in range(len(request.blocks))]
        if ends:
            ends[-1] = max(request.input_tokens, ends[-1] - BLOCK_TOKENS + 1)
        return PrefixKeys(request.blocks, tuple(_BYTES_PER_TOKEN * end for end in ends))


@dataclass(slots=True)
class KeptAnswer:
    """The KV cache of an answer, which its decoder keeps until it is freed."""

    engine: Engine
    work: Work

    @property
    def tokens(self) -> int:
        """Return the number of tokens in the cache: the prompt and the answer without its last token."""
        return self.work.tokens - 1

    def free(self) -> None:
        """Free the cache. May be called again."""
        self.engine.give_back(self.work)


@dataclass(slots=True)
class Course:
    """The outcome of one request. Seconds are of the loop's clock, and None if the event did not happen."""

    request: Request
    prefiller: Backend | None = None
    cached_tokens: int = 0
    expected_tokens: int = 0
    """Prompt tokens that the policy expected to be cached."""
    predicted_seconds: float | None = None
    """Predicted seconds of the prefill."""
    prefill_seconds: float | None = None
    """Actual seconds of the prefill."""
    computed_at: float = 0.0
    """End of the last prefill."""
    first_token_at: float | None = None
    ended_at: float | None = None
    is_rejected: bool = False
    reads: KeptAnswer | None = None
    """The answer with whose tokens the prompt begins, if a decoder keeps its KV cache."""
    read_tokens: int = 0
    """Prompt tokens whose KV cache the prefiller read from a decoder. They count as cached, too."""
    kept: KeptAnswer | None = None
    """The KV cache of the answer, if its decoder keeps it."""
    decoder: Backend | None = None
    before: Course | None = None
    """The turn before in the same conversation. None: it is the first turn, or is not part of one."""
    repeats_answer: bool = False
    """Whether the prompt begins with the tokens of the turn before and its answer."""
    is_later: bool = False
    """Whether it is a turn after the first one of its conversation."""
    is_local: bool = False
    """Whether a decoder computed the prompt."""

    def tail_at(self, decoder: Backend) -> tuple[int, int]:
        """Return the argument `tail` of Engine.append for a decoder."""
        before = self.before
        if before is None or not self.repeats_answer or before.decoder != decoder:
            return 0, 0
        tokens = before.request.input_tokens
        return tokens // BLOCK_TOKENS, tokens + before.request.output_tokens - 1

    @property
    def first_token_seconds(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.request.at

    @property
    def token_seconds(self) -> float | None:
        """Mean seconds between two tokens of the answer. None with fewer than two tokens."""
        tokens = self.request.output_tokens - 1
        if self.first_token_at is None or self.ended_at is None or not tokens:
            return None
        return (self.ended_at - self.first_token_at) / tokens


@contextmanager
def _leased(pools: Pools, pick: PickRequest) -> Iterator[tuple[Lease, Lease]]:
    """Lease a prefiller and a decoder, as a connector does."""
    prefiller, decoder = pools.enter_both_leases(pick)
    with ExitStack() as stack:
        stack.push(decoder)
        stack.push(prefiller)
        yield prefiller, decoder


class Replay:
    """One run in virtual time. Create it on the loop on which it runs."""

    def __init__(
        self,
        fleet: Fleet,
        prefill_policy: MakePolicy,
        decode_policy: MakePolicy,
        *,
        seed: int,
        max_running_prefill: int | None = None,
        max_running_decode: int | None = None,
        tells_cached: bool = True,
        workers: int = 1,
        gateways: int = 1,
        replicas: Mapping[str, object] | None = None,
        kv_events: bool = False,
        loop_lag: LoopLag | None = None,
        learns_handoffs: bool = True,
        tokenize_seconds: float | None = None,
        skip_prefill: Literal["auto"] | bool | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Create engines and gateways.

        Args:
          fleet: Number and hardware of the engines.
          prefill_policy, decode_policy: Make the policies of each worker.
          seed: Of all random draws.
          max_running_prefill, max_running_decode: Limits per engine. None: no limit.
          tells_cached: Prefillers report how many tokens of a prompt were cached.
          workers: Workers of each gateway. Each request goes to a random one.
          gateways: Number of gateways.
          replicas: Options by which gateways share state. None: they share nothing.
          kv_events: Prefillers publish KV events.
          loop_lag: See Plan.
          learns_handoffs: See Plan.
          tokenize_seconds: Time to tokenize one token of a prompt whose prefiller reads the KV cache of the answer
            before. None: prefillers read no answers, and decoders keep none.
          skip_prefill: Whether decoders compute prompts, as the option of the gateway. None: they do not, and have no
            prefix caches.
          on_end: Called at the end of each request.
        """
        self.courses: list[Course] = []
        """Outcomes of all requests, in the order of their arrival."""
        self.engines: dict[Backend, Engine] = {}
        self._tells_cached = tells_cached
        self._learns_handoffs = learns_handoffs
        self._tokenize_seconds = tokenize_seconds
        self._skip_prefill = skip_prefill
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        rng = self._rng = random.Random(seed)

        decoder = EngineFacts(kv_memory_tokens=fleet.decode_machine.decode.kv_tokens)

        def facts(backend: Backend) -> EngineFacts | None:
            return decoder if backend.role is Role.DECODE else fleet.prefiller_facts

        plan = Plan(
            prefillers=fleet.prefillers,
            decoders=fleet.decoders,
            policies={Role.PREFILL: prefill_policy, Role.DECODE: decode_policy},
            max_running={Role.PREFILL: max_running_prefill, Role.DECODE: max_running_decode},
            facts=facts,
            workers=workers,
            replicas=replicas,
            kv_events=kv_events,
            loop_lag=loop_lag,
            learns_handoffs=learns_handoffs,
        )
        self._slow_pairs, self._slow_factor = fleet.slow_pairs(seed), fleet.slow_factor
        self._gateways = [Gateway(plan, f"gateway-{number}", self.engines, rng) for number in range(gateways)]
        self._is_shared = replicas is not None
        self.workers = [worker for gateway in self._gateways for worker in gateway.workers]
        self.pools = self.workers[0].pools
        self._local = {worker: LocalPrefill(worker.pools.prefill, worker.pools.decode) for worker in self.workers}
        if skip_prefill:
            for worker, local in self._local.items():
                worker.skips_queue = partial(
                    local.skips_queue, max_tokens=Kv().local_max_tokens, is_cautious=skip_prefill == "auto"
                )
        for each in (self.pools.prefill, self.pools.decode):
            self.engines.update(zip(each.all_backends(), fleet.engines(each.role), strict=True))
        writers = [gateway.events for gateway in self._gateways if gateway.events is not None]
        for backend in self.pools.prefill.all_backends() if writers else ():
            size = fleet.prefill_machine.prefill.block_tokens
            self.engines[backend].batch.blocks.watcher = KvEventRelay(backend, size, writers, self._loop)

    def load(self, backend: Backend) -> Load:
        """Return the load that a backend is charged with now."""
        loads = [gateway.scoreboard.own_load(backend.slot)[1] for gateway in self._gateways]
        return Load(sum(load.compute_tokens for load in loads), sum(load.kv_tokens for load in loads))

    async def run(self, requests: Sequence[Request]) -> None:
        """Run all requests at their times to their ends."""
        async with self._sharing_state(), asyncio.TaskGroup() as group:
            for request in requests:
                await asyncio.sleep(request.at - self._loop.time())
                group.create_task(self._serve(request))

    async def run_closed(self, requests: Iterable[Request], clients: int) -> None:
        """Run requests by a number of clients, each of which sends the next request after its answer.

        Load generators with a fixed concurrency do so. The times of the requests are not used.
        """
        left = iter(requests)

        async def client() -> None:
            for request in left:
                await self._serve(replace(request, at=self._loop.time()))

        async with self._sharing_state(), asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())

    @asynccontextmanager
    async def _sharing_state(self) -> AsyncIterator[None]:
        """Let the gateways share their state inside this context, if they do so in this run."""
        async with AsyncExitStack() as stack:
            if self._is_shared:
                store = SharedStore()
                for gateway in self._gateways:
                    await stack.enter_async_context(gateway.exchange(store))
            yield

    def _link_factor(self, prefiller: Backend, decoder: Backend) -> float:
        pair = prefiller.port - FIRST_PORT, decoder.port - FIRST_PORT - len(self.pools.prefill.all_backends())
        return self._slow_factor if pair in self._slow_pairs else 1.0

    async def _attempt(self, course: Course, worker: Worker, pick: PickRequest, done: int) -> int:
        """Run a request on a prefiller and a decoder, and return the number of new tokens.

        `done`: tokens of the answer that the prompt includes.
        """
        request = course.request
        tokens = request.input_tokens + done
        with _leased(worker.pools, pick) as (prefiller, decoder):
            engine, sent_at = self.engines[prefiller.backend], self._loop.time()
            if not done:
                course.prefiller = prefiller.backend
                if prefiller.policy_prediction is not None:
                    course.predicted_seconds = prefiller.policy_prediction.predicted_seconds
                    course.expected_tokens = prefiller.policy_prediction.cached_tokens
            kv = await self._prefill(course, engine, tokens)
            if not done:
                course.prefill_seconds = self._loop.time() - sent_at
                course.cached_tokens, course.read_tokens = kv.cached_tokens, kv.fetched_tokens
            prefiller.record_usage(tokens, kv.cached_tokens if self._tells_cached else None)
            prefiller.release_compute()
            course.computed_at = computed_at = self._loop.time()
            decoding = self.engines[decoder.backend]
            answer = await decoding.begin(
                tokens,
                request.output_tokens - done,
                link_factor=self._link_factor(prefiller.backend, decoder.backend),
                keeps_kv=self._tokenize_seconds is not None,
                names=() if self._skip_prefill is None else request.blocks[: request.input_tokens // BLOCK_TOKENS],
            )
            course.decoder = decoder.backend
            engine.give_back(kv)
            prefiller.release_kv()
            if not answer.generated:
                return 0
            began_at = self._loop.time()
            course.first_token_at = course.first_token_at or began_at
            worker.pools.decode.load_row.count_handoff(prefiller.backend.slot, decoder.backend.slot, tokens)
            if self._learns_handoffs:
                worker.pools.handoff_times.record_handoff(
                    prefiller.backend, decoder.backend, tokens, computed_at, began_at
                )
            decoder.confirm_beginning(decoding.clock_of(answer))
            generated = await decoding.end(answer)
            if generated + done == request.output_tokens:
                decoder.answer_tokens = generated
            if answer.keeps_kv:
                course.kept = KeptAnswer(decoding, answer)
                self._loop.call_later(_KEPT_SECONDS, course.kept.free)
            return generated

    async def _attempt_local(self, course: Course, worker: Worker, pick: PickRequest) -> int:
        """Run a request on one decoder if it is expected to be faster. Return the number of tokens, or 0.

        Learn from the outcome, as connectors do.
        """
        local, request, prompt = self._local[worker], course.request, make_prompt_costs(pick)
        is_careful = self._skip_prefill == "auto"
        choice = local.find_faster_decoder(prompt, Kv().local_max_tokens, is_cautious=is_careful)
        if choice is None:
            generated = await self._attempt(course, worker, pick, 0)
            if generated and course.first_token_at is not None and course.decoder is not None:
                first = FirstToken(course.first_token_at, course.first_token_at - course.computed_at)
                local.learn_from_handoff(course.decoder.name, prompt, first, generated)
            return generated
        worker.pools.prefill.policy.record_local_turn(pick)
        tokens, sent_at = request.input_tokens, self._loop.time()
        with worker.pools.decode.make_lease(
            replace(pick, preferred_backend=choice.decoder, computes_prompt=True)
        ) as lease:
            engine, course.decoder = self.engines[lease.backend], lease.backend
            names = request.blocks[: tokens // BLOCK_TOKENS]
            answer = await engine.append(tokens, request.output_tokens, names, course.tail_at(lease.backend))
            if not answer.generated:
                return 0
            course.is_local, course.cached_tokens, course.first_token_at = True, answer.cached_tokens, self._loop.time()
            lease.confirm_beginning(engine.clock_of(answer))
            generated = await engine.end(answer)
            if generated == request.output_tokens:
                lease.answer_tokens = generated
        first = FirstToken(course.first_token_at, course.first_token_at - sent_at)
        counts = tokens, answer.cached_tokens
        local.learn_from_local_prefill(lease.backend.name, choice, first, generated, counts)
        return generated

    async def _prefill(self, course: Course, engine: Engine, tokens: int) -> Work:
        """Compute a prompt, of which the prefiller reads a part from a decoder if that keeps it."""
        kept, course.reads = course.reads, None
        kept_tokens = 0
        if kept is not None and self._tokenize_seconds is not None:
            # The gateway lets the prefiller tokenize the prompt, and compares its beginning.
            await asyncio.sleep(tokens * self._tokenize_seconds)
            kept_tokens = kept.tokens
        request = course.request
        kv = await engine.prefill(tokens, request.blocks[: request.input_tokens // BLOCK_TOKENS], kept_tokens)
        if kept is not None:
            kept.free()
        return kv

    async def _serve(self, request: Request, key: str = "-") -> Course:
        """Run one request, which is no turn of a conversation. `key`: name of the client key."""
        return await self._serve_turn(Course(request), key)

    async def _serve_turn(self, course: Course, key: str) -> Course:
        """Run one request as a connector does that calls the decoder after the prefiller's answer."""
        request = course.request
        self.courses.append(course)
        subject = Subject(request)
        tokens = request.input_tokens
        pick = PickRequest(
            Load(tokens + PREFILL_OVERHEAD_TOKENS, tokens),
            Load(DECODE_OVERHEAD_TOKENS, tokens + subject.output_tokens),
            subject,
        )
        worker = self._rng.choice(self.workers) if len(self.workers) > 1 else self.workers[0]
        try:
            async with worker.admission.make_entry(key, request=lambda: pick):
                done = 0
                while done < request.output_tokens:  # again if the answer was evacuated
                    is_local = self._skip_prefill and not done
                    done += await (
                        self._attempt_local(course, worker, pick)
                        if is_local
                        else self._attempt(course, worker, pick, done)
                    )
                course.ended_at = self._loop.time()
        except (Overloaded, NoBackendAvailable):
            course.is_rejected = True
        self._on_end()
        return course
