"""Log lines about incompatible instances and pairs, and their hints for the operator."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from proxy.balancer.incompatibilities import IncompatibilityKind
from proxy.common.backend import Role
from proxy.observe import logs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.common.backend import Backend

logger = logging.getLogger("proxy.inspector.telling")

NOT_FETCHED: Final[Mapping[Role, str]] = {
    Role.DECODE: (
        "does not fetch the KV cache that prefillers offer: it computes these prompts again, and KV stays pinned on "
        "the prefillers. Is --kv-transfer-config set, with the connector that the prefillers have?"
    ),
    Role.PREFILL: (
        "keeps KV that no decoder fetches, while decoders fetch the KV of others: they compute its prompts again. Is "
        "it reached at the address in its kv_transfer_params (VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT), and is its "
        "--kv-transfer-config that of the others?"
    ),
}
"""Hints for instances between which no KV is transferred, by role."""
EXPIRES: Final = (
    "frees KV that no decoder has fetched in time (vllm:nixl_num_kv_expired_reqs_total grows). Is it reached at the "
    "address in its kv_transfer_params (VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT), and what do the decoders' logs say of "
    "handshakes and transfers?"
)
"""Hint for a prefiller whose leases expire."""
NOT_STORED: Final[Mapping[Role, str]] = {
    Role.DECODE: (
        "finds nothing in the KV store: it computes the prompts of prefilled requests again. Has it the same store as "
        "the prefillers, and do block size and PYTHONHASHSEED agree?"
    ),
    Role.PREFILL: (
        "stores nothing that decoders find, while they find the KV of others: they compute its prompts again. Has it "
        "the same store, and do block size and PYTHONHASHSEED agree?"
    ),
}
"""Hints for instances that do not exchange KV through the store, by role."""
_FITS_AGAIN: Final[Mapping[IncompatibilityKind, str]] = {
    IncompatibilityKind.KV_NOT_FETCHED: "it fetches the KV cache that prefillers offer",
    IncompatibilityKind.NO_KV_PARAMS: "its answers have KV parameters for decoders",
    IncompatibilityKind.CONNECTOR: "it runs what this gateway's connector serves",
    IncompatibilityKind.ROLE: "it has its configured role",
    IncompatibilityKind.BOOTSTRAP: "its bootstrap server answers",
    IncompatibilityKind.MODEL: "it serves a model that others serve, too",
    IncompatibilityKind.ENGINE_KEY: "it accepts the key",
    IncompatibilityKind.GATEWAY: "it is an engine",
}


def log_incompatibility(backend: Backend, kind: IncompatibilityKind, hint: str | None) -> None:
    """Log one line for an instance that does not fit. `hint` None: it fits again."""
    if hint is not None:
        logger.warning("inspector: %s instance %s %s", backend.role, backend.name, hint, extra=logs.ALWAYS)
        return
    why = _FITS_AGAIN[kind]
    if kind is IncompatibilityKind.KV_NOT_FETCHED and backend.role is Role.PREFILL:
        why = "decoders fetch its KV"
    logger.info("inspector: %s instance %s fits again: %s", backend.role, backend.name, why, extra=logs.ALWAYS)


def log_pair(prefiller: Backend, decoder: Backend, *, fits: bool) -> None:
    """Log one line for a pair that transfers no KV, although both instances do with others, or that does again."""
    if fits:
        line = "inspector: prefill instance %s and decode instance %s fit again: KV is fetched"
        level = logging.INFO
    else:
        line = (
            "inspector: prefill instance %s and decode instance %s do not fit each other: the decoder computes this "
            "prefiller's prompts again. Does it reach the address in the prefiller's kv_transfer_params?"
        )
        level = logging.WARNING
    logger.log(level, line, prefiller.name, decoder.name, extra=logs.ALWAYS)
