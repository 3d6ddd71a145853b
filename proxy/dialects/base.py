"""The interface of an API that clients speak: its requests as calls, its answers as bytes.

A Dialect has no state and does no IO. What belongs to one client request, such as an id that all chunks have in common,
is in the Rendering that it makes for that request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from proxy.dialects.segment import Segment
from proxy.wire.openai import DONE_EVENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.common.errors import Failure, GatewayError, UpstreamError
    from proxy.dialects.call import Call
    from proxy.settings import Cost
    from proxy.wire.document import Document
    from proxy.wire.openai import Api


class EngineAnswer(Protocol):
    """Makes the errors of one engine's answer. `upstream.Response` implements it."""

    def fail(self, failure: Failure, message: str) -> UpstreamError:
        """Return the error for an answer that arrived but cannot be used."""

    def unreadable(self, message: str) -> UpstreamError:
        """Return the error for a complete answer with members that cannot be read; see UpstreamError."""

    def refuse(self, message: str, status: int, body: bytes | None, headers: Mapping[str, str]) -> UpstreamError:
        """Return the error for an engine's refusal, whose status and body the client gets unchanged."""


class PrefillAnswer(Protocol):
    """A prefiller's answer, which may arrive after the decoder's first output."""

    @property
    def so_far(self) -> bytes | None:
        """The whole body; None until it has arrived."""

    async def whole(self) -> bytes:
        """Wait for the whole body and return it. Raises UpstreamError."""


class AnsweredAttempt(Protocol):
    """Facts about one try at a call, besides the decoder's answer. `connectors.legs.Attempt` implements it."""

    @property
    def has_kv_from_prefiller(self) -> bool:
        """Whether the decoder got its KV cache from a prefiller. Its own details of the prompt are wrong then."""

    @property
    def prompt_tokens(self) -> int | None:
        """The number of tokens in the prompt; None until an engine reports it."""

    @property
    def prompt_details(self) -> dict[str, Any] | None:
        """The `prompt_tokens_details` that an engine reported and that are true; None if no engine has."""

    @property
    def prefill_answer(self) -> PrefillAnswer | None:
        """The prefiller's answer; None if the client needs nothing of it, or if the prefiller is the only engine."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One prompt and one sample of a client request."""

    call: Call
    index: int
    """The index of its choice in the client's answer."""
    is_first_sample: bool
    """Whether it is the first sample of its prompt. Only that one's prompt tokens count in the merged usage."""


class Whole(Protocol):
    """One unit's answer that is not streamed."""

    def body(self) -> bytes:
        """Return the JSON body, as far as possible in the engine's own bytes."""

    def values(self) -> dict[str, Any]:
        """Return the body as Python objects. Long members may be `orjson.Fragment`, which only orjson can write."""


class WatchedWhole(Protocol):
    """Assembles an answer from the payloads of a watched stream."""

    def add(self, payload: dict[str, Any]) -> bytes:
        """Add the next payload. Returns no bytes, because the client gets the answer at its end."""

    def cut(self, tokens: int) -> None:
        """Remove everything that belongs to later tokens than the first `tokens`."""

    def values(self) -> dict[str, Any]:
        """Return the answer so far."""


class UnitRendering(Protocol):
    """Writes the client's events of one unit's streams."""

    def begin(self, attempt: AnsweredAttempt, *, goes_on: bool) -> None:
        """Begin with another decoder's answer. Events that wait from the previous decoder are dropped.

        Args:
            attempt: The attempt of the decoder.
            goes_on: Whether it continues the answer. Otherwise the client has no part of the answer, even if events
                were rendered.
        """

    def render(self, payload: dict[str, Any]) -> bytes:
        """Return the client's bytes for one parsed event of the engines' API.

        Empty if the event has nothing for the client, or nothing yet. Usage comes with `ending`.
        """

    async def rest(self) -> bytes:
        """Return the events that still wait for other engines at the end of the stream. Raises UpstreamError."""


class Rendering(Protocol):
    """Writes the answer to one streamed client request from the streams of all its units."""

    def unit(self, unit: Unit) -> UnitRendering | None:
        """Return the writer of one unit's events. None: the client gets the engine's events byte for byte."""

    def ending(self, usages: Sequence[dict[str, Any] | None], last_payload: dict[str, Any]) -> bytes:
        """Return the events after the streams of all units and before `Dialect.done_event`.

        Args:
            usages: The usage of each unit, in their order; None if its engine reported none.
            last_payload: The last event of the last unit that the client got.
        """

    def error_event(self, error: GatewayError) -> bytes:
        """Return the event of an error in the middle of a stream: the answer is not complete."""


class Dialect(ABC):
    """An API that clients speak.

    Calls and rendered payloads belong to the engines' API `api`, even if an answer was assembled from the streams of
    several decoders.
    """

    api: ClassVar[Api]
    """The engines' API that serves this one."""
    path: ClassVar[str]
    """The route on the gateway."""
    label: ClassVar[str]
    """The label in metrics, and the value of `api` in the access log."""
    methods: ClassVar[Sequence[str]] = ("POST",)
    """HTTP methods of its requests."""
    request_id_header: ClassVar[str] = "X-Request-Id"
    """The header in which its clients look for the id of their request."""
    speaks_as_engines: ClassVar[bool] = False
    """Whether requests and single answers pass unchanged."""
    done_event: ClassVar[bytes] = DONE_EVENT
    """The last bytes of a complete stream."""
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"
    """The event that keeps a silent stream open; see KeepAlive."""

    # Requests

    @abstractmethod
    def parse(self, document: Document, cost: Cost, headers: Mapping[str, str]) -> Call:
        """Return the call of a request body. Raises BadRequest for a body that no engine could read."""

    @abstractmethod
    def split(self, call: Call, cost: Cost, max_units: int) -> list[Unit]:
        """Return the units of a call, ordered by index. Raises BadRequest for more than `max_units`."""

    @abstractmethod
    def is_single(self, call: Call) -> bool:
        """Return whether the answer is one choice that comes from one sequence of tokens."""

    # Answers of engines

    def new_segment(self) -> Segment:
        """Return the reader of one engine's stream."""
        return Segment()

    def watched_segment(self) -> Segment:
        """Return the reader of a watched stream. Its payloads are always chunks of a completion or a chat."""
        return self.new_segment()

    def watched_rendering(self, call: Call) -> UnitRendering | None:
        """Return the writer of a watched answer that is the client's only one. None: clients get the engine's bytes."""
        return None

    def watched_whole(self, call: Call) -> WatchedWhole | None:
        """Return the assembler of a watched answer that is not streamed. None: it is that of a chat or a completion."""
        return None

    @abstractmethod
    def check_answer(self, response: EngineAnswer, values: dict[str, Any]) -> None:
        """Raise UpstreamError if an engine's whole answer is broken, is incomplete or reports a failure."""

    @abstractmethod
    def usage(self, values: dict[str, Any]) -> Any:
        """Return the usage in an engine's whole answer, in OpenAI's form. Its type is not checked."""

    @abstractmethod
    def corrected_members(self, values: dict[str, Any], attempt: AnsweredAttempt) -> dict[str, Any]:
        """Return the changed members of an engine's whole answer; REMOVED for members that the client does not get."""

    def waits_for_prefiller(self, call: Call) -> bool:
        """Return whether the answer needs members of the prefiller's answer, which may arrive after the decoder's."""
        return False

    async def completed_members(self, call: Call, values: dict[str, Any], attempt: AnsweredAttempt) -> dict[str, Any]:
        """Return the changed members as `corrected` does, after waiting for the prefiller. Raises UpstreamError."""
        return self.corrected_members(values, attempt)

    # Answers to clients

    @abstractmethod
    def whole(self, call: Call, units: Sequence[Unit], answers: Sequence[Whole]) -> bytes:
        """Return the JSON body of an answer that is not streamed. `answers` are in the order of `units`."""

    @abstractmethod
    def rendering(self, call: Call, units: Sequence[Unit]) -> Rendering:
        """Return the writer of events of one streamed client request."""

    def error_body(self, error: GatewayError) -> bytes | None:
        """Return the JSON body of an error on this route. None: OpenAI's body, or the engine's, byte for byte."""
        return None
