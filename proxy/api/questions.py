"""Sends queries of clients to engines, and returns their JSON or an error."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.engines import EngineKeys, mask_credential
from proxy.common.errors import Failure, GatewayError, UpstreamError
from proxy.upstream import EngineClient, EngineRequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from aiohttp import web

    from proxy.api.credentials import KeyAuth
    from proxy.common.backend import Backend
    from proxy.observe.metrics import Metrics

_MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QuestionParts:
    """The parts of one worker for the routes that query engines."""

    engine_client: EngineClient
    """Client for engines."""
    engine_keys: EngineKeys
    """Credentials for engines."""
    key_auth: KeyAuth
    """Keys of clients, and their limits."""
    metrics: Metrics
    """Metrics of this worker."""


def make_counted_route(
    api: str,
    answer: Callable[[web.Request], Awaitable[web.Response]],
    client_keys: KeyAuth,
    metrics: Metrics,
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Make a handler that applies the limits of the client key and counts the requests by status.

    Args:
        api: The metric label.
        answer: The handler of the route.
        client_keys: The keys of clients.
        metrics: The metrics of this worker.
    """

    async def route(request: web.Request) -> web.Response:
        status = 499
        try:
            with client_keys.count_in_flight(client_keys.find_client_key(request)):
                response = await answer(request)
            status = 200
        except GatewayError as error:
            status = error.status
            raise
        finally:
            metrics.requests_total.labels(api, str(status)).inc()
        return response

    return route


async def ask_engine(
    engine_client: EngineClient,
    backend: Backend,
    path: str,
    headers: Mapping[str, str],
    timeout_seconds: float,
    purpose: str,
) -> Any:
    """Query an engine and return its JSON. Raises UpstreamError.

    Args:
        engine_client: The client for engines.
        backend: The engine.
        path: The path, with a query.
        headers: The headers for the engine.
        timeout_seconds: The time limit of the query in seconds.
        purpose: A verb and its object for error messages, such as "list its models".
    """
    try:
        answer = await engine_client.get_body(backend.url, path, timeout_seconds, headers, _MAX_ANSWER_BYTES)
    except EngineRequestError as error:
        is_late = error.failure_kind is Failure.TIMEOUT
        message = f"{backend.role} instance did not {purpose}" + (" in time" if is_late else "")
        raise UpstreamError(Failure.TIMEOUT if is_late else Failure.CONNECT, backend, message) from None
    if answer.status >= 400:
        message = f"{backend.role} instance answered with status {answer.status}"
        kind = {"content-type": answer.headers.get("Content-Type", "application/json")}
        raise UpstreamError(
            Failure.STATUS,
            backend,
            message,
            engine_status=answer.status,
            body=mask_credential(answer.body, headers.get("Authorization")),
            headers=kind,
        )
    if answer.status == 200:
        with suppress(ValueError):
            return answer.parsed_json
    raise make_bad_answer_error(backend, purpose)


def make_bad_answer_error(backend: Backend, purpose: str) -> UpstreamError:
    """Return the error for an answer of an unexpected form. `purpose`: see `ask_engine`."""
    return UpstreamError(
        Failure.BAD_ANSWER, backend, f"{backend.role} instance did not {purpose} in the way that engines do"
    )


def make_no_answer_error(engine_errors: Sequence[UpstreamError], purpose: str) -> GatewayError:
    """Return the error for a query that no engine has answered.

    Args:
        engine_errors: The errors of the engines. One that the client has caused is returned.
        purpose: The object of the query for the message, such as "its models".
    """
    for error in engine_errors:
        if error.is_fault_of_client:
            return error
    found = GatewayError(f"no instance answered when asked for {purpose}", code="no_healthy_instance", status=503)
    found.retry_after_seconds = 1.0
    return found
