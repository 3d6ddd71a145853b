"""Listening at ports that a predecessor still has: a gateway keeps its ports while it drains."""

from __future__ import annotations

import logging
import time
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from proxy import SERVER
from proxy.common import blocking_http
from proxy.process.supervisor.listening import PortInUse, listen
from proxy.settings import reachable

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from proxy.process.shared import Listeners
    from proxy.settings import Settings

logger = logging.getLogger("proxy.supervisor.succession")

_LOOK_AGAIN_SECONDS: Final = 0.1
_ANSWER_SECONDS: Final = 1.0
# Time from the end of a drain, or of a part of it, until the port is free.
_LETTING_GO_SECONDS: Final = 3.0


def listen_in_succession(
    settings: Settings,
    given: Mapping[str, socket.socket] = MappingProxyType({}),
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Listeners:
    """Listen like `listen`, but wait for ports that are in use.

    The limit is the time of a drain, if a draining gateway has the ports. Another process has the time that a gateway
    needs to free its clients' port after a signal. Raises as `listen`.
    """
    drain = settings.drain
    began = clock()
    seconds = drain.not_ready_seconds + _LETTING_GO_SECONDS
    is_told = is_drain = False
    while True:
        try:
            return listen(settings, given)
        except PortInUse as error:
            if not is_told:
                is_told = True
                told = "waiting for port %d, which is in use, for %g s, or for as long as a gateway drains there"
                logger.info(told, error.port, seconds)
            if clock() - began >= seconds:
                if is_drain or not _drains(error.host, error.port):
                    raise
                is_drain = True
                seconds += drain.streams_seconds
        sleep(_LOOK_AGAIN_SECONDS)


def _drains(host: str, port: int) -> bool:
    """Return whether the listening process is a gateway that is not ready, as during a drain.

    A port for callbacks has no such route, but answers with the gateway's name.
    """
    try:
        answer = blocking_http.get(reachable(host), port, "/readyz", _ANSWER_SECONDS)
    except blocking_http.HttpRequestError:
        return False
    return answer.server == SERVER and answer.status != HTTPStatus.OK
