"""Checks that compare engines with each other."""

from __future__ import annotations

import pytest

from proxy.balancer.engines import EngineFacts, EngineIdentity, EngineKeys, parse_setup
from proxy.common.backend import Backend, Role
from proxy.settings import Settings
from proxy.tools.doctor.examined import Examined, Fleet
from proxy.tools.doctor.fleet import check_different_places


def engine(host: str, port: int, dp_size: int) -> Examined:
    transfer = {"kv_connector": "MooncakeConnectorV1", "engine_id": "0"}
    info = {"vllm_config": {"kv_transfer_config": transfer, "parallel_config": {"data_parallel_size": dp_size}}}
    identity = EngineIdentity(engine_kind="vLLM", engine_setup=parse_setup(info))
    backend = Backend(Role.PREFILL, host, port)
    return Examined(backend=backend, addresses=(host,), facts=EngineFacts(identity=identity))


@pytest.mark.parametrize(("dp_size", "found"), [(1, ["duplicate"]), (4, [])])
def test_only_ranks_of_one_engine_may_share_its_id(dp_size: int, found: list[str]) -> None:
    engines = [engine("10.0.0.1", 7100, dp_size), engine("10.0.0.1", 7101, dp_size)]
    fleet = Fleet(settings=Settings(), keys=EngineKeys(None), engines=engines)
    assert [finding.check for finding in check_different_places(fleet)] == found
