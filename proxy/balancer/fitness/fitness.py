"""What one worker's traffic tells about whether engines fit: it counts hand-overs and notices what answers lack.

Findings go to Misfits, which all workers share; the worker that finds something new logs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proxy.balancer.fitness.misfits import MisfitKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.balancer.engines.engine_keys import EngineKeys
    from proxy.balancer.fitness.handovers import Verdict
    from proxy.balancer.fitness.misfits import Misfits
    from proxy.balancer.shared.scoreboard import LoadRow
    from proxy.common.backend import Backend

NO_KV_PARAMS: Final = (
    "answers prefills without kv_transfer_params, so decoders compute its prompts again: check its "
    "--kv-transfer-config, and that this gateway's connector serves it"
)

_NO_KV_PARAMS: Final = MisfitKind.NO_KV_PARAMS  # to read a member off its class takes as long as four calls

# Answers in a row. A request may ask the same prefiller twice.
_LEAST_WITHOUT_PARAMS: Final = 3


class Fitness:
    """One worker's findings. `row` is its own. `on_change` hears of a backend, a kind, and the hint; None: it fits
    again.
    """

    def __init__(
        self,
        misfits: Misfits,
        row: LoadRow,
        keys: EngineKeys,
        on_change: Callable[[Backend, MisfitKind, str | None], None] = lambda *_: None,
    ) -> None:
        self.misfits = misfits
        self._row = row
        self._keys = keys
        self._on_change = on_change
        self.versions = misfits.versions
        self.takes_key_at = -1
        """The version of misfits at which all backends took this gateway's key: none of them has to be looked up."""
        self._without_params: dict[Backend, int] = {}  # answers in a row

    def report(self, backend: Backend, kind: MisfitKind, hint: str | None) -> None:
        """An instance does not fit in one way, and why; None: it does fit."""
        is_news = self.misfits.remove(backend, kind) if hint is None else self.misfits.add(backend, kind, hint)
        if is_news:
            self._on_change(backend, kind, hint)

    def handed_over(self, prefiller: Backend, decoder: Backend, tokens: int, least_tokens: int) -> Verdict:
        """A decoder has answered a prompt of about `tokens` tokens whose KV it was to fetch from this prefiller: what
        becomes of that KV. From a prompt of less than `least_tokens` nothing follows.
        """
        if tokens >= least_tokens:
            self._row.hand_over(prefiller.slot, decoder.slot, tokens)
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
        self.report(backend, MisfitKind.ENGINE_KEY, self._keys.advice(backend))

    def served(self, backend: Backend) -> None:
        """A backend has served a request."""
        version = self.versions[0]
        if self.misfits.has(backend, MisfitKind.ENGINE_KEY):
            self.report(backend, MisfitKind.ENGINE_KEY, None)
        elif not self.misfits.has_any(MisfitKind.ENGINE_KEY):
            self.takes_key_at = version

    def forget(self, backend: Backend) -> None:
        """A backend has left."""
        self._without_params.pop(backend, None)
        self.misfits.forget(backend)
