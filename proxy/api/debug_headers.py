"""What trusted callers are told about their own request, if they ask for it: headers with its instances and times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proxy.balancer.pick import reason
from proxy.observe.record import longest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import web

    from proxy.api.administrators import Administrators
    from proxy.balancer.pick import Pick
    from proxy.observe.record import RequestRecord

ASKS: Final = "X-PDProxy-Debug"


class DebugHeaders:
    """Trusted are those who may administer, as far as the listener of clients can tell. Others get the same answer
    without these headers.
    """

    def __init__(self, administrators: Administrators) -> None:
        self._administrators = administrators

    async def admits(self, request: web.Request) -> bool:
        """Return whether the client asks for these headers, and may have them."""
        return ASKS in request.headers and await self._administrators.admits(request)


def debug_fields(record: RequestRecord) -> Iterator[tuple[str, str]]:
    """Yield the headers, with the figures of the access log: the instances of the first unit's last attempt, the
    longest stages, all attempts.
    """
    timelines = record.timelines
    if timelines:
        first = timelines[0]
        yield from _chosen("Prefill", first.prefiller, first.prefill_id, first.prefill_pick)
        yield from _chosen("Decode", first.decoder, first.decode_id, first.decode_pick)
    yield "X-PDProxy-Attempts", str(sum(timeline.attempts for timeline in timelines))
    seconds = longest([timeline.seconds for timeline in timelines])
    told = {stage.label: spent for stage, spent in seconds.items()} | {"total": record.clock() - record.started}
    # Milliseconds, as https://www.w3.org/TR/server-timing/ has them.
    yield "Server-Timing", ", ".join(f"{name};dur={1000 * spent:.1f}" for name, spent in told.items())


def _chosen(role: str, instance: str, leg_id: str, pick: Pick | None) -> Iterator[tuple[str, str]]:
    if instance != "-":
        why = "" if pick is None else f"; reason={reason(pick)}"
        yield f"X-PDProxy-{role}", f"{instance}; id={leg_id}{why}"
