"""What operators and their tools ask: what does it measure, and what is configured. And to have that read again.

Everybody may look. Changing anything is for administrators, and is one line in the log, with its author.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson
from aiohttp import web

from proxy.api.credentials import author
from proxy.api.instances import is_dry_run, truth
from proxy.common.errors import BadRequest, GatewayError
from proxy.observe.receipts import display, names_engine_id, names_instance
from proxy.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.api.credentials import Administrators
    from proxy.observe.metrics import Metrics
    from proxy.observe.receipts import Receipts
    from proxy.settings.change import ConfigChange

    Wants = Callable[[Mapping[str, Any]], bool]


_json: Final = partial(web.json_bytes_response, dumps=orjson.dumps)


class Reload(Protocol):
    """Reads the configuration again and applies it, or only says what that would change."""

    async def __call__(self, by: str, *, is_dry_run: bool = False) -> ConfigChange:
        """`by`: who wants it. Raises SettingsError."""


class AdminApi:
    """The routes for operators of the gateway itself."""

    def __init__(
        self,
        metrics: Metrics,
        configuration: Callable[[], dict[str, Any]],
        reload: Reload,
        administrators: Administrators,
    ) -> None:
        """`configuration` tells what is in force, for anybody to see."""
        self._metrics = metrics
        self._one_scrape = asyncio.Lock()
        self._configuration = configuration
        self._reload_configuration = reload
        self._administrators = administrators

    def routes(self) -> Sequence[web.RouteDef]:
        """For the application."""
        return [
            web.get("/metrics", self._show_metrics),
            web.get("/admin/config", self._administrators.only(self._show_configuration)),
            web.post("/admin/reload", self._administrators.only_few(self._reload)),
        ]

    async def _show_metrics(self, request: web.Request) -> web.Response:
        # In a thread, so that no stream waits for it, and one after the other, because it is work for the processor.
        async with self._one_scrape:
            snapshot = self._metrics.snapshot(request.headers.get("Accept", ""))
            body, content_type = await asyncio.to_thread(snapshot)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _show_configuration(self, request: web.Request) -> web.Response:
        return _json(self._configuration())

    async def _reload(self, request: web.Request) -> web.Response:
        """The change, or in one sentence why there is none."""
        dry_run = is_dry_run(request)
        try:
            change = await self._reload_configuration(author(request), is_dry_run=dry_run)
        except SettingsError as error:
            raise BadRequest(str(error), code="invalid_configuration") from None
        instances = {"added": change.added, "removed": change.removed}
        return _json({"dry_run": dry_run, "changed": change.options, "instances": instances})


_FILTERS: Final = ("failed", "instance", "model", "key")
_IDS: Final = ("id", "engine_id")
_DEFAULT_LIMIT: Final = 50
_MAX_LIMIT: Final = 1000


class RequestsApi:
    """The routes under `/admin/requests`. `settle` writes what this worker has not written yet."""

    def __init__(self, receipts: Receipts, settle: Callable[[], None], administrators: Administrators) -> None:
        self._receipts = receipts
        self._settle = settle
        self._administrators = administrators
        self._one_search = asyncio.Lock()

    def routes(self) -> Sequence[web.RouteDef]:
        """For the application."""
        only = self._administrators.only
        return [
            web.get("/admin/requests", only(self._show_one)),
            web.get("/admin/requests/recent", only(self._show_recent)),
        ]

    async def _show_recent(self, request: web.Request) -> web.Response:
        """The latest requests that fit all filters of the query, those that ended last first."""
        asked = _asked(request, ("limit", *_FILTERS))
        limit = _limit(asked.pop("limit", None))
        return _json({"requests": await self._found(asked, limit)})

    async def _show_one(self, request: web.Request) -> web.Response:
        """The requests that have an id: usually one, but clients choose their ids."""
        asked = _asked(request, _IDS)
        if len(asked) != 1:
            raise BadRequest(
                "give id, a request's X-Request-Id, or engine_id, what an engine's log calls it; "
                "/admin/requests/recent lists the latest requests"
            )
        found = await self._found(asked, _MAX_LIMIT)
        if not found:
            raise GatewayError(
                f"no request with this {next(iter(asked))} is kept: it is not over, or others have taken its place "
                "(admin.receipts_bytes)",
                code="request_not_kept",
                status=404,
            )
        return _json({"requests": found})

    async def _found(self, asked: Mapping[str, str], limit: int) -> list[dict[str, Any]]:
        tests = [_test(name, value) for name, value in asked.items()]
        # What all that are wanted have in them: what an engine calls a request is longer than that.
        literal = next((value for name, value in asked.items() if name not in ("failed", "engine_id")), None)
        latest = partial(
            self._receipts.latest,
            lambda receipt: all(fits(receipt) for fits in tests),
            limit,
            containing=b"" if literal is None else literal.encode(errors="surrogatepass"),
        )
        self._settle()
        # In a thread, so that no stream waits for it, and one after the other, because it is work for the processor.
        async with self._one_search:
            found = await asyncio.to_thread(latest)
        return [display(receipt) for receipt in found]


def _asked(request: web.Request, known: Sequence[str]) -> dict[str, str]:
    """The query. Raises BadRequest for what is not known, so that nobody takes a mistyped filter for one that fits
    all.
    """
    query = request.query
    for name in query:
        if name not in known:
            raise BadRequest(f"the query may have {', '.join(known)}", param=name[:100])
        if len(query.getall(name)) > 1:
            raise BadRequest(f"{name} is given twice", param=name)
    return dict(query)


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= _MAX_LIMIT:
        return int(text)
    raise BadRequest(f"limit must be a whole number from 1 to {_MAX_LIMIT}", param="limit")


def _test(name: str, value: str) -> Wants:
    """Whether a request fits one filter."""
    if name == "failed":
        is_failed = truth(name, value)
        return lambda receipt: (receipt["term"] != "--") is is_failed
    if name == "instance":
        return lambda receipt: names_instance(receipt, value)
    if name == "engine_id":
        return lambda receipt: names_engine_id(receipt, value)
    return lambda receipt: bool(receipt[name] == value)
