"""What other gateways have found of instances, heeded by one worker: it asks these instances at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.common.backend import Role

if TYPE_CHECKING:
    from proxy.balancer.health import HealthBoard
    from proxy.balancer.roster import Roster
    from proxy.fleet.discovery.prober import Prober


class Hearsay:
    """One worker's. A verdict is heeded once, however long it stands: what is found out here counts for more."""

    def __init__(self, board: HealthBoard, roster: Roster, prober: Prober) -> None:
        self._board = board
        self._roster = roster
        self._prober = prober
        self._heeded: list[int] = []

    def look(self) -> None:
        """Take notice of verdicts that came since the last look."""
        verdicts = self._board.peer_verdicts()
        if verdicts == self._heeded:
            return
        before, self._heeded = self._heeded or [0] * len(verdicts), verdicts
        for role in Role:
            for member in self._roster.members(role):
                slot = member.backend.slot
                if verdicts[slot] and verdicts[slot] != before[slot]:
                    self._prober.doubt(member.backend)
