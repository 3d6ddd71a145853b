"""Test of the number of Python calls for the choice and charge of one request, which is equal on all machines."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

import pytest

from proxy.balancer.pool import Pool
from proxy.common.backend import Role
from proxy.settings import Cost
from proxy.wire.openai import Api
from tests.balancer.conftest import Balancer
from tests.parsing import parse

_CHAT: Final = b'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 7}'
# Bounds of called Python functions, about a tenth above the measured numbers. Lower them when a request gets cheaper.
_MOST_CALLS: Final = 92


def calls_of_one(prefillers: Pool, decoders: Pool) -> int:
    """Enter and leave the leases of a request that does not wait, as the fast path and the connectors do."""
    request = parse(Api.CHAT, _CHAT, Cost()).make_pick_request()
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        assert prefillers.has_room(lambda: request)
        assert decoders.has_room()
        with decoders.make_lease(request) as decoder, prefillers.make_lease(request) as prefiller:
            prefiller.record_usage(2, 0)
            prefiller.release_compute()
            prefiller.release_kv()
            decoder.confirm_beginning()
            decoder.answer_tokens = 7
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.interpreted
def test_choice_stays_within_its_number_of_calls(balancer: Balancer) -> None:
    prefillers = balancer.pool(Role.PREFILL, "least_load")
    decoders = balancer.pool(Role.DECODE, "least_load")
    # Periodic work is not counted: learning of prefill times and updates of learned values.
    calls = min(calls_of_one(prefillers, decoders) for _ in range(50))
    assert calls <= _MOST_CALLS, f"{calls} calls"
    assert calls > 0.8 * _MOST_CALLS, f"{calls} calls: lower the bound"
