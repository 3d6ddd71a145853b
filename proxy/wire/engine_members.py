"""Members of an engine's answers that are between the engines and the gateway: clients do not get them.

They name engines' hosts, ports and blocks. vLLM 0.33 writes `kv_transfer_params` into every chunk of a stream: null in
all of them, and what others need to fetch the decoder's KV cache in the last one, if `bidirectional_kv_xfer` is set.
"""

from __future__ import annotations

from typing import Any, Final

from proxy.wire.document import REMOVED, Document, InvalidDocument, joined
from proxy.wire.python_json import dumps, loads

ENGINE_MEMBERS: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})
_REMOVAL: Final = dict.fromkeys(sorted(ENGINE_MEMBERS), REMOVED)
NO_KV_PARAMS: Final = b',"kv_transfer_params":null'
"""The member as vLLM writes it into each chunk. Its quotes would be escaped inside a JSON string."""


def has_engine_members(payload: dict[str, Any]) -> bool:
    """Whether an answer, or an event of one, has any of them."""
    return "kv_transfer_params" in payload or "ec_transfer_params" in payload


def names_engine_members(written: bytes) -> bool:
    """Whether JSON that was not read may have any of them."""
    return b'kv_transfer_params"' in written or b'ec_transfer_params"' in written


def remove_engine_members(payload: dict[str, Any]) -> None:
    """Remove them from an answer, or an event of one."""
    for name in ENGINE_MEMBERS:
        payload.pop(name, None)


def without_engine_members(data: bytes) -> bytes:
    """Return the JSON object without them: the bytes of all others stay."""
    shown = data.replace(NO_KV_PARAMS, b"")
    if shown is not data and not names_engine_members(shown):
        return shown
    try:
        return joined(Document(data).with_changes(_REMOVAL))
    except InvalidDocument:  # a name stands twice in it
        payload = loads(data)
        remove_engine_members(payload)
        return dumps(payload)
