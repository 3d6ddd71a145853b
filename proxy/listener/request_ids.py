"""Ids of requests, by which clients, logs and engines speak of the same one."""

from __future__ import annotations

import re
from typing import Final

from proxy.wire.ids import new_id

# Anything else could break a log line or a header further on.
_is_acceptable: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}").fullmatch


def accepted_id(given: str) -> str:
    """The id that a client gave, or a new one in place of one that is not sane, or empty."""
    return given if given and _is_acceptable(given) else new_id()


def new_request_id() -> str:
    """For a request whose client gave none."""
    return new_id()
