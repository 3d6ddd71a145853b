"""What gateways report to each other: their state as JSON, and its changes as MessagePack.

LocalState reads this gateway's state from the shared memory of its workers. PeerRows writes the state of all other
gateways to the same memory, where the workers' choices include it.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec

from proxy.balancer.policies.prefill_cost import (
    InvalidRecord,
    RecordKind,
    drop_record_keys,
    kind_and_slot,
    pack_record,
    translate_record,
    unpack_record,
)
from proxy.balancer.shared.memory import NO_HEAD, QueueHeads
from proxy.common.backend import Backend, Role
from proxy.gateway.api_keys import KeyUsage, minute_and_milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Set

    from proxy.balancer.health import HealthBoard
    from proxy.balancer.roster import Roster
    from proxy.balancer.shared.journal import JournalWriter
    from proxy.balancer.shared.scoreboard import Scoreboard

# The sum over some hundred gateways still fits into a cell of the scoreboard.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
# The range of a cell of the health board.
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

LoadCharge = tuple[_Count, _Count, _Count]
"""Load of one instance: requests, tokens of compute, and tokens of KV cache including pinned ones."""

KeyUse = tuple[int, int, int]
"""Use of one client key: requests in flight, and requests and tokens in the minute before the report."""

_Counts = TypeVar("_Counts", LoadCharge, KeyUse)

# Limits for the prefix keys of prompts in news.
_KEY_BYTES_PER_SECOND: Final = 256 * 1024
_MAX_KEY_BYTES: Final = 64 * 1024


class GatewayState(msgspec.Struct, frozen=True):
    """The load and the verdicts of one gateway. Unknown members, of other versions, are ignored."""

    turn: int
    """Time of the report in nanoseconds of the sender's clock. It grows with each report, so that a report can be
    distinguished from an old one that is still in the store."""
    instances: dict[str, LoadCharge] = {}
    """Load by Backend.key, without idle instances."""
    keys: dict[str, tuple[_Count, _Count]] = {}
    """Requests in flight, and requests in the minute before the report, by name of the client key.

    Unused keys are left out. Empty if limits hold for each gateway separately.
    """
    key_tokens: dict[str, _Count] = {}
    """Tokens in the minute before the report, by name of a client key in `keys`."""
    front: int = 0
    """Place of the first request in its queues, see `encode_head`, by the clock of `turn`."""
    verdicts: dict[str, _Number] = {}
    """Instances that this gateway has found unhealthy itself, by Backend.key. Each verdict has a new number."""
    roles: dict[str, str] = {}
    """Roles of elastic instances, or the roles that they move to, by the name of the instance."""


class News(msgspec.Struct, frozen=True, omit_defaults=True):
    """Changes of a gateway's state since its last message.

    News may be lost: the next GatewayState has the same facts, except for prompts.
    """

    me: str
    """Name of the sender."""
    turn: int
    """Time in nanoseconds of the sender's clock, comparable to that of GatewayState."""
    instances: dict[str, LoadCharge] = {}
    """Changed loads by Backend.key, which may be zero."""
    front: int | None = None
    """Place as in GatewayState; None: unchanged."""
    verdicts: dict[str, _Number] = {}
    """Changed verdicts as in GatewayState; 0: withdrawn."""
    prompts: dict[str, list[bytes]] = {}
    """Records of prompts and sessions by the prefiller's Backend.key; see balancer/policies/prefill_cost.py."""

    @property
    def now(self) -> float:
        """The time of the news in seconds of the sender's clock."""
        return self.turn / 1e9


encode_state: Final = msgspec.json.Encoder().encode
encode_news: Final = msgspec.msgpack.Encoder().encode
_decode_state: Final = msgspec.json.Decoder(GatewayState).decode
_decode_news: Final = msgspec.msgpack.Decoder(News).decode


def decode_state(message: bytes) -> GatewayState | None:
    """Return the state in a message, or None if this version cannot read it."""
    try:
        return _decode_state(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def decode_news(message: bytes) -> News | None:
    """Return the news in a message, or None if this version cannot read them."""
    try:
        return _decode_news(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def sum_tables(count_tables: Iterable[Mapping[str, _Counts]]) -> dict[str, _Counts]:
    """Return the sums of counts by name."""
    total: dict[str, _Counts] = {}
    for table in count_tables:
        for name, counts in table.items():
            before = total.get(name)
            total[name] = counts if before is None else tuple(map(add, before, counts))
    return total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedRows:
    """Shared memory of one gateway's workers, which has guest rows for other gateways."""

    scoreboard: Scoreboard
    key_usage: KeyUsage
    health_board: HealthBoard
    queue_heads: QueueHeads
    journal_writer: JournalWriter
    """The writer for records of other gateways. It reads the records of all workers."""


class LocalState:
    """The state of this gateway, over all its workers. Times are seconds of the journal's clock."""

    def __init__(self, me: str, roster: Roster, key_slots: Callable[[], Mapping[str, int]], rows: SharedRows) -> None:
        """Create the local state.

        Args:
            me: Name of this gateway among the others.
            roster: The instances.
            key_slots: Returns the slots of the client keys whose use is reported, by name.
            rows: Shared memory of the workers.
        """
        self._own_name = me
        self._scoreboard = rows.scoreboard
        self._roster = roster
        self._health_board = rows.health_board
        self._queue_heads = rows.queue_heads
        self._journal_writer = rows.journal_writer
        self._key_usage = rows.key_usage
        self._get_key_slots = key_slots
        # As of the last news.
        self._reported_head = NO_HEAD
        self._reported_cells = b""
        self._reported_verdicts: dict[str, int] = {}
        self._judged_cells = b""
        """Cells of the health board when `_verdicts` was made."""
        self._verdicts: dict[str, int] = {}
        self._key_bytes_left, self._key_bytes_at = float(_MAX_KEY_BYTES), 0.0

    def all_members(self) -> Iterator[Backend]:
        """Return all instances of this gateway."""
        return (member.backend for role in Role for member in self._roster.members_of_role(role))

    def make_full_state(self, now: float) -> GatewayState:
        """Return the whole state of this gateway for the other gateways."""
        instances = {backend.key: charge for backend in self.all_members() if any(charge := self._charge_of(backend))}
        usage = self._key_usage
        used = {name: usage.own_usage(slot, now) for name, slot in self._get_key_slots().items()}
        used = {name: counts for name, counts in used.items() if any(counts)}
        return GatewayState(
            turn=_nanoseconds(now),
            instances=instances,
            keys={name: (in_flight, requests) for name, (in_flight, requests, _) in used.items()},
            key_tokens={name: tokens for name, (_, _, tokens) in used.items() if tokens},
            front=self._queue_heads.first_head_of_workers(),
            verdicts=self._current_verdicts(now),
            roles={member.backend.name: member.next_role for member in self._roster.elastic_members()},
        )

    def take_news(self, now: float) -> News | None:
        """Return the changes since the last call, or None if there are none."""
        instances: dict[str, LoadCharge] = {}
        before, self._reported_cells = self._reported_cells, self._scoreboard.copy_own_cells()
        if before != self._reported_cells:
            members = {backend.slot: backend for backend in self.all_members()}
            changed = self._scoreboard.changed_slots(members, before, self._reported_cells)
            instances = {members[slot].key: self._charge_of(members[slot]) for slot in changed}
        verdicts = self._current_verdicts(now)
        reported, self._reported_verdicts = self._reported_verdicts, verdicts
        verdicts = dict.fromkeys(reported, 0) | verdicts if reported != verdicts else {}
        prompts = self._take_prompt_records(now) if self._journal_writer.has_new_records else {}
        reported_head, self._reported_head = self._reported_head, self._queue_heads.first_head_of_workers()
        front = None if reported_head == self._reported_head else self._reported_head
        if not instances and front is None and not verdicts and not prompts:
            return None
        return News(self._own_name, _nanoseconds(now), instances, front, verdicts, prompts)

    def _charge_of(self, backend: Backend) -> LoadCharge:
        board = self._scoreboard
        running, load = board.own_load(backend.slot)
        pinned = board.pinned_kv(backend.slot).pinned_tokens
        return max(0, running), max(0, load.compute_tokens), max(0, load.kv_tokens + pinned)

    def _current_verdicts(self, now: float) -> dict[str, int]:
        """Return the instances that workers have found unhealthy. A verdict keeps its number while it holds."""
        before, self._judged_cells = self._judged_cells, self._health_board.copy_own_states()
        if before != self._judged_cells:
            unhealthy = [
                backend.key for backend in self.all_members() if self._health_board.is_found_unhealthy(backend)
            ]
            self._verdicts = {key: self._verdicts.get(key) or _nanoseconds(now) for key in unhealthy}
        return self._verdicts

    def _take_prompt_records(self, now: float) -> dict[str, list[bytes]]:
        """Return the new records of prompts, without prefix keys beyond the limit."""
        keys = {backend.slot: backend.key for backend in self.all_members()}
        earned = (now - self._key_bytes_at) * _KEY_BYTES_PER_SECOND
        self._key_bytes_left = min(_MAX_KEY_BYTES, self._key_bytes_left + earned)
        self._key_bytes_at = now
        prompts: dict[str, list[bytes]] = {}
        for data in self._journal_writer.new_records():
            kind, slot = kind_and_slot(data)
            if slot not in keys or kind == RecordKind.COUNTED:
                continue
            if kind == RecordKind.SESSION:  # it has few keys, and means nothing without them
                prompts.setdefault(keys[slot], []).append(data)
                continue
            record = unpack_record(data)
            if record.prefix_keys and len(data) > self._key_bytes_left:
                data = pack_record(drop_record_keys(record))
            elif record.prefix_keys:
                self._key_bytes_left -= len(data)
            prompts.setdefault(keys[slot], []).append(data)
        return prompts


def _nanoseconds(now: float) -> int:
    return round(now * 1e9)


class PeerRows:
    """Writes the state of all other gateways to shared memory. The only writer of the first guest rows."""

    def __init__(self, rows: SharedRows) -> None:
        self._scoreboard = rows.scoreboard
        self._load_row = rows.scoreboard.load_row(rows.scoreboard.worker_count)
        self._key_usage = rows.key_usage
        self._key_usage_row = rows.key_usage.usage_row(rows.key_usage.worker_count)
        self._health_board = rows.health_board
        self._queue_heads = rows.queue_heads
        self._journal_writer = rows.journal_writer
        self._verdicts: Set[tuple[int, str, int]] = frozenset()
        self._charged_slots: set[int] = set()
        self._used_slots: set[int] = set()

    def erase_all(self) -> None:
        """Erase all state of other gateways."""
        self._scoreboard.erase_row(self._scoreboard.worker_count)
        self._key_usage.erase_row(self._key_usage.worker_count)
        self._health_board.clear_peer_verdicts()
        self._queue_heads.write_guest_head(NO_HEAD)
        self._verdicts = frozenset()

    def replace_all_loads(self, charges: Mapping[int, LoadCharge]) -> None:
        """Replace the summed load of all other gateways, by slot of the instance. Other slots have no load."""
        for slot in self._charged_slots - charges.keys():
            self._load_row.replace_load(slot, 0, 0, 0)
        self._charged_slots = set()
        self.replace_loads(charges)

    def replace_loads(self, charges: Mapping[int, LoadCharge]) -> None:
        """Replace the summed load of some instances, by slot."""
        for slot, charge in charges.items():
            self._load_row.replace_load(slot, *charge)
        self._charged_slots |= charges.keys()

    def write_first_head(self, front: int) -> None:
        """Replace the place of the first request in the queues of other gateways."""
        self._queue_heads.write_guest_head(front)

    def replace_key_usage(self, used: Mapping[int, KeyUse], now: float) -> None:
        """Replace the summed use of client keys at other gateways.

        Args:
            used: By slot of the client key.
            now: Seconds of the clock of the ApiKeys.
        """
        minute = minute_and_milliseconds(now)[0]
        for slot in self._used_slots - used.keys():
            self._key_usage_row.replace_counts(slot, 0, minute, (0, 0))
        for slot, (in_flight, requests, tokens) in used.items():
            self._key_usage_row.replace_counts(slot, in_flight, minute, (requests, tokens))
        self._used_slots = set(used)

    def replace_verdicts(self, verdicts: Set[tuple[int, str, int]]) -> bool:
        """Replace the verdicts of other gateways, and return whether one is new.

        Each verdict: the slot of the unhealthy instance, the name of the gateway, and the verdict's number.
        """
        before, self._verdicts = self._verdicts, verdicts
        for slot in {slot for slot, *_ in before} - {slot for slot, *_ in verdicts}:
            self._health_board.set_peer_verdict(slot, 0)
        new = {slot: number for slot, _, number in sorted(verdicts - before)}
        for slot, number in new.items():
            self._health_board.set_peer_verdict(slot, number)
        return bool(new)

    def write_prompt_records(self, prompts: Mapping[int, list[bytes]], seconds: float) -> None:
        """Write the records of prompts that another gateway has sent to prefillers.

        Args:
            prompts: Records by slot of the prefiller.
            seconds: This gateway's clock minus that of the sender.
        """
        for slot, records in prompts.items():
            for data in records:
                try:
                    self._journal_writer.write_record(pack_record(translate_record(unpack_record(data), slot, seconds)))
                except InvalidRecord:  # of another version
                    continue
