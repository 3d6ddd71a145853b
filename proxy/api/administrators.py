"""The check for administrators: the admin key, or without one a program of the gateway's own user on this host.

A connection from this host's loopback address says little: a TLS terminator, a reverse proxy or a sidecar on this host
connects from there for anybody. So without a key only a listener on a loopback address lets administrators in. Nothing
in their headers may say that the request was made for somebody else, as a reverse proxy or a browser does; the status
page may look. And where clients connect, too, the gateway's own user must have opened the connection, see
`socket_owner.py`.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

from proxy.api import socket_owner
from proxy.common.errors import GatewayError, LimitExceeded
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
    """Checks each request to the administration's routes."""

    def __init__(self, admin_key: str | None, *, listens_on: str, trusts_local: bool = False) -> None:
        """`admin_key` None: a program on this host may administer, if `listens_on`, the host of the listener, is a
        loopback address. `trusts_local`: a program of any user, instead of the gateway's own.
        """
        self._admin_key = admin_key
        self._listens_on = listens_on
        self._trusts_local = trusts_local
        self._changes = 0
        self._one_look = asyncio.Lock()

    def configure(self, admin_key: str | None, *, trusts_local: bool) -> None:
        """Apply these from now on."""
        self._admin_key = admin_key
        self._trusts_local = trusts_local

    def only(self, handler: Handler) -> Handler:
        """The handler for administrators alone."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            await self.check(request)
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

    async def check(self, request: web.Request) -> None:
        """Raise GatewayError unless the caller may administer."""
        if self._admin_key is not None:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            given = request.headers.get("X-Admin-Key") or (token if scheme.lower() == "bearer" else "")
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._admin_key.encode()):
                raise GatewayError("this route needs the admin key", code="admin_key_required", status=401)
            return
        remedy = "or give administration a listener on this host alone (admin.port)"
        found = self._objection(request)
        if found is None and (found := await self._objection_to_owner(request)) is not None:
            remedy += ", or set admin.trust_local if no program on this host passes on requests of others"
        if found is not None:
            raise GatewayError(
                f"administration needs a key here, since {found}; set auth.admin_key and send it as X-Admin-Key, "
                + remedy,
                code="admin_key_not_configured",
                status=403,
            )

    async def admits(self, request: web.Request) -> bool:
        """Return whether the caller may administer."""
        try:
            await self.check(request)
        except GatewayError:
            return False
        return True

    async def _objection_to_owner(self, request: web.Request) -> str | None:
        """Return why another user's program may have opened the connection, None if this user's has."""
        if self._trusts_local:
            return None
        transport = request.transport
        assert transport is not None  # see _objection
        ends = (transport.get_extra_info("peername"), transport.get_extra_info("sockname"))
        # In a thread, so that no stream waits for it, and one after the other, because a host may have many sockets.
        async with self._one_look:
            return await asyncio.to_thread(socket_owner.objection, *ends)

    def _objection(self, request: web.Request) -> str | None:
        """Return why this need not be a program on this host that acts for itself, None if it is one."""
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
