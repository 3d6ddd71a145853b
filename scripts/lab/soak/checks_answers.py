"""What clients got, and what was written down of it."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from lab.soak.evidence import KILL_WORKER, Outcome

if TYPE_CHECKING:
    from lab.soak.evidence import Evidence

# A clean request takes as long as most do, and at most so much longer.
_LONGER_SECONDS = 1.0
_SKEW_SECONDS = 0.5
# Lines are written many at a time, so long after the end of a request at most.
_WRITTEN_SECONDS = 0.1


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
