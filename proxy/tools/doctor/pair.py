"""Checks of pairs, based on canary results. Pure.

An instance is reported if all its pairs failed, as for handoffs of clients. Otherwise the pair is reported.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.handoff_verdicts import HandoffVerdict, find_culprits
from proxy.balancer.incompatibilities import CACHE_FLAGS, NO_KV_PARAMS
from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure
from proxy.fleet.canary import ANSWER_TOKENS, Agreement, CanaryResult, compare_answers, judge_by_time
from proxy.fleet.inspector import NOT_FETCHED, NOT_STORED
from proxy.tools.doctor.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from proxy.settings import Settings

# Faster handoffs are never reported as slow.
_LEAST_SLOW_SECONDS: Final = 1.0
_LATE_SHARE: Final = 0.5
# An engine is slow if it takes this multiple of the usual time of the others, and this much longer.
_SLOW_FACTOR: Final = 3.0
_LEAST_SLOW_PREFILL_SECONDS: Final = 1.0
_LEAST_SLOW_GAP_SECONDS: Final = 0.1
_LEAST_PACED_TOKENS: Final = 1000
_SLOW_HINT: Final = "check whether it serves other requests now, its GPU clocks, and its options"
_ALL: Final = "all pairs"
_FAILED: Final = (Severity.FAILURE, "see the log of the engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResults:
    """The results of all canary requests of the doctor."""

    settings: Settings
    pairs: Sequence[CanaryResult]
    """Results of pairs; empty if the connector has no handoff."""
    repeated: Sequence[CanaryResult]
    """Results of a prompt that each prefiller had computed before."""
    alone: Mapping[Backend, CanaryResult]
    """Results of decoders alone, without engines that require a prefiller."""
    max_tokens: Mapping[Backend, int] = field(default_factory=dict)
    """Maximum length of a prompt and its answer by engine, as far as the engines report it."""
    lease_seconds: Callable[[Backend], float | None]
    """Returns the seconds for which a prefiller keeps unfetched KV cache; None if the connector has no leases."""

    @property
    def answered(self) -> list[CanaryResult]:
        """The handoffs whose canary request got an answer."""
        return [result for result in self.pairs if not result.problem_text]

    def alone_seconds(self, decoder: Backend) -> float | None:
        """Return the TTFT of a decoder alone, in seconds; None if unknown."""
        alone = self.alone.get(decoder)
        return None if alone is None or alone.problem_text else alone.first_token_seconds


def check_pairs(canaries: CanaryResults) -> list[Finding]:
    """Return the findings of all checks in this group, and one for each pair without problems."""
    found = [finding for check in PAIR_CHECKS for finding in check(canaries)]
    bad = {finding.subject for finding in found if finding.severity > Severity.NOTE}
    for result in canaries.answered:
        assert result.prefiller is not None
        its = (
            _ALL,
            _pair_subject(result.prefiller, result.decoder),
            _role_and_name(result.prefiller),
            _role_and_name(result.decoder),
        )
        if bad.isdisjoint(its):
            found.append(_good_finding(result, canaries))
    return found


def _good_finding(result: CanaryResult, canaries: CanaryResults) -> Finding:
    assert result.prefiller is not None
    subject = _pair_subject(result.prefiller, result.decoder)
    kv = (
        "KV was fetched"
        if result.handoff_verdict is HandoffVerdict.TRANSFERRED
        else "answered; the engines do not report whether KV was fetched"
    )
    has_times = canaries.settings.connector_traits.has_prefill_first and result.first_token_seconds is not None
    took = f", {result.total_seconds:.2f} s"
    if has_times:
        took = f", prefill {result.prefill_seconds or 0:.2f} s, handoff {result.first_token_seconds:.2f} s"
    severity = Severity.OK if result.handoff_verdict is HandoffVerdict.TRANSFERRED else Severity.NOTE
    return Finding(
        severity, "kv", subject, kv + took + (", same answer as alone" if _is_compared(result, canaries) else "")
    )


def _is_compared(result: CanaryResult, canaries: CanaryResults) -> bool:
    alone = canaries.alone.get(result.decoder)
    return alone is not None and not alone.problem_text


# The checks


def check_answers(canaries: CanaryResults) -> Iterator[Finding]:
    """Check that each canary request was answered."""
    failed = [r for r in canaries.pairs if r.problem_text and not _is_decoders_own(r, canaries)]
    # Either engine may have caused a failed transfer. Other failures belong to the engine that reported them.
    of_engine = {r.blamed_backend: r for r in failed if r.blamed_backend is not None and not _may_be_of_pair(r)}
    for subject, result in _find_culprits([result for result in failed if _may_be_of_pair(result)], canaries):
        told = result.problem_text
        if result.blamed_backend is not None:
            told = f"{result.blamed_backend.role} {result.blamed_backend.name} {result.problem_text}"
        hint = (
            "check that the decode instance reaches the address in the prefiller's kv_transfer_params "
            "(VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT) and that both run the same connector; see their logs"
        )
        yield Finding(Severity.FAILURE, "handover", subject, f"KV handoff failed: {told}", hint)
    for backend, result in of_engine.items():
        if result.failure is Failure.MISSING_KV:
            yield Finding.of_text(Severity.FAILURE, "no_kv_params", _role_and_name(backend), NO_KV_PARAMS)
        else:
            severity, hint = (
                (Severity.WARNING, "the engine is busy: run the doctor again") if result.are_engines_busy else _FAILED
            )
            yield Finding(
                severity,
                "answer",
                _role_and_name(backend),
                f"canary request failed: the engine {result.problem_text}",
                hint,
            )


def check_alone(canaries: CanaryResults) -> Iterator[Finding]:
    """Check that each decoder answers without a prefiller, if its engine supports that."""
    for decoder, result in canaries.alone.items():
        if result.problem_text:
            severity, hint = (
                (Severity.WARNING, "the engine is busy: run the doctor again") if result.are_engines_busy else _FAILED
            )
            words = f"canary request sent to this decode instance alone failed: the engine {result.problem_text}"
            yield Finding(severity, "answer", _role_and_name(decoder), words, hint)


def check_fetched(canaries: CanaryResults) -> Iterator[Finding]:
    """Check by counters, usage or time that decoders load the KV cache."""
    hints = NOT_STORED if canaries.settings.connector_traits.is_store else NOT_FETCHED
    computed = [result for result in canaries.answered if result.handoff_verdict is HandoffVerdict.COMPUTED]
    for subject, result in _find_culprits(computed, canaries):
        assert result.prefiller is not None
        role = Role.PREFILL if subject == _role_and_name(result.prefiller) else Role.DECODE
        what, _, hint = hints[role].partition(". ")
        if subject == _pair_subject(result.prefiller, result.decoder):
            what, hint = (
                "the decode instance recomputes the prompts of this prefill instance",
                "check that it reaches the prefill instance over the network",
            )
        elif subject == _ALL:
            what = "decode instances do not load KV from any prefill instance: they recompute every prompt"
        yield Finding(Severity.FAILURE, "kv_not_fetched", subject, what, hint)
    if not canaries.settings.connector_traits.has_prefill_first:
        return
    for subject, result in _find_culprits([r for r in canaries.answered if _seems_computed(r, canaries)], canaries):
        alone = canaries.alone_seconds(result.decoder) or 0.0
        words = (
            f"the first token comes {result.first_token_seconds:.2f} s after the prefill, and {alone:.2f} s without "
            "one: the decode instance seems to recompute prompts"
        )
        yield Finding(
            Severity.WARNING, "kv_not_fetched", subject, words, "enable /metrics on the engine to confirm this"
        )


def check_same_answers(canaries: CanaryResults) -> Iterator[Finding]:
    """Check that answers equal that of the decoder alone or, if unavailable, those of most pairs."""
    differing: list[CanaryResult] = []
    drifting: list[CanaryResult] = []
    for result in canaries.answered:
        expected = _expected_answer(result, canaries)
        counts = {result.prompt_tokens, result.decoder_prompt_tokens} - {None}
        if expected is None or result.handoff_verdict is HandoffVerdict.COMPUTED or len(counts) > 1:
            continue
        match compare_answers(result.answer_tokens_or_text, expected):
            case Agreement.DIFFERS:
                differing.append(result)
            case Agreement.DRIFTS_APART:
                drifting.append(result)
    if not canaries.pairs:
        differing = [alone for alone in canaries.alone.values() if _differs_alone(alone, canaries)]
        for result in differing:
            words = "its answer to a greedy prompt differs from that of most instances"
            hint = "compare model, revision, quantization and versions"
            yield Finding(Severity.WARNING, "corrupt", _role_and_name(result.decoder), words, hint)
        return
    for subject, _ in _find_culprits(differing, canaries):
        words = "the answer after a KV handoff differs from the answer without one: the KV cache arrives damaged"
        hint = (
            "remove it from service; compare model, revision, quantization, --kv-cache-dtype, block size, tensor "
            "parallel size and versions of both engines"
        )
        yield Finding(Severity.FAILURE, "corrupt", subject, words, hint)
    for subject, _ in _find_culprits(drifting, canaries):
        words = "the answer after a KV handoff begins like the answer without one and then diverges"
        hint = "different kernels or parallel sizes can cause this; otherwise compare versions and --kv-cache-dtype"
        yield Finding(Severity.WARNING, "corrupt", subject, words, hint)


def check_same_tokens(canaries: CanaryResults) -> Iterator[Finding]:
    """Check that both engines count the same number of prompt tokens."""
    for result in canaries.answered:
        one, other = result.prompt_tokens, result.decoder_prompt_tokens
        if result.prefiller is not None and one is not None and other is not None and one != other:
            words = f"the prefill instance counts {one} prompt tokens, but the decode instance counts {other}"
            hint = "start both with the same --tokenizer, --tokenizer-mode and model revision"
            yield Finding(Severity.FAILURE, "tokenizer", _pair_subject(result.prefiller, result.decoder), words, hint)


def check_deadline(canaries: CanaryResults) -> Iterator[Finding]:
    """Check that a handoff is much faster than its time limit and the lease of the KV cache."""
    if not canaries.settings.connector_traits.has_prefill_first:
        return
    for result in canaries.answered:
        seconds, prefiller = result.first_token_seconds, result.prefiller
        if prefiller is None or seconds is None:
            continue
        lease = canaries.lease_seconds(prefiller)
        deadline = min(canaries.settings.timeouts.handoff_seconds, lease / 2 if lease else float("inf"))
        if seconds > _LATE_SHARE * deadline:
            words = f"a KV handoff takes {seconds:.2f} s of the allowed {deadline:g} s"
            hint = "with longer prompts or more load KV handoffs will fail: raise timeouts.handoff_seconds"
            if lease:
                hint += f"; the prefiller keeps KV for {lease:g} s, and half of that is the limit"
            yield Finding(Severity.WARNING, "slow", _pair_subject(prefiller, result.decoder), words, hint)
        elif (alone := canaries.alone_seconds(result.decoder)) and seconds > max(_LEAST_SLOW_SECONDS, alone):
            words = f"loading the KV cache takes {seconds:.2f} s, but computing it takes only {alone:.2f} s"
            hint = "check whether the transfer uses TCP instead of RDMA (UCX_TLS, UCX_NET_DEVICES, Mooncake's protocol)"
            yield Finding(Severity.WARNING, "slow", _pair_subject(prefiller, result.decoder), words, hint)


def check_paces(canaries: CanaryResults) -> Iterator[Finding]:
    """Check that no engine is much slower than the others of its role. The fastest canary of each engine counts."""
    prefills: dict[Backend, float] = {}
    gaps: dict[Backend, float] = {}
    for result in [*canaries.answered, *(one for one in canaries.alone.values() if not one.problem_text)]:
        if result.prefiller is not None and result.prefill_seconds is not None:
            known = prefills.get(result.prefiller, result.prefill_seconds)
            prefills[result.prefiller] = min(known, result.prefill_seconds)
        if result.first_token_seconds is not None:
            rest_seconds = result.total_seconds - (result.prefill_seconds or 0.0) - result.first_token_seconds
            gap_seconds = rest_seconds / (ANSWER_TOKENS - 1)
            gaps[result.decoder] = min(gaps.get(result.decoder, gap_seconds), gap_seconds)
    for backend, seconds, usual in _find_slow_engines(prefills, _LEAST_SLOW_PREFILL_SECONDS):
        words = f"computes the canary in {seconds:.2f} s, but other prefill instances take {usual:.2f} s"
        yield Finding(Severity.WARNING, "pace", _role_and_name(backend), words, _SLOW_HINT)
    for backend, seconds, usual in _find_slow_engines(gaps, _LEAST_SLOW_GAP_SECONDS):
        words = f"takes {1000 * seconds:.0f} ms for a token, but other decode instances take {1000 * usual:.0f} ms"
        yield Finding(Severity.WARNING, "pace", _role_and_name(backend), words, _SLOW_HINT)


def _find_slow_engines(times: Mapping[Backend, float], least_seconds: float) -> Iterator[tuple[Backend, float, float]]:
    """Yield each engine that is much slower than most others, its time, and the usual time of the others."""
    for backend, seconds in times.items():
        others = [other for peer, other in times.items() if peer != backend]
        if others and seconds >= max(_SLOW_FACTOR * (usual := median_low(others)), usual + least_seconds):
            yield backend, seconds, usual


def check_longest_prompt(canaries: CanaryResults) -> Iterator[Finding]:
    """Check that the longest prompt of a prefiller can be computed within its deadline, at the pace of the canary."""
    timeouts = canaries.settings.timeouts
    fastest: dict[Backend, CanaryResult] = {}
    for result in canaries.answered:
        if result.prefiller is None or result.prefill_seconds is None:
            continue
        if (result.prompt_tokens or 0) < _LEAST_PACED_TOKENS:
            continue  # the time of a short prompt is mostly that of the connection
        known = fastest.setdefault(result.prefiller, result)
        if result.prefill_seconds < (known.prefill_seconds or 0.0):
            fastest[result.prefiller] = result
    for prefiller, result in fastest.items():
        tokens = canaries.max_tokens.get(prefiller)
        if tokens is None:
            continue
        seconds = (result.prefill_seconds or 0.0) / (result.prompt_tokens or 1) * tokens
        deadline = timeouts.prefill_seconds + timeouts.prefill_seconds_per_1k_tokens * tokens / 1000
        if seconds > deadline:
            words = f"takes about {seconds:.0f} s for {tokens} tokens, but its deadline is {deadline:.0f} s"
            hint = "raise timeouts.prefill_seconds_per_1k_tokens, or lower --max-model-len"
            yield Finding(Severity.WARNING, "deadline", _role_and_name(prefiller), words, hint)


def check_prefix_cache(canaries: CanaryResults) -> Iterator[Finding]:
    """Check that prefillers find a prompt in their cache that they have computed before."""
    for result in canaries.repeated:
        if result.problem_text or result.prefiller is None or (result.prompt_tokens or 0) < _LEAST_PACED_TOKENS:
            continue
        if result.cached_tokens == 0:
            words = "computed the same prompt twice: its prefix cache is off, or it has less memory than the prompt"
            hint = "start it with --enable-prefix-caching (SGLang: without --disable-radix-cache)"
            yield Finding(Severity.NOTE, "prefix-cache", _role_and_name(result.prefiller), words, hint)


def check_cache_reports(canaries: CanaryResults) -> Iterator[Finding]:
    """Check that prefillers report the cached tokens of a prompt that they have computed before."""
    for result in canaries.repeated:
        # vLLM before 0.32 reports nothing if no token was cached.
        if result.problem_text or result.prefiller is None or result.prompt_tokens is None:
            continue
        if result.cached_tokens is None:
            words = "does not report cached_tokens: pdproxy cannot learn which prompts are in its prefix cache"
            yield Finding(
                Severity.NOTE, "cache-report", _role_and_name(result.prefiller), words, f"start it with {CACHE_FLAGS}"
            )


PAIR_CHECKS: Final[tuple[Callable[[CanaryResults], Iterable[Finding]], ...]] = (
    check_answers,
    check_alone,
    check_fetched,
    check_same_answers,
    check_same_tokens,
    check_deadline,
    check_paces,
    check_longest_prompt,
    check_cache_reports,
    check_prefix_cache,
)


# Helpers


def _find_culprits(bad: Sequence[CanaryResult], canaries: CanaryResults) -> Iterator[tuple[str, CanaryResult]]:
    """Yield each culprit and one of its results: all pairs, an instance whose pairs all failed, or a pair."""
    by_pair = {(result.prefiller, result.decoder): result for result in bad if result.prefiller is not None}
    prefillers = dict.fromkeys(result.prefiller for result in canaries.pairs if result.prefiller is not None)
    decoders = dict.fromkeys(result.decoder for result in canaries.pairs)
    if len(by_pair) == len(prefillers) * len(decoders) > 1:
        yield _ALL, next(iter(by_pair.values()))
        return
    found: Any = find_culprits(list(by_pair), list(prefillers), list(decoders))
    for backend in (*found.bad_decoders, *found.bad_prefillers):
        yield _role_and_name(backend), next(result for pair, result in by_pair.items() if backend in pair)
    for pair in found.bad_pairs:
        yield _pair_subject(*pair), by_pair[pair]


def _expected_answer(result: CanaryResult, canaries: CanaryResults) -> tuple[int, ...] | str | None:
    """Return the answer that a canary should get; None if unknown."""
    alone = canaries.alone.get(result.decoder)
    if alone is not None:
        return None if alone.problem_text else alone.answer_tokens_or_text
    return _majority_answer(canaries.answered)


def _differs_alone(alone: CanaryResult, canaries: CanaryResults) -> bool:
    answered = [other for other in canaries.alone.values() if not other.problem_text]
    expected = _majority_answer(answered)
    return (
        not alone.problem_text
        and expected is not None
        and compare_answers(alone.answer_tokens_or_text, expected) is Agreement.DIFFERS
    )


def _majority_answer(results: Sequence[CanaryResult]) -> tuple[int, ...] | str | None:
    """Return the answer of more than half of the results; None if there is no majority."""
    (answer, votes), *_ = Counter(result.answer_tokens_or_text for result in results).most_common(1) or [("", 0)]
    return answer if votes > len(results) / 2 else None


def _seems_computed(result: CanaryResult, canaries: CanaryResults) -> bool:
    alone_seconds = canaries.alone_seconds(result.decoder)
    is_told = result.handoff_verdict is not HandoffVerdict.UNKNOWN
    return not is_told and judge_by_time(result.first_token_seconds, alone_seconds) is HandoffVerdict.COMPUTED


def _is_decoders_own(result: CanaryResult, canaries: CanaryResults) -> bool:
    """Return whether the decoder also fails without a prefiller."""
    alone = canaries.alone.get(result.decoder)
    return result.blamed_backend == result.decoder and alone is not None and bool(alone.problem_text)


def _may_be_of_pair(result: CanaryResult) -> bool:
    return result.blamed_backend is None or (
        result.blamed_backend.role is Role.DECODE and result.failure is not Failure.CONNECT
    )


def _role_and_name(backend: Backend) -> str:
    return f"{backend.role} {backend.name}"


def _pair_subject(prefiller: Backend, decoder: Backend) -> str:
    return f"{prefiller.name} → {decoder.name}"
