"""Looks whether instances fit each other and this gateway. What is wrong is told once, and once that it is over.

An instance that does not fit is well, so the Prober has nothing to say of it, and answers do not show it. What became
of the KV that decoders were handed is read from their `/metrics`, by one worker for all, and only while there are
hand-overs. Nothing here outlives the `async with`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import aiohttp

from proxy import logs
from proxy.background import Background
from proxy.balancer.backend import Role
from proxy.balancer.handovers import Verdict, Watch
from proxy.balancer.misfits import MisfitKind
from proxy.balancer.models import odd_ones
from proxy.balancer.recognition import Told, unsuited
from proxy.upstream import read_bounded
from proxy.wire.exposition import PromptTokens, parse_prompt_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from proxy.balancer.backend import Backend
    from proxy.balancer.engine_facts import Identity
    from proxy.balancer.engine_keys import EngineKeys
    from proxy.balancer.fitness import Fitness
    from proxy.balancer.health import Health
    from proxy.balancer.pool import Pool
    from proxy.balancer.scoreboard import Handovers, Scoreboard
    from proxy.metrics import Metrics

logger = logging.getLogger(__name__)

_METRICS_PATH: Final = "/metrics"
_METRICS_TIMEOUT: Final = aiohttp.ClientTimeout(total=5.0)
_MAX_METRICS_BYTES: Final = 4 * 1024 * 1024
_LOOK_SECONDS: Final = 1.0
# To render its counters costs an engine some milliseconds, in which it streams nothing.
_SELDOM: Final = 4

_NOT_FETCHED: Final = (
    "does not fetch the KV cache it is handed: it computes the prompts of prefilled requests once more, and KV stays "
    "pinned on the prefillers. Is --kv-transfer-config set, with the connector that the prefillers have?"
)
_NOT_STORED: Final = (
    "finds nothing in the KV store: it computes the prompts of prefilled requests once more. Has it the same store as "
    "the prefillers, and do block size and PYTHONHASHSEED agree?"
)
_FITS_AGAIN: Final[Mapping[MisfitKind, str]] = {
    MisfitKind.KV_NOT_FETCHED: "it fetches the KV cache it is handed",
    MisfitKind.NO_KV_PARAMS: "its answers tell decoders what to fetch",
    MisfitKind.CONNECTOR: "it runs what this gateway's connector serves",
    MisfitKind.ROLE: "it has the role it was given",
    MisfitKind.BOOTSTRAP: "its bootstrap server answers",
    MisfitKind.MODEL: "it serves the model that the others serve",
    MisfitKind.ENGINE_KEY: "it takes the key",
    MisfitKind.GATEWAY: "it is an engine",
}


def log_misfit(backend: Backend, kind: MisfitKind, hint: str | None) -> None:
    """One line for an instance that does not fit, or, with None, fits again."""
    if hint is None:
        what = (backend.role, backend.name, _FITS_AGAIN[kind])
        logger.info("%s instance %s fits again: %s", *what, extra=logs.ALWAYS)
    else:
        logger.warning("%s instance %s %s", backend.role, backend.name, hint, extra=logs.ALWAYS)


@dataclass(slots=True)
class _Decoder:
    """What is known of one decoder since it came up."""

    watch: Watch
    looked_at: Handovers | None = None
    """The hand-overs before the last reading; None: there was none."""
    due: float = 0.0
    """Loop time before which it is not read again."""
    is_being_read: bool = False


class Inspector:
    """One worker's. `async with` it. `reads`: this is the worker that reads decoders' counters."""

    def __init__(
        self,
        pools: Mapping[Role, Pool],
        scoreboard: Scoreboard,
        health: Health,
        fitness: Fitness,
        session: aiohttp.ClientSession,
        keys: EngineKeys,
        metrics: Metrics,
        interval_seconds: float,
        connector: str,
        *,
        reads: bool,
    ) -> None:
        """`interval_seconds`: between two readings of a decoder's counters, 0 for never."""
        self._pools = pools
        self._scoreboard = scoreboard
        self._health = health
        self._fitness = fitness
        self._session = session
        self._keys = keys
        self._metrics = metrics
        self._interval_seconds = interval_seconds
        self._connector = connector
        self._from_store = connector == "vllm_store"
        self._reads = reads and Role.PREFILL in pools
        self._told: dict[Backend, Identity] = {}
        self._told_kinds = [MisfitKind.GATEWAY, MisfitKind.CONNECTOR, MisfitKind.ROLE]
        """What engines tell by themselves. Of vLLM's bootstrap servers only traffic tells."""
        if connector == "sglang_bootstrap":
            self._told_kinds.append(MisfitKind.BOOTSTRAP)
        self._decoders: dict[Backend, _Decoder] = {}
        self._background = Background(logger, "a look at instances")

    async def __aenter__(self) -> Self:
        await self._background.__aenter__()
        self._background.start(self._keep_looking())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._background.__aexit__(kind, error, trace)

    def configure(self, interval_seconds: float) -> None:
        """Take a changed interval for the looks from now on."""
        self._interval_seconds = interval_seconds

    async def _keep_looking(self) -> None:
        while True:
            self._compare()
            if self._reads and self._interval_seconds:
                self._start_due_readings()
            await asyncio.sleep(min(_LOOK_SECONDS, self._interval_seconds or _LOOK_SECONDS))

    # What engines say they are

    def _compare(self) -> None:
        """Look at the engines that have told something new of themselves, and then at all of them together."""
        told = {
            backend: facts.identity
            for role, pool in self._pools.items()
            if role is not Role.ENCODE
            for backend in pool.backends()
            if (facts := self._health.facts(backend)) is not None
        }
        if told == self._told:
            return
        for backend, identity in told.items():
            if identity != self._told.get(backend):
                self._look_at(backend, identity)
        odd = odd_ones({backend: identity.models for backend, identity in told.items() if identity.models})
        for backend, identity in told.items():
            if identity.models:
                self._fitness.report(backend, MisfitKind.MODEL, odd.get(backend))
        self._told = told

    def _look_at(self, backend: Backend, identity: Identity) -> None:
        told = Told(backend.role, backend.name, identity)
        kind, hint = unsuited(told, self._connector, backend.bootstrap_port) or (None, "")
        for its_kind in self._told_kinds:
            if its_kind is kind:
                self._fitness.report(backend, its_kind, hint)
            elif identity.setup is not None:  # otherwise there may be more to come
                self._fitness.report(backend, its_kind, None)
        if not identity.refused_key:
            self._fitness.report(backend, MisfitKind.ENGINE_KEY, None)
        elif not self._keys.passes_on:
            self._fitness.refused_key(backend)

    # What decoders make of KV

    def _start_due_readings(self) -> None:
        pool = self._pools[Role.DECODE]
        now = asyncio.get_running_loop().time()
        for gone in self._decoders.keys() - set(pool.backends()):
            del self._decoders[gone]
        for backend in pool.backends():
            if self._health.facts(backend) is None:  # it is not up, and will count from 0 when it is again
                if self._decoders.pop(backend, None) is not None:
                    self._fitness.misfits.judge(backend, Verdict.UNKNOWN)
                continue
            known = self._decoders.setdefault(backend, _Decoder(Watch(self._from_store)))
            is_new = known.looked_at != self._scoreboard.handovers(backend.slot)
            if is_new and now >= known.due and not known.is_being_read:
                known.is_being_read = True
                self._background.start(self._read(backend, known))

    async def _read(self, backend: Backend, known: _Decoder) -> None:
        sent = self._scoreboard.handovers(backend.slot)
        try:
            told = await self._ask(backend)
        finally:
            known.is_being_read = False
        known.looked_at = sent
        found = known.watch.read(told, sent)
        is_well = found is not None and found[0] is Verdict.TRANSFERRED
        known.due = asyncio.get_running_loop().time() + self._interval_seconds * (_SELDOM if is_well else 1)
        if found is None or self._decoders.get(backend) is not known:
            return
        verdict, count = found
        self._metrics.handovers_total.labels(verdict.value).inc(count)
        self._fitness.misfits.judge(backend, verdict)
        if verdict is not Verdict.UNKNOWN:
            hint = _NOT_STORED if self._from_store else _NOT_FETCHED
            self._fitness.report(backend, MisfitKind.KV_NOT_FETCHED, None if is_well else hint)

    async def _ask(self, backend: Backend) -> PromptTokens | None:
        """Its counters; None when it tells none."""
        headers = self._keys.headers(backend)
        try:
            async with self._session.get(
                backend.url + _METRICS_PATH, headers=headers, timeout=_METRICS_TIMEOUT, allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    return None
                return parse_prompt_tokens(await read_bounded(answer, _MAX_METRICS_BYTES))
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
