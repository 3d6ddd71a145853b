"""Turns the bytes of a request into a Call, and a Call into a Request."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from proxy.common.errors import GatewayError
from proxy.dialects.adjustments import ModelNames, SystemFirst, bound_priority
from proxy.dialects.call import PRIORITY_HEADER
from proxy.dialects.requests import read
from proxy.dialects.translated import Translated
from proxy.gateway.api_keys import ANONYMOUS
from proxy.gateway.request import Request
from proxy.listener.body import memory_bytes
from proxy.wire.weight import LONG_BYTES, SLIGHT_BYTES, bounds, is_light

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from proxy.dialects.base import Dialect
    from proxy.dialects.call import Call
    from proxy.gateway.api_keys import ApiKey, ApiKeys
    from proxy.gateway.client_writer import ClientConnection
    from proxy.gateway.lanes import Lane
    from proxy.gateway.request_head import Head
    from proxy.gateway.request_parts import RequestParts
    from proxy.settings import Settings
    from proxy.wire.document import Document

logger = logging.getLogger("proxy.fast_path.intake")


class Intake:
    """The intake of one worker, for both HTTP readers."""

    def __init__(
        self, parts: RequestParts, dialects: Sequence[Dialect], keys: ApiKeys, is_news: Callable[[str, str], bool]
    ) -> None:
        """Serve nothing yet.

        Args:
            parts: Those of the lane of all instances.
            dialects: The APIs that the engines can serve.
            keys: The client keys.
            is_news: Whether no worker has logged this word of a subject.
        """
        self.parts = parts
        """The parts of the lane of all instances."""
        self._parts_of: dict[Lane, RequestParts] = {}
        self._keys = keys
        self._admission = parts.service.admission
        self.buffers = self._admission.buffers
        """The account of request bodies."""
        self.last_head: Head | None = None
        """The head of the last request."""
        self.dialects = {dialect.path: dialect for dialect in dialects}
        self._is_news = is_news
        self.configure(parts.settings)

    def configure(self, settings: Settings) -> None:
        """Take changed settings for requests that come from now on."""
        for parts in (self.parts, *self._parts_of.values()):
            parts.configure(settings)
        # Where pages are allowed, every answer says `Vary: Origin`.
        self.paths = frozenset() if settings.listen.cors_origins else frozenset(self.dialects)
        """The paths that the fast reader serves."""
        self._most_bytes = min(LONG_BYTES, settings.listen.max_body_bytes)
        self._most_elements = settings.listen.max_body_elements
        self._cost = settings.cost
        self._lower_priority_first = settings.connector_traits.lower_priority_first
        self._names = ModelNames(settings.models.aliases)
        self._system_first = SystemFirst(settings.models.system_first)

    # For both readers

    def call(self, dialect: Dialect, document: Document, headers: Mapping[str, str], key: ApiKey) -> Call:
        """Return what a request asks for. Raises GatewayError.

        Args:
            dialect: The API of the client.
            document: The body.
            headers: The request headers that engines get.
            key: The client key that the request showed.
        """
        call = dialect.parse(document, self._cost, headers)
        if key.slot is not None and (not call.is_ordinary or PRIORITY_HEADER in headers):
            call = bound_priority(call, key.priority, lower_first=self._lower_priority_first)
        if self._names.has_aliases:
            call = self._names.translated(call)
        if isinstance(dialect, Translated):
            call = self._system_first.arranged(call)
            if call.left_out:
                self._log_left_out(dialect.path, key.name, call.left_out)
        return call

    def request(
        self,
        client: ClientConnection,
        dialect: Dialect,
        call: Call,
        key: ApiKey,
        lane: Lane,
        quota: AbstractContextManager[None] | None = None,
        held_bytes: int = 0,
    ) -> Request:
        """Return the request, to be started. See Request for the arguments."""
        return Request(self._parts_in(lane), client, dialect, call, key, quota, held_bytes)

    # For the fast reader

    def takes(self, head: Head) -> bool:
        """Return whether the fast reader waits for a body that is still on its way."""
        return head.body_bytes <= self._most_bytes

    def begin(self, client: ClientConnection, head: Head, raw: bytes) -> Request | None:
        """Return the request, to be started; None: it is aiohttp's to serve or to refuse, and nothing has happened."""
        parts, size_bytes = self.parts, len(raw)
        if parts.listener.is_closing or size_bytes > self._most_bytes or self._admission.is_short_of_memory:
            return None
        dialect = self.dialects[head.path]
        is_slight, most = size_bytes <= SLIGHT_BYTES, self._most_elements
        if not dialect.speaks_as_engines:
            most //= 2  # a body that is translated is read twice
        if not is_slight and not is_light(raw, most) and bounds(raw)[0] > most:
            return None
        try:
            key = ANONYMOUS
            if self._keys.have_keys:
                key = self._keys.identify(head.fields.get("authorization"), head.fields.get("x-api-key"))
            self._admission.check(key.name)
            headers = head.with_credential if key is ANONYMOUS else head.passed_on
            document = read(raw)
            call = self.call(dialect, document, headers, key)
            lanes = parts.lanes
            lane = lanes.whole
            if lanes.models.is_mixed:
                if not lanes.knows(call.served_model):
                    return None  # instances are asked for their models first
                lane = lanes.of(call.served_model)
        except GatewayError:
            return None
        held_bytes = size_bytes if is_slight else memory_bytes(raw, document.read_values)
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
        return self.request(client, dialect, call, key, lane, quota, held_bytes)

    def _parts_in(self, lane: Lane) -> RequestParts:
        """Return the parts of a lane."""
        if lane is self.parts.lane:
            return self.parts
        parts = self._parts_of.get(lane)
        if parts is None:
            lanes = self.parts.lanes.all  # some lanes may be gone
            self._parts_of = {known: its for known, its in self._parts_of.items() if known in lanes}
            parts = self._parts_of[lane] = self.parts.of(lane)
        return parts

    def _log_left_out(self, path: str, key: str, kinds: Sequence[str]) -> None:
        """Log once for each client key what its requests contain that no engine can serve."""
        for kind in kinds:
            if self._is_news(f"{path} {key} {kind}", "left out"):
                logger.warning(
                    "left out of requests to %s by client key %s: %s, which no engine can serve; logged once",
                    *(path, key, kind),
                )
