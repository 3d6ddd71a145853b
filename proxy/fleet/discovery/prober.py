"""Asks every backend on a timer whether it is well.

What a probe says goes to Health, which decides; each change of state is one log line. A backend that came up is asked
once what it is, and how much it works on at a time. Each round also drops the backends that have drained. Nothing here
outlives the `async with`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.balancer.backend_health import HealthState
from proxy.balancer.health import ProbeFailure
from proxy.common.background import Background, BackgroundOwner
from proxy.common.errors import Failure
from proxy.fleet.discovery.facts import (
    CHAT_IDS_PATH,
    CHAT_IDS_QUESTION,
    METRICS_PATH,
    MODELS_PATH,
    SERVER_INFO_PATH,
    SERVER_INFO_TIMEOUT_SECONDS,
    VERSION_PATH,
    facts_of,
    is_to_be_asked_for_chat_ids,
    is_to_be_asked_for_ranks,
    with_chat_ids,
    with_models,
    with_ranks,
    with_setup,
)
from proxy.observe import logs
from proxy.upstream import EngineRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prometheus_client import Counter

    from proxy.balancer.engines import EngineFacts
    from proxy.balancer.health import Health, Transition
    from proxy.balancer.pool import Pool
    from proxy.balancer.roster import Roster
    from proxy.common.backend import Backend, Role
    from proxy.settings import HealthChecks
    from proxy.upstream import BufferedResponse, EngineClient

logger = logging.getLogger("proxy.discovery.prober")

# Somebody's answer waits for it.
_GONE_TIMEOUT_SECONDS: Final = 0.5
# So many health checks begin at once, and the next ones a moment later.
_AT_ONCE: Final = 10
_SPREAD_SECONDS: Final = 0.01

# A request that names an unknown model waits for the answers.
_MODELS_PAUSE_SECONDS: Final = 1.0
_MODELS_TIMEOUT_SECONDS: Final = 3.0


def log_transition(transition: Transition, *, is_news: bool = True) -> None:
    """One line for a backend that changed its state. `is_news` False: another worker has already written it."""
    is_bad = transition.new in (HealthState.DOWN, HealthState.EJECTED)
    level = logging.WARNING if is_bad else logging.INFO
    if not is_news:
        level = logging.DEBUG
    backend = transition.backend
    what = (backend.role, backend.name, transition.new, transition.reason)
    logger.log(level, "%s instance %s is %s: %s", *what, extra=logs.ALWAYS)


_PROBE_FAILURES: Final = {Failure.CONNECT: ProbeFailure.REFUSED, Failure.TIMEOUT: ProbeFailure.LATE}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ProberParts:
    """One worker's parts that a Prober works with."""

    pools: Mapping[Role, Pool]
    """Pools whose backends are probed, by role."""
    roster: Roster
    """Members of these pools."""
    health: Health
    """Takes the result of each probe."""
    client: EngineClient
    """Connections for probes."""
    fresh_client: EngineClient
    """Opens a connection for each question whether an engine is gone."""
    engine_headers: Callable[[Backend], Mapping[str, str]]
    """Returns the headers that an engine requires."""
    restarts: Counter
    """Counts restarts of background loops."""
    on_transition: Callable[[Transition], None] = log_transition
    """Called with each change of state."""
    on_removed: Callable[[Backend], None] = lambda backend: None
    """Called with each removed backend whose last request has ended."""
    pool_of: Callable[[Backend], Pool] | None = None
    """Returns the pool in which a backend is compared with others; None: it is the pool of its role."""


class Prober(BackgroundOwner):
    """One worker's view of which backends are well. `async with` it."""

    def __init__(self, parts: ProberParts, checks: HealthChecks) -> None:
        self._restarts = parts.restarts
        self._pools = parts.pools
        self._roster = parts.roster
        self._health = parts.health
        self._checks = checks
        self._client = parts.client
        self._fresh_client = parts.fresh_client
        self._engine_headers = parts.engine_headers
        self._on_transition = parts.on_transition
        self._on_removed = parts.on_removed
        self._pool_of = parts.pool_of
        self._background = Background(logger, "a health check")
        self._due: dict[Backend, float] = {}  # loop time of the next probe, infinity while one is under way
        self._unheard: set[Backend] = set()  # those that did not answer when they were asked what they are
        self._told_at: dict[Backend, float] = {}  # when it was asked last what models it serves
        self._last_looks: dict[Backend, asyncio.Task[bool]] = {}
        self._models_round: asyncio.Task[None] | None = None
        """Asks all instances for their models; the last one, if none is under way."""
        self._models_asked_at = -math.inf

    def _begin(self) -> None:
        self._background.keep(self._keep_probing, "health_checks", self._restarts)

    def configure(self, checks: HealthChecks) -> None:
        """Take changed settings for the probes from now on."""
        self._checks = checks

    def drop_drained(self) -> None:
        """Forget the removed backends whose last request has ended."""
        for backend in self._roster.finalize():
            logger.info("%s instance %s is removed", backend.role, backend.name)
            self._on_removed(backend)

    async def joined(self, backend: Backend, success: str) -> None:
        """Take notice of a backend that has just become a member by this success."""
        self._due[backend] = self._next_due()  # it has just been asked
        await self._hear(backend, "", success)

    # Asking out of turn

    async def is_gone(self, backend: Backend, within_seconds: float) -> bool:
        """Whether a backend that has just broken off accepts no connections, or says that it is not well, now or within
        so many seconds. Asked once for all who want to know. One that says nothing is busy for all we know.
        """
        task = self._last_looks.get(backend)
        if task is None:
            task = self._last_looks[backend] = self._background.start(self._look_again(backend, within_seconds))
            task.add_done_callback(lambda _: self._last_looks.pop(backend, None))
        return await asyncio.shield(task)

    async def _look_again(self, backend: Backend, within_seconds: float) -> bool:
        if await self._has_ended(backend):
            return True
        if not within_seconds:
            return False
        await asyncio.sleep(within_seconds)
        return await self._has_ended(backend)

    async def _has_ended(self, backend: Backend) -> bool:
        # A connection that was open before may outlive the listener. So a new one is opened.
        path, headers = self._checks.path, self._engine_headers(backend)
        try:
            return await self._fresh_client.get_status(backend.url, path, _GONE_TIMEOUT_SECONDS, headers) != 200
        except EngineRequestError as error:
            return error.failure is not Failure.TIMEOUT

    async def refresh_models(self, *, is_patient: bool) -> None:
        """Ask all instances that are up for the models that they serve, at most once a second.

        Callers that come meanwhile wait for the same answers. `is_patient`: wait until a second has passed since they
        were asked last; otherwise return at once then.
        """
        if self._models_round is None or self._models_round.done():
            if not is_patient and asyncio.get_running_loop().time() < self._models_asked_at + _MODELS_PAUSE_SECONDS:
                return
            self._models_round = self._background.start(self._ask_all_models())
        await asyncio.wait((self._models_round,), timeout=_MODELS_TIMEOUT_SECONDS)

    async def _ask_all_models(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._models_asked_at + _MODELS_PAUSE_SECONDS - loop.time())
        self._models_asked_at = loop.time()
        known = [
            (backend, facts)
            for pool in self._pools.values()
            for backend in pool.eligible()
            if (facts := self._health.of(backend).facts) is not None
        ]
        await asyncio.gather(*(self._ask_models(backend, facts) for backend, facts in known))

    def doubt(self, backend: Backend) -> None:
        """Another gateway has found a backend of no use: it is held out, and asked at once."""
        pool = self._pools.get(backend.role)
        if pool is None or backend not in pool.backends():
            return
        self._compared_in(backend).report_peer_verdict(backend)
        if self._due.get(backend) != math.inf and self._health.of(backend).is_changing:
            self._start_probe(backend)

    def _compared_in(self, backend: Backend) -> Pool:
        """The pool in which a backend is compared with others."""
        return self._pools[backend.role] if self._pool_of is None else self._pool_of(backend)

    # Probing

    async def _keep_probing(self) -> None:
        while True:
            self.drop_drained()
            await self._start_due_probes()
            await asyncio.sleep(min(self._checks.changing_interval_seconds, self._checks.interval_seconds))

    async def _start_due_probes(self) -> None:
        backends = {backend for pool in self._pools.values() for backend in pool.backends()}
        for gone in self._due.keys() - backends:
            del self._due[gone]
            self._told_at.pop(gone, None)
            self._unheard.discard(gone)
        now = asyncio.get_running_loop().time()
        started = 0
        for backend in backends:
            due = self._due.get(backend, now)
            if due <= now or (due < math.inf and self._health.of(backend).is_changing):
                self._start_probe(backend)
                started += 1
                if started % _AT_ONCE == 0:  # a thousand at once would hold up all streams
                    await asyncio.sleep(_SPREAD_SECONDS)

    def _start_probe(self, backend: Backend) -> None:
        self._due[backend] = math.inf
        self._background.start(self._probe(backend))

    async def _probe(self, backend: Backend) -> None:
        path, problem = self._checks.path, ""
        failure: ProbeFailure | None = None
        try:
            status = await self._client.get_status(
                backend.url, path, self._checks.timeout_seconds, self._engine_headers(backend)
            )
            if status != 200:
                problem = f"{path} answered with status {status}"
                failure = ProbeFailure.UNAVAILABLE if status == 503 else None
        except EngineRequestError as error:
            problem, failure = str(error), _PROBE_FAILURES.get(error.failure)
        try:
            success = "passed its health check"
            await self._hear(backend, problem, success, failure)
        finally:
            self._due[backend] = self._next_due()

    async def _hear(
        self,
        backend: Backend,
        problem: str,
        success: str,
        failure: ProbeFailure | None = None,
    ) -> None:
        """Tell Health how a backend has answered, see `Health.on_probe`, and ask one that came up what it is."""
        if backend not in self._pools[backend.role].backends():
            return  # it left meanwhile, and Health is not to hear of it again
        pool = self._compared_in(backend)
        is_late = failure is ProbeFailure.LATE
        transition = self._health.on_probe(
            backend,
            not problem,
            problem or success,
            failure=failure,
            is_last=is_late and pool.eligible() == (backend,),
            is_serving=is_late and pool.scoreboard.running(backend.slot) > 0,
        )
        if transition is not None:
            self._on_transition(transition)
        health = self._health.of(backend)
        # An instance on probation is asked, too: after its first request it receives its full share at once.
        if problem or not health.passes_probes:
            return
        if health.facts is None:
            self._told_at[backend] = asyncio.get_running_loop().time()
            await self._ask_facts(backend)
        elif backend in self._unheard:
            self._unheard.discard(backend)  # until this has been answered
            self._background.start(self._ask_facts(backend))
        elif self._is_to_tell_models(backend):
            self._background.start(self._ask_models(backend, health.facts))

    def _is_to_tell_models(self, backend: Backend) -> bool:
        """Whether it is time to ask an engine for its models again, which is then being done."""
        seconds, now = self._checks.models_interval_seconds, asyncio.get_running_loop().time()
        if not seconds or now < self._told_at.get(backend, now) + seconds:
            return False
        self._told_at[backend] = now
        return True

    def _next_due(self) -> float:
        jitter = random.uniform(1 - self._checks.jitter, 1 + self._checks.jitter)
        return asyncio.get_running_loop().time() + jitter * self._checks.interval_seconds

    async def _ask_facts(self, backend: Backend) -> None:
        """Ask what it is. Where it does not answer it is asked again behind its next health check."""
        seconds, before = self._checks.timeout_seconds, self._health.of(backend).facts
        version, models = await asyncio.gather(
            self._get(backend, VERSION_PATH, seconds), self._get(backend, MODELS_PATH, seconds)
        )
        is_heard = version is not None and models is not None
        if not is_heard or self._health.of(backend).facts is not before:
            self._unheard.add(backend)
            if before is not None:
                return
        facts = facts_of(version, models)
        self._health.note_facts(backend, facts)
        self._background.start(self._ask_setup(backend, facts))

    async def _ask_setup(self, backend: Backend, facts: EngineFacts) -> None:
        """Add to what it said how it was started, how many requests it works on at a time, what fits into its KV
        memory and how many ranks it has, as far as it tells.
        """
        info = await self._get(backend, SERVER_INFO_PATH, SERVER_INFO_TIMEOUT_SECONDS)
        told = with_setup(facts, info)
        if is_to_be_asked_for_ranks(told, backend.role):
            told = with_ranks(told, await self._get(backend, METRICS_PATH, self._checks.timeout_seconds))
        if is_to_be_asked_for_chat_ids(told):
            told = with_chat_ids(told, await self._ask_for_chat_ids(backend))
        now = self._health.of(backend).facts
        if now is facts:
            self._health.note_facts(backend, told)
        elif now is not None and now.identity.setup is None:  # it has told of other models meanwhile: asked once more
            self._unheard.add(backend)

    async def _ask_models(self, backend: Backend, facts: EngineFacts) -> None:
        """Take notice of other models, or adapters, than an engine has told of before."""
        answer = await self._get(backend, MODELS_PATH, self._checks.timeout_seconds)
        told = with_models(facts, answer)
        if told.identity != facts.identity and self._health.of(backend).facts is facts:
            self._health.note_facts(backend, told)

    async def _ask_for_chat_ids(self, backend: Backend) -> BufferedResponse | None:
        """None: there was no answer."""
        seconds, headers = self._checks.timeout_seconds, self._engine_headers(backend)
        try:
            return await self._client.post(backend.url, CHAT_IDS_PATH, seconds, CHAT_IDS_QUESTION, headers)
        except EngineRequestError:
            return None

    async def _get(self, backend: Backend, path: str, timeout_seconds: float) -> BufferedResponse | None:
        """None: there was no answer."""
        try:
            return await self._client.get(backend.url, path, timeout_seconds, self._engine_headers(backend))
        except EngineRequestError:
            return None
