"""Listening sockets and shared memory that all workers inherit from the process that starts them."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self
from uuid import uuid4

from proxy.balancer.blame import SuspectMemory
from proxy.balancer.health import HealthBoard
from proxy.balancer.incompatibilities import Incompatibilities
from proxy.balancer.roster import Roster, SourceStates
from proxy.balancer.shared.back_offs import BackOffs
from proxy.balancer.shared.journal import Journal
from proxy.balancer.shared.memory import NO_HEAD, LogOnce, QueueHeads
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.gateway.api_keys import MAX_KEYS, KeyUsage
from proxy.observe.history import HistoryBoard
from proxy.observe.key_usage import KeyAccounts
from proxy.observe.receipts import Receipts
from proxy.observe.verdict import StatusBoard
from proxy.process.configuration import SharedConfiguration
from proxy.process.takeover import Predecessor, Successor, command_line

if TYPE_CHECKING:
    import socket
    from types import TracebackType

    from proxy.settings import LoadedSettings

logger = logging.getLogger("proxy.shared")

_CELL_BYTES: Final = 8
_LEFT_OUT_BYTES: Final = 128 * 1024  # about a thousand lines
EXCHANGER: Final = 0
"""The worker that exchanges loads with other gateways, and writes their guest rows."""
REASONS: Final = ("died", "frozen")
"""Reasons for replacing a worker."""


@dataclass(frozen=True, slots=True)
class ListeningSockets:
    """Listening sockets, created before the first worker so that each port is bound once.

    None: there is no such port.
    """

    clients: socket.socket
    admin: socket.socket | None = None
    probes: socket.socket | None = None
    callbacks: Sequence[socket.socket] = ()
    """Sockets for callbacks of engines, one for each worker, because a callback concerns one worker.

    A worker that replaces another has its socket, too. Empty if there are no callbacks.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def sockets_for_successor(self) -> Mapping[str, socket.socket]:
        """Return the sockets that a successor takes over, by name.

        Callbacks stay with the workers that sent their requests.
        """
        named = {"clients": self.clients, "admin": self.admin, "probes": self.probes}
        return {name: listener for name, listener in named.items() if listener is not None}

    def close(self) -> None:
        """Close the copies of this process. May be called again."""
        for listener in self.all_sockets:
            listener.close()

    @property
    def all_sockets(self) -> Sequence[socket.socket]:
        """Return every listening socket of this process."""
        named = (self.clients, self.admin, self.probes, *self.callbacks)
        return [listener for listener in named if listener is not None]


class Heartbeats:
    """The heartbeats of all workers, and the numbers of replaced workers. Must be created before forking.

    There are no locks: a worker writes its own count, and the supervisor the rest.
    """

    def __init__(self, workers: int = 1) -> None:
        self._beat_cells = memoryview(mmap.mmap(-1, (workers + len(REASONS)) * _CELL_BYTES)).cast("q")
        self._worker_count = workers

    def record_beat(self, worker: int) -> None:
        """Count one turn of the worker's event loop."""
        self._beat_cells[worker] += 1

    def counts_by_worker(self) -> Mapping[int, int]:
        """Return the counts of event loop turns by worker."""
        return dict(enumerate(self._beat_cells[: self._worker_count].tolist()))

    def record_replacement(self, reason: str) -> None:
        """Count a replaced worker, for one of REASONS."""
        self._beat_cells[self._worker_count + REASONS.index(reason)] += 1

    def replacements_by_reason(self) -> Mapping[str, int]:
        """Return the numbers of replaced workers by reason."""
        return dict(zip(REASONS, self._beat_cells[self._worker_count :].tolist(), strict=True))


def _replica_name() -> str:
    """Return a unique name that sorts after those of gateways that started earlier."""
    return f"{time.time_ns():016x}{uuid4().hex[:16]}"  # noqa: TID251 - hosts share no other clock


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedState:
    """Everything that all workers inherit and share."""

    configuration: SharedConfiguration
    listeners: ListeningSockets
    scoreboard: Scoreboard
    roster: Roster
    key_usage: KeyUsage
    key_accounts: KeyAccounts = field(default_factory=KeyAccounts)
    log_once: LogOnce = field(default_factory=LogOnce)
    logged_omissions: LogOnce = field(default_factory=lambda: LogOnce(_LEFT_OUT_BYTES))
    """LogOnce for requests. It is separate from other subjects, because clients choose its names."""
    incompatibilities: Incompatibilities = field(default_factory=Incompatibilities)
    source_states: SourceStates = field(default_factory=SourceStates)
    heartbeats: Heartbeats = field(default_factory=Heartbeats)
    health_board: HealthBoard = field(default_factory=HealthBoard)
    suspect_memory: SuspectMemory = field(default_factory=SuspectMemory)
    back_offs: BackOffs = field(default_factory=BackOffs)
    queue_heads: QueueHeads = field(default_factory=QueueHeads)
    journal: Journal = field(default_factory=Journal)
    status_board: StatusBoard = field(default_factory=StatusBoard)
    history_board: HistoryBoard = field(default_factory=HistoryBoard)
    request_receipts: Receipts = field(default_factory=Receipts)
    replica_name: str = field(default_factory=_replica_name)
    """Name of this gateway among other gateways; the same after a worker was replaced. Older gateways come first."""
    predecessor: Predecessor | None = None
    """The gateway that has started this process to take over from it; None without one."""

    def erase_worker(self, worker: int) -> None:
        """Erase the counts of a dead worker from shared memory."""
        self.scoreboard.erase_row(worker)
        self.health_board.erase_worker(worker)
        self.key_usage.erase_row(worker)
        self.queue_heads.write_head(worker, NO_HEAD)
        self.status_board.erase_report(worker)
        if worker == EXCHANGER:  # without this worker, the guest rows become outdated
            self.health_board.clear_peer_verdicts()
            self.queue_heads.write_guest_head(NO_HEAD)
            for board in (self.scoreboard, self.key_usage):
                for guest in range(board.worker_count, board.row_count):
                    board.erase_row(guest)


RunWorker = Callable[[SharedState, int, int | None], int]
"""`worker.run`: serves until it is drained and returns the exit code.

Its arguments are the worker's number, and the reading end of a pipe that closes when the supervisor ends, or None
without a supervisor.
"""


def start_successor(shared: SharedState) -> Successor | None:
    """Start the process that is to take over, or log the reason and return None."""
    settings = shared.configuration.current_snapshot().settings
    if os.getpid() == 1:
        logger.error("SIGUSR2: process 1 of a container cannot be replaced: start another container")
    elif shared.listeners.callbacks and settings.layerwise.port:
        logger.error("SIGUSR2: another process cannot listen on layerwise.port while this one does: set it to 0")
    else:
        try:
            return Successor(shared.listeners.sockets_for_successor(), shared.roster.export_state())
        except OSError as error:
            logger.error("SIGUSR2: %s cannot be started: %s", " ".join(command_line()[:1]), error)
    return None


def create_shared_state(
    loaded: LoadedSettings,
    load: Callable[[], LoadedSettings],
    listeners: ListeningSockets,
    predecessor: Predecessor | None = None,
) -> SharedState:
    """Create everything, with room to add as many instances again, before the first worker is forked.

    Raises SettingsError.
    """
    settings = loaded.settings
    prefill, decode, encode = (
        [(each.host, each.port, each.bootstrap_port, each.models, each.tls) for each in settings.instances_of(role)]
        for role in ("prefill", "decode", "encode")
    )
    slots = max(1024, 2 * (len(prefill) + len(decode) + len(encode)))
    scoreboard = Scoreboard(workers=settings.workers, slots=slots, guests=settings.replicas.guest_rows)
    roster = Roster(
        prefill,
        decode,
        scoreboard,
        encode,
        elastic={endpoint.place for endpoint in settings.elastic.instances},
        previous_state=None if predecessor is None else predecessor.roster_state,
    )
    if predecessor is not None and not roster.is_restored:
        logger.warning(
            "takeover: changes of instances at run time are lost (added, removed, disabled, weighted): the state of "
            "the old process cannot be read, possibly because of another version"
        )
    return SharedState(
        configuration=SharedConfiguration(loaded, load, roster),
        listeners=listeners,
        scoreboard=scoreboard,
        roster=roster,
        key_usage=KeyUsage(workers=settings.workers, guest_rows=settings.replicas.guest_rows),
        key_accounts=KeyAccounts(settings.workers, MAX_KEYS),
        heartbeats=Heartbeats(settings.workers),
        health_board=HealthBoard(settings.workers, slots),
        back_offs=BackOffs(slots),
        queue_heads=QueueHeads(settings.workers, settings.replicas.guest_rows),
        journal=Journal(
            settings.workers + settings.replicas.guest_rows, write_only_rings=settings.kv_events.journal_rings
        ),
        status_board=StatusBoard(settings.workers),
        request_receipts=Receipts(settings.workers, settings.admin.receipts_bytes),
        predecessor=predecessor,
    )
