"""Claim of one request on one backend.

Entering a lease picks a backend and charges it. Leaving it releases the load that is still held and reports the
outcome. All of it is synchronous, so no cancellation can come in between. Only leases release load.
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
    """Charges a backend while it is entered. Get one from `Pool.lease` and enter it once, by `with`.

    A lease without an outcome, from `Pool.reserve`, reports nothing about the backend.
    """

    __slots__ = (
        "_compute",
        "_deferred_kv",
        "_has_begun",
        "_has_outcome",
        "_has_served",
        "_holds_kv",
        "_is_entered",
        "_kv",
        "_pool",
        "_reported",
        "_request",
        "_requests",
        "_running",
        "_tracker",
        "_trial",
        "answer_tokens",
        "backend",
        "pick",
        "prediction",
    )

    def __init__(self, pool: Pool, request: PickRequest, has_outcome: bool = True) -> None:
        self.backend: Backend
        """The picked backend. Unset until the lease is entered."""
        self.pick: Pick
        """The picked backend with the reason. Unset until the lease is entered."""
        self.prediction: Prediction | None = None
        """Prediction of the policy when the lease is entered. None: it made none."""
        self.answer_tokens: int | None = None
        """Length of a complete answer, to be set before the lease is left. None: unknown."""
        self._pool = pool
        self._request = request
        self._has_outcome = has_outcome
        self._is_entered = False
        self._trial = 0
        self._tracker: Tracker | None = None  # None after the end of the work
        self._has_begun = False
        self._has_served = False
        self._holds_kv = True
        self._reported: UpstreamError | None = None
        # Load that the backend is charged with and that is still to be released.
        self._requests = self._running = self._compute = self._kv = 0
        self._deferred_kv = 0

    def __enter__(self) -> Self:
        """Pick a backend and charge it. Raises NoBackendAvailable."""
        if self._is_entered:
            raise RuntimeError("a lease can be entered only once: ask the pool for a new one")
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
                pool.note_success(backend, self._trial, self._request.proves_generation)
            pool.count_success(backend)
        elif isinstance(error, UpstreamError) and error.backend == backend:
            self._report(backend, error)
        elif self._has_served:
            pool.count_success(backend)
        else:
            # The client disconnected, or another part failed, so nothing follows for this backend.
            pool.abandon(backend, self._trial)
        if self._tracker is not None:
            tracker, self._tracker = self._tracker, None
            tracker.note_end(error is None, self.answer_tokens)

    def confirm(self) -> None:
        """Record that the backend has sent the beginning of its answer. May be called again.

        It succeeds in a trial by this. Otherwise a decoder on trial would get no other request during its answer, which
        may take many minutes.
        """
        if self._tracker is not None and not self._has_begun:
            self._has_begun = True
            self._tracker.note_first_token()
        if self._trial and self._request.proves_generation:
            self._pool.note_success(self.backend, self._trial)
            self._trial = 0
        else:
            self._pool.note_beginning(self.backend)

    def note_usage(self, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        """Record the backend's usage, before `free_compute`. None: the backend did not report it."""
        if self._tracker is not None and prompt_tokens is not None:
            self._tracker.note_usage(prompt_tokens, cached_tokens)

    def free_compute(self) -> None:
        """Record that the backend has done its work, so that it served whatever fails later. May be called again."""
        pool = self._pool
        if not self._has_served:
            self._has_served = True
            # At once and not when the lease ends, because an old success says nothing about a backend that has died
            # since.
            pool.note_success(self.backend, self._trial, self._request.proves_generation)
            self._trial = 0
        if self._running:
            pool.row.take_work(self.backend.slot, self._compute)
            self._running = self._compute = 0
        if pool.on_release is not None:
            pool.on_release()
        if self._tracker is not None:
            tracker, self._tracker = self._tracker, None
            tracker.note_end(True, self.answer_tokens)

    def free_kv(self) -> None:
        """Record that the backend no longer holds the KV cache of this request. May be called again.

        If it has done its work, too, it has finished with the request.
        """
        requests = self._requests if self._has_served else 0
        self._pool.row.take_kv(self.backend.slot, requests, self._kv)
        self._requests -= requests
        self._kv = 0
        self._holds_kv = False

    def defer_kv(self) -> None:
        """Release the KV cache until `charge_kv`, because the backend takes memory only when the prompt is computed."""
        self._pool.row.take_kv(self.backend.slot, 0, self._kv)
        self._deferred_kv, self._kv = self._kv, 0

    def charge_kv(self) -> None:
        """Charge the KV cache that was deferred. May be called again."""
        if self._deferred_kv and self._requests:
            self._pool.row.add(self.backend.slot, kv=self._deferred_kv)
            self._kv = self._deferred_kv
        self._deferred_kv = 0

    def move(self, avoid: Collection[Backend], because: UpstreamError) -> Backend:
        """Move to another backend, because this one failed, and return the new one.

        Args:
            avoid: Further backends that are not picked.
            because: The failure of this backend.

        Raises:
            NoBackendAvailable: There is no other backend. The lease still holds what it held.
        """
        old = self.backend
        if not self._requests:
            raise RuntimeError("a lease cannot move after it was left")
        # Before the pick, because the failure also counts if there is no other backend.
        self._report(old, because)
        request = self._request.for_another_backend({*avoid, old})
        pick, trial = self._pool.take(request)
        if self._tracker is not None:
            tracker, self._tracker = self._tracker, None
            tracker.note_end(False, None)
        self._uncharge()
        self._request = request
        self._has_begun = False
        self._trial = trial
        self._charge(pick)
        if self._pool.on_release is not None:
            self._pool.on_release()
        return self.backend

    def _charge(self, pick: Pick) -> None:
        """Charge a backend. The policy comes first: if it fails, nothing has been charged."""
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
        # The same failure comes twice if a move found no other backend and the caller raises it again.
        if error is not self._reported:
            self._reported = error
            subject = self._request.subject
            if error.quotable is None and subject is not None:
                error.quotable = subject.texts
            trial, self._trial = self._trial, 0
            if error.is_engine_breakdown and not trial:
                error.blame = self._pool.defer_blame(backend, error, self._request.proves_generation)
            else:
                others_running = self._pool.scoreboard.running(backend.slot) - self._running
                self._pool.report(backend, error, trial, self._request.proves_generation, others_running=others_running)
