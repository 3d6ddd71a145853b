"""Checks of pairs, by what became of their canaries. Pure.

Who is to blame is decided as for hand-overs of clients: an instance where all its pairs are bad, otherwise the pair.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.compatibility.handoff_verdicts import HandoffVerdict, culprits
from proxy.balancer.compatibility.incompatibilities import NO_KV_PARAMS
from proxy.common.backend import Role
from proxy.common.errors import Failure
from proxy.fleet.canary import Agreement, agreement
from proxy.fleet.canary.compare import by_time
from proxy.fleet.inspector.telling import NOT_FETCHED, NOT_STORED
from proxy.tools.doctor.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from proxy.common.backend import Backend
    from proxy.fleet.canary import CanaryResult
    from proxy.settings import Settings

# What is faster than this cannot be called slow, whatever it is compared with.
_LEAST_SLOW_SECONDS: Final = 1.0
_LATE_SHARE: Final = 0.5
_ALL: Final = "all pairs"
_FAILED: Final = (Severity.FAILURE, "its log has more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Canaries:
    """What became of all canaries."""

    settings: Settings
    pairs: Sequence[CanaryResult]
    """Empty where the connector has no hand-over."""
    alone: Mapping[Backend, CanaryResult]
    """By decoders, without those whose engines cannot be asked alone."""
    lease_seconds: Callable[[Backend], float | None]
    """How long a prefiller keeps KV that nobody fetches; None: the connector has no leases."""

    @property
    def answered(self) -> list[CanaryResult]:
        """The hand-overs that led to an answer."""
        return [result for result in self.pairs if not result.problem]

    def alone_seconds(self, decoder: Backend) -> float | None:
        """How long a decoder alone takes to its first token; None: not known."""
        alone = self.alone.get(decoder)
        return None if alone is None or alone.problem else alone.first_token_seconds


def check_pairs(canaries: Canaries) -> list[Finding]:
    """What all checks of this group find. A pair of which none found anything is well."""
    found = [finding for check in PAIR_CHECKS for finding in check(canaries)]
    bad = {finding.subject for finding in found if finding.severity > Severity.NOTE}
    for result in canaries.answered:
        assert result.prefiller is not None
        its = (_ALL, _pair(result.prefiller, result.decoder), _of(result.prefiller), _of(result.decoder))
        if bad.isdisjoint(its):
            found.append(_well(result, canaries))
    return found


def _well(result: CanaryResult, canaries: Canaries) -> Finding:
    assert result.prefiller is not None
    subject = _pair(result.prefiller, result.decoder)
    kv = (
        "KV was fetched"
        if result.kv is HandoffVerdict.TRANSFERRED
        else "answered, and the engines do not tell if KV was fetched"
    )
    has_times = canaries.settings.connector_traits.has_prefill_first and result.first_token_seconds is not None
    took = f", {result.seconds:.2f} s"
    if has_times:
        took = f", prefill {result.prefill_seconds or 0:.2f} s, hand-over {result.first_token_seconds:.2f} s"
    severity = Severity.OK if result.kv is HandoffVerdict.TRANSFERRED else Severity.NOTE
    return Finding(
        severity, "kv", subject, kv + took + (", same answer as alone" if _is_compared(result, canaries) else "")
    )


def _is_compared(result: CanaryResult, canaries: Canaries) -> bool:
    alone = canaries.alone.get(result.decoder)
    return alone is not None and not alone.problem


# The checks


def check_answers(canaries: Canaries) -> Iterator[Finding]:
    """Each canary was answered."""
    failed = [r for r in canaries.pairs if r.problem and not _is_decoders_own(r, canaries)]
    # What broke while a decoder should have fetched may be either's fault; the rest is of who said so.
    of_engine = {r.blamed: r for r in failed if r.blamed is not None and not _may_be_of_pair(r)}
    for subject, result in _blamed([result for result in failed if _may_be_of_pair(result)], canaries):
        told = result.problem
        if result.blamed is not None:
            told = f"{result.blamed.role} {result.blamed.name} {result.problem}"
        hint = (
            "does the decoder reach the address in the prefiller's kv_transfer_params (VLLM_NIXL_SIDE_CHANNEL_HOST and "
            "_PORT), and do both run the same connector? Their logs have more"
        )
        yield Finding(Severity.FAILURE, "handover", subject, f"KV handoff failed: {told}", hint)
    for backend, result in of_engine.items():
        if result.failure is Failure.MISSING_KV:
            what, _, hint = NO_KV_PARAMS.partition(": ")
            yield Finding(Severity.FAILURE, "no_kv_params", _of(backend), what, hint)
        else:
            severity, hint = (Severity.WARNING, "it is busy: ask again") if result.is_busy else _FAILED
            yield Finding(severity, "answer", _of(backend), f"canary request failed: the engine {result.problem}", hint)


def check_alone(canaries: Canaries) -> Iterator[Finding]:
    """Each decoder that can be asked alone answers."""
    for decoder, result in canaries.alone.items():
        if result.problem:
            severity, hint = (Severity.WARNING, "it is busy: ask again") if result.is_busy else _FAILED
            words = f"canary request sent to this decode instance alone failed: the engine {result.problem}"
            yield Finding(severity, "answer", _of(decoder), words, hint)


def check_fetched(canaries: Canaries) -> Iterator[Finding]:
    """The decoder has fetched the KV cache, by its counters, its usage or the time."""
    hints = NOT_STORED if canaries.settings.connector_traits.is_store else NOT_FETCHED
    computed = [result for result in canaries.answered if result.kv is HandoffVerdict.COMPUTED]
    for subject, result in _blamed(computed, canaries):
        assert result.prefiller is not None
        role = Role.PREFILL if subject == _of(result.prefiller) else Role.DECODE
        what, _, hint = hints[role].partition(". ")
        if subject == _pair(result.prefiller, result.decoder):
            what, hint = (
                "the decode instance recomputes the prompts of this prefill instance",
                "does it reach the prefiller?",
            )
        elif subject == _ALL:
            what = "decode instances do not load KV from any prefill instance: they recompute every prompt"
        yield Finding(Severity.FAILURE, "kv_not_fetched", subject, what, hint)
    if not canaries.settings.connector_traits.has_prefill_first:
        return
    for subject, result in _blamed([r for r in canaries.answered if _seems_computed(r, canaries)], canaries):
        alone = canaries.alone_seconds(result.decoder) or 0.0
        words = (
            f"the first token comes {result.first_token_seconds:.2f} s after the prefill, and {alone:.2f} s without "
            "one: the decode instance seems to recompute prompts"
        )
        yield Finding(
            Severity.WARNING, "kv_not_fetched", subject, words, "enable /metrics on the engine to confirm this"
        )


def check_same_answers(canaries: Canaries) -> Iterator[Finding]:
    """Answers are the decoder's own, or, where it cannot be asked alone, those of most pairs."""
    differing: list[CanaryResult] = []
    drifting: list[CanaryResult] = []
    for result in canaries.answered:
        expected = _expected(result, canaries)
        counts = {result.prompt_tokens, result.decoder_prompt_tokens} - {None}
        if expected is None or result.kv is HandoffVerdict.COMPUTED or len(counts) > 1:
            continue
        match agreement(result.answer, expected):
            case Agreement.DIFFERS:
                differing.append(result)
            case Agreement.DRIFTS:
                drifting.append(result)
    if not canaries.pairs:
        differing = [alone for alone in canaries.alone.values() if _is_odd(alone, canaries)]
        for result in differing:
            words = "its answer to a greedy prompt is another than that of most others"
            hint = "compare model, revision, quantization and versions"
            yield Finding(Severity.WARNING, "corrupt", _of(result.decoder), words, hint)
        return
    for subject, _ in _blamed(differing, canaries):
        words = "the answer after a hand-over is another than without one: the KV cache arrives damaged"
        hint = (
            "take it out of service; compare model, revision, quantization, --kv-cache-dtype, block size, tensor "
            "parallel size and versions of both engines"
        )
        yield Finding(Severity.FAILURE, "corrupt", subject, words, hint)
    for subject, _ in _blamed(drifting, canaries):
        words = "the answer after a hand-over begins as without one, and then goes another way"
        hint = "different kernels or parallel sizes can do that; if not, compare versions and --kv-cache-dtype"
        yield Finding(Severity.WARNING, "corrupt", subject, words, hint)


def check_same_tokens(canaries: Canaries) -> Iterator[Finding]:
    """Both engines make the same tokens of a prompt."""
    for result in canaries.answered:
        one, other = result.prompt_tokens, result.decoder_prompt_tokens
        if result.prefiller is not None and one is not None and other is not None and one != other:
            words = f"the prefiller makes {one} tokens of a prompt, and the decoder {other}"
            hint = "give both the same --tokenizer, --tokenizer-mode and model revision"
            yield Finding(Severity.FAILURE, "tokenizer", _pair(result.prefiller, result.decoder), words, hint)


def check_deadline(canaries: Canaries) -> Iterator[Finding]:
    """A hand-over takes much less time than it may, and than the prefiller keeps the KV cache."""
    if not canaries.settings.connector_traits.has_prefill_first:
        return
    for result in canaries.answered:
        seconds, prefiller = result.first_token_seconds, result.prefiller
        if prefiller is None or seconds is None:
            continue
        lease = canaries.lease_seconds(prefiller)
        deadline = min(canaries.settings.timeouts.handoff_seconds, lease / 2 if lease else float("inf"))
        if seconds > _LATE_SHARE * deadline:
            words = f"a hand-over takes {seconds:.2f} s of the {deadline:g} s that it may take"
            hint = "with longer prompts or more load hand-overs fail: raise timeouts.handoff_seconds"
            if lease:
                hint += f"; the prefiller keeps KV for {lease:g} s, and half of that is the limit"
            yield Finding(Severity.WARNING, "slow", _pair(prefiller, result.decoder), words, hint)
        elif (alone := canaries.alone_seconds(result.decoder)) and seconds > max(_LEAST_SLOW_SECONDS, alone):
            words = f"to fetch the KV cache takes {seconds:.2f} s, and to compute it {alone:.2f} s"
            hint = "is the transfer going over TCP instead of RDMA (UCX_TLS, UCX_NET_DEVICES, Mooncake's protocol)?"
            yield Finding(Severity.WARNING, "slow", _pair(prefiller, result.decoder), words, hint)


PAIR_CHECKS: Final[tuple[Callable[[Canaries], Iterable[Finding]], ...]] = (
    check_answers,
    check_alone,
    check_fetched,
    check_same_answers,
    check_same_tokens,
    check_deadline,
)


# How


def _blamed(bad: Sequence[CanaryResult], canaries: Canaries) -> Iterator[tuple[str, CanaryResult]]:
    """Who is to blame, with a bad result for each: all pairs, an instance all of whose pairs are bad, or a pair."""
    by_pair = {(result.prefiller, result.decoder): result for result in bad if result.prefiller is not None}
    prefillers = dict.fromkeys(result.prefiller for result in canaries.pairs if result.prefiller is not None)
    decoders = dict.fromkeys(result.decoder for result in canaries.pairs)
    if len(by_pair) == len(prefillers) * len(decoders) > 1:
        yield _ALL, next(iter(by_pair.values()))
        return
    found: Any = culprits(list(by_pair), list(prefillers), list(decoders))
    for backend in (*found.decoders, *found.prefillers):
        yield _of(backend), next(result for pair, result in by_pair.items() if backend in pair)
    for pair in found.pairs:
        yield _pair(*pair), by_pair[pair]


def _expected(result: CanaryResult, canaries: Canaries) -> tuple[int, ...] | str | None:
    """What the answer should be; None: nobody knows."""
    alone = canaries.alone.get(result.decoder)
    if alone is not None:
        return None if alone.problem else alone.answer
    return _majority(canaries.answered)


def _is_odd(alone: CanaryResult, canaries: Canaries) -> bool:
    answered = [other for other in canaries.alone.values() if not other.problem]
    expected = _majority(answered)
    return not alone.problem and expected is not None and agreement(alone.answer, expected) is Agreement.DIFFERS


def _majority(results: Sequence[CanaryResult]) -> tuple[int, ...] | str | None:
    """The answer of more than half of them; None: there is none."""
    (answer, votes), *_ = Counter(result.answer for result in results).most_common(1) or [("", 0)]
    return answer if votes > len(results) / 2 else None


def _seems_computed(result: CanaryResult, canaries: Canaries) -> bool:
    alone_seconds = canaries.alone_seconds(result.decoder)
    is_told = result.kv is not HandoffVerdict.UNKNOWN
    return not is_told and by_time(result.first_token_seconds, alone_seconds) is HandoffVerdict.COMPUTED


def _is_decoders_own(result: CanaryResult, canaries: Canaries) -> bool:
    """The decoder does not answer alone, either."""
    alone = canaries.alone.get(result.decoder)
    return result.blamed == result.decoder and alone is not None and bool(alone.problem)


def _may_be_of_pair(result: CanaryResult) -> bool:
    return result.blamed is None or (result.blamed.role is Role.DECODE and result.failure is not Failure.CONNECT)


def _of(backend: Backend) -> str:
    return f"{backend.role} {backend.name}"


def _pair(prefiller: Backend, decoder: Backend) -> str:
    return f"{prefiller.name} → {decoder.name}"
