"""Trial."""

from __future__ import annotations

import pytest

from proxy.wire.openai import Api
from tests.deployment import answer_alone, request


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_that_of_a_single_engine(gateway, api, stream):
    body = request(api, stream=stream)
    answer = await gateway.ask(body)
    assert answer.status == 200
    assert answer.is_done
    assert answer.text == await answer_alone(body)
