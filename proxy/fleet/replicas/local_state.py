"""What this gateway has to tell the others: all of it, or what is new since it was asked last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proxy.balancer.policies.prefill_records import RecordKind, kind_and_slot, packed, unpacked, without_keys
from proxy.balancer.shared.memory import NO_HEAD
from proxy.common.backend import Role
from proxy.fleet.replicas.gateway_state import Charge, GatewayState, News

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from proxy.balancer.roster import Roster
    from proxy.common.backend import Backend
    from proxy.fleet.replicas.peer_rows import SharedRows

# What the names of prompts' prefixes may take, in bytes a second, and at once.
_KEYS_PER_SECOND: Final = 256 * 1024
_KEYS_AT_ONCE: Final = 64 * 1024


class LocalState:
    """Of all workers. Times are seconds of the clock that the journal's records tell."""

    def __init__(
        self,
        me: str,
        roster: Roster,
        key_slots: Callable[[], Mapping[str, int]],
        rows: SharedRows,
    ) -> None:
        """Create the state of a gateway.

        Args:
            me: What the others call it.
            roster: The instances.
            key_slots: By name, the slots of the client keys whose use is reported.
            rows: What is reported.
        """
        self._me = me
        self._scoreboard = rows.scoreboard
        self._roster = roster
        self._board = rows.board
        self._fronts = rows.queue_heads
        self._front = NO_HEAD  # when the last news were told
        self._journal = rows.journal
        self._key_usage = rows.key_usage
        self._key_slots = key_slots
        self._cells = b""  # of the scoreboard, when the last news were told
        self._seen = b""  # of the health board, when verdicts were worked out
        self._verdicts: dict[str, int] = {}
        self._told_verdicts = self._verdicts  # as news
        self._keys_left, self._keys_at = float(_KEYS_AT_ONCE), 0.0

    def members(self) -> Iterator[Backend]:
        """All instances."""
        return (member.backend for role in Role for member in self._roster.members(role))

    def told(self, now: float) -> GatewayState:
        """All that is told."""
        instances = {backend.key: charge for backend in self.members() if any(charge := self._charge(backend))}
        usage = self._key_usage
        used = {name: usage.own(slot, now) for name, slot in self._key_slots().items()}
        used = {name: counts for name, counts in used.items() if any(counts)}
        return GatewayState(_turn(now), instances, used, self._fronts.first_of_workers(), self._judged(now))

    def news(self, now: float) -> News | None:
        """What has changed since this was called last; None: nothing."""
        instances: dict[str, Charge] = {}
        before, self._cells = self._cells, self._scoreboard.own_cells()
        if before != self._cells:
            members = {backend.slot: backend for backend in self.members()}
            changed = self._scoreboard.changed_slots(members, before, self._cells)
            instances = {members[slot].key: self._charge(members[slot]) for slot in changed}
        verdicts = self._judged(now)
        passed, self._told_verdicts = self._told_verdicts, verdicts
        verdicts = dict.fromkeys(passed, 0) | verdicts if passed != verdicts else {}
        prompts = self._prompts(now) if self._journal.has_new_records else {}
        stood, self._front = self._front, self._fronts.first_of_workers()
        front = None if stood == self._front else self._front
        if not instances and front is None and not verdicts and not prompts:
            return None
        return News(self._me, _turn(now), instances, front, verdicts, prompts)

    def _charge(self, backend: Backend) -> Charge:
        board = self._scoreboard
        running, load = board.own(backend.slot)
        pinned = board.pinned(backend.slot).tokens
        return max(0, running), max(0, load.compute), max(0, load.kv + pinned)

    def _judged(self, now: float) -> dict[str, int]:
        """What workers have found of no use. A number is kept for as long as that holds."""
        before, self._seen = self._seen, self._board.own_cells()
        if before != self._seen:
            useless = [backend.key for backend in self.members() if self._board.is_found_unhealthy(backend)]
            self._verdicts = {key: self._verdicts.get(key) or _turn(now) for key in useless}
        return self._verdicts

    def _prompts(self, now: float) -> dict[str, list[bytes]]:
        keys = {backend.slot: backend.key for backend in self.members()}
        self._keys_left = min(_KEYS_AT_ONCE, self._keys_left + (now - self._keys_at) * _KEYS_PER_SECOND)
        self._keys_at = now
        prompts: dict[str, list[bytes]] = {}
        for data in self._journal.new_records():
            kind, slot = kind_and_slot(data)
            if slot not in keys or kind == RecordKind.COUNTED:
                continue
            record = unpacked(data)
            if record.keys and len(data) > self._keys_left:
                data = packed(without_keys(record))
            elif record.keys:
                self._keys_left -= len(data)
            prompts.setdefault(keys[slot], []).append(data)
        return prompts


def _turn(now: float) -> int:
    return round(now * 1e9)
