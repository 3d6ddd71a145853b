"""The head of a plain request, recognised by one match. No IO.

Recognising only ever accepts: what is not matched is for aiohttp and the guards around it to read and to refuse. So the
match must be a strict subset of what they accept, and of what any other server in front of us would read alike: one
request line, names and values of RFC 9110 5.5 in ASCII, no name twice, one length and no other framing (RFC 9112 6).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from proxy.dialects.call import PASSED_ON
from proxy.gateway.api_keys import credential_for_engines

MAX_HEAD_BYTES: Final = 8 * 1024
"""A longer head is not plain. aiohttp takes longer ones, but no longer line."""

# No possessive repeats: Python before 3.11.5 matches them wrongly (python/cpython#106052).
_FIELDS: Final = rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}:[\t\x20-\x7e]{0,4096}\r\n){1,64})"
_REQUEST: Final = re.compile(rb"POST (/[a-z0-9/_]{1,64}) HTTP/1\.1\r\n%b\r\n" % _FIELDS)
_ANY_REQUEST: Final = re.compile(
    rb"(?:GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS) /[!-~]{0,2048} HTTP/1\.1\r\n%b\r\n" % _FIELDS
)
_FIELD: Final = re.compile(r"([^:]+):[ \t]*([^\r]*?)[ \t]*\r\n")
_length_name: Final = re.compile(rb"\r\ncontent-length:[ \t]*", re.IGNORECASE).search
_is_host: Final = re.compile(r"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]+").fullmatch
_LENGTH_DIGITS: Final = 15

# Each of them changes how a request is framed, who is to answer it first, or what the head of the answer tells.
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
    """The head of one request. Nothing of it is ever set again."""

    path: str
    fields: dict[str, str]
    """Lower-case names."""
    body_bytes: int
    """The length of the body."""
    size_bytes: int
    """The length of the head itself: the body begins there."""
    before: bytes
    """Its bytes up to the digits that say the length of the body."""
    behind: bytes
    """Its bytes behind them."""
    passed_on: dict[str, str]
    """The fields that reach the engines whoever has sent them."""
    with_credential: dict[str, str]
    """These, and the credential of a client that needs no key of the gateway."""


def read_head(data: bytes, last: Head | None = None) -> Head | None:
    """The head that `data` begins with; None: it is none, not whole, or not plain.

    `last`: the one before it on the same connection. Clients write the same each time, but for the length, and what
    was read once is not read again.
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
    passed_on: dict[str, str] = {name: fields[name] for name in PASSED_ON if name in fields}
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
    """Whether this is a request of any kind, from its first byte to its last, as everybody reads it.

    False does not mean that it is none: this, too, only ever accepts.
    """
    match = _ANY_REQUEST.match(data, 0, MAX_HEAD_BYTES)
    if match is None or (fields := _plain_fields(match[1])) is None:
        return False
    length = fields.get("content-length", "0")
    return _is_length(length) and len(data) == match.end() + int(length)


def _plain_fields(lines: bytes) -> dict[str, str] | None:
    """By lower-case names; None: one stands twice, or is not plain."""
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
