"""What the engines' own KV connectors do with KV that no decoder fetches, told by their parameters and versions.

The parameters stay opaque otherwise: only the presence of a member that one connector alone writes is looked at.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.balancer.engine_facts import EngineVersion


class KvTransfer(StrEnum):
    """An engine's KV connector, as far as it matters here."""

    NIXL = "nixl"
    ASCEND_MOONCAKE = "ascend_mooncake"
    """vLLM-Ascend's MooncakeConnectorV1, alias MooncakeConnector."""
    OTHER = "other"
    """One that has no release, or that this gateway does not know."""


# Members that `request_finished` of one connector writes and that of the others does not: `tp_size` in vLLM's
# nixl/pull_scheduler.py, `remote_pcp_size` in vllm-ascend's mooncake_connector.py, but neither in its
# mooncake_hybrid_connector.py nor in its mooncake/pull_scheduler.py (MooncakeConnectorV2).
_MARKS: Final = {"tp_size": KvTransfer.NIXL, "remote_pcp_size": KvTransfer.ASCEND_MOONCAKE}

# A decoder that rejects a request in its handler has the prefiller free the KV that the request names: vLLM wraps its
# handlers in `_with_kv_transfer_rejection_cleanup` since 0.23. Whether the message goes out is up to the connector.
# NIXL sends it since 0.23, too, but first has to shake hands with a prefiller it does not know yet, and where that
# fails, because the prefiller has just died, the decoder's engine core ends as well (vLLM PR #57570). 0.32 is the first
# version that was read to have the repair; before that it is not worth the risk, as the lease is only 30 s.
# After a handshake the message waits for the engine's next step, so that of an idle decoder may come after the lease.
# vLLM-Ascend's MooncakeConnectorV1 sends it since PR #14142, which no release before 0.28 has.
_RELEASES_SINCE: Final[Mapping[KvTransfer, EngineVersion]] = {
    KvTransfer.NIXL: (0, 32),
    KvTransfer.ASCEND_MOONCAKE: (0, 28),
}

# vLLM's `kv_lease_duration`, which is 30 s unless configured, replaced VLLM_NIXL_ABORT_REQUEST_TIMEOUT in 0.23.
_NIXL_LEASE_SINCE: Final[EngineVersion] = (0, 23)
_NIXL_LEASE_SECONDS: Final = 30.0
# VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT and VLLM_NIXL_ABORT_REQUEST_TIMEOUT, unless configured.
_ABORT_SECONDS: Final = 480.0


def kv_transfer(params: Mapping[str, Any]) -> KvTransfer:
    """Which connector wrote a prefiller's KV parameters."""
    return next((transfer for mark, transfer in _MARKS.items() if mark in params), KvTransfer.OTHER)


def releases_rejected(transfer: KvTransfer, decoder: EngineVersion | None) -> bool:
    """Whether a decoder of this version, None if unknown, may be asked to let KV go by rejecting a request."""
    since = _RELEASES_SINCE.get(transfer)
    return since is not None and decoder is not None and decoder >= since


def pin_seconds(transfer: KvTransfer, prefiller: EngineVersion | None) -> float:
    """How long a prefiller of this version, None if unknown, keeps KV that nobody fetches."""
    has_lease = transfer is KvTransfer.NIXL and prefiller is not None and prefiller >= _NIXL_LEASE_SINCE
    return _NIXL_LEASE_SECONDS if has_lease else _ABORT_SECONDS
