"""The routes GET /v1/models and /v1/models/NAME: the models of all engines, even while some of them are down."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from proxy.api.questions import (
    QuestionParts,
    ask_engine,
    make_bad_answer_error,
    make_counted_route,
    make_no_answer_error,
)
from proxy.common.errors import UnknownModel, UpstreamError
from proxy.dialects.adjustments import ModelNames
from proxy.listener.replies import json_response

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.balancer.models import ServedModels
    from proxy.balancer.pool import Pool
    from proxy.common.backend import Backend
    from proxy.settings import Settings

_PATH: Final = "/v1/models"
_NAMED: Final = _PATH + "/{model:.+}"  # names may have slashes
_TIMEOUT_SECONDS: Final = 3.0
_WHAT: Final = "list its models"
_FRESH_SECONDS: Final = 2.0


class ModelsApi:
    """Merges the lists of all eligible backends by model id. The first backend that lists a model describes it.

    The last list is cached for two seconds for clients with the same credential.
    """

    def __init__(
        self, parts: QuestionParts, pools: Sequence[Pool], models: ServedModels, settings: Callable[[], Settings]
    ) -> None:
        """Create the models api.

        Args:
            parts: The parts of routes that query engines.
            pools: The pools whose backends are queried.
            models: The known models of all instances.
            settings: Returns the present settings.
        """
        self._pools = pools
        self._served_models = models
        self._engine_client = parts.engine_client
        self._engine_keys = parts.engine_keys
        self._client_keys = parts.key_auth
        self._metrics = parts.metrics
        self._settings = settings
        self._cached_models: dict[str, dict[str, Any]] = {}
        """The last list, by model id."""
        self._cached_for: str | None = None
        """The credential that the list was requested with."""
        self._cached_until = 0.0
        """The end of its validity, in monotonic seconds."""

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes of models for the application."""
        return [
            web.get(path, make_counted_route("models", answer, self._client_keys, self._metrics))
            for path, answer in ((_PATH, self._list_models), (_NAMED, self._show_model))
        ]

    async def _list_models(self, request: web.Request) -> web.Response:
        models = await self._merge_models(self._client_keys.credential_for_engines(request))
        names = ModelNames(self._settings().models.aliases)
        aliases = [
            {**models[served], "id": alias} for alias, served in names.engine_names_by_alias.items() if served in models
        ]
        return json_response({"object": "list", "data": [*models.values(), *aliases]})

    async def _show_model(self, request: web.Request) -> web.Response:
        models = await self._merge_models(self._client_keys.credential_for_engines(request))
        name = request.match_info["model"]
        model = models.get(ModelNames(self._settings().models.aliases).engine_name(name))
        if model is None:
            raise UnknownModel()
        return json_response({**model, "id": name})

    async def _merge_models(self, credential: str | None) -> dict[str, dict[str, Any]]:
        """Return the models of all engines by id."""
        if credential == self._cached_for and time.monotonic() < self._cached_until:
            return self._cached_models
        backends = [backend for pool in self._pools for backend in pool.eligible_backends()]
        answers = await asyncio.gather(*(self._ask_engine(backend, credential) for backend in backends))
        lists = [answer for answer in answers if isinstance(answer, list)]
        if not lists:
            raise make_no_answer_error(
                [answer for answer in answers if isinstance(answer, UpstreamError)], "its models"
            )
        models: dict[str, dict[str, Any]] = {}
        for model in (model for answer in lists for model in answer):
            models.setdefault(model["id"], model)
        if self._served_models.has_several_groups:
            # A model of only one role cannot be requested. A model that is only configured may be missing in the lists.
            unseen = {"object": "model", "created": 0, "owned_by": "pdproxy"}
            whole = sorted(self._served_models.fully_served_names)
            models = {name: models.get(name) or {"id": name, **unseen} for name in whole}
        self._cached_models = models
        self._cached_for, self._cached_until = credential, time.monotonic() + _FRESH_SECONDS
        return self._cached_models

    async def _ask_engine(self, backend: Backend, credential: str | None) -> list[dict[str, Any]] | UpstreamError:
        """Return the models of one engine, or the error of the request."""
        headers = self._engine_keys.credential_headers(backend, credential)
        try:
            answer = await ask_engine(self._engine_client, backend, _PATH, headers, _TIMEOUT_SECONDS, _WHAT)
            return [model for model in answer["data"] if isinstance(model["id"], str)]
        except UpstreamError as error:
            return error
        except (TypeError, KeyError):
            return make_bad_answer_error(backend, _WHAT)
