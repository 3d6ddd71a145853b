"""Chats whose shape is known: nothing of them is read but their messages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import orjson

from proxy.call import Call, measured_chat
from proxy.errors import GatewayError
from proxy.wire.document import SHORT_BYTES, InvalidDocument
from proxy.wire.shape import Constant, Shape, ShapedDocument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.dialects.base import Dialect
    from proxy.settings import Cost

_MOST_SHAPES: Final = 128
_MOST_SEEN: Final = 1024
_MOST_BYTES: Final = 1024
"""Of a shape. Longer ones hold something that is hardly ever the same."""
# Messages that are longer, and have more brackets, might be nested so deeply that not everybody would read them.
_SHALLOW_BYTES: Final = 1024
_MOST_BRACKETS: Final = 512
_MEASURED: Final = frozenset({"tools", "prompt"})
"""What makes a prompt, too."""


class Shapes:
    """Those of one dialect's chats that came twice: one that is never seen again is not worth what it takes to know it.

    Applications have few, but one that names its users in its requests has as many as users.
    """

    def __init__(self, dialect: Dialect, cost: Cost) -> None:
        self._dialect = dialect
        self._cost = cost
        self._seen: dict[int, bool] = {}
        """By the hash of what looked like a shape, whether it was none: what may be a prompt is not kept."""
        self._known: dict[tuple[bytes, bytes], tuple[Shape, Call]] = {}
        """With the call of a chat that has no messages."""
        self._last: tuple[Shape, Call] | None = None
        """That of the last chat. Others are looked for."""

    def call(self, raw: bytes, headers: Mapping[str, str]) -> Call | None:
        """As `Dialect.parse` makes it; None: it is for that to say."""
        if len(raw) > SHORT_BYTES:
            return None
        last = self._last
        if last is not None:
            shape = last[0]
            if raw.startswith(shape.opening) and raw.endswith(shape.closing):
                call = self._read(last, raw, headers)
                if call is not None:
                    return call
        key = raw[: raw.find(b"[", raw.find(b'"messages"'))], raw[raw.rfind(b"}]") + 2 :]
        known = self._known.get(key)
        if known is None:
            self._meet(key)
            return None
        self._last = known
        return self._read(known, raw, headers)

    def _read(self, known: tuple[Shape, Call], raw: bytes, headers: Mapping[str, str]) -> Call | None:
        """A chat that begins and ends as those of this shape do. If an array is in between, it is one of them."""
        shape, like = known
        written = raw[len(shape.before) : len(raw) - len(shape.behind)]
        if len(written) > _SHALLOW_BYTES and written.count(b"[") + written.count(b"{") > _MOST_BRACKETS:
            return None
        try:
            messages = orjson.loads(written)
        except orjson.JSONDecodeError:
            return None
        document = ShapedDocument(shape, written, messages)
        tokens, prompt = measured_chat(document, messages, self._cost)
        return Call(  # by position, see Call.changed
            *(like.api, document, tokens, like.output_tokens, like.stream, like.include_usage, headers, like.changes),
            *(prompt, like.output_limit, True),
        )

    def _meet(self, key: tuple[bytes, bytes]) -> None:
        """See one for the first or the second time."""
        before, behind = key
        if len(before) + len(behind) > _MOST_BYTES:
            return
        name = hash(key)
        is_none = self._seen.get(name)
        if is_none is None:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[name] = False
        elif not is_none:
            learned = self._learned(before, behind)
            if learned is None:
                self._seen[name] = True
                return
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            self._known[key] = learned

    def _learned(self, before: bytes, behind: bytes) -> tuple[Shape, Call] | None:
        try:
            shape = Shape(before, behind)
            call = self._dialect.parse(shape.empty, self._cost, {})
        except (GatewayError, InvalidDocument):
            return None
        if not call.is_ordinary or not _MEASURED.isdisjoint(shape.values):
            return None
        return shape, replace(call, changes=Constant(call.changes))
