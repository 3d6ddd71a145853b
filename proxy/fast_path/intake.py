"""Which requests are plain: told when the whole of one has arrived, before anything has happened for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.api_keys import ANONYMOUS
from proxy.call import PRIORITY_HEADER
from proxy.dialects.model_names import ModelNames
from proxy.dialects.openai import OpenAi
from proxy.dialects.priorities import bounded
from proxy.dialects.shapes import Shapes
from proxy.errors import GatewayError
from proxy.fast_path.request import FastRequest
from proxy.listener.body import memory_bytes
from proxy.wire.document import Document, InvalidDocument
from proxy.wire.openai import Api
from proxy.wire.weight import LONG_BYTES, SLIGHT_BYTES, bounds, is_light

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.api_keys import ApiKeys
    from proxy.call import Call
    from proxy.dialects.base import Dialect
    from proxy.fast_path.head import Head
    from proxy.fast_path.parts import FastParts
    from proxy.fast_path.stream import Client
    from proxy.flow.lanes import Lane
    from proxy.settings import Settings


class Intake:
    """One worker's: the connections on the fast path bring it their requests."""

    def __init__(self, parts: FastParts, dialects: Sequence[Dialect], keys: ApiKeys) -> None:
        """`dialects`: those that the engines can serve."""
        self.parts = parts
        """Those of the lane of all instances."""
        self._models = parts.lanes.models
        self._parts_of: dict[Lane, FastParts] = {}
        self._keys = keys
        self._admission = parts.gateway.admission
        self.buffers = self._admission.buffers
        """Where the bodies are accounted for."""
        self.last_head: Head | None = None
        """Of the request that came last."""
        self._dialects = {
            dialect.path: dialect for dialect in dialects if isinstance(dialect, OpenAi) and dialect.speaks_as_engines
        }
        self.configure(parts.settings)

    def configure(self, settings: Settings) -> None:
        """Take changed settings for requests that come from now on."""
        for parts in (self.parts, *self._parts_of.values()):
            parts.configure(settings)
        # A chat that is asked for as a completion waits for its prompt. Where pages are allowed, every answer says
        # `Vary: Origin`.
        waits = {Api.CHAT.path} if settings.sglang.chat_sampling else set()
        self.paths = frozenset() if settings.listen.cors_origins else frozenset(self._dialects) - waits
        """Of the requests that may be plain."""
        self._most_bytes = min(LONG_BYTES, settings.listen.max_body_bytes)
        self._most_elements, self._cost = settings.listen.max_body_elements, settings.cost
        self._lower_priority_first = settings.connector_traits.lower_priority_first
        self._names = ModelNames(settings.models.aliases)
        self._shapes = {
            path: Shapes(dialect, settings.cost) for path, dialect in self._dialects.items() if dialect.api is Api.CHAT
        }

    # What a connection asks

    def takes(self, head: Head) -> bool:
        """Whether a body that is still on its way is waited for here."""
        return head.body_bytes <= self._most_bytes

    def begin(self, client: Client, head: Head, raw: bytes) -> FastRequest | None:
        """The request, to be started; None: it is not plain, and nothing has happened.

        Whatever is to be refused is not plain.
        """
        parts, size_bytes = self.parts, len(raw)
        if parts.listener.is_closing or size_bytes > self._most_bytes or self._admission.is_short_of_memory:
            return None
        is_slight, most = size_bytes <= SLIGHT_BYTES, self._most_elements
        if not is_slight and not is_light(raw, most) and bounds(raw)[0] > most:
            return None
        dialect = self._dialects[head.path]
        try:
            key = ANONYMOUS
            if self._keys.have_keys:
                key = self._keys.identify(head.fields.get("authorization"), head.fields.get("x-api-key"))
            headers = head.with_credential if key is ANONYMOUS else head.passed_on
            shapes = self._shapes.get(head.path)
            call = None if shapes is None else shapes.call(raw, headers)
            if call is None:
                call = dialect.parse(Document(raw), self._cost, headers)
            if key.slot is not None and (not call.is_ordinary or PRIORITY_HEADER in call.headers):
                call = bounded(call, key.priority, lower_first=self._lower_priority_first)
            if self._models.is_mixed:
                if not parts.lanes.knows(call.served_model):
                    return None  # instances are asked for their models first
                parts = self._in_lane(call)
            if (
                (self._names.has_aliases and self._names.translated(call) is not call)
                or not dialect.is_single(call)
                or not parts.connector.goes_leg_by_leg(call)
                or (not call.stream and parts.gateway.watching(dialect, call).is_close)
            ):
                return None
        except (GatewayError, InvalidDocument):
            return None
        admission = parts.gateway.admission
        waits = not admission.lets_in(call.pick_request)
        if waits and not admission.has_place(key.name):
            return None
        in_task = waits or not parts.suspects.memory.is_empty  # it has to be looked up
        held_bytes = size_bytes if is_slight else memory_bytes(raw, call.document.read_values)
        if not self.buffers.take(held_bytes):
            return None
        quota = None
        if key.slot is not None:
            quota = self._keys.enter(key)
            try:
                quota.__enter__()
            except GatewayError:
                self.buffers.give_back(held_bytes)
                return None
        return FastRequest(parts, client, dialect, call, key, quota, held_bytes, in_task=in_task)

    def _in_lane(self, call: Call) -> FastParts:
        """Those of the lane of a call's model. Raises GatewayError, see Lanes.of."""
        lanes = self.parts.lanes
        lane = lanes.of(call.served_model)
        if lane is self.parts.lane:
            return self.parts
        parts = self._parts_of.get(lane)
        if parts is None:
            # Some may be gone.
            self._parts_of = {known: its for known, its in self._parts_of.items() if known in lanes.all}
            parts = self._parts_of[lane] = self.parts.of(lane)
        return parts
