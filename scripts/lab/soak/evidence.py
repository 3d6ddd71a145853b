"""Everything that was noted during a soak, as values. Times are seconds of the wall clock, which all processes have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import Any

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and its labels, sorted."""

KILL_WORKER = "kill worker"
"""The fault that the gateway itself suffers."""


class Outcome(StrEnum):
    """What a client got."""

    COMPLETE = "complete"  # the right answer
    REFUSED = "refused"  # the status that its mistake deserves
    LEFT = "left"  # the client did not want more
    WRONG = "wrong"  # an answer that looks complete and is not right
    ERROR = "error"  # a status or an event that says that it failed
    CUT = "cut"  # the connection ended before the answer did
    SILENT = "silent"  # nothing for a minute

    @property
    def is_failure(self) -> bool:
        return self not in (Outcome.COMPLETE, Outcome.REFUSED, Outcome.LEFT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request as its client saw it."""

    id: str
    began: float
    ended: float
    api: str
    stream: bool
    units: int
    """Sequences it asks for."""
    asks_usage: bool
    is_clean: bool
    """One of those that are asked all the time, to see whether the gateway serves."""
    status: int | None
    """None: there was no status line."""
    outcome: Outcome
    problem: str
    is_done: bool
    """The last thing it said was `[DONE]`."""
    has_usage: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One generation request to an engine, as it passed on the network."""

    instance: str
    stage: str
    """`prefill`, `decode`, or `release` of KV that nobody fetches."""
    user: str
    """Whose request it is; empty for releases."""
    attempt: str
    """The id under which the gateway sent it: the same for both legs of an attempt."""
    sent: float
    answered: float | None
    """When the first byte of the answer came."""
    ended: float
    """When the answer was whole, or the connection was gone."""
    status: int | None
    is_whole: bool
    is_finished: bool
    """It is whole, and has a finish reason that is one."""
    stream: bool
    edited: tuple[str, ...]
    """Members of the body that are not the client's, byte for byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that was done to one backend, or to a worker."""

    kind: str
    target: str
    began: float
    ended: float
    """When all was well again, as far as the gateway says."""
    is_healed: bool
    """It was, in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """An instance that was not to get new requests, because it was removed, or because the log said that it is down."""

    instance: str
    began: float
    ended: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the gateways' metrics and the kernel said at one moment."""

    at: float
    metrics: Mapping[Series, float]
    rss_bytes: int = 0
    fds: int = 0

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric over the series that have these labels."""
        wanted = set(labels.items())
        return sum(value for (n, found), value in self.metrics.items() if n == name and wanted <= set(found))

    def most(self, name: str) -> float:
        """The largest value of a metric."""
        return max((value for (n, _), value in self.metrics.items() if n == name), default=0.0)

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """A metric's values, those that are not zero, by the values of these labels."""
        values: dict[tuple[str, ...], float] = {}
        for (n, found), value in self.metrics.items():
            if n == name and value:
                key = tuple(dict(found)[label] for label in labels)
                values[key] = values.get(key, 0.0) + value
        return values


def together(samples: Sequence[Sample]) -> Sample:
    """Of several gateways, whose metrics have labels that tell them apart."""
    return Sample(
        at=min(sample.at for sample in samples),
        metrics={series: value for sample in samples for series, value in sample.metrics.items()},
        rss_bytes=sum(sample.rss_bytes for sample in samples),
        fds=sum(sample.fds for sample in samples),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The gateways' settings that the judge needs."""

    workers: int = 1
    """Of all gateways together."""
    max_attempts: int = 3
    max_resumes: int = 3
    budget_share: float = 0.2
    budget_least: int = 3
    handoff_seconds: float = 60.0
    health_seconds: float = 5.0

    def of_workers(self, workers: int) -> Limits:
        return replace(self, workers=workers)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All of it. `base` and `rest` are samples in quiet: before the first fault, and after the last request."""

    limits: Limits
    answers: list[Answer]
    lines: list[dict[str, Any]]
    """The gateways' logs."""
    legs: list[Leg]
    faults: list[Fault]
    absences: list[Absence]
    samples: list[Sample]
    base: Sample
    rest: Sample
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each engine said of itself in the end, by instance."""
    judges_lag_seconds: float = 0.0
    """How late the process was at worst that saw the legs."""

    @cached_property
    def ends(self) -> list[dict[str, Any]]:
        """The access lines of requests. One without an id only says how many were left out in a flood of refusals."""
        return [line for line in self.lines if line.get("logger") == "proxy.access" and "id" in line]

    @property
    def suppressed_lines(self) -> int:
        """Lines that the gateways have left out of their logs, because too many of a kind came at once."""
        return round(self.rest.total("pdproxy_log_lines_suppressed_total"))

    @property
    def lag_seconds(self) -> float:
        """By how much what was seen may have been noted late, on both sides together."""
        gateways = max((sample.most("pdproxy_loop_lag_seconds") for sample in self.samples), default=0.0)
        return self.judges_lag_seconds + gateways

    @cached_property
    def failures(self) -> list[Answer]:
        """What clients can complain of, without what died with its worker."""
        return [answer for answer in self.answers if answer.outcome.is_failure and not self.died_with_worker(answer)]

    def died_with_worker(self, answer: Answer) -> bool:
        """Whether it was cut, and has no end in the log, when a worker was killed: nobody could do anything for it."""
        kills = [fault for fault in self.faults if fault.kind == KILL_WORKER]
        was_under_way = any(answer.began <= fault.began + 0.5 and fault.began <= answer.ended for fault in kills)
        return was_under_way and answer.id not in self.ended_ids

    @cached_property
    def ended_ids(self) -> frozenset[str]:
        return frozenset(line["id"] for line in self.ends)

    def during(self, at: float) -> str:
        """The fault that was going on, or had just been; empty if there was none."""
        names = [f"{fault.kind} {fault.target}" for fault in self.faults if fault.began <= at <= fault.ended + 1.0]
        return ", ".join(names)


def log_lines(text: str) -> list[dict[str, Any]]:
    """The gateway's JSON log, with `at` for the time. A line that is no JSON is one with the message alone."""
    lines = []
    for raw in text.splitlines():
        try:
            line = json.loads(raw)
            line["at"] = datetime.fromisoformat(line["time"]).timestamp()
        except (ValueError, KeyError, TypeError):
            line = {"message": raw, "logger": "", "level": "ERROR", "at": 0.0}
        lines.append(line)
    return lines


def absences(lines: Iterable[dict[str, Any]], until: float) -> list[Absence]:
    """When instances were down, according to the log of one worker."""
    down: dict[str, tuple[float, str]] = {}
    found = []
    for line in lines:
        words = str(line.get("message", "")).split(" ")
        if len(words) < 5 or words[1] != "instance" or words[3] != "is":
            continue
        instance, state = words[2], words[4].rstrip(":,")
        if state == "down":
            down.setdefault(instance, (line["at"], line["message"]))
        elif state in ("up", "removed") and instance in down:
            began, why = down.pop(instance)
            found.append(Absence(instance=instance, began=began, ended=line["at"], why=why))
    rest = [Absence(instance=name, began=began, ended=until, why=why) for name, (began, why) in down.items()]
    return found + rest
