"""What must hold, whatever goes wrong. `how` says by what it is judged, and what would not be seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.soak import checks_answers, checks_load, checks_order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lab.soak.evidence import Evidence

    Judge = Callable[[Evidence], list[str]]
    """What is wrong, a text for each case. Pure."""
    Verdicts = Mapping["Invariant", list[str] | None]
    """None: it was not judged."""


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
        checks_answers.one_end,
    ),
    Invariant(
        "I2",
        "what is reserved is released",
        "No load and no number of requests is below zero at any sample, and of each instance at least as many leases "
        "ended as legs were answered. A lease released twice that another one hides would show in the end, in I4.",
        checks_load.leases,
    ),
    Invariant(
        "I3",
        "loads add up",
        "At every sample: prefillers in use <= decoders in use (a decoder is reserved first) <= requests x sequences. "
        "Equality holds only at the end, since a request that waits or is parsed has no instance; see I4. With one "
        "worker: others go on while one reads all their rows.",
        checks_load.sums,
        of_one_worker=True,
    ),
    Invariant(
        "I4",
        "nothing is left",
        "After the last request every load, request and queue in /metrics is exactly 0, and so are the requests of the "
        "engines by /_mock/state.",
        checks_load.nothing_left,
    ),
    Invariant(
        "I5",
        "the right answer, once",
        "Every complete answer says what an engine alone says: text, reasoning, tool calls, token ids, finish, usage. "
        "On the network no more decodes are whole and finished than the request has sequences, but where one was moved "
        "as it ended.",
        checks_answers.right_answers,
    ),
    Invariant(
        "I6",
        "[DONE] means success",
        "A stream ends with [DONE] exactly if its access line says `--` and 200.",
        checks_answers.done_means_success,
    ),
    Invariant(
        "I7",
        "status, log and metrics agree",
        "The client's status is the log's; requests_total and request_end_total are the numbers of lines with these "
        "codes and terms, less one for each killed worker, and what was left out in floods.",
        checks_answers.same_codes,
    ),
    Invariant(
        "I8",
        "nothing after the end",
        "No leg is sent 0.5 s or more after its request's access line. Less is not seen, nor what may be explained by "
        "the lag of the processes that note it.",
        checks_order.nothing_after_the_end,
    ),
    Invariant(
        "I9",
        "only to those who are there",
        "No leg goes to an instance that had been removed, or was down by the log, when its attempt began and when it "
        "was sent, by 0.5 s and that lag, or more. The log's part with one worker: lines do not say whose they are.",
        checks_order.only_who_is_there,
    ),
    Invariant(
        "I10",
        "attempts are bounded",
        "The line's attempts, against max_attempts and resume.max_attempts; the legs on the network, against the line; "
        "and, with one worker, the prefills that run a second time at once, against the budget.",
        checks_order.bounded_attempts,
    ),
    Invariant(
        "I11",
        "KV is fetched in time",
        "From the end of the prefill leg to the headers of a streamed decode leg, or to the sending of another one: at "
        "most handoff_seconds.",
        checks_order.handed_over_in_time,
    ),
    Invariant(
        "I12",
        "engines get the client's bytes",
        "Members of the body, against those the client sent, digit by digit and in their order; only those the gateway "
        "is known to change may be different. White space and escapes are not looked at.",
        checks_order.clients_bytes,
    ),
    Invariant(
        "I13",
        "usage for those who ask",
        "Of complete streams: usage exactly if it was asked for.",
        checks_answers.usage_when_asked,
    ),
    Invariant(
        "I14",
        "well again at once",
        "Of each fault: a clean request sent within a health interval of it is answered, a second later than usual at "
        "most, and all instances are up again soon after it is over.",
        checks_answers.soon_well,
    ),
    Invariant(
        "I15",
        "nothing grows",
        "Memory and file descriptors of all processes of the gateway in quiet, before and after; in runs of more than "
        "12 minutes also the slope of memory. Tasks are not seen from outside; the tests look at them.",
        checks_load.nothing_grows,
    ),
)


def judged(evidence: Evidence) -> Verdicts:
    """All of them."""
    is_one = evidence.limits.workers == 1
    return {one: one.judge(evidence) if is_one or not one.of_one_worker else None for one in INVARIANTS}
