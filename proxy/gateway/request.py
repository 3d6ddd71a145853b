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
from proxy.listener import replies
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
    from proxy.gateway.lanes import Lane
    from proxy.gateway.request_parts import RequestParts
    from proxy.gateway.work import RequestWork
    from proxy.observe.record import RequestRecord
    from proxy.observe.timeline import Timeline


class Request:
    """Serves one client request, from `start_serving` until it calls `ClientConnection.finish_request`.

    It is the AttemptOwner of its first attempt, and the AnswerOwner of the answer to this attempt.
    """

    def __init__(
        self,
        parts: RequestParts,
        lane: Lane,
        client: ClientConnection,
        dialect: Dialect,
        call: Call,
        key: ApiKey,
    ) -> None:
        """Create the request.

        Args:
            parts: The parts that all requests share.
            lane: The lane that serves the request.
            client: The connection of the client.
            dialect: The API of the client.
            call: The parsed body.
            key: The client key of the request.
        """
        self.is_over = False
        self.held_bytes = 0
        """The size of the body in the account of request bodies. The request releases it at its end."""
        self.quota_hold: AbstractContextManager[None] | None = None
        """The entered limits of the client key, which the request leaves at its end. None: no limits."""
        self._request_parts = parts
        self._lane = lane
        self._request_service = lane.request_service
        self._client = client
        self._dialect = dialect
        self._call = call
        self._api_key = key
        self._token_reservation: TokenReservation | None = None
        """The tokens that count against the client key. None: its tokens are not limited."""
        self._client_writer: ClientWriter
        self._request_record: RequestRecord
        self._request_work: RequestWork | None = None
        """The units and their answers. None before the request was split into units."""
        self._leg_driver: LegDriver | None = None
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
        self._is_look_scheduled = False
        """Whether a call of `_complete_or_wait` is scheduled."""
        self._is_counted = True
        """Whether this object counts the request for the drain. Otherwise its task does, or the request is over."""
        self._is_admitted = False
        """Whether this object counts the request for admission and the retry budget."""
        self._queued_unit: QueuedUnit | None = None
        """The place in the queue, while the request waits there without a task."""

    def start_serving(self, record: RequestRecord) -> None:
        """Begin to serve the request. `record` has begun already."""
        parts, call, dialect = self._request_parts, self._call, self._dialect
        self._request_record = record
        record.key, record.stream, record.model = self._api_key.key_name, call.stream, call.model
        if self._api_key.token_limit is not None:
            samples = call.samples_per_prompt
            self._token_reservation = self._api_key.token_limit.reserve_tokens(
                samples * (call.prompt_tokens + (call.output_limit or 0))
            )
        if parts.all_lanes.served_models.has_several_groups:
            record.served_model = parts.all_lanes.find_known_name(call.served_model)
        if record.trace_context is not None:
            call = self._call = call.copy_with_trace_context(record.trace_context)
        service = self._request_service
        parts.drain_manager.count_request(self)
        settings = parts.settings
        writer = self._client_writer = ClientWriter(
            self._client,
            parts.make_stream_head,
            dialect.request_id_header,
            record.request_id,
            settings.listen.write_timeout_seconds,
        )
        writer.gathers_tokens = self._api_key.gathers_tokens
        if call.stream and parts.keeps_streams_alive:
            writer.send_while_silent(settings.stream, dialect.keep_alive_event)
        try:
            if settings.sglang.chat_sampling and service.choose_answer_watch(dialect, call).engine is SGLANG:
                self._run_first_attempt(self._continue_in_task())
                return
            work = self._request_work = service.make_work(dialect, call, writer, record)
            if self._needs_task(work):
                self._run_first_attempt(self._continue_in_task())
                return
            self._timeline = record.add_timeline()
            pick_request = work.unit_answers[0].engine_call.make_pick_request
            if service.admission_queue.admits_at_once(record.key, pick_request):
                self._begin_attempt(work)
            else:
                self._timeline.enter_stage(Stage.QUEUE)
                self._queued_unit = service.admission_queue.queue_unit(
                    record.key, pick_request, record.started, self._on_queue_turn
                )
        except GatewayError as error:
            self._abandon_request(error)
        except Exception as error:
            self._end_unexpected(error)

    def _needs_task(self, work: RequestWork) -> bool:
        """Return whether the request must wait for something besides the queue."""
        return (
            len(work.unit_answers) > 1
            or not self._request_service.suspects.suspect_memory.is_empty
            or self._dialect.waits_for_prefiller(self._call)
        )

    def _on_queue_turn(self, refusal: GatewayError | None) -> None:
        """Begin the first attempt of a queued request. `refusal`: why the queue rejects it, or None if it may go."""
        self._queued_unit = None
        work, timeline = self._request_work, self._timeline
        assert work is not None
        assert timeline is not None
        if refusal is not None:
            self._abandon_request(refusal)
            return
        timeline.end_attempt()
        try:
            if self._needs_task(work):
                self._move_to_task()
            else:
                self._begin_attempt(work)
        except GatewayError as error:
            self._abandon_request(error)
        except Exception as error:
            self._end_unexpected(error)

    def _begin_attempt(self, work: RequestWork) -> None:
        """Begin the first attempt, for which there is room. Raises GatewayError."""
        service, timeline = self._request_service, self._timeline
        assert timeline is not None
        call = work.unit_answers[0].engine_call
        legs = service.connector.make_legs(call, call.make_pick_request(), timeline)
        if legs is None:
            self._move_to_task()
            return
        service.admission_queue.admit_at_once(self._request_record.key)
        service.retry_budget.count_request()
        self._is_admitted = True
        self._leg_driver = LegDriver(self._request_parts.upstream, self)
        self._leg_driver.start_legs(legs)

    def _move_to_task(self) -> None:
        """Let a task make all attempts, with another timeline."""
        self._request_record.timelines.clear()
        self._timeline = None
        self._run_first_attempt(self._continue_in_task())

    # AttemptOwner

    def on_attempt(self, attempt: Attempt) -> None:
        self._attempt = attempt
        assert self._request_work is not None
        try:
            self._request_work.unit_answers[0].begin_reading(attempt, self)
        except Exception as error:
            self._end_unexpected(error)

    def on_failure(self, error: NoBackendAvailable | UpstreamError) -> None:
        self._leg_driver = None
        self._run_first_attempt(self._continue_in_task(self._failed_attempt(error)))

    def on_defect(self, error: Exception) -> None:
        self._end_unexpected(error)

    # AnswerOwner

    def on_first_output(self) -> None:
        if self._began_at is None:
            self._began_at = self._request_service.suspects.clock()

    def on_progress(self) -> None:
        if not self._is_look_scheduled:
            self._is_look_scheduled = True
            self._request_parts.loop.call_soon(self._complete_or_wait)

    def on_end(self) -> None:
        if self.is_over or self._task is not None:
            return
        attempt, driver, work = self._attempt, self._leg_driver, self._request_work
        assert attempt is not None
        assert driver is not None
        assert work is not None
        try:
            work.unit_answers[0].check_complete(attempt)
            driver.finish_attempt()
        except UpstreamError as error:
            self._end_failed_attempt(error)
            return
        except Exception as error:
            self._end_unexpected(error)
            return
        self._leg_driver = self._attempt = None
        assert self._timeline is not None
        self._timeline.end_attempt()
        if work.has_damaged_tool_calls:
            self._run_first_attempt(self._continue_in_task(has_answers=True))
            return
        try:
            self._write_ending()
        except GatewayError as error:
            self._send_error(error)
            self._end_request()
            return
        suspects = self._request_service.suspects
        if not suspects.suspect_memory.is_empty:
            suspects.forget_served(self._call)
        if self._client.is_writing_paused:
            self._run_first_attempt(self._wait_for_client())
        else:
            self._end_request()

    def _complete_or_wait(self) -> None:
        """Complete the answer to the first attempt, or wait for the client."""
        self._is_look_scheduled = False
        if self.is_over or self._task is not None or self._request_work is None or self._leg_driver is None:
            return
        if self._request_work.unit_answers[0].is_ended:
            self.on_end()
        else:
            self._run_first_attempt(self._wait_for_reader())

    def _end_failed_attempt(self, error: UpstreamError) -> None:
        """End the first attempt after its answer failed, and let a task go on."""
        driver, self._leg_driver = self._leg_driver, None
        assert driver is not None
        try:
            driver.fail_attempt(error)
        except (NoBackendAvailable, UpstreamError) as raised:
            self._run_first_attempt(self._continue_in_task(self._failed_attempt(raised)))
        except Exception as raised:
            self._end_unexpected(raised)

    def _failed_attempt(self, error: NoBackendAvailable | UpstreamError) -> FailedAttempt:
        assert self._timeline is not None
        prefiller = None if self._attempt is None else self._attempt.prefiller
        self._attempt = None
        return FailedAttempt(self._timeline, error, prefiller, self._began_at)

    # Tasks

    def _run_first_attempt(self, work: Coroutine[Any, Any, None]) -> None:
        self._has_task = False
        self._task = self._request_parts.loop.create_task(work)

    async def _wait_for_reader(self) -> None:
        """Wait until the client has read enough, and continue the first attempt."""
        self._has_task = True
        try:
            await self._client_writer.wait_until_read()
        except (ClientStalled, asyncio.CancelledError) as error:
            self._abandon_request(error)
            return
        self._task = None
        self._has_task = False
        work = self._request_work
        if self.is_over or work is None or self._leg_driver is None:
            return
        if work.unit_answers[0].is_ended:
            self.on_end()
        else:
            work.unit_answers[0].continue_reading()

    async def _wait_for_client(self) -> None:
        """Wait until the client has read a complete answer."""
        self._has_task = True
        try:
            await self._client_writer.wait_until_read()
        except (ClientStalled, asyncio.CancelledError) as error:
            self._request_record.error = error
        finally:
            self._end_request()

    async def _continue_in_task(self, failed: FailedAttempt | None = None, *, has_answers: bool = False) -> None:
        """Make the answers of a request in a task, and write their end.

        Args:
            failed: The first attempt, which has failed. None: it was not made, or it succeeded.
            has_answers: Whether the first attempt has brought the whole answer, with damaged tool calls.
        """
        if self.is_over:  # the client has disconnected since
            return
        self._has_task = True
        parts, record, work = self._request_parts, self._request_record, self._request_work
        service = self._request_service
        record.samples_per_prompt = self._call.samples_per_prompt
        token = logs.request_id.set(record.request_id)
        self._stop_counting()
        task = asyncio.current_task()
        assert task is not None
        try:
            with parts.drain_manager.count_task(task), parts.drain_manager:
                if work is None:
                    prompt = await service.make_chat_prompt(self._call)
                    work = self._request_work = service.make_work(
                        self._dialect, self._call, self._client_writer, record, prompt
                    )
                if not has_answers:
                    await service.make_answers(work.call, work.unit_answers, record, failed)
                if work.has_damaged_tool_calls:
                    await service.repeat_damaged_answers(work, record)
                self._write_ending()
                await self._client_writer.wait_until_read()
        except GatewayError as error:
            self._send_error(error)
        except (ClientStalled, asyncio.CancelledError, ConnectionError) as error:
            record.error = error
        except Exception as error:
            self._send_error(parts.make_unexpected_error(self._dialect, error), cause=error)
        finally:
            self._end_request()
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
        self._abandon_request(asyncio.CancelledError())

    def cut_off_request(self) -> None:
        """End the request because the gateway shuts down."""
        task = self._task
        self._abandon_request(ShuttingDown())
        if task is not None and self._has_task:
            task.cancel()

    def _end_unexpected(self, error: Exception) -> None:
        """End the request after an unexpected error."""
        token = logs.request_id.set(self._request_record.request_id)
        self._abandon_request(self._request_parts.make_unexpected_error(self._dialect, error))
        logs.request_id.reset(token)

    def _abandon_request(self, error: GatewayError | ClientStalled | asyncio.CancelledError) -> None:
        """End the first attempt and the request. Send the client an error, unless the client is the cause."""
        if self.is_over:
            return
        queued, self._queued_unit = self._queued_unit, None
        if queued is not None:
            queued.leave_queue()
        driver, self._leg_driver = self._leg_driver, None
        if driver is not None:
            driver.release_attempt(error)
            assert self._timeline is not None
            self._timeline.end_attempt()
        if isinstance(error, GatewayError):
            self._send_error(error)
        else:
            self._request_record.error = error
        self._end_request()

    def _send_error(self, error: GatewayError, cause: Exception | None = None) -> None:
        """Send an error in place of the answer, or in the middle of it. `cause`: the error for the record."""
        self._request_record.error = cause or error
        parts, writer, client = self._request_parts, self._client_writer, self._client
        if not (writer.is_head_sent and writer.has_written_answer):
            if isinstance(error, NoBackendAvailable):
                self._lane.add_model_names(error)
            replies.count_rejection(parts.metrics, error)
        if writer.is_head_sent:
            writer.break_off_stream(
                (error_event if self._request_work is None else self._request_work.make_error_event)(error)
            )
        else:
            answer = parts.make_error_answer(self._dialect, error, self._request_record.request_id, client)
            if not client.transport.is_closing():
                client.transport.write(answer)

    def _end_request(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        parts, record, work = self._request_parts, self._request_record, self._request_work
        if record.error is not None and work is not None and len(work.unit_answers) == len(record.timelines):
            for answer, timeline in zip(work.unit_answers, record.timelines, strict=True):
                answer.record_partial_usage(timeline)
        record.is_answer_begun = self._client_writer.is_head_sent
        self._client_writer.close()
        parts.request_observers.end_record(record)
        if self._token_reservation is not None:
            self._token_reservation.settle_reservation(record.total_tokens)
        self._stop_counting()
        self._request_service.admission_queue.buffers.held_bytes -= self.held_bytes
        if self.quota_hold is not None:
            self.quota_hold.__exit__(None, None, None)
        # Break the reference cycles, which would keep the whole body until the next garbage collection.
        if work is not None:
            for answer in work.unit_answers:
                answer.stop_reading()
        self._request_work = self._attempt = self._leg_driver = self._task = None
        self._client.finish_request(record.ended)

    def _stop_counting(self) -> None:
        """Stop counting the request: it is over, or its task counts it from now on."""
        service = self._request_service
        if self._is_counted:
            self._is_counted = False
            self._request_parts.drain_manager.stop_counting_request(self)
        if self._is_admitted:
            self._is_admitted = False
            service.admission_queue.end_unit(self._request_record.key)
            service.retry_budget.in_flight_count -= 1

    def _write_ending(self) -> None:
        """Write the end of a stream, or the whole body. Raises GatewayError."""
        work = self._request_work
        assert work is not None
        try:
            ending = work.render_final_bytes()
        except GatewayError:
            raise
        except Exception as error:
            raise unwritable_error(error) from None
        if self._call.stream:
            self._client_writer.end_stream(ending)
            return
        client = self._client
        if not client.transport.is_closing():
            head = self._request_parts.make_body_head(
                self._dialect.request_id_header, self._request_record.request_id, client, len(ending)
            )
            client.transport.write(head + ending)
