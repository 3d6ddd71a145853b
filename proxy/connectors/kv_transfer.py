"""What the engines' own KV connectors do with KV that no decoder fetches, told by their parameters and versions.

The parameters stay opaque otherwise: only the presence of a member that one connector alone writes is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec

from proxy.balancer.engines.engine_facts import ASCEND_MOONCAKE_RELEASE, NIXL_LEASE, NIXL_RELEASE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.balancer.engines.engine_facts import Capability, EngineVersion
    from proxy.common.backend import Backend


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
