"""How long legs may take, and what counts as a prefill."""

from __future__ import annotations

import orjson
import pytest

from proxy.connectors.base import first_byte_timeout_seconds, prefill_timeout_seconds
from proxy.settings import Cost, Timeouts
from proxy.wire.openai import Api
from tests.asking import request
from tests.canned import CannedEngine, json_answer
from tests.conftest import Deploy
from tests.deployment import generations
from tests.parsing import parse


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 10.002), (1000, 12.0), (128_000, 266.0)])
def test_prefillers_deadline_grows_with_the_prompt(tokens: int, seconds: float) -> None:
    timeouts = Timeouts(prefill_seconds=10.0, prefill_seconds_per_1k_tokens=2.0)
    call = parse(Api.COMPLETIONS, orjson.dumps({"prompt": [7] * tokens}), Cost())
    assert prefill_timeout_seconds(timeouts, call) == pytest.approx(seconds)


@pytest.mark.parametrize(("stream", "seconds"), [(True, 3.0), (False, 60.0)])
def test_answer_that_is_not_streamed_begins_at_its_end(stream: bool, seconds: float) -> None:
    timeouts = Timeouts(first_token_seconds=3.0, answer_seconds=60.0)
    call = parse(Api.COMPLETIONS, orjson.dumps({"prompt": "x", "stream": stream}), Cost())
    assert first_byte_timeout_seconds(timeouts, call) == seconds


@pytest.mark.parametrize(
    ("fields", "seconds"), [({"max_tokens": 20}, 320.0), ({"max_tokens": 10**6}, 3600.0), ({}, 3600.0)]
)
def test_answer_that_is_not_streamed_may_take_as_long_as_it_has_tokens(fields: dict[str, int], seconds: float) -> None:
    call = parse(Api.CHAT, orjson.dumps({"messages": [], **fields}), Cost())
    assert first_byte_timeout_seconds(Timeouts(first_token_seconds=300, answer_seconds=3600), call) == seconds


@pytest.mark.parametrize(
    ("code", "status"), [(400, 400), (599, 599), (399, 500), (600, 500), ("400", 500), (None, 500), (40.0, 500)]
)
@pytest.mark.parametrize("is_inside", [True, False])
async def test_prefill_error_with_status_200_has_the_code_in_its_body(
    deploy: Deploy, code: object, status: int, is_inside: bool
) -> None:
    error = {"message": "no", "code": code}
    answer = json_answer({"error": error} if is_inside else {"object": "error", **error})
    gateway = await deploy([CannedEngine("prefill", [answer])], retry={"max_attempts": 1})
    assert (await gateway.ask(request(Api.CHAT))).status == status
    assert not generations(*gateway.decoders)
