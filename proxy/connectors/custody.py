"""The hand-over of one KV cache: who keeps it until a decoder has fetched it, and who hears of it when none does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from proxy.balancer.health import is_to_blame
from proxy.errors import Failure, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from types import TracebackType

    from proxy.backend import Backend
    from proxy.connectors.kv_transfer import KvTransfer
    from proxy.connectors.releaser import Releaser


@dataclass(frozen=True, slots=True)
class PrefilledKv:
    """KV that a prefiller keeps for a decoder. `params` are its parameters, verbatim; `tokens` is an estimate.

    `headers` are the client's that are passed on to the engines: its credential may be theirs.
    """

    prefiller: Backend
    params: bytes
    transfer: KvTransfer
    tokens: int
    headers: Mapping[str, str]


class Custody:
    """Around the hand-over of one KV cache, or of none: `with` it. Left before `end`, the KV is an orphan."""

    __slots__ = ("_kv", "_releaser", "failed")

    def __init__(self, releaser: Releaser, kv: PrefilledKv | None, avoid: Collection[Backend]) -> None:
        self.failed = set(avoid)
        """Backends that are not to be asked for help."""
        self._releaser = releaser
        self._kv = kv

    def end(self, decoder: Backend, has_it: bool) -> None:
        """The decoder has fetched the KV, as its answer says unless it fetches none; or it has failed to. May be called
        again.
        """
        if self._kv is not None:
            self._releaser.handed_over(self._kv.prefiller, decoder, has_it)
            if has_it:
                self._releaser.fetched(self._kv, decoder, self.failed)
        self._kv = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._kv is not None:
            if isinstance(error, UpstreamError):
                self.failed.add(error.backend)
                if _is_about_the_pair(error):
                    self._releaser.handed_over(self._kv.prefiller, error.backend, False)
            self._releaser.orphaned(self._kv, self.failed)


def _is_about_the_pair(error: UpstreamError) -> bool:
    """Whether a decoder's failure before its first output may be one to fetch the KV."""
    return is_to_blame(error) and error.failure is not Failure.CONNECT
