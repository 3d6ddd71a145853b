"""Records by which workers and gateways limit the sessions of the same prefillers together; see WorkingSets.

Each record has the whole state of a session, of a limit or of a queue after a change. So a lost record is replaced by
the next one. The records of other gateways are not trusted: numbers are bounded where they are applied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from proxy.balancer.policies.prefill_cost import JournalRecord, pack_record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.balancer.policies.prefill_cost import RecordKind
    from proxy.balancer.policies.prefixes import CachedPrefixes
    from proxy.balancer.shared.journal import JournalWriter

NO_LIMIT: Final = -1.0
"""A limit or a ceiling in a LimitChange if there is none."""


class SessionChange(NamedTuple):
    """Numbers of a SESSION record. Its keys are the key of the session ID, then the ends of the last prompts."""

    changed_at: float
    context_tokens: float
    """Tokens of its last prompt."""
    shared_tokens: float
    """Tokens at its beginning that another session had sent before."""
    last_prefix_key: float
    """Number of its client key. 0: unknown."""
    place_state: float
    """0: it is no resident of the prefiller. 1: it is. 2: it is, and its prompt is still to come."""
    turn_count: float
    """Turns since it became a resident."""
    idle_in_seconds: float
    """Seconds until it is idle. Negative: it has been idle for this time."""
    seconds_since_send: float
    """Seconds since its last prompt was sent."""
    computed_tokens: float = 0.0
    """Tokens of a prompt that has been computed now. 0: none has."""
    expected_tokens: float = 0.0
    """Tokens that this prompt should have found in the cache."""
    lost_tokens: float = 0.0
    """Share of these that it did not find."""


class LimitChange(NamedTuple):
    """Numbers of a LIMIT record."""

    changed_at: float
    limit_tokens: float
    """Maximum tokens of residents. NO_LIMIT: there is none for any prefiller."""
    ceiling_tokens: float
    """See WorkingSet."""
    is_lowered: float
    """Not 0: it was lowered, so that residents may have lost their place."""
    lifted_seconds: float
    """Time for which no limit begins, because the limit did not pay. 0: it may begin."""


class WaitingTurns(NamedTuple):
    """Numbers of a WAITING record."""

    reported_at: float
    worker_id: float
    """Random number of the worker."""
    turn_count: float
    """Number of turns that wait there."""


class SessionRecords:
    """Writes the changes of one worker to the journal."""

    def __init__(
        self, journal: JournalWriter, slot_of: Callable[[CachedPrefixes], int], read: Callable[[], None]
    ) -> None:
        """Keep the parts.

        Args:
            journal: The journal of this worker.
            slot_of: Returns the slot of the prefiller with this cache.
            read: Applies the new records of other workers.
        """
        self._journal = journal
        self._slot_of = slot_of
        self._read_records = read

    def read_others_records(self) -> None:
        """Apply the new records of other workers."""
        self._read_records()

    def write_record(
        self,
        record_kind: RecordKind,
        prefiller_cache: CachedPrefixes,
        keys: Sequence[int],
        record_numbers: Sequence[float],
    ) -> None:
        """Write a record about the prefiller with this cache."""
        self._journal.write_record(
            pack_record(JournalRecord(record_kind, self._slot_of(prefiller_cache), keys, (), record_numbers))
        )
