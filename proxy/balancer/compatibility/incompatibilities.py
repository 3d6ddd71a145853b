"""Which healthy instances do not fit the others or this gateway: known to all workers, logged once.

A misfit serves, or refuses for a good reason, so it is no matter of health; but its operator wants to know about it,
and when it is over. The worker that finds one reports it here, and the first to do so logs it. What decoders make of
the KV that is handed to them is kept here, too. Build it before forking.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.compatibility.handoff_verdicts import HandoffVerdict
from proxy.balancer.shared.memory import SharedValue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.balancer.engines.engine_keys import EngineKeys
    from proxy.balancer.shared.scoreboard import LoadRow
    from proxy.common.backend import Backend


_MAX_MISFITS = 512
_BYTES_PER_MISFIT = 2048  # a host name has at most 253, and a hint is cut
_MAX_HINT = 400
_BYTES_PER_VERDICT = 320
_MAX_PAIRS = 4096


_UNKNOWN: Final = HandoffVerdict.UNKNOWN  # to read a member off its class takes as long as four calls


class IncompatibilityKind(StrEnum):
    """The ways in which an instance may not fit. The values are metric labels."""

    KV_NOT_FETCHED = "kv_not_fetched"
    """A decoder computes the prompts whose KV it is handed."""
    NO_KV_PARAMS = "no_kv_params"
    """A prefiller's answers name nothing for a decoder to fetch."""
    CONNECTOR = "connector"
    """It runs what this gateway's connector does not serve."""
    ROLE = "role"
    """It was started for another role than it was given."""
    BOOTSTRAP = "bootstrap"
    """The bootstrap server at which decoders are to meet it is not its own, or not there."""
    MODEL = "model"
    """It serves no model that an instance of each role serves, or another than the others."""
    ENGINE_KEY = "engine_key"
    """It refuses the key it is sent, or wants one."""
    GATEWAY = "gateway"
    """It is a gateway and no engine."""


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """`since` is on the monotonic clock, which all workers share; `hint` says what is wrong and what to look at."""

    kind: IncompatibilityKind
    hint: str
    since: float


class Incompatibilities:
    """Reading costs a look at the version as long as nothing has changed; changing takes a lock that all workers
    share.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, slots: int = 1024, max_misfits: int = _MAX_MISFITS
    ) -> None:
        """`slots`: how many backends there can be. `max_misfits`: how many misfits of theirs are kept at a time."""
        self._clock = clock
        self._max_misfits = max_misfits
        capacity_bytes = max_misfits * _BYTES_PER_MISFIT + (slots + _MAX_PAIRS) * _BYTES_PER_VERDICT
        self._shared = SharedValue("list of misfits", capacity_bytes)
        self.versions = self._shared.head
        """Its first cell moves with every change, whichever worker made it."""
        self._read_version = -1
        self._misfits: dict[
            str, dict[IncompatibilityKind, Incompatibility]
        ] = {}  # by names of backends, which have one role each
        self._verdicts: dict[str, HandoffVerdict] = {}
        self._pairs: dict[str, dict[str, HandoffVerdict]] = {}  # by decoders' names and then prefillers'
        self._divided: dict[
            str, dict[str, HandoffVerdict]
        ] = {}  # of these those that are not all as the decoder's verdict
        with self._shared.exclusive():
            self._write()

    # What is known

    def of(self, backend: Backend) -> Sequence[Incompatibility]:
        """The ways in which a backend does not fit."""
        self._read()
        return tuple(self._misfits.get(backend.name, {}).values())

    def has(self, backend: Backend, kind: IncompatibilityKind) -> bool:
        """Whether it is known not to fit in this."""
        if self.versions[0] != self._read_version:
            self._read()
        return bool(self._misfits) and kind in self._misfits.get(backend.name, ())

    def has_any(self, kind: IncompatibilityKind) -> bool:
        """Whether some backend is known not to fit in this."""
        self._read()
        return any(kind in known for known in self._misfits.values())

    def verdict(self, decoder: Backend, prefiller: Backend | None = None) -> HandoffVerdict:
        """What it makes of KV that is handed over to it: from this prefiller where that is known, or altogether."""
        if self.versions[0] != self._read_version:
            self._read()
        verdict = self._verdicts.get(decoder.name, _UNKNOWN)
        if self._divided and prefiller is not None:
            return self._divided.get(decoder.name, {}).get(prefiller.name, verdict)
        return verdict

    def pairs(self, decoder: Backend) -> Mapping[str, HandoffVerdict]:
        """What it makes of the KV of those prefillers, by name, of which that is known."""
        self._read()
        return self._pairs.get(decoder.name, {})

    # What changes it

    def add(self, backend: Backend, kind: IncompatibilityKind, hint: str) -> bool:
        """A backend does not fit in this way. Whether that is news, which is to be logged."""
        if self.has(backend, kind):
            return False
        with self._shared.exclusive():
            self._read()
            known = self._misfits.setdefault(backend.name, {})
            if kind in known:
                return False
            known[kind] = Incompatibility(kind, hint[:_MAX_HINT], self._clock())
            if sum(map(len, self._misfits.values())) > self._max_misfits:
                del known[kind]  # logged as often as it is found, then, and not listed
                return True
            self._write()
            return True

    def remove(self, backend: Backend, kind: IncompatibilityKind) -> bool:
        """A backend fits in this way again. Whether that is news, which is to be logged."""
        if not self.has(backend, kind):
            return False
        with self._shared.exclusive():
            self._read()
            known = self._misfits.get(backend.name, {})
            if known.pop(kind, None) is None:
                return False
            if not known:
                del self._misfits[backend.name]
            self._write()
            return True

    def judge(
        self, decoder: Backend, verdict: HandoffVerdict, pairs: Mapping[str, HandoffVerdict] | None = None
    ) -> None:
        """Keep what was found about a decoder: altogether, and with each prefiller, by name, of which that is known."""
        pairs = {} if pairs is None else dict(pairs)
        if self.verdict(decoder) is verdict and self._pairs.get(decoder.name, {}) == pairs:
            return
        with self._shared.exclusive():
            self._read()
            self._verdicts[decoder.name], self._pairs[decoder.name] = verdict, pairs
            if verdict is HandoffVerdict.UNKNOWN and not pairs:
                del self._verdicts[decoder.name], self._pairs[decoder.name]
            elif sum(map(len, self._pairs.values())) > _MAX_PAIRS:
                self._pairs[decoder.name] = {}
            self._write()

    def forget(self, backend: Backend) -> None:
        """A backend has left."""
        self._read()
        if not any(
            (
                backend.name in self._misfits,
                backend.name in self._verdicts,
                *(backend.name in pairs for pairs in self._pairs.values()),
            )
        ):
            return
        with self._shared.exclusive():
            self._read()
            self._misfits.pop(backend.name, None)
            self._verdicts.pop(backend.name, None)
            self._pairs.pop(backend.name, None)
            for pairs in self._pairs.values():
                pairs.pop(backend.name, None)
            self._write()

    # How

    def _read(self) -> None:
        if self._shared.version == self._read_version:
            return
        self._read_version, (misfits, verdicts) = self._shared.read()
        self._misfits, self._verdicts, self._pairs = {}, {}, {}
        for name, verdict, pairs in verdicts:
            self._verdicts[name] = HandoffVerdict(verdict)
            self._pairs[name] = {prefiller: HandoffVerdict(of_pair) for prefiller, of_pair in pairs.items()}
        self._divided = {
            name: pairs for name, pairs in self._pairs.items() if set(pairs.values()) - {self._verdicts[name]}
        }
        for name, kind, hint, since in misfits:
            self._misfits.setdefault(name, {})[IncompatibilityKind(kind)] = Incompatibility(
                IncompatibilityKind(kind), hint, since
            )

    def _write(self) -> None:
        misfits: list[Any] = [
            (name, misfit.kind, misfit.hint, misfit.since)
            for name, known in self._misfits.items()
            for misfit in known.values()
        ]
        verdicts = [(name, verdict, self._pairs[name]) for name, verdict in self._verdicts.items()]
        self._shared.write((misfits, verdicts))


NO_KV_PARAMS: Final = (
    "answers prefills without kv_transfer_params, so decoders compute its prompts again: check its "
    "--kv-transfer-config, and that this gateway's connector serves it"
)

_NO_KV_PARAMS: Final = IncompatibilityKind.NO_KV_PARAMS  # to read a member off its class takes as long as four calls

# Answers in a row. A request may ask the same prefiller twice.
_LEAST_WITHOUT_PARAMS: Final = 3


class CompatibilityMonitor:
    """One worker's findings. `row` is its own. `on_change` hears of a backend, a kind, and the hint; None: it fits
    again.
    """

    def __init__(
        self,
        misfits: Incompatibilities,
        row: LoadRow,
        keys: EngineKeys,
        on_change: Callable[[Backend, IncompatibilityKind, str | None], None] = lambda *_: None,
    ) -> None:
        self.misfits = misfits
        self._row = row
        self._keys = keys
        self._on_change = on_change
        self.versions = misfits.versions
        self.takes_key_at = -1
        """The version of misfits at which all backends took this gateway's key: none of them has to be looked up."""
        self._without_params: dict[Backend, int] = {}  # answers in a row

    def report(self, backend: Backend, kind: IncompatibilityKind, hint: str | None) -> None:
        """An instance does not fit in one way, and why; None: it does fit."""
        is_news = self.misfits.remove(backend, kind) if hint is None else self.misfits.add(backend, kind, hint)
        if is_news:
            self._on_change(backend, kind, hint)

    def note_handoff(self, prefiller: Backend, decoder: Backend, tokens: int, least_tokens: int) -> HandoffVerdict:
        """A decoder has answered a prompt of about `tokens` tokens whose KV it was to fetch from this prefiller: what
        becomes of that KV. From a prompt of less than `least_tokens` nothing follows.
        """
        if tokens >= least_tokens:
            self._row.count_handoff(prefiller.slot, decoder.slot, tokens)
        return self.misfits.verdict(decoder, prefiller)

    def prefilled(self, prefiller: Backend, has_params: bool) -> None:
        """A prefiller has answered, with something for a decoder to fetch or without."""
        if has_params:
            if self._without_params:
                self._without_params.pop(prefiller, None)
            if self.misfits.has(prefiller, _NO_KV_PARAMS):
                self.report(prefiller, _NO_KV_PARAMS, None)
            return
        count = self._without_params[prefiller] = self._without_params.get(prefiller, 0) + 1
        if count >= _LEAST_WITHOUT_PARAMS:
            self.report(prefiller, _NO_KV_PARAMS, NO_KV_PARAMS)

    def refused_key(self, backend: Backend) -> None:
        """A backend has answered 401, and has served no request yet."""
        self.report(backend, IncompatibilityKind.ENGINE_KEY, self._keys.advice(backend))

    def served(self, backend: Backend) -> None:
        """A backend has served a request."""
        version = self.versions[0]
        if self.misfits.has(backend, IncompatibilityKind.ENGINE_KEY):
            self.report(backend, IncompatibilityKind.ENGINE_KEY, None)
        elif not self.misfits.has_any(IncompatibilityKind.ENGINE_KEY):
            self.takes_key_at = version

    def forget(self, backend: Backend) -> None:
        """A backend has left."""
        self._without_params.pop(backend, None)
        self.misfits.forget(backend)
