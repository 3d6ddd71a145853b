"""The interface of the simulated KV protocols, and two protocols in which engines exchange no messages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

import aiohttp

from proxy.sim.model.writer import digest_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiohttp import web

    from proxy.sim.kv.cache import Pin
    from proxy.sim.options import Options
    from proxy.sim.state import EngineState


class Leg(Enum):
    """The kind of a request in the eyes of this engine."""

    ALONE = auto()
    PREFILL = auto()
    """The request leaves KV for a decoder."""
    DECODE = auto()
    """The request gets its KV from another engine."""


class KvLoadResult(Enum):
    """The result of fetching a prompt's KV from another engine."""

    YES = auto()
    FAILED = auto()
    ABSENT = auto()
    """There is no KV. This is no failure: the engine computes the prompt itself."""
    FOREIGN = auto()
    """KV of another prompt arrived, so the model will write nonsense."""


@dataclass(frozen=True, slots=True)
class ChildRequest:
    """One sample of one prompt of a request. Engines exchange messages about it."""

    request_id: str
    """The engine's ID: `chatcmpl-R` for chats, `cmpl-R-0` for completions, `0_chatcmpl-R` with several samples."""
    prompt: Sequence[int]
    prompt_index: int
    samples: int
    params: Mapping[str, Any]
    """The parameters of the whole request."""
    dp_rank: int | None = None
    cache_salt: str = ""


class KvProtocol:
    """One KV transfer protocol between simulated engines. Each has its own file and is named in `PROTOCOLS`.

    The end of a request cancels all that waits here. A raised EngineError becomes the answer to the request.
    """

    has_bootstrap_port: ClassVar[bool] = False
    """Whether prefillers listen on a second port, at which decoders ask for the location of the KV."""
    serves_each_child: ClassVar[bool] = True
    """Whether each sample has separate KV. Otherwise one set of parameters names the KV of the first sample."""
    meets: ClassVar[bool] = False
    """Whether a prefiller waits for the decoder before it computes, and answers when the decoder has the KV."""

    def leg(self, params: Mapping[str, Any]) -> Leg:
        raise NotImplementedError

    def is_deadly(self, params: Mapping[str, Any]) -> bool:
        """Return whether these parameters crash the engine."""
        return False

    async def meet(self, child: ChildRequest) -> None:
        """Wait for the decoder if the protocol `meets`. Raises EngineError if no decoder comes."""

    async def keep(self, child: ChildRequest) -> dict[str, Any] | None:
        """Keep or send the KV of a computed prompt. Return the parameters for a decoder, or None if there are none.

        Raises EngineError if the KV should have been sent and was not.
        """
        raise NotImplementedError

    def announce(self, params: Mapping[str, Any]) -> None:
        """Record that the client gets these parameters."""

    def keep_answer(self, child: ChildRequest, ids: Sequence[int]) -> dict[str, Any] | None:
        """Keep the KV of an answer for a prefiller. Return its parameters; None: the engine keeps none.

        `ids`: the token IDs whose KV the decoder has.
        """
        return None

    def reads_back(self, params: Mapping[str, Any]) -> bool:
        """Return whether a prefill leg reads the KV of an earlier answer from a decoder."""
        return False

    async def read_back(self, child: ChildRequest) -> KvLoadResult:
        """Fetch the KV of an earlier answer."""
        raise NotImplementedError

    async def load(self, child: ChildRequest) -> KvLoadResult:
        """Fetch the KV of a prompt. Raises EngineError if the protocol has its own error for a failure."""
        raise NotImplementedError

    def leave(self, child: ChildRequest) -> None:
        """Record the end of a request that has a leg. Called for every end: success, failure and abort."""

    async def release(self, params: Mapping[str, Any]) -> None:
        """Tell the prefiller to release the KV that these parameters name."""

    def routes(self) -> list[web.RouteDef]:
        return []

    @property
    def pins(self) -> dict[str, Pin]:
        """The KV that this engine keeps for decoders, by ID."""
        return {}

    def blocks_held(self) -> int:
        return 0

    def describe(self) -> dict[str, Any]:
        return {}

    async def stop(self) -> None:
        """Stop the protocol's timers and tasks."""


class Peers:
    """Connections to other engines. The first use opens them. After `close`, all requests fail."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def post(self, url: str, body: Any) -> Any:
        """Send a POST and return the answer. None: the status is no success, or the engine is not reached.

        There is no time limit.
        """
        return await self._request_json("POST", url, body)

    async def get(self, url: str) -> Any:
        """Send a GET and return the answer. None: the status is no success, or the engine is not reached."""
        return await self._request_json("GET", url, None)

    async def delivers(self, url: str, body: Any) -> bool:
        """Send a POST. Return whether the other engine answered with any status."""
        if self._is_closed:
            return False
        try:
            async with self._open_session().post(url, json=body) as response:
                await response.read()
        except (aiohttp.ClientError, OSError, ValueError):
            return False
        return True

    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def _request_json(self, method: str, url: str, body: Any) -> Any:
        if self._is_closed:
            return None
        try:
            async with self._open_session().request(method, url, json=body) as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, OSError, ValueError):
            return None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())
        return self._session


def format_address(host: object, port: object) -> str:
    """Return the beginning of a URL. The host may be an IPv6 address in brackets."""
    name = str(host)
    return f"http://{f'[{name}]' if ':' in name and not name.startswith('[') else name}:{port}"


class NoProtocol(KvProtocol):
    """No KV connector: the engine ignores KV parameters and computes every prompt.

    vLLM without `--kv-transfer-config` does this. It logs "Got kv_transfer_params, but no KVConnector found. Disabling
    KVTransfer for this request."; its answer does not show it.
    """

    def __init__(self, options: Options, state: EngineState, address: Callable[[], tuple[str, int]]) -> None:
        pass

    def leg(self, params: Mapping[str, Any]) -> Leg:
        return Leg.ALONE


class StoreProtocol(KvProtocol):
    """A KV store that all engines share: the decoder finds the KV of a prompt in the store.

    As with vLLM's MooncakeStoreConnector, and vLLM-Ascend's AscendStoreConnector and UCMConnector. The store is a
    directory with one empty file per prompt, so it outlives engines and serves several processes. A decoder computes
    missing KV. The engine's role decides whether it is a decoder, because requests do not show it.
    """

    def __init__(self, options: Options, state: EngineState, address: Callable[[], tuple[str, int]]) -> None:
        self._directory = None if options.store is None else Path(options.store)
        self._options = options
        self._state = state
        self._stored = 0

    def leg(self, params: Mapping[str, Any]) -> Leg:
        return {"prefill": Leg.PREFILL, "decode": Leg.DECODE}.get(self._options.role, Leg.ALONE)

    async def keep(self, child: ChildRequest) -> dict[str, Any] | None:
        if self._directory is not None:
            self._file_of_child(self._directory, child).touch()
            self._stored += 1
        return None

    async def load(self, child: ChildRequest) -> KvLoadResult:
        if self._directory is None or not self._file_of_child(self._directory, child).exists():
            return KvLoadResult.ABSENT
        self._state.pulls += 1
        return KvLoadResult.YES

    def describe(self) -> dict[str, Any]:
        return {"stored": self._stored}

    @staticmethod
    def _file_of_child(directory: Path, child: ChildRequest) -> Path:
        return (
            directory
            / f"{digest_token_ids(child.prompt):08x}-{crc32(child.cache_salt.encode()):08x}-{len(child.prompt)}"
        )
