"""Canaries: test prompts that the gateway sends through its connector, to check a pair of engines.

A canary is a long new prompt that is answered greedily with a few tokens. It shows what answers to clients do not show:
whether the KV cache was fetched or computed again, how long that took, and whether the answer equals that of the
decoder alone. The doctor sends canaries through every pair. In a running gateway, CanaryWatch sends them through all
pairs in turn: answers to clients show only the pairs that requests use. One worker sends the canaries of the gateway. A
canary counts as a request for health and for the quarantine of pairs. It does not wait in a queue and has no line in
the access log.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.balancer.handoff_verdicts import HandoffVerdict, judge_counters
from proxy.balancer.incompatibilities import NO_KV_PARAMS
from proxy.balancer.shared.scoreboard import HandoffCount
from proxy.common.background import BackgroundOwner, BackgroundTasks
from proxy.common.errors import Failure, NoBackendAvailable, UpstreamError
from proxy.common.terms import Stage
from proxy.dialects.openai import Completions
from proxy.dialects.requests import parse_body
from proxy.dialects.segment import Meaning, Segment
from proxy.fleet.inspector import fetch_metrics
from proxy.observe import logs
from proxy.observe.timeline import Timeline
from proxy.wire.exposition import PromptTokenTotals, parse_prompt_tokens
from proxy.wire.ids import make_request_id
from proxy.wire.openai import read_prompt_counts
from proxy.wire.sse import EventSplitter, EventTooLong

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    from proxy.balancer.engines import EngineFacts
    from proxy.balancer.health import Health
    from proxy.balancer.pick import PickRequest
    from proxy.common.backend import Backend
    from proxy.connectors.base import Connector, ConnectorContext
    from proxy.connectors.legs import Attempt
    from proxy.dialects.call import Call
    from proxy.settings import Settings, Timeouts

logger = logging.getLogger("proxy.canary.watch")

Pair = tuple["Backend", "Backend"]

ANSWER_TOKENS: Final = 12
"""Length of a canary's answer."""

_MIN_PROMPT_BYTES: Final = 256
# Tokens of a sequence that are kept free for the answer.
_ANSWER_ROOM_TOKENS: Final = 64
_WORDS: Final = (
    *("apple", "beach", "candle", "desert", "engine", "forest", "garden", "hammer", "island", "jacket", "kitchen"),
    *("ladder", "market", "needle", "orange", "pencil", "queen", "river", "silver", "table", "umbrella", "valley"),
    *("window", "yellow", "zebra", "bridge", "cloud", "dragon", "eagle", "flower", "guitar", "honey", "iron", "jungle"),
    *("lemon", "mirror", "night", "ocean", "paper", "rocket", "spider", "train", "village", "water"),
)
_WORDS_PER_LINE: Final = 12

# vLLM counts a prompt with its first token. SGLang, and vLLM with several API servers, count it a moment later.
_COUNTER_DELAYS_SECONDS: Final = (0.0, 0.1, 0.5)
# If counters grow by more than this multiple of the prompt, the engine also serves other clients.
_MAX_GROWTH: Final = 1.5
# A prompt counts as cached, or its counters as complete, from this share of its tokens.
_CACHED_SHARE: Final = 0.5
# A handoff that takes this share of a prefill's time was most likely a prefill.
_PREFILL_TIME_SHARE: Final = 0.75
# Shorter prefills cannot be distinguished from a handoff.
_MIN_PREFILL_SECONDS: Final = 0.25
# Rounding in kernels can change an answer only after this length.
_EQUAL_TOKENS: Final = 3
_EQUAL_CHARACTERS: Final = 8


@dataclass(frozen=True, slots=True)
class CanaryPrompt:
    """A prompt that is in no cache, and whose greedy continuation is certain.

    Some words drawn at random are repeated until the prompt is long enough. Every model continues this pattern, without
    near ties that rounding could decide. A decoder with the KV cache of another prompt cannot continue it.

    All canaries of a round have the same prompt, so that their answers can be compared. Each canary has its own
    `cache_salt`, so that engines do not find it in a cache (vLLM `hash_request_tokens`, SGLang `extra_key`).
    """

    model_name: str
    prompt_text: str

    @classmethod
    def make_prompt(cls, model_name: str, size_bytes: int, random_source: random.Random | None = None) -> CanaryPrompt:
        """Return a new prompt of about `size_bytes`.

        `random_source` None: the words are drawn by the system's generator.
        """
        line = " ".join((random_source or random.SystemRandom()).sample(_WORDS, _WORDS_PER_LINE)) + "\n"
        return cls(model_name, line * max(1, size_bytes // len(line)))

    def make_body(self, cache_salt: str | None = None) -> dict[str, object]:
        """Return the body of the completion request. `cache_salt` None: a new one, so that no engine has the prompt."""
        return {
            "model": self.model_name,
            "prompt": self.prompt_text,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "cache_salt": cache_salt or make_request_id(),
        }


def prompt_bytes(tokens: int, bytes_per_token: int, max_lengths: Iterable[int]) -> int:
    """Return the length of a prompt of about `tokens` tokens.

    The prompt fits into sequences of each of `max_lengths` tokens, even if every byte is a token.
    """
    lengths = (length - _ANSWER_ROOM_TOKENS for length in max_lengths)
    return max(_MIN_PROMPT_BYTES, min((tokens * bytes_per_token, *lengths)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """The result of one canary."""

    prefiller: Backend | None
    """None: the canary was sent to the decoder alone."""
    decoder: Backend
    problem_text: str = ""
    """Reason for the missing answer, without text of an engine; empty if there is an answer.

    The subject of the sentence is `blamed_backend`, if that is set.
    """
    failure: Failure | None = None
    """Kind of an engine's failure; None if no engine failed."""
    blamed_backend: Backend | None = None
    """The engine that failed; None if no engine failed."""
    are_engines_busy: bool = False
    """Whether the problem was a lack of room, or of available instances."""
    handoff_verdict: HandoffVerdict = HandoffVerdict.UNKNOWN
    has_kv_from_prefiller: bool = True
    """Whether the prefiller's answer had KV parameters for the decoder."""
    prefill_seconds: float | None = None
    """Time of the prefill leg; None if there was none."""
    first_token_seconds: float | None = None
    """Time until the decoder's first token; None if there was none.

    It begins at the prefiller's answer, if the legs are sent one after the other.
    """
    total_seconds: float = 0.0
    """Time of the whole canary."""
    prompt_tokens: int | None = None
    """Length of the prompt as the prefiller counts it; None if it reports none."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the prefiller had cached; None if it reports none."""
    decoder_prompt_tokens: int | None = None
    """Length of the prompt as the decoder counts it; None if it reports none."""
    answer_tokens_or_text: tuple[int, ...] | str = field(default="", repr=False)
    """Token ids of the answer, or its text if the decoder reports no ids."""


class Canary:
    """Sends one prompt to pairs and to single decoders, with a time limit for each answer."""

    def __init__(self, connector: Connector, context: ConnectorContext, prompt: CanaryPrompt, seconds: float) -> None:
        """Keep the parts. `seconds`: limit for each answer."""
        self._connector = connector
        self._context = context
        self._canary_prompt = prompt
        self._max_answer_seconds = seconds

    async def check_pair(self, prefiller: Backend, decoder: Backend, cache_salt: str | None = None) -> CanaryResult:
        """Send the prompt through this pair, and judge whether the KV cache arrived.

        Failures and timeouts of engines are returned as the result's `problem_text`. `cache_salt`: see
        CanaryPrompt.make_body.
        """
        traits = self._context.live.settings.connector_traits
        before = await self._read_counters(decoder)
        call, request, timeline = self._make_call(prefiller, decoder, cache_salt)
        opening = self._connector.open_attempt(call, request, timeline)
        result, usage = await self._send_and_judge(
            opening, timeline, CanaryResult(prefiller=prefiller, decoder=decoder)
        )
        tokens = result.decoder_prompt_tokens or result.prompt_tokens
        if result.problem_text or not result.has_kv_from_prefiller or tokens is None:
            return result
        kv = HandoffVerdict.UNKNOWN
        if not traits.has_sglang_routes:  # SGLang's decoders report the cached tokens of their prefillers
            kv = judge_by_usage(read_prompt_counts(usage)[1], tokens)
        if kv is HandoffVerdict.UNKNOWN and before is not None:
            kv = await self._judge_by_counters(decoder, before, tokens, reads_from_store=traits.is_store)
        return replace(result, handoff_verdict=kv)

    async def check_decoder(self, decoder: Backend) -> CanaryResult | None:
        """Have the decoder compute the prompt itself and answer. None: decoders of this protocol cannot do that."""
        call, request, timeline = self._make_call(None, decoder)
        opening = self._connector.open_decoder_only_attempt(call, request, timeline)
        if opening is None:
            return None
        return (await self._send_and_judge(opening, timeline, CanaryResult(prefiller=None, decoder=decoder)))[0]

    def _make_call(
        self, prefiller: Backend | None, decoder: Backend, cache_salt: str | None = None
    ) -> tuple[Call, PickRequest, Timeline]:
        """Return a request that only these instances can serve."""
        call = Completions().parse_request(
            parse_body(orjson.dumps(self._canary_prompt.make_body(cache_salt))), self._context.live.settings.cost, {}
        )
        pools = self._context.pools
        others = {*pools.prefill.all_backends(), *pools.decode.all_backends()}.difference({prefiller, decoder})
        return call, call.make_pick_request(avoid=others, prefer=prefiller), Timeline()

    async def _send_and_judge(
        self, attempt_opening: AbstractAsyncContextManager[Attempt], timeline: Timeline, result: CanaryResult
    ) -> tuple[CanaryResult, Any]:
        """Return the completed result, and the decoder's usage."""
        began = timeline.clock()
        reader = None
        try:
            async with asyncio.timeout(self._max_answer_seconds), attempt_opening as attempt:
                reader = _AnswerReader(attempt)
                await reader.read_stream(self._context.live.settings.timeouts)
        except TimeoutError:
            blamed = result.prefiller if timeline.current_stage is Stage.PREFILL else result.decoder
            problem = f"did not answer within {self._max_answer_seconds:g} s"
            result = replace(result, problem_text=problem, failure=Failure.TIMEOUT, blamed_backend=blamed)
        except UpstreamError as error:
            is_busy = error.is_backpressure or (reader is not None and reader.is_preempted)
            problem = error.full_message.removeprefix(f"{error.backend.role.value} instance: ")
            result = replace(
                result,
                problem_text=problem,
                failure=error.failure,
                blamed_backend=error.backend,
                are_engines_busy=is_busy,
            )
        except NoBackendAvailable as error:
            result = replace(result, problem_text=error.message, are_engines_busy=True)
        timeline.end_attempt()
        seconds = timeline.seconds_by_stage
        first_token_seconds = None
        if Stage.STREAM in seconds:
            first_token_seconds = seconds.get(Stage.HANDOFF, 0.0) + seconds.get(Stage.FIRST_TOKEN, 0.0)
        usage = None if reader is None else reader.usage
        result = replace(
            result,
            prefill_seconds=seconds.get(Stage.PREFILL),
            first_token_seconds=first_token_seconds,
            total_seconds=timeline.clock() - began,
            has_kv_from_prefiller=timeline.kv != "local",
            prompt_tokens=timeline.usage.prompt_tokens,
            cached_tokens=timeline.usage.cached_tokens,
            decoder_prompt_tokens=read_prompt_counts(usage)[0],
            answer_tokens_or_text="" if reader is None else tuple(reader.token_ids) or reader.answer_text,
        )
        return result, usage

    async def _read_counters(self, decoder: Backend) -> PromptTokenTotals | None:
        exposition = await fetch_metrics(self._context.client, self._context.keys, decoder)
        return None if exposition is None else parse_prompt_tokens(exposition)

    async def _judge_by_counters(
        self, decoder: Backend, counters_before: PromptTokenTotals, tokens: int, *, reads_from_store: bool
    ) -> HandoffVerdict:
        for delay_seconds in _COUNTER_DELAYS_SECONDS:
            await asyncio.sleep(delay_seconds)
            verdict = judge_by_counters(
                counters_before, await self._read_counters(decoder), tokens, reads_from_store=reads_from_store
            )
            if verdict is not None:
                return verdict
        return HandoffVerdict.UNKNOWN


class _AnswerReader:
    """Reads the answer to a canary from the decoder's stream. A Sink for the engine's answer."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._stream_segment = Segment()
        self._event_splitter = EventSplitter()
        self._completion: asyncio.Future[None] = attempt.response.event_loop.create_future()
        self._has_begun = False
        self.is_preempted = False
        """Whether the decoder gave up the request for lack of KV memory."""
        self.token_ids: list[int] = []
        self.answer_text = ""

    @property
    def usage(self) -> dict[str, Any] | None:
        """The decoder's usage; None if it reported none."""
        return self._stream_segment.usage

    async def read_stream(self, timeouts: Timeouts) -> None:
        """Read the stream to its end. Raises UpstreamError if the answer is incomplete."""
        response = self._attempt.response
        response.limit_silence(self._attempt.first_token_seconds or timeouts.first_token_seconds)
        response.attach_sink(self)
        await self._completion

    # Sink

    def on_body_data(self, data: bytes) -> bool:
        try:
            events = self._event_splitter.split_chunk(data)
        except EventTooLong:
            self._fail_answer(Failure.BAD_ANSWER, "sent an event that is too long")
            return False
        for event in events:
            match self._stream_segment.read_event(event):
                case Meaning.CONTENT:
                    self._begin_stream()
                    self._take_payload(self._stream_segment.payload)
                case Meaning.RECOMPUTED:
                    self._begin_stream()
                    self.is_preempted = True
                    self._fail_answer(Failure.RECOMPUTED, "gave up the request for lack of KV memory")
                case Meaning.ABORTED:
                    self._fail_answer(Failure.ABORTED, "aborted the answer")
                case Meaning.ERROR:
                    self._fail_answer(Failure.BROKEN, "reported an error in its stream")
                case Meaning.DONE:
                    self._complete_answer()
        return True

    def can_move_to_other_backend(self) -> bool:
        return True

    def on_body_end(self, error: UpstreamError | None) -> None:
        if self._completion.done():
            return
        if error is not None:
            self._completion.set_exception(error)
        else:
            self._fail_answer(Failure.BROKEN, "ended the stream before the answer was complete")

    def _begin_stream(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._attempt.record_kv_arrival()

    def _take_payload(self, payload: dict[str, Any]) -> None:
        for choice in payload["choices"]:
            ids, text = choice.get("token_ids"), choice.get("text")
            if isinstance(ids, list):
                self.token_ids += ids
            if isinstance(text, str):
                self.answer_text += text

    def _complete_answer(self) -> None:
        if self._stream_segment.is_complete:
            if not self._completion.done():
                self._completion.set_result(None)
            return
        if not self._has_begun:
            self._attempt.record_kv_loss()
        # vLLM 0.18 to 0.30 ends a stream like this if the request was preempted before its first token, or if the
        # decoder could not load the KV cache.
        self._fail_answer(
            Failure.RECOMPUTED,
            "ended the stream without an answer: the KV cache did not come, or there was no memory for it",
        )

    def _fail_answer(self, failure: Failure, message: str) -> None:
        if not self._completion.done():
            self._completion.set_exception(self._attempt.response.make_failure(failure, message))


# Verdicts on a canary. Pure functions.


class Agreement(Enum):
    """Comparison of two greedy answers to the same prompt."""

    SAME = auto()
    DRIFTS_APART = auto()
    """The answers begin alike. Rounding, which depends on the order of additions in kernels, explains the rest."""
    DIFFERS = auto()


def compare_answers(answer: Sequence[int] | str, other_answer: Sequence[int] | str) -> Agreement:
    """Compare two greedy answers to the same prompt. Both are lists of token ids, or both are text."""
    if answer == other_answer:
        return Agreement.SAME
    differences = (at for at, pair in enumerate(zip(answer, other_answer, strict=False)) if pair[0] != pair[1])
    equal = next(differences, min(len(answer), len(other_answer)))
    return (
        Agreement.DRIFTS_APART
        if equal >= (_EQUAL_CHARACTERS if isinstance(answer, str) else _EQUAL_TOKENS)
        else Agreement.DIFFERS
    )


def judge_by_counters(
    counters_before: PromptTokenTotals | None,
    counters_after: PromptTokenTotals | None,
    prompt_tokens: int,
    *,
    reads_from_store: bool,
) -> HandoffVerdict | None:
    """Return the verdict on a canary's handoff by the decoder's counters, or None while they do not include it.

    Args:
        counters_before: Counters before the canary; None if the decoder reports none.
        counters_after: Counters after the canary; None if the decoder reports none.
        prompt_tokens: Length of the prompt.
        reads_from_store: Whether the engines share a KV store.
    """
    if counters_before is None or counters_after is None:
        return HandoffVerdict.UNKNOWN
    growth = [new - old for new, old in zip(counters_after, counters_before, strict=True)]
    if min(growth) >= 0 and sum(growth) < _CACHED_SHARE * prompt_tokens:
        return None
    verdict = judge_counters(
        counters_before,
        counters_after,
        HandoffCount(1, prompt_tokens),
        reads_from_store=reads_from_store,
        min_handoffs=1,
    )
    _, _, cached = growth
    may_be_of_others = verdict is HandoffVerdict.TRANSFERRED and sum(growth) > _MAX_GROWTH * prompt_tokens
    is_cached = verdict is HandoffVerdict.COMPUTED and cached >= _CACHED_SHARE * prompt_tokens
    return HandoffVerdict.UNKNOWN if verdict is None or may_be_of_others or is_cached else verdict


def judge_by_usage(cached_tokens: int | None, prompt_tokens: int) -> HandoffVerdict:
    """Return the verdict on a canary's handoff by the decoder's usage: TRANSFERRED or UNKNOWN.

    The prompt was in no cache, so cached tokens were fetched from the prefiller.

    Args:
        cached_tokens: Cached tokens in the usage. None: not reported; vLLM reports none instead of 0.
        prompt_tokens: Length of the prompt.
    """
    return (
        HandoffVerdict.TRANSFERRED if (cached_tokens or 0) >= _CACHED_SHARE * prompt_tokens else HandoffVerdict.UNKNOWN
    )


def judge_by_time(handoff_seconds: float | None, alone_seconds: float | None) -> HandoffVerdict:
    """Return the verdict on a canary's handoff by the time until the first token.

    Args:
        handoff_seconds: Time after a handoff; None if not known.
        alone_seconds: Time if the decoder computes the prompt; None if not known.
    """
    if handoff_seconds is None or alone_seconds is None or alone_seconds < _MIN_PREFILL_SECONDS:
        return HandoffVerdict.UNKNOWN
    is_slow = handoff_seconds >= _PREFILL_TIME_SHARE * alone_seconds
    return HandoffVerdict.COMPUTED if is_slow else HandoffVerdict.TRANSFERRED


# Canaries of a running gateway


class CanaryOutcome(StrEnum):
    """The outcome of a canary. The values are metric labels."""

    TRANSFERRED = "transferred"
    UNKNOWN = "unknown"
    """There was an answer, and the engines do not report whether the KV cache was fetched."""
    COMPUTED = "computed"
    DIFFERS = "differs"
    """The answer differs from that of the decoder alone."""
    FAILED = "failed"
    BUSY = "busy"
    """An engine had no room for the canary."""


_BAD = frozenset({CanaryOutcome.COMPUTED, CanaryOutcome.DIFFERS, CanaryOutcome.FAILED})


@dataclass(slots=True)
class _CanaryRound:
    """Prompts and comparisons that the canaries of one interval share."""

    prompts_by_model: dict[tuple[str, int], CanaryPrompt] = field(default_factory=dict)
    """Prompts by model and length in bytes."""
    results_of_decoders_alone: dict[tuple[Backend, CanaryPrompt], CanaryResult | None] = field(default_factory=dict)
    """Result of each decoder alone, by prompt; None: decoders of this protocol cannot answer alone."""


class CanaryWatch(BackgroundOwner):
    """Sends canaries inside `async with`, unless `doctor.every_seconds` is 0."""

    def __init__(self, connector: Connector, context: ConnectorContext, health: Health) -> None:
        self._connector = connector
        self._context = context
        self._health = health
        self._interval_changed = asyncio.Event()
        self._every_seconds = context.live.settings.doctor.every_seconds
        self._reported_pairs: set[Pair] = set()
        """Pairs with a warning in the log that still holds."""
        self._background = BackgroundTasks(logger, "a canary")

    def _begin(self) -> None:
        self._background.keep_running(self._keep_sending, "canaries", self._context.metrics.background_restarts_total)

    def apply_settings(self, settings: Settings) -> None:
        """Take changed settings. A changed interval begins at once."""
        if settings.doctor.every_seconds != self._every_seconds:
            self._every_seconds = settings.doctor.every_seconds
            self._interval_changed.set()

    async def _keep_sending(self) -> None:
        while True:
            self._interval_changed.clear()
            if self._every_seconds:
                await self._send_round(self._current_pairs())
            else:
                await self._interval_changed.wait()

    def _current_pairs(self) -> Sequence[Pair]:
        pools = self._context.pools
        if not self._context.live.settings.connector_traits.takes_prefillers:
            return ()
        return [
            (prefiller, decoder)
            for decoder in pools.decode.eligible_backends()
            for prefiller in pools.prefill.eligible_backends()
        ]

    async def _send_round(self, pairs: Sequence[Pair]) -> None:
        """Send a canary through each pair, spread over the interval, until a reload changes the interval."""
        self._reported_pairs = {pair for pair in self._reported_pairs if self._are_members(*pair)}
        current = _CanaryRound()
        for number in range(max(1, len(pairs))):
            try:
                async with asyncio.timeout(self._every_seconds / max(1, len(pairs))):
                    await self._interval_changed.wait()
                    return
            except TimeoutError:
                pass
            if number < len(pairs):
                await self._send_canary(pairs[number], current)

    def _are_members(self, prefiller: Backend, decoder: Backend) -> bool:
        pools = self._context.pools
        return prefiller in pools.prefill.all_backends() and decoder in pools.decode.all_backends()

    async def _send_canary(self, pair: Pair, canary_round: _CanaryRound) -> None:
        """Send a canary through a pair, and one to the decoder alone if it has not answered this prompt alone."""
        common = _common_model([self._health.health_of(backend).engine_facts for backend in pair])
        if common is None or not all(self._health.health_of(backend).is_healthy for backend in pair):
            return
        settings = self._context.live.settings
        model, lengths = common
        tokens = max(settings.doctor.canary_tokens, settings.kv.prefill_min_tokens)
        size = prompt_bytes(tokens, settings.cost.bytes_per_token, lengths)
        prompt = canary_round.prompts_by_model.setdefault((model, size), CanaryPrompt.make_prompt(model, size))
        canary = Canary(self._connector, self._context, prompt, settings.doctor.canary_seconds)
        prefiller, decoder = pair
        result = await canary.check_pair(prefiller, decoder)
        if not result.problem_text and (decoder, prompt) not in canary_round.results_of_decoders_alone:
            canary_round.results_of_decoders_alone[decoder, prompt] = await canary.check_decoder(decoder)
        outcome = canary_outcome_of(result, canary_round.results_of_decoders_alone.get((decoder, prompt)))
        self._context.metrics.canaries_total.labels(outcome.value).inc()
        self._log_outcome(pair, outcome, result)

    def _log_outcome(self, pair: Pair, outcome: CanaryOutcome, result: CanaryResult) -> None:
        """Log one line when a pair becomes bad, and one when it is good again."""
        prefiller, decoder = (backend.name for backend in pair)
        if outcome in _BAD and pair not in self._reported_pairs:
            self._reported_pairs.add(pair)
            line = "canary: bad pair: %s; prefill instance %s, decode instance %s"
            logger.warning(line, _describe_outcome(outcome, result), prefiller, decoder, extra=logs.ALWAYS)
        elif outcome is CanaryOutcome.TRANSFERRED and pair in self._reported_pairs:
            self._reported_pairs.discard(pair)
            line = "canary: pair is good again: KV is fetched; prefill instance %s, decode instance %s"
            logger.info(line, prefiller, decoder, extra=logs.ALWAYS)


def canary_outcome_of(pair_result: CanaryResult, decoder_result: CanaryResult | None) -> CanaryOutcome:
    """Return the outcome of a canary. `decoder_result`: result of the decoder alone; None if there is none."""
    if pair_result.are_engines_busy:
        return CanaryOutcome.BUSY
    if pair_result.problem_text:
        return CanaryOutcome.FAILED
    if pair_result.handoff_verdict is HandoffVerdict.COMPUTED or not pair_result.has_kv_from_prefiller:
        return CanaryOutcome.COMPUTED
    if (
        decoder_result is not None
        and not decoder_result.problem_text
        and compare_answers(pair_result.answer_tokens_or_text, decoder_result.answer_tokens_or_text)
        is Agreement.DIFFERS
    ):
        return CanaryOutcome.DIFFERS
    return CanaryOutcome(pair_result.handoff_verdict.value)


def _describe_outcome(outcome: CanaryOutcome, result: CanaryResult) -> str:
    if outcome is CanaryOutcome.DIFFERS:
        return "the answer differs from that of the decoder alone, so the KV cache arrives damaged; see pdproxy doctor"
    if outcome is CanaryOutcome.COMPUTED and not result.has_kv_from_prefiller:
        return f"the prefiller {NO_KV_PARAMS}"
    if outcome is CanaryOutcome.COMPUTED:
        return "the decoder computes the prompt again; see pdproxy doctor"
    blamed = (
        "" if result.blamed_backend is None else f"{result.blamed_backend.role} instance {result.blamed_backend.name} "
    )
    return f"{blamed}{result.problem_text}"


def _common_model(engine_facts: Sequence[EngineFacts | None]) -> tuple[str, list[int]] | None:
    """Return a model that all engines serve, with the known limits of its sequences in tokens; None if there is none.

    Facts None: not known yet, so there is no common model.
    """
    known = [each for each in engine_facts if each is not None]
    models = (
        frozenset.intersection(*(each.identity.models for each in known)) if len(known) == len(engine_facts) else None
    )
    if not models:
        return None
    return min(models), [each.max_model_len for each in known if each.max_model_len is not None]
