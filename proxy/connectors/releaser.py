"""KV cache that a prefiller keeps and no decoder fetches: noticed, accounted for, and released where possible.

No engine has a request that frees KV. But a decoder that rejects a request makes the prefiller named in it free the KV,
so the Releaser sends a request that no engine can serve. Other engines free the KV after a time, and until then it is
accounted for. What an engine's KV connector does follows from its version and from its parameters, which stay opaque
otherwise: pdproxy reads only the presence of members that one connector alone writes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson

from proxy.balancer.engines.engine_facts import ASCEND_MOONCAKE_RELEASE, NIXL_LEASE, NIXL_RELEASE
from proxy.balancer.fitness.handovers import Verdict
from proxy.common.background import Background, BackgroundOwner
from proxy.common.errors import Failure, NoBackendAvailable, UpstreamError
from proxy.wire.ids import new_id
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from proxy.balancer.engines.engine_facts import Capability, EngineVersion
    from proxy.balancer.fitness.misfits import Misfits
    from proxy.balancer.fitness.pinned_kv import Pin, PinnedKv
    from proxy.balancer.models import ServedModels
    from proxy.balancer.pool import Pools
    from proxy.common.backend import Backend
    from proxy.observe.metrics import Metrics
    from proxy.settings import Settings
    from proxy.upstream import Upstream


class KvTransfer(StrEnum):
    """An engine's KV connector, as far as it matters here."""

    NIXL = "nixl"
    ASCEND_MOONCAKE = "ascend_mooncake"
    """vLLM-Ascend's MooncakeConnectorV1, alias MooncakeConnector."""
    OTHER = "other"
    """A connector that has no release, or that this gateway does not know."""


@dataclass(slots=True, eq=False)
class PrefilledKv:
    """KV that a prefiller keeps for a decoder. `params` are its parameters, verbatim; `tokens` is an estimate.

    `headers` are the client's that are passed on to the engines: its credential may be theirs.
    """

    prefiller: Backend
    params: bytes
    transfer: KvTransfer
    tokens: int
    headers: Mapping[str, str]
    outlives_giving_up: bool = False
    """A decoder that gives up before its first output leaves it where it is."""


_NIXL: Final = KvTransfer.NIXL  # to read a member off its class takes as long as four calls
_RELEASES: Final[Mapping[KvTransfer, Capability]] = {
    KvTransfer.NIXL: NIXL_RELEASE,
    KvTransfer.ASCEND_MOONCAKE: ASCEND_MOONCAKE_RELEASE,
}

# vLLM's `kv_lease_duration` unless configured.
_NIXL_LEASE_SECONDS: Final = 30.0
# VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT and VLLM_NIXL_ABORT_REQUEST_TIMEOUT, unless configured.
_ABORT_SECONDS: Final = 480.0


class KvParams(msgspec.Struct):
    """A prefiller's KV parameters, as far as they are read."""

    do_remote_prefill: Any = None
    """True: the decoder is to fetch something."""
    tp_size: Any = msgspec.UNSET
    remote_pcp_size: Any = msgspec.UNSET

    @property
    def transfer(self) -> KvTransfer:
        """The connector that wrote them, by a member that only its `request_finished` writes."""
        if self.tp_size is not msgspec.UNSET:  # vLLM's nixl/pull_scheduler.py
            return _NIXL
        # vllm-ascend's mooncake_connector.py; neither its mooncake_hybrid_connector.py nor its
        # mooncake/pull_scheduler.py (MooncakeConnectorV2).
        return KvTransfer.OTHER if self.remote_pcp_size is msgspec.UNSET else KvTransfer.ASCEND_MOONCAKE


kv_params_in = msgspec.json.Decoder(KvParams).decode
"""KV parameters as they are written in an answer. Raises msgspec.DecodeError if they are no object."""


def releases_rejected(transfer: KvTransfer, decoder: EngineVersion | None) -> bool:
    """Whether a decoder of this version, None if unknown, may be asked to let KV go by rejecting a request."""
    release = _RELEASES.get(transfer)
    return release is not None and release.is_in(decoder)


def pin_seconds(transfer: KvTransfer, prefiller: EngineVersion | None) -> float:
    """How long a prefiller of this version, None if unknown, keeps KV that no decoder fetches."""
    has_lease = transfer is _NIXL and NIXL_LEASE.is_in(prefiller)
    return _NIXL_LEASE_SECONDS if has_lease else _ABORT_SECONDS


logger = logging.getLogger(__name__)

RELEASE_MODEL: Final = "pdproxy-release-kv"
"""A model that no engine serves. An engine's own rejection names it."""

# A decoder that was told to stop may be in the middle of the transfer. Were the blocks freed and written again before
# it has stopped, it could keep another prompt's KV in its prefix cache.
SETTLE_SECONDS: Final = 0.2
"""How long a decoder that was told to stop is given before the prefiller is told to free the KV. The pause between two
attempts at a release is at first twice as long, and each one twice the one before."""

# To read a member off its class takes as long as four calls.
_COMPUTED: Final = Verdict.COMPUTED
_UNKNOWN: Final = Verdict.UNKNOWN

_MAX_PAUSE_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 5.0
_CLOSING_SECONDS: Final = 1.0
_MAX_PENDING: Final = 256
_MAX_DOUBTFUL: Final = 256
_MAX_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReleaserParts:
    """One worker's parts that a Releaser works with."""

    pools: Pools
    upstream: Upstream
    pinned_kv: PinnedKv
    misfits: Misfits
    models: ServedModels
    metrics: Metrics
    settle_seconds: float = SETTLE_SECONDS
    """How long a release waits."""


class Releaser(BackgroundOwner):
    """One worker's dealings with KV that no decoder fetches. `async with` it; leaving grants pending releases a moment.

    A release waits `settle_seconds`, outlives its request, and says nothing about the health of the decoder that is
    asked. One that no decoder has answered is tried again, for as long as instances are waited for that may be
    restarting, and the KV is pinned.
    """

    def __init__(self, parts: ReleaserParts, settings: Settings) -> None:
        self._pools = parts.pools
        self._upstream = parts.upstream
        self._pinned_kv = parts.pinned_kv
        self._misfits = parts.misfits
        self._models = parts.models
        self._metrics = parts.metrics
        self._settle_seconds = parts.settle_seconds
        # All engines of a deployment speak one protocol, so a lost answer would have named that of the last one.
        self.last_transfer = KvTransfer.OTHER
        """The connector of the last prefiller that answered that it keeps KV."""
        self._doubtful: dict[str, tuple[Backend, deque[tuple[Backend, int, KvTransfer, float]]]] = {}
        """By the keys of decoders that are not yet known to fetch KV: these, and what they were to fetch, as prefiller,
        tokens and connector, and the monotonic second at which they answered."""
        self._pins: dict[tuple[str, KvTransfer], float] = {}
        """How long prefillers, by their keys, keep KV: worked out once, as every request asks."""
        self._pins_of = -1
        """How many changes the pool of prefillers had had by then."""
        self._background = Background(logger, "a release of KV", grace_seconds=_CLOSING_SECONDS)
        self._room = asyncio.Semaphore(_MAX_AT_ONCE)
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Take changed settings for KV that is left behind from now on."""
        self._settings = settings.kv
        self._restart_seconds = settings.admission.wait_seconds

    @property
    def pending(self) -> int:
        """Releases that are not answered yet."""
        return len(self._background)

    def orphaned(self, kv: PrefilledKv, failed: Collection[Backend]) -> None:
        """No decoder is known to have fetched it. `failed` are asked to release it only where there is no other."""
        self._metrics.kv_orphans_total.inc()
        pin = self._pinned_kv.pin(kv.prefiller, kv.tokens, self.pin_seconds(kv.prefiller, kv.transfer))
        if self._settings.release == "never":
            return
        if not self._is_supported(kv):
            self._ended(kv, "unsupported")
        elif len(self._background) >= _MAX_PENDING:
            self._ended(kv, "failed")
        else:
            self._background.start(self._release(kv, pin, failed))

    def fetched(self, kv: PrefilledKv, decoder: Backend, verdict: Verdict, failed: Collection[Backend]) -> None:
        """A decoder has answered to KV it was to fetch, and this is known of what it makes of KV. One that fetches none
        leaves it where it is; as long as nobody knows whether it does, what it was handed is kept in mind.
        """
        if verdict is _COMPUTED:
            self.orphaned(kv, {*failed, decoder})
        elif verdict is _UNKNOWN:
            doubtful = self._doubtful.get(decoder.key)
            if doubtful is None:
                doubtful = self._doubtful[decoder.key] = decoder, deque(maxlen=_MAX_DOUBTFUL)
            doubtful[1].append((kv.prefiller, kv.tokens, kv.transfer, time.monotonic()))

    def look(self) -> None:
        """Take notice of decoders that turned out to fetch nothing, or to fetch. To be called every so often."""
        for decoder, doubtful in list(self._doubtful.values()):
            if self._misfits.verdict(decoder) is not Verdict.UNKNOWN:
                del self._doubtful[decoder.key]
                self._pin(decoder, doubtful)

    def _pin(self, decoder: Backend, doubtful: Iterable[tuple[Backend, int, KvTransfer, float]]) -> None:
        now = time.monotonic()
        for prefiller, tokens, transfer, answered_at in doubtful:
            until = answered_at + self.pin_seconds(prefiller, transfer)
            is_orphan = until > now and self._misfits.verdict(decoder, prefiller) is Verdict.COMPUTED
            if is_orphan and prefiller in self._pools.prefill.backends():
                self._metrics.kv_orphans_total.inc()
                self._pinned_kv.pin(prefiller, tokens, until - now)

    def suspect(self, prefiller: Backend, tokens: int, error: UpstreamError) -> None:
        """A prefiller's answer was lost: if that can have left KV behind, account for it. Nothing can release it."""
        if may_have_pinned(error):
            seconds = self.pin_seconds(prefiller, self.last_transfer)
            self._pinned_kv.pin(prefiller, tokens, seconds, suspected=True)

    async def _release(self, kv: PrefilledKv, pin: Pin, failed: Collection[Backend]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + min(self._restart_seconds, pin.until - pin.since)
        avoid = set(failed)
        pause_seconds = self._settle_seconds
        while True:
            await asyncio.sleep(pause_seconds)
            async with self._room:
                released = await self._ask(kv, avoid)
            left_seconds = until - loop.time()
            if released is not None or left_seconds <= 0:
                break
            pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS, left_seconds)
            logger.debug("no decode instance has released KV on prefill instance %s yet", kv.prefiller.name)
        if released:
            self._pinned_kv.unpin(pin)
        self._ended(kv, "released" if released else "failed")

    async def _ask(self, kv: PrefilledKv, failed: set[Backend]) -> bool | None:
        """Have a decoder reject a request that names the KV; whether one did. None: no decoder could be asked, or the
        one that was broke down or was busy, and is in `failed` now; so it is worth another attempt.
        """
        # KV is gone with its prefiller, and a decoder had better not look for one that is not there.
        prefillers = self._pools.prefill
        if kv.prefiller not in prefillers.backends() or not prefillers.is_healthy(kv.prefiller):
            return False
        body = {
            "model": RELEASE_MODEL,
            "prompt": "x",
            "max_tokens": 1,
            "kv_transfer_params": orjson.Fragment(kv.params),
        }
        try:
            decoder = self._decoder(kv, failed)
            response, answer = await self._upstream.fetch(
                decoder,
                Api.COMPLETIONS.path,
                orjson.dumps(body),
                {**kv.headers, "x-request-id": new_id()},
                answer_seconds=_ANSWER_SECONDS,
            )
        except NoBackendAvailable:
            return None
        except UpstreamError as error:
            failed.add(error.backend)
            return None
        if response.status == 429 or response.status >= 500:
            failed.add(decoder)
            return None
        # An engine that takes any model's name (VLLM_SKIP_MODEL_NAME_VALIDATION) fetches the KV, which frees it, too.
        return response.status == 200 or (response.status in (400, 404) and RELEASE_MODEL.encode() in answer)

    def _decoder(self, kv: PrefilledKv, failed: Collection[Backend]) -> Backend:
        """A decoder that can release, if possible one that has not failed. Raises NoBackendAvailable."""
        decoders = self._pools.decode
        unable = {backend for backend in decoders.eligible() if not self._can_release(backend, kv)}
        try:
            return decoders.pick(unable.union(failed))
        except NoBackendAvailable:
            return decoders.pick(unable)

    def _is_supported(self, kv: PrefilledKv) -> bool:
        """False when there are decoders and none of them can."""
        decoders = self._pools.decode.eligible()
        return not decoders or any(self._can_release(decoder, kv) for decoder in decoders)

    def _can_release(self, decoder: Backend, kv: PrefilledKv) -> bool:
        """Whether a decoder can release KV: one that fetches none has nothing to tell a prefiller either, and one of
        another model had better not shake hands with it.
        """
        is_able = releases_rejected(kv.transfer, self._pools.decode.engine_version(decoder))
        is_computing = self._misfits.verdict(decoder) is Verdict.COMPUTED
        return is_able and not is_computing and not self._models.are_apart(kv.prefiller, decoder)

    def pin_seconds(self, prefiller: Backend, transfer: KvTransfer) -> float:
        """How long a prefiller keeps KV that no decoder fetches."""
        if self._settings.pin_seconds is not None:
            return self._settings.pin_seconds
        pool = self._pools.prefill
        if pool.changes != self._pins_of:
            self._pins_of = pool.changes
            self._pins.clear()
        seconds = self._pins.get((prefiller.key, transfer))
        if seconds is None:
            seconds = self._pins[prefiller.key, transfer] = pin_seconds(transfer, pool.engine_version(prefiller))
        return seconds

    def _ended(self, kv: PrefilledKv, result: str) -> None:
        self._metrics.kv_released_total.labels(result).inc()
        logger.debug("orphaned KV on prefill instance %s: %s", kv.prefiller.name, result)


def may_have_pinned(error: UpstreamError) -> bool:
    """Whether a prefiller may keep KV although its answer did not arrive.

    A prefill that fails or is refused keeps nothing, but its answer may be lost after it was finished: in the engine,
    which then answers 500 (a forced tool call in vLLM 0.18), or on the way. 503 and 429 come before the work.
    """
    if error.failure is Failure.STATUS:
        return error.engine_status is not None and error.engine_status >= 500 and error.engine_status != 503
    return error.failure in (Failure.RESET, Failure.TIMEOUT, Failure.BAD_ANSWER, Failure.BROKEN, Failure.REMOVED)
