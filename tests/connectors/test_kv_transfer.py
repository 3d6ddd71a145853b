"""The table of engines' KV connectors agrees with the simulated engines, which follow the engines' sources."""

from __future__ import annotations

from typing import get_args

import aiohttp
import orjson
import pytest

from proxy.balancer.engines import parse_engine_version
from proxy.connectors.releaser import KvTransfer, kv_pin_seconds, parse_kv_params, releases_kv_of_rejected_request
from proxy.sim.engine import SimulatedEngine
from proxy.sim.profile import PROFILES, ConnectorName
from proxy.wire.openai import Api
from tests.asking import ask, request

TRANSFERS = {"nixl": KvTransfer.NIXL, "mooncake": KvTransfer.ASCEND_MOONCAKE}


@pytest.mark.parametrize("connector", get_args(ConnectorName))
@pytest.mark.parametrize("profile", PROFILES)
async def test_engine_is_known_by_its_answer_and_version(profile: str, connector: ConnectorName) -> None:
    async with (
        SimulatedEngine(role="prefill", profile_name=profile, connector_name=connector) as engine,
        aiohttp.ClientSession() as session,
    ):
        body = request(Api.COMPLETIONS, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        params = (await ask(session, engine.url, body)).json["kv_transfer_params"]
        async with session.get(f"{engine.url}/version") as answer:
            version = parse_engine_version(await answer.json())
    transfer = parse_kv_params(orjson.dumps(params)).transfer_protocol
    assert transfer == TRANSFERS.get(connector, KvTransfer.OTHER)
    assert kv_pin_seconds(transfer, version) == PROFILES[profile].pin_seconds(connector)
    if releases_kv_of_rejected_request(transfer, version):
        assert PROFILES[profile].releases_unused(connector)


RELEASES = [
    (KvTransfer.NIXL, (0, 31), False),
    (KvTransfer.NIXL, (0, 32), True),
    (KvTransfer.NIXL, (1, 0), True),
    (KvTransfer.ASCEND_MOONCAKE, (0, 27), False),
    (KvTransfer.ASCEND_MOONCAKE, (0, 28), True),
    (KvTransfer.OTHER, (9, 9), False),
    *((transfer, None, False) for transfer in KvTransfer),
]


@pytest.mark.parametrize(("transfer", "version", "expected"), RELEASES)
def test_only_decoders_known_to_do_it_are_asked_to_release(
    transfer: KvTransfer, version: tuple[int, int] | None, expected: bool
) -> None:
    assert releases_kv_of_rejected_request(transfer, version) is expected


def test_unknown_version_is_taken_to_keep_kv_for_long() -> None:
    assert [kv_pin_seconds(transfer, None) for transfer in KvTransfer] == [480.0] * 4
