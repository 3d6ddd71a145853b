"""What the program says while it starts, and how often."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from tests.scenarios.program import gateway

if TYPE_CHECKING:
    from proxy.sim.engine import SimulatedEngine


async def test_what_is_probably_not_meant_is_told_once(prefiller: SimulatedEngine, decoder: SimulatedEngine) -> None:
    engines = ("--prefill", prefiller.url, "--decode", decoder.url)
    async with gateway(*engines, "--workers", "2", PROXY_LISTEN_PORT="8004") as program:
        program.signal(signal.SIGHUP)
        await program.says("reload by SIGHUP")
        program.signal(signal.SIGTERM)
        await program.ended()
    assert program.output.count("PROXY_LISTEN_PORT is no option and is ignored: did you mean PROXY_LISTEN__PORT?") == 1
