"""The routes of operators: metrics, the configuration and its reload, the latest requests, and usage by client key.

The metrics are open. All other routes are for administrators. The log names the author of each change.
"""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiohttp import web

from proxy.api.credentials import Administrators, author
from proxy.api.instances import is_dry_run, parse_bool
from proxy.common.background import run_in_slices
from proxy.common.errors import BadRequest, GatewayError
from proxy.listener.replies import json_response
from proxy.observe.key_usage import HOUR_SECONDS
from proxy.observe.metrics import Metrics, exposition
from proxy.observe.receipts import Receipts, as_shown, names_engine_id, names_instance, was_saved
from proxy.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from prometheus_client import Metric

    from proxy.observe.usage_ledger import UsageKeeper
    from proxy.settings.load import ConfigChange

    Wants = Callable[[Mapping[str, Any]], bool]


class Reload(Protocol):
    """Reads the configuration again and applies it. A dry run only reads it."""

    async def __call__(self, by: str, *, is_dry_run: bool = False) -> ConfigChange:
        """Return the changes. `by`: the author of the reload, for the log. Raises SettingsError."""


class AdminApi:
    """The routes for operators of the gateway itself."""

    def __init__(
        self,
        metrics: Metrics,
        configuration: Callable[[], dict[str, Any]],
        reload: Reload,
        administrators: Administrators,
    ) -> None:
        """Create the admin api.

        Args:
            metrics: The metrics of this worker.
            configuration: Returns the present configuration without secrets.
            reload: Reads the configuration again.
            administrators: Restricts routes to administrators.
        """
        self._metrics = metrics
        self._one_scrape = asyncio.Lock()
        self._configuration = configuration
        self._reload_configuration = reload
        self._administrators = administrators

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the administration routes for the application."""
        return [
            web.get("/metrics", self._show_metrics),
            web.get("/admin/config", self._administrators.guard(self._show_configuration)),
            web.post("/admin/reload", self._administrators.guard_and_limit(self._reload)),
        ]

    async def _show_metrics(self, request: web.Request) -> web.Response:
        # In a thread, so that streams do not wait, and one at a time, because it takes CPU time.
        async with self._one_scrape:
            found: list[Iterable[Metric]] = []
            await run_in_slices(self._metrics.steps(found))
            accept = request.headers.get("Accept", "")
            body, content_type = await asyncio.to_thread(exposition, chain.from_iterable(found), accept)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _show_configuration(self, request: web.Request) -> web.Response:
        return json_response(self._configuration())

    async def _reload(self, request: web.Request) -> web.Response:
        """Reload the configuration, and answer with the changes."""
        dry_run = is_dry_run(request)
        try:
            change = await self._reload_configuration(author(request), is_dry_run=dry_run)
        except SettingsError as error:
            raise BadRequest(str(error), code="invalid_configuration") from None
        instances = {"added": change.added, "removed": change.removed}
        return json_response({"dry_run": dry_run, "changed": change.options, "instances": instances})


class StatusApi:
    """The routes `/admin/status` and `/metrics/history`. The latter is open, because `/metrics` shows the same."""

    def __init__(
        self,
        status: Callable[[], Mapping[str, Any]],
        history: Callable[[], Mapping[str, Any]],
        administrators: Administrators,
    ) -> None:
        """Prepare the routes.

        Args:
            status: Returns the verdict on the gateway; see Verdicts.
            history: Returns the traffic of the last minutes; see History.
            administrators: Restricts `/admin/status` to administrators.
        """
        self._status = status
        self._history = history
        self._administrators = administrators

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes for the application."""
        return [
            web.get("/admin/status", self._administrators.guard(self._show)),
            web.get("/metrics/history", self._show_history),
        ]

    async def _show(self, request: web.Request) -> web.Response:
        return json_response(self._status())

    async def _show_history(self, request: web.Request) -> web.Response:
        return json_response(self._history())


_FILTERS: Final = ("failed", "saved", "slow", "instance", "model", "key")
_TEXT_FILTERS: Final = ("instance", "model", "key", "id")
"""Filters whose value is in the receipt."""
_IDS: Final = ("id", "engine_id")
_MAX_TIME: Final = 2.0**40
_DEFAULT_LIMIT: Final = 50
_MAX_LIMIT: Final = 1000


class RequestsApi:
    """Serves the routes under `/admin/requests`."""

    def __init__(self, receipts: Receipts, settle: Callable[[], None], administrators: Administrators) -> None:
        """Create the requests api.

        Args:
            receipts: The latest requests of all workers.
            settle: Writes the requests that this worker has not written yet.
            administrators: Restricts the routes to administrators.
        """
        self._receipts = receipts
        self._settle = settle
        self._administrators = administrators
        self._one_search = asyncio.Lock()

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes under `/admin/requests` for the application."""
        only = self._administrators.guard
        return [
            web.get("/admin/requests", only(self._show_one)),
            web.get("/admin/requests/recent", only(self._show_recent)),
        ]

    async def _show_recent(self, request: web.Request) -> web.Response:
        """Show the latest requests that match all filters of the query, latest first."""
        query = _query(request, ("limit", *_FILTERS))
        limit = _limit(query.pop("limit", None))
        return json_response({"requests": await self._find(query, limit)})

    async def _show_one(self, request: web.Request) -> web.Response:
        """Show the requests with an id: usually one, but clients choose their ids."""
        query = _query(request, _IDS)
        if len(query) != 1:
            raise BadRequest(
                "give id (the X-Request-Id of a request) or engine_id (its id in the log of an engine); "
                "/admin/requests/recent lists the latest requests"
            )
        found = await self._find(query, _MAX_LIMIT)
        if not found:
            raise GatewayError(
                f"no request with this {next(iter(query))} is stored: it has not ended, or later requests replaced it "
                "(see admin.receipts_bytes)",
                code="request_not_kept",
                status=404,
            )
        return json_response({"requests": found})

    async def _find(self, query: Mapping[str, str], limit: int) -> list[dict[str, Any]]:
        """Return up to `limit` requests that match the query."""
        tests = [_test(name, value) for name, value in query.items()]
        # A text that all matching requests contain. The ids of engines are longer than the value in the query.
        literal = next((value for name, value in query.items() if name in _TEXT_FILTERS), None)
        latest = partial(
            self._receipts.latest,
            lambda receipt: all(fits(receipt) for fits in tests),
            limit,
            containing=b"" if literal is None else literal.encode(errors="surrogatepass"),
        )
        self._settle()
        # In a thread, so that streams do not wait, and one at a time, because it takes CPU time.
        async with self._one_search:
            found = await asyncio.to_thread(latest)
        return [as_shown(receipt) for receipt in found]


class UsageApi:
    """The route with the usage of client keys by hour."""

    def __init__(self, usage: UsageKeeper, settle: Callable[[], None], administrators: Administrators) -> None:
        """Create the usage api.

        Args:
            usage: The usage of all workers.
            settle: Counts the requests that this worker has not counted yet.
            administrators: Restricts the route to administrators.
        """
        self._usage = usage
        self._settle = settle
        self._administrators = administrators

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the route `/admin/usage` for the application."""
        return [web.get("/admin/usage", self._administrators.guard(self._show))]

    async def _show(self, request: web.Request) -> web.Response:
        """Show the usage by hour since a time, earliest first."""
        query = _query(request, ("since", "key"))
        since_seconds = _time("since", query["since"]) if "since" in query else 0.0
        self._settle()
        rows = await self._usage.report(int(since_seconds) // HOUR_SECONDS, query.get("key"))
        return web.Response(body=b'{"usage":%b}' % rows, content_type="application/json")


def _time(name: str, text: str) -> float:
    """Return a time of the query in seconds since the Unix epoch. Raises BadRequest."""
    try:
        if text.isascii() and text.isdecimal():
            return min(float(text), _MAX_TIME)
        time = datetime.fromisoformat(text)
        return max(0.0, (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise BadRequest(
            f"{name} must be a time such as 2026-11-27T18:00:00Z, a date, or seconds since the Unix epoch", param=name
        ) from None


def _query(request: web.Request, names: Sequence[str]) -> dict[str, str]:
    """Return the query. Raises BadRequest for unknown or repeated names, so that a mistyped filter is not ignored."""
    query = request.query
    for name in query:
        if name not in names:
            raise BadRequest(f"unknown parameter; the query may have {', '.join(names)}", param=name[:100])
        if len(query.getall(name)) > 1:
            raise BadRequest(f"{name} is given twice", param=name)
    return dict(query)


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= _MAX_LIMIT:
        return int(text)
    raise BadRequest(f"limit must be a whole number from 1 to {_MAX_LIMIT}", param="limit")


def _seconds(name: str, value: str) -> float:
    """Return a number of seconds from the query. Raises BadRequest."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise BadRequest(f"{name} must be a number of seconds, such as 2.5", param=name)
    return seconds


def _test(name: str, value: str) -> Wants:
    """Return a function that tests a request by one filter."""
    if name == "failed":
        is_failed = parse_bool(name, value)
        return lambda receipt: (receipt["term"] != "--") is is_failed
    if name == "saved":
        is_saved = parse_bool(name, value)
        return lambda receipt: was_saved(receipt) is is_saved
    if name == "slow":
        min_seconds = _seconds(name, value)
        return lambda receipt: (receipt["dur"] if receipt["ttft"] is None else receipt["ttft"]) >= min_seconds
    if name == "instance":
        return lambda receipt: names_instance(receipt, value)
    if name == "engine_id":
        return lambda receipt: names_engine_id(receipt, value)
    return lambda receipt: bool(receipt[name] == value)
