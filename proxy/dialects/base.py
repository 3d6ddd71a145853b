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
    """It makes the error for itself when it cannot be used; `upstream.Response` is one."""

    def fail(self, failure: Failure, message: str) -> UpstreamError:
        """The error for an answer that arrived but cannot be used."""

    def unreadable(self, message: str) -> UpstreamError:
        """The error for an answer that was complete, and has members that cannot be read; see UpstreamError."""

    def refuse(self, message: str, status: int, body: bytes | None, headers: Mapping[str, str]) -> UpstreamError:
        """The error for an engine's own refusal, which reaches the client in its own words."""


class PrefillAnswer(Protocol):
    """A prefiller's answer, which may come later than the decoder's first words."""

    @property
    def so_far(self) -> bytes | None:
        """The whole body; None until it has come."""

    async def whole(self) -> bytes:
        """Wait for it. Raises UpstreamError."""


class AnsweredAttempt(Protocol):
    """What is known of one try at a call beside the decoder's answer; `connectors.base.Attempt` is one."""

    @property
    def kv_handed_over(self) -> bool:
        """The decoder got its KV cache from a prefiller, so its own details of the prompt are wrong."""

    @property
    def prompt_tokens(self) -> int | None:
        """How many tokens the prompt has, as far as an engine has told; None while none has."""

    @property
    def prompt_details(self) -> dict[str, Any] | None:
        """The engine's `prompt_tokens_details` that are true; None if no engine has told."""

    @property
    def prefill_answer(self) -> PrefillAnswer | None:
        """None where the prefiller adds nothing to what the decoder tells, or is the only engine."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One prompt and one sample of a client request. `index` is the choice's index in the client's answer."""

    call: Call
    index: int
    is_first_sample: bool
    """The first sample of its prompt: the one whose prompt tokens count in the merged usage."""


class Whole(Protocol):
    """One unit's answer that is not streamed."""

    def body(self) -> bytes:
        """JSON, as far as possible in the engine's own bytes."""

    def values(self) -> dict[str, Any]:
        """The body as Python objects. Long members may be `orjson.Fragment`, which only orjson can write."""


class WatchedWhole(Protocol):
    """Puts an answer together from the payloads of a watched stream."""

    def add(self, payload: dict[str, Any]) -> bytes:
        """Take the next one; nothing of it goes to the client yet."""

    def cut(self, tokens: int) -> None:
        """Forget what belongs to tokens behind the first `tokens`."""

    def values(self) -> dict[str, Any]:
        """The answer so far."""


class UnitRendering(Protocol):
    """Writes the client's events of one unit's streams."""

    def begin(self, attempt: AnsweredAttempt, *, goes_on: bool) -> None:
        """Another decoder begins to answer: what waited of the one before is not for the client. `goes_on`: it
        continues the answer. Otherwise the client has nothing of it yet, whatever was rendered.
        """

    def render(self, payload: dict[str, Any]) -> bytes:
        """The client's bytes for one parsed event of the engines' API; empty if there is nothing in it for the client,
        or not yet. Usage comes with `ending`.
        """

    async def rest(self) -> bytes:
        """What still waits for other engines when the decoder's stream has ended. Raises UpstreamError."""


class Rendering(Protocol):
    """How the answer to one streamed client request is written, from the streams of all its units."""

    def unit(self, unit: Unit) -> UnitRendering | None:
        """What writes the events of one unit. None: the client gets the engine's events byte for byte."""

    def ending(self, usages: Sequence[dict[str, Any] | None], last_payload: dict[str, Any]) -> bytes:
        """What follows the streams of all units, before `Dialect.done_event`: `usages` of them in their order, None
        where an engine told none; `last_payload` is the last event that the client was given of the last unit.
        """

    def error_event(self, error: GatewayError) -> bytes:
        """The event that tells a client in the middle of a stream that the answer is not complete."""


class Dialect(ABC):
    """An API that clients speak. The engines are asked through `api`: calls are of that, and so are the payloads that
    are rendered, also of an answer that was put together from the streams of several decoders.
    """

    api: ClassVar[Api]
    """The engines' API that serves it."""
    path: ClassVar[str]
    """The route on the gateway."""
    label: ClassVar[str]
    """The metric label, and `api` in the access log."""
    methods: ClassVar[Sequence[str]] = ("POST",)
    """HTTP methods of its requests."""
    request_id_header: ClassVar[str] = "X-Request-Id"
    """The header in which its clients look for the id of their request."""
    speaks_as_engines: ClassVar[bool] = False
    """Whether requests and single answers pass as they are."""
    done_event: ClassVar[bytes] = DONE_EVENT
    """The last bytes of a complete stream."""
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"
    """The event that is sent in a silent stream; see KeepAlive."""

    # Requests

    @abstractmethod
    def parse(self, document: Document, cost: Cost, headers: Mapping[str, str]) -> Call:
        """Return the call of a request body. Raises BadRequest for a body that no engine could read."""

    @abstractmethod
    def split(self, call: Call, cost: Cost, max_units: int) -> list[Unit]:
        """The units of a call in the order of their indexes. Raises BadRequest when there are more than `max_units`."""

    @abstractmethod
    def is_single(self, call: Call) -> bool:
        """Whether the answer is one choice, with one sequence of tokens behind it."""

    # Answers of engines

    def new_segment(self) -> Segment:
        """The reader of one engine's stream."""
        return Segment()

    def watched_segment(self) -> Segment:
        """Likewise, of an answer that is watched: its payloads are chunks of a completion or a chat in any case."""
        return self.new_segment()

    def watched_rendering(self, call: Call) -> UnitRendering | None:
        """Return the writer of a watched answer that is the client's only one. None: clients get the engine's bytes."""
        return None

    def watched_whole(self, call: Call) -> WatchedWhole | None:
        """What puts a watched answer together that is not streamed; None: it is a chat's or a completion's."""
        return None

    @abstractmethod
    def check_answer(self, response: EngineAnswer, values: dict[str, Any]) -> None:
        """Raise UpstreamError for an engine's whole answer that is broken, incomplete or reports a failure."""

    @abstractmethod
    def usage(self, values: dict[str, Any]) -> Any:
        """The usage object in an engine's whole answer, as OpenAI's; whatever it really is."""

    @abstractmethod
    def corrected(self, values: dict[str, Any], attempt: AnsweredAttempt) -> dict[str, Any]:
        """Return the members of an engine's whole answer that the client gets otherwise, REMOVED for those it does not
        get.
        """

    def waits_for_prefiller(self, call: Call) -> bool:
        """Return whether an answer has parts of the prefiller's, which may come later than the decoder's."""
        return False

    async def completed(self, call: Call, values: dict[str, Any], attempt: AnsweredAttempt) -> dict[str, Any]:
        """Return what `corrected` does for an answer that waits for the prefiller. Raises UpstreamError."""
        return self.corrected(values, attempt)

    # Answers to clients

    @abstractmethod
    def whole(self, call: Call, units: Sequence[Unit], answers: Sequence[Whole]) -> bytes:
        """The JSON body of an answer that is not streamed. The units' answers are in their order."""

    @abstractmethod
    def rendering(self, call: Call, units: Sequence[Unit]) -> Rendering:
        """Return the writer of events of one streamed client request."""

    def error_body(self, error: GatewayError) -> bytes | None:
        """Return the JSON body of an error on this route, of the gateway or of an engine. None: OpenAI's body, or the
        engine's, byte for byte.
        """
        return None
