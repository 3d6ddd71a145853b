"""Healthy instances that are incompatible with the others or with this gateway, shared by all workers.

An incompatible instance still serves requests, or rejects them for a good reason, so its health is not affected. Its
operator must learn of it, and of its end. The worker that finds an incompatibility records it here, and the first one
logs it. Verdicts on the KV handoffs to decoders are kept here, too. Create the table before forking.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.handoff_verdicts import HandoffVerdict
from proxy.balancer.shared.memory import SharedValue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.balancer.engines import EngineKeys
    from proxy.balancer.shared.scoreboard import LoadRow
    from proxy.common.backend import Backend


_MAX_FINDINGS = 512
_BYTES_PER_FINDING = 2048  # a host name has at most 253 bytes, and a hint is cut
_MAX_HINT = 400
_BYTES_PER_VERDICT = 320
_MAX_PAIRS = 4096


class IncompatibilityKind(StrEnum):
    """The reason why an instance is incompatible. The values are metric labels."""

    KV_NOT_FETCHED = "kv_not_fetched"
    """A decoder computes prompts whose KV was handed to it."""
    NO_KV_PARAMS = "no_kv_params"
    """A prefiller's answers have no KV parameters for a decoder."""
    CONNECTOR = "connector"
    """The engine runs a KV connector that the gateway's connector does not serve."""
    ROLE = "role"
    """The engine was started for another role than the configured one."""
    BOOTSTRAP = "bootstrap"
    """The configured bootstrap server belongs to another engine, or does not answer."""
    MODEL = "model"
    """The instance serves another model than the others, or none that each role serves."""
    ENGINE_KEY = "engine_key"
    """The engine rejects its key, or requires one."""
    GATEWAY = "gateway"
    """The address is that of a gateway instead of an engine."""


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """One incompatibility of an instance with the fleet."""

    kind: IncompatibilityKind
    problem_text: str
    """Problem, and what to check."""
    found_at: float
    """Time of the finding, in seconds of the monotonic clock that all workers share."""


class Incompatibilities:
    """The table of findings and verdicts in shared memory.

    Reading costs one comparison while nothing has changed. Changing takes a lock that all workers share.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, slots: int = 1024, max_findings: int = _MAX_FINDINGS
    ) -> None:
        """Create a table without incompatibilities.

        Args:
            clock: Returns monotonic seconds.
            slots: Maximum number of backends.
            max_findings: Maximum number of findings in the table. Further ones are logged each time, but not listed.
        """
        self._clock = clock
        self._max_findings = max_findings
        capacity_bytes = max_findings * _BYTES_PER_FINDING + (slots + _MAX_PAIRS) * _BYTES_PER_VERDICT
        self._shared_value = SharedValue("list of incompatibilities", capacity_bytes)
        self.version_cells = self._shared_value.head_cells
        """The first cell increases with every change by any worker."""
        self._read_version = -1
        self._findings_by_backend: dict[str, dict[IncompatibilityKind, Incompatibility]] = {}
        """Findings by the name of the backend, which has one role."""
        self._verdicts_by_decoder: dict[str, HandoffVerdict] = {}
        self._pair_verdicts: dict[str, dict[str, HandoffVerdict]] = {}
        """Verdicts by the name of the decoder, then of the prefiller."""
        self._divided: dict[str, dict[str, HandoffVerdict]] = {}
        """Pairs of the decoders whose pairs do not all have the decoder's verdict."""
        with self._shared_value.hold_writer_lock():
            self._write_shared_value()

    def incompatibilities_of(self, backend: Backend) -> Sequence[Incompatibility]:
        """Return the incompatibilities of a backend."""
        self._read_shared_value()
        return tuple(self._findings_by_backend.get(backend.name, {}).values())

    def has_finding(self, backend: Backend, kind: IncompatibilityKind) -> bool:
        """Return whether there is a finding of this kind about a backend."""
        if self.version_cells[0] != self._read_version:
            self._read_shared_value()
        return bool(self._findings_by_backend) and kind in self._findings_by_backend.get(backend.name, ())

    def has_any_finding(self, kind: IncompatibilityKind) -> bool:
        """Return whether there is a finding of this kind about any backend."""
        self._read_shared_value()
        return any(kind in findings for findings in self._findings_by_backend.values())

    def handoff_verdict(self, decoder: Backend, prefiller: Backend | None = None) -> HandoffVerdict:
        """Return the verdict on KV handoffs to a decoder.

        With `prefiller`, return that of the pair, or of the decoder if there is none for the pair.
        """
        if self.version_cells[0] != self._read_version:
            self._read_shared_value()
        verdict = self._verdicts_by_decoder.get(decoder.name, HandoffVerdict.UNKNOWN)
        if self._divided and prefiller is not None:
            return self._divided.get(decoder.name, {}).get(prefiller.name, verdict)
        return verdict

    def pair_verdicts(self, decoder: Backend) -> Mapping[str, HandoffVerdict]:
        """Return the verdicts on handoffs from single prefillers to a decoder, by the prefiller's name."""
        self._read_shared_value()
        return self._pair_verdicts.get(decoder.name, {})

    def add_finding(self, backend: Backend, kind: IncompatibilityKind, problem_text: str) -> bool:
        """Record a finding, and return whether it is new and must be logged."""
        if self.has_finding(backend, kind):
            return False
        with self._shared_value.hold_writer_lock():
            self._read_shared_value()
            findings = self._findings_by_backend.setdefault(backend.name, {})
            if kind in findings:
                return False
            findings[kind] = Incompatibility(kind, problem_text[:_MAX_HINT], self._clock())
            if sum(map(len, self._findings_by_backend.values())) > self._max_findings:
                del findings[kind]
                return True
            self._write_shared_value()
            return True

    def remove_finding(self, backend: Backend, kind: IncompatibilityKind) -> bool:
        """Remove a finding, and return whether that is new and must be logged."""
        if not self.has_finding(backend, kind):
            return False
        with self._shared_value.hold_writer_lock():
            self._read_shared_value()
            findings = self._findings_by_backend.get(backend.name, {})
            if findings.pop(kind, None) is None:
                return False
            if not findings:
                del self._findings_by_backend[backend.name]
            self._write_shared_value()
            return True

    def record_handoff_verdict(
        self,
        decoder: Backend,
        handoff_verdict: HandoffVerdict,
        pair_verdicts: Mapping[str, HandoffVerdict] | None = None,
    ) -> None:
        """Record the verdict on a decoder, and those on its pairs by the prefiller's name."""
        pair_verdicts = {} if pair_verdicts is None else dict(pair_verdicts)
        if (
            self.handoff_verdict(decoder) is handoff_verdict
            and self._pair_verdicts.get(decoder.name, {}) == pair_verdicts
        ):
            return
        with self._shared_value.hold_writer_lock():
            self._read_shared_value()
            self._verdicts_by_decoder[decoder.name], self._pair_verdicts[decoder.name] = handoff_verdict, pair_verdicts
            if handoff_verdict is HandoffVerdict.UNKNOWN and not pair_verdicts:
                del self._verdicts_by_decoder[decoder.name], self._pair_verdicts[decoder.name]
            elif sum(map(len, self._pair_verdicts.values())) > _MAX_PAIRS:
                self._pair_verdicts[decoder.name] = {}
            self._write_shared_value()

    def forget_backend(self, backend: Backend) -> None:
        """Drop all findings and verdicts of a backend that has left."""
        self._read_shared_value()
        if not any(
            (
                backend.name in self._findings_by_backend,
                backend.name in self._verdicts_by_decoder,
                *(backend.name in pairs for pairs in self._pair_verdicts.values()),
            )
        ):
            return
        with self._shared_value.hold_writer_lock():
            self._read_shared_value()
            self._findings_by_backend.pop(backend.name, None)
            self._verdicts_by_decoder.pop(backend.name, None)
            self._pair_verdicts.pop(backend.name, None)
            for pairs in self._pair_verdicts.values():
                pairs.pop(backend.name, None)
            self._write_shared_value()

    def _read_shared_value(self) -> None:
        if self._shared_value.current_version == self._read_version:
            return
        self._read_version, (incompatibilities, verdicts) = self._shared_value.read_version_and_value()
        self._findings_by_backend, self._verdicts_by_decoder, self._pair_verdicts = {}, {}, {}
        for name, verdict, pairs in verdicts:
            self._verdicts_by_decoder[name] = HandoffVerdict(verdict)
            self._pair_verdicts[name] = {prefiller: HandoffVerdict(of_pair) for prefiller, of_pair in pairs.items()}
        self._divided = {
            name: pairs
            for name, pairs in self._pair_verdicts.items()
            if set(pairs.values()) - {self._verdicts_by_decoder[name]}
        }
        for name, kind, hint, since in incompatibilities:
            self._findings_by_backend.setdefault(name, {})[IncompatibilityKind(kind)] = Incompatibility(
                IncompatibilityKind(kind), hint, since
            )

    def _write_shared_value(self) -> None:
        incompatibilities: list[Any] = [
            (name, finding.kind, finding.problem_text, finding.found_at)
            for name, findings in self._findings_by_backend.items()
            for finding in findings.values()
        ]
        verdicts = [(name, verdict, self._pair_verdicts[name]) for name, verdict in self._verdicts_by_decoder.items()]
        self._shared_value.write_value((incompatibilities, verdicts))


NO_KV_PARAMS: Final = (
    "answers prefills without kv_transfer_params, so decoders compute its prompts again: check its "
    "--kv-transfer-config, and that this gateway's connector serves it"
)

CACHE_FLAGS: Final = "--enable-prompt-tokens-details (SGLang: --enable-cache-report)"
"""Flags with which engines report the cached tokens of a prompt."""
# Prompts of which a prefiller most likely has cached tokens, as at least this number is predicted.
_LEAST_PREDICTED_TOKENS: Final = 256
_LEAST_WITHOUT_REPORT: Final = 3

# Consecutive answers. One request may use the same prefiller twice.
_LEAST_WITHOUT_PARAMS: Final = 3


class CompatibilityMonitor:
    """Finds incompatibilities in one worker's traffic.

    Args:
        incompatibilities: The table that all workers share.
        row: The worker's row of the scoreboard, where handoffs are counted.
        keys: Keys of engines, for advice about a rejected key.
        on_change: Called with the backend, the kind and the hint of a new finding; the hint is None when a finding
            ends.
        on_missing_report: Called with a prefiller that does not report cached tokens, once in each worker.
    """

    def __init__(
        self,
        incompatibilities: Incompatibilities,
        row: LoadRow,
        keys: EngineKeys,
        on_change: Callable[[Backend, IncompatibilityKind, str | None], None] = lambda *_: None,
        on_missing_report: Callable[[Backend], None] = lambda _: None,
    ) -> None:
        self.incompatibilities = incompatibilities
        self._load_row = row
        self._engine_keys = keys
        self._on_change = on_change
        self._on_missing_report = on_missing_report
        self.missing_cache_reports: dict[Backend, int] = {}
        """Number of answers without cached tokens, by prefiller, of prompts that were predicted to be cached."""
        self.version_cells = incompatibilities.version_cells
        self.key_checked_at_version = -1
        """Version of the table at which all backends accepted the key, so that no lookup is needed. -1: none yet."""
        self._prefills_without_params: dict[Backend, int] = {}  # consecutive answers

    def set_finding(self, backend: Backend, kind: IncompatibilityKind, problem_text: str | None) -> None:
        """Record a finding, or its end if `problem_text` is None."""
        is_news = (
            self.incompatibilities.remove_finding(backend, kind)
            if problem_text is None
            else self.incompatibilities.add_finding(backend, kind, problem_text)
        )
        if is_news:
            self._on_change(backend, kind, problem_text)

    def record_handoff(self, prefiller: Backend, decoder: Backend, tokens: int, min_tokens: int) -> HandoffVerdict:
        """Count a handoff that a decoder has answered, and return the verdict on its pair.

        Args:
            prefiller: The engine that computed the prompt.
            decoder: The engine that was to fetch its KV.
            tokens: Estimated length of the prompt.
            min_tokens: Prompts that are shorter are not counted, because their KV may come from the decoder's cache.
        """
        if tokens >= min_tokens:
            self._load_row.count_handoff(prefiller.slot, decoder.slot, tokens)
        return self.incompatibilities.handoff_verdict(decoder, prefiller)

    def record_prefill(self, prefiller: Backend, has_params: bool) -> None:
        """Record a prefiller's answer, and whether it has KV parameters for a decoder."""
        if has_params:
            if self._prefills_without_params:
                self._prefills_without_params.pop(prefiller, None)
            if self.incompatibilities.has_finding(prefiller, IncompatibilityKind.NO_KV_PARAMS):
                self.set_finding(prefiller, IncompatibilityKind.NO_KV_PARAMS, None)
            return
        count = self._prefills_without_params[prefiller] = self._prefills_without_params.get(prefiller, 0) + 1
        if count >= _LEAST_WITHOUT_PARAMS:
            self.set_finding(prefiller, IncompatibilityKind.NO_KV_PARAMS, NO_KV_PARAMS)

    def record_cache_report(self, prefiller: Backend, predicted_tokens: int, cached_tokens: int | None) -> None:
        """Record the cached tokens that a prefiller reports. None: it reports none, as vLLM before 0.32 does for 0.

        `predicted_tokens`: tokens of the prompt that were predicted to be cached.
        """
        missing = self.missing_cache_reports
        if cached_tokens is not None:
            missing.pop(prefiller, None)
        elif predicted_tokens >= _LEAST_PREDICTED_TOKENS:
            missing[prefiller] = count = missing.get(prefiller, 0) + 1
            if count == _LEAST_WITHOUT_REPORT:
                self._on_missing_report(prefiller)

    def record_rejected_key(self, backend: Backend) -> None:
        """Record that a backend answered 401 and has not served a request yet."""
        self.set_finding(backend, IncompatibilityKind.ENGINE_KEY, self._engine_keys.advice_after_401(backend))

    def record_success(self, backend: Backend) -> None:
        """Record that a backend has served a request, so it accepts its key."""
        version = self.version_cells[0]
        if self.incompatibilities.has_finding(backend, IncompatibilityKind.ENGINE_KEY):
            self.set_finding(backend, IncompatibilityKind.ENGINE_KEY, None)
        elif not self.incompatibilities.has_any_finding(IncompatibilityKind.ENGINE_KEY):
            self.key_checked_at_version = version

    def forget_backend(self, backend: Backend) -> None:
        """Drop the findings of a backend that has left."""
        self._prefills_without_params.pop(backend, None)
        self.missing_cache_reports.pop(backend, None)
        self.incompatibilities.forget_backend(backend)
