"""Engines that fail: before an answer begins, in the middle of it, once and twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

from proxy.wire.openai import Api
from tests.asking import request
from tests.dialects import messages, responses
from tests.recorded.answers import PACED
from tests.recorded.conversation import Conversation, Talk
from tests.talking import Clients, raw

Fault = tuple[str, dict[str, Any]]
"""An action of simulated engines, and its fields."""

REFUSALS: Final = (429, 503)
EARLY: Final[dict[str, tuple[str, Fault]]] = {
    **{
        f"{role}-{status}": (role, ("refuse_status", {"status": status}))
        for role, status in product(("prefill", "decode"), (400, 429, 500, 503))
    },
    **{
        f"{role}-{action.replace('_', '-')}": (role, (action, {}))
        for role, action in product(
            ("prefill", "decode"), ("reset_before_headers", "invalid_json", "truncated_json", "kill")
        )
    },
    "prefill-missing-kv-params": ("prefill", ("missing_kv_params", {})),
    "prefill-lost-response": ("prefill", ("lost_response", {})),
    "decode-reset-after-headers": ("decode", ("reset_after_headers", {})),
    "decode-load-failure": ("decode", ("load_failure", {})),
}
# Streams are no JSON, and the other refusals come to the same in both forms.
NOT_OF: Final = {"decode-invalid-json": "stream", "decode-truncated-json": "stream"} | {
    f"{role}-{status}": "whole" for role, status in product(("prefill", "decode"), (400, 429, 503))
}
HANGING: Final = {
    "prefill-hangs": ("prefill", ("hang_before_headers", {})),
    "decode-hangs": ("decode", ("hang_after_headers", {})),
    "decode-stalls": ("decode", ("stall_after_tokens", {"tokens": 3})),
}
MIDDLE: Final[dict[str, Fault]] = {
    "reset": ("reset_after_tokens", {"tokens": 3}),
    "kill": ("kill", {"tokens": 3}),
    "no-finish": ("end_without_finish", {"tokens": 3}),
    "done-without-finish": ("end_without_finish", {"tokens": 3, "done": True}),
    "error-event": ("error_event", {"tokens": 3}),
    "recompute": ("recompute", {"tokens": 3}),
    "abort": ("abort", {"tokens": 3}),
}
WRITTEN_ODDLY: Final[dict[str, Fault]] = {
    "bytewise": ("split_bytes", {"size": 1}),
    "three-events-at-a-time": ("coalesce", {"size": 3}),
    "crlf": ("crlf", {}),
    "comments": ("comments", {}),
    "no-token-ids": ("drop_token_ids", {}),
}
FORMS: Final = {"stream": True, "whole": False}
RESUME: Final[dict[str, Any]] = {"repeat_up_to_tokens": 0, "pressure_seconds": 0.0, "deadline_seconds": 30.0}
# Learned seconds would decide between engines that failed and engines that did not.
BALANCE: Final = {"prefill_policy": "least_tokens", "decode_policy": "least_tokens"}
LONG: Final[dict[str, Any]] = {"max_tokens": 8}
BODIES: Final[Mapping[str, tuple[str, str, dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", "vllm_pull", request(Api.CHAT, **LONG)),
    "completions": ("/v1/completions", "vllm_pull", request(Api.COMPLETIONS, **LONG)),
    "messages": ("/v1/messages", "vllm_pull", messages.question(**LONG)),
    "responses": ("/v1/responses", "vllm_pull", responses.question(max_output_tokens=8)),
    "generate": ("/generate", "sglang_bootstrap", {"text": "Hi", "sampling_params": {"max_new_tokens": 8}}),
}


def failing(body: Mapping[str, Any], path: str, engine_path: str, faults: Sequence[tuple[str, Fault]]) -> Talk:
    """Ask with the n-th fault of a role at its n-th engine, and then again without faults.

    The second request is left out if its course depends on time: engines that refused get no request for a while.
    `engine_path`: the engines' path for such a request.
    """

    async def talk(clients: Clients) -> None:
        gateway = clients.gateway
        engines = {"prefill": [*gateway.prefillers], "decode": [*gateway.decoders]}
        for role, (action, fields) in faults:
            times = None if fields.get("status") in REFUSALS else 1
            engines[role].pop(0).faults.add(action, path=engine_path, times=times, **fields)
        line = await clients.connect()
        line.send(raw(dict(body), path))
        await line.answer()
        await clients.rest()
        for engine in gateway.engines:
            engine.faults.clear()
        if any(fields.get("status") in REFUSALS for _, (_, fields) in faults):
            return
        again = await clients.connect()
        again.send(raw({**body, "stream": False}, path))
        await again.answer()

    return talk


def conversation(
    name: str,
    form: str,
    faults: Sequence[tuple[str, Fault]],
    *,
    api: str = "chat",
    decoders: int = 2,
    engine: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Conversation:
    path, connector, body = BODIES[api]
    engine_path = path if api in ("completions", "generate") else "/v1/chat/completions"
    return Conversation(
        name=f"{name}-{form}",
        talk=failing({**body, "stream": FORMS[form]}, path, engine_path, faults),
        prefillers=2,
        decoders=decoders,
        connector=connector,
        engine=engine or {},
        settings={"balance": BALANCE, **settings, "resume": RESUME | settings.get("resume", {})},
        loses_kv=True,
    )


def before_an_answer() -> Iterator[Conversation]:
    for (name, fault), form in product(EARLY.items(), FORMS):
        if form != NOT_OF.get(name):
            # Whole answers that could be resumed are streams of engines.
            mode = "exact" if form == "stream" else "restart-only"
            yield conversation(f"fails-{name}", form, [fault], resume={"mode": mode})
    for status, role in product((429, 503), ("prefill", "decode")):
        faults = [(role, ("refuse_status", {"status": status}))] * 2
        yield conversation(f"fails-all-{role}-{status}", "stream", faults, admission={"wait_seconds": 0.3})
    short = {f"{stage}_seconds": 0.3 for stage in ("prefill", "handoff", "first_token", "answer", "idle")}
    for (name, fault), form in product(HANGING.items(), FORMS):
        yield conversation(f"times-out-{name}", form, [fault], timeouts=short, resume={"mode": "off"})


def in_the_middle() -> Iterator[Conversation]:
    for (name, fault), form in product(MIDDLE.items(), FORMS):
        if form == "stream" or name in ("reset", "recompute"):
            yield conversation(f"breaks-{name}-exact", form, [("decode", fault)])
    for name, form in (("reset", "stream"), ("reset", "whole"), ("recompute", "stream"), ("error-event", "stream")):
        yield conversation(f"breaks-{name}-restart", form, [("decode", MIDDLE[name])], resume={"mode": "restart-only"})
    once, twice = [[("decode", MIDDLE["reset"])] * count for count in (1, 2)]
    for api in BODIES:
        yield conversation(f"breaks-{api}-once", "stream", once, api=api, engine=PACED)
        yield conversation(f"breaks-{api}-twice", "stream", twice, api=api, decoders=3, engine=PACED)
    yield conversation("breaks-chat-twice-unpaced", "stream", twice, decoders=3)
    yield conversation("breaks-chat-twice-restart", "stream", twice, decoders=3, resume={"mode": "restart-only"})
    yield conversation("breaks-chat-twice", "whole", twice, decoders=3)
    for name, fault in WRITTEN_ODDLY.items():
        yield conversation(f"written-{name}", "stream", [("decode", fault)])


def stale(role: str, form: str) -> Conversation:
    """Close an idle connection of the engine just when it is used again."""

    async def talk(clients: Clients) -> None:
        engines = clients.gateway.prefillers if role == "prefill" else clients.gateway.decoders
        line = await clients.connect()
        body = {**BODIES["chat"][2], "stream": FORMS[form]}
        for number in range(2):
            if number:
                engines[0].faults.add("close_reused", times=1)
            await line.ask(body)

    settings = {"resume": RESUME}
    return Conversation(name=f"fails-stale-{role}-{form}", talk=talk, settings=settings, loses_kv=True)


def conversations() -> Iterator[Conversation]:
    yield from before_an_answer()
    yield from in_the_middle()
    yield from (stale(role, form) for role, form in product(("prefill", "decode"), FORMS))


CONVERSATIONS: Final = tuple(conversations())
