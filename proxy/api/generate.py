"""POST /generate, SGLang's own API: kept, counted and let in like OpenAI's, and served by the same attempts.

Only where engines speak it: with connector sglang_bootstrap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from aiohttp import web

from proxy.api.openai import GenerationApi
from proxy.connectors.sglang_bootstrap import SglangBootstrap
from proxy.flow.native import NativeGateway
from proxy.wire.sglang import NativeApi

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.api.drain import Drain
    from proxy.api.keys import ClientKeys
    from proxy.flow.gateway import Gateway
    from proxy.metrics import Metrics
    from proxy.settings import Settings
    from proxy.wire.openai import Api


class GenerateApi(GenerationApi):
    """One more route that goes through the connector."""

    def __init__(self, gateway: Gateway, keys: ClientKeys, drain: Drain, settings: Settings, metrics: Metrics) -> None:
        self._native = NativeGateway(gateway)
        self._is_spoken = isinstance(gateway.connector, SglangBootstrap)
        super().__init__(self._native, keys, drain, settings, metrics)

    def configure(self, settings: Settings) -> None:
        """Take changed settings for requests that come from now on."""
        super().configure(settings)
        self._native.configure(settings)

    def routes(self) -> Sequence[web.RouteDef]:
        """For the application; none where engines do not speak this API."""
        path = NativeApi.GENERATE.path
        return [web.post(path, self._generate), web.put(path, self._generate)] if self._is_spoken else []

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(cast("Api", NativeApi.GENERATE), request)
