"""The interface of an API that clients speak: its requests as calls, its answers as bytes.

A Dialect has no state and does no IO. What belongs to one client request, such as an id that all chunks have in common,
is in the Rendering that it makes for that request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from proxy.dialects.segment import Segment
from proxy.wire.openai import DONE_EVENT, Api

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.common.errors import Failure, GatewayError, UpstreamError
    from proxy.dialects.call import Call
    from proxy.settings import Cost
    from proxy.wire.document import Document


class EngineAnswer(Protocol):
    """Makes the errors of one engine's answer. `upstream.Response` implements it."""

    def make_failure(self, failure: Failure, message: str) -> UpstreamError:
        """Return the error for an answer that arrived but cannot be used."""

    def make_unreadable_error(self, message: str) -> UpstreamError:
        """Return the error for a complete answer that has members of an unexpected form; see UpstreamError."""

    def make_refusal(self, message: str, status: int, body: bytes | None, headers: Mapping[str, str]) -> UpstreamError:
        """Return the error for a request that the engine refused.

        The client gets the engine's status and body unchanged.
        """


class PrefillAnswer(Protocol):
    """A prefiller's answer, which may arrive after the decoder's first output."""

    @property
    def body_or_none(self) -> bytes | None:
        """The complete body of the prefiller's answer; None until it has arrived."""

    async def wait_for_body(self) -> bytes:
        """Wait for the complete body of the prefiller's answer, and return it. Raises UpstreamError."""


class AnsweredAttempt(Protocol):
    """Facts about one attempt at a call, besides the decoder's answer. `connectors.legs.Attempt` implements it."""

    @property
    def has_kv_from_prefiller(self) -> bool:
        """Whether the decoder got its KV cache from a prefiller.

        If so, the decoder's `prompt_tokens_details` are wrong.
        """

    @property
    def prompt_tokens(self) -> int | None:
        """The number of tokens in the prompt; None until an engine reports it."""

    @property
    def prompt_tokens_details(self) -> dict[str, Any] | None:
        """The correct `prompt_tokens_details`, as an engine reported them; None if no engine reported correct ones."""

    @property
    def prefill_answer(self) -> PrefillAnswer | None:
        """The prefiller's answer; None if the client needs nothing from it, or if no other engine takes part."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One sample of one prompt of a client request."""

    call: Call
    index: int
    """The index of this sample's choice in the client's answer."""
    is_first_sample: bool
    """Whether this is the first sample of its prompt.

    The merged usage counts each prompt's tokens once, for this sample.
    """


class CompleteAnswer(Protocol):
    """One unit's answer that is not streamed."""

    def make_body(self) -> bytes:
        """Return the JSON body of the answer. As far as possible, it consists of the engine's own bytes."""

    def parsed_body(self) -> dict[str, Any]:
        """Return the answer's body as Python objects. Long members may be an `orjson.Fragment`, for orjson only."""


class AnswerAssembler(Protocol):
    """Assembles an answer that is not streamed from the payloads of a watched stream."""

    def add_chunk(self, payload: dict[str, Any]) -> bytes:
        """Add a chunk's payload to the answer. Returns empty bytes: the client gets the complete answer at its end."""

    def truncate_to_tokens(self, tokens: int) -> None:
        """Keep the parts of the answer that belong to its first `tokens` tokens, and remove the rest."""

    def values(self) -> dict[str, Any]:
        """Return the assembled answer so far as a JSON object."""


class UnitRendering(Protocol):
    """Writes the client's events of one unit's streams."""

    def begin_decoder_answer(self, attempt: AnsweredAttempt, *, goes_on: bool) -> None:
        """Begin to write the answer of another decoder. Drops events of the previous decoder that were not sent yet.

        Args:
            attempt: The attempt of the decoder.
            goes_on: Whether the decoder continues the answer. Otherwise the client has no part of the answer, even if
                events were rendered.
        """

    def render(self, payload: dict[str, Any]) -> bytes:
        """Return the client's bytes for one parsed event of the engines' API.

        The result is empty if the client gets nothing for this event, or not yet. `render_final_events` writes the
        usage.
        """

    async def wait_for_remaining_events(self) -> bytes:
        """Return the events of a stream that had to wait for another engine's answer.

        Called at the end of the stream. Raises UpstreamError.
        """


class Rendering(Protocol):
    """Writes the answer to one streamed client request from the streams of all its units."""

    def make_unit_rendering(self, unit: Unit) -> UnitRendering | None:
        """Return the writer of one sample's events; None if the client gets the engine's events byte for byte."""

    def render_final_events(self, usages: Sequence[dict[str, Any] | None], last_payload: dict[str, Any]) -> bytes:
        """Return the events that follow the streams of all units and precede `Dialect.stream_end_event`.

        Args:
            usages: The usage of each unit, in the order of the units; None for a unit whose engine reported none.
            last_payload: The last event that the client got of the last unit.
        """

    def error_event(self, error: GatewayError) -> bytes:
        """Return the event that reports an error to a client that has received only a part of its answer."""


class Dialect(ABC):
    """An API that clients speak.

    Calls and rendered payloads have the form of the engines' API `api`, even if the answer was assembled from the
    streams of several decoders.
    """

    api: ClassVar[Api]
    """The engines' API to which requests of this dialect are sent."""
    path: ClassVar[str]
    """The path of the gateway's route for this dialect."""
    label: ClassVar[str]
    """The label in metrics, and the value of `api` in the access log."""
    methods: ClassVar[Sequence[str]] = ("POST",)
    """The HTTP methods that requests of this dialect may use."""
    request_id_header: ClassVar[str] = "X-Request-Id"
    """The response header in which clients of this dialect expect the request ID."""
    uses_engine_format: ClassVar[bool] = False
    """Whether requests, and answers with one choice, pass between client and engine unchanged."""
    stream_end_event: ClassVar[bytes] = DONE_EVENT
    """The last bytes of a complete stream."""
    keep_alive_event: ClassVar[bytes] = b": keep-alive\n\n"
    """The event that the gateway sends while a stream is silent, to keep its connection open; see KeepAlive."""

    # Requests

    @abstractmethod
    def parse_request(self, document: Document, cost: Cost, headers: Mapping[str, str]) -> Call:
        """Return the call of a request body. Raises BadRequest for a body that no engine could read."""

    @abstractmethod
    def split_into_units(self, call: Call, cost: Cost, max_units: int) -> list[Unit]:
        """Return the units of a call, ordered by index. Raises BadRequest for more than `max_units`."""

    @abstractmethod
    def has_single_choice(self, call: Call) -> bool:
        """Return whether the answer is one choice that is generated as one sequence of tokens."""

    # Answers of engines

    def make_segment(self) -> Segment:
        """Return the reader of one engine's stream."""
        return Segment()

    def make_watched_segment(self) -> Segment:
        """Return the reader of a watched stream. Its payloads are always chunks of a completion or a chat."""
        return self.make_segment()

    def make_watched_rendering(self, call: Call) -> UnitRendering | None:
        """Return the writer of a watched answer if it is the client's only one.

        None: the client gets the engine's bytes.
        """
        return None

    def make_watched_assembler(self, call: Call) -> AnswerAssembler | None:
        """Return the assembler of a watched answer that is not streamed; None for the one of chats and completions."""
        return None

    @abstractmethod
    def check_answer(self, response: EngineAnswer, values: dict[str, Any]) -> None:
        """Raise UpstreamError if a complete engine answer is broken, lacks a part, or reports a failure."""

    @abstractmethod
    def read_usage(self, values: dict[str, Any]) -> Any:
        """Return the usage in a complete engine answer, in OpenAI's form. The caller must check its type."""

    @abstractmethod
    def correct_members(self, values: dict[str, Any], attempt: AnsweredAttempt) -> dict[str, Any]:
        """Return the members that change in a complete engine answer. A member that is not for clients is REMOVED."""

    def waits_for_prefiller(self, call: Call) -> bool:
        """Return whether the client's answer needs members of the prefiller's answer, which may arrive last."""
        return False

    async def complete_members(self, call: Call, values: dict[str, Any], attempt: AnsweredAttempt) -> dict[str, Any]:
        """Wait for the prefiller, then return the members that change as `correct_members` does.

        Raises UpstreamError.
        """
        return self.correct_members(values, attempt)

    # Answers to clients

    @abstractmethod
    def render_complete_body(self, call: Call, units: Sequence[Unit], answers: Sequence[CompleteAnswer]) -> bytes:
        """Return the JSON body of an answer that is not streamed. `answers` are in the order of `units`."""

    @abstractmethod
    def make_rendering(self, call: Call, units: Sequence[Unit]) -> Rendering:
        """Return the writer of the events of one streamed client request."""

    def error_body(self, error: GatewayError) -> bytes | None:
        """Return the JSON body of an error on this route. None: OpenAI's body, or the engine's own body, unchanged."""
        return None
