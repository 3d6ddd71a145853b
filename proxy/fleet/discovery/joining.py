"""Instances that an administrator adds: each becomes a member as soon as it answers, or is given up with a warning.

Which ones are waited for all workers know from the roster's waiting list, and any of them may be told to stop. Nothing
here outlives the `async with`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from proxy.common.backend import Backend
from proxy.common.background import Background, BackgroundOwner
from proxy.upstream import EngineRequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from proxy.balancer.pool import Pool
    from proxy.balancer.roster import Roster
    from proxy.common.backend import Role
    from proxy.settings import Joining
    from proxy.upstream import EngineClient

logger = logging.getLogger("proxy.discovery.joining")

# Answers once the model is loaded, so it also tells when an instance may join, as in vLLM-Ascend's example proxy.
_MODELS_PATH: Final = "/v1/models"
_TIMEOUT_SECONDS: Final = 5.0


class Joiner(BackgroundOwner):
    """One worker's. `async with` it."""

    def __init__(
        self,
        pools: Mapping[Role, Pool],
        roster: Roster,
        settings: Joining,
        client: EngineClient,
        engine_headers: Callable[[Backend], Mapping[str, str]],
        on_joined: Callable[[Backend, str], Awaitable[None]],
    ) -> None:
        """`on_joined` is given each new member, and what it did to become one."""
        self._pools = pools
        self._roster = roster
        self._settings = settings
        self._client = client
        self._engine_headers = engine_headers
        self._on_joined = on_joined
        self._background = Background(logger, "waiting for an instance")
        self._waits: dict[Backend, asyncio.Task[None]] = {}

    def configure(self, settings: Joining) -> None:
        """Take changed settings for the questions from now on."""
        self._settings = settings

    def join(self, candidate: Backend) -> bool:
        """Add a backend as soon as it answers, or give it up with a warning. False when it is there already, and then
        takes what the candidate says of itself (see `Roster.add`), or when it is joining already, as it was told first.

        One that is trusted is asked with the engine key, and has it later, too. Raises ValueError when the endpoint
        has, or is about to have, another role.
        """
        self._check_role(candidate)
        if self._is_member(candidate):
            # It may be somebody else's, who will want it no more.
            self._roster.add(candidate)
            return False
        ticket = self._roster.joining.add(candidate, self._longest_wait_seconds)
        if ticket is None:
            return False
        self._waits[candidate] = self._background.start(self._join(candidate, ticket))
        return True

    def is_new(self, candidate: Backend) -> bool:
        """What `join` would return, and raise."""
        self._check_role(candidate)
        return not self._is_member(candidate) and candidate not in self._roster.joining.backends()

    def remove(self, role: Role, host: str, port: int, leaves_at: float | None = None) -> bool:
        """Let a backend drain, or stop waiting for it. False when it is not there and not joining. `leaves_at`: when it
        is to be evacuated, see Roster.
        """
        backend = Backend(role, host, port)
        was_joining = self._roster.joining.remove(backend)
        wait = self._waits.pop(backend, None)  # unless another worker waits for it, which will find out
        if wait is not None:
            wait.cancel()
        return self._roster.remove(role, host, port, leaves_at) or was_joining

    def joining(self, role: Role) -> list[Backend]:
        """Instances that have been added, to whichever worker, and did not answer yet."""
        return [backend for backend in self._roster.joining.backends() if backend.role is role]

    def _check_role(self, candidate: Backend) -> None:
        """Raise ValueError when something at the same place has, or is about to have, another role."""
        members = (backend for pool in self._pools.values() for backend in pool.backends())
        for other in (*self._roster.joining.backends(), *members):
            if other.place == candidate.place and other.role is not candidate.role:
                raise ValueError(f"{other.name} is already a {other.role} instance")

    def _is_member(self, candidate: Backend) -> bool:
        """Whether it is there, and does not drain."""
        members = {member.backend: member for member in self._roster.members(candidate.role)}
        return candidate in members and not members[candidate].is_draining

    @property
    def _longest_wait_seconds(self) -> float:
        settings = self._settings
        return settings.max_attempts * (settings.interval_seconds + 2 * _TIMEOUT_SECONDS)

    async def _join(self, candidate: Backend, ticket: int) -> None:
        joining = self._roster.joining
        is_wanted = False
        try:
            problem = await self._wait_until_it_answers(candidate, ticket)
            is_wanted = joining.remove(candidate, ticket)
            if is_wanted and not problem:
                self._roster.add(candidate)
        except ValueError as error:  # there is no room, or another worker gave it the other role
            problem = str(error)
        finally:
            joining.remove(candidate, ticket)
            if self._waits.get(candidate) is asyncio.current_task():  # not removed, and perhaps added again, since
                del self._waits[candidate]
        if not is_wanted:
            return  # another worker was told to remove it
        if problem:
            logger.warning("%s instance %s is not added: %s", candidate.role, candidate.name, problem)
        else:
            logger.info("%s instance %s is added", candidate.role, candidate.name)
            await self._on_joined(candidate, f"answered {_MODELS_PATH}")

    async def _wait_until_it_answers(self, candidate: Backend, ticket: int) -> str:
        """Empty once it does, otherwise what was wrong the last time; at once when it is not waited for any more."""
        problem = ""
        for attempt in range(self._settings.max_attempts):
            if attempt:
                await asyncio.sleep(self._settings.interval_seconds)
            if not self._roster.joining.has(candidate, ticket):
                break
            problem = await self._ask(candidate)
            if not problem:
                break
        return problem

    async def _ask(self, candidate: Backend) -> str:
        """Empty when it answers, otherwise what was wrong."""
        headers = self._engine_headers(candidate)
        try:
            status = await self._client.get_status(candidate.url, _MODELS_PATH, _TIMEOUT_SECONDS, headers)
        except EngineRequestError as error:
            return str(error)
        return "" if status == 200 else f"{_MODELS_PATH} answered with status {status}"
