"""Client keys at the routes: whose request it is, told before its body is read, for limits, fairness and the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp import web

from proxy.gateway.api_keys import ANONYMOUS, credential_for_engines

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from proxy.gateway.api_keys import ApiKey, ApiKeys

API_KEY: Final = web.RequestKey("api_key", str)
"""Where a `web.Request` keeps the name of its key, once it was identified; `-` when clients need none."""


class KeyAuth:
    """What the clients' routes ask. Probes, metrics and administration do not: they have rules of their own.

    The routes ask inside their own account of a request, so that one that is refused has its line in the log, too.
    """

    def __init__(self, api_keys: ApiKeys) -> None:
        self._api_keys = api_keys

    def identify(self, request: web.Request) -> ApiKey:
        """Whose request it is; its name is kept in the request. Raises Unauthorized."""
        if not self._api_keys.have_keys:
            request[API_KEY] = ANONYMOUS.name
            return ANONYMOUS
        headers = request.headers
        key = self._api_keys.identify(headers.get("Authorization"), headers.get("X-Api-Key"))
        request[API_KEY] = key.name
        return key

    def enter(self, key: ApiKey) -> AbstractContextManager[None]:
        """Count one request of a key while the block lasts. Entering raises LimitExceeded."""
        return self._api_keys.enter(key)

    def credential(self, request: web.Request) -> str | None:
        """The Authorization that may be passed on to engines: that of a client that needed no key of this gateway.

        It is what identifying the request has shown, though the keys may have changed since. None before.
        """
        if request.get(API_KEY) != ANONYMOUS.name:
            return None
        return credential_for_engines(request.headers.get("Authorization"), request.headers.get("X-Api-Key"))
