"""Interface of the KV protocols to the engine, and the two protocols that need no exchange between engines."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

import aiohttp

from proxy.sim.model.writer import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiohttp import web

    from proxy.sim.kv.cache import Pin
    from proxy.sim.options import Options
    from proxy.sim.state import State


class Leg(Enum):
    """Kind of a request for this engine."""

    ALONE = auto()
    PREFILL = auto()
    """It leaves KV for a decoder."""
    DECODE = auto()
    """The KV comes from another engine."""


class Loaded(Enum):
    """Result of fetching a prompt's KV from another engine."""

    YES = auto()
    FAILED = auto()
    ABSENT = auto()
    """There is no KV, which is no failure: the prompt is computed here."""
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
    """Parameters of the whole request."""
    dp_rank: int | None = None
    cache_salt: str = ""


class KvProtocol:
    """How KV travels between simulated engines; one file per protocol, named in `PROTOCOLS`.

    Whatever waits here is cancelled when its request ends. EngineError, where raised, is the request's answer.
    """

    has_bootstrap_port: ClassVar[bool] = False
    """Prefillers listen on a second port, which decoders ask where a prefiller's KV is."""
    serves_each_child: ClassVar[bool] = True
    """Whether each sample has separate KV. If not, one set of parameters names the KV of the first."""
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
        """Keep or send the KV of a prefilled prompt; return the parameters for a decoder, if any.

        Raises EngineError if it should have been sent and was not.
        """
        raise NotImplementedError

    def announce(self, params: Mapping[str, Any]) -> None:
        """Note that the parameters are sent in an answer."""

    async def load(self, child: Child) -> Loaded:
        """Get the KV. Raises EngineError if the protocol has its own error for a failure."""
        raise NotImplementedError

    def leave(self, child: Child) -> None:
        """Note the end of a request with a leg, in any way."""

    async def release(self, params: Mapping[str, Any]) -> None:
        """Tell the prefiller to release the KV."""

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


class Peers:
    """Connections to other engines, opened when first needed. After `close`, all requests fail."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def post(self, url: str, body: Any) -> Any:
        """Return the answer, or None if it has no success status or the engine is not reached. Without a time limit."""
        return await self._ask("POST", url, body)

    async def get(self, url: str) -> Any:
        """Likewise."""
        return await self._ask("GET", url, None)

    async def delivers(self, url: str, body: Any) -> bool:
        """Return whether the other engine answered at all, even with an error."""
        if self._is_closed:
            return False
        try:
            async with self._open().post(url, json=body) as response:
                await response.read()
        except (aiohttp.ClientError, OSError, ValueError):
            return False
        return True

    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def _ask(self, method: str, url: str, body: Any) -> Any:
        if self._is_closed:
            return None
        try:
            async with self._open().request(method, url, json=body) as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, OSError, ValueError):
            return None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())
        return self._session


def address(host: object, port: object) -> str:
    """Return the beginning of a URL; an IPv6 host may have brackets."""
    name = str(host)
    return f"http://{f'[{name}]' if ':' in name and not name.startswith('[') else name}:{port}"


class NoProtocol(KvProtocol):
    """No KV connector: the engine ignores KV parameters and computes every prompt.

    vLLM without `--kv-transfer-config` does this. It logs "Got kv_transfer_params, but no KVConnector found. Disabling
    KVTransfer for this request."; its answer does not show it.
    """

    def __init__(self, options: Options, state: State, address: Callable[[], tuple[str, int]]) -> None:
        pass

    def leg(self, params: Mapping[str, Any]) -> Leg:
        return Leg.ALONE


class StoreProtocol(KvProtocol):
    """A KV store that all engines share: the decoder finds the KV of a prompt in the store.

    As with vLLM's MooncakeStoreConnector, and vLLM-Ascend's AscendStoreConnector and UCMConnector. The store is a
    directory with one empty file per prompt, so it outlives engines and serves several processes. A decoder computes
    missing KV. The engine's role decides whether it is a decoder, because requests do not show it.
    """

    def __init__(self, options: Options, state: State, address: Callable[[], tuple[str, int]]) -> None:
        self._directory = None if options.store is None else Path(options.store)
        self._options = options
        self._state = state
        self._stored = 0

    def leg(self, params: Mapping[str, Any]) -> Leg:
        return {"prefill": Leg.PREFILL, "decode": Leg.DECODE}.get(self._options.role, Leg.ALONE)

    async def keep(self, child: Child) -> dict[str, Any] | None:
        if self._directory is not None:
            self._place(self._directory, child).touch()
            self._stored += 1
        return None

    async def load(self, child: Child) -> Loaded:
        if self._directory is None or not self._place(self._directory, child).exists():
            return Loaded.ABSENT
        self._state.pulls += 1
        return Loaded.YES

    def describe(self) -> dict[str, Any]:
        return {"stored": self._stored}

    @staticmethod
    def _place(directory: Path, child: Child) -> Path:
        return directory / f"{digest(child.prompt):08x}-{crc32(child.cache_salt.encode()):08x}-{len(child.prompt)}"
