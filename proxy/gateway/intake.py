"""Turns the bytes of a plain request into a Head, a body into a Call, and a Call into a Request.

One regular expression recognises the head of a plain request. It must match only heads that aiohttp and its guards
accept, and that all servers in front of pdproxy read alike: one request line, names and values of RFC 9110 5.5
in ASCII, no name twice, one length and no other framing (RFC 9112 6). aiohttp reads or rejects all other heads.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.common.errors import GatewayError
from proxy.dialects.adjustments import ModelNames, SystemMessageJoiner, limit_priority
from proxy.dialects.call import FORWARDED_HEADERS, PRIORITY_HEADER
from proxy.dialects.requests import parse_body
from proxy.dialects.translated import TranslatedDialect
from proxy.gateway.api_keys import ANONYMOUS, credential_for_engines
from proxy.gateway.request import Request
from proxy.listener.body import memory_bytes
from proxy.wire.weight import ALWAYS_LIGHT_BYTES, LONG_BYTES, bound_element_counts, estimate_weight, is_light_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.dialects.base import Dialect
    from proxy.dialects.call import Call
    from proxy.gateway.api_keys import ApiKey, ApiKeys
    from proxy.gateway.client_writer import ClientConnection
    from proxy.gateway.lanes import Lane
    from proxy.gateway.request_parts import RequestParts
    from proxy.settings import Settings
    from proxy.wire.document import Document

logger = logging.getLogger("proxy.fast_path.intake")

MAX_HEAD_BYTES: Final = 8 * 1024
"""The longest plain head. aiohttp accepts longer ones, but no longer line."""

# There are no possessive repeats, because Python before 3.11.5 matches them wrongly (python/cpython#106052).
_FIELDS: Final = rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}:[\t\x20-\x7e]{0,4096}\r\n){1,64})"
_REQUEST: Final = re.compile(rb"POST (/[a-z0-9/_]{1,64}) HTTP/1\.1\r\n%b\r\n" % _FIELDS)
_ANY_REQUEST: Final = re.compile(
    rb"(?:GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS) /[!-~]{0,2048} HTTP/1\.1\r\n%b\r\n" % _FIELDS
)
_FIELD: Final = re.compile(r"([^:]+):[ \t]*([^\r]*?)[ \t]*\r\n")
_length_name: Final = re.compile(rb"\r\ncontent-length:[ \t]*", re.IGNORECASE).search
_is_host: Final = re.compile(r"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]+").fullmatch
_LENGTH_DIGITS: Final = 15

# Each of these headers changes the framing of the request, its first answer, or the head of the answer.
_NOT_PLAIN: Final = frozenset(
    {
        "transfer-encoding",
        "expect",
        "upgrade",
        "content-encoding",
        "te",
        "trailer",
        "proxy-connection",
        "x-pdproxy-debug",
    }
)


@dataclass(slots=True)
class Head:
    """The head of one client request. It never changes."""

    path: str
    """The path of the request."""
    fields: dict[str, str]
    """The header fields by lower-case name."""
    body_bytes: int
    """The length of the body."""
    size_bytes: int
    """The length of the head."""
    before: bytes
    """The bytes before the digits of Content-Length."""
    behind: bytes
    """The bytes after these digits."""
    passed_on: dict[str, str]
    """The header fields for engines, without the client's credential."""
    with_credential: dict[str, str]
    """The header fields for engines if the client needs no key of the gateway."""


def read_head(data: bytes, last: Head | None = None) -> Head | None:
    """Return the head at the beginning of `data`, or None if it is incomplete or not plain.

    `last`: the head before it. Clients usually repeat their heads except for the length. Equal parts are not parsed.
    """
    if last is not None and data.startswith(last.before):
        begin, behind_bytes = len(last.before), len(last.behind)
        end = data.find(last.behind, begin, begin + _LENGTH_DIGITS + behind_bytes)
        digits, size_bytes = data[begin:end], end + behind_bytes
        if end > begin and digits.isdigit() and size_bytes <= MAX_HEAD_BYTES:
            body_bytes = int(digits)
            if size_bytes == last.size_bytes and body_bytes == last.body_bytes:
                return last
            named = {**last.fields, "content-length": digits.decode()}
            same = last.before, last.behind, last.passed_on, last.with_credential
            return Head(last.path, named, body_bytes, size_bytes, *same)
    match = _REQUEST.match(data, 0, MAX_HEAD_BYTES)
    if match is None or (fields := _plain_fields(match[2])) is None:
        return None
    length = fields.get("content-length", "")
    if not _is_length(length):
        return None
    name = _length_name(data)
    assert name is not None
    before, size_bytes = name.end(), match.end()
    behind = data[before + len(length) : size_bytes]
    passed_on: dict[str, str] = {name: fields[name] for name in FORWARDED_HEADERS if name in fields}
    credential = credential_for_engines(fields.get("authorization"), fields.get("x-api-key"))
    return Head(
        path=match[1].decode("ascii"),
        fields=fields,
        body_bytes=int(length),
        size_bytes=size_bytes,
        before=data[:before],
        behind=behind,
        passed_on=passed_on,
        with_credential=passed_on if credential is None else {**passed_on, "authorization": credential},
    )


def is_one_request(data: bytes) -> bool:
    """Return whether the bytes are certainly one complete request of any kind.

    They may be one even if the result is False.
    """
    match = _ANY_REQUEST.match(data, 0, MAX_HEAD_BYTES)
    if match is None or (fields := _plain_fields(match[1])) is None:
        return False
    length = fields.get("content-length", "0")
    return _is_length(length) and len(data) == match.end() + int(length)


def _plain_fields(lines: bytes) -> dict[str, str] | None:
    """Return the header fields by lower-case name, or None if a name is repeated or a field is not plain."""
    found = _FIELD.findall(lines.decode("ascii"))
    fields = {name.lower(): value for name, value in found}
    if (
        len(fields) < len(found)
        or not _NOT_PLAIN.isdisjoint(fields)
        or not _is_host(fields.get("host", ""))
        or fields.get("connection", "keep-alive").lower() != "keep-alive"
    ):
        return None
    return fields


def _is_length(text: str) -> bool:
    return text.isdecimal() and len(text) <= _LENGTH_DIGITS


class Intake:
    """The intake of one worker, for both HTTP readers."""

    def __init__(
        self, parts: RequestParts, dialects: Sequence[Dialect], keys: ApiKeys, is_news: Callable[[str, str], bool]
    ) -> None:
        """Create the intake.

        Args:
            parts: The parts of the lane of all instances.
            dialects: The APIs that the engines can serve.
            keys: The client keys.
            is_news: Returns whether no worker has logged this word about this subject yet.
        """
        self.parts = parts
        """The parts of the lane of all instances."""
        self._parts_of: dict[Lane, RequestParts] = {}
        self._keys = keys
        self._admission = parts.service.admission
        self.buffers = self._admission.buffers
        """Counts the request bodies in memory."""
        self.last_head: Head | None = None
        """The head of the last request."""
        self.dialects = {dialect.path: dialect for dialect in dialects}
        self._is_news = is_news
        self.configure(parts.settings)

    def configure(self, settings: Settings) -> None:
        """Apply changed settings to requests that arrive from now on."""
        for parts in (self.parts, *self._parts_of.values()):
            parts.settings = settings
            parts.keeps_streams_alive = settings.stream.keeps_alive
        # The fast reader does not write `Vary: Origin`, which every answer needs when web pages are allowed.
        self.paths = frozenset() if settings.listen.cors_origins else frozenset(self.dialects)
        """The paths that the fast reader serves."""
        self._max_body_bytes = settings.listen.max_body_bytes
        most = settings.listen.max_body_elements
        self._max_elements = {
            path: most if dialect.uses_engine_format else most // 2  # a translated body is parsed twice
            for path, dialect in self.dialects.items()
        }
        self._cost = settings.cost
        self._lower_priority_first = settings.connector_traits.lower_priority_first
        self._names = ModelNames(settings.models.aliases)
        self._system_first = SystemMessageJoiner(settings.models.system_first)

    # For both readers

    def call(self, dialect: Dialect, document: Document, headers: Mapping[str, str], key: ApiKey) -> Call:
        """Parse a request body, and apply the limits of the client key and the settings of models.

        Args:
            dialect: The API of the client.
            document: The body.
            headers: The request headers that engines get.
            key: The client key of the request.

        Raises:
            GatewayError: The request cannot be served.
        """
        call = dialect.parse_request(document, self._cost, headers)
        if key.slot is not None and (not call.is_ordinary or PRIORITY_HEADER in headers):
            call = limit_priority(call, key.priority, lower_first=self._lower_priority_first)
        if self._names.has_aliases:
            call = self._names.translate_model_name(call)
        if isinstance(dialect, TranslatedDialect):
            call = self._system_first.join_system_messages(call)
            if call.omitted_kinds:
                self._log_left_out(dialect.path, key.name, call.omitted_kinds)
        return call

    def parts_of(self, lane: Lane) -> RequestParts:
        """Return the parts that serve the requests of a lane."""
        if lane is self.parts.lane:
            return self.parts
        parts = self._parts_of.get(lane)
        if parts is None:
            lanes = self.parts.lanes.all  # some lanes may be gone
            self._parts_of = {each: old for each, old in self._parts_of.items() if each in lanes}
            parts = self._parts_of[lane] = self.parts.of(lane)
        return parts

    # For the fast reader

    def waits_for_body(self, head: Head) -> bool:
        """Return whether the fast reader waits for the rest of a body.

        aiohttp rejects a request without reading a long body, if it can.
        """
        if head.body_bytes <= LONG_BYTES:
            return head.body_bytes <= self._max_body_bytes
        if head.body_bytes > self._max_body_bytes or self.parts.listener.is_closing:
            return False
        try:
            key = self._keys.identify(head.fields.get("authorization"), head.fields.get("x-api-key"))
            self._admission.check(key.name)
        except GatewayError:
            return False
        return not self._admission.is_short_of_memory

    def is_too_heavy(self, head: Head, raw: bytes) -> bool:
        """Return whether a body may have more elements than the limit, so that aiohttp's reader must count them."""
        max_elements = self._max_elements[head.path]
        if len(raw) <= LONG_BYTES:
            return bound_element_counts(raw)[0] > max_elements
        return estimate_weight(raw).elements > max_elements

    def parse_long_body(self, raw: bytes) -> Document | None:
        """Return the parsed body. None: it is no valid request, and aiohttp's reader must reject it."""
        try:
            return parse_body(raw)
        except GatewayError:
            return None

    def begin(
        self, client: ClientConnection, head: Head, raw: bytes, document: Document | None = None
    ) -> Request | None:
        """Return the request, ready to start, or None if aiohttp must serve or reject it.

        `document`: the parsed body, of which the elements were counted; None: `raw` is counted and parsed here.
        """
        parts, size_bytes = self.parts, len(raw)
        if parts.listener.is_closing or size_bytes > self._max_body_bytes or self._admission.is_short_of_memory:
            return None
        dialect = self.dialects[head.path]
        is_slight = size_bytes <= ALWAYS_LIGHT_BYTES
        is_light = is_slight or document is not None or is_light_json(raw, self._max_elements[head.path])
        if not is_light and self.is_too_heavy(head, raw):
            return None
        try:
            key = ANONYMOUS
            if self._keys.have_keys:
                key = self._keys.identify(head.fields.get("authorization"), head.fields.get("x-api-key"))
            self._admission.check(key.name)
            headers = head.with_credential if key is ANONYMOUS else head.passed_on
            if document is None:
                document = parse_body(raw)
            call = self.call(dialect, document, headers, key)
            lanes = parts.lanes
            if lanes.models.is_mixed:
                if not lanes.knows(call.served_model):
                    return None  # the instances must first report their models
                parts = self.parts_of(lanes.of(call.served_model))
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
                self.buffers.held_bytes -= held_bytes
                return None
        return Request(parts, client, dialect, call, key, quota, held_bytes)

    def _log_left_out(self, path: str, key: str, kinds: Sequence[str]) -> None:
        """Log the parts of a request that no engine can serve, once for each client key."""
        for kind in kinds:
            if self._is_news(f"{path} {key} {kind}", "left out"):
                logger.warning(
                    "intake: content left out, as no engine can serve it (logged once): path %s, client key %s: %s",
                    *(path, key, kind),
                )
