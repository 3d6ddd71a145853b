"""The operators' routes as a worker creates them, and requests of operators."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient

from proxy.api.admin import AdminApi, ReloadFunction
from proxy.api.broadcasts import RESET_PREFIX_CACHE, BroadcastApi
from proxy.api.credentials import Administrators
from proxy.api.instances import InstanceParts, InstancesApi
from proxy.api.probes import ProbeApi
from proxy.api.roles import RolesApi
from proxy.balancer.engines import EngineKeys
from proxy.balancer.models import ServedModels
from proxy.balancer.policies.handoff_times import HandoffTimes
from proxy.balancer.roster import SourceStates
from proxy.common.backend import Role
from proxy.listener.drain import DrainManager
from proxy.settings import Admin, Settings
from proxy.settings.load import ConfigChange
from proxy.upstream.names import AddressRules, HostNames
from tests.api.conftest import Gateway

Client = TestClient[web.Request, web.Application]

NO_INSTANCES = Settings()
RULES = AddressRules(Admin().networks)


async def nothing_to_reload(by: str, *, is_dry_run: bool = False) -> ConfigChange:
    return ConfigChange()


async def client_of(
    gateway: Gateway,
    *,
    admin_key: str | None = None,
    listens_on: str = "127.0.0.1",
    trusts_local: bool = False,
    trusted_proxies: Sequence[str] = (),
    roles: Collection[Role] = (Role.PREFILL, Role.DECODE),
    is_draining: bool = False,
    keys: EngineKeys | None = None,
    names: HostNames | None = None,
    reload: ReloadFunction = nothing_to_reload,
    cache_path: str = RESET_PREFIX_CACHE,
    settings: Settings = NO_INSTANCES,
) -> Client:
    """Return a client of a gateway with the routes of operators and probes."""
    pools = {role: gateway.pools[role] for role in roles}
    drain = DrainManager()
    drain.is_draining = is_draining
    administrators = Administrators(
        lambda: admin_key,
        listens_on=listens_on,
        trusts_local=lambda: trusts_local,
        trusted_proxies=lambda: trusted_proxies,
    )
    names = names or HostNames(RULES, (), gateway.metrics)
    parts = InstanceParts(
        pools=pools,
        roster=gateway.roster,
        scoreboard=gateway.scoreboard,
        health=gateway.health,
        health_board=gateway.health_board,
        incompatibilities=gateway.incompatibilities,
        joiner=gateway.joiner,
        served_models=ServedModels(gateway.roster, gateway.health, tuple(pools)),
        pool_of=lambda backend: pools[backend.role],
        handoff_times=HandoffTimes(),
    )
    drop_drained = gateway.prober.remove_drained_backends
    instances = InstancesApi(parts, SourceStates(), drop_drained, names, administrators, lambda: settings)
    apis = (
        ProbeApi(gateway.lanes(settings, roles), drain),
        AdminApi(gateway.metrics, dict, reload, administrators),
        instances,
        RolesApi(parts, administrators, lambda: settings),
        BroadcastApi(parts, gateway.engine_client, keys or gateway.keys(), administrators, cache_path),
    )
    return await gateway.serve([route for api in apis for route in api.routes()])


async def change(client: Client, what: str, **body: object) -> tuple[int, Any]:
    """POST to a route under `/instances`: the status and the JSON of the answer."""
    async with client.post(f"/instances/{what}", json=body) as answer:
        return answer.status, await answer.json()
