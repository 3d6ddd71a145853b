"""GET /v1/models, and one of them: what all engines together serve, also while some of them are down."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson
from aiohttp import web

from proxy.api.questions import ask, bad_answer, counted, nobody
from proxy.common.errors import UnknownModel, UpstreamError
from proxy.dialects.adjustments import ModelNames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.api.questions import QuestionParts
    from proxy.balancer.models import ServedModels
    from proxy.balancer.pool import Pool
    from proxy.common.backend import Backend
    from proxy.settings import Settings

_PATH: Final = "/v1/models"
_NAMED: Final = _PATH + "/{model:.+}"  # names may have slashes
_json: Final = partial(web.json_bytes_response, dumps=orjson.dumps)
_TIMEOUT_SECONDS: Final = 3.0
_WHAT: Final = "list its models"
_FRESH_SECONDS: Final = 2.0


class ModelsApi:
    """Asks all eligible backends at once and merges their lists by model id; the first to name a model describes it.

    The last answer is kept for two seconds, for clients with the same credential.
    """

    def __init__(self, parts: QuestionParts, pools: Sequence[Pool], models: ServedModels, settings: Settings) -> None:
        """Take the settings.

        Args:
            parts: What it asks engines with.
            pools: Pools whose backends are asked.
            models: Models of all instances, as far as they are known.
            settings: The settings of the gateway.
        """
        self._pools = pools
        self._known = models
        self._client = parts.client
        self._engine_keys = parts.engine_keys
        self._client_keys = parts.client_keys
        self._metrics = parts.metrics
        self._kept_for: str | None = None
        self._kept_until = 0.0
        self._kept: dict[str, dict[str, Any]] = {}
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Take changed settings for requests that come from now on."""
        self._names = ModelNames(settings.models.aliases)

    def routes(self) -> Sequence[web.RouteDef]:
        """For the application."""
        return [
            web.get(path, counted("models", answer, self._client_keys, self._metrics))
            for path, answer in ((_PATH, self._models), (_NAMED, self._model))
        ]

    async def _models(self, request: web.Request) -> web.Response:
        models = await self._merged(self._client_keys.credential(request))
        aliases = [{**models[served], "id": said} for said, served in self._names.exact.items() if served in models]
        return _json({"object": "list", "data": [*models.values(), *aliases]})

    async def _model(self, request: web.Request) -> web.Response:
        models = await self._merged(self._client_keys.credential(request))
        name = request.match_info["model"]
        model = models.get(self._names.served(name))
        if model is None:
            raise UnknownModel()
        return _json({**model, "id": name})

    async def _merged(self, credential: str | None) -> dict[str, dict[str, Any]]:
        """The models by name."""
        if credential == self._kept_for and time.monotonic() < self._kept_until:
            return self._kept
        backends = [backend for pool in self._pools for backend in pool.eligible()]
        answers = await asyncio.gather(*(self._ask(backend, credential) for backend in backends))
        lists = [answer for answer in answers if isinstance(answer, list)]
        if not lists:
            raise nobody([answer for answer in answers if isinstance(answer, UpstreamError)], "its models")
        models: dict[str, dict[str, Any]] = {}
        for model in (model for answer in lists for model in answer):
            models.setdefault(model["id"], model)
        if self._known.is_mixed:
            # What one role alone serves cannot be asked for, and what an instance is said to serve it may not tell.
            unseen = {"object": "model", "created": 0, "owned_by": "pdproxy"}
            whole = sorted(self._known.complete)
            models = {name: models.get(name) or {"id": name, **unseen} for name in whole}
        self._kept = models
        self._kept_for, self._kept_until = credential, time.monotonic() + _FRESH_SECONDS
        return self._kept

    async def _ask(self, backend: Backend, credential: str | None) -> list[dict[str, Any]] | UpstreamError:
        """One engine's models, or why there are none."""
        headers = self._engine_keys.headers(backend, credential)
        try:
            answer = await ask(self._client, backend, _PATH, headers, _TIMEOUT_SECONDS, _WHAT)
            return [model for model in answer["data"] if isinstance(model["id"], str)]
        except UpstreamError as error:
            return error
        except (TypeError, KeyError):
            return bad_answer(backend, _WHAT)
