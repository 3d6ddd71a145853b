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

from proxy.api.credentials import Administrators, author_of_change
from proxy.api.instances import is_dry_run, parse_bool
from proxy.common.background import run_in_slices
from proxy.common.errors import BadRequest, GatewayError
from proxy.listener.replies import json_response
from proxy.observe.key_usage import HOUR_SECONDS
from proxy.observe.metrics import Metrics, render_exposition
from proxy.observe.receipts import Receipts, names_engine_id, names_instance, receipt_for_operators, was_saved
from proxy.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from prometheus_client import Metric

    from proxy.observe.usage_ledger import UsageKeeper
    from proxy.settings.load import ConfigChange

    Wants = Callable[[Mapping[str, Any]], bool]


class ReloadFunction(Protocol):
    """Reads the configuration again and applies it. A dry run only reads it."""

    async def __call__(self, by: str, *, is_dry_run: bool = False) -> ConfigChange:
        """Return the changes. `by`: the author of the reload, for the log. Raises SettingsError."""


class AdminApi:
    """The routes for operators of the gateway itself."""

    def __init__(
        self,
        metrics: Metrics,
        configuration: Callable[[], dict[str, Any]],
        reload: ReloadFunction,
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
        self._scrape_lock = asyncio.Lock()
        self._configuration = configuration
        self._reload_configuration = reload
        self._administrators = administrators

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the administration routes for the application."""
        return [
            web.get("/metrics", self._show_metrics),
            web.get("/admin/config", self._administrators.require_administrator(self._show_configuration)),
            web.post("/admin/reload", self._administrators.require_administrator_and_limit(self._reload_and_answer)),
        ]

    async def _show_metrics(self, request: web.Request) -> web.Response:
        # In a thread, so that streams do not wait, and one at a time, because it takes CPU time.
        async with self._scrape_lock:
            found: list[Iterable[Metric]] = []
            await run_in_slices(self._metrics.collect_in_steps(found))
            accept = request.headers.get("Accept", "")
            body, content_type = await asyncio.to_thread(render_exposition, chain.from_iterable(found), accept)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _show_configuration(self, request: web.Request) -> web.Response:
        return json_response(self._configuration())

    async def _reload_and_answer(self, request: web.Request) -> web.Response:
        """Reload the configuration, and answer with the changes."""
        dry_run = is_dry_run(request)
        try:
            change = await self._reload_configuration(author_of_change(request), is_dry_run=dry_run)
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
            history: Returns the traffic of the last minutes; see HistoryBoard.
            administrators: Restricts `/admin/status` to administrators.
        """
        self._get_status = status
        self._get_history = history
        self._administrators = administrators

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes for the application."""
        return [
            web.get("/admin/status", self._administrators.require_administrator(self._show_status)),
            web.get("/metrics/history", self._show_history),
        ]

    async def _show_status(self, request: web.Request) -> web.Response:
        return json_response(self._get_status())

    async def _show_history(self, request: web.Request) -> web.Response:
        return json_response(self._get_history())


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
        self._flush_observers = settle
        self._administrators = administrators
        self._search_lock = asyncio.Lock()

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes under `/admin/requests` for the application."""
        only = self._administrators.require_administrator
        return [
            web.get("/admin/requests", only(self._show_one)),
            web.get("/admin/requests/recent", only(self._show_recent)),
        ]

    async def _show_recent(self, request: web.Request) -> web.Response:
        """Show the latest requests that match all filters of the query, latest first."""
        query = _parse_query(request, ("limit", *_FILTERS))
        limit = _parse_limit(query.pop("limit", None))
        return json_response({"requests": await self._find_receipts(query, limit)})

    async def _show_one(self, request: web.Request) -> web.Response:
        """Show the requests with an id: usually one, but clients choose their ids."""
        query = _parse_query(request, _IDS)
        if len(query) != 1:
            raise BadRequest(
                "give id (the X-Request-Id of a request) or engine_id (its id in the log of an engine); "
                "/admin/requests/recent lists the latest requests"
            )
        found = await self._find_receipts(query, _MAX_LIMIT)
        if not found:
            raise GatewayError(
                f"no request with this {next(iter(query))} is stored: it has not ended, or later requests replaced it "
                "(see admin.receipts_bytes)",
                code="request_not_kept",
                status=404,
            )
        return json_response({"requests": found})

    async def _find_receipts(self, query: Mapping[str, str], limit: int) -> list[dict[str, Any]]:
        """Return up to `limit` requests that match the query."""
        tests = [_make_filter(name, value) for name, value in query.items()]
        # A text that all matching requests contain. The ids of engines are longer than the value in the query.
        literal = next((value for name, value in query.items() if name in _TEXT_FILTERS), None)
        latest = partial(
            self._receipts.latest_receipts,
            lambda receipt: all(fits(receipt) for fits in tests),
            limit,
            contained_bytes=b"" if literal is None else literal.encode(errors="surrogatepass"),
        )
        self._flush_observers()
        # In a thread, so that streams do not wait, and one at a time, because it takes CPU time.
        async with self._search_lock:
            found = await asyncio.to_thread(latest)
        return [receipt_for_operators(receipt) for receipt in found]


class UsageApi:
    """The route with the usage of client keys by hour."""

    def __init__(self, usage: UsageKeeper, settle: Callable[[], None], administrators: Administrators) -> None:
        """Create the usage api.

        Args:
            usage: The usage of all workers.
            settle: Counts the requests that this worker has not counted yet.
            administrators: Restricts the route to administrators.
        """
        self._usage_keeper = usage
        self._flush_observers = settle
        self._administrators = administrators

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the route `/admin/usage` for the application."""
        return [web.get("/admin/usage", self._administrators.require_administrator(self._show_usage))]

    async def _show_usage(self, request: web.Request) -> web.Response:
        """Show the usage by hour since a time, earliest first."""
        query = _parse_query(request, ("since", "key"))
        since_seconds = _parse_time("since", query["since"]) if "since" in query else 0.0
        self._flush_observers()
        rows = await self._usage_keeper.report_as_json(int(since_seconds) // HOUR_SECONDS, query.get("key"))
        return web.Response(body=b'{"usage":%b}' % rows, content_type="application/json")


def _parse_time(parameter_name: str, text: str) -> float:
    """Return a time of the query in seconds since the Unix epoch. Raises BadRequest."""
    try:
        if text.isascii() and text.isdecimal():
            return min(float(text), _MAX_TIME)
        time = datetime.fromisoformat(text)
        return max(0.0, (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise BadRequest(
            f"{parameter_name} must be a time such as 2026-11-27T18:00:00Z, a date, or seconds since the Unix epoch",
            param=parameter_name,
        ) from None


def _parse_query(request: web.Request, allowed_names: Sequence[str]) -> dict[str, str]:
    """Return the query. Raises BadRequest for unknown or repeated names, so that a mistyped filter is not ignored."""
    query = request.query
    for name in query:
        if name not in allowed_names:
            raise BadRequest(f"unknown parameter; the query may have {', '.join(allowed_names)}", param=name[:100])
        if len(query.getall(name)) > 1:
            raise BadRequest(f"{name} is given twice", param=name)
    return dict(query)


def _parse_limit(parameter_text: str | None) -> int:
    if parameter_text is None:
        return _DEFAULT_LIMIT
    if parameter_text.isascii() and parameter_text.isdecimal() and 1 <= int(parameter_text[:9]) <= _MAX_LIMIT:
        return int(parameter_text)
    raise BadRequest(f"limit must be a whole number from 1 to {_MAX_LIMIT}", param="limit")


def _parse_seconds(parameter_name: str, value: str) -> float:
    """Return a number of seconds from the query. Raises BadRequest."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise BadRequest(f"{parameter_name} must be a number of seconds, such as 2.5", param=parameter_name)
    return seconds


def _make_filter(filter_name: str, filter_value: str) -> Wants:
    """Return a function that tests a request by one filter."""
    if filter_name == "failed":
        is_failed = parse_bool(filter_name, filter_value)
        return lambda receipt: (receipt["term"] != "--") is is_failed
    if filter_name == "saved":
        is_saved = parse_bool(filter_name, filter_value)
        return lambda receipt: was_saved(receipt) is is_saved
    if filter_name == "slow":
        min_seconds = _parse_seconds(filter_name, filter_value)
        return lambda receipt: (receipt["dur"] if receipt["ttft"] is None else receipt["ttft"]) >= min_seconds
    if filter_name == "instance":
        return lambda receipt: names_instance(receipt, filter_value)
    if filter_name == "engine_id":
        return lambda receipt: names_engine_id(receipt, filter_value)
    return lambda receipt: bool(receipt[filter_name] == filter_value)
