"""The abilities that all engines of a request have in common."""

from __future__ import annotations

from proxy.balancer.engines import EngineFacts
from proxy.gateway.common_abilities import CommonAbilities
from tests.balancer.conftest import Balancer


def test_common_abilities_are_read_again_after_an_engine_reports_facts() -> None:
    balancer = Balancer()
    pools = balancer.prefillers, balancer.decoders
    abilities = CommonAbilities(pools, None)
    assert abilities.max_model_len() is None
    for length, pool in zip((4096, 2048), pools, strict=True):
        backend = pool.eligible_backends()[-1]
        balancer.health.on_probe(backend, True, "")
        balancer.health.set_engine_facts(backend, EngineFacts((0, 23), length))
        pool.eligible_backends()  # as each lease has it look
        assert abilities.max_model_len() == length
