"""Asks every backend on a timer whether it is well, and lets instances that were added at run time in once they answer.

What a probe says goes to Health, which decides; each change of state is one log line. A backend that came up is asked
once what it is, and how much it works on at a time. Each round also drops the backends that have drained. Nothing here
outlives the `async with`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import aiohttp
import orjson

from proxy import SERVER, logs
from proxy.backend import Backend, Role
from proxy.background import Background
from proxy.balancer.condition import HealthState
from proxy.balancer.engine_facts import (
    UNKNOWN_VERSION,
    EngineFacts,
    Identity,
    parse_engine_version,
    parse_kind,
    parse_max_model_len,
    parse_max_num_seqs,
    parse_models,
    parse_setup,
)
from proxy.upstream import connect_problem, read_bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from proxy.balancer.health import Health, Transition
    from proxy.balancer.pool import Pool
    from proxy.balancer.roster import Roster
    from proxy.settings import HealthChecks, Joining

logger = logging.getLogger(__name__)

# Answers once the model is loaded, so it also tells when an instance may join, as in vLLM-Ascend's example proxy.
_MODELS_PATH: Final = "/v1/models"
_JOINING_TIMEOUT_SECONDS = 5.0
# Somebody's answer waits for it.
_GONE_TIMEOUT_SECONDS: Final = 0.5

# Of SGLang and, with VLLM_SERVER_DEV_MODE=1, of vLLM, which otherwise puts its configuration into one text. vLLM looks
# for compilers, drivers and packages when it is asked for the first time, which takes seconds.
_SERVER_INFO_PATH: Final = "/server_info?config_format=json"
_SERVER_INFO_TIMEOUT_SECONDS: Final = 30.0
_MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024


def log_transition(transition: Transition, *, is_news: bool = True) -> None:
    """One line for a backend that changed its state, whoever noticed it. `is_news` False: another worker has told."""
    is_bad = transition.new in (HealthState.DOWN, HealthState.EJECTED)
    level = logging.WARNING if is_bad else logging.INFO
    if not is_news:
        level = logging.DEBUG
    backend = transition.backend
    what = (backend.role, backend.name, transition.new, transition.reason)
    logger.log(level, "%s instance %s is %s: %s", *what, extra=logs.ALWAYS)


class _Said(NamedTuple):
    """An engine's answer to a small question."""

    status: int = 0
    """0: there was none."""
    server: str | None = None
    """Of its headers."""
    json: Any = None
    """None: there is none."""


class _NoConnection(str):
    """What was wrong: there was no connection."""

    __slots__ = ()


class Prober:
    """One worker's view of which backends are well. `async with` it."""

    def __init__(
        self,
        pools: Mapping[Role, Pool],
        roster: Roster,
        health: Health,
        checks: HealthChecks,
        joining: Joining,
        session: aiohttp.ClientSession,
        engine_headers: Callable[[Backend], Mapping[str, str]],
        on_transition: Callable[[Transition], None] = log_transition,
        on_removed: Callable[[Backend], None] = lambda backend: None,
    ) -> None:
        self._pools = pools
        self._roster = roster
        self._health = health
        self._checks = checks
        self._joining_settings = joining
        self._session = session
        self._engine_headers = engine_headers
        self._on_transition = on_transition
        self._on_removed = on_removed
        self._background = Background(logger, "a health check")
        self._due: dict[Backend, float] = {}  # loop time of the next probe, infinity while one is under way
        self._joining: dict[Backend, asyncio.Task[None]] = {}
        self._last_looks: dict[Backend, asyncio.Task[bool]] = {}

    async def __aenter__(self) -> Self:
        await self._background.__aenter__()
        self._background.start(self._keep_probing())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._background.__aexit__(kind, error, trace)

    def configure(self, checks: HealthChecks, joining: Joining) -> None:
        """Take changed settings for the probes from now on."""
        self._checks = checks
        self._joining_settings = joining

    # Membership

    def join(
        self, role: Role, host: str, port: int, *, trusted: bool = False, bootstrap_port: int | None = None
    ) -> bool:
        """Add a backend as soon as it answers, or give it up with a warning. False when it is there or joining already.

        `trusted`: it may have the engine key, now and later. Raises ValueError when the endpoint has, or is about to
        have, the other role.
        """
        candidate = Backend(role, host, port, trusted=trusted, bootstrap_port=bootstrap_port)
        waiting = self._roster.waiting
        for other in (*waiting.backends(), *(backend for pool in self._pools.values() for backend in pool.backends())):
            if other.place == candidate.place and other.role is not role:
                raise ValueError(f"{other.name} is already a {other.role} instance")
        members = {member.backend: member for member in self._roster.members(role)}
        if candidate in members and not members[candidate].draining:
            self._roster.add(role, host, port)  # it may be somebody else's, who will want it no more
            return False
        ticket = waiting.enter(candidate, self._longest_wait_seconds)
        if ticket is None:
            return False
        self._joining[candidate] = self._background.start(self._join(candidate, ticket))
        return True

    def remove(self, role: Role, host: str, port: int, leaves_at: float | None = None) -> bool:
        """Let a backend drain, or stop waiting for it. False when it is not there and not joining. `leaves_at`: when it
        is to be evacuated, see Roster.
        """
        backend = Backend(role, host, port)
        was_joining = self._roster.waiting.leave(backend)
        joining = self._joining.pop(backend, None)  # unless another worker waits for it, which will find out
        if joining is not None:
            joining.cancel()
        return self._roster.remove(role, host, port, leaves_at) or was_joining

    def drop_drained(self) -> None:
        """Forget the removed backends whose last request has ended."""
        for backend in self._roster.finalize():
            logger.info("%s instance %s is removed", backend.role, backend.name)
            self._on_removed(backend)

    def joining(self, role: Role) -> list[Backend]:
        """Instances that have been added, to whichever worker, and did not answer yet."""
        return [backend for backend in self._roster.waiting.backends() if backend.role is role]

    @property
    def _longest_wait_seconds(self) -> float:
        """For an instance that joins."""
        joining = self._joining_settings
        return joining.max_attempts * (joining.interval_seconds + 2 * _JOINING_TIMEOUT_SECONDS)

    async def _join(self, candidate: Backend, ticket: int) -> None:
        waiting = self._roster.waiting
        is_wanted = False
        try:
            problem = await self._wait_until_it_answers(candidate, ticket)
            is_wanted = waiting.leave(candidate, ticket)
            if is_wanted and not problem:
                self._roster.add(
                    candidate.role,
                    candidate.host,
                    candidate.port,
                    trusted=candidate.trusted,
                    bootstrap_port=candidate.bootstrap_port,
                )
        except ValueError as error:  # there is no room, or another worker gave it the other role
            problem = str(error)
        finally:
            waiting.leave(candidate, ticket)
            if self._joining.get(candidate) is asyncio.current_task():  # not removed, and perhaps added again, since
                del self._joining[candidate]
        if not is_wanted:
            return  # another worker was told to remove it
        if problem:
            logger.warning("%s instance %s is not added: %s", candidate.role, candidate.name, problem)
        else:
            logger.info("%s instance %s is added", candidate.role, candidate.name)
            self._due[candidate] = self._next_due()  # it has just been asked
            await self._hear(candidate, "", f"answered {_MODELS_PATH}")

    async def _wait_until_it_answers(self, candidate: Backend, ticket: int) -> str:
        """Empty once it does, otherwise what was wrong the last time; at once when it is not waited for any more."""
        problem = ""
        for attempt in range(self._joining_settings.max_attempts):
            if attempt:
                await asyncio.sleep(self._joining_settings.interval_seconds)
            if not self._roster.waiting.holds(candidate, ticket):
                break
            problem = await self._ask(candidate, _MODELS_PATH, _JOINING_TIMEOUT_SECONDS)
            if not problem:
                break
        return problem

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
        timeout = aiohttp.ClientTimeout(total=_GONE_TIMEOUT_SECONDS)
        headers = {**self._engine_headers(backend), "Connection": "close"}  # on a connection of its own
        url = backend.url + self._checks.path
        try:
            async with self._session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as answer:
                return answer.status != 200
        except TimeoutError:
            return False
        except (aiohttp.ClientError, ValueError):
            return True

    # Probing

    async def _keep_probing(self) -> None:
        while True:
            self.drop_drained()
            self._start_due_probes()
            await asyncio.sleep(min(self._checks.changing_interval_seconds, self._checks.interval_seconds))

    def _start_due_probes(self) -> None:
        backends = {backend for pool in self._pools.values() for backend in pool.backends()}
        for gone in self._due.keys() - backends:
            del self._due[gone]
        now = asyncio.get_running_loop().time()
        for backend in backends:
            due = self._due.get(backend, now)
            if due <= now or (due < math.inf and self._health.is_changing(backend)):
                self._due[backend] = math.inf
                self._background.start(self._probe(backend))

    async def _probe(self, backend: Backend) -> None:
        try:
            problem = await self._ask(backend, self._checks.path, self._checks.timeout_seconds)
            await self._hear(backend, problem, "passed its health check")
        finally:
            self._due[backend] = self._next_due()

    async def _hear(self, backend: Backend, problem: str, success: str) -> None:
        """Tell Health how a backend has answered, and ask one that came up what it is."""
        if backend not in self._pools[backend.role].backends():
            return  # it left meanwhile, and Health is not to hear of it again
        is_refused = isinstance(problem, _NoConnection)
        transition = self._health.on_probe(backend, not problem, problem or success, is_refused=is_refused)
        if transition is not None:
            self._on_transition(transition)
        if not problem and self._health.is_confirmed(backend) and self._health.facts(backend) is None:
            facts = await self._ask_facts(backend)
            self._health.note_facts(backend, facts)
            self._background.start(self._ask_setup(backend, facts))

    def _next_due(self) -> float:
        jitter = random.uniform(1 - self._checks.jitter, 1 + self._checks.jitter)
        return asyncio.get_running_loop().time() + jitter * self._checks.interval_seconds

    async def _ask(self, backend: Backend, path: str, timeout_seconds: float) -> str:
        """GET a path: empty when the answer is 200, otherwise what was wrong."""
        headers = self._engine_headers(backend)
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        request = self._session.get(backend.url + path, headers=headers, timeout=timeout, allow_redirects=False)
        try:
            async with request as answer:
                return "" if answer.status == 200 else f"{path} answered with status {answer.status}"
        except TimeoutError:
            return f"{path} did not answer within {timeout_seconds:g} s"
        except aiohttp.ClientConnectorError as error:
            return _NoConnection(f"cannot connect ({connect_problem(error.os_error)})")
        except (aiohttp.ClientError, ValueError) as error:  # ValueError: a name that can be no host's
            return f"{path} failed ({type(error).__name__})"

    async def _ask_facts(self, backend: Backend) -> EngineFacts:
        """What vLLM tells at `/version`, `{"version": "0.23.0"}`, and of its models (ModelCard.max_model_len)."""
        timeout_seconds = self._checks.timeout_seconds
        version, models = await asyncio.gather(
            self._get_json(backend, "/version", timeout_seconds), self._get_json(backend, _MODELS_PATH, timeout_seconds)
        )
        identity = Identity(
            kind=parse_kind(models.json),
            models=parse_models(models.json),
            is_gateway=version.server == SERVER,
            refused_key=models.status in (401, 403),
        )
        engine_version = UNKNOWN_VERSION if identity.is_gateway else parse_engine_version(version.json)
        return EngineFacts(engine_version, parse_max_model_len(models.json), identity=identity)

    async def _ask_setup(self, backend: Backend, facts: EngineFacts) -> None:
        """Add to what it said how it was started, and how many requests it works on at a time, as far as it tells."""
        info = (await self._get_json(backend, _SERVER_INFO_PATH, _SERVER_INFO_TIMEOUT_SECONDS)).json
        if self._health.facts(backend) is facts:  # not if it went down meanwhile
            identity = replace(facts.identity, setup=parse_setup(info))
            told = replace(facts, max_num_seqs=parse_max_num_seqs(info), identity=identity)
            self._health.note_facts(backend, told)

    async def _get_json(self, backend: Backend, path: str, timeout_seconds: float) -> _Said:
        """GET a path."""
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        headers = self._engine_headers(backend)
        try:
            request = self._session.get(backend.url + path, headers=headers, timeout=timeout, allow_redirects=False)
            async with request as answer:
                body = await read_bounded(answer, _MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return _Said()
        with suppress(ValueError):
            return _Said(answer.status, answer.headers.get("Server"), orjson.loads(body))
        return _Said(answer.status, answer.headers.get("Server"))
