"""What is told in the log of instances and pairs that do not fit, and when they do again."""

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
        "does not fetch the KV cache it is handed: it computes the prompts of prefilled requests once more, and KV "
        "stays pinned on the prefillers. Is --kv-transfer-config set, with the connector that the prefillers have?"
    ),
    Role.PREFILL: (
        "keeps KV that no decoder fetches, while they fetch that of others: they compute its prompts once more. Is it "
        "reached at the address in its kv_transfer_params (VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT), and is its "
        "--kv-transfer-config that of the others?"
    ),
}
EXPIRES: Final = (
    "frees KV that it had handed over and that no decoder has fetched in time (vllm:nixl_num_kv_expired_reqs_total "
    "grows). Is it reached at the address in its kv_transfer_params (VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT), and what "
    "do the decoders' logs say of handshakes and transfers?"
)
NOT_STORED: Final[Mapping[Role, str]] = {
    Role.DECODE: (
        "finds nothing in the KV store: it computes the prompts of prefilled requests once more. Has it the same store "
        "as the prefillers, and do block size and PYTHONHASHSEED agree?"
    ),
    Role.PREFILL: (
        "stores nothing that decoders find, while they find what others have stored: they compute its prompts once "
        "more. Has it the same store, and do block size and PYTHONHASHSEED agree?"
    ),
}
_FITS_AGAIN: Final[Mapping[IncompatibilityKind, str]] = {
    IncompatibilityKind.KV_NOT_FETCHED: "it fetches the KV cache it is handed",
    IncompatibilityKind.NO_KV_PARAMS: "its answers tell decoders what to fetch",
    IncompatibilityKind.CONNECTOR: "it runs what this gateway's connector serves",
    IncompatibilityKind.ROLE: "it has the role it was given",
    IncompatibilityKind.BOOTSTRAP: "its bootstrap server answers",
    IncompatibilityKind.MODEL: "it serves a model that others serve, too",
    IncompatibilityKind.ENGINE_KEY: "it takes the key",
    IncompatibilityKind.GATEWAY: "it is an engine",
}


def log_misfit(backend: Backend, kind: IncompatibilityKind, hint: str | None) -> None:
    """One line for an instance that does not fit, or, with None, fits again."""
    if hint is not None:
        logger.warning("%s instance %s %s", backend.role, backend.name, hint, extra=logs.ALWAYS)
        return
    why = _FITS_AGAIN[kind]
    if kind is IncompatibilityKind.KV_NOT_FETCHED and backend.role is Role.PREFILL:
        why = "decoders fetch its KV"
    logger.info("%s instance %s fits again: %s", backend.role, backend.name, why, extra=logs.ALWAYS)


def log_pair(prefiller: Backend, decoder: Backend, *, fits: bool) -> None:
    """One line for a pair between which no KV is fetched, though each of the two does well with others; or again is."""
    if fits:
        line, level = "prefill instance %s and decode instance %s fit again: KV is fetched", logging.INFO
    else:
        line = (
            "prefill instance %s and decode instance %s do not fit each other: the decoder computes this prefiller's "
            "prompts once more. Does it reach the address in the prefiller's kv_transfer_params?"
        )
        level = logging.WARNING
    logger.log(level, line, prefiller.name, decoder.name, extra=logs.ALWAYS)
