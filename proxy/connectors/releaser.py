"""Finds KV cache that a prefiller keeps and no decoder fetches, counts it, and releases it where possible.

No engine has a request that frees KV. But a decoder that rejects a request makes the prefiller named in it free the KV,
so the Releaser sends a request that no engine can serve. Other engines free the KV after a time. Until then, the
gateway counts it. KV connectors of engines differ by version. pdproxy recognises them by their parameters, of which it
reads only the presence of members that one connector alone writes.
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

from proxy.balancer.engines import ASCEND_MOONCAKE_RELEASE, NIXL_LEASE, NIXL_RELEASE, Capability, EngineVersion
from proxy.balancer.handoff_verdicts import HandoffVerdict
from proxy.common.background import BackgroundOwner, BackgroundTasks
from proxy.common.errors import Failure, NoBackendAvailable, UpstreamError
from proxy.wire.ids import make_request_id
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from proxy.balancer.incompatibilities import Incompatibilities
    from proxy.balancer.models import ServedModels
    from proxy.balancer.pool import Pools
    from proxy.balancer.shared.scoreboard import KvPin, PinnedKv
    from proxy.common.backend import Backend
    from proxy.observe.metrics import Metrics
    from proxy.settings.live import LiveSettings
    from proxy.upstream import Upstream


class KvTransfer(StrEnum):
    """The types of KV connectors of engines. Each type releases KV in its own way."""

    NIXL = "nixl"
    NIXL_PUSH = "nixl_push"
    """vLLM's NixlPushConnector. Its decoders send nothing that frees KV (`request_finished` in push_scheduler.py)."""
    ASCEND_MOONCAKE = "ascend_mooncake"
    """vLLM-Ascend's MooncakeConnectorV1, alias MooncakeConnector."""
    OTHER = "other"
    """An unknown connector, or one whose KV cannot be released."""


@dataclass(slots=True, eq=False)
class PrefilledKv:
    """KV cache that a prefiller keeps for a decoder.

    `params`: its KV parameters, verbatim. `tokens`: the estimated number of tokens. `headers`: the client's headers for
    engines, because engines may require the client's credential.
    """

    prefiller: Backend
    params: bytes
    transfer: KvTransfer
    tokens: int
    headers: Mapping[str, str]
    survives_rejected_decode: bool = False
    """Whether the prefiller still keeps the KV after a decoder has given up before its first output."""


_NIXL_TRANSFER: Final = KvTransfer.NIXL  # reading a member off its class takes as long as four calls
_RELEASE_CAPABILITIES: Final[Mapping[KvTransfer, Capability]] = {
    KvTransfer.NIXL: NIXL_RELEASE,
    KvTransfer.ASCEND_MOONCAKE: ASCEND_MOONCAKE_RELEASE,
}

# vLLM's `kv_lease_duration` unless configured.
_NIXL_LEASE_SECONDS: Final = 30.0
# VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT and VLLM_NIXL_ABORT_REQUEST_TIMEOUT, unless configured.
_ENGINE_ABORT_SECONDS: Final = 480.0


class KvParams(msgspec.Struct):
    """The members that the gateway reads of a prefiller's KV parameters."""

    do_remote_prefill: Any = None
    """True if the decoder must fetch KV."""
    tp_size: Any = msgspec.UNSET
    transfer_mode: Any = None
    remote_pcp_size: Any = msgspec.UNSET

    @property
    def transfer_protocol(self) -> KvTransfer:
        """The connector that wrote these parameters, recognised by a member that only its `request_finished` writes."""
        if self.tp_size is not msgspec.UNSET:  # vLLM's nixl/pull_scheduler.py and nixl/push_scheduler.py
            return KvTransfer.NIXL_PUSH if self.transfer_mode == "push" else _NIXL_TRANSFER
        # vllm-ascend's mooncake_connector.py; neither its mooncake_hybrid_connector.py nor its
        # mooncake/pull_scheduler.py (MooncakeConnectorV2).
        return KvTransfer.OTHER if self.remote_pcp_size is msgspec.UNSET else KvTransfer.ASCEND_MOONCAKE


parse_kv_params = msgspec.json.Decoder(KvParams).decode
"""Parse the KV parameters in an answer. Raises msgspec.DecodeError if they are not an object."""


def releases_kv_of_rejected_request(transfer: KvTransfer, decoder: EngineVersion | None) -> bool:
    """Return whether a decoder of this version frees KV when it rejects a request. `decoder` None: it is unknown."""
    release = _RELEASE_CAPABILITIES.get(transfer)
    return release is not None and release.is_in_vllm_version(decoder)


def kv_pin_seconds(transfer: KvTransfer, prefiller: EngineVersion | None) -> float:
    """Return how many seconds a prefiller keeps KV that no decoder fetches. `prefiller` None: it is unknown."""
    has_lease = transfer in (_NIXL_TRANSFER, KvTransfer.NIXL_PUSH) and NIXL_LEASE.is_in_vllm_version(prefiller)
    return _NIXL_LEASE_SECONDS if has_lease else _ENGINE_ABORT_SECONDS


logger = logging.getLogger(__name__)

RELEASE_MODEL: Final = "pdproxy-release-kv"
"""The name of a model that no engine serves. Release requests use it, and engines name it when they reject them."""

# A decoder whose request was cancelled may be in the middle of the transfer. If the blocks were freed and written again
# before it stops, it could keep another prompt's KV in its prefix cache.
TRANSFER_SETTLE_SECONDS: Final = 0.2
"""Seconds between the end of a request and the first attempt to release its KV. The pause then doubles each time."""

# Reading a member off its class takes as long as four calls.
_COMPUTED_VERDICT: Final = HandoffVerdict.COMPUTED
_UNKNOWN_VERDICT: Final = HandoffVerdict.UNKNOWN

_MAX_PAUSE_SECONDS: Final = 5.0
_RELEASE_TIMEOUT_SECONDS: Final = 5.0
_SHUTDOWN_SECONDS: Final = 1.0
_MAX_PENDING_RELEASES: Final = 256
_MAX_DOUBTFUL_KV: Final = 256
_MAX_CONCURRENT_RELEASES: Final = 8


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReleaserParts:
    """The parts of one worker that a Releaser uses."""

    pools: Pools
    upstream: Upstream
    pinned_kv: PinnedKv
    incompatibilities: Incompatibilities
    models: ServedModels
    metrics: Metrics
    settle_seconds: float = TRANSFER_SETTLE_SECONDS
    """Seconds to wait before the first attempt to release KV."""


class KvReleaser(BackgroundOwner):
    """Counts KV that no decoder fetches, and releases it. An async context manager; one per worker.

    A release starts after `settle_seconds`, outlives its request, and does not affect the health of the decoder that
    gets it. If no decoder answers, it is repeated while the KV is pinned, for at most `admission.wait_seconds`, because
    decoders may be restarting. Leaving the context gives pending releases a second to end.
    """

    def __init__(self, parts: ReleaserParts, live: LiveSettings) -> None:
        self._live = live
        self._pools = parts.pools
        self._upstream = parts.upstream
        self._pinned_kv = parts.pinned_kv
        self._incompatibilities = parts.incompatibilities
        self._models = parts.models
        self._metrics = parts.metrics
        self._settle_seconds = parts.settle_seconds
        # All engines of a deployment have the same connector, so this is also that of an answer that was lost.
        self.last_transfer = KvTransfer.OTHER
        """The KV connector of the last prefiller that reported KV for a decoder."""
        self._doubtful: dict[str, tuple[Backend, deque[tuple[Backend, int, KvTransfer, float]]]] = {}
        """KV that was left to decoders of which it is not known whether they fetch KV, by the decoder's key.

        Each entry has the prefiller, tokens, connector, and the time of the decoder's answer on the monotonic clock.
        """
        self._pins: dict[tuple[str, KvTransfer], float] = {}
        """Cached results of `kv_pin_seconds`, by prefiller key and connector, because every request needs one."""
        self._pins_of = -1
        """The change counter of the prefiller pool at the time when the cache was filled."""
        self._background = BackgroundTasks(logger, "a release of KV", grace_seconds=_SHUTDOWN_SECONDS)
        self._release_slots = asyncio.Semaphore(_MAX_CONCURRENT_RELEASES)

    @property
    def pending_count(self) -> int:
        """The number of releases that have not ended."""
        return len(self._background)

    def add_orphan(self, kv: PrefilledKv, failed: Collection[Backend]) -> None:
        """Count KV cache that probably no decoder has fetched, and release it at its prefiller.

        `failed`: backends that are used for the release only if there is no other.
        """
        self._metrics.kv_orphans_total.inc()
        pin = self._pinned_kv.add_pin(kv.prefiller, kv.tokens, self.pin_seconds(kv.prefiller, kv.transfer))
        if self._live.settings.kv.release == "never":
            return
        if not self._is_release_supported(kv):
            self._record_release_result(kv, "unsupported")
        elif len(self._background) >= _MAX_PENDING_RELEASES:
            self._record_release_result(kv, "failed")
        else:
            self._background.start_task(self._release_orphan(kv, pin, failed))

    def pin_answer(self, decoder: Backend, tokens: int, seconds: float) -> KvPin:
        """Count the KV cache of an answer that a decoder keeps for a prefiller."""
        return self._pinned_kv.add_pin(decoder, tokens, seconds)

    def unpin_answer(self, pin: KvPin) -> None:
        """Record that an engine has freed the KV cache of an answer before its time."""
        self._pinned_kv.remove_pin(pin)

    def record_fetch(
        self, kv: PrefilledKv, decoder: Backend, verdict: HandoffVerdict, failed: Collection[Backend]
    ) -> None:
        """Record the answer of a decoder that should have fetched KV.

        A decoder that computes prompts again leaves the KV at the prefiller. If it is not known whether this decoder
        does so, the KV is remembered until it is known.
        """
        if verdict is _COMPUTED_VERDICT:
            self.add_orphan(kv, {*failed, decoder})
        elif verdict is _UNKNOWN_VERDICT:
            doubtful = self._doubtful.get(decoder.key)
            if doubtful is None:
                doubtful = self._doubtful[decoder.key] = decoder, deque(maxlen=_MAX_DOUBTFUL_KV)
            doubtful[1].append((kv.prefiller, kv.tokens, kv.transfer, time.monotonic()))

    def check_doubtful_kv(self) -> None:
        """Count or drop the KV of decoders that are now known to fetch KV or not. Must be called periodically."""
        for decoder, doubtful in list(self._doubtful.values()):
            if self._incompatibilities.handoff_verdict(decoder) is not HandoffVerdict.UNKNOWN:
                del self._doubtful[decoder.key]
                self._pin_doubtful_kv(decoder, doubtful)

    def _pin_doubtful_kv(self, decoder: Backend, doubtful: Iterable[tuple[Backend, int, KvTransfer, float]]) -> None:
        now = time.monotonic()
        for prefiller, tokens, transfer, answered_at in doubtful:
            until = answered_at + self.pin_seconds(prefiller, transfer)
            is_orphan = (
                until > now and self._incompatibilities.handoff_verdict(decoder, prefiller) is HandoffVerdict.COMPUTED
            )
            if is_orphan and prefiller in self._pools.prefill.all_backends():
                self._metrics.kv_orphans_total.inc()
                self._pinned_kv.add_pin(prefiller, tokens, until - now)

    def add_possible_orphan(self, prefiller: Backend, tokens: int, error: UpstreamError) -> None:
        """Count KV that a prefiller may keep although its answer was lost. Such KV cannot be released."""
        if may_have_pinned_kv(error):
            seconds = self.pin_seconds(prefiller, self.last_transfer)
            self._pinned_kv.add_pin(prefiller, tokens, seconds, is_suspected=True)

    async def _release_orphan(self, kv: PrefilledKv, pin: KvPin, failed: Collection[Backend]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + min(self._live.settings.admission.wait_seconds, pin.expires_at - pin.pinned_at)
        avoid = set(failed)
        pause_seconds = self._settle_seconds
        while True:
            await asyncio.sleep(pause_seconds)
            async with self._release_slots:
                released = await self._request_release(kv, avoid)
            left_seconds = until - loop.time()
            if released is not None or left_seconds <= 0:
                break
            pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS, left_seconds)
            logger.debug(
                "kv release: no decode instance has released the KV yet: prefill instance %s", kv.prefiller.name
            )
        if released:
            self._pinned_kv.remove_pin(pin)
        self._record_release_result(kv, "released" if released else "failed")

    async def _request_release(self, kv: PrefilledKv, failed: set[Backend]) -> bool | None:
        """Send a decoder a request that names the KV. Return whether the decoder rejected the request.

        None: another attempt is worthwhile, because no decoder was available, or because the decoder failed or was
        busy. Such a decoder is added to `failed`.
        """
        # The KV is gone with its prefiller, and a decoder should not try to connect to a missing one.
        prefillers = self._pools.prefill
        if kv.prefiller not in prefillers.all_backends() or not prefillers.health.health_of(kv.prefiller).is_healthy:
            return False
        body = {
            "model": RELEASE_MODEL,
            "prompt": "x",
            "max_tokens": 1,
            "kv_transfer_params": orjson.Fragment(kv.params),
        }
        try:
            decoder = self._choose_decoder(kv, failed)
            response, answer = await self._upstream.post_and_read_body(
                decoder,
                Api.COMPLETIONS.path,
                orjson.dumps(body),
                {**kv.headers, "x-request-id": make_request_id()},
                answer_seconds=_RELEASE_TIMEOUT_SECONDS,
            )
        except NoBackendAvailable:
            return None
        except UpstreamError as error:
            failed.add(error.backend)
            return None
        if response.status == 429 or response.status >= 500:
            failed.add(decoder)
            return None
        # An engine that accepts any model name (VLLM_SKIP_MODEL_NAME_VALIDATION) fetches the KV, which also frees it.
        return response.status == 200 or (response.status in (400, 404) and RELEASE_MODEL.encode() in answer)

    def _choose_decoder(self, kv: PrefilledKv, failed: Collection[Backend]) -> Backend:
        """Return a decoder that can release this KV, preferably one that has not failed. Raises NoBackendAvailable."""
        decoders = self._pools.decode
        unable = {backend for backend in decoders.eligible_backends() if not self._can_release(backend, kv)}
        try:
            return decoders.pick_backend(unable.union(failed))
        except NoBackendAvailable:
            return decoders.pick_backend(unable)

    def _is_release_supported(self, kv: PrefilledKv) -> bool:
        """Return whether any decoder can release this KV. True also if there are no decoders at present."""
        decoders = self._pools.decode.eligible_backends()
        return not decoders or any(self._can_release(decoder, kv) for decoder in decoders)

    def _can_release(self, decoder: Backend, kv: PrefilledKv) -> bool:
        """Return whether a decoder can release KV cache that a prefiller keeps.

        A decoder that fetches no KV sends prefillers no messages, and one of another model must not connect to them.
        """
        is_able = releases_kv_of_rejected_request(kv.transfer, self._pools.decode.engine_version_of(decoder))
        is_computing = self._incompatibilities.handoff_verdict(decoder) is HandoffVerdict.COMPUTED
        return is_able and not is_computing and not self._models.have_no_common_model(kv.prefiller, decoder)

    def pin_seconds(self, prefiller: Backend, transfer: KvTransfer) -> float:
        """Return how many seconds a prefiller keeps KV that no decoder fetches."""
        if self._live.settings.kv.pin_seconds is not None:
            return self._live.settings.kv.pin_seconds
        pool = self._pools.prefill
        if pool.change_count != self._pins_of:
            self._pins_of = pool.change_count
            self._pins.clear()
        seconds = self._pins.get((prefiller.key, transfer))
        if seconds is None:
            seconds = self._pins[prefiller.key, transfer] = kv_pin_seconds(transfer, pool.engine_version_of(prefiller))
        return seconds

    def _record_release_result(self, kv: PrefilledKv, result: str) -> None:
        self._metrics.kv_released_total.labels(result).inc()
        logger.debug("kv release: %s: prefill instance %s", result, kv.prefiller.name)


def may_have_pinned_kv(error: UpstreamError) -> bool:
    """Return whether a prefiller may keep KV although its answer did not arrive.

    A failed or rejected prefill keeps nothing. But the answer of a finished prefill may be lost in the engine, which
    then answers 500 (a forced tool call in vLLM 0.18), or on the way. Engines send 503 and 429 before the work.
    """
    if error.failure is Failure.STATUS:
        return error.engine_status is not None and error.engine_status >= 500 and error.engine_status != 503
    return error.failure in (Failure.RESET, Failure.TIMEOUT, Failure.BAD_ANSWER, Failure.BROKEN, Failure.REMOVED)
