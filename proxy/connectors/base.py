"""The base of all KV-transfer protocols: the Connector, its context, and checks of engines' answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import orjson

from proxy.common.backend import Role
from proxy.common.errors import CLIENT_MISTAKES, Failure, UpstreamError
from proxy.connectors.leg_driver import open_attempt
from proxy.wire.document import InvalidDocument
from proxy.wire.ids import make_request_id
from proxy.wire.openai import OPENAI_APIS, Api, is_abort_reason
from proxy.wire.python_json import dumps, parse_again
from proxy.wire.weight import LONG_BYTES, MAX_ANSWER_ELEMENTS, is_heavier_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from aiohttp import web

    from proxy.balancer.engines import EngineKeys
    from proxy.balancer.incompatibilities import CompatibilityMonitor
    from proxy.balancer.pick import PickRequest
    from proxy.balancer.pool import Pools
    from proxy.balancer.shared.journal import JournalWriter
    from proxy.common.background import BackgroundTasks
    from proxy.connectors.legs import Attempt, Legs
    from proxy.connectors.releaser import KvReleaser
    from proxy.dialects.call import Call
    from proxy.observe.metrics import Metrics
    from proxy.observe.timeline import Timeline
    from proxy.settings import Timeouts
    from proxy.settings.live import LiveSettings
    from proxy.upstream import EngineClient, Response, Upstream


Parsed = TypeVar("Parsed")

new_attempt_id: Final = make_request_id
"""Make the X-Request-Id of one attempt. All legs of the attempt have the same ID.

Engines identify KV transfers by it. A client's own ID is never used, because another request may have the same one.
"""

# No decoder writes an answer more slowly than this.
_MAX_SECONDS_PER_TOKEN: Final = 1.0


@dataclass(slots=True, eq=False, kw_only=True)
class ConnectorContext:
    """The parts of one worker that a connector uses."""

    pools: Pools
    upstream: Upstream
    releaser: KvReleaser
    client: EngineClient
    """Client for requests to engines that are not legs of a call."""
    keys: EngineKeys
    live: LiveSettings
    """The current settings, which a reload replaces."""
    metrics: Metrics
    compatibility: CompatibilityMonitor
    background: BackgroundTasks
    """Owns tasks that continue after their request has ended."""
    new_journal_writer: Callable[[], JournalWriter] | None = None
    """Makes a writer to the journal; None if engines send no events about their KV caches."""
    callback_url: str | None = None
    """Scheme, host and port at which engines call this worker back; None if the connector has no routes."""


class Connector:
    """One KV-transfer protocol, which runs calls on prefillers and decoders.

    The default methods suit most protocols.
    """

    roles: tuple[Role, ...]
    """The roles of which at least one backend must be healthy before the gateway is ready."""
    apis: Sequence[Api] = OPENAI_APIS
    """The APIs that the engines of this protocol serve."""

    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        takes_prefillers = context.live.settings.connector_traits.takes_prefillers
        self.roles = (Role.PREFILL, Role.DECODE) if takes_prefillers else (Role.DECODE,)

    def check_call(self, call: Call) -> None:
        """Raise BadRequest for a call that this protocol cannot serve."""

    def splits_into_units(self, call: Call) -> bool:
        """Return whether the gateway must split a call, because one attempt serves only one prompt and one sample."""
        return True

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the HTTP routes for requests from engines, served at `ConnectorContext.callback_url`."""
        return ()

    def make_legs(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs | None:
        """Return the legs of an attempt at this call; see connectors.legs. The caller sends them.

        None: the attempt needs a task. The connector then overrides `open_attempt`.
        """
        return None

    def skips_queue(self, request: PickRequest) -> bool:
        """Return whether a request should not wait for room, because a decoder computes its prompt alone.

        The request then begins at once, or never.
        """
        return False

    def open_attempt(
        self, call: Call, request: PickRequest, timeline: Timeline
    ) -> AbstractAsyncContextManager[Attempt]:
        """Lease backends as `request` asks, and run the legs until the decoder's status line has arrived.

        The timeline's attempt begins when the backends are leased. Without backends it keeps the previous attempt.
        Leaving the context closes the connections to engines and gives every lease back.
        Raises NoBackendAvailable and UpstreamError.
        """
        legs = self.make_legs(call, request, timeline)
        if legs is None:
            raise NotImplementedError("a connector has legs, or opens attempts itself")
        return open_attempt(legs, self._context.upstream)

    def open_decoder_only_attempt(
        self, call: Call, request: PickRequest, timeline: Timeline
    ) -> AbstractAsyncContextManager[Attempt] | None:
        """Return an attempt in which one decoder computes the prompt itself, without a prefiller.

        None: the engines of this protocol cannot do that.
        """
        return None


def prefill_timeout_seconds(timeouts: Timeouts, call: Call) -> float:
    """Return the time limit for a prefiller's answer, in seconds."""
    return timeouts.prefill_seconds + timeouts.prefill_seconds_per_1k_tokens * call.prompt_tokens / 1000


def first_byte_timeout_seconds(timeouts: Timeouts, call: Call) -> float:
    """Return the time limit for the first byte of an engine that serves a call alone, in seconds.

    An answer that is not streamed begins when it is complete, so the limit grows with the tokens that it may have.
    """
    if call.stream:
        return timeouts.first_token_seconds
    limit = call.output_limit
    if limit is None:
        return timeouts.answer_seconds
    return min(timeouts.answer_seconds, timeouts.first_token_seconds + limit * _MAX_SECONDS_PER_TOKEN)


async def check_status(response: Response) -> None:
    """Raise UpstreamError with the engine's status and body unless the status is a success."""
    if not response.is_success:
        raise make_refusal(response, await response.read_body())


def make_refusal(response: Response, body: bytes) -> UpstreamError:
    """Return the error for an engine's answer with an unsuccessful status."""
    if response.status < 400:
        return response.make_failure(Failure.BAD_ANSWER, f"answered with status {response.status}")
    verb = "rejected the request as invalid" if response.status in CLIENT_MISTAKES else "answered"
    return response.make_refusal(f"{verb} with status {response.status}", response.status, body, response.headers)


class PrefillChoice(msgspec.Struct):
    """One choice of a prefiller's answer."""

    finish_reason: Any = None


class PrefillAnswerBody(msgspec.Struct):
    """The members that the gateway uses of a vLLM prefiller's answer. The generated token is not among them."""

    raw_usage: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="usage")
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    choices: list[PrefillChoice] = []
    error: Any = None
    object: Any = None
    code: Any = None

    @property
    def read_usage(self) -> Any:
        """The usage as any JSON value; None if it is missing, or if clients could not get it exactly as it was read."""
        try:
            return orjson.loads(bytes(self.raw_usage))
        except orjson.JSONDecodeError:
            return None

    @property
    def ended_by_stop(self) -> bool:
        """Whether the prefiller's only token ended the answer.

        vLLM's connectors keep KV only if the prefill stopped for length (`request_finished` of nixl and mooncake). So a
        second prefill of this prompt would not keep KV either.
        """
        return bool(self.choices) and self.choices[0].finish_reason == "stop"


_decode_prefill_answer = msgspec.json.Decoder(PrefillAnswerBody).decode


def parse_prefilled(response: Response, body: bytes) -> PrefillAnswerBody:
    """Parse the answer of a vLLM prefiller. Raises UpstreamError if the prefill failed.

    Some versions report an error with status 200.
    """
    if response.status != 200:
        raise make_refusal(response, body)
    _check_elements(response, body)
    try:
        if not body.isascii():
            body.decode()  # the parser does not check members that it skips
        answer = _decode_prefill_answer(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        answer = _parse_prefill_again(response, body)
    error = answer.error
    if error or answer.object == "error":
        code = error.get("code") if isinstance(error, dict) else answer.code
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        raise response.make_refusal(
            "reported an error in its answer", status, body, {"content-type": "application/json"}
        )
    for choice in answer.choices:
        if is_abort_reason(choice.finish_reason):
            raise response.make_failure(Failure.ABORTED, "aborted the prefill")
    return answer


def _parse_prefill_again(response: Response, body: bytes) -> PrefillAnswerBody:
    """Parse an answer that msgspec rejects. Raises UpstreamError if it is not a JSON object.

    msgspec rejects an answer whose token is half of a surrogate pair, or whose choices are not a list of objects.
    """
    try:
        values = parse_again(body)
    except ValueError:
        raise _make_no_object_error(response) from None
    if not isinstance(values, dict):
        raise _make_no_object_error(response)
    usage, params = (msgspec.Raw(dumps(values.get(name))) for name in ("usage", "kv_transfer_params"))
    choices = values.get("choices")
    read = [
        PrefillChoice(choice.get("finish_reason"))
        for choice in (choices if isinstance(choices, list) else ())
        if isinstance(choice, dict)
    ]
    return PrefillAnswerBody(usage, params, read, values.get("error"), values.get("object"), values.get("code"))


def parse_answer(kind: Callable[[bytes], Parsed], response: Response, body: bytes) -> Parsed:
    """Parse an engine's JSON object as a `kind`. Raises UpstreamError if the body is not such an object."""
    _check_elements(response, body)
    try:
        return kind(body)
    except InvalidDocument:
        raise _make_no_object_error(response) from None


def _check_elements(response: Response, body: bytes) -> None:
    if len(body) > LONG_BYTES and is_heavier_json(body, MAX_ANSWER_ELEMENTS):
        raise response.make_failure(Failure.BAD_ANSWER, "the answer has more elements than any engine sends")


def _make_no_object_error(response: Response) -> UpstreamError:
    return response.make_failure(Failure.BAD_ANSWER, "the answer is not a JSON object")
