"""Claim of one request on one backend.

Entering a lease picks a backend and charges it. Leaving it releases the load that is still held and reports the
outcome. All of it is synchronous, so no cancellation can come in between. Only leases release load.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self

from proxy.balancer.pick import OTHER
from proxy.common.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

    from proxy.balancer.pick import GapCounter, LeaseTracker, Pick, PickPrediction, PickRequest
    from proxy.balancer.pool import Pool
    from proxy.common.backend import Backend


class Lease:
    """Charges a backend while it is entered. Get one from `Pool.make_lease` and enter it once, by `with`.

    A lease without an outcome, from `Pool.make_reservation`, reports nothing about the backend.
    """

    def __init__(self, pool: Pool, request: PickRequest, has_outcome: bool = True) -> None:
        self.backend: Backend
        """The picked backend. Unset until the lease is entered."""
        self.backend_pick: Pick
        """The picked backend with the reason. Unset until the lease is entered."""
        self.policy_prediction: PickPrediction | None = None
        """Prediction of the policy when the lease is entered. None: it made none."""
        self.answer_tokens: int | None = None
        """Length of a complete answer, to be set before the lease is left. None: unknown."""
        self._backend_pool = pool
        self._pick_request = request
        self._has_outcome = has_outcome
        self._is_entered = False
        self._trial_number = 0
        self._policy_tracker: LeaseTracker | None = None  # None after the end of the work
        self._has_answer_begun = False
        self._has_backend_served = False
        self._holds_kv = True
        self._is_reported: UpstreamError | None = None
        # Load that the backend is charged with and that is still to be released.
        self._requests = self._running = self._compute = self._kv = 0
        self._deferred_kv = 0

    def __enter__(self) -> Self:
        """Pick a backend and charge it. Raises NoBackendAvailable."""
        if self._is_entered:
            raise RuntimeError("a lease can be entered only once: ask the pool for a new one")
        if self._has_outcome:
            pick, self._trial_number = self._backend_pool.take_pick(self._pick_request)
        else:
            pick = self._backend_pool.choose_backend(self._pick_request), OTHER
        self._charge_backend(pick)
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        backend, pool = self.backend, self._backend_pool
        if self._requests:
            self._release_charges()
        if pool.on_release is not None:
            pool.on_release()
        if not self._has_outcome:
            return
        if error is None:
            if not self._has_backend_served:
                pool.record_success(backend, self._trial_number, self._pick_request.proves_generation)
            pool.count_served_lease(backend)
        elif isinstance(error, UpstreamError) and error.backend == backend:
            self._report_outcome(backend, error)
        elif self._has_backend_served:
            pool.count_served_lease(backend)
        else:
            # The client disconnected, or another part failed, so nothing follows for this backend.
            pool.record_abandoned_request(backend, self._trial_number)
        if self._policy_tracker is not None:
            tracker, self._policy_tracker = self._policy_tracker, None
            tracker.record_end(error is None, self.answer_tokens)

    def confirm_beginning(self, gap_counter: GapCounter | None = None) -> None:
        """Record that the backend has sent the beginning of its answer. May be called again.

        `gap_counter`: counts the gaps between the answer's tokens. None: they are not timed.

        It succeeds in a trial by this. Otherwise a decoder on trial would get no other request during its answer, which
        may take many minutes.
        """
        if self._policy_tracker is not None and not self._has_answer_begun:
            self._has_answer_begun = True
            self._policy_tracker.record_first_token(gap_counter)
        if self._trial_number and self._pick_request.proves_generation:
            self._backend_pool.record_success(self.backend, self._trial_number)
            self._trial_number = 0
        else:
            self._backend_pool.record_answer_begin(self.backend)

    def record_usage(self, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        """Record the backend's usage, before `release_compute`. None: the backend did not report it."""
        if self._policy_tracker is not None and prompt_tokens is not None:
            self._policy_tracker.record_usage(prompt_tokens, cached_tokens)

    def release_compute(self) -> None:
        """Record that the backend has done its work, so that it served whatever fails later. May be called again."""
        pool = self._backend_pool
        if not self._has_backend_served:
            self._has_backend_served = True
            # At once and not when the lease ends, because an old success says nothing about a backend that has died
            # since.
            pool.record_success(self.backend, self._trial_number, self._pick_request.proves_generation)
            self._trial_number = 0
        if self._running:
            pool.load_row.release_compute(self.backend.slot, self._compute)
            self._running = self._compute = 0
        if pool.on_release is not None:
            pool.on_release()
        if self._policy_tracker is not None:
            tracker, self._policy_tracker = self._policy_tracker, None
            tracker.record_end(True, self.answer_tokens)

    def release_kv(self) -> None:
        """Record that the backend no longer holds the KV cache of this request. May be called again.

        If it has done its work, too, it has finished with the request.
        """
        requests = self._requests if self._has_backend_served else 0
        self._backend_pool.load_row.release_kv(self.backend.slot, requests, self._kv)
        self._requests -= requests
        self._kv = 0
        self._holds_kv = False

    def defer_kv_charge(self) -> None:
        """Release the KV cache until `charge_deferred_kv`.

        The backend takes memory only when the prompt is computed.
        """
        self._backend_pool.load_row.release_kv(self.backend.slot, 0, self._kv)
        self._deferred_kv, self._kv = self._kv, 0

    def charge_deferred_kv(self) -> None:
        """Charge the KV cache that was deferred. May be called again."""
        if self._deferred_kv and self._requests:
            self._backend_pool.load_row.add_load(self.backend.slot, kv=self._deferred_kv)
            self._kv = self._deferred_kv
        self._deferred_kv = 0

    def move_to_other_backend(self, avoided_backends: Collection[Backend], cause: UpstreamError) -> Backend:
        """Move to another backend, because this one failed, and return the new one.

        Args:
            avoided_backends: Further backends that are not picked.
            cause: The failure of this backend.

        Raises:
            NoBackendAvailable: There is no other backend. The lease still holds what it held.
        """
        old = self.backend
        if not self._requests:
            raise RuntimeError("a lease cannot move after it was left")
        # Before the pick, because the failure also counts if there is no other backend.
        self._report_outcome(old, cause)
        request = replace(
            self._pick_request,
            avoided_backends={*avoided_backends, old},
            preferred_backend=None,
            handoff_partner=None,
            computes_prompt=False,
        )
        pick, trial = self._backend_pool.take_pick(request)
        if self._policy_tracker is not None:
            tracker, self._policy_tracker = self._policy_tracker, None
            tracker.record_end(False, None)
        self._release_charges()
        self._pick_request = request
        self._has_answer_begun = False
        self._trial_number = trial
        self._charge_backend(pick)
        if self._backend_pool.on_release is not None:
            self._backend_pool.on_release()
        return self.backend

    def _charge_backend(self, pick: Pick) -> None:
        """Charge a backend. The policy comes first: if it fails, nothing has been charged."""
        pool, request, backend = self._backend_pool, self._pick_request, pick[0]
        if pool.track is not None and self._has_outcome and not self._has_backend_served:
            tracker = self._policy_tracker = pool.track(backend, request)
            self.policy_prediction = tracker.policy_prediction
            compute, kv = tracker.compute_charge, tracker.kv_charge
        elif pool.cost_of is not None:
            compute, kv = pool.cost_of(backend, request)
        else:
            compute, kv = request.decode_load if pool.is_decode else request.prefill_load
        self.backend, self.backend_pick = backend, pick
        self._requests = self._running = 1
        self._compute, self._kv = compute, kv
        if self._has_backend_served:
            self._running = self._compute = 0
        if not self._holds_kv:
            self._kv = 0
        pool.load_row.add_load(backend.slot, 1, self._running, self._compute, self._kv)

    def _release_charges(self) -> None:
        self._backend_pool.load_row.add_load(
            self.backend.slot, -self._requests, -self._running, -self._compute, -self._kv
        )
        self._requests = self._running = self._compute = self._kv = 0

    def _report_outcome(self, backend: Backend, error: UpstreamError) -> None:
        # The same failure comes twice if a move found no other backend and the caller raises it again.
        if error is not self._is_reported:
            self._is_reported = error
            subject = self._pick_request.request_subject
            if error.quotable is None and subject is not None:
                error.quotable = subject.request_texts
            trial, self._trial_number = self._trial_number, 0
            if error.is_engine_breakdown and not trial:
                error.blame = self._backend_pool.defer_blame(backend, error, self._pick_request.proves_generation)
            else:
                others_running = self._backend_pool.scoreboard.running_requests(backend.slot) - self._running
                self._backend_pool.report_outcome(
                    backend, error, trial, self._pick_request.proves_generation, others_running=others_running
                )
