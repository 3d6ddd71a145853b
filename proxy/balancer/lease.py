"""One request's claim on one backend.

Entering picks a backend and charges it; leaving gives back whatever was not given back before and reports how it went.
All of it is synchronous, so no cancellation can fall in between, and nothing else in the program releases load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from proxy.balancer.choice import OTHER
from proxy.balancer.scoreboard import CELLS_PER_SLOT, COMPUTE, KV, REQUESTS, RUNNING
from proxy.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

    from proxy.backend import Backend
    from proxy.balancer.choice import Pick
    from proxy.balancer.pick import PickRequest, Policy, Prediction
    from proxy.balancer.pool import Pool


class Lease:
    """Get one from `Pool.lease` and enter it, once. `with`, not `async with`: there is nothing to wait for.

    One without an outcome, from `Pool.reserve`, charges a backend and reports nothing of it.
    """

    __slots__ = (
        *("backend", "_pool", "_request", "_has_outcome", "_is_entered", "_cells", "_first", "_trial", "_listener"),
        *("_requests", "_running", "_compute", "_kv", "_holds_kv", "_has_served", "_reported"),
        *("answer_tokens", "pick", "prediction", "_has_begun"),
    )

    backend: Backend
    """The backend that was picked, once the lease is entered; before, AttributeError."""
    pick: Pick
    """The same, with why."""
    prediction: Prediction | None
    """What the policy thinks will come of it, once it is entered; None: nothing."""
    answer_tokens: int | None
    """Of an answer that is complete, to be set before the lease is left; None: not known."""

    def __init__(self, pool: Pool, request: PickRequest, has_outcome: bool = True) -> None:
        self._pool = pool
        self._request = request
        self._has_outcome = has_outcome
        self._is_entered = False
        # The cells of this worker's row, and where those of the backend begin: they are written without a call, since
        # every request does so half a dozen times.
        self._cells = pool.row.cells
        self._first = 0
        self._trial = 0
        self._listener: Policy | None = None  # who was told that this began, and not yet how it ended
        # What the backend is charged with once entered, and so what is still to be given back.
        self._requests = self._running = self._compute = self._kv = 0
        self._holds_kv = True
        self._has_served = False
        self._reported: UpstreamError | None = None
        self.answer_tokens = None
        self.prediction = None
        self._has_begun = False

    def __enter__(self) -> Self:
        """Pick and charge. Raises NoBackendAvailable."""
        if self._is_entered:
            raise RuntimeError("a lease is entered once; ask the pool for a new one")
        if self._has_outcome:
            pick, trial = self._pool.take(self._request)
        else:
            pick, trial = (self._pool.choose(self._request), OTHER), 0
        self._charge(pick, trial)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        backend, pool = self.backend, self._pool
        self._uncharge()
        if pool.on_release is not None:
            pool.on_release()
        if not self._has_outcome:
            return
        if error is None:
            if not self._has_served:
                pool.outcomes.served(backend, self._trial, self._request.proves_generation)
            pool.outcomes.count_served(backend)
        elif isinstance(error, UpstreamError) and error.backend == backend:
            self._report(backend, error)
        elif self._has_served:
            pool.outcomes.count_served(backend)
        else:
            # The client left, or another part failed: that says nothing about this backend.
            pool.outcomes.abandon(backend, self._trial)
        if self._listener is not None:
            self._tell_end(served=error is None)

    def confirm(self) -> None:
        """The backend has sent the first of its answer, and so shown that it works: a trial has succeeded, though the
        request goes on. May be called again.

        A decoder's answer may take many minutes, for which it would get no other request.
        """
        if self._listener is not None and not self._has_begun:
            self._has_begun = True
            self._listener.began(self.backend, self._request)
        if self._trial and self._request.proves_generation:
            self._pool.outcomes.served(self.backend, self._trial)
            self._trial = 0

    def tell(self, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        """What the backend has told of the prompt, before `free_compute`; None: nothing."""
        if self._listener is not None and prompt_tokens is not None:
            self._listener.told(self.backend, self._request, prompt_tokens, cached_tokens)

    def free_compute(self) -> None:
        """The backend has done its work for this request: whatever fails now, it served. May be called again."""
        pool = self._pool
        if not self._has_served:
            self._has_served = True
            # Now, and not when the lease ends: a success of long ago says nothing about a backend that has died since.
            pool.outcomes.served(self.backend, self._trial, self._request.proves_generation)
            self._trial = 0
        if self._running:
            cells, first = self._cells, self._first
            cells[first + RUNNING] -= self._running
            cells[first + COMPUTE] -= self._compute
            self._running = self._compute = 0
        if pool.on_release is not None:
            pool.on_release()
        if self._listener is not None:
            self._tell_end(served=True)

    def free_kv(self) -> None:
        """The backend no longer holds this request's cache, and has nothing to do with the request any more if it has
        done its work, too. May be called again.
        """
        cells, first = self._cells, self._first
        if self._has_served and self._requests:
            cells[first + REQUESTS] -= self._requests
            self._requests = 0
        if self._kv:
            cells[first + KV] -= self._kv
            self._kv = 0
        self._holds_kv = False

    def move(self, avoid: Collection[Backend], because: UpstreamError) -> Backend:
        """Leave this backend, which failed with `because`, and charge what is left to another one not in `avoid`.

        Raises NoBackendAvailable, and then still holds exactly what it held.
        """
        old = self.backend
        if not self._requests:
            raise RuntimeError("a lease cannot move after it was left")
        # Before the pick: the failure counts also when there is nowhere to go.
        self._report(old, because)
        request = self._request.elsewhere({*avoid, old})
        pick, trial = self._pool.take(request)
        if self._listener is not None:
            self._tell_end(served=False)
        self._uncharge()
        self._request = request
        self._has_begun = False
        self._charge(pick, trial)
        self._pool.released()
        return self.backend

    def _charge(self, pick: Pick, trial: int) -> None:
        """Begin on a backend. What the policy does comes first: should it fail, nothing has been charged."""
        pool, request, backend = self._pool, self._request, pick[0]
        if pool.cost_of is not None:
            load = pool.cost_of(backend, request)
        else:
            load = request.decode if pool.is_decode else request.prefill
        if pool.listener is not None and self._has_outcome and not self._has_served:
            self.prediction = pool.listener.dispatched(backend, request)
            self._listener = pool.listener
        self.backend, self.pick = backend, pick
        self._is_entered = True
        self._trial = trial
        cells = self._cells
        first = self._first = CELLS_PER_SLOT * backend.slot
        self._requests = 1
        cells[first + REQUESTS] += 1
        if not self._has_served:
            self._running, self._compute = 1, load.compute
            cells[first + RUNNING] += 1
            cells[first + COMPUTE] += load.compute
        if self._holds_kv:
            self._kv = load.kv
            cells[first + KV] += load.kv

    def _uncharge(self) -> None:
        cells, first = self._cells, self._first
        cells[first + REQUESTS] -= self._requests
        cells[first + RUNNING] -= self._running
        cells[first + COMPUTE] -= self._compute
        cells[first + KV] -= self._kv
        self._requests = self._running = self._compute = self._kv = 0

    def _tell_end(self, served: bool) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            if self.answer_tokens is not None and served:
                listener.answered(self.backend, self._request, self.answer_tokens)
            listener.ended(self.backend, self._request, served)

    def _report(self, backend: Backend, error: UpstreamError) -> None:
        # The same failure comes by twice when a move found no other backend and the caller raises it on.
        if error is not self._reported:
            self._reported = error
            trial, self._trial = self._trial, 0
            if error.is_breakdown and not trial:
                error.blame = self._pool.outcomes.accuse(backend, error, self._request.proves_generation)
            else:
                self._pool.outcomes.report(backend, error, trial, self._request.proves_generation)
