"""Every connector, both endpoints, streamed and not, against every way in which an engine can fail.

One line per case: which engines fail and how, what the client sees, how many requests prefillers and decoders saw, and
how much KV stays pinned because its engine alone could have let it go. Two engines of a role stand behind the gateway;
the first request goes to the first of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from proxy.connectors import CONNECTORS
from proxy.wire.openai import Api
from tests.deployment import Answer, answer_alone, generations, request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.conftest import Deploy
    from tests.deployment import Deployment

# In the engine's own words, which no code of ours would choose.
ENGINE_SAYS = {"error": {"message": "nö – busy \\ tired", "type": "Own", "code": 1, "extra": [None, 1e3]}, "object": "error"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a case comes to."""

    prefills: int
    decodes: int
    pinned: int = 0


@dataclass(frozen=True, kw_only=True)
class Answered(Outcome):
    """The client gets the whole answer and never hears of the failure."""


@dataclass(frozen=True, kw_only=True)
class Refused(Outcome):
    """An HTTP error: the engine's own, byte for byte, or with our `code`."""

    status: int
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class Broken(Outcome):
    """Part of the answer, then an error event and a cut connection; `code` of an engine's own error is empty."""

    code: str = ""
    tokens: int = 3


@dataclass(frozen=True)
class Case:
    """`role` and `which` say who fails; the action "down" means that nobody listens there."""

    role: str
    which: str
    action: str
    stream: Outcome
    whole: Outcome | None
    fields: Mapping[str, Any] = field(default_factory=dict)
    short: str = ""
    """The timeout that is short in this case."""

    def __str__(self) -> str:
        fields = "-".join(str(value) for name, value in self.fields.items() if name != "body")
        return f"{self.role}-{self.which}-{self.action}{'-' * bool(fields)}{fields}"


def says(status: int) -> dict[str, Any]:
    return {"status": status, "body": ENGINE_SAYS}


def case(
    role: str,
    which: str,
    action: str,
    outcome: Outcome,
    whole: Outcome | None = None,
    short: str = "",
    **fields: Any,
) -> Case:
    return Case(role, which, action, outcome, whole or outcome, fields, short)


PREFILL = [
    case("prefill", "first", "down", Answered(prefills=1, decodes=1)),
    case("prefill", "all", "down", Refused(status=503, code="no_healthy_prefill", prefills=0, decodes=0)),
    case("prefill", "first", "refuse_status", Answered(prefills=2, decodes=1), **says(500)),
    case("prefill", "all", "refuse_status", Refused(status=500, prefills=2, decodes=0), **says(500)),
    case("prefill", "first", "refuse_status", Answered(prefills=2, decodes=1), **says(503)),
    case("prefill", "all", "refuse_status", Refused(status=503, prefills=2, decodes=0), **says(503)),
    case("prefill", "first", "refuse_status", Answered(prefills=2, decodes=1), **says(429)),
    case("prefill", "all", "refuse_status", Refused(status=429, prefills=2, decodes=0), **says(429)),
    case("prefill", "first", "refuse_status", Refused(status=400, prefills=1, decodes=0), **says(400)),
    case("prefill", "first", "refuse_status", Refused(status=404, prefills=1, decodes=0), **says(404)),
    case("prefill", "first", "refuse_status", Refused(status=422, prefills=1, decodes=0), **says(422)),
    case("prefill", "first", "reset_before_headers", Answered(prefills=2, decodes=1)),
    case(
        "prefill",
        "all",
        "reset_before_headers",
        Refused(status=502, code="prefill_reset", prefills=2, decodes=0),
    ),
    case("prefill", "first", "kill", Answered(prefills=2, decodes=1)),
    case(
        "prefill",
        "first",
        "hang_before_headers",
        Refused(status=504, code="prefill_timeout", prefills=1, decodes=0),
        short="prefill_seconds",
    ),
    case(
        "prefill",
        "first",
        "hang_after_headers",
        Refused(status=504, code="prefill_timeout", prefills=1, decodes=0, pinned=1),
        short="prefill_seconds",
    ),
    case("prefill", "first", "lost_response", Answered(prefills=2, decodes=1, pinned=1)),
    case("prefill", "first", "invalid_json", Answered(prefills=2, decodes=1, pinned=1)),
    case(
        "prefill",
        "all",
        "invalid_json",
        Refused(status=502, code="prefill_bad_answer", prefills=2, decodes=0, pinned=2),
    ),
    case("prefill", "first", "truncated_json", Answered(prefills=2, decodes=1, pinned=1)),
    case(
        "prefill",
        "all",
        "truncated_json",
        Refused(status=502, code="prefill_broken", prefills=2, decodes=0, pinned=2),
    ),
    case("prefill", "first", "missing_kv_params", Answered(prefills=2, decodes=1)),
    case("prefill", "all", "missing_kv_params", Answered(prefills=2, decodes=1)),
]

RETRIED = Answered(prefills=2, decodes=2)
RETRIED_UNPULLED = Answered(prefills=2, decodes=2, pinned=1)
"""The first attempt's KV was not even asked for."""
TIMED_OUT = Refused(status=504, code="decode_timeout", prefills=1, decodes=1)
TIMED_OUT_UNPULLED = replace(TIMED_OUT, pinned=1)

DECODE = [
    case("decode", "first", "down", Answered(prefills=1, decodes=1)),
    case("decode", "all", "down", Refused(status=503, code="no_healthy_decode", prefills=1, decodes=0, pinned=1)),
    case("decode", "first", "refuse_status", RETRIED_UNPULLED, **says(500)),
    case("decode", "all", "refuse_status", Refused(status=500, prefills=2, decodes=2, pinned=2), **says(500)),
    case("decode", "first", "refuse_status", RETRIED_UNPULLED, **says(503)),
    case("decode", "all", "refuse_status", Refused(status=503, prefills=2, decodes=2, pinned=2), **says(503)),
    case("decode", "first", "refuse_status", RETRIED_UNPULLED, **says(429)),
    case("decode", "first", "refuse_status", Refused(status=400, prefills=1, decodes=1, pinned=1), **says(400)),
    case("decode", "first", "refuse_status", Refused(status=404, prefills=1, decodes=1, pinned=1), **says(404)),
    case("decode", "first", "reset_before_headers", RETRIED_UNPULLED),
    case(
        "decode",
        "all",
        "reset_before_headers",
        Refused(status=502, code="decode_reset", prefills=2, decodes=2, pinned=2),
    ),
    case("decode", "first", "kill", RETRIED_UNPULLED),
    case("decode", "first", "reset_after_headers", RETRIED_UNPULLED, RETRIED),
    case("decode", "first", "load_failure", RETRIED),
    case("decode", "first", "end_without_finish", RETRIED, tokens=0, done=True),
    case("decode", "first", "end_without_finish", RETRIED, tokens=0, done=False),
    case("decode", "first", "error_event", RETRIED, tokens=0),
    case("decode", "first", "recompute", RETRIED, tokens=0),
    case("decode", "all", "recompute", 
         Refused(status=502, code="decode_broken", prefills=2, decodes=2),
         Refused(status=502, code="decode_recomputed", prefills=2, decodes=2), tokens=0),
    case("decode", "first", "end_without_finish", Broken(prefills=1, decodes=1, code="decode_broken"), RETRIED,
         tokens=3, done=True),
    case("decode", "first", "end_without_finish", Broken(prefills=1, decodes=1, code="decode_broken"), RETRIED,
         tokens=3, done=False),
    case("decode", "first", "error_event", Broken(prefills=1, decodes=1), RETRIED, tokens=3),
    case("decode", "first", "recompute", Broken(prefills=1, decodes=1, code="decode_recomputed"), RETRIED, tokens=3),
    case("decode", "first", "recompute", Broken(prefills=1, decodes=1, code="decode_recomputed", tokens=2), RETRIED,
         tokens=3, merged=1),
    case("decode", "first", "reset_after_tokens", Broken(prefills=1, decodes=1, code="decode_broken"), RETRIED,
         tokens=3),
    case("decode", "first", "kill", Broken(prefills=1, decodes=1, code="decode_broken"), RETRIED, tokens=3),
    case("decode", "first", "hang_before_headers", TIMED_OUT_UNPULLED, short="first_token_seconds answer_seconds"),
    case("decode", "first", "hang_after_headers", TIMED_OUT_UNPULLED, TIMED_OUT, short="idle_seconds answer_seconds"),
    case("decode", "first", "stall_after_tokens", TIMED_OUT, short="idle_seconds answer_seconds", tokens=0),
    case("decode", "first", "stall_after_tokens", Broken(prefills=1, decodes=1, code="decode_timeout"), TIMED_OUT,
         short="idle_seconds answer_seconds", tokens=3),
]

WHOLE_ONLY = [
    case("decode", "first", "invalid_json", RETRIED),
    case("decode", "all", "invalid_json", Refused(status=502, code="decode_bad_answer", prefills=2, decodes=2)),
    case("decode", "first", "truncated_json", RETRIED),
    case("decode", "all", "truncated_json", Refused(status=502, code="decode_broken", prefills=2, decodes=2)),
]


def combinations() -> list[Any]:
    rows = []
    for connector in CONNECTORS:
        cases = DECODE if connector == "plain" else PREFILL + DECODE
        rows += [(connector, one, stream) for one in cases for stream in (True, False)]
        rows += [(connector, one, False) for one in WHOLE_ONLY]
    return [
        pytest.param(connector, one, stream, id=f"{connector}-{one}-{'stream' if stream else 'whole'}")
        for connector, one, stream in rows
        if not (connector == "plain" and one.action == "load_failure")  # it loads nothing
    ]


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize(("connector", "failure", "stream"), combinations())
async def test_a_failing_engine(deploy: Deploy, connector: str, failure: Case, stream: bool, api: Api) -> None:
    timeouts = dict.fromkeys(failure.short.split(), 0.08)
    gateway = await deploy(2, 2, connector=connector, timeouts=timeouts)
    await break_engines(gateway, failure)
    expected = failure.stream if stream else failure.whole
    if connector == "plain":
        expected = replace(expected, prefills=0, pinned=0)

    body = request(api, stream=stream)
    answer = await gateway.ask(body)

    gateway.expects_pinned = expected.pinned
    await check(answer, expected, await answer_alone(body))
    assert len(generations(*gateway.prefillers)) == expected.prefills
    assert len(generations(*gateway.decoders)) == expected.decodes
    if (failure.which, failure.action) != ("all", "down"):
        await check_that_the_next_request_is_served(gateway, body)


async def break_engines(gateway: Deployment, failure: Case) -> None:
    engines = gateway.prefillers if failure.role == "prefill" else gateway.decoders
    for engine in engines[: 1 if failure.which == "first" else None]:
        if failure.action == "down":
            await engine.kill()
        else:
            engine.faults.add(failure.action, **failure.fields)


async def check(answer: Answer, expected: Outcome, text: str) -> None:
    match expected:
        case Answered():
            assert (answer.status, answer.text) == (200, text)
            assert answer.is_done
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
            assert answer.error["code"] == (expected.code or 500)
            assert "recomputed" not in str(answer.events[:-1])


def opens(event: Any) -> bool:
    """The role chunk of a chat."""
    return event["choices"][0].get("delta", {}).get("role") is not None


async def check_that_the_next_request_is_served(gateway: Deployment, body: dict[str, Any]) -> None:
    for engine in gateway.engines:
        engine.faults.clear()
    answer = await gateway.ask(body)
    assert answer.is_done
    assert answer.text == await answer_alone(body)
