"""Options of gateways that share their loads."""

# No `from __future__ import annotations` here: pydantic reads the annotations at run time.
import re
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, model_validator

from proxy.settings.kinds import FilePath, Seconds, Secret, empty_is_none
from proxy.settings.section import Section

_is_url = re.compile(r"(rediss?://[^\s/?#]+(/[0-9]*)?|unix:///[^\s?#]+)").fullmatch
_is_group = re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch


def _url(url: str | None) -> str | None:
    if url is None:
        return None
    try:
        is_right, password = bool(_is_url(url)), urlsplit(url).password
        urlsplit(url).port  # noqa: B018 raises
    except ValueError:
        is_right, password = False, None
    if not is_right:
        raise ValueError("must be a URL like redis://10.0.0.9:6379/0, rediss://… for TLS, or unix:///path")
    if password is not None:
        raise ValueError("must hold no password: that is replicas.password, or in replicas.password_file")
    return url


def _group(name: str) -> str:
    if not _is_group(name):
        raise ValueError("must be 1 to 64 letters, digits, `.`, `_` or `-`")
    return name


class Replicas(Section):
    """Several gateways in front of the same engines that share their loads through Redis or Valkey.

    Requires the extra redis: pip install 'pdproxy[redis]'.
    """

    url: Annotated[str | None, BeforeValidator(empty_is_none), AfterValidator(_url)] = None
    """URL of the store: redis://10.0.0.9:6379/0, rediss://… for TLS, or unix:///path. A user may precede the host, as
    in redis://user@host. null disables sharing. Requires a restart."""
    password: Secret = None
    """Password of the store. Requires a restart."""
    password_file: FilePath = None
    """Path of a file that contains the password of the store. Requires a restart."""
    group: Annotated[str, AfterValidator(_group)] = "default"
    """Name of the group of gateways in front of the same engines. Other gateways must use another name. Requires a
    restart."""
    interval_seconds: Seconds = 0.1
    """Interval between two exchanges of the complete state, in seconds. Requires a restart."""
    news_seconds: Seconds | None = 0.005
    """Minimum time between two messages about changes, in seconds. null shares changes only in the exchanges of the
    complete state. Requires a restart."""
    ttl_seconds: Seconds = 1.0
    """Time for which the state of another gateway is valid, in seconds. At least twice interval_seconds. Requires a
    restart."""
    key_limits: bool = False
    """Whether the limits of client keys (auth.client_keys_file) apply to all gateways of the group together. With false
    they apply to each gateway. Requires a restart."""

    @model_validator(mode="after")
    def _some_exchange_may_fail(self) -> Self:
        if self.ttl_seconds < 2 * self.interval_seconds:
            raise ValueError(f"ttl_seconds {self.ttl_seconds} is less than twice interval_seconds")
        return self

    @property
    def guests(self) -> int:
        """Return the number of guest rows in shared memory that they need."""
        return 0 if self.url is None else 1
