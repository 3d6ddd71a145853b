"""Fixtures: fleets of engines with simple costs, and replays on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from lab.replay import virtual_time
from lab.replay.fleet import Fleet, MakePolicy, Replay
from lab.replay.policies import policies
from lab.replay.trace import Request
from proxy.sim.hardware.cost import Cost
from proxy.sim.hardware.machines import Machine
from proxy.sim.hardware.work import Shape

MACHINE = Machine(
    "test",
    Cost(prompt=0.1, prompt_token=1e-3, step=0.01),
    prefill=Shape(max_num_seqs=1, max_num_batched_tokens=16_384, kv_tokens=102_400),
    decode=Shape(max_num_seqs=64, max_num_batched_tokens=64, kv_tokens=10_240_000),
)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(2, 2, MACHINE, MACHINE)


@pytest.fixture
def replayed(fleet: Fleet) -> Callable[..., Replay]:
    """Return a function that replays requests, by default with pdproxy's least load."""

    def replayed(
        requests: Sequence[Request], policy: MakePolicy | None = None, max_running_prefill: int | None = None
    ) -> Replay:
        made: list[Replay] = []
        least_tokens, _ = policies(fleet, "least_tokens")["least_tokens"]

        async def course() -> None:
            made.append(
                Replay(fleet, policy or least_tokens, least_tokens, seed=1, max_running_prefill=max_running_prefill)
            )
            await made[0].run(requests)

        virtual_time.run(course(), virtual_time.VirtualLoop())
        return made[0]

    return replayed
