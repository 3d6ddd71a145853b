"""Every connector, both endpoints, streamed and not, with every failure of an engine.

Each row has the failing engines and the failure, the client's answer, the requests that prefillers and decoders get,
and the KV caches that stay pinned because no engine could be asked to release them. Two engines of each role serve the
gateway, and the request goes to the first of each. Outcomes are those without resume; with resume, the marked answers
survive.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from itertools import product
from typing import Any

import orjson
import pytest

from proxy.connectors import CONNECTORS
from proxy.settings import CONNECTOR_TRAITS
from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import Answer, answer_alone, request
from tests.conformance.rows import all_of_one
from tests.conftest import Deploy
from tests.deployment import Deployment, generations
from tests.selection.covering import pairs

# An error body that the gateway itself never writes.
ENGINE_SAYS = {
    "error": {"message": "nö – busy \\ tired", "type": "Own", "code": 1, "extra": [None, 1e3]},
    "object": "error",
}


MODES = ("restart-only", "exact")


@dataclass(frozen=True)
class Outcome:
    """Result of a case: requests that prefillers and decoders got, and KV caches that stay pinned."""

    prefills: int
    decodes: int
    _: KW_ONLY
    pinned: int = 0


@dataclass(frozen=True)
class Answered(Outcome):
    """The client gets the whole answer without an error."""


@dataclass(frozen=True)
class Refused(Outcome):
    """An HTTP error: with the gateway's `code`, or without one the engine's own body, byte for byte."""

    _: KW_ONLY
    status: int
    code: str = ""


@dataclass(frozen=True)
class Broken(Outcome):
    """Some tokens, then an error event with the gateway's `code` or the engine's own, and a cut connection."""

    _: KW_ONLY
    code: str | int
    tokens: int = 3


@dataclass(frozen=True)
class Case:
    """One row of the tables. The action "down" means that the engine's port is closed."""

    role: str
    which: str
    """Engines of the role that fail: the first, or all."""
    action: str
    stream: Outcome
    whole: Outcome
    short: str
    """Timeouts that are short in this case."""
    fields: Mapping[str, Any]

    @property
    def breaks_an_answer(self) -> bool:
        """Return whether the failure comes after the first tokens, so that the gateway may resume the answer."""
        return self.role == D and bool(self.fields.get("tokens"))

    def __str__(self) -> str:
        return "-".join(
            [self.role, self.which, self.action, *(f"{k}={v}" for k, v in self.fields.items() if k != "body")]
        )


def case(
    role: str,
    which: str,
    action: str,
    outcome: Outcome,
    whole: Outcome | None = None,
    *,
    short: str = "",
    **fields: Any,
) -> Case:
    """Create a row. `whole`: outcome of an answer that is not streamed, if it differs."""
    if action == "refuse_status":
        fields["body"] = ENGINE_SAYS
    return Case(role, which, action, outcome, whole or outcome, short, fields)


P, D = "prefill", "decode"
FIRST, ALL = "first", "all"

PREFILL_FAILS = [
    case(P, FIRST, "down", Answered(1, 1)),
    case(P, ALL, "down", Refused(0, 0, status=503, code="no_healthy_prefill")),
    case(P, FIRST, "refuse_status", Answered(2, 1), status=500),
    case(P, ALL, "refuse_status", Refused(2, 0, status=500), status=500),
    case(P, FIRST, "refuse_status", Answered(2, 1), status=503),
    case(P, ALL, "refuse_status", Refused(2, 0, status=503), status=503),
    case(P, FIRST, "refuse_status", Answered(2, 1), status=429),
    case(P, ALL, "refuse_status", Refused(2, 0, status=429), status=429),
    case(P, FIRST, "refuse_status", Refused(1, 0, status=400), status=400),
    case(P, FIRST, "refuse_status", Refused(1, 0, status=404), status=404),
    case(P, FIRST, "refuse_status", Refused(1, 0, status=422), status=422),
    case(P, FIRST, "reset_before_headers", Answered(2, 1)),
    case(P, ALL, "reset_before_headers", Refused(2, 0, status=502, code="prefill_reset")),
    case(P, FIRST, "kill", Answered(2, 1)),
    case(P, FIRST, "lost_response", Answered(2, 1, pinned=1)),
    case(P, FIRST, "invalid_json", Answered(2, 1, pinned=1)),
    case(P, ALL, "invalid_json", Refused(2, 0, status=502, code="prefill_bad_answer", pinned=2)),
    case(P, FIRST, "truncated_json", Answered(2, 1, pinned=1)),
    case(P, ALL, "truncated_json", Refused(2, 0, status=502, code="prefill_broken", pinned=2)),
    case(P, FIRST, "abort", Answered(2, 1)),
    case(P, FIRST, "missing_kv_params", Answered(2, 1)),
    case(P, ALL, "missing_kv_params", Answered(2, 1)),
    case(P, FIRST, "hang_before_headers", Refused(1, 0, status=504, code="prefill_timeout"), short="prefill"),
    case(P, FIRST, "hang_after_headers", Refused(1, 0, status=504, code="prefill_timeout", pinned=1), short="prefill"),
]

RETRIED = Answered(2, 2)
TIMED_OUT = Refused(1, 1, status=504, code="decode_timeout")
BROKEN = Broken(1, 1, code="decode_broken")
ABORTED = Broken(1, 1, code="decode_aborted")
RECOMPUTED = Broken(1, 1, code="decode_recomputed")

DECODE_FAILS = [
    case(D, FIRST, "down", Answered(1, 1)),
    case(D, ALL, "down", Refused(1, 0, status=503, code="no_healthy_decode", pinned=1)),
    case(D, FIRST, "refuse_status", RETRIED, status=500),
    case(D, ALL, "refuse_status", Refused(2, 2, status=500), status=500),
    case(D, FIRST, "refuse_status", RETRIED, status=503),
    case(D, ALL, "refuse_status", Refused(2, 2, status=503), status=503),
    case(D, FIRST, "refuse_status", RETRIED, status=429),
    case(D, FIRST, "refuse_status", Refused(1, 1, status=400), status=400),
    case(D, FIRST, "refuse_status", Refused(1, 1, status=404), status=404),
    case(D, FIRST, "reset_before_headers", RETRIED),
    case(D, ALL, "reset_before_headers", Refused(2, 2, status=502, code="decode_reset")),
    case(D, FIRST, "reset_after_headers", RETRIED),
    case(D, FIRST, "kill", RETRIED),
    case(D, FIRST, "kill", BROKEN, RETRIED, tokens=3),
    case(D, FIRST, "reset_after_tokens", BROKEN, RETRIED, tokens=3),
    case(D, FIRST, "load_failure", RETRIED),
    case(D, FIRST, "end_without_finish", RETRIED, tokens=0, done=True),
    case(D, FIRST, "end_without_finish", RETRIED, tokens=0, done=False),
    case(D, FIRST, "end_without_finish", BROKEN, RETRIED, tokens=3, done=True),
    case(D, FIRST, "end_without_finish", BROKEN, RETRIED, tokens=3, done=False),
    case(D, FIRST, "error_event", RETRIED, tokens=0),
    case(D, FIRST, "error_event", Broken(1, 1, code=500), RETRIED, tokens=3),
    case(D, FIRST, "abort", RETRIED, tokens=0),
    case(D, FIRST, "abort", ABORTED, RETRIED, tokens=3),
    case(D, FIRST, "recompute", RETRIED, tokens=0),
    case(D, FIRST, "recompute", RECOMPUTED, RETRIED, tokens=3),
    case(D, FIRST, "recompute", Broken(1, 1, code="decode_recomputed", tokens=2), RETRIED, tokens=3, merged=1),
    case(
        *(D, ALL, "recompute"),
        Refused(4, 4, status=503, code="decode_recomputed"),
        tokens=0,
    ),
    case(D, FIRST, "hang_before_headers", TIMED_OUT, short="handoff first_token answer"),
    case(D, FIRST, "hang_after_headers", TIMED_OUT, short="first_token answer"),
    case(D, FIRST, "stall_after_tokens", TIMED_OUT, short="first_token idle answer", tokens=0),
    case(D, FIRST, "stall_after_tokens", Broken(1, 1, code="decode_timeout"), TIMED_OUT, short="idle answer", tokens=3),
]

WHOLE_ANSWER_FAILS = [
    case(D, FIRST, "invalid_json", RETRIED),
    case(D, ALL, "invalid_json", Refused(2, 2, status=502, code="decode_bad_answer")),
    case(D, FIRST, "truncated_json", RETRIED),
    case(D, ALL, "truncated_json", Refused(2, 2, status=502, code="decode_broken")),
]


SEQUENTIAL = [
    name
    for name, traits in CONNECTOR_TRAITS.items()
    if name in CONNECTORS and (traits.has_prefill_first or not traits.takes_prefillers)
]
"""Connectors that send to the decoder after the prefiller has answered.

With the others, both engines work at once. So the number of requests of each engine, and what is prefilled when a
decoder fails, depends on their speed.
"""

WAITS_IN_VAIN = Refused(1, 1, status=504)

# Failures of a prefiller's answer that come after the decoder has the KV cache.
TOO_LATE = ("lost_response", "invalid_json", "truncated_json", "hang_after_headers")


def rows() -> Iterator[tuple[str, str, Case, str, Api]]:
    """Yield connector, mode, case, shape and endpoint of each row."""
    for connector in CONNECTORS:
        cases = PREFILL_FAILS + DECODE_FAILS
        if connector == "plain":  # there are no prefillers, and decoders load nothing
            cases = [one for one in DECODE_FAILS if one.action != "load_failure"]
        if connector == "sglang_bootstrap":  # its engines wait for memory instead
            cases = [one for one in cases if one.action != "recompute"]
        for mode, one, shape in product(MODES, cases, ("stream", "whole")):
            if mode == "restart-only" or connector in ("plain", "vllm_pull") or one.breaks_an_answer:
                yield from ((connector, mode, one, shape, api) for api in OPENAI_APIS)
        for one, api in product(WHOLE_ANSWER_FAILS, OPENAI_APIS):
            yield connector, "restart-only", one, "whole", api


def outcome(connector: str, failure: Case, mode: str, stream: bool, api: Api) -> Outcome:
    """Return the outcome of a case. An answer with tokens survives if the gateway resumes it."""
    expected = failure.stream if stream else failure.whole
    tells_ids = connector != "sglang_bootstrap" or api is Api.COMPLETIONS
    if mode == "exact" and failure.breaks_an_answer and tells_ids:
        expected = RETRIED
    match connector:
        case "plain":
            return replace(expected, prefills=0, pinned=0)
        case "vllm_pull":
            return expected
        case "vllm_store":  # its prefillers pin nothing, and its decoders work without them
            return Answered(1, 1) if failure.action == "missing_kv_params" else replace(expected, pinned=0)
    if failure.action == "missing_kv_params":  # and the decoder waits
        if connector == "nixl_push":  # its prefillers answer before they send the KV, so their answers show this
            return Refused(2, 2, status=502, code="kv_handoff_failed") if failure.which == ALL else RETRIED
        return WAITS_IN_VAIN
    if isinstance(expected, Refused) and expected.status == 504:
        return WAITS_IN_VAIN  # each engine waits for the other
    return expected


def timeouts(connector: str, failure: Case) -> dict[str, Any]:
    """Return settings with short timeouts for this case."""
    names = failure.short.split()
    waits = failure.action == "missing_kv_params" and connector != "nixl_push"
    if connector not in SEQUENTIAL and (names or waits):
        names = ["prefill", "handoff", "first_token", "answer", "idle"]
    # The next request uses these timeouts, too, and must succeed on a busy machine.
    seconds = 0.5 if connector in SEQUENTIAL else 1.0
    sections: dict[str, Any] = {"timeouts": {f"{name}_seconds": seconds for name in names}}
    layerwise = {"layerwise": {"callback_seconds": seconds}}
    return sections | (layerwise if names and connector == "ascend_layerwise" else {})


def wait_seconds(failure: Case) -> float:
    """Return the time that the gateway waits for engines, for a request or to release KV.

    Engines that work again release KV, which takes long on a busy machine. Requests wait only if all engines of a role
    are down or refuse.
    """
    return 0.5 if failure.which == ALL and failure.action in ("down", "refuse_status") else 60.0


def either_endpoint(row: tuple[object, ...]) -> set[Hashable]:
    """Return the features of a row like `all_of_one`, with cases shared between the endpoints.

    Each endpoint meets every mode, failure and shape, though not every combination.
    """
    return all_of_one(row[:-1]) | pairs(row)


@pytest.mark.covering("connector mode failure shape api", rows(), either_endpoint)
async def test_outcome_of_a_failing_engine(
    deploy: Deploy, connector: str, mode: str, failure: Case, shape: str, api: Api
) -> None:
    stream = shape == "stream"
    gateway = await deploy(
        2,
        2,
        connector=connector,
        **timeouts(connector, failure),
        resume={"mode": mode, "repeat_up_to_tokens": 0},
        admission={"wait_seconds": wait_seconds(failure)},
    )
    await break_engines(gateway, failure)
    expected = outcome(connector, failure, mode, stream, api)

    body = request(api, stream=stream)
    alone = await answer_alone(body)
    answer = await gateway.ask(body)
    if (failure.which, failure.action) != (ALL, "down"):
        mend_engines(gateway)  # at once, so that releases reach working engines

    all_refused = is_refused_by_all(failure)
    if connector in SEQUENTIAL:
        gateway.expects_pinned = 0 if all_refused else expected.pinned
        # The releases may have been given up while the request was in the queue.
        gateway.may_stay_pinned = 2 if all_refused else 0
    else:
        gateway.may_stay_pinned = 2 if connector in ("mooncake_bootstrap", "nixl_push") else 0
        gateway.expects_inexact_pins = True
    if connector not in SEQUENTIAL and failure.role == P and failure.action in TOO_LATE and answer.status == 200:
        expected = Answered(2, 2)
    await check(answer, expected, alone)
    seen = len(generations(*gateway.prefillers)), len(generations(*gateway.decoders))
    if connector in SEQUENTIAL:
        assert seen == (expected.prefills, expected.decodes)
    else:
        attempts = max(expected.prefills, expected.decodes, 2 if failure.action == "down" else 1)
        assert all(requests <= attempts for requests in seen)
    if (failure.which, failure.action) != (ALL, "down"):
        answer = await gateway.ask(body)
        while all_refused and answer.status == 503:  # the engines refused a moment ago, and are passed over
            answer = await gateway.ask(body)
        assert (answer.is_done, answer.text) == (True, alone)


def is_refused_by_all(failure: Case) -> bool:
    """Return whether all engines of a role refuse, so that requests wait in the queue."""
    return failure.which == ALL and failure.action == "refuse_status" and failure.fields.get("status") in (429, 503)


async def break_engines(gateway: Deployment, failure: Case) -> None:
    engines = gateway.prefillers if failure.role == P else gateway.decoders
    for engine in engines[: 1 if failure.which == FIRST else None]:
        if failure.action == "down":
            await engine.kill()
        else:
            engine.faults.add(failure.action, **failure.fields)


def mend_engines(gateway: Deployment) -> None:
    for engine in gateway.engines:
        engine.faults.clear()


async def check(answer: Answer, expected: Outcome, text: str) -> None:
    match expected:
        case Answered():
            assert (answer.status, answer.text) == (200, text)
            assert answer.is_done
            assert not answer.is_stream or sum(map(opens, answer.events[:-1])) <= 1
        case Refused(status=504, code=""):
            assert answer.status == 504
            assert answer.error["code"] in ("prefill_timeout", "decode_timeout")
        case Refused(code=""):
            assert (answer.status, answer.body) == (expected.status, orjson.dumps(ENGINE_SAYS))
        case Refused():
            assert (answer.status, answer.error["code"]) == (expected.status, expected.code)
            assert set(answer.error) == {"message", "type", "param", "code"}
        case Broken():
            assert answer.status == 200
            assert not answer.is_whole
            assert b"[DONE]" not in answer.body
            assert text.startswith(answer.text)
            contents = [event for event in answer.events if "error" not in event and not opens(event)]
            assert len(contents) == expected.tokens
            assert answer.error["code"] == expected.code
            assert "recomputed" not in str(answer.events[:-1])


def opens(event: Any) -> bool:
    """Return whether an event is the role chunk of a chat."""
    return event["choices"][0].get("delta", {}).get("role") is not None
