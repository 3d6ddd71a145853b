"""One plain request, from its whole body on: told what happens to it, it says what to send to engines and client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy import logs
from proxy.connectors import legs as steps
from proxy.errors import ClientStalled, GatewayError, NoBackendAvailable, ShuttingDown, UpstreamError
from proxy.fast_path.attempt import FastAttempt
from proxy.fast_path.plain_stream import PlainStream
from proxy.fast_path.stream import FastStream
from proxy.flow.answers import EngineBody, StreamedAnswer
from proxy.flow.begun import BegunAttempt
from proxy.flow.token_clock import TokenClock
from proxy.flow.whole_body import checked_body
from proxy.wire.openai import error_event

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Any

    from proxy.api_keys import ApiKey
    from proxy.call import Call
    from proxy.connectors.attempt import Attempt
    from proxy.dialects.openai import OpenAi
    from proxy.fast_path.parts import FastParts
    from proxy.fast_path.stream import Client
    from proxy.flow.relay import Relay


class FastRequest(FastAttempt):
    """Begun by `start`. Its first attempt is driven from the callbacks of its connections. Whatever else is to be done,
    a task does: see `_go_on`.

    Is the guard of its first attempt; see Relay.
    """

    __deletable__ = ("_stream",)  # for mypyc
    __slots__ = (
        *("_answer", "_attempt", "_began_at", "_call", "_client", "_dialect", "_has_task", "_held_bytes"),
        *("_is_awake", "_is_counted", "_key", "_quota", "_record", "_plain", "_relay", "_stream", "_task"),
        *("_in_task", "_timeline", "_watching", "is_over"),
    )

    def __init__(
        self,
        parts: FastParts,
        client: Client,
        dialect: OpenAi,
        call: Call,
        key: ApiKey,
        quota: AbstractContextManager[None] | None,
        held_bytes: int,
        *,
        in_task: bool,
    ) -> None:
        """`quota` was entered, and so many bytes were taken from the account of bodies, until the request is over.
        `in_task`: all is left to the attempt loop, as there is something to wait for, or to look up, before an attempt.
        """
        super().__init__(parts)
        self.is_over = False
        self._client = client
        self._dialect = dialect
        self._call = call
        self._key = key
        self._quota = quota
        self._held_bytes = held_bytes
        self._in_task = in_task
        self._attempt: Attempt | None = None
        self._answer: StreamedAnswer | EngineBody | None = None
        """None while the answer is a PlainStream, or was not begun."""
        self._plain: PlainStream | None = None
        self._relay: Relay | None = None
        self._began_at: float | None = None
        """When the client was given the first of the answer, in seconds of the suspects' clock."""
        self._task: asyncio.Task[None] | None = None
        self._has_task = False
        """The task has begun to run."""
        self._is_awake = False
        self._is_counted = True

    def start(self, request_id: str, since: float) -> None:
        """Begin. `since`: when it has come, on the clock of its record."""
        parts, call, dialect = self._parts, self._call, self._dialect
        record = self._record = parts.observers.begin(dialect.label, request_id, call.headers, since)
        record.key, record.stream, record.model = self._key.name, call.stream, call.model
        if parts.lanes.models.is_mixed:
            record.served_model = parts.lanes.known(call.served_model)
        if record.context is not None:
            call = self._call = call.in_context(record.context)
        parts.drain.enter(self)
        parts.gateway.admission.enter(record.key)
        parts.gateway.budget.enter()
        self._stream = FastStream(self._client, parts.stream_head, request_id, parts.write_timeout_seconds)
        if call.stream:
            if parts.keep_alive is not None:
                self._stream.keep_alive_by(parts.keep_alive, dialect.keep_alive)
            watching = self._watching = parts.gateway.watching(dialect, call)
            call = watching.observed(call)
        if self._in_task:
            self._run(self._go_on(None))
            return
        self._timeline = record.timeline()
        legs = parts.connector.legs(call, call.pick_request(), self._timeline)
        assert legs is not None
        self._legs = legs
        self._go(None)

    # The answer

    def _take(self, attempt: Attempt) -> None:
        self._attempt = attempt
        if not self._call.stream:
            attempt.response.collect(self._take_body)
            return
        call, parts, watching = self._call, self._parts, self._watching
        clock = TokenClock(self._record, parts.metrics)
        if watching.is_close and call.values.get("include_reasoning") is False:  # it has to be written anew
            answer = self._begin_answer()
            assert isinstance(answer, StreamedAnswer)
            self._relay = answer.go_on(attempt, self, self._woke, b"", clock)
            return
        response = attempt.response
        plain = self._plain = PlainStream(attempt, call, self._stream, self, clock, parts.idle_seconds, watching)
        response.limit_silence(attempt.first_token_seconds or parts.first_token_seconds)
        response.attach(plain)

    # Owner of a PlainStream

    def first_output(self) -> None:
        """The decoder has begun to answer."""
        if self._began_at is None:
            self._began_at = self._parts.suspects.clock()

    def read_by_relay(self) -> Relay:
        """See Owner."""
        plain, attempt = self._plain, self._attempt
        assert plain is not None
        assert attempt is not None
        answer = self._begin_answer()
        assert isinstance(answer, StreamedAnswer)
        self._plain = None
        self._stream.pass_over(plain.sent_bytes)
        seen = b"".join(plain.seen)
        self._relay = answer.go_on(attempt, self, self._woke, seen, plain.clock, plain.transcript)
        return self._relay

    def finished(self) -> None:
        """See Owner."""
        plain, attempt = self._plain, self._attempt
        assert plain is not None
        assert attempt is not None
        try:
            attempt.saw_usage(plain.usage)
            steps.finish(self._legs)
        except Exception as error:
            self._break(error)
            return
        self._timeline.leave()
        self._stream.end(plain.unsent + self._dialect.done_event)
        self._complete()

    def _begin_answer(self) -> StreamedAnswer | EngineBody:
        """What the attempt loop can go on with."""
        if self._answer is None:
            call, dialect = self._call, self._dialect
            if call.stream:
                self._answer = self._parts.gateway.streamed(
                    dialect, call, self._stream, self._record, watching=self._watching
                )
            else:
                self._answer = EngineBody(call, dialect)
        return self._answer

    # Otherwise

    def _woke(self) -> None:
        """The stream has ended, or the client reads too slowly. What there is of it may still be on its way out."""
        if not self._is_awake:
            self._is_awake = True
            self._parts.loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_awake = False
        relay, attempt = self._relay, self._attempt
        if self.is_over or self._task is not None:
            return
        assert relay is not None
        assert attempt is not None
        assert isinstance(self._answer, StreamedAnswer)
        if not relay.is_ended:
            self._leave()
            return
        self._answer.count_malformed(relay)
        if relay.error is not None:
            self._fail(relay.error)
            return
        try:
            self._answer.ended(relay, attempt)
            steps.finish(self._legs)
        except Exception as error:
            self._break(error)
            return
        self._timeline.leave()
        self._stream.end(self._dialect.done_event)
        self._complete()

    def _take_body(self, body: bytes, error: UpstreamError | None) -> None:
        """The whole answer has arrived, or has not."""
        attempt = self._attempt
        assert attempt is not None
        try:
            if error is not None:
                raise error
            whole = checked_body(attempt, body, self._dialect)
            steps.finish(self._legs)
        except UpstreamError as problem:
            self._fail(problem)
            return
        except Exception as problem:
            self._break(problem)
            return
        self._timeline.leave()
        self._write_body(whole)
        self._complete()

    def _complete(self) -> None:
        """The answer was written: the client may still have to read it."""
        suspects = self._parts.suspects
        if not suspects.memory.is_empty:
            suspects.served(self._call)
        if self._client.is_paused:
            self._run(self._wait_for_client())
        else:
            self._end()

    async def _wait_for_client(self) -> None:
        self._has_task = True
        try:
            await self._stream.attend()
        except (ClientStalled, asyncio.CancelledError) as error:
            self._record.error = error
        finally:
            self._end()

    # The road that all other requests take

    def _fail(self, error: UpstreamError) -> None:
        """The answer has ended with this error."""
        try:
            steps.fail(self._legs, error)
        except (NoBackendAvailable, UpstreamError) as raised:
            self._leave(raised)
        except Exception as raised:
            self._break(raised)

    def _leave(self, error: NoBackendAvailable | UpstreamError | None = None) -> None:
        """Let the attempt loop go on: with an attempt that has failed, or else with the one that is under way."""
        begun = BegunAttempt(self._legs, self._timeline, attempt=self._attempt, error=error, began_at=self._began_at)
        self._run(self._go_on(begun))

    async def _go_on(self, begun: BegunAttempt | None) -> None:
        if self.is_over:  # the client has left meanwhile
            return
        self._has_task = True
        parts, answer = self._parts, self._begin_answer()
        token = logs.request_id.set(self._record.request_id)
        self._uncount()
        task = asyncio.current_task()
        assert task is not None
        try:
            with parts.drain.working(task), parts.drain:
                await parts.gateway.go_on(answer, self._record, begun)
                if isinstance(answer, StreamedAnswer):
                    await self._stream.finish(self._dialect.done_event)
                else:
                    self._write_body(answer.body())
                    await self._stream.attend()
        except GatewayError as error:
            self._tell(error)
        except (ClientStalled, asyncio.CancelledError, ConnectionError) as error:
            self._record.error = error
        except Exception as error:
            self._tell(parts.unexpected(self._dialect, error), cause=error)
        finally:
            self._end()
            logs.request_id.reset(token)

    def _run(self, work: Any) -> None:
        self._task = self._parts.loop.create_task(work)

    # Ends

    def left(self) -> None:
        """The client is gone."""
        if self.is_over:
            return
        if self._has_task:
            assert self._task is not None
            self._task.cancel()
            return
        self._abandon(asyncio.CancelledError())

    def cut_off(self) -> None:
        """End it for a shutdown."""
        if not self.is_over and not self._has_task:
            self._abandon(ShuttingDown())

    def _break(self, error: Exception) -> None:
        """What nobody expected has happened."""
        token = logs.request_id.set(self._record.request_id)
        self._abandon(self._parts.unexpected(self._dialect, error))
        logs.request_id.reset(token)

    def _abandon(self, error: GatewayError | asyncio.CancelledError) -> None:
        """Give everything back that is held without a task, and tell the client if it is there."""
        if not self._in_task:
            self._release(error)
            self._timeline.leave()
        if isinstance(error, GatewayError):
            self._tell(error)
        else:
            self._record.error = error
        self._end()

    def _tell(self, error: GatewayError, cause: Exception | None = None) -> None:
        """The client gets an error in place of an answer, or in the middle of one."""
        self._record.error = cause or error
        if self._stream.is_committed:
            if not self._stream.has_answer:
                self._parts.refused(error)
            self._stream.break_off(error_event(error))
        else:
            client, request_id = self._client, self._record.request_id
            client.transport.write(self._parts.error_answer(self._dialect, error, request_id, client))

    def _end(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        parts, record = self._parts, self._record
        record.committed = self._stream.is_committed
        self._stream.close()
        parts.observers.end(record)
        self._uncount()
        parts.gateway.admission.buffers.give_back(self._held_bytes)
        if self._quota is not None:
            self._quota.__exit__(None, None, None)
        self._client.done(record.ended)
        # Each knows this request: they would be cycles of garbage, with the whole body.
        self._answer = self._attempt = self._relay = self._response = self._plain = self._task = None
        del self._stream
        if not self._in_task:
            del self._legs

    def _uncount(self) -> None:
        """It is over, or the task counts it from now on."""
        if self._is_counted:
            self._is_counted = False
            self._parts.drain.leave(self)
            self._parts.gateway.admission.leave(self._record.key)
            self._parts.gateway.budget.leave()

    # Bytes

    def _write_body(self, body: bytes) -> None:
        client = self._client
        client.transport.write(self._parts.body_head(self._record.request_id, client, len(body)) + body)
