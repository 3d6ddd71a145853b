"""One request's claim on one backend.

Entering picks a backend and charges it; leaving gives back whatever was not given back before and reports how it went.
All of it is synchronous, so no cancellation can fall in between, and nothing else in the program releases load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from proxy.balancer.pick import OTHER
from proxy.common.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

    from proxy.balancer.pick import Pick, PickRequest, Prediction, Tracker
    from proxy.balancer.pool import Pool
    from proxy.common.backend import Backend


class Lease:
    """Get one from `Pool.lease` and enter it, once. `with`, not `async with`: there is nothing to wait for.

    One without an outcome, from `Pool.reserve`, charges a backend and reports nothing of it.
    """

    __slots__ = (
        *("backend", "pick", "prediction", "answer_tokens"),
        *("_pool", "_request", "_has_outcome", "_is_entered", "_trial", "_tracker", "_has_begun", "_has_served"),
        *("_holds_kv", "_reported", "_requests", "_running", "_compute", "_kv"),
    )

    def __init__(self, pool: Pool, request: PickRequest, has_outcome: bool = True) -> None:
        self.backend: Backend
        """The backend that was picked, once the lease is entered; before, AttributeError."""
        self.pick: Pick
        """The same, with why."""
        self.prediction: Prediction | None = None
        """What the policy thinks will come of it, once it is entered; None: nothing."""
        self.answer_tokens: int | None = None
        """Of an answer that is complete, to be set before the lease is left; None: not known."""
        self._pool = pool
        self._request = request
        self._has_outcome = has_outcome
        self._is_entered = False
        self._trial = 0
        self._tracker: Tracker | None = None  # hears of it until it has ended
        self._has_begun = False
        self._has_served = False
        self._holds_kv = True
        self._reported: UpstreamError | None = None
        # What the backend is charged with, and so what is still to be given back.
        self._requests = self._running = self._compute = self._kv = 0

    def __enter__(self) -> Self:
        """Pick and charge. Raises NoBackendAvailable."""
        if self._is_entered:
            raise RuntimeError("a lease is entered once; ask the pool for a new one")
        if self._has_outcome:
            pick, self._trial = self._pool.take(self._request)
        else:
            pick = self._pool.choose(self._request), OTHER
        self._charge(pick)
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        backend, pool = self.backend, self._pool
        if self._requests:
            self._uncharge()
        if pool.on_release is not None:
            pool.on_release()
        if not self._has_outcome:
            return
        if error is None:
            if not self._has_served:
                pool.served(backend, self._trial, self._request.proves_generation)
            pool.count_served(backend)
        elif isinstance(error, UpstreamError) and error.backend == backend:
            self._report(backend, error)
        elif self._has_served:
            pool.count_served(backend)
        else:
            # The client left, or another part failed: that says nothing about this backend.
            pool.abandon(backend, self._trial)
        if self._tracker is not None:
            tracker, self._tracker = self._tracker, None
            tracker.ended(error is None, self.answer_tokens)

    def confirm(self) -> None:
        """The backend has sent the first of its answer, and so shown that it works: a trial has succeeded, though the
        request goes on. May be called again.

        A decoder's answer may take many minutes, for which it would get no other request.
        """
        if self._tracker is not None and not self._has_begun:
            self._has_begun = True
            self._tracker.began()
        if self._trial and self._request.proves_generation:
            self._pool.served(self.backend, self._trial)
            self._trial = 0
        else:
            self._pool.began(self.backend)

    def note_usage(self, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        """What the backend has told of the prompt, before `free_compute`; None: nothing."""
        if self._tracker is not None and prompt_tokens is not None:
            self._tracker.told(prompt_tokens, cached_tokens)

    def free_compute(self) -> None:
        """The backend has done its work for this request: whatever fails now, it served. May be called again."""
        pool = self._pool
        if not self._has_served:
            self._has_served = True
            # Now, and not when the lease ends: a success of long ago says nothing about a backend that has died since.
            pool.served(self.backend, self._trial, self._request.proves_generation)
            self._trial = 0
        if self._running:
            pool.row.take_work(self.backend.slot, self._compute)
            self._running = self._compute = 0
        if pool.on_release is not None:
            pool.on_release()
        if self._tracker is not None:
            tracker, self._tracker = self._tracker, None
            tracker.ended(True, self.answer_tokens)

    def free_kv(self) -> None:
        """The backend no longer holds this request's cache, and has nothing to do with the request any more if it has
        done its work, too. May be called again.
        """
        requests = self._requests if self._has_served else 0
        self._pool.row.take_kv(self.backend.slot, requests, self._kv)
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
        pick, trial = self._pool.take(request)
        if self._tracker is not None:
            tracker, self._tracker = self._tracker, None
            tracker.ended(False, None)
        self._uncharge()
        self._request = request
        self._has_begun = False
        self._trial = trial
        self._charge(pick)
        self._pool.released()
        return self.backend

    def _charge(self, pick: Pick) -> None:
        """Begin on a backend. What the policy does comes first: should it fail, nothing has been charged."""
        pool, request, backend = self._pool, self._request, pick[0]
        if pool.track is not None and self._has_outcome and not self._has_served:
            tracker = self._tracker = pool.track(backend, request)
            self.prediction = tracker.prediction
            compute, kv = tracker.compute, tracker.kv
        elif pool.cost_of is not None:
            compute, kv = pool.cost_of(backend, request)
        else:
            compute, kv = request.decode if pool.is_decode else request.prefill
        self.backend, self.pick = backend, pick
        self._requests = self._running = 1
        self._compute, self._kv = compute, kv
        if self._has_served:
            self._running = self._compute = 0
        if not self._holds_kv:
            self._kv = 0
        pool.row.add(backend.slot, 1, self._running, self._compute, self._kv)

    def _uncharge(self) -> None:
        self._pool.row.add(self.backend.slot, -self._requests, -self._running, -self._compute, -self._kv)
        self._requests = self._running = self._compute = self._kv = 0

    def _report(self, backend: Backend, error: UpstreamError) -> None:
        # The same failure comes by twice when a move found no other backend and the caller raises it on.
        if error is not self._reported:
            self._reported = error
            trial, self._trial = self._trial, 0
            if error.is_breakdown and not trial:
                error.blame = self._pool.defer_blame(backend, error, self._request.proves_generation)
            else:
                others_running = self._pool.running(backend) - self._running
                self._pool.report(backend, error, trial, self._request.proves_generation, others_running=others_running)
