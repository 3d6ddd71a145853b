"""Client keys at the routes: whose request it is, told before its body is read, for limits, fairness and the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp import web

from proxy.callers import ANONYMOUS

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from proxy.callers import Caller, Callers

CALLER: Final = web.RequestKey("caller", str)
"""Where a `web.Request` keeps the name of its key, once it was identified; `-` when clients need none."""


class ClientKeys:
    """What the clients' routes ask. Probes, metrics and administration do not: they have rules of their own.

    The routes ask inside their own account of a request, so that one that is refused has its line in the log, too.
    """

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def identify(self, request: web.Request) -> Caller:
        """Whose request it is; its name is kept in the request. Raises Unauthorized."""
        if not self._callers.have_keys:
            request[CALLER] = ANONYMOUS.name
            return ANONYMOUS
        headers = request.headers
        caller = self._callers.identify(headers.get("Authorization"), headers.get("X-Api-Key"))
        request[CALLER] = caller.name
        return caller

    def enter(self, caller: Caller) -> AbstractContextManager[None]:
        """Count one request of a caller while the block lasts. Entering raises LimitExceeded."""
        return self._callers.enter(caller)

    def credential(self, request: web.Request) -> str | None:
        """The Authorization that may be passed on to engines: that of a client that needed no key of this gateway.

        It is what identifying the request has shown, though the keys may have changed since. None before.
        """
        is_anonymous = request.get(CALLER) == ANONYMOUS.name
        return request.headers.get("Authorization") if is_anonymous else None
