"""One request's claim on one backend.

Entering picks a backend and charges it; leaving gives back whatever was not given back before and reports how it went.
All of it is synchronous, so no cancellation can fall in between, and nothing else in the program releases load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from proxy.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

    from proxy.backend import Backend
    from proxy.balancer.pick import PickRequest, Policy
    from proxy.balancer.pool import Pool


class Lease:
    """Get one from `Pool.lease` and enter it, once. `with`, not `async with`: there is nothing to wait for.

    One without an outcome, from `Pool.reserve`, charges a backend and reports nothing of it.
    """

    __slots__ = (
        *("_pool", "_request", "_has_outcome", "_backend", "_trial", "_listener"),
        *("_requests", "_running", "_compute", "_kv", "_holds_kv", "_has_served", "_reported"),
    )

    def __init__(self, pool: Pool, request: PickRequest, has_outcome: bool = True) -> None:
        self._pool = pool
        self._request = request
        self._has_outcome = has_outcome
        self._backend: Backend | None = None
        self._trial = 0
        self._listener: Policy | None = None  # who was told that this began, and not yet how it ended
        # What the backend is charged with once entered, and so what is still to be given back.
        self._requests = self._running = self._compute = self._kv = 0
        self._holds_kv = True
        self._has_served = False
        self._reported: UpstreamError | None = None

    @property
    def backend(self) -> Backend:
        if self._backend is None:
            raise RuntimeError("a lease has a backend only after it was entered")
        return self._backend

    def __enter__(self) -> Self:
        """Pick and charge. Raises NoBackendAvailable."""
        if self._backend is not None:
            raise RuntimeError("a lease is entered once; ask the pool for a new one")
        if self._has_outcome:
            backend, trial = self._pool.take(self._request)
        else:
            backend, trial = self._pool.choose(self._request), 0
        self._charge(backend, trial)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        backend = self.backend
        self._uncharge(backend)
        self._pool.released()
        if not self._has_outcome:
            return
        if isinstance(error, UpstreamError) and error.backend == backend:
            self._report(backend, error)
        elif self._has_served:
            self._pool.outcomes.count_served(backend)
        elif error is None:
            self._pool.outcomes.report(backend, None, self._trial, self._request.proves_generation)
        else:
            # The client left, or another part failed: that says nothing about this backend.
            self._pool.outcomes.abandon(backend, self._trial)
        if self._listener is not None:
            self._tell_end(served=error is None)

    def confirm(self) -> None:
        """The backend has shown that it works: a trial has succeeded, though the request goes on. May be called again.

        A decoder's answer may take many minutes, for which it would get no other request.
        """
        if self._trial and self._request.proves_generation:
            self._pool.outcomes.confirm(self.backend, self._trial)
            self._trial = 0

    def free_compute(self) -> None:
        """The backend has done its work for this request: whatever fails now, it served. May be called again."""
        backend = self.backend
        if not self._has_served:
            self._has_served = True
            # Now, and not when the lease ends: a success of long ago says nothing about a backend that has died since.
            self._pool.outcomes.confirm(backend, self._trial, self._request.proves_generation)
            self._trial = 0
        self._pool.row.add(backend.slot, running=-self._running, compute=-self._compute)
        self._running = self._compute = 0
        self._pool.released()
        if self._listener is not None:
            self._tell_end(served=True)

    def free_kv(self) -> None:
        """The backend no longer holds this request's cache, and has nothing to do with the request any more if it has
        done its work, too. May be called again.
        """
        requests = self._requests if self._has_served else 0
        self._pool.row.add(self.backend.slot, requests=-requests, kv=-self._kv)
        self._requests -= requests
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
        new, trial = self._pool.take(request)
        if self._listener is not None:
            self._tell_end(served=False)
        self._uncharge(old)
        self._request = request
        self._charge(new, trial)
        self._pool.released()
        return new

    def _charge(self, backend: Backend, trial: int) -> None:
        """Begin on a backend. What the policy does comes first: should it fail, nothing has been charged."""
        pool, request = self._pool, self._request
        load = request.load(backend.role) if pool.cost_of is None else pool.cost_of(backend, request)
        if pool.listener is not None and self._has_outcome and not self._has_served:
            pool.listener.dispatched(backend, request)
            self._listener = pool.listener
        self._backend = backend
        self._trial = trial
        self._requests = 1
        if not self._has_served:
            self._running, self._compute = 1, load.compute
        if self._holds_kv:
            self._kv = load.kv
        pool.row.add(backend.slot, requests=1, running=self._running, compute=self._compute, kv=self._kv)

    def _uncharge(self, backend: Backend) -> None:
        charge = self._pool.row.add
        charge(backend.slot, requests=-self._requests, running=-self._running, compute=-self._compute, kv=-self._kv)
        self._requests = self._running = self._compute = self._kv = 0

    def _tell_end(self, served: bool) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
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
