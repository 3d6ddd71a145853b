"""All records of a soak, as values. Times are seconds of the wall clock, which all processes share."""

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
"""Kind of the fault that kills a worker of the gateway."""
# Faults that end an engine, or all connections to it.
_ENDING = ("kill", "partition")
# The gateway stops a request after this number of engines has gone down while serving it.
_MAX_LOST_ENGINES = 2


class Outcome(StrEnum):
    """The outcome of a request for its client."""

    COMPLETE = "complete"  # the expected answer
    REFUSED = "refused"  # the error status that its mistake requires
    LEFT = "left"  # the client disconnected on purpose
    WRONG = "wrong"  # a complete answer with other content
    ERROR = "error"  # an error status or error event
    CUT = "cut"  # the connection ended before the answer did
    SILENT = "silent"  # no data for a minute

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
    """Number of sequences to generate."""
    asks_usage: bool
    is_clean: bool
    """A regular short request that checks that the gateway serves."""
    status: int | None
    """None without a status line."""
    outcome: Outcome
    problem: str
    is_done: bool
    """The stream ended with `[DONE]`."""
    has_usage: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One generation request to an engine, as recorded on the network."""

    instance: str
    stage: str
    """`prefill`, `decode`, or `release` of orphaned KV."""
    user: str
    """Id of the client's request. Empty for releases."""
    attempt: str
    """The gateway's id of the attempt, the same for both legs."""
    sent: float
    answered: float | None
    """Time of the first byte of the answer, or None."""
    ended: float
    """Time of the end of the answer or connection."""
    status: int | None
    is_whole: bool
    is_finished: bool
    """The answer is whole and has a valid finish reason."""
    stream: bool
    edited: tuple[str, ...]
    """Members of the body that differ from the client's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of one backend or worker."""

    kind: str
    target: str
    began: float
    ended: float
    """Time at which the gateways reported full health."""
    is_healed: bool
    """Whether full health was reported in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A period in which an instance must get no requests, because it was removed, logged as down, or has moved."""

    instance: str
    began: float
    ended: float
    why: str
    stage: str | None = None
    """The stage whose legs it must not get. None: of both stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Metrics of the gateways, and their memory and file descriptors, at one moment."""

    at: float
    metrics: Mapping[Series, float]
    rss_bytes: int = 0
    fds: int = 0

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over the series with these labels."""
        wanted = set(labels.items())
        return sum(value for (n, found), value in self.metrics.items() if n == name and wanted <= set(found))

    def most(self, name: str) -> float:
        """Return the largest value of a metric."""
        return max((value for (n, _), value in self.metrics.items() if n == name), default=0.0)

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the nonzero values of a metric by the values of these labels."""
        values: dict[tuple[str, ...], float] = {}
        for (n, found), value in self.metrics.items():
            if n == name and value:
                key = tuple(dict(found)[label] for label in labels)
                values[key] = values.get(key, 0.0) + value
        return values


def combined(samples: Sequence[Sample]) -> Sample:
    """Combine samples of several gateways, whose series differ by a label."""
    return Sample(
        at=min(sample.at for sample in samples),
        metrics={series: value for sample in samples for series, value in sample.metrics.items()},
        rss_bytes=sum(sample.rss_bytes for sample in samples),
        fds=sum(sample.fds for sample in samples),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The settings of the gateways that the judge needs."""

    workers: int = 1
    """Total number of workers of all gateways."""
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
    """All records. `base` and `rest` are samples without load: before the first fault, and after the last request."""

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
    """Final state that each engine reported, by instance."""
    judges_lag_seconds: float = 0.0
    """Maximum delay of the process that recorded the legs."""

    @cached_property
    def ends(self) -> list[dict[str, Any]]:
        """Access log lines of requests. Lines without an id only count suppressed rejections."""
        return [line for line in self.lines if line.get("logger") == "proxy.access" and "id" in line]

    @property
    def suppressed_lines(self) -> int:
        """Number of log lines that the gateways suppressed in floods."""
        return round(self.rest.total("pdproxy_log_lines_suppressed_total"))

    @property
    def lag_seconds(self) -> float:
        """Maximum delay of records, of this process and the gateways together."""
        gateways = max((sample.most("pdproxy_loop_lag_seconds") for sample in self.samples), default=0.0)
        return self.judges_lag_seconds + gateways

    @cached_property
    def failures(self) -> list[Answer]:
        """Failed answers, except those that died with their worker, or became suspect because of two faults."""
        return [
            answer
            for answer in self.answers
            if answer.outcome.is_failure and not self.died_with_worker(answer) and not self.is_suspect_by_faults(answer)
        ]

    def is_suspect_by_faults(self, answer: Answer) -> bool:
        """Return whether an answer was stopped as suspect, and faults had ended two of its engines.

        The access log says so. A client of a stream only sees the cut.
        """
        ended = {fault.target for fault in self.faults if fault.kind in _ENDING and _meets(answer, fault)}
        is_stopped = answer.outcome in (Outcome.ERROR, Outcome.CUT) and answer.id in self.suspect_ids
        return is_stopped and len(ended) >= _MAX_LOST_ENGINES

    def died_with_worker(self, answer: Answer) -> bool:
        """Return whether an answer was cut when a worker was killed, and has no access log line."""
        was_under_way = any(fault.kind == KILL_WORKER and _meets(answer, fault) for fault in self.faults)
        return was_under_way and answer.id not in self.ended_ids

    @cached_property
    def suspect_ids(self) -> frozenset[str]:
        return frozenset(line["id"] for line in self.ends if line.get("lost_engines", 0) >= _MAX_LOST_ENGINES)

    @cached_property
    def ended_ids(self) -> frozenset[str]:
        return frozenset(line["id"] for line in self.ends)

    def during(self, at: float) -> str:
        """Return the faults during or just before a moment, or an empty string."""
        names = [f"{fault.kind} {fault.target}" for fault in self.faults if fault.began <= at <= fault.ended + 1.0]
        return ", ".join(names)


def _meets(answer: Answer, fault: Fault) -> bool:
    """Return whether a fault began while an answer was under way."""
    return answer.began <= fault.began + 0.5 and fault.began <= answer.ended


def log_lines(text: str) -> list[dict[str, Any]]:
    """Parse the gateway's JSON log. `at` is the time. Other lines have only a message."""
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
    """Return the periods in which instances were down, by the log of one worker."""
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
