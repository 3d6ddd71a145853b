"""Checks the credentials of administrators and clients.

An administrator sends the admin key. If there is none, only programs of the gateway's user on this host may administer.

The loopback address alone proves little, because a TLS terminator, a reverse proxy or a sidecar on this host connects
from there for any client. So without a key, the listener must have a loopback address, and no header may show that the
request is made for another client. Only the status page may read. The gateway's user must have opened the connection,
see `socket_owner.py`.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

from proxy.api import socket_owner
from proxy.common.endpoints import find_client_address, is_in_networks, is_loopback_host
from proxy.common.errors import GatewayError, LimitExceeded
from proxy.gateway.api_keys import ANONYMOUS, ApiKey, ApiKeys, credential_for_engines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from aiohttp.typedefs import Handler


_MAX_CHANGES_AT_ONCE: Final = 10
_FORWARDED_FOR: Final = "X-Forwarded-For"
_CLIENT: Final = web.RequestKey("client", object)
"""Key of the client's address in a request that came through trusted proxies."""

# Headers of reverse proxies, sidecars, content delivery networks and load balancers (RFC 7239, Envoy, nginx, Akamai,
# Cloudflare, Azure, AWS, Google), and those that browsers add to the requests of a page (Fetch standard).
_ON_BEHALF: Final = re.compile(
    r"forwarded|via|origin|referer|cdn-loop|true-client-.*|.*client-ip|.*connecting-ip|.*real-ip|.*remote-(?:ip|addr)"
    r"|(?:x-forwarded|x-envoy|x-original|x-azure|x-amzn|x-amz-cf|x-appengine|x-cloud-trace|x-arr|cf|sec-fetch)(?:-.*)?",
    re.IGNORECASE,
)


class Administrators:
    """Decides whether requests may use the routes for administrators."""

    def __init__(
        self,
        admin_key: Callable[[], str | None],
        *,
        listens_on: str,
        trusts_local: Callable[[], bool],
        trusted_proxies: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Create the administrators.

        Args:
            admin_key: Returns the admin key. None: programs on this host are administrators if the listener allows it.
            listens_on: The host of the listener. It must be a loopback address if there is no key.
            trusts_local: Returns whether programs of all users of this host are administrators, not just those of the
                gateway's user.
            trusted_proxies: Returns the networks of reverse proxies that name the client.
        """
        self._trusted_proxies = trusted_proxies
        self._admin_key = admin_key
        self._listening_address = listens_on
        self._trusts_local_user = trusts_local
        self._running_changes = 0
        self._owner_look_up_lock = asyncio.Lock()

    def require_administrator(self, handler: Handler) -> Handler:
        """Return a handler that serves administrators only."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            await self.check_administrator(request)
            return await handler(request)

        return guarded

    def require_administrator_and_limit(self, handler: Handler) -> Handler:
        """Return a handler for administrators that serves a limited number of requests at a time."""

        async def limited(request: web.Request) -> web.StreamResponse:
            if self._running_changes >= _MAX_CHANGES_AT_ONCE:
                message = f"{_MAX_CHANGES_AT_ONCE} changes are in progress; retry later"
                raise LimitExceeded(message, code="too_many_changes", retry_after_seconds=1.0)
            self._running_changes += 1
            try:
                return await handler(request)
            finally:
                self._running_changes -= 1

        return self.require_administrator(limited)

    async def check_administrator(self, request: web.Request) -> None:
        """Raise GatewayError if the caller may not administer."""
        networks = self._trusted_proxies()
        if networks:
            request[_CLIENT] = find_client_address(
                request.remote or "-", request.headers.getall(_FORWARDED_FOR, ()), networks
            )
        admin_key = self._admin_key()
        if admin_key is not None:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            given = request.headers.get("X-Admin-Key") or (token if scheme.lower() == "bearer" else "")
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), admin_key.encode()):
                raise GatewayError("this route needs the admin key", code="admin_key_required", status=401)
            return
        remedy = "or configure a listener for administrators on this host (admin.port)"
        found = self._find_objection(request)
        if found is None and (found := await self._find_objection_to_owner(request)) is not None:
            remedy += ", or set admin.trust_local if no program on this host forwards requests of other clients"
        if found is not None:
            raise GatewayError(
                f"this route needs an admin key, because {found}; set auth.admin_key and send it as X-Admin-Key, "
                + remedy,
                code="admin_key_not_configured",
                status=403,
            )

    async def is_administrator(self, request: web.Request) -> bool:
        """Return whether the caller of a request may administer."""
        try:
            await self.check_administrator(request)
        except GatewayError:
            return False
        return True

    async def _find_objection_to_owner(self, request: web.Request) -> str | None:
        """Return why a program of another user may have opened the connection; None if this user's program did."""
        if self._trusts_local_user():
            return None
        transport = request.transport
        assert transport is not None  # see _find_objection
        ends = (transport.get_extra_info("peername"), transport.get_extra_info("sockname"))
        # In a thread, so that streams do not wait, and one at a time, because a host may have many sockets.
        async with self._owner_look_up_lock:
            return await asyncio.to_thread(socket_owner.find_owner_objection, *ends)

    def _find_objection(self, request: web.Request) -> str | None:
        """Return why the caller may not count as a program on this host that acts for itself; None if it does."""
        if not is_loopback_host(self._listening_address):
            return f"the gateway listens on {self._listening_address}, which other hosts may reach"
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        if not isinstance(peer, tuple) or not is_loopback_host(peer[0]):
            return "the connection does not come from this host"
        if is_in_networks(str(peer[0]), self._trusted_proxies()):
            return "the request came through a proxy of listen.trusted_proxies"
        is_own_page = _is_read_by_own_page(request)
        for name in request.headers:
            if _ON_BEHALF.fullmatch(name) and not (is_own_page and name.lower().startswith("sec-fetch-")):
                return f"the header {name} shows that the request is made for another client"
        host = request.headers.get(hdrs.HOST)
        if host is not None and not is_loopback_host(_without_port(host)):
            return "its Host header is not a loopback name or address"
        return None


def author_of_change(request: web.Request) -> str:
    """Return who asked for a change, for the log."""
    return f"an administrator at {request.get(_CLIENT, request.remote)}"


def _is_read_by_own_page(request: web.Request) -> bool:
    """Return whether a page of this listener reads something. This can only be the status page.

    Scripts cannot set this header, and browsers give it another value for pages of other ports or names (Fetch
    Metadata, 2.1). The Host header is checked, too.
    """
    return request.method == hdrs.METH_GET and request.headers.getall("Sec-Fetch-Site", ()) == ["same-origin"]


def _without_port(host_header: str) -> str:
    return (
        re.sub(r":[0-9]*\Z", "", host_header).strip("[]") if not host_header.endswith("]") else host_header.strip("[]")
    )


API_KEY: Final = web.RequestKey("api_key", str)
"""Key of the client key's name in a request, after `find_client_key`. The name is `-` if clients need no key."""


class KeyAuth:
    """Checks the client key at the routes for clients. Probes, metrics and administration have other rules.

    The routes check the key after they have begun to record the request, so that the log includes rejected requests.
    """

    def __init__(self, api_keys: ApiKeys) -> None:
        self._api_keys = api_keys

    def find_client_key(self, request: web.Request) -> ApiKey:
        """Return the client key of a request, and store its name in the request. Raises Unauthorized."""
        if not self._api_keys.are_keys_required:
            request[API_KEY] = ANONYMOUS.key_name
            return ANONYMOUS
        headers = request.headers
        key = self._api_keys.find_key(headers.get("Authorization"), headers.get("X-Api-Key"))
        request[API_KEY] = key.key_name
        return key

    def count_in_flight(self, key: ApiKey) -> AbstractContextManager[None]:
        """Return a context manager that counts a request of a key. Entering it raises LimitExceeded."""
        return self._api_keys.count_in_flight(key)

    def credential_for_engines(self, request: web.Request) -> str | None:
        """Return the Authorization header for engines; None if engines get none.

        Only the credential of a client that needed no key of this gateway is passed on. The request must have been
        identified before. Later changes of the keys do not matter.
        """
        if request.get(API_KEY) != ANONYMOUS.key_name:
            return None
        return credential_for_engines(request.headers.get("Authorization"), request.headers.get("X-Api-Key"))
