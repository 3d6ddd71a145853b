"""Who may administer: holders of the admin key, or without one a program on this host, where that can be told.

A connection from this host's loopback address says little on a listener that others reach, too: a TLS terminator or a
sidecar on this host connects from there for anybody. So without a key only a listener on a loopback address lets
administrators in, and only those who come straight from a program: nothing in their headers may say that the request
was made for somebody else, as a reverse proxy or a browser does. The status page is excepted, as long as it only looks.
"""

from __future__ import annotations

import hmac
import re
from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

from proxy.errors import GatewayError, LimitExceeded
from proxy.settings import is_loopback

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

_MAX_CHANGES_AT_ONCE: Final = 10

# What reverse proxies, sidecars, content delivery networks and load balancers add (RFC 7239, Envoy, nginx, Cloudflare,
# Akamai, Azure, AWS, Google), and what browsers send along with the requests of a page (Fetch standard).
_ON_BEHALF: Final = re.compile(
    r"forwarded|via|origin|referer|cdn-loop|true-client-.*|.*client-ip|.*connecting-ip|.*real-ip|.*remote-(?:ip|addr)"
    r"|(?:x-forwarded|x-envoy|x-original|x-azure|x-amzn|x-amz-cf|x-appengine|x-cloud-trace|x-arr|cf|sec-fetch)(?:-.*)?",
    re.IGNORECASE,
)


class Administrators:
    """What the administration's routes ask before they do anything."""

    def __init__(self, admin_key: str | None, *, listens_on: str) -> None:
        """`admin_key` None: being on this host is enough, if `listens_on`, the host of the listener, is a loopback
        address.
        """
        self._admin_key = admin_key
        self._listens_on = listens_on
        self._changes = 0

    def configure(self, admin_key: str | None) -> None:
        """From now on this key lets administrators in."""
        self._admin_key = admin_key

    def only(self, handler: Handler) -> Handler:
        """The handler for administrators alone."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            self.check(request)
            return await handler(request)

        return guarded

    def only_few(self, handler: Handler) -> Handler:
        """The same, and only a bounded number at a time, as each waits: for a name, a file, or the caller's body."""

        async def limited(request: web.Request) -> web.StreamResponse:
            if self._changes >= _MAX_CHANGES_AT_ONCE:
                message = f"{_MAX_CHANGES_AT_ONCE} changes are being made already"
                raise LimitExceeded(message, code="too_many_changes", retry_after_seconds=1.0)
            self._changes += 1
            try:
                return await handler(request)
            finally:
                self._changes -= 1

        return self.only(limited)

    def check(self, request: web.Request) -> None:
        """Raise GatewayError unless the caller may administer."""
        if self._admin_key is not None:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            given = request.headers.get("X-Admin-Key") or (token if scheme.lower() == "bearer" else "")
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._admin_key.encode()):
                raise GatewayError("this route needs the admin key", code="admin_key_required", status=401)
        elif (objection := self._objection(request)) is not None:
            raise GatewayError(
                f"administration needs a key here, since {objection}; set auth.admin_key and send it as X-Admin-Key, "
                "or give administration a listener on this host alone (admin.port)",
                code="admin_key_not_configured",
                status=403,
            )

    def admits(self, request: web.Request) -> bool:
        """Whether the caller may administer."""
        try:
            self.check(request)
        except GatewayError:
            return False
        return True

    def _objection(self, request: web.Request) -> str | None:
        """Why this need not be an administrator's program on this host, None if it is one."""
        if not is_loopback(self._listens_on):
            return f"the gateway listens on {self._listens_on}, which others may reach"
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        if not isinstance(peer, tuple) or not is_loopback(peer[0]):
            return "the connection does not come from this host"
        is_looked_at = _is_own_pages_look(request)
        for name in request.headers:
            if _ON_BEHALF.fullmatch(name) and not (is_looked_at and name.lower().startswith("sec-fetch-")):
                return f"the header {name} tells that the request is made for somebody else"
        host = request.headers.get(hdrs.HOST)
        if host is not None and not is_loopback(_without_port(host)):
            return "its Host is not this host's loopback name or address"
        return None


def author(request: web.Request) -> str:
    """Who makes a change, for the log. Of the key there is nothing to tell: there is only one."""
    return f"an administrator at {request.remote}"


def _is_own_pages_look(request: web.Request) -> bool:
    """Whether a page of this very listener, which can only be the status page, asks to be told something.

    Browsers let no script set this header, and name a page of another port, or of a name that leads here, otherwise
    (Fetch Metadata, 2.1); the Host is looked at besides.
    """
    return request.method == hdrs.METH_GET and request.headers.getall("Sec-Fetch-Site", ()) == ["same-origin"]


def _without_port(host: str) -> str:
    return re.sub(r":[0-9]*\Z", "", host).strip("[]") if not host.endswith("]") else host.strip("[]")
