"""Moves elastic instances between prefill and decode.

The roster has the state of a move. So another worker continues it if this one dies, and so does the process that takes
over. A move has these steps:

1. `Roster.begin_move`: the instance gets no new requests.
2. Its requests end, or Evacuation lets other instances continue them. KV cache that it keeps is fetched, released or
   expires.
3. The engine is asked to exchange its role, if its software requires that. From then on its role is unknown until it
   reports it.
4. `Roster.finish_move` makes the instance a new member of the other role, which begins with slow start. Or
   `Roster.abandon_move` gives it its old role back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import orjson

from proxy.balancer.engines import EngineFacts
from proxy.balancer.roster import RoleMove, Roster, RosterMember
from proxy.balancer.split import FleetSample, MoveAdvice, MovePlanner, take_fleet_sample
from proxy.common.backend import Backend, Role
from proxy.common.background import BackgroundOwner, BackgroundTasks
from proxy.fleet.discovery.facts import SERVER_INFO_PATH, SERVER_INFO_TIMEOUT_SECONDS, update_setup
from proxy.upstream import BufferedResponse, EngineClient, EngineRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.balancer.health import Health
    from proxy.balancer.pool import Pools
    from proxy.balancer.shared.scoreboard import Scoreboard
    from proxy.observe.metrics import Metrics
    from proxy.settings import Settings
    from proxy.settings.fleet import Elastic

logger = logging.getLogger("proxy.roles")

# The engine builds its buffers and graphs for the new role meanwhile.
_SWITCH_SECONDS: Final = 180.0
# Time between two questions to an engine for its role.
_PAUSE_SECONDS: Final = 1.0
# Longest wait for the release of KV that an instance without requests keeps.
_RELEASE_SECONDS: Final = 20.0
# SGLang refuses to exchange the role of an engine with requests in these words (disaggregation/role_switch.py).
_NOT_IDLE: Final = "not idle"
# Statuses of engines that do not serve the exchange: without the route, or with another key for administrators.
_UNSERVED: Final = (401, 403, 404, 405)
# Advice by a part of the reason for which SGLang refuses.
_ADVICE: Final = {
    "memory_gb is required": "; no decoder reports its own in /server_info",
    "graph headroom": "; start it with a lower --mem-fraction-static",
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RoleMoverParts:
    """The parts of one worker that a RoleMover uses."""

    roster: Roster
    scoreboard: Scoreboard
    health: Health
    engine_client: EngineClient
    engine_headers: Callable[[Backend], Mapping[str, str]]
    """Returns the headers that an engine requires."""
    get_settings: Callable[[], Settings]
    """Returns the present settings."""
    metrics: Metrics
    on_backend_moved: Callable[[Backend, Backend], None]
    """Called with each instance that has moved, as it was and as it is now."""


class RoleMover(BackgroundOwner):
    """Continues all moves of one gateway, inside `async with`. A timer of one worker calls `continue_moves`."""

    def __init__(self, parts: RoleMoverParts, clock: Callable[[], float] = time.monotonic) -> None:
        """Keep the parts. `clock`: the monotonic clock that all workers share."""
        self._parts = parts
        self._roster = parts.roster
        self._clock = clock
        self._idle_since: dict[Backend, float] = {}
        """Moving instances without requests, with the time of the first look at which they had none."""
        self._backends_asked_to_switch: set[Backend] = set()
        """Instances whose engines are being asked."""
        self._backends_of_unknown_role: set[Backend] = set()
        """Instances with an unknown role that the log has announced."""
        self._compared_facts: dict[Backend, EngineFacts] = {}
        """Facts of engines whose role was compared with that of the instance."""
        self._pins_before: dict[int, int] = {}
        """How many KV caches were ever pinned in a slot when an instance moved into it."""
        self._background = BackgroundTasks(logger, "an exchange of roles")

    def continue_moves(self) -> None:
        """Continue the moves. Cheap if there are no elastic instances."""
        for member in self._roster.elastic_members():
            backend, move = member.backend, member.pending_move
            if backend in self._backends_asked_to_switch:
                continue
            if move is None:
                self._compare_role(member, self._switch_path)
            elif self._is_instance_idle(backend, move):
                self._leave_old_role(backend, move)

    def _compare_role(self, member: RosterMember, path: str | None) -> None:
        """Ask an engine for its role if it reports the other one, as after its restart."""
        backend = member.backend
        facts = self._parts.health.health_of(backend).engine_facts
        setup = None if facts is None else facts.identity.engine_setup
        before = self._compared_facts.get(backend)
        if facts is None or setup is None or before is facts or path is None:
            return
        self._compared_facts[backend] = facts
        if before is not None and member.is_move_refused:
            self._roster.forget_refusal(backend)  # its options may be others now
        if setup.disaggregation_mode in (Role.PREFILL, Role.DECODE) and setup.disaggregation_mode != backend.role:
            self._backends_asked_to_switch.add(backend)
            self._background.start_task(self._confirm_role(backend, path))

    async def _confirm_role(self, backend: Backend, path: str) -> None:
        """Begin a move if an engine really has the other role. Its report may be that of its start."""
        try:
            role = await self._ask_role(backend, backend.role, path)
            if role is None:
                await asyncio.sleep(_PAUSE_SECONDS)
                self._compared_facts.pop(backend, None)
            elif role is not backend.role:
                now = self._clock()
                logger.warning("roles: engine has the other role: %s instance %s", backend.role, backend.name)
                self._roster.begin_move(
                    backend, RoleMove(role, now, "its engine reports it", is_engine_switching=True), now
                )
        finally:
            self._backends_asked_to_switch.discard(backend)

    def _is_instance_idle(self, backend: Backend, move: RoleMove) -> bool:
        """Return whether the instance has no requests now and at the last look. Gives a late move up.

        A worker may have chosen the instance just before the move began, and charge it a moment later. Pinned KV may
        be released for a while. Pins of aborted prefills may be wrong, and end only with their lease.
        """
        now = self._clock()
        if self._parts.scoreboard.open_leases(backend.slot):
            self._idle_since.pop(backend, None)
            if now >= move.must_end_at and not move.is_engine_switching:
                self._keep_old_role(
                    backend, f"its requests have not ended within {self._elastic_options.drain_seconds:g} s"
                )
            return False
        since = self._idle_since.get(backend)
        if since is None:
            self._idle_since[backend] = now
            return False
        return not self._may_release_pins(backend) or now >= min(since + _RELEASE_SECONDS, move.must_end_at)

    def _may_release_pins(self, backend: Backend) -> bool:
        """Return whether pins of its present role may be released soon. Older ones end with their lease."""
        board, slot = self._parts.scoreboard, backend.slot
        return board.pinned_kv(slot).cache_count > 0 and board.count_pinned_ever(slot) > self._pins_before.get(slot, 0)

    def _leave_old_role(self, backend: Backend, move: RoleMove) -> None:
        if self._switch_path is None:
            self._finish_move(backend, move)
        else:
            self._backends_asked_to_switch.add(backend)
            self._background.start_task(self._switch_role(backend, move, self._switch_path))

    def _finish_move(self, backend: Backend, move: RoleMove) -> None:
        try:
            moved = self._roster.finish_move(backend)
        except ValueError as error:
            self._keep_old_role(backend, str(error))
            return
        self._forget_backend(backend)
        if moved is not None:
            self._pins_before[moved.slot] = self._parts.scoreboard.count_pinned_ever(moved.slot)
            self._parts.metrics.role_moves_total.labels(moved.role.value, "moved").inc()
            logger.info("roles: instance has moved from %s to %s: %s", backend.role, moved.role, backend.name)
            self._parts.on_backend_moved(backend, moved)

    def _keep_old_role(self, backend: Backend, problem: str, *, is_refused: bool = False) -> None:
        """End a move that has failed. The instance keeps its role. `is_refused`: see RosterMember."""
        move = next((each.pending_move for each in self._roster.elastic_members() if each.backend == backend), None)
        self._forget_backend(backend)
        if is_refused:
            # Other facts show a restart, even if these have not been compared yet.
            self._compared_facts[backend] = self._parts.health.health_of(backend).engine_facts or EngineFacts()
        if move is not None and self._roster.abandon_move(backend, problem, is_refused=is_refused):
            self._parts.metrics.role_moves_total.labels(move.new_role.value, "failed").inc()
            logger.warning(
                "roles: move failed, and %s instance %s keeps its role: %s", *(backend.role, backend.name, problem)
            )

    def _forget_backend(self, backend: Backend) -> None:
        self._idle_since.pop(backend, None)
        self._backends_of_unknown_role.discard(backend)

    # Questions to the engine

    async def _switch_role(self, backend: Backend, move: RoleMove, path: str) -> None:
        """Let the engine exchange its role, or ask for its role if it was asked before. Ends the move if that shows."""
        try:
            if not move.is_engine_switching:
                if not self._roster.mark_switching(backend, True):
                    return  # the move was cancelled
                question = {"new_role": move.new_role, **self._cuda_graphs_of_others(backend, move.new_role)}
                answer = await self._post_question(backend, path, question, _SWITCH_SECONDS)
                role, problem = _role_after_exchange(answer, backend.role), _describe_refusal(answer, path)
                if _NOT_IDLE in problem and self._clock() < move.must_end_at:
                    # Another gateway still has requests there.
                    self._roster.mark_switching(backend, False)
                    return
                if role is not None:
                    self._end_move(backend, move, role, problem)
                    return
            role = await self._ask_role(backend, move.new_role, path)
            if role is not None:
                self._end_move(backend, move, role, "")
                return
            if backend not in self._backends_of_unknown_role:
                self._backends_of_unknown_role.add(backend)
                logger.warning(
                    "roles: role unknown, so the instance gets no requests until its engine reports it: %s",
                    backend.name,
                )
            await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            self._backends_asked_to_switch.discard(backend)

    def _end_move(self, backend: Backend, move: RoleMove, role: Role, problem: str) -> None:
        """End a move, after which the engine has a role. `problem`: why the engine refused; empty if it did not."""
        if role is move.new_role:
            self._finish_move(backend, move)
        elif problem:
            self._keep_old_role(backend, f"its engine refuses: {problem}", is_refused=_NOT_IDLE not in problem)
        else:
            self._keep_old_role(backend, f"its engine still has the role {role}")

    def _cuda_graphs_of_others(self, backend: Backend, new_role: Role) -> Mapping[str, object]:
        """Return the CUDA graphs that other decoders report.

        SGLang 0.5.23 captures them when a prefiller becomes a decoder for the first time, and refuses without the
        memory that they need.
        """
        if new_role is not Role.DECODE:
            return {}
        facts = (
            self._parts.health.health_of(each.backend).engine_facts
            for each in self._roster.members_of_role(Role.DECODE)
            if each.backend.models == backend.models
        )
        setups = [
            each.identity.engine_setup for each in facts if each is not None and each.identity.engine_setup is not None
        ]
        known = [(each.decode_graph_gb, each) for each in setups if each.decode_graph_gb is not None]
        if not known:
            return {}
        memory, setup = max(known, key=lambda each: each[0])
        sizes = list(setup.decode_graph_sizes)
        return {"decode_cuda_graph_memory_gb": memory, **({"decode_cuda_graph_bs": sizes} if sizes else {})}

    async def _post_question(
        self, backend: Backend, path: str, body: Mapping[str, object], seconds: float
    ) -> BufferedResponse | None:
        """Send a question about the role to an engine, and return its answer, or None."""
        headers = self._parts.engine_headers(backend)
        try:
            return await self._parts.engine_client.post_json(backend.url, path, seconds, orjson.dumps(body), headers)
        except EngineRequestError:
            return None

    async def _ask_role(self, backend: Backend, wanted_role: Role, path: str) -> Role | None:
        """Return the role that an engine has now, or None.

        The answer to an exchange has it. SGLang's `/server_info` may have the role of the start. `prepare_only` changes
        nothing. SGLang before 0.5.23 ignores it and takes the role `wanted_role` if it is idle.
        """
        question = {"new_role": wanted_role, "prepare_only": True}
        answer = await self._post_question(backend, path, question, SERVER_INFO_TIMEOUT_SECONDS)
        if answer is None or answer.status not in _UNSERVED:
            return _role_after_exchange(answer, None)
        headers = self._parts.engine_headers(backend)
        try:
            info = await self._parts.engine_client.get_body(
                backend.url, SERVER_INFO_PATH, SERVER_INFO_TIMEOUT_SECONDS, headers
            )
        except EngineRequestError:
            return None
        setup = update_setup(EngineFacts(), info).identity.engine_setup
        return None if setup is None else _role_named(setup.disaggregation_mode)

    @property
    def _switch_path(self) -> str | None:
        return self._parts.get_settings().connector_traits.role_switch_path

    @property
    def _elastic_options(self) -> Elastic:
        return self._parts.get_settings().elastic


def _role_after_exchange(engine_answer: BufferedResponse | None, old_role: Role | None) -> Role | None:
    """Return the role of an engine after its answer about an exchange, or None if that is not known.

    `old_role`: its role if it does not serve the question. None: not known.
    """
    if engine_answer is None:
        return None
    if engine_answer.status in _UNSERVED:
        return old_role
    answer = engine_answer.parsed_json_or_none
    if not isinstance(answer, dict):
        return None
    if engine_answer.status == 200 and answer.get("success") is True:
        has_exchanged = answer.get("message") == "ok"
        return _role_named(answer.get("new_role" if has_exchanged else "old_role"))
    # SGLang before 0.5.23 does not report whether the old role is intact.
    is_intact = answer.get("safe_to_restore") is True or _NOT_IDLE in str(answer.get("message"))
    return _role_named(answer.get("old_role")) if is_intact else None


def _describe_refusal(engine_answer: BufferedResponse | None, path: str) -> str:
    """Return why an engine refuses to exchange its role, with advice. Empty: it did not answer, or does not refuse."""
    if engine_answer is None or engine_answer.status == 200:
        return ""
    answer = engine_answer.parsed_json_or_none
    message = answer.get("message") if isinstance(answer, dict) else None
    if not isinstance(message, str) or not message:
        return f"{path} answered with status {engine_answer.status}"
    advice = next((advice for words, advice in _ADVICE.items() if words in message), "")
    return f"{message}{advice}"


def _role_named(role_name: object) -> Role | None:
    return next((role for role in (Role.PREFILL, Role.DECODE) if role == role_name), None)


# The controller.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RoleControllerParts:
    """The parts of one worker that a RoleController uses."""

    roster: Roster
    scoreboard: Scoreboard
    pools: Pools
    count_queued: Callable[[], int]
    """Returns the number of queued requests of all workers."""
    get_settings: Callable[[], Settings]
    """Returns the present settings."""
    metrics: Metrics
    has_several_models: Callable[[], bool]
    """Returns whether instances serve different models."""


class RoleController:
    """Decides which elastic instances move. A timer of one worker calls `measure_and_decide`.

    Of several gateways that share their loads, the oldest one decides, and the others follow. Without the store none
    decides.
    """

    def __init__(self, parts: RoleControllerParts, clock: Callable[[], float] = time.monotonic) -> None:
        """Keep the parts. `clock`: the monotonic clock that all workers share."""
        self._parts = parts
        self._roster = parts.roster
        self._clock = clock
        self._move_planner = MovePlanner(lambda: self._elastic_options)
        self._next_sample_at = 0.0
        self._reported_advice = ""
        """The last reported advice."""
        self._recent_problems: dict[Backend, float] = {}
        """Instances whose last move has failed, with the time since which that is known."""
        self.leader_roles: Mapping[str, str] | None = None if parts.get_settings().replicas.url is None else {}
        """Roles that the leading gateway gives to elastic instances, by name. None: this gateway decides."""

    def measure_and_decide(self) -> None:
        """Measure the demand, and decide, if it is time."""
        now, options = self._clock(), self._elastic_options
        if now < self._next_sample_at or options.mode == "off":
            return
        elastic = self._roster.elastic_members()
        self._next_sample_at = now + (_SAMPLE_SECONDS if elastic else _SLOW_SAMPLE_SECONDS)
        if self.leader_roles is not None:
            self._follow_leader(self.leader_roles, now)
        if any(member.pending_move is not None for member in elastic):
            self._move_planner.forget_samples()
            return
        parts = self._parts
        sample = take_fleet_sample(
            parts.pools, parts.scoreboard, parts.count_queued(), now, token_seconds=options.token_seconds
        )
        before = self._move_planner.outcome
        advice = self._move_planner.add_sample(sample)
        if before is None and self._move_planner.outcome is not None:
            self._report_outcome(self._move_planner.outcome)
        self._show_desired(sample)
        if advice is not None and elastic and self.leader_roles is None and not parts.has_several_models():
            self._follow_advice(advice, now)

    def _follow_advice(self, advice: MoveAdvice, now: float) -> None:
        """Move an instance, or report that it would pay."""
        backend = self._choose_instance(advice.new_role, now)
        if self._elastic_options.mode == "advise" or backend is None:
            words = f"{advice.present_split.split_name} to {advice.future_split.split_name}"
            if words != self._reported_advice:
                self._reported_advice = words
                why = "elastic.mode is advise" if backend is not None else "no elastic instance can move"
                logger.info("roles: a move would pay: %s: %s", why, advice)
            return
        try:
            began = self._begin_move(backend, advice.new_role, f"pays: {advice}", now)
        except ValueError as error:
            logger.warning("roles: move rejected: %s", error)
            return
        if began:
            self._move_planner.record_move(advice)
            logger.info("roles: move begins: %s instance %s: %s", backend.role, backend.name, advice)

    def _choose_instance(self, new_role: Role, now: float) -> Backend | None:
        """Return the elastic instance of the other role with the least load, or None if none may move."""
        board = self._parts.scoreboard
        may_move = []
        for member in self._roster.elastic_members():
            backend = member.backend
            if not member.move_problem:
                self._recent_problems.pop(backend, None)
            elif (
                member.is_move_refused
                or now < self._recent_problems.setdefault(backend, now) + self._elastic_options.horizon_seconds
            ):
                continue
            if backend.role is not new_role and member.may_serve and not member.is_role_pinned:
                may_move.append(backend)
        available = set(self._parts.pools.pool_of(new_role.counterpart).eligible_backends())
        able = [backend for backend in may_move if backend in available]
        return min(able, key=lambda each: board.running_requests(each.slot), default=None)

    def _follow_leader(self, leader_roles: Mapping[str, str], now: float) -> None:
        """Move the instances to which the leading gateway gives another role."""
        if self._elastic_options.mode != "auto":
            return
        for member in self._roster.elastic_members():
            wanted = leader_roles.get(member.backend.name)
            if wanted not in (None, member.next_role) and not member.is_role_pinned and member.pending_move is None:
                with suppress(ValueError):
                    self._begin_move(member.backend, Role(wanted), "the leading gateway moves it", now)

    def _begin_move(self, backend: Backend, new_role: Role, reason: str, now: float) -> bool:
        options = self._elastic_options
        evacuate_after = options.evacuate_after_seconds
        leaves_at = None if evacuate_after is None else now + evacuate_after
        return self._roster.begin_move(
            backend, RoleMove(new_role, now + options.drain_seconds, reason[:_MAX_REASON]), leaves_at
        )

    def _report_outcome(self, came_true: bool) -> None:
        split = self._move_planner.split
        if came_true:
            logger.info("roles: gain of the last move came true: %s", split)
        else:
            logger.warning("roles: gain of the last move did not come true, and such moves pause: %s", split)

    def _show_desired(self, sample: FleetSample) -> None:
        split, gauge = self._move_planner.split, self._parts.metrics.desired_instances
        present = {Role.PREFILL: sample.prefiller_count, Role.DECODE: sample.decoder_count}
        for role, count in (present if split is None else split.desired_instances()).items():
            gauge.labels(role.value).set(count)

    @property
    def _elastic_options(self) -> Elastic:
        return self._parts.get_settings().elastic


_SAMPLE_SECONDS: Final = 1.0
# The interval without elastic instances, when only autoscalers use the result.
_SLOW_SAMPLE_SECONDS: Final = 5.0
# The roster keeps the reason of a move.
_MAX_REASON: Final = 300
