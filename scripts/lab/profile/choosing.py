"""CPU time of selecting an instance, without engines and sockets: `--choosing` and `--fleet-size`.

A request passes the steps of the fast path: room, lease, cached tokens, end. Its body is parsed before, and its prefix
keys are computed each time. Each figure is the least of many rounds of ten.
"""

from __future__ import annotations

import random
import time
from itertools import product
from typing import Final

import orjson

from proxy.balancer.health import Health
from proxy.balancer.pick import PolicyContext
from proxy.balancer.policies.least_tokens import make_policy
from proxy.balancer.pool import Pool, PoolParts
from proxy.balancer.roster import Roster
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Role
from proxy.dialects.call import Call, measure_prompt
from proxy.settings.model import Cost
from proxy.wire.document import Document
from proxy.wire.openai import Api

_ROUNDS: Final = 150
_BODIES: Final = (("1 KB", 3, 1), ("64 KB", 100, 2), ("256 KB", 100, 8), ("1 MB", 100, 33))
_SENTENCE: Final = (
    'Pack {:04} boxes, said the "fox", and send them all to the lazy dogs of the north: they need every one. ' * 3
)


def table(policies: tuple[str, ...], prefillers: tuple[int, ...] = (8, 64)) -> str:
    """Return µs per request by policy, number of prefillers and length of the body."""
    lines = ["µs per prefiller selection | " + " | ".join(name for name, _, _ in _BODIES)]
    for policy in policies:
        for count in prefillers:
            figures = [_microseconds(policy, count, messages, length) for _, messages, length in _BODIES]
            lines.append(f"{policy}, {count} prefillers | " + " | ".join(f"{figure:.1f}" for figure in figures))
    return "\n".join(lines)


def growth(
    policies: tuple[str, ...], instances: tuple[int, ...] = (16, 256, 1024), workers: tuple[int, ...] = (1, 4, 8)
) -> str:
    """Return µs of selecting a prefiller and a decoder for 1 KB, by the number of instances and workers."""
    columns = [(count, sharing) for count in instances for sharing in workers]
    lines = ["µs per selection, 1 KB | " + " | ".join(f"{count} of {sharing}w" for count, sharing in columns)]
    _, *body = _BODIES[0]
    for role, policy in product((Role.PREFILL, Role.DECODE), policies):
        figures = [_microseconds(policy, count, *body, role=role, workers=sharing) for count, sharing in columns]
        lines.append(f"{role}, {policy} | " + " | ".join(f"{figure:.0f}" for figure in figures))
    return "\n".join(lines)


def _microseconds(
    policy: str, instances: int, messages: int, sentences: int, *, role: Role = Role.PREFILL, workers: int = 1
) -> float:
    scoreboard = Scoreboard(workers, slots=max(1024, instances))
    origins: dict[Role, list[tuple[str, int]]] = {Role.PREFILL: [], Role.DECODE: []}
    origins[role] = [("10.0.0.1", 7000 + number) for number in range(instances)]
    roster = Roster(origins[Role.PREFILL], origins[Role.DECODE], scoreboard)
    pool = Pool(
        PoolParts(
            role=role,
            policy=make_policy(policy, PolicyContext(random_source=random.Random(1), role=role)),
            scoreboard=scoreboard,
            load_row=scoreboard.load_row(0),
            roster=roster,
            health=Health(),
        )
    )
    for member in roster.members_of_role(role):  # the first success of an instance has extra cost
        pool.record_success(member.backend)
    pool.eligible_backends()
    bodies = [Document(_body(messages, sentences, turn)) for turn in range(200)]
    tokens = [measure_prompt(body, Cost())[0] for body in bodies]

    def call(place: int) -> Call:
        _, prompt = measure_prompt(bodies[place], Cost())
        return Call(Api.CHAT, bodies[place], tokens[place], 256, False, False, prompt=prompt)

    least = float("inf")
    for round_ in range(_ROUNDS):
        calls = [call((10 * round_ + place) % len(bodies)) for place in range(10)]
        began = time.thread_time()
        for each in calls:
            _serve(pool, each)
        least = min(least, (time.thread_time() - began) / len(calls))
    return 1e6 * least


def _serve(pool: Pool, call: Call) -> None:
    if not pool.has_room(call.make_pick_request):
        raise RuntimeError("idle instances have no room")
    with pool.make_lease(call.make_pick_request()) as lease:
        lease.record_usage(call.prompt_tokens, call.prompt_tokens // 2)
        lease.release_compute()


def _body(messages: int, sentences: int, turn: int) -> bytes:
    """Return the body of a turn in one of twenty conversations."""
    said = [
        {"role": "user" if number % 2 == 0 else "assistant", "content": _SENTENCE.format(turn % 20, 0, 0) * sentences}
        for number in range(messages - 1)
    ]
    return orjson.dumps({"model": "m", "messages": [*said, {"role": "user", "content": f"And now {turn}?"}]})
