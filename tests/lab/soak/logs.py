"""Evidence of a small soak without violations, to be modified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lab.soak.evidence import Answer, Evidence, Fault, Leg, Limits, Outcome, Sample

P, D = "127.0.0.1:7100", "127.0.0.1:7200"


def answer(**fields: Any) -> Answer:
    """Return a streamed chat that was answered between second 10 and 12."""
    values: dict[str, Any] = {
        "id": "soak-1.7",
        "began": 10.0,
        "ended": 12.0,
        "api": "chat",
        "stream": True,
        "units": 1,
        "asks_usage": True,
        "is_clean": False,
        "status": 200,
        "outcome": Outcome.COMPLETE,
        "problem": "",
        "is_done": True,
        "has_usage": True,
    }
    return Answer(**values | fields)


def line(**fields: Any) -> dict[str, Any]:
    """Return its access log line."""
    values = {
        "logger": "proxy.access",
        "at": 12.0,
        "id": "soak-1.7",
        "api": "chat",
        "code": 200,
        "term": "--",
        "units": 1,
        "attempts": 1,
        "resumes": 0,
    }
    return values | fields


def leg(stage: str = "prefill", **fields: Any) -> Leg:
    """Return the prefill leg, from second 10 to 10.5, or the decode leg, from then to the end."""
    is_prefill = stage == "prefill"
    values: dict[str, Any] = {
        "instance": P if is_prefill else D,
        "stage": stage,
        "user": "soak-1.7",
        "attempt": "a1",
        "sent": 10.0 if is_prefill else 10.5,
        "answered": 10.5 if is_prefill else 10.6,
        "ended": 10.5 if is_prefill else 12.0,
        "status": 200,
        "is_whole": True,
        "is_finished": not is_prefill,
        "stream": not is_prefill,
        "edited": ("kv_transfer_params", "stream"),
    }
    return Leg(**values | fields)


def sample(at: float = 20.0, **fields: Any) -> Sample:
    """Return a sample without load after that request. `metrics` are added."""
    metrics: Mapping[Any, float] = {
        ("pdproxy_requests_total", (("api", "chat"), ("code", "200"))): 1.0,
        ("pdproxy_request_end_total", (("term", "--"),)): 1.0,
        ("pdproxy_instance_requests_total", (("address", P), ("result", "ok"), ("role", "prefill"))): 1.0,
        ("pdproxy_instance_requests_total", (("address", D), ("result", "ok"), ("role", "decode"))): 1.0,
        ("pdproxy_inflight_requests", (("api", "chat"),)): 0.0,
        ("pdproxy_instance_inflight", (("address", D), ("role", "decode"))): 0.0,
        ("pdproxy_instance_inflight", (("address", P), ("role", "prefill"))): 0.0,
        **fields.pop("metrics", {}),
    }
    values: dict[str, Any] = {"at": at, "metrics": metrics, "rss_bytes": 60 << 20, "fds": 40}
    return Sample(**values | fields)


def fault(kind: str = "kill", target: str = f"decode {D}", **fields: Any) -> Fault:
    """Return a fault that began at second 11 and was healed at 14."""
    values: dict[str, Any] = {"kind": kind, "target": target, "began": 11.0, "ended": 14.0, "is_healed": True}
    return Fault(**values | fields)


def evidence(**fields: Any) -> Evidence:
    """Return evidence of one request without violations."""
    values: dict[str, Any] = {
        "limits": Limits(health_seconds=0.5, handoff_seconds=4.0),
        "answers": [answer()],
        "lines": [line()],
        "legs": [leg("prefill"), leg("decode")],
        "faults": [],
        "absences": [],
        "samples": [sample(11.0)],
        "base": sample(5.0),
        "rest": sample(20.0),
        "engines": {D: {"live": 0, "running": 0, "waiting": 0}},
    }
    return Evidence(**values | fields)


def workers(count: int) -> Limits:
    return replace(evidence().limits, workers=count)
