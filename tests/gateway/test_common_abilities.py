"""What the engines that a request may reach have in common."""

from __future__ import annotations

from proxy.balancer.engines import EngineFacts
from proxy.gateway.common_abilities import CommonAbilities
from tests.balancer.conftest import Balancer


def test_what_engines_have_in_common_is_looked_at_anew_when_one_of_any_role_has_told_something() -> None:
    balancer = Balancer()
    pools = balancer.prefillers, balancer.decoders
    abilities = CommonAbilities(pools, None)
    assert abilities.max_model_len() is None
    for length, pool in zip((4096, 2048), pools, strict=True):
        backend = pool.eligible()[-1]
        balancer.health.on_probe(backend, True, "")
        balancer.health.note_facts(backend, EngineFacts((0, 23), length))
        pool.eligible()  # as each lease has it look
        assert abilities.max_model_len() == length
