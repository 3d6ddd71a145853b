"""What must hold, whatever goes wrong. `how` says by what it is judged, and what would not be seen.

Each judge returns what is wrong, a text for each case, and is a pure function of the evidence.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from lab.soak.evidence import KILL_WORKER, Evidence, Leg, Outcome

Judge = Callable[[Evidence], list[str]]
Verdicts = Mapping["Invariant", list[str] | None]
"""None: it was not judged."""

# A clean request takes as long as most do, and at most so much longer.
_LONGER_SECONDS = 1.0
# Lines are written many at a time, so long after the end of a request at most.
_WRITTEN_SECONDS = 0.1
_LOADS = ("pdproxy_instance_inflight", "pdproxy_instance_load_tokens", "pdproxy_inflight_requests")
_FDS_SLACK = 8
# What a worker takes once, when it first sees what can happen.
_RSS_SLACK_BYTES = 16 * 1024 * 1024
_RSS_SHARE = 0.05
_RSS_BYTES_PER_MINUTE = 1024 * 1024
_WARM_UP_SECONDS = 120.0
# A shorter time says nothing about a slope.
_SLOPE_SECONDS = 600.0
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


# What clients got, and what was written down of it


def one_end(evidence: Evidence) -> list[str]:
    lines = Counter(line["id"] for line in evidence.ends)
    asked = {answer.id: answer for answer in evidence.answers}
    wrong = [f"{name}: {times} access lines" for name, times in lines.items() if times > 1]
    wrong += [f"{name}: an access line, and no client asked" for name in lines if name not in asked]
    # Who left at once may not have been heard, and a dead worker cannot write, be it that all was well just before.
    killed = [fault.began for fault in evidence.faults if fault.kind == KILL_WORKER]
    missing = [
        answer
        for answer in evidence.answers
        if answer.id not in lines and answer.outcome is not Outcome.LEFT and not evidence.died_with_worker(answer)
        if not any(0 <= at - answer.ended < _WRITTEN_SECONDS for at in killed)
    ]
    # Of refusals that come in a flood most lines are left out, and counted.
    refused = [answer for answer in missing if answer.status is not None and answer.status >= 400]
    if len(refused) <= evidence.suppressed_lines:
        missing = [answer for answer in missing if answer not in refused]
    return wrong + [
        f"{answer.id}: no access line, and the client got {answer.outcome} {answer.problem}".rstrip()
        for answer in missing
    ]


def right_answers(evidence: Evidence) -> list[str]:
    units = {answer.id: answer.units for answer in evidence.answers}
    decodes = [leg for leg in evidence.legs if leg.stage == "decode"]
    finished = Counter(leg.user for leg in decodes if leg.is_finished)
    # An answer that was moved or repeated may end where it was just then, as the network saw and the gateway did not.
    skew = _SKEW_SECONDS + evidence.lag_seconds
    moved = {line["id"] for line in evidence.ends if line["attempts"] > line["units"]}
    last = {leg.user: leg.sent for leg in sorted(decodes, key=lambda leg: leg.sent) if leg.user in moved}
    finished -= Counter(
        leg.user for leg in decodes if leg.is_finished and leg.sent < last.get(leg.user, 0.0) <= leg.ended + skew
    )
    # A whole answer is asked for again, once, if the engine's parser for streams has spoilt its tool calls.
    whole = {answer.id for answer in evidence.answers if not answer.stream}
    for line in evidence.ends:
        if line["id"] in whole and line["units"] == units[line["id"]] + 1:
            units[line["id"]] += 1
    wrong = [f"{a.id}: {a.problem}" for a in evidence.answers if a.outcome is Outcome.WRONG]
    return wrong + [
        f"{user}: {times} decodes succeeded for {units[user]} sequences"
        for user, times in finished.items()
        if user in units and times > units[user]
    ]


def done_means_success(evidence: Evidence) -> list[str]:
    terms = {line["id"]: (line["term"], line["code"]) for line in evidence.ends}
    return [
        f"{answer.id}: {'ends with' if answer.is_done else 'lacks'} [DONE], and the log says {terms[answer.id][0]}"
        for answer in evidence.answers
        if answer.stream and answer.status == 200 and answer.id in terms and answer.outcome is not Outcome.LEFT
        if answer.is_done != (terms[answer.id] == ("--", 200))
    ]


def same_codes(evidence: Evidence) -> list[str]:
    codes = {line["id"]: line["code"] for line in evidence.ends}
    wrong = [
        f"{answer.id}: the client got {answer.status}, and the log says {codes[answer.id]}"
        for answer in evidence.answers
        if answer.status is not None and answer.id in codes and codes[answer.id] != answer.status
    ]
    # A worker may die between counting and writing.
    slack = sum(fault.kind == KILL_WORKER for fault in evidence.faults) + evidence.suppressed_lines
    # Labels are named like the members of a line.
    for metric, *labels in (("pdproxy_requests_total", "api", "code"), ("pdproxy_request_end_total", "term")):
        counted = evidence.rest.by(metric, *labels)
        written = Counter(tuple(str(line[label]) for label in labels) for line in evidence.ends)
        wrong += [
            f"{metric}{value}: {counted.get(value, 0):.0f} counted, {written[value]} written"
            for value in {*counted, *written}
            if abs(counted.get(value, 0) - written[value]) > slack
        ]
    return wrong


def usage_when_asked(evidence: Evidence) -> list[str]:
    return [
        f"{answer.id}: {'has' if answer.has_usage else 'lacks'} usage"
        for answer in evidence.answers
        if answer.stream and answer.outcome is Outcome.COMPLETE and answer.has_usage != answer.asks_usage
    ]


def soon_well(evidence: Evidence) -> list[str]:
    clean = [answer for answer in evidence.answers if answer.is_clean and answer.outcome is Outcome.COMPLETE]
    usual = median([answer.ended - answer.began for answer in clean]) if clean else 0.0
    wrong = [f"{f.kind} {f.target}: not all instances came back" for f in evidence.faults if not f.is_healed]
    for fault in evidence.faults:
        until = fault.began + evidence.limits.health_seconds
        # Asked in that time, and not kept waiting.
        if not any(fault.began <= a.began <= until and a.ended <= until + usual + _LONGER_SECONDS for a in clean):
            wrong.append(f"{fault.kind} {fault.target}: nobody was served within a health interval of it")
    return wrong


# What the gateway holds: load, memory, file descriptors


def leases(evidence: Evidence) -> list[str]:
    wrong = []
    ended = evidence.rest.by("pdproxy_instance_requests_total", "role", "address")
    # A lease that was moved, or left before its leg was sent, ends without a leg. No leg comes without a lease, but one
    # may come twice if it went on a connection that turned out to be closed.
    sent = Counter((leg.stage, leg.instance) for leg in evidence.legs if leg.stage != "release" and leg.answered)
    if not any(fault.kind == KILL_WORKER for fault in evidence.faults):
        wrong += [
            f"{instance}: {legs} {role} legs were answered, and {ended.get((role, instance), 0):.0f} leases ended"
            for (role, instance), legs in sent.items()
            if ended.get((role, instance), 0) < legs
        ]
    return wrong + [
        f"{name}{dict(labels)} is {value}"
        for sample in evidence.samples
        for (name, labels), value in sample.metrics.items()
        if name in _LOADS and value < 0
    ]


def sums(evidence: Evidence) -> list[str]:
    wrong = []
    most_units = max((answer.units for answer in evidence.answers), default=1)
    for sample in evidence.samples:
        requests = sum(sample.total("pdproxy_inflight_requests", api=api) for api in ("chat", "completions"))
        decode, prefill = (sample.total("pdproxy_instance_inflight", role=role) for role in ("decode", "prefill"))
        if prefill > decode or decode > requests * most_units:
            wrong.append(f"{requests:.0f} requests have {prefill:.0f} prefillers and {decode:.0f} decoders")
    return wrong


def nothing_left(evidence: Evidence) -> list[str]:
    left = ("pdproxy_queued_requests", *_LOADS)
    wrong = [f"{n}{dict(labels)} is {v}" for (n, labels), v in evidence.rest.metrics.items() if n in left and v]
    for instance, state in evidence.engines.items():
        wrong += [f"{instance}: {name} is {state[name]}" for name in ("live", "running", "waiting") if state.get(name)]
    return wrong


def nothing_grows(evidence: Evidence) -> list[str]:
    base, rest = evidence.base, evidence.rest
    wrong = []
    if rest.fds > base.fds + _FDS_SLACK:
        wrong.append(f"{base.fds} file descriptors before, {rest.fds} after")
    # A worker that was killed took its memory with it, and the new one has not grown yet: the sum only seems to fall.
    if rest.rss_bytes > base.rss_bytes * (1 + _RSS_SHARE) + _RSS_SLACK_BYTES * evidence.limits.workers:
        wrong.append(f"{base.rss_bytes >> 20} MiB before, {rest.rss_bytes >> 20} MiB after")
    slope = _slope([(s.at - base.at, s.rss_bytes) for s in evidence.samples if s.at > base.at + _WARM_UP_SECONDS])
    if slope > _RSS_BYTES_PER_MINUTE:
        wrong.append(f"memory grows by {slope / 2**20:.1f} MiB a minute")
    return wrong


def _slope(points: list[tuple[float, float]]) -> float:
    """Growth per minute, by least squares; 0 if that is too short a time."""
    if len(points) < 2 or points[-1][0] - points[0][0] < _SLOPE_SECONDS:
        return 0.0
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = math.fsum((x - mean_x) ** 2 for x, _ in points)
    return 60.0 * math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / spread


# What was sent to the engines: when, how often, and with whose bytes


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


# All of them


@dataclass(frozen=True, slots=True)
class Invariant:
    """One of them. `name` is the one of the design paper."""

    name: str
    title: str
    how: str
    judge: Judge
    of_one_worker: bool = False
    """It cannot be judged if there are several."""


INVARIANTS = (
    Invariant(
        "I1",
        "one end of every request",
        "One access line for each id that clients sent, and none for others. Who left may have none (it need not have "
        "been heard), nor may whose worker was killed, nor those refused in a flood, as far as they were counted.",
        one_end,
    ),
    Invariant(
        "I2",
        "what is reserved is released",
        "No load and no number of requests is below zero at any sample, and of each instance at least as many leases "
        "ended as legs were answered. A lease released twice that another one hides would show in the end, in I4.",
        leases,
    ),
    Invariant(
        "I3",
        "loads add up",
        "At every sample: prefillers in use <= decoders in use (a decoder is reserved first) <= requests x sequences. "
        "Equality holds only at the end, since a request that waits or is parsed has no instance; see I4. With one "
        "worker: others go on while one reads all their rows.",
        sums,
        of_one_worker=True,
    ),
    Invariant(
        "I4",
        "nothing is left",
        "After the last request every load, request and queue in /metrics is exactly 0, and so are the requests of the "
        "engines by /_mock/state.",
        nothing_left,
    ),
    Invariant(
        "I5",
        "the right answer, once",
        "Every complete answer says what an engine alone says: text, reasoning, tool calls, token ids, finish, usage. "
        "On the network no more decodes are whole and finished than the request has sequences, but where one was moved "
        "as it ended.",
        right_answers,
    ),
    Invariant(
        "I6",
        "[DONE] means success",
        "A stream ends with [DONE] exactly if its access line says `--` and 200.",
        done_means_success,
    ),
    Invariant(
        "I7",
        "status, log and metrics agree",
        "The client's status is the log's; requests_total and request_end_total are the numbers of lines with these "
        "codes and terms, less one for each killed worker, and what was left out in floods.",
        same_codes,
    ),
    Invariant(
        "I8",
        "nothing after the end",
        "No leg is sent 0.5 s or more after its request's access line. Less is not seen, nor what may be explained by "
        "the lag of the processes that note it.",
        nothing_after_the_end,
    ),
    Invariant(
        "I9",
        "only to those who are there",
        "No leg goes to an instance that had been removed, or was down by the log, when its attempt began and when it "
        "was sent, by 0.5 s and that lag, or more. The log's part with one worker: lines do not say whose they are.",
        only_who_is_there,
    ),
    Invariant(
        "I10",
        "attempts are bounded",
        "The line's attempts, against max_attempts and resume.max_attempts; the legs on the network, against the line; "
        "and, with one worker, the prefills that run a second time at once, against the budget.",
        bounded_attempts,
    ),
    Invariant(
        "I11",
        "KV is fetched in time",
        "From the end of the prefill leg to the headers of a streamed decode leg, or to the sending of another one: at "
        "most handoff_seconds.",
        handed_over_in_time,
    ),
    Invariant(
        "I12",
        "engines get the client's bytes",
        "Members of the body, against those the client sent, digit by digit and in their order; only those the gateway "
        "is known to change may be different. White space and escapes are not looked at.",
        clients_bytes,
    ),
    Invariant(
        "I13",
        "usage for those who ask",
        "Of complete streams: usage exactly if it was asked for.",
        usage_when_asked,
    ),
    Invariant(
        "I14",
        "well again at once",
        "Of each fault: a clean request sent within a health interval of it is answered, a second later than usual at "
        "most, and all instances are up again soon after it is over.",
        soon_well,
    ),
    Invariant(
        "I15",
        "nothing grows",
        "Memory and file descriptors of all processes of the gateway in quiet, before and after; in runs of more than "
        "12 minutes also the slope of memory. Tasks are not seen from outside; the tests look at them.",
        nothing_grows,
    ),
)


def judged(evidence: Evidence) -> Verdicts:
    """All of them."""
    is_one = evidence.limits.workers == 1
    return {one: one.judge(evidence) if is_one or not one.of_one_worker else None for one in INVARIANTS}
