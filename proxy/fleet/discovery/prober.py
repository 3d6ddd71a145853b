"""Probes the health of every backend on a timer.

Health decides by the results, and each change of state is one log line. A backend that has come up is asked once for
its facts. Each round also removes backends that have drained. All tasks end with the `async with` block.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.balancer.backend_health import HealthState
from proxy.balancer.health import Health, HealthBoard, ProbeFailure, Transition
from proxy.common.backend import Backend, Role
from proxy.common.background import BackgroundOwner, BackgroundTasks
from proxy.common.errors import Failure
from proxy.fleet.discovery.facts import (
    CHAT_IDS_PATH,
    CHAT_IDS_QUESTION,
    METRICS_PATH,
    MODELS_PATH,
    SERVER_INFO_PATH,
    SERVER_INFO_TIMEOUT_SECONDS,
    VERSION_PATH,
    make_engine_facts,
    needs_chat_ids_question,
    needs_ranks_question,
    update_chat_ids,
    update_models,
    update_ranks,
    update_setup,
)
from proxy.observe import logs
from proxy.upstream import BufferedResponse, EngineClient, EngineRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prometheus_client import Counter

    from proxy.balancer.engines import EngineFacts
    from proxy.balancer.pool import Pool
    from proxy.balancer.roster import Roster
    from proxy.settings import HealthChecks
    from proxy.upstream import Upstream

logger = logging.getLogger("proxy.discovery.prober")

# A broken answer waits for the result.
_GONE_TIMEOUT_SECONDS: Final = 0.5
# Number of health checks that begin together, and the pause before the next ones.
_PROBES_AT_ONCE: Final = 10
_SPREAD_SECONDS: Final = 0.01

# A request with an unknown model waits for the answers.
_MODELS_PAUSE_SECONDS: Final = 1.0
_MODELS_TIMEOUT_SECONDS: Final = 3.0


def log_transition(transition: Transition, *, is_news: bool = True) -> None:
    """Log a backend's change of state. `is_news` False: another worker has logged it, so the level is DEBUG."""
    is_bad = transition.new_state in (HealthState.DOWN, HealthState.EJECTED)
    level = logging.WARNING if is_bad else logging.INFO
    if not is_news:
        level = logging.DEBUG
    backend = transition.backend
    what = (backend.role, backend.name, transition.new_state, transition.reason)
    logger.log(level, "%s instance %s is %s: %s", *what, extra=logs.ALWAYS)


_PROBE_FAILURES: Final = {Failure.CONNECT: ProbeFailure.REFUSED, Failure.TIMEOUT: ProbeFailure.LATE}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ProberParts:
    """Parts of one worker that a HealthProber uses."""

    pools: Mapping[Role, Pool]
    """Pools whose backends are probed, by role."""
    roster: Roster
    """Members of these pools."""
    health: Health
    """Decides by the result of each probe."""
    upstream: Upstream
    """Connections for health checks, which are those of the requests of clients."""
    engine_client: EngineClient
    """Connections for questions about facts and models."""
    fresh_client: EngineClient
    """Opens a new connection for each check whether an engine is gone."""
    engine_headers: Callable[[Backend], Mapping[str, str]]
    """Returns the headers that an engine requires."""
    restart_counter: Counter
    """Counts restarts of background loops."""
    on_transition: Callable[[Transition], None] = log_transition
    """Called with each change of state."""
    on_backend_removed: Callable[[Backend], None] = lambda backend: None
    """Called with each removed backend whose last request has ended."""
    pool_of: Callable[[Backend], Pool] | None = None
    """Returns the pool in which a backend is compared with others; None: always the pool of its role."""


class HealthProber(BackgroundOwner):
    """Probes all backends for one worker inside `async with`."""

    def __init__(self, parts: ProberParts, checks: Callable[[], HealthChecks]) -> None:
        """Create a prober. `checks`: returns the current settings of probes."""
        self._restart_counter = parts.restart_counter
        self._pools = parts.pools
        self._roster = parts.roster
        self._health = parts.health
        self._get_health_checks = checks
        self._upstream = parts.upstream
        self._engine_client = parts.engine_client
        self._fresh_client = parts.fresh_client
        self._engine_headers = parts.engine_headers
        self._on_transition = parts.on_transition
        self._on_removed = parts.on_backend_removed
        self._pool_of = parts.pool_of
        self._background = BackgroundTasks(logger, "a health check")
        self._due: dict[Backend, float] = {}
        """Loop time of the next probe; infinity during a probe."""
        self._incomplete: set[Backend] = set()
        """Backends whose facts are incomplete, because they did not answer a question."""
        self._models_due_from: dict[Backend, float] = {}
        """Loop time at which a backend was last asked for its models."""
        self._gone_checks: dict[Backend, asyncio.Task[bool]] = {}
        """Running checks whether a backend is gone."""
        self._models_round: asyncio.Task[None] | None = None
        """The last round of questions to all instances for their models; None before the first."""
        self._models_asked_at = -math.inf
        """Loop time of the last round."""

    def _begin(self) -> None:
        self._background.keep_running(self._keep_probing, "health_checks", self._restart_counter)

    def remove_drained_backends(self) -> None:
        """Remove drained backends whose last request has ended."""
        for backend in self._roster.drop_drained_backends():
            logger.info("prober: %s instance %s is removed", backend.role, backend.name)
            self._on_removed(backend)

    def on_backend_moved(self, old_backend: Backend, new_backend: Backend) -> None:
        """Forget a backend that has left its role, and probe it at once in its new one."""
        self._on_removed(old_backend)
        self._start_probe(new_backend)

    async def on_backend_joined(self, backend: Backend, success: str) -> None:
        """Count the probe that let a backend join as the first success of its health checks."""
        self._due[backend] = self._next_due_at()
        await self._record_probe_result(backend, "", success)

    # Questions outside the timer

    async def is_backend_gone(self, backend: Backend, within_seconds: float) -> bool:
        """Return whether a backend that has just broken an answer is gone.

        It is gone if it refuses connections or reports that it is unhealthy, now or after `within_seconds`. A backend
        that does not answer in time may be busy, and is not gone. Concurrent callers share one check.
        """
        task = self._gone_checks.get(backend)
        if task is None:
            task = self._gone_checks[backend] = self._background.start_task(self._check_twice(backend, within_seconds))
            task.add_done_callback(lambda _: self._gone_checks.pop(backend, None))
        return await asyncio.shield(task)

    async def _check_twice(self, backend: Backend, within_seconds: float) -> bool:
        if await self._is_probe_finished(backend):
            return True
        if not within_seconds:
            return False
        await asyncio.sleep(within_seconds)
        return await self._is_probe_finished(backend)

    async def _is_probe_finished(self, backend: Backend) -> bool:
        # An open connection may outlive the listener, so a new one is opened.
        path, headers = self._get_health_checks().path, self._engine_headers(backend)
        try:
            return await self._fresh_client.get_status(backend.url, path, _GONE_TIMEOUT_SECONDS, headers) != 200
        except EngineRequestError as error:
            return error.failure_kind is not Failure.TIMEOUT

    async def refresh_models(self, *, is_patient: bool) -> None:
        """Ask all available instances for their models, at most once a second.

        Concurrent callers wait for the same answers. `is_patient`: if the last round is less than a second ago, wait
        for the next one; otherwise return at once.
        """
        if self._models_round is None or self._models_round.done():
            if not is_patient and asyncio.get_running_loop().time() < self._models_asked_at + _MODELS_PAUSE_SECONDS:
                return
            self._models_round = self._background.start_task(self._ask_all_models())
        await asyncio.wait((self._models_round,), timeout=_MODELS_TIMEOUT_SECONDS)

    async def _ask_all_models(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._models_asked_at + _MODELS_PAUSE_SECONDS - loop.time())
        self._models_asked_at = loop.time()
        known = [
            (backend, facts)
            for pool in self._pools.values()
            for backend in pool.eligible_backends()
            if (facts := self._health.health_of(backend).engine_facts) is not None
        ]
        await asyncio.gather(*(self._ask_models(backend, facts) for backend, facts in known))

    def probe_suspect(self, backend: Backend) -> None:
        """Take a backend out of choices and probe it at once, because another gateway has found it unhealthy."""
        pool = self._pools.get(backend.role)
        if pool is None or backend not in pool.all_backends():
            return
        self._pool_for_comparison(backend).report_peer_verdict(backend)
        if self._due.get(backend) != math.inf and self._health.health_of(backend).may_change_at_next_probe:
            self._start_probe(backend)

    def _pool_for_comparison(self, backend: Backend) -> Pool:
        """Return the pool in which a backend is compared with others."""
        return self._pools[backend.role] if self._pool_of is None else self._pool_of(backend)

    # Probing

    async def _keep_probing(self) -> None:
        while True:
            self.remove_drained_backends()
            await self._start_due_probes()
            await asyncio.sleep(
                min(self._get_health_checks().changing_interval_seconds, self._get_health_checks().interval_seconds)
            )

    async def _start_due_probes(self) -> None:
        backends = {backend for pool in self._pools.values() for backend in pool.all_backends()}
        for removed in self._due.keys() - backends:
            del self._due[removed]
            self._models_due_from.pop(removed, None)
            self._incomplete.discard(removed)
        now = asyncio.get_running_loop().time()
        started = 0
        for backend in backends:
            due = self._due.get(backend, now)
            if due <= now or (due < math.inf and self._health.health_of(backend).may_change_at_next_probe):
                self._start_probe(backend)
                started += 1
                if started % _PROBES_AT_ONCE == 0:  # a thousand together would delay all streams
                    await asyncio.sleep(_SPREAD_SECONDS)

    def _start_probe(self, backend: Backend) -> None:
        self._due[backend] = math.inf
        self._background.start_task(self._probe_backend(backend))

    async def _probe_backend(self, backend: Backend) -> None:
        path, problem = self._get_health_checks().path, ""
        failure: ProbeFailure | None = None
        try:
            status = await self._upstream.get_status(backend, path, self._get_health_checks().timeout_seconds)
            if status != 200:
                problem = f"{path} answered with status {status}"
                failure = ProbeFailure.UNAVAILABLE if status == 503 else None
        except EngineRequestError as error:
            problem, failure = str(error), _PROBE_FAILURES.get(error.failure_kind)
        try:
            success = "passed its health check"
            await self._record_probe_result(backend, problem, success, failure)
        finally:
            self._due[backend] = self._next_due_at()

    async def _record_probe_result(
        self,
        backend: Backend,
        problem: str,
        success: str,
        failure: ProbeFailure | None = None,
    ) -> None:
        """Pass the result of a probe to Health, see `Health.on_probe`, and ask a backend that has come up for facts."""
        if not self._pools[backend.role].has_backend(backend):
            return  # it was removed in the meantime
        pool = self._pool_for_comparison(backend)
        is_late = failure is ProbeFailure.LATE
        transition = self._health.on_probe(
            backend,
            not problem,
            problem or success,
            failure=failure,
            is_last_backend=is_late and pool.eligible_backends() == (backend,),
            is_serving=is_late and pool.scoreboard.running_requests(backend.slot) > 0,
        )
        if transition is not None:
            self._on_transition(transition)
        health = self._health.health_of(backend)
        # An instance on trial is asked, too, because it gets its full share of requests right after the first one.
        if problem or not health.passes_probes:
            return
        if health.engine_facts is None:
            self._models_due_from[backend] = asyncio.get_running_loop().time()
            await self._ask_facts(backend)
        elif backend in self._incomplete:
            self._incomplete.discard(backend)  # unless this question fails, too
            self._background.start_task(self._ask_facts(backend))
        elif self._is_models_question_due(backend):
            self._background.start_task(self._ask_models(backend, health.engine_facts))

    def _is_models_question_due(self, backend: Backend) -> bool:
        """Return whether to ask an engine for its models now, and set the time of the next question."""
        seconds, now = self._get_health_checks().models_interval_seconds, asyncio.get_running_loop().time()
        if not seconds or now < self._models_due_from.get(backend, now) + seconds:
            return False
        self._models_due_from[backend] = now
        return True

    def _next_due_at(self) -> float:
        jitter = random.uniform(1 - self._get_health_checks().jitter, 1 + self._get_health_checks().jitter)
        return asyncio.get_running_loop().time() + jitter * self._get_health_checks().interval_seconds

    async def _ask_facts(self, backend: Backend) -> None:
        """Ask an engine for its facts. If it does not answer, it is asked again after its next probe."""
        seconds, before = self._get_health_checks().timeout_seconds, self._health.health_of(backend).engine_facts
        version, models = await asyncio.gather(
            self._get_or_none(backend, VERSION_PATH, seconds), self._get_or_none(backend, MODELS_PATH, seconds)
        )
        is_complete = version is not None and models is not None
        if not is_complete or self._health.health_of(backend).engine_facts is not before:
            self._incomplete.add(backend)
            if before is not None:
                return
        facts = make_engine_facts(version, models)
        self._health.set_engine_facts(backend, facts)
        self._background.start_task(self._ask_setup(backend, facts))

    async def _ask_setup(self, backend: Backend, facts: EngineFacts) -> None:
        """Add the engine's options, limits, KV memory and number of ranks to its facts, as far as it reports them."""
        info = await self._get_or_none(backend, SERVER_INFO_PATH, SERVER_INFO_TIMEOUT_SECONDS)
        complete = update_setup(facts, info)
        if needs_ranks_question(complete, backend.role):
            complete = update_ranks(
                complete, await self._get_or_none(backend, METRICS_PATH, self._get_health_checks().timeout_seconds)
            )
        if needs_chat_ids_question(complete):
            complete = update_chat_ids(complete, await self._ask_for_chat_ids(backend))
        current = self._health.health_of(backend).engine_facts
        if current is facts:
            self._health.set_engine_facts(backend, complete)
        elif current is not None and current.identity.engine_setup is None:
            # Its models have changed, so it is asked again.
            self._incomplete.add(backend)

    async def _ask_models(self, backend: Backend, facts: EngineFacts) -> None:
        """Ask an engine for its models and adapters, and note changes."""
        answer = await self._get_or_none(backend, MODELS_PATH, self._get_health_checks().timeout_seconds)
        current = update_models(facts, answer)
        if current.identity != facts.identity and self._health.health_of(backend).engine_facts is facts:
            self._health.set_engine_facts(backend, current)

    async def _ask_for_chat_ids(self, backend: Backend) -> BufferedResponse | None:
        """Return the answer, or None if there is none."""
        seconds, headers = self._get_health_checks().timeout_seconds, self._engine_headers(backend)
        try:
            return await self._engine_client.post_json(backend.url, CHAT_IDS_PATH, seconds, CHAT_IDS_QUESTION, headers)
        except EngineRequestError:
            return None

    async def _get_or_none(self, backend: Backend, path: str, timeout_seconds: float) -> BufferedResponse | None:
        """Return the answer, or None if there is none."""
        try:
            return await self._engine_client.get_body(backend.url, path, timeout_seconds, self._engine_headers(backend))
        except EngineRequestError:
            return None


class PeerVerdicts:
    """Probes instances that other gateways have found unhealthy. Each worker has one.

    A verdict starts one probe, however long it stands, because the result of the own probe counts more.
    """

    def __init__(self, board: HealthBoard, roster: Roster, prober: HealthProber) -> None:
        self._health_board = board
        self._roster = roster
        self._prober = prober
        self._handled_verdicts: list[int] = []

    def probe_new_verdicts(self) -> None:
        """Probe the instances with verdicts that are new since the last call."""
        verdicts = self._health_board.peer_verdicts()
        if verdicts == self._handled_verdicts:
            return
        before, self._handled_verdicts = self._handled_verdicts or [0] * len(verdicts), verdicts
        for role in Role:
            for member in self._roster.members_of_role(role):
                slot = member.backend.slot
                if verdicts[slot] and verdicts[slot] != before[slot]:
                    self._prober.probe_suspect(member.backend)
