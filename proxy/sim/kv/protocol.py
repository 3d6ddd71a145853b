"""How KV protocols look to the engine: what they are asked, and what they are told of a request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiohttp import web

    from proxy.sim.kv.cache import Pin


class Leg(Enum):
    """What a request is to this engine."""

    ALONE = auto()
    PREFILL = auto()
    """It leaves KV for a decoder."""
    DECODE = auto()
    """Its KV comes from elsewhere."""


class Loaded(Enum):
    """How fetching a prompt's KV from elsewhere went."""

    YES = auto()
    FAILED = auto()
    ABSENT = auto()
    """There is none, which is no failure: the prompt is computed here."""
    FOREIGN = auto()
    """KV arrived, but that of another prompt: the model will talk nonsense."""


@dataclass(frozen=True, slots=True)
class Child:
    """One sample of one prompt of a request, as engines speak of it among themselves."""

    request_id: str
    """`chatcmpl-R`, `cmpl-R-0`, and `0_chatcmpl-R` where there are several samples."""
    prompt: Sequence[int]
    prompt_index: int
    samples: int
    params: Mapping[str, Any]
    """Of the whole request."""
    dp_rank: int | None = None
    cache_salt: str = ""


class KvProtocol:
    """How KV travels between simulated engines; one file per protocol, named in `PROTOCOLS`.

    Whatever waits here is cancelled when its request ends. EngineError, where raised, is the request's answer.
    """

    has_bootstrap_port: ClassVar[bool] = False
    """Prefillers listen on a second port, which decoders ask where a prefiller's KV is."""
    serves_each_child: ClassVar[bool] = True
    """Every child has KV of its own. Otherwise one set of parameters names the KV of the first."""
    meets: ClassVar[bool] = False
    """A prefiller waits for the decoder before it computes, and answers when the decoder has the KV."""

    def leg(self, params: Mapping[str, Any]) -> Leg:
        raise NotImplementedError

    def is_deadly(self, params: Mapping[str, Any]) -> bool:
        """Whether these parameters crash the engine."""
        return False

    async def meet(self, child: Child) -> None:
        """Wait for the decoder, if the protocol `meets`. Raises EngineError when none comes."""

    async def keep(self, child: Child) -> dict[str, Any] | None:
        """Keep or send the KV of a prefilled prompt; returns the params that let a decoder have it, if any.
        Raises EngineError when it should have been sent and was not.
        """
        raise NotImplementedError

    def announce(self, params: Mapping[str, Any]) -> None:
        """The params go out in an answer."""

    async def load(self, child: Child) -> Loaded:
        """Get the KV. Raises EngineError where the protocol has words of its own for a failure."""
        raise NotImplementedError

    def leave(self, child: Child) -> None:
        """A request with a leg is over, however it ended."""

    async def release(self, params: Mapping[str, Any]) -> None:
        """Tell the prefiller that nobody will fetch this."""

    def routes(self) -> list[web.RouteDef]:
        return []

    @property
    def pins(self) -> dict[str, Pin]:
        """The KV kept for decoders."""
        return {}

    def blocks_held(self) -> int:
        return 0

    def describe(self) -> dict[str, Any]:
        return {}

    async def stop(self) -> None:
        """End what runs beside requests."""
