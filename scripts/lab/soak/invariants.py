"""Rules that must hold during all faults. `how` describes how each is judged, and what is not detected.

Each judge is a pure function of the evidence, and returns a text for each violation.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from lab.soak.evidence import KILL_WORKER, Absence, Answer, Evidence, Leg, Outcome

Judge = Callable[[Evidence], list[str]]
Verdicts = Mapping["Invariant", list[str] | None]
"""Violations by invariant. None: not judged."""

# A clean request may take this much longer than the median.
_LONGER_SECONDS = 1.0
# Log lines are written in batches, at most this long after the end of a request.
_WRITTEN_SECONDS = 0.1
_LOADS = ("pdproxy_instance_inflight", "pdproxy_instance_load_tokens", "pdproxy_inflight_requests")
_FDS_SLACK = 8
# Memory that each worker takes once, at its first requests and errors.
_RSS_SLACK_BYTES = 16 * 1024 * 1024
_RSS_SHARE = 0.05
_RSS_BYTES_PER_MINUTE = 1024 * 1024
_WARM_UP_SECONDS = 120.0
# A slope needs at least this much time.
_SLOPE_SECONDS = 600.0
# Processes record events with a delay. Events of different processes are in order only if more than this time, plus the
# measured delay, is between them.
_SKEW_SECONDS = 0.5
# The budget shrinks when requests end, while repeats continue. So the requests of the last seconds count.
_BUDGET_SECONDS = 2.0
_BUDGET_SLACK = 2

# Members that the gateway changes in the body of a leg: always, for several sequences, and for resumed answers.
_EDITS_PREFILL = {
    *("kv_transfer_params", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens"),
    *("logprobs", "top_logprobs", "return_token_ids", "tool_choice"),
}
_EDITS_DECODE = {"kv_transfer_params", "stream", "stream_options", "return_token_ids"}
_EDITS_SPLIT = {"n", "best_of", "prompt", "seed"}
_EDITS_RESUMED = {
    *("max_tokens", "max_completion_tokens", "min_tokens", "seed", "prompt"),
    # For a chat that is resumed as a completion.
    *("messages", "tools", "tool_choice", "chat_template_kwargs", "logprobs", "top_logprobs"),
    *("add_special_tokens", "skip_special_tokens", "spaces_between_special_tokens"),
}


# Clients and their log lines


def one_end(evidence: Evidence) -> list[str]:
    lines = Counter(line["id"] for line in evidence.ends)
    asked = {answer.id: answer for answer in evidence.answers}
    wrong = [f"{name}: {times} access lines" for name, times in lines.items() if times > 1]
    wrong += [f"{name}: an access line without a client's request" for name in lines if name not in asked]
    # A client that disconnected at once may be unknown to the gateway, and a killed worker writes no line.
    killed = [fault.began for fault in evidence.faults if fault.kind == KILL_WORKER]
    missing = [
        answer
        for answer in evidence.answers
        if answer.id not in lines and answer.outcome is not Outcome.LEFT and not evidence.died_with_worker(answer)
        if not any(0 <= at - answer.ended < _WRITTEN_SECONDS for at in killed)
    ]
    # Lines of rejections in a flood are suppressed, and counted.
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
    # An answer that was resumed may have ended on the network before the gateway noticed.
    skew = _SKEW_SECONDS + evidence.lag_seconds
    moved = {line["id"] for line in evidence.ends if line["attempts"] > line["units"]}
    last = {leg.user: leg.sent for leg in sorted(decodes, key=lambda leg: leg.sent) if leg.user in moved}
    finished -= Counter(
        leg.user for leg in decodes if leg.is_finished and leg.sent < last.get(leg.user, 0.0) <= leg.ended + skew
    )
    # A whole answer is requested again, once, if the engine's parser for streams spoils its tool calls.
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
    # A worker may be killed between counting and logging.
    slack = sum(fault.kind == KILL_WORKER for fault in evidence.faults) + evidence.suppressed_lines
    # Labels have the names of log fields.
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


def recovery(evidence: Evidence) -> list[str]:
    clean = [answer for answer in evidence.answers if answer.is_clean and answer.outcome is Outcome.COMPLETE]
    usual = median([answer.ended - answer.began for answer in clean]) if clean else 0.0
    wrong = [f"{f.kind} {f.target}: not all instances came back" for f in evidence.faults if not f.is_healed]
    for fault in evidence.faults:
        until = fault.began + evidence.limits.health_seconds + evidence.lag_seconds
        # Sent in that time, and answered without a long wait. A busy machine sends late.
        if not any(fault.began <= a.began <= until and a.ended <= until + usual + _LONGER_SECONDS for a in clean):
            wrong.append(f"{fault.kind} {fault.target}: no clean request was served within a health interval")
    return wrong


# Resources of the gateway: load, memory, file descriptors


def leases(evidence: Evidence) -> list[str]:
    wrong = []
    ended = evidence.rest.by("pdproxy_instance_requests_total", "role", "address")
    # A lease that was resumed, or left before its leg was sent, ends without a leg. Each leg has a lease, but a leg is
    # sent twice if its connection turns out to be closed.
    sent = Counter((leg.stage, leg.instance) for leg in evidence.legs if leg.stage != "release" and leg.answered)
    # The metrics leave out the counts of a role that an instance has had earlier.
    present = {instance for _, instance in ended}
    moved = {(role, instance) for role, instance in sent if instance in present} - ended.keys()
    if not any(fault.kind == KILL_WORKER for fault in evidence.faults):
        wrong += [
            f"{instance}: {legs} {role} legs were answered, and {ended.get((role, instance), 0):.0f} leases ended"
            for (role, instance), legs in sent.items()
            if ended.get((role, instance), 0) < legs and (role, instance) not in moved
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
    # A killed worker frees its memory, and its successor has not grown yet, so the sum may fall.
    if rest.rss_bytes > base.rss_bytes * (1 + _RSS_SHARE) + _RSS_SLACK_BYTES * evidence.limits.workers:
        wrong.append(f"{base.rss_bytes >> 20} MiB before, {rest.rss_bytes >> 20} MiB after")
    slope = _slope([(s.at - base.at, s.rss_bytes) for s in evidence.samples if s.at > base.at + _WARM_UP_SECONDS])
    if slope > _RSS_BYTES_PER_MINUTE:
        wrong.append(f"memory grows by {slope / 2**20:.1f} MiB a minute")
    return wrong


def _slope(points: list[tuple[float, float]]) -> float:
    """Return the growth per minute, by least squares, or 0 if the time is too short."""
    if len(points) < 2 or points[-1][0] - points[0][0] < _SLOPE_SECONDS:
        return 0.0
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = math.fsum((x - mean_x) ** 2 for x, _ in points)
    return 60.0 * math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / spread


# Requests to the engines


def nothing_after_the_end(evidence: Evidence) -> list[str]:
    ends = {line["id"]: line["at"] for line in evidence.ends}
    skew = _SKEW_SECONDS + evidence.lag_seconds
    return [
        f"{leg.user}: a {leg.stage} leg was sent {leg.sent - ends[leg.user]:.3f} s after its end"
        for leg in evidence.legs
        if leg.user in ends and leg.sent > ends[leg.user] + skew
    ]


def only_present_instances(evidence: Evidence) -> list[str]:
    absences: dict[str, list[Absence]] = defaultdict(list)
    for absence in evidence.absences:
        absences[absence.instance].append(absence)
    # An attempt selects both backends at its start, just before its prefill leg is sent.
    chosen: dict[str, float] = {}
    for leg in evidence.legs:
        if leg.stage == "prefill":
            chosen[leg.attempt] = min(leg.sent, chosen.get(leg.attempt, leg.sent))
    skew = _SKEW_SECONDS + evidence.lag_seconds
    wrong = []
    for leg in evidence.legs:
        times = (leg.sent, chosen.get(leg.attempt, leg.sent))
        for absence in absences[leg.instance]:
            is_during = all(absence.began + skew < at < absence.ended - skew for at in times)
            if is_during and leg.stage != "release" and absence.stage in (None, leg.stage):
                after = f"{leg.sent - absence.began:.3f} s after {leg.instance} {absence.why}"
                wrong.append(f"{leg.user}: a {leg.stage} leg {after}")
    return wrong


def bounded_attempts(evidence: Evidence) -> list[str]:
    limits = evidence.limits
    prefills = Counter(leg.user for leg in evidence.legs if leg.stage == "prefill")
    wrong = []
    for line in evidence.ends:
        # Each incident resets the count of failures, and each attempt may ask a prefiller twice for its KV.
        per_answer = 2 * limits.max_attempts - 1
        most = max(1, line["units"]) * (1 + limits.max_resumes) * per_answer
        if line["attempts"] > most:
            wrong.append(f"{line['id']}: {line['attempts']} attempts, {most} are allowed")
        if prefills[line["id"]] > 2 * line["attempts"]:
            wrong.append(f"{line['id']}: {prefills[line['id']]} prefill legs in {line['attempts']} attempts")
    if limits.workers > 1:
        return wrong  # each worker has a budget, and the sender of a leg is unknown
    return wrong + _beyond_budget(evidence)


def _beyond_budget(evidence: Evidence) -> list[str]:
    """Return violations of the retry budget: requests being repeated, relative to all in flight."""
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
    """Yield prefill legs of repeated attempts, for requests of one sequence."""
    single = {answer.id for answer in evidence.answers if answer.units == 1}
    users: set[str] = set()
    for leg in sorted(evidence.legs, key=lambda leg: leg.sent):
        if leg.stage == "prefill" and leg.user in single:
            if leg.user in users:
                yield leg
            users.add(leg.user)


def handed_over_in_time(evidence: Evidence) -> list[str]:
    prefilled = {leg.attempt: leg.ended for leg in evidence.legs if leg.stage == "prefill" and leg.is_whole}
    deadline = evidence.limits.handoff_seconds + _SKEW_SECONDS + evidence.lag_seconds
    wrong = []
    for leg in evidence.legs:
        if leg.stage == "decode" and leg.attempt in prefilled:
            # Engines begin an answer without a stream when it is complete.
            until = (leg.answered or leg.ended) if leg.stream else leg.sent
            waited = until - prefilled[leg.attempt]
            if waited > deadline:
                wrong.append(f"{leg.user}: {waited:.1f} s from the prefill to the decoder's answer")
    return wrong


def unchanged_bytes(evidence: Evidence) -> list[str]:
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
    """An invariant. `name` is its short name in reports."""

    name: str
    title: str
    how: str
    judge: Judge
    of_one_worker: bool = False
    """Not judged with several workers."""


INVARIANTS = (
    Invariant(
        "I1",
        "one end of every request",
        "Each id that clients sent has one access line, and no other id has one. Exceptions: clients that disconnected "
        "at once, requests of killed workers, and suppressed rejections, as far as they were counted.",
        one_end,
    ),
    Invariant(
        "I2",
        "reservations are released",
        "No load or number of requests is negative in any sample, and each instance has at least as many ended leases "
        "as answered legs. I4 detects a double release that another lease hides.",
        leases,
    ),
    Invariant(
        "I3",
        "loads add up",
        "In each sample: prefillers in use <= decoders in use (a decoder is reserved first) <= requests x sequences. "
        "Equality holds only at the end, because queued requests have no instance; see I4. Judged with one worker, "
        "because others continue while one reads all rows.",
        sums,
        of_one_worker=True,
    ),
    Invariant(
        "I4",
        "nothing is left",
        "After the last request every load, request and queue in /metrics is 0, and so are the requests of engines in "
        "/_mock/state.",
        nothing_left,
    ),
    Invariant(
        "I5",
        "the right answer, once",
        "Every complete answer equals that of a single engine: text, reasoning, tool calls, token ids, finish, usage. "
        "The network carries no more finished decodes than the request has sequences, except at the moment of a "
        "resume.",
        right_answers,
    ),
    Invariant(
        "I6",
        "[DONE] means success",
        "A stream ends with [DONE] exactly if its access line has `--` and 200.",
        done_means_success,
    ),
    Invariant(
        "I7",
        "status, log and metrics agree",
        "The client's status is the log's. requests_total and request_end_total equal the numbers of lines with these "
        "codes and terms, up to one for each killed worker and each suppressed line.",
        same_codes,
    ),
    Invariant(
        "I8",
        "nothing after the end",
        "No leg is sent more than 0.5 s, plus the delay of records, after the access line of its request.",
        nothing_after_the_end,
    ),
    Invariant(
        "I9",
        "only present instances",
        "No leg goes to an instance that was removed or logged as down, at the start of its attempt and at its "
        "sending, by more than 0.5 s plus the delay of records. The log counts only with one worker.",
        only_present_instances,
    ),
    Invariant(
        "I10",
        "attempts are bounded",
        "Attempts of the access line are within max_attempts and resume.max_attempts, legs on the network within the "
        "line, and, with one worker, concurrent repeated prefills within the retry budget.",
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
        "Members of the body equal the client's, digit by digit and in order, except those that the gateway changes. "
        "White space and escapes are ignored.",
        unchanged_bytes,
    ),
    Invariant(
        "I13",
        "usage on request",
        "A complete stream has usage exactly if the client requested it.",
        usage_when_asked,
    ),
    Invariant(
        "I14",
        "prompt recovery",
        "A clean request within a health interval of each fault is answered, at most a second later than usual, and "
        "all instances are up again soon after its end.",
        recovery,
    ),
    Invariant(
        "I15",
        "nothing grows",
        "Memory and file descriptors of all processes of the gateway are the same before and after, without load. In "
        "runs of more than 12 minutes the slope of memory counts, too. Tasks are judged by tests.",
        nothing_grows,
    ),
)


def judged(evidence: Evidence) -> Verdicts:
    """Judge all invariants."""
    is_one = evidence.limits.workers == 1
    return {one: one.judge(evidence) if is_one or not one.of_one_worker else None for one in INVARIANTS}


_SHOWN = 3


def table(evidence: Evidence, verdicts: Verdicts) -> str:
    """Return all results in two columns."""
    outcomes = Counter(answer.outcome for answer in evidence.answers)
    faults = Counter(fault.kind for fault in evidence.faults)
    rest, base = evidence.rest, evidence.base
    died = sum(a.outcome.is_failure and evidence.died_with_worker(a) for a in evidence.answers)
    lines = [
        ("requests", f"{len(evidence.answers)}, of them {sum(a.stream for a in evidence.answers)} streams"),
        *((f"  {outcome}", str(outcomes[outcome])) for outcome in Outcome if outcomes[outcome]),
        *([("  cut with a killed worker", str(died))] if died else []),
        ("faults", str(len(evidence.faults))),
        *((f"  {kind}", str(times)) for kind, times in sorted(faults.items())),
        ("client-visible failures", str(len(evidence.failures))),
        *((f"  {cause}", str(times)) for cause, times in causes(evidence.failures)),
        ("retries", _by(rest.by("pdproxy_retries_total", "stage", "reason"))),
        ("retry budget exhausted", f"{rest.total('pdproxy_retry_budget_exhausted_total'):.0f}"),
        ("resumes", _by(rest.by("pdproxy_resumes_total", "cause", "action"))),
        ("resumes that failed", _by(rest.by("pdproxy_resume_failures_total", "cause"))),
        ("ejections", _by(rest.by("pdproxy_instance_ejected_total", "role", "reason"))),
        ("memory, MiB", f"{base.rss_bytes / 2**20:.1f} before, {rest.rss_bytes / 2**20:.1f} after"),
        ("file descriptors", f"{base.fds} before, {rest.fds} after"),
        ("lag, seconds at worst", f"{evidence.lag_seconds:.2f}"),
        *((f"{invariant.name} {invariant.title}", _verdict(wrong)) for invariant, wrong in verdicts.items()),
    ]
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label.ljust(width)}  {text}" for label, text in lines)


def causes(failures: Iterable[Answer]) -> list[tuple[str, int]]:
    """Count failures of clients by cause, the most frequent first."""
    return Counter(f"{answer.outcome}: {answer.problem}" for answer in failures).most_common()


def details(evidence: Evidence, verdicts: Verdicts) -> str:
    """Return details for debugging: the first failures of each kind with access lines, and violations."""
    ends = {line["id"]: line for line in evidence.ends}
    lines = []
    shown: Counter[tuple[str, str]] = Counter()
    for answer in evidence.failures:
        shown[answer.outcome, answer.problem] += 1
        if shown[answer.outcome, answer.problem] > _SHOWN:
            continue
        end = {
            name: value for name, value in ends.get(answer.id, {}).items() if name not in ("time", "level", "logger")
        }
        fault = evidence.during(answer.ended) or evidence.during(answer.began) or "no fault"
        lines.append(f"{answer.id} during {fault}: {answer.outcome} {answer.problem}\n    {end or 'no access line'}")
    for invariant, wrong in ((invariant, wrong) for invariant, wrong in verdicts.items() if wrong):
        lines += [f"{invariant.name} {text}" for text in wrong[:_SHOWN]]
        lines += [f"{invariant.name} … and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
    return "\n".join(lines)


def _verdict(wrong: list[str] | None) -> str:
    if wrong is None:
        return "not judged with several workers"
    return f"VIOLATED {len(wrong)} times" if wrong else "ok"


def _by(values: Mapping[tuple[str, ...], float]) -> str:
    """Return the sum of values and its parts, as in `12 (reset 10, timeout 2)`."""
    parts = ", ".join(f"{' '.join(key)} {value:.0f}" for key, value in sorted(values.items()))
    return f"{sum(values.values()):.0f}" + (f" ({parts})" if parts else "")
