"""Instances that an administrator adds: each becomes a member as soon as it answers, or is given up with a warning.

The roster has the list of awaited instances, so any worker can stop the waiting. All tasks end with the `async with`
block.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from proxy.common.backend import Backend, Role
from proxy.common.background import BackgroundOwner, BackgroundTasks
from proxy.upstream import EngineClient, EngineRequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from proxy.balancer.pool import Pool
    from proxy.balancer.roster import Roster
    from proxy.settings import Joining

logger = logging.getLogger("proxy.discovery.joining")

# Engines answer here once the model is loaded, so that is when an instance may join, as in vLLM-Ascend's example proxy.
_MODELS_PATH: Final = "/v1/models"
_TIMEOUT_SECONDS: Final = 5.0


class InstanceJoiner(BackgroundOwner):
    """Waits for added instances inside `async with`. Each worker has one."""

    def __init__(
        self,
        pools: Mapping[Role, Pool],
        roster: Roster,
        settings: Callable[[], Joining],
        client: EngineClient,
        engine_headers: Callable[[Backend], Mapping[str, str]],
        on_joined: Callable[[Backend, str], Awaitable[None]],
    ) -> None:
        """Keep the parts.

        Args:
            pools: Pools by role.
            roster: Takes the new members.
            settings: Returns the current number of attempts and the time between them.
            client: Connections for questions.
            engine_headers: Returns the headers that an engine requires.
            on_joined: Called with each new member, and the reason.
        """
        self._pools = pools
        self._roster = roster
        self._settings = settings
        self._engine_client = client
        self._engine_headers = engine_headers
        self._on_joined = on_joined
        self._background = BackgroundTasks(logger, "waiting for an instance")
        self._wait_tasks: dict[Backend, asyncio.Task[None]] = {}

    def join_when_ready(self, candidate: Backend) -> bool:
        """Add a backend as soon as it answers, or give it up with a warning.

        Returns False if it is a member, whose facts are then updated (see `Roster.add_for_administrator`), or if it is
        awaited already. The gateway sends its engine key to trusted backends. Raises ValueError if the endpoint has
        another role, or is awaited in another role.
        """
        self._check_role(candidate)
        if self._is_active_member(candidate):
            # Another origin may have named it, and may remove it later.
            self._roster.add_for_administrator(candidate)
            return False
        ticket = self._roster.joining_list.add_instance(candidate, self._longest_wait_seconds)
        if ticket is None:
            return False
        self._wait_tasks[candidate] = self._background.start_task(self._wait_and_add(candidate, ticket))
        return True

    def is_new_instance(self, candidate: Backend) -> bool:
        """Return or raise what `join_when_ready` would, and change nothing."""
        self._check_role(candidate)
        return not self._is_active_member(candidate) and candidate not in self._roster.joining_list.joining_backends()

    def remove_instance(self, role: Role, host: str, port: int, leaves_at: float | None = None) -> bool:
        """Drain a backend, or stop waiting for it. Returns False if it is neither a member nor awaited.

        `leaves_at`: time of its evacuation; see Roster.
        """
        backend = Backend(role, host, port)
        was_joining = self._roster.joining_list.remove_instance(backend)
        wait = self._wait_tasks.pop(backend, None)  # another worker that waits for it notices the change
        if wait is not None:
            wait.cancel()
        return self._roster.remove_backend(role, host, port, leaves_at) or was_joining

    def joining_instances(self, role: Role) -> list[Backend]:
        """Return the added instances of a role, of all workers, that have not answered yet."""
        return [backend for backend in self._roster.joining_list.joining_backends() if backend.role is role]

    def _check_role(self, candidate: Backend) -> None:
        """Raise ValueError if an instance at the same address has another role, or is awaited in another role."""
        members = (backend for pool in self._pools.values() for backend in pool.all_backends())
        for other in (*self._roster.joining_list.joining_backends(), *members):
            if other.place == candidate.place and other.role is not candidate.role:
                raise ValueError(f"{other.name} is already a {other.role} instance")

    def _is_active_member(self, candidate: Backend) -> bool:
        """Return whether it is a member that does not drain."""
        members = {member.backend: member for member in self._roster.members_of_role(candidate.role)}
        return candidate in members and not members[candidate].is_draining

    @property
    def _longest_wait_seconds(self) -> float:
        settings = self._settings()
        return settings.max_attempts * (settings.interval_seconds + 2 * _TIMEOUT_SECONDS)

    async def _wait_and_add(self, candidate: Backend, ticket: int) -> None:
        joining = self._roster.joining_list
        is_wanted = False
        try:
            problem = await self._wait_for_answer(candidate, ticket)
            is_wanted = joining.remove_instance(candidate, ticket)
            if is_wanted and not problem:
                self._roster.add_for_administrator(candidate)
        except ValueError as error:  # the roster is full, or another worker has added it in another role
            problem = str(error)
        finally:
            joining.remove_instance(candidate, ticket)
            # Otherwise it was removed, and perhaps added again.
            if self._wait_tasks.get(candidate) is asyncio.current_task():
                del self._wait_tasks[candidate]
        if not is_wanted:
            return  # an administrator has removed it through another worker
        if problem:
            logger.warning("joining: %s instance %s is not added: %s", candidate.role, candidate.name, problem)
        else:
            logger.info("joining: %s instance %s is added", candidate.role, candidate.name)
            await self._on_joined(candidate, f"answered {_MODELS_PATH}")

    async def _wait_for_answer(self, candidate: Backend, ticket: int) -> str:
        """Wait until the instance answers; return the last problem, or an empty string.

        Returns at once if the instance is no longer awaited.
        """
        problem = ""
        for attempt in range(self._settings().max_attempts):
            if attempt:
                await asyncio.sleep(self._settings().interval_seconds)
            if not self._roster.joining_list.has_instance(candidate, ticket):
                break
            problem = await self._ask_instance(candidate)
            if not problem:
                break
        return problem

    async def _ask_instance(self, candidate: Backend) -> str:
        """Ask the instance once; return the problem, or an empty string."""
        headers = self._engine_headers(candidate)
        try:
            status = await self._engine_client.get_status(candidate.url, _MODELS_PATH, _TIMEOUT_SECONDS, headers)
        except EngineRequestError as error:
            return str(error)
        return "" if status == 200 else f"{_MODELS_PATH} answered with status {status}"
