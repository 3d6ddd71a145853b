"""What was sent to the engines: when, how often, and with whose bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.soak.evidence import Evidence, Leg

# Processes note what they see when they get to it: of two things that different ones have noted, the later one is known
# to be later only if there is more than this between them, and more than what they were seen to lag behind.
_SKEW_SECONDS = 0.5
# When requests end the budget gets smaller, and those that are being repeated go on: it is that of the last seconds.
_BUDGET_SECONDS = 2.0
_BUDGET_SLACK = 2

# What the gateway changes in the body of a leg: of every one, of several sequences, and of an answer that goes on.
_EDITS_PREFILL = {
    *("kv_transfer_params", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens"),
    *("logprobs", "top_logprobs", "return_token_ids", "tool_choice"),
}
_EDITS_DECODE = {"kv_transfer_params", "stream", "stream_options", "return_token_ids"}
_EDITS_SPLIT = {"n", "best_of", "prompt", "seed"}
_EDITS_RESUMED = {
    *("max_tokens", "max_completion_tokens", "min_tokens", "seed", "prompt"),
    # Of a chat that goes on as a completion.
    *("messages", "tools", "tool_choice", "chat_template_kwargs", "logprobs", "top_logprobs"),
    *("add_special_tokens", "skip_special_tokens", "spaces_between_special_tokens"),
}


def nothing_after_the_end(evidence: Evidence) -> list[str]:
    ends = {line["id"]: line["at"] for line in evidence.ends}
    skew = _SKEW_SECONDS + evidence.lag_seconds
    return [
        f"{leg.user}: a {leg.stage} leg was sent {leg.sent - ends[leg.user]:.3f} s after its end"
        for leg in evidence.legs
        if leg.user in ends and leg.sent > ends[leg.user] + skew
    ]


def only_who_is_there(evidence: Evidence) -> list[str]:
    absences: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for absence in evidence.absences:
        absences[absence.instance].append((absence.began, absence.ended, absence.why))
    # An attempt chooses both its backends when it begins, which is just before its prefill leg is sent.
    chosen: dict[str, float] = {}
    for leg in evidence.legs:
        if leg.stage == "prefill":
            chosen[leg.attempt] = min(leg.sent, chosen.get(leg.attempt, leg.sent))
    skew = _SKEW_SECONDS + evidence.lag_seconds
    wrong = []
    for leg in evidence.legs:
        times = (leg.sent, chosen.get(leg.attempt, leg.sent))
        for began, ended, why in absences[leg.instance]:
            if all(began + skew < at < ended - skew for at in times) and leg.stage != "release":
                wrong.append(f"{leg.user}: a {leg.stage} leg {leg.sent - began:.3f} s after {leg.instance} {why}")
    return wrong


def bounded_attempts(evidence: Evidence) -> list[str]:
    limits = evidence.limits
    prefills = Counter(leg.user for leg in evidence.legs if leg.stage == "prefill")
    wrong = []
    for line in evidence.ends:
        # Each incident forgets the failures before it; each attempt may ask a prefiller a second time for its KV.
        per_answer = 2 * limits.max_attempts - 1
        most = max(1, line["units"]) * (1 + limits.max_resumes) * per_answer
        if line["attempts"] > most:
            wrong.append(f"{line['id']}: {line['attempts']} attempts, {most} are allowed")
        if prefills[line["id"]] > 2 * line["attempts"]:
            wrong.append(f"{line['id']}: {prefills[line['id']]} prefill legs in {line['attempts']} attempts")
    if limits.workers > 1:
        return wrong  # each has a budget of its own, and which of them sent a leg is not seen
    return wrong + _beyond_budget(evidence)


def _beyond_budget(evidence: Evidence) -> list[str]:
    """How many requests were being repeated at the same time, against how many there were."""
    began = sorted(answer.began for answer in evidence.answers for _ in range(answer.units))
    ended = sorted(answer.ended for answer in evidence.answers for _ in range(answer.units))

    def in_flight(at: float) -> int:
        return bisect_right(began, at) - bisect_left(ended, at - _BUDGET_SECONDS)

    repeats = sorted((leg.sent, leg.answered or leg.ended) for leg in _repeats(evidence))
    wrong = []
    running: list[float] = []
    for sent, until in repeats:
        running = [*(end for end in running if end > sent), until]
        share = evidence.limits.budget_share * in_flight(sent)
        if len(running) > max(evidence.limits.budget_least, share) + _BUDGET_SLACK:
            wrong.append(f"{len(running)} of {in_flight(sent)} requests were being repeated at the same time")
    return wrong


def _repeats(evidence: Evidence) -> Iterator[Leg]:
    """Prefill legs of second and further attempts, of requests that are one sequence."""
    single = {answer.id for answer in evidence.answers if answer.units == 1}
    seen: set[str] = set()
    for leg in sorted(evidence.legs, key=lambda leg: leg.sent):
        if leg.stage == "prefill" and leg.user in single:
            if leg.user in seen:
                yield leg
            seen.add(leg.user)


def handed_over_in_time(evidence: Evidence) -> list[str]:
    prefilled = {leg.attempt: leg.ended for leg in evidence.legs if leg.stage == "prefill" and leg.is_whole}
    deadline = evidence.limits.handoff_seconds + _SKEW_SECONDS + evidence.lag_seconds
    wrong = []
    for leg in evidence.legs:
        if leg.stage == "decode" and leg.attempt in prefilled:
            # Engines begin an answer that is not streamed when they have all of it.
            until = (leg.answered or leg.ended) if leg.stream else leg.sent
            waited = until - prefilled[leg.attempt]
            if waited > deadline:
                wrong.append(f"{leg.user}: {waited:.1f} s from the prefill to the decoder's answer")
    return wrong


def clients_bytes(evidence: Evidence) -> list[str]:
    units = {answer.id: answer.units for answer in evidence.answers}
    once = {line["id"] for line in evidence.ends if not line["resumes"]}
    first: dict[str, str] = {}
    wrong = []
    for leg in sorted(evidence.legs, key=lambda leg: leg.sent):
        allowed = _EDITS_PREFILL if leg.stage == "prefill" else _EDITS_DECODE
        if units.get(leg.user, 1) > 1:
            allowed = allowed | _EDITS_SPLIT
        if leg.attempt != first.setdefault(leg.user, leg.attempt) and leg.user not in once:
            allowed = allowed | _EDITS_RESUMED
        if others := set(leg.edited) - allowed:
            wrong.append(f"{leg.user}: the {leg.stage} leg has other {', '.join(sorted(others))}")
    return wrong
