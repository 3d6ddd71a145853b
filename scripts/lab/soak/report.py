"""The table at the end: what was done, what clients had of it, and whether the invariants held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from lab.soak.evidence import Answer, Evidence, Outcome
from lab.soak.invariants import Verdicts

_SHOWN = 3


def table(evidence: Evidence, verdicts: Verdicts) -> str:
    """Everything that counts, in two columns."""
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
    """What went wrong for clients, without whose request it was; the most frequent first."""
    return Counter(f"{answer.outcome}: {answer.problem}" for answer in failures).most_common()


def details(evidence: Evidence, verdicts: Verdicts) -> str:
    """What one needs to find out why: the first failures of each kind with their access lines, and violations."""
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
    """`12 (reset 10, timeout 2)`."""
    parts = ", ".join(f"{' '.join(key)} {value:.0f}" for key, value in sorted(values.items()))
    return f"{sum(values.values()):.0f}" + (f" ({parts})" if parts else "")
