"""What operators and their tools ask: what does it measure, and what is configured. And to have that read again.

Everybody may look. Changing anything is for administrators, and is one line in the log, with its author.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson
from aiohttp import web

from proxy.api.administrators import author
from proxy.api.instance_changes import is_dry_run
from proxy.common.errors import BadRequest
from proxy.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.api.administrators import Administrators
    from proxy.observe.metrics import Metrics
    from proxy.settings.change import ConfigChange

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
