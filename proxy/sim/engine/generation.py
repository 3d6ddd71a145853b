"""The engine's work on one request: its sequences, the KV that it fetches, and the KV that it leaves behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from proxy.sim.kv.protocol import ChildRequest, KvLoadResult, Leg
from proxy.sim.model.grammar import GrammarWriter
from proxy.sim.model.parser import Phase, start_phase
from proxy.sim.model.request import (
    Delta,
    EngineError,
    GarbageWriter,
    GenerationRequest,
    StreamStrike,
    TokenSequence,
    TokenSource,
    make_internal_error,
)
from proxy.sim.model.writer import DeterministicWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.sim.engine.core import EngineCore
    from proxy.sim.engine.faults import Plan

_STRIKE_ACTIONS = (
    "recompute",
    "abort",
    "reset_after_tokens",
    "stall_after_tokens",
    "end_without_finish",
    "error_event",
    "retract",
    "exhaust_host_pool",
    "kill",
)
# SGLang 0.5.21 and later, `managers/schedule_batch.py`.
_OUT_OF_MEMORY_ERROR = {
    "retract": EngineError(
        503, "Retracted under decode memory pressure. Retry the request.", "ServiceUnavailableError"
    ),
    "exhaust_host_pool": EngineError(
        500, "Retraction host KV pool exhausted. Aborting the request.", "InternalServerError"
    ),
}


class GenerationRun:
    """Serves one `GenerationRequest`. `run` returns when all sequences have ended. Cancelling it aborts them."""

    def __init__(
        self, core: EngineCore, ask: GenerationRequest, answer_id: str, plan: Plan, on_delta: Callable[[Delta], None]
    ) -> None:
        self.kv_params: dict[str, Any] | None = None
        self.kept_params: dict[str, Any] | None = None
        """The parameters of a decoder's own KV cache after the answer; None if it keeps none."""
        self._is_foreign = False
        """Whether the KV of the prompt is that of another one, because a prefiller has read it back by mistake."""
        self._core = core
        self._ask = ask
        self._answer_id = answer_id
        self._plan = plan
        self._on_delta = on_delta
        loop = asyncio.get_running_loop()
        self._done: asyncio.Future[EngineError | None] = loop.create_future()
        self._queued_at = self._first_token_at = loop.time()
        self._leg = core.protocol.leg(ask.kv_params)
        self._fetching = False
        # The answer of a prefiller that answers only when the decoder has the KV.
        self._withheld: list[Delta] | None = [] if self._leg is Leg.PREFILL and core.protocol.meets else None
        self.sequences = [
            self._make_sequence(prompt_index * ask.samples + sample, prompt)
            for prompt_index, prompt in enumerate(ask.prompts)
            for sample in range(ask.samples)
        ]
        self._live = len(self.sequences)
        self._arriving: list[asyncio.Task[None]] = []

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self._ask.prompts))

    @property
    def completion_tokens(self) -> int:
        return sum(len(sequence.output) for sequence in self.sequences)

    @property
    def cached_tokens(self) -> int:
        return self.sequences[0].cached_tokens

    async def run(self) -> None:
        try:
            error = await (self._run_with_partner() if self._has_partner else self._run_alone())
            if error is None:
                await self._keep_kv()
        except asyncio.CancelledError:
            await self._abort_sequences()
            raise
        finally:
            self._leave_partner()
        if error is not None:
            self._drop_sequences()
            raise error

    @property
    def _has_partner(self) -> bool:
        """Return whether the request waits for a partner before its first token."""
        return self._leg is Leg.DECODE or (self._leg is Leg.PREFILL and (self._core.protocol.meets or self._reads_back))

    @property
    def _reads_back(self) -> bool:
        return self._core.protocol.reads_back(self._ask.kv_params)

    async def _run_alone(self) -> EngineError | None:
        for sequence in self.sequences:
            self._run_prefill(sequence)
        for sequence in self.sequences:
            self._core.scheduler.submit(sequence)
        return await self._done

    async def _run_with_partner(self) -> EngineError | None:
        first_only = not self._core.protocol.serves_each_child
        async with asyncio.TaskGroup() as arrivals:
            for sequence in self.sequences:
                if first_only and sequence.index:
                    self._run_prefill(sequence)
                else:
                    sequence.on_admitted = partial(self._on_admitted, sequence, arrivals)
            for sequence in self.sequences:
                self._core.scheduler.submit(sequence)
            try:
                return await self._done
            finally:
                # The request is over for all code that still waits, or would admit it later.
                if self._live:
                    self._drop_sequences()
                for task in self._arriving:
                    task.cancel()

    def _on_admitted(self, sequence: TokenSequence, arrivals: asyncio.TaskGroup) -> None:
        arrive = (
            self._fetch_kv if self._leg is Leg.DECODE else self._read_back if self._reads_back else self._meet_partner
        )
        self._arriving.append(arrivals.create_task(arrive(sequence)))

    def abort(self) -> None:
        """End every sequence at its present token, as the engine does for an abort by request ID."""
        for sequence in self.sequences:
            if sequence.is_live:
                sequence.abort()
                self._core.scheduler.drop(sequence)

    def fail(self) -> None:
        """End with an internal error, as the engine does when its core process has died."""
        message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        self._end_sequences(EngineError(500, message, "InternalServerError"))

    async def _meet_partner(self, sequence: TokenSequence) -> None:
        try:
            await self._core.protocol.meet(self._make_child(sequence))
        except EngineError as error:
            self._end_sequences(error)
            return
        self._run_prefill(sequence)
        self._core.scheduler.begin(sequence)

    async def _read_back(self, sequence: TokenSequence) -> None:
        """Fetch the KV of an earlier answer, and compute the rest of the prompt."""
        core = self._core
        loaded = await core.protocol.read_back(self._make_child(sequence))
        if loaded is KvLoadResult.FAILED and core.options.kv_load_failure_policy == "fail":
            sequence.fail()
            core.scheduler.drop(sequence)
            return
        if loaded is KvLoadResult.FAILED:
            self._run_prefill(sequence)
        else:
            self._is_foreign = loaded is KvLoadResult.FOREIGN
            cached = core.cache_prompt(sequence.prompt, self._ask.cache_salt)
            sequence.cached_tokens = max(cached, int(self._ask.kv_params["remote_num_tokens"]))
            sequence.prefill_tokens = len(sequence.prompt) - sequence.cached_tokens
            core.metrics.count_prompt(
                computed=sequence.prefill_tokens, cached=cached, transferred=sequence.cached_tokens - cached
            )
            core.state.prompt_tokens += len(sequence.prompt)
        core.scheduler.begin(sequence)

    def _make_sequence(self, index: int, prompt: list[int]) -> TokenSequence:
        options = self._core.options
        ask = self._ask
        limit = options.default_max_tokens if ask.max_tokens is None else ask.max_tokens
        # One set of params names the KV of one prompt, and its blocks are gone after the first pull.
        is_garbage = self._leg is Leg.DECODE and index > 0 and not self._core.protocol.serves_each_child
        writer: TokenSource = DeterministicWriter(prompt, eos_after=options.eos_after)
        if ask.grammar is not None:
            # For a grammar, hidden reasoning counts as no reasoning (vLLM `resolve_reasoning_ended`).
            reasons = ask.is_thinking and ask.include_reasoning and start_phase(prompt) is Phase.REASONING
            writer = GrammarWriter(prompt, ask.grammar, reasons=reasons)
        return TokenSequence(
            index,
            prompt,
            ask,
            GarbageWriter() if is_garbage else writer,
            self._on_emitted,
            max_tokens=min(limit, options.max_model_len - len(prompt)),
            stream_interval=options.stream_interval,
            ends_at_once=options.first_token_eos,
            strike=self._choose_strike() if index == 0 else None,
        )

    def _choose_strike(self) -> StreamStrike | None:
        for kind in _STRIKE_ACTIONS:
            rule = self._plan.get(kind)
            if rule is not None and (kind != "kill" or rule.tokens):
                return StreamStrike(kind, rule.tokens, rule.merged)
        return None

    def _run_prefill(self, sequence: TokenSequence) -> None:
        """Count the computed tokens of a prompt: all tokens that are not in the prefix cache."""
        sequence.cached_tokens = self._core.cache_prompt(sequence.prompt, self._ask.cache_salt)
        sequence.prefill_tokens = len(sequence.prompt) - sequence.cached_tokens
        self._core.metrics.count_prompt(computed=sequence.prefill_tokens, cached=sequence.cached_tokens)
        self._core.state.prompt_tokens += len(sequence.prompt)
        self._core.state.local_prefills += self._leg is not Leg.PREFILL

    async def _fetch_kv(self, sequence: TokenSequence) -> None:
        self._fetching = True
        if rule := self._plan.get("slow_load"):
            await asyncio.sleep(rule.seconds)
        try:
            loaded = await self._core.protocol.load(self._make_child(sequence))
        except EngineError as error:
            self._end_sequences(error)
            return
        if "load_failure" in self._plan:
            loaded = KvLoadResult.FAILED
        if "corrupt_kv" in self._plan and loaded is KvLoadResult.YES:
            loaded = KvLoadResult.FOREIGN
        if loaded is KvLoadResult.FAILED and self._core.options.kv_load_failure_policy == "fail":
            sequence.fail()
            self._core.scheduler.drop(sequence)
            return
        if loaded in (KvLoadResult.FAILED, KvLoadResult.ABSENT):
            self._run_prefill(sequence)
        else:
            if loaded is KvLoadResult.FOREIGN:
                sequence.source = GarbageWriter()
            # A decoder that got the KV calls all but the last token, which it runs again, cached.
            sequence.cached_tokens = len(sequence.prompt) - 1
            self._core.cache_prompt(sequence.prompt, self._ask.cache_salt)
            self._core.metrics.count_prompt(transferred=len(sequence.prompt))
            self._core.state.prompt_tokens += len(sequence.prompt)
        self._core.scheduler.begin(sequence)

    def _on_emitted(self, delta: Delta) -> None:
        if not self._first_token_at > self._queued_at:
            self._first_token_at = asyncio.get_running_loop().time()
        self._core.state.recomputed += delta.stop_reason == "recomputed"
        if self._leg is Leg.DECODE and delta.finish_reason in ("stop", "length"):
            sequence = self.sequences[delta.index]
            # The last token was not computed.
            self.kept_params = self._core.protocol.keep_answer(
                self._make_child(sequence), [*sequence.prompt, *sequence.output[:-1]]
            )
        if self._withheld is None:
            self._on_delta(delta)
        else:
            self._withheld.append(delta)
        if (lament := _OUT_OF_MEMORY_ERROR.get(delta.fault or "")) is not None:
            self._end_sequences(lament)
        elif delta.fault == "error_event" or (delta.finish_reason == "error" and not self._is_swallowed_delta(delta)):
            self._end_sequences(make_internal_error())
        elif delta.finish_reason is not None or delta.fault == "end_without_finish":
            self._count_tokens(delta)
            self._live -= 1
            if not self._live:
                self._end_sequences(None)

    def _is_swallowed_delta(self, delta: Delta) -> bool:
        has_tokens = bool(self.sequences[delta.index].output)
        return self._ask.stream and self._core.options.profile.swallows_empty_finish and not has_tokens

    def _count_tokens(self, delta: Delta) -> None:
        now = asyncio.get_running_loop().time()
        tokens = len(self.sequences[delta.index].output)
        reason = delta.finish_reason or "abort"
        self._core.metrics.count_finished_request(reason, self._queued_at, self._first_token_at, now, tokens)

    def _end_sequences(self, error: EngineError | None) -> None:
        if not self._done.done():
            self._done.set_result(error)

    def _drop_sequences(self) -> None:
        for sequence in self.sequences:
            self._core.scheduler.drop(sequence)

    async def _abort_sequences(self) -> None:
        self._drop_sequences()
        if self._live:
            self._core.state.aborted += 1
        # A transfer under way is waited for before the blocks are given back, whatever the version.
        if self._leg is Leg.DECODE and (self._fetching or self._core.options.releases_unused):
            await self._core.protocol.release(self._ask.kv_params)

    def _leave_partner(self) -> None:
        if self._leg is not Leg.ALONE:
            for sequence in self.sequences:
                self._core.protocol.leave(self._make_child(sequence))

    async def _keep_kv(self) -> None:
        """Keep the KV that a decoder will fetch.

        It is kept for every sample, although the answer reports only the first.
        """
        core = self._core
        if self._leg is Leg.PREFILL and "missing_kv_params" not in self._plan:
            for sequence in self.sequences:
                if self._leaves_kv_pinned(sequence):
                    child = self._make_child(sequence)
                    params = await core.protocol.keep(replace(child, prompt=[0]) if self._is_foreign else child)
                    if sequence.index == 0:
                        self.kv_params = params
            if self._ask.names_tool and self._ask.is_thinking and core.options.profile.named_tool_choice_fails:
                raise make_internal_error()
            if "lost_response" not in self._plan and not self._ask.stream and self.kv_params is not None:
                core.protocol.announce(self.kv_params)
        withheld, self._withheld = self._withheld, None
        for delta in withheld or ():
            self._on_delta(delta)

    def _leaves_kv_pinned(self, sequence: TokenSequence) -> bool:
        """Return whether a finished sequence leaves KV.

        Most connectors keep KV only if its one token ended it by length.
        """
        does_not_look = self._core.options.connector == "nixl" or self._core.protocol.meets
        return sequence.finish_reason == "length" or (does_not_look and sequence.finish_reason == "stop")

    def _make_child(self, sequence: TokenSequence) -> ChildRequest:
        request_id = self._child_id(sequence.index)
        ask = self._ask
        prompt_index = sequence.index // ask.samples
        return ChildRequest(
            request_id, sequence.prompt, prompt_index, ask.samples, ask.kv_params, ask.dp_rank, ask.cache_salt
        )

    def _child_id(self, index: int) -> str:
        prompt_index, sample = divmod(index, self._ask.samples)
        request_id = self._answer_id if self._ask.is_chat else f"{self._answer_id}-{prompt_index}"
        return f"{sample}_{request_id}" if self._ask.samples > 1 else request_id
