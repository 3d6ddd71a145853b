"""What the other gateways have, written where this gateway's workers look: the guests' rows of shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.balancer.policies.prefill_records import InvalidRecord, packed, translated, unpacked
from proxy.balancer.shared.memory import NO_HEAD
from proxy.gateway.api_keys import minute_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from proxy.balancer.health import HealthBoard
    from proxy.balancer.shared.journal import JournalWriter
    from proxy.balancer.shared.memory import QueueHeads
    from proxy.balancer.shared.scoreboard import Scoreboard
    from proxy.fleet.replicas.gateway_state import Charge, Used
    from proxy.gateway.api_keys import KeyUsage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedRows:
    """Shared memory of one gateway's workers, in which other gateways have rows as guests."""

    scoreboard: Scoreboard
    key_usage: KeyUsage
    board: HealthBoard
    queue_heads: QueueHeads
    journal: JournalWriter
    """The guests' own. They hear all workers."""


class PeerRows:
    """The only writer of the first guests' rows."""

    def __init__(self, rows: SharedRows) -> None:
        self._scoreboard = rows.scoreboard
        self._row = rows.scoreboard.row(rows.scoreboard.workers)
        self._key_usage = rows.key_usage
        self._key_row = rows.key_usage.row(rows.key_usage.workers)
        self._board = rows.board
        self._fronts = rows.queue_heads
        self._journal = rows.journal
        self._verdicts: Set[tuple[int, str, int]] = frozenset()
        self._charged: set[int] = set()
        self._keys_charged: set[int] = set()

    def erase(self) -> None:
        """Nothing is known of them."""
        self._scoreboard.erase(self._scoreboard.workers)
        self._key_usage.erase(self._key_usage.workers)
        self._board.clear_peer_verdicts()
        self._fronts.put_guests(NO_HEAD)
        self._verdicts = frozenset()

    def charge(self, charges: Mapping[int, Charge]) -> None:
        """Replace the load of all other gateways: their sum, by the instance's slot here. Other slots have none."""
        for slot in self._charged - charges.keys():
            self._row.charge(slot, 0, 0, 0)
        self._charged = set()
        self.charge_some(charges)

    def charge_some(self, charges: Mapping[int, Charge]) -> None:
        """What they have on some instances, by slot."""
        for slot, charge in charges.items():
            self._row.charge(slot, *charge)
        self._charged |= charges.keys()

    def put_front(self, front: int) -> None:
        """Where the next one in their queues stands."""
        self._fronts.put_guests(front)

    def use(self, used: Mapping[int, Used], now: float) -> None:
        """Replace what all other gateways have let in: by slot of the client key, requests in flight and in the last
        minute. `now`: seconds of the clock of the ApiKeys.
        """
        minute = minute_of(now)[0]
        for slot in self._keys_charged - used.keys():
            self._key_row.charge(slot, 0, minute, 0)
        for slot, (in_flight, count) in used.items():
            self._key_row.charge(slot, in_flight, minute, count)
        self._keys_charged = set(used)

    def note_verdicts(self, verdicts: Set[tuple[int, str, int]]) -> bool:
        """Replace which instances other gateways have found of no use. Each verdict: the instance's slot here, the name
        of the gateway, and the number of its verdict. Returns whether one is new.
        """
        before, self._verdicts = self._verdicts, verdicts
        for slot in {slot for slot, *_ in before} - {slot for slot, *_ in verdicts}:
            self._board.clear_peer_verdict(slot)
        new = {slot: number for slot, _, number in sorted(verdicts - before)}
        for slot, number in new.items():
            self._board.set_peer_verdict(slot, number)
        return bool(new)

    def note_prompts(self, prompts: Mapping[int, list[bytes]], seconds: float) -> None:
        """What they have sent, by the prefiller's slot here. This gateway's clock is so much ahead of theirs."""
        for slot, records in prompts.items():
            for data in records:
                try:
                    self._journal.write(packed(translated(unpacked(data), slot, seconds)))
                except InvalidRecord:
                    continue  # of another version
