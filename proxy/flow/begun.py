"""An attempt that the fast path has begun, as the attempt loop goes on with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.connectors import legs

if TYPE_CHECKING:
    from types import TracebackType

    from proxy.connectors.attempt import Attempt
    from proxy.connectors.legs import Legs
    from proxy.errors import NoBackendAvailable, UpstreamError
    from proxy.observe.timeline import Timeline


class BegunAttempt:
    """Enter it in the place of what `Connector.open` opens, once: the attempt, or the error that has ended it."""

    def __init__(
        self,
        begun: Legs,
        timeline: Timeline,
        *,
        attempt: Attempt | None = None,
        error: NoBackendAvailable | UpstreamError | None = None,
        began_at: float | None = None,
    ) -> None:
        """`attempt`: it has come so far that a decoder answers. `error`: it has failed, and given everything back.
        `began_at`: when it had its first output, in clock seconds; None: it had none.
        """
        self.timeline = timeline
        self.prefiller = None if attempt is None else attempt.prefiller
        """The prefiller that has the prompt in its cache."""
        self.began_at = began_at
        self._legs = begun
        self._attempt = attempt
        self._error = error

    async def __aenter__(self) -> Attempt:
        if self._error is not None:
            raise self._error
        assert self._attempt is not None
        return self._attempt

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            legs.finish(self._legs)
        else:
            legs.fail(self._legs, error)
