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
from proxy.listener.body import body_memory_bytes
from proxy.wire.weight import ALWAYS_LIGHT_BYTES, LONG_BYTES, bound_element_counts, estimate_weight, is_light_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.dialects.base import Dialect
    from proxy.dialects.call import Call
    from proxy.gateway.api_keys import ApiKey, ApiKeys
    from proxy.gateway.client_writer import ClientConnection
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
class RequestHead:
    """The head of one client request. It never changes."""

    request_path: str
    """The path of the request."""
    header_fields: dict[str, str]
    """The header fields by lower-case name."""
    body_bytes: int
    """The length of the body."""
    head_size_bytes: int
    """The length of the head."""
    bytes_before_length: bytes
    """The bytes before the digits of Content-Length."""
    bytes_after_length: bytes
    """The bytes after these digits."""
    headers_for_engines: dict[str, str]
    """The header fields for engines, without the client's credential."""
    headers_with_credential: dict[str, str]
    """The header fields for engines if the client needs no key of the gateway."""


def read_head(data: bytes, previous_head: RequestHead | None = None) -> RequestHead | None:
    """Return the head at the beginning of `data`, or None if it is incomplete or not plain.

    `previous_head`: the head before it. Clients usually repeat their heads except for the length. Equal parts are not
    parsed.
    """
    if previous_head is not None and data.startswith(previous_head.bytes_before_length):
        begin, behind_bytes = len(previous_head.bytes_before_length), len(previous_head.bytes_after_length)
        end = data.find(previous_head.bytes_after_length, begin, begin + _LENGTH_DIGITS + behind_bytes)
        digits, size_bytes = data[begin:end], end + behind_bytes
        if end > begin and digits.isdigit() and size_bytes <= MAX_HEAD_BYTES:
            body_bytes = int(digits)
            if size_bytes == previous_head.head_size_bytes and body_bytes == previous_head.body_bytes:
                return previous_head
            named = {**previous_head.header_fields, "content-length": digits.decode()}
            same = (
                previous_head.bytes_before_length,
                previous_head.bytes_after_length,
                previous_head.headers_for_engines,
                previous_head.headers_with_credential,
            )
            return RequestHead(previous_head.request_path, named, body_bytes, size_bytes, *same)
    match = _REQUEST.match(data, 0, MAX_HEAD_BYTES)
    if match is None or (fields := _plain_fields(match[2])) is None:
        return None
    length = fields.get("content-length", "")
    if not _is_content_length(length):
        return None
    name = _length_name(data)
    assert name is not None
    before, size_bytes = name.end(), match.end()
    behind = data[before + len(length) : size_bytes]
    passed_on: dict[str, str] = {name: fields[name] for name in FORWARDED_HEADERS if name in fields}
    credential = credential_for_engines(fields.get("authorization"), fields.get("x-api-key"))
    return RequestHead(
        request_path=match[1].decode("ascii"),
        header_fields=fields,
        body_bytes=int(length),
        head_size_bytes=size_bytes,
        bytes_before_length=data[:before],
        bytes_after_length=behind,
        headers_for_engines=passed_on,
        headers_with_credential=passed_on if credential is None else {**passed_on, "authorization": credential},
    )


def is_one_request(data: bytes) -> bool:
    """Return whether the bytes are certainly one complete request of any kind.

    They may be one even if the result is False.
    """
    match = _ANY_REQUEST.match(data, 0, MAX_HEAD_BYTES)
    if match is None or (fields := _plain_fields(match[1])) is None:
        return False
    length = fields.get("content-length", "0")
    return _is_content_length(length) and len(data) == match.end() + int(length)


def _plain_fields(header_lines: bytes) -> dict[str, str] | None:
    """Return the header fields by lower-case name, or None if a name is repeated or a field is not plain."""
    found = _FIELD.findall(header_lines.decode("ascii"))
    fields = {name.lower(): value for name, value in found}
    if (
        len(fields) < len(found)
        or not _NOT_PLAIN.isdisjoint(fields)
        or not _is_host(fields.get("host", ""))
        or fields.get("connection", "keep-alive").lower() != "keep-alive"
    ):
        return None
    return fields


def _is_content_length(field_value: str) -> bool:
    return field_value.isdecimal() and len(field_value) <= _LENGTH_DIGITS


class Intake:
    """The intake of one worker, for both HTTP readers."""

    def __init__(
        self, parts: RequestParts, dialects: Sequence[Dialect], keys: ApiKeys, is_news: Callable[[str, str], bool]
    ) -> None:
        """Create the intake.

        Args:
            parts: The parts that requests share.
            dialects: The APIs that the engines can serve.
            keys: The client keys.
            is_news: Returns whether no worker has logged this word about this subject yet.
        """
        self.request_parts = parts
        """The parts that requests share."""
        self._api_keys = keys
        self._admission_queue = parts.all_lanes.whole_lane.request_service.admission_queue
        self.body_buffers = self._admission_queue.buffers
        """Counts the request bodies in memory."""
        self.last_head: RequestHead | None = None
        """The head of the last request."""
        self.dialects_by_path = {dialect.path: dialect for dialect in dialects}
        self._is_news = is_news
        self.apply_settings(parts.settings)

    def apply_settings(self, settings: Settings) -> None:
        """Apply changed settings to requests that arrive from now on."""
        self.request_parts.settings = settings
        self.request_parts.keeps_streams_alive = settings.stream.keeps_alive
        # The fast reader does not write `Vary: Origin`, which every answer needs when web pages are allowed.
        self.paths = frozenset() if settings.listen.cors_origins else frozenset(self.dialects_by_path)
        """The paths that the fast reader serves."""
        self._max_body_bytes = settings.listen.max_body_bytes
        most = settings.listen.max_body_elements
        self._max_elements = {
            path: most if dialect.uses_engine_format else most // 2  # a translated body is parsed twice
            for path, dialect in self.dialects_by_path.items()
        }
        self._cost = settings.cost
        self._lower_priority_first = settings.connector_traits.lower_priority_first
        self._names = ModelNames(settings.models.aliases)
        self._system_first = SystemMessageJoiner(settings.models.system_first)

    # For both readers

    def parse_call(self, dialect: Dialect, document: Document, headers: Mapping[str, str], api_key: ApiKey) -> Call:
        """Parse a request body, and apply the limits of the client key and the settings of models.

        Args:
            dialect: The API of the client.
            document: The body.
            headers: The request headers that engines get.
            api_key: The client key of the request.

        Raises:
            GatewayError: The request cannot be served.
        """
        call = dialect.parse_request(document, self._cost, headers)
        if api_key.usage_slot is not None and (not call.is_ordinary or PRIORITY_HEADER in headers):
            call = limit_priority(call, api_key.default_priority, lower_first=self._lower_priority_first)
        if self._names.has_aliases:
            call = self._names.translate_model_name(call)
        if isinstance(dialect, TranslatedDialect):
            call = self._system_first.join_system_messages(call)
            if call.omitted_kinds:
                self._log_omitted_parts(dialect.path, api_key.key_name, call.omitted_kinds)
        return call

    # For the fast reader

    def waits_for_body(self, head: RequestHead) -> bool:
        """Return whether the fast reader waits for the rest of a body.

        aiohttp rejects a request without reading a long body, if it can.
        """
        if head.body_bytes <= LONG_BYTES:
            return head.body_bytes <= self._max_body_bytes
        if head.body_bytes > self._max_body_bytes or self.request_parts.http_listener.is_closing:
            return False
        try:
            key = self._api_keys.find_key(head.header_fields.get("authorization"), head.header_fields.get("x-api-key"))
            self._admission_queue.check_queue_room(key.key_name)
        except GatewayError:
            return False
        return not self._admission_queue.is_short_of_memory

    def bound_long_body_memory(self, head: RequestHead, raw_body: bytes) -> int | None:
        """Return an upper bound of the memory of a long body's objects, in bytes.

        None: the body may have more elements than the limit, so that aiohttp's reader must count them.
        """
        weight = estimate_weight(raw_body)
        return weight.memory_bytes if weight.elements <= self._max_elements[head.request_path] else None

    def parse_long_body(self, raw_body: bytes) -> Document | None:
        """Return the parsed body. None: it is no valid request, and aiohttp's reader must reject it."""
        try:
            return parse_body(raw_body)
        except GatewayError:
            return None

    def begin_request(
        self, client: ClientConnection, head: RequestHead, raw_body: bytes, document: Document | None = None
    ) -> Request | None:
        """Return the request, ready to start, or None if aiohttp must serve or reject it.

        `document`: the parsed body, of which the elements were counted; None: `raw_body` is counted and parsed here.
        """
        parts, size_bytes = self.request_parts, len(raw_body)
        if (
            parts.http_listener.is_closing
            or size_bytes > self._max_body_bytes
            or self._admission_queue.is_short_of_memory
        ):
            return None
        dialect = self.dialects_by_path[head.request_path]
        is_slight = size_bytes <= ALWAYS_LIGHT_BYTES
        max_elements = self._max_elements[head.request_path]
        is_light = is_slight or document is not None or is_light_json(raw_body, max_elements)
        if not is_light and bound_element_counts(raw_body)[0] > max_elements:
            return None  # aiohttp's reader must count the elements
        try:
            key = ANONYMOUS
            if self._api_keys.are_keys_required:
                key = self._api_keys.find_key(
                    head.header_fields.get("authorization"), head.header_fields.get("x-api-key")
                )
            self._admission_queue.check_queue_room(key.key_name)
            headers = head.headers_with_credential if key is ANONYMOUS else head.headers_for_engines
            if document is None:
                document = parse_body(raw_body)
            call = self.parse_call(dialect, document, headers, key)
            lanes = parts.all_lanes
            lane = lanes.whole_lane
            if lanes.served_models.has_several_groups:
                if not lanes.knows_model(call.served_model):
                    return None  # the instances must first report their models
                lane = lanes.lane_of_model(call.served_model)
        except GatewayError:
            return None
        held_bytes = size_bytes if is_slight else body_memory_bytes(raw_body, document.read_values)
        if not self.body_buffers.reserve_bytes(held_bytes):
            return None
        quota = None
        if key.usage_slot is not None:
            quota = self._api_keys.count_in_flight(key)
            try:
                quota.__enter__()
            except GatewayError:
                self.body_buffers.held_bytes -= held_bytes
                return None
        request = Request(parts, lane, client, dialect, call, key)
        request.held_bytes, request.quota_hold = held_bytes, quota
        return request

    def _log_omitted_parts(self, path: str, key: str, kinds: Sequence[str]) -> None:
        """Log the parts of a request that no engine can serve, once for each client key."""
        for kind in kinds:
            if self._is_news(f"{path} {key} {kind}", "left out"):
                logger.warning(
                    "intake: content left out, as no engine can serve it (logged once): path %s, client key %s: %s",
                    path,
                    key,
                    kind,
                )
