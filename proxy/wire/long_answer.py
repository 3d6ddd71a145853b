"""A long answer of an engine, of which only the end is written anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from proxy.wire.document import Document, InvalidDocument, joined
from proxy.wire.weight import load

if TYPE_CHECKING:
    from collections.abc import Mapping


class LongAnswer:
    """A whole answer that is passed on as the engine wrote it, but for its end: to find out where all members of a long
    one stand takes longer than all else about it. Raises InvalidDocument for what is no JSON object.
    """

    __slots__ = ("_raw", "values")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        try:
            values = load(raw)
        except orjson.JSONDecodeError:  # or JSON that orjson does not read
            values = dict(Document(raw).values)
        if not isinstance(values, dict):
            raise InvalidDocument("the answer must be a JSON object")
        self.values: dict[str, Any] = values

    def with_changes(self, changes: Mapping[str, object]) -> bytes | None:
        """The answer with `usage` or `kv_transfer_params` replaced, or left out (REMOVED); see Document. None: they do
        not stand at its end, where engines write them.

        What stands behind a comma is the end of the object itself if, with a bracket before it, it is an object.
        """
        raw = self._raw
        begin = raw.rfind(b',"usage":' if "usage" in changes else b',"kv_transfer_params":')
        if begin < 0:
            return None
        try:
            end = Document(b"{" + raw[begin + 1 :])
        except InvalidDocument:
            return None
        if not changes.keys() <= end.values.keys():
            return None
        written = joined(end.with_changes(changes))
        return raw[:begin] + (b"}" if written == b"{}" else b"," + written[1:])
