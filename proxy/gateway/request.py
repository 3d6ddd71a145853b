"""One client request, from its parsed body to the end of its answer.

Callbacks of connections drive a request. It starts a task only when it must wait: after a failed first attempt, for
several units, or for a client that reads slowly.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.common.errors import ClientStalled, GatewayError, NoBackendAvailable, ShuttingDown, UpstreamError
from proxy.common.terms import Stage
from proxy.connectors.leg_driver import LegDriver
from proxy.gateway.attempts import FailedAttempt
from proxy.gateway.client_writer import ClientWriter
from proxy.gateway.relay import unwritable_error
from proxy.observe import logs
from proxy.resume.engines import SGLANG
from proxy.wire.openai import error_event

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from contextlib import AbstractContextManager
    from typing import Any

    from proxy.connectors.legs import Attempt
    from proxy.dialects.base import Dialect
    from proxy.dialects.call import Call
    from proxy.gateway.admission import QueuedUnit
    from proxy.gateway.api_keys import ApiKey, TokenReservation
    from proxy.gateway.client_writer import ClientConnection
    from proxy.gateway.request_parts import RequestParts
    from proxy.gateway.work import Work
    from proxy.observe.record import RequestRecord
    from proxy.observe.timeline import Timeline


class Request:
    """Serves one client request, from `start` until it calls `ClientConnection.done`.

    It is the AttemptOwner of its first attempt, and the AnswerOwner of the answer to this attempt.
    """

    __slots__ = (
        "_attempt",
        "_began_at",
        "_call",
        "_client",
        "_dialect",
        "_driver",
        "_has_task",
        "_held_bytes",
        "_is_counted",
        "_is_let_in",
        "_key",
        "_parts",
        "_queued",
        "_quota",
        "_record",
        "_reservation",
        "_task",
        "_timeline",
        "_will_look",
        "_work",
        "_writer",
        "is_over",
    )

    def __init__(
        self,
        parts: RequestParts,
        client: ClientConnection,
        dialect: Dialect,
        call: Call,
        key: ApiKey,
        quota: AbstractContextManager[None] | None = None,
        held_bytes: int = 0,
    ) -> None:
        """Create the request.

        Args:
            parts: The parts of the lane that serves the request.
            client: The connection of the client.
            dialect: The API of the client.
            call: The parsed body.
            key: The client key of the request.
            quota: The entered limits of the client key. The request leaves them at its end. None: no limits.
            held_bytes: The size of the body in the account of request bodies, released at the end.
        """
        self.is_over = False
        self._parts = parts
        self._client = client
        self._dialect = dialect
        self._call = call
        self._key = key
        self._quota = quota
        self._held_bytes = held_bytes
        self._reservation: TokenReservation | None = None
        """The tokens that count against the client key. None: its tokens are not limited."""
        self._writer: ClientWriter
        self._record: RequestRecord
        self._work: Work | None = None
        """The units and their answers. None before the request was split into units."""
        self._driver: LegDriver | None = None
        """Drives the first attempt. None before and after this attempt."""
        self._attempt: Attempt | None = None
        """The first attempt. None before its connections are open, and after its end."""
        self._timeline: Timeline | None = None
        """The timeline of the first attempt."""
        self._began_at: float | None = None
        """Time of the first output of the first attempt, in seconds of the suspects' clock. None: no output yet."""
        self._task: asyncio.Task[None] | None = None
        """The task that waits or makes further attempts. None: callbacks drive the request."""
        self._has_task = False
        """Whether the task has begun to run."""
        self._will_look = False
        """Whether a call of `_look` is scheduled."""
        self._is_counted = True
        """Whether this object counts the request for the drain. Otherwise its task does, or the request is over."""
        self._is_let_in = False
        """Whether this object counts the request for admission and the retry budget."""
        self._queued: QueuedUnit | None = None
        """The place in the queue, while the request waits there without a task."""

    def start(self, record: RequestRecord) -> None:
        """Begin to serve the request. `record` has begun already."""
        parts, call, dialect = self._parts, self._call, self._dialect
        self._record = record
        record.key, record.stream, record.model = self._key.name, call.stream, call.model
        if self._key.token_limit is not None:
            samples = call.samples_per_prompt
            self._reservation = self._key.token_limit.reserve(samples * (call.prompt_tokens + (call.output_limit or 0)))
        if parts.lanes.models.is_mixed:
            record.served_model = parts.lanes.find_known_name(call.served_model)
        if record.context is not None:
            call = self._call = call.copy_with_trace_context(record.context)
        service = parts.service
        parts.drain.enter(self)
        settings = parts.settings
        writer = self._writer = ClientWriter(
            self._client,
            parts.stream_head,
            dialect.request_id_header,
            record.request_id,
            settings.listen.write_timeout_seconds,
        )
        writer.gathers_tokens = self._key.gathers_tokens
        if call.stream and parts.keeps_streams_alive:
            writer.keep_alive_by(settings.stream, dialect.keep_alive_event)
        try:
            if settings.sglang.chat_sampling and service.watching(dialect, call).engine is SGLANG:
                self._run(self._continue_in_task())
                return
            work = self._work = service.work(dialect, call, writer, record)
            if self._needs_task(work):
                self._run(self._continue_in_task())
                return
            self._timeline = record.timeline()
            pick_request = work.answers[0].call.make_pick_request
            if service.admission.admits_at_once(record.key, pick_request):
                self._begin_attempt(work)
            else:
                self._timeline.enter(Stage.QUEUE)
                self._queued = service.admission.queue(record.key, pick_request, record.started, self._on_turn)
        except GatewayError as error:
            self._abandon(error)
        except Exception as error:
            self._end_unexpected(error)

    def _needs_task(self, work: Work) -> bool:
        """Return whether the request must wait for something besides the queue."""
        return (
            len(work.answers) > 1
            or not self._parts.suspects.memory.is_empty
            or self._dialect.waits_for_prefiller(self._call)
        )

    def _on_turn(self, refusal: GatewayError | None) -> None:
        """Begin the first attempt of a queued request. `refusal`: why the queue rejects it, or None if it may go."""
        self._queued = None
        work, timeline = self._work, self._timeline
        assert work is not None
        assert timeline is not None
        if refusal is not None:
            self._abandon(refusal)
            return
        timeline.leave()
        try:
            if self._needs_task(work):
                self._leave_to_task()
            else:
                self._begin_attempt(work)
        except GatewayError as error:
            self._abandon(error)
        except Exception as error:
            self._end_unexpected(error)

    def _begin_attempt(self, work: Work) -> None:
        """Begin the first attempt, for which there is room. Raises GatewayError."""
        parts, timeline = self._parts, self._timeline
        assert timeline is not None
        call = work.answers[0].call
        legs = parts.connector.make_legs(call, call.make_pick_request(), timeline)
        if legs is None:
            self._leave_to_task()
            return
        parts.service.admission.enter(self._record.key)
        parts.service.budget.enter()
        self._is_let_in = True
        self._driver = LegDriver(parts.upstream, self)
        self._driver.start_legs(legs)

    def _leave_to_task(self) -> None:
        """Let a task make all attempts, with another timeline."""
        self._record.timelines.clear()
        self._timeline = None
        self._run(self._continue_in_task())

    # AttemptOwner

    def on_attempt(self, attempt: Attempt) -> None:
        self._attempt = attempt
        assert self._work is not None
        try:
            self._work.answers[0].begin(attempt, self)
        except Exception as error:
            self._end_unexpected(error)

    def on_failure(self, error: NoBackendAvailable | UpstreamError) -> None:
        self._driver = None
        self._run(self._continue_in_task(self._failed_attempt(error)))

    def on_defect(self, error: Exception) -> None:
        self._end_unexpected(error)

    # AnswerOwner

    def on_first_output(self) -> None:
        if self._began_at is None:
            self._began_at = self._parts.suspects.clock()

    def wake(self) -> None:
        if not self._will_look:
            self._will_look = True
            self._parts.loop.call_soon(self._look)

    def on_end(self) -> None:
        if self.is_over or self._task is not None:
            return
        attempt, driver, work = self._attempt, self._driver, self._work
        assert attempt is not None
        assert driver is not None
        assert work is not None
        try:
            work.answers[0].complete(attempt)
            driver.finish_attempt()
        except UpstreamError as error:
            self._end_failed_attempt(error)
            return
        except Exception as error:
            self._end_unexpected(error)
            return
        self._driver = self._attempt = None
        assert self._timeline is not None
        self._timeline.leave()
        if work.has_damaged_calls:
            self._run(self._continue_in_task(has_answers=True))
            return
        try:
            self._write_ending()
        except GatewayError as error:
            self._send_error(error)
            self._end()
            return
        suspects = self._parts.suspects
        if not suspects.memory.is_empty:
            suspects.note_served(self._call)
        if self._client.is_paused:
            self._run(self._wait_for_client())
        else:
            self._end()

    def _look(self) -> None:
        """Complete the answer to the first attempt, or wait for the client."""
        self._will_look = False
        if self.is_over or self._task is not None or self._work is None or self._driver is None:
            return
        if self._work.answers[0].is_ended:
            self.on_end()
        else:
            self._run(self._wait_for_reader())

    def _end_failed_attempt(self, error: UpstreamError) -> None:
        """End the first attempt after its answer failed, and let a task go on."""
        driver, self._driver = self._driver, None
        assert driver is not None
        try:
            driver.fail_attempt(error)
        except (NoBackendAvailable, UpstreamError) as raised:
            self._run(self._continue_in_task(self._failed_attempt(raised)))
        except Exception as raised:
            self._end_unexpected(raised)

    def _failed_attempt(self, error: NoBackendAvailable | UpstreamError) -> FailedAttempt:
        assert self._timeline is not None
        prefiller = None if self._attempt is None else self._attempt.prefiller
        self._attempt = None
        return FailedAttempt(self._timeline, error, prefiller, self._began_at)

    # Tasks

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._has_task = False
        self._task = self._parts.loop.create_task(work)

    async def _wait_for_reader(self) -> None:
        """Wait until the client has read enough, and continue the first attempt."""
        self._has_task = True
        try:
            await self._writer.wait_until_read()
        except (ClientStalled, asyncio.CancelledError) as error:
            self._abandon(error)
            return
        self._task = None
        self._has_task = False
        work = self._work
        if self.is_over or work is None or self._driver is None:
            return
        if work.answers[0].is_ended:
            self.on_end()
        else:
            work.answers[0].go_on()

    async def _wait_for_client(self) -> None:
        """Wait until the client has read a complete answer."""
        self._has_task = True
        try:
            await self._writer.wait_until_read()
        except (ClientStalled, asyncio.CancelledError) as error:
            self._record.error = error
        finally:
            self._end()

    async def _continue_in_task(self, failed: FailedAttempt | None = None, *, has_answers: bool = False) -> None:
        """Make the answers of a request in a task, and write their end.

        Args:
            failed: The first attempt, which has failed. None: it was not made, or it succeeded.
            has_answers: Whether the first attempt has brought the whole answer, with damaged tool calls.
        """
        if self.is_over:  # the client has disconnected since
            return
        self._has_task = True
        parts, record, work = self._parts, self._record, self._work
        service = parts.service
        record.samples = self._call.samples_per_prompt
        token = logs.request_id.set(record.request_id)
        self._uncount()
        task = asyncio.current_task()
        assert task is not None
        try:
            with parts.drain.counting(task), parts.drain:
                if work is None:
                    prompt = await service.prompt(self._call)
                    work = self._work = service.work(self._dialect, self._call, self._writer, record, prompt)
                if not has_answers:
                    await service.make_answers(work.call, work.answers, record, failed)
                if work.has_damaged_calls:
                    await service.repeat_damaged_answers(work, record)
                self._write_ending()
                await self._writer.wait_until_read()
        except GatewayError as error:
            self._send_error(error)
        except (ClientStalled, asyncio.CancelledError, ConnectionError) as error:
            record.error = error
        except Exception as error:
            self._send_error(parts.error_of_exception(self._dialect, error), cause=error)
        finally:
            self._end()
            logs.request_id.reset(token)

    # Ends

    def on_disconnect(self) -> None:
        """Give up the request after the client has disconnected."""
        if self.is_over:
            return
        if self._has_task:
            assert self._task is not None
            self._task.cancel()
            return
        self._abandon(asyncio.CancelledError())

    def cut_off(self) -> None:
        """End the request because the gateway shuts down."""
        task = self._task
        self._abandon(ShuttingDown())
        if task is not None and self._has_task:
            task.cancel()

    def _end_unexpected(self, error: Exception) -> None:
        """End the request after an unexpected error."""
        token = logs.request_id.set(self._record.request_id)
        self._abandon(self._parts.error_of_exception(self._dialect, error))
        logs.request_id.reset(token)

    def _abandon(self, error: GatewayError | ClientStalled | asyncio.CancelledError) -> None:
        """End the first attempt and the request. Send the client an error, unless the client is the cause."""
        if self.is_over:
            return
        queued, self._queued = self._queued, None
        if queued is not None:
            queued.leave()
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.release_attempt(error)
            assert self._timeline is not None
            self._timeline.leave()
        if isinstance(error, GatewayError):
            self._send_error(error)
        else:
            self._record.error = error
        self._end()

    def _send_error(self, error: GatewayError, cause: Exception | None = None) -> None:
        """Send an error in place of the answer, or in the middle of it. `cause`: the error for the record."""
        self._record.error = cause or error
        parts, writer, client = self._parts, self._writer, self._client
        if writer.is_committed:
            if not writer.has_answer:
                parts.note_rejection(error)
            writer.break_off((error_event if self._work is None else self._work.error_event)(error))
        else:
            answer = parts.error_answer(self._dialect, error, self._record.request_id, client)
            if not client.transport.is_closing():
                client.transport.write(answer)

    def _end(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        parts, record, work = self._parts, self._record, self._work
        if record.error is not None and work is not None and len(work.answers) == len(record.timelines):
            for answer, timeline in zip(work.answers, record.timelines, strict=True):
                answer.note_partial_usage(timeline)
        record.committed = self._writer.is_committed
        self._writer.close()
        parts.observers.end(record)
        if self._reservation is not None:
            self._reservation.settle(record.tokens)
        self._uncount()
        parts.service.admission.buffers.held_bytes -= self._held_bytes
        if self._quota is not None:
            self._quota.__exit__(None, None, None)
        # Break the reference cycles, which would keep the whole body until the next garbage collection.
        if work is not None:
            for answer in work.answers:
                answer.stop_reading()
        self._work = self._attempt = self._driver = self._task = None
        client = self._client
        client.done(record.ended)

    def _uncount(self) -> None:
        """Stop counting the request: it is over, or its task counts it from now on."""
        service = self._parts.service
        if self._is_counted:
            self._is_counted = False
            self._parts.drain.leave(self)
        if self._is_let_in:
            self._is_let_in = False
            service.admission.leave(self._record.key)
            service.budget.in_flight -= 1

    def _write_ending(self) -> None:
        """Write the end of a stream, or the whole body. Raises GatewayError."""
        work = self._work
        assert work is not None
        try:
            ending = work.render_ending()
        except GatewayError:
            raise
        except Exception as error:
            raise unwritable_error(error) from None
        if self._call.stream:
            self._writer.end(ending)
            return
        client = self._client
        if not client.transport.is_closing():
            head = self._parts.body_head(self._dialect.request_id_header, self._record.request_id, client, len(ending))
            client.transport.write(head + ending)
