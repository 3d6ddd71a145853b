"""The pools of all roles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.balancer.pool import Pools
from proxy.common.backend import Role

if TYPE_CHECKING:
    from tests.balancer.conftest import Balancer


def test_pools_return_the_pool_of_each_role(balancer: Balancer) -> None:
    prefillers, decoders, encoders = balancer.prefillers, balancer.decoders, balancer.pool(Role.ENCODE)
    for pools in (Pools(prefillers, decoders), Pools(prefillers, decoders, encode=encoders)):
        assert pools.of(Role.PREFILL) is prefillers
        assert pools.of(Role.DECODE) is decoders
    assert Pools(prefillers, decoders, encode=encoders).of(Role.ENCODE) is encoders
