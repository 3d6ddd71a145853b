"""Requests of the soak's clients."""

from __future__ import annotations

import aiohttp

from lab.soak.workload import request_number, user_name, workload
from proxy.sim.engine import SimulatedEngine


async def test_workload_is_constant_for_a_seed_and_has_the_expected_statuses() -> None:
    requests = workload(7)
    assert [request.body("x") for request in requests] == [request.body("x") for request in workload(7)]
    assert requests != workload(8)
    assert {request.status for request in requests} == {200, 400, 404}
    assert any(request.leaves_after_seconds is not None for request in requests)
    assert any(request.units > 1 for request in requests)
    async with SimulatedEngine(tool_call_parser="kimi_k2") as engine, aiohttp.ClientSession() as session:
        for request in (request for request in requests[::10] if request.status == 200):
            user = user_name(1, request)
            async with session.post(engine.url + request.api.path, data=request.body(user)) as response:
                assert response.status == 200
            assert engine.requests[-1].body["user"] == user
            assert request_number(user) == request.number
