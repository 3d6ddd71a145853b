"""Helpers that compare interrupted answers with uninterrupted ones: requests, places, and contents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson

from proxy.sim.engine import SimulatedEngine
from proxy.sim.model.tokenizer import END, SPACE, decode_tokens, encode_text, render_chat
from proxy.sim.model.writer import DeterministicWriter
from proxy.wire.openai import Api
from tests.asking import Answer, request, until
from tests.deployment import Deployment, deployed

Place = Callable[[Sequence[int]], int]
"""Says after how many of the generated tokens an answer breaks off."""

COMPLETIONS_ONLY = ("v0.18", "v0.23")
"""Profiles of engines that take token ids for a prompt at `/v1/completions` only."""
NATIVE = ("v0.27", "v0.30", "v0.33")
"""Profiles of engines that take token ids for chats, too."""
PROFILES = (*COMPLETIONS_ONLY, *NATIVE)

THINKING: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {parameter: {}}}}}
    for name, parameter in (("find", "q"), ("show", "at"))
]

WITH_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}

# No chat ends at the engines' default limit, which they do not report. Cached tokens have their own test.
ENGINE: dict[str, Any] = {
    "tool_call_parser": "kimi_k2",
    "default_max_tokens": 100_000,
    "eos_after": 100,
    "prompt_tokens_details": False,
}


# Requests


def completion(text: str = "What is it?", **fields: Any) -> dict[str, Any]:
    """Return the request for a completion of 40 tokens."""
    return request(Api.COMPLETIONS, text, **{"max_tokens": 40, **fields})


def chat(text: str = "What is it?", **fields: Any) -> dict[str, Any]:
    """Return the request for a chat of 40 tokens. Its content begins with a character of three tokens."""
    return request(Api.CHAT, text, **{"max_tokens": 40, **fields})


def thoughts(text: str = "What is it?", **fields: Any) -> dict[str, Any]:
    """Return the request for a chat of 90 tokens: reasoning up to the 43rd, then content."""
    return chat(text, **{"max_tokens": 90, **THINKING, **fields})


def story(text: str = "What now?", **fields: Any) -> dict[str, Any]:
    """Return the request for a chat of 137 tokens: reasoning, content and two tool calls."""
    return chat(text, **{"max_tokens": 300, **THINKING, "tools": TOOLS, **fields})


# Places


def generated(body: Mapping[str, Any], **engine: Any) -> list[int]:
    """Return the token ids that an engine generates for a request without its limits, at most 400."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        prompt = prompt[0]
    if prompt is None:
        prompt = render_chat(dict(body))
    elif isinstance(prompt, str):
        prompt = encode_text(prompt)
    writer = DeterministicWriter(prompt, eos_after={**ENGINE, **engine}["eos_after"])
    ids: list[int] = []
    while len(ids) < 400 and END not in ids[-1:]:
        ids.append(writer.next())
    return ids


def text_of(body: Mapping[str, Any], begin: int, end: int) -> str:
    """Return the text of some generated tokens, without markers and incomplete characters."""
    return decode_tokens(generated(body)[begin:end]).strip("\N{REPLACEMENT CHARACTER}")


def after(tokens: int) -> Place:
    """Break off after this number of tokens."""
    return lambda ids: tokens


def before(marker: int, *, nth: int = 1) -> Place:
    """Break off before the marker."""
    return past(marker, 0, nth=nth)


def past(marker: int, tokens: int, *, nth: int = 1) -> Place:
    """Break off after this number of tokens, counted from the marker, which is the first of them."""

    def place(ids: Sequence[int]) -> int:
        return [at for at, token in enumerate(ids) if token == marker][nth - 1] + tokens

    return place


def in_character(past: Place) -> Place:
    """Break off after the first byte of the next character that has several."""

    def place(ids: Sequence[int]) -> int:
        return next(at for at in range(past(ids), len(ids)) if 0xC0 <= ids[at] < 0x100) + 1

    return place


def past_space(past: Place) -> Place:
    """Break off after the next space."""
    return lambda ids: list(ids).index(SPACE, past(ids)) + 1


# Deployments


@asynccontextmanager
async def serving(
    profile: str,
    *,
    connector: str = "vllm_pull",
    prefillers: int = 1,
    decoders: int = 2,
    engine: Mapping[str, Any] | None = None,
    resume: Mapping[str, Any] | None = None,
    **sections: Any,
) -> AsyncIterator[Deployment]:
    """Serve with engines of one version, and resume even the shortest answers.

    The deployment checks at its end that nothing is left; see tests/deployment.py.
    """
    options = {"profile_name": profile, **ENGINE, **(engine or {})}
    is_plain = connector == "plain"
    if is_plain:
        options = {"protocol": "none", **options}
    async with deployed(
        [SimulatedEngine(role="prefill", **options) for _ in range(0 if is_plain else prefillers)],
        [SimulatedEngine(role="both" if is_plain else "decode", **options) for _ in range(decoders)],
        connector=connector,
        resume={"repeat_up_to_tokens": 0, **(resume or {})},
        **sections,
    ) as gateway:
        yield gateway


_uninterrupted: dict[bytes, Any] = {}


async def uninterrupted(
    profile: str, body: Mapping[str, Any], *, connector: str = "vllm_pull", engine: Mapping[str, Any] | None = None
) -> Any:
    """Return the content of the answer without faults, from a gateway with the same options."""
    key = orjson.dumps([profile, body, connector, engine], option=orjson.OPT_SORT_KEYS)
    if key not in _uninterrupted:
        async with serving(profile, connector=connector, engine=engine, decoders=1) as gateway:
            answer = await gateway.ask(dict(body))
            assert answer.is_done
            assert answer.status == 200
            _uninterrupted[key] = content_of(answer)
    return _uninterrupted[key]


async def differences(
    profile: str,
    body: Mapping[str, Any],
    places: Iterable[int],
    *,
    fault: str = "recompute",
    then: int | None = None,
    connector: str = "vllm_pull",
    engine: Mapping[str, Any] | None = None,
    **resume: Any,
) -> dict[int, str]:
    """Break the same answer off at each of these places, and resume it on the same decoder.

    Args:
        profile: Profile of the engines.
        body: The request.
        places: Numbers of tokens.
        fault: The fault that breaks the answer off.
        then: Number of further tokens after which the resumed answer breaks off; None: it does not.
        connector: Name of the connector.
        engine: Options of the engines.
        resume: Settings of resume.

    Returns:
        Differences from the uninterrupted answer, by place, without equal answers.
    """
    expected = await uninterrupted(profile, body, connector=connector, engine=engine)
    found: dict[int, str] = {}
    resume = {"pressure_seconds": 0.0, **resume}
    async with serving(profile, connector=connector, engine=engine, decoders=1, resume=resume) as gateway:
        [decoder] = gateway.decoders
        for place in places:
            # A release of KV is a request, too, which would consume a fault.
            await until(lambda: not gateway.worker.releaser.pending_count, "releases of KV")
            decoder.faults.clear()
            decoder.faults.add(fault, tokens=place, times=1)
            if then is not None:
                decoder.faults.add(fault, tokens=then, times=1)
            gateway.expects_inexact_pins |= place == 0
            answer = await gateway.ask(dict(body))
            try:
                answered = content_of(answer)
            except AssertionError as wrong:
                found[place] = str(wrong).partition("\n")[0]
                continue
            if wrong_there := difference(answered, expected):
                found[place] = wrong_there
    return found


def difference(answered: Any, expected: Any) -> str:
    """Return the differences from the expected content; empty if there are none."""
    return "; ".join(_differences(answered, expected, ""))


def _differences(answered: Any, expected: Any, path: str) -> list[str]:
    if answered == expected:
        return []
    if not (isinstance(answered, dict) and isinstance(expected, dict)):
        return [f"{path} is {answered!r}, not {expected!r}"]
    missing = "nothing"
    return [
        text
        for name in expected | answered
        for text in _differences(answered.get(name, missing), expected.get(name, missing), f"{path}.{name}".lstrip("."))
    ]


def actions(gateway: Deployment) -> list[str]:
    """Return the actions of all resumes, sorted, each as often as it was taken."""
    done = gateway.metrics("pdproxy_resumes_total")
    return sorted(action for (action, _), times in done.items() for _ in range(int(times)))


def causes(gateway: Deployment) -> list[str]:
    """Return the causes of all resumes, sorted, each as often as it occurred."""
    done = gateway.metrics("pdproxy_resumes_total")
    return sorted(cause for (_, cause), times in done.items() for _ in range(int(times)))


# Contents of answers


def content_of(answer: Answer) -> Any:
    """Return a complete answer in a form that is equal for answers with the same meaning.

    It leaves out the id and the time, which must differ, and the division of a stream into chunks. It has the members
    that all chunks share.
    """
    assert answer.is_done, answer.error or "it ends without an error"
    assert answer.status == 200, answer.error
    assert b"recomputed" not in answer.body
    if not answer.is_stream:
        # Engines send unknown counts as null, and the gateway leaves them out when it assembles a stream.
        usage = {name: value for name, value in answer.usage.items() if value is not None}
        left_out = ("id", "created", "kv_transfer_params")
        return {name: value for name, value in answer.json.items() if name not in left_out} | {"usage": usage}
    *chunks, done = answer.events
    assert done == "[DONE]"
    assert "[DONE]" not in chunks
    with_choices = [chunk for chunk in chunks if chunk["choices"]]
    assert {(chunk["id"], chunk["created"]) for chunk in chunks} == {(chunks[0]["id"], chunks[0]["created"])}
    indexes = {choice["index"] for chunk in with_choices for choice in chunk["choices"]}
    return {
        "heads": {(chunk["object"], chunk["model"]) for chunk in chunks},
        "choices": {index: _choice(with_choices, index) for index in sorted(indexes)},
        "usages": [chunk["usage"] for chunk in chunks if not chunk["choices"]],
        "last_counts": next((chunk.get("usage") for chunk in reversed(with_choices)), None),
        "usage_comes_last": all(chunk["choices"] for chunk in chunks[:-1]),
        "prompt_ids": [ids for chunk in chunks if (ids := chunk.get("prompt_token_ids"))],
        # The first comes with a finish reason, unless the gateway added that. The second is not for clients.
        "members": set().union(*chunks) - {"system_fingerprint", "kv_transfer_params"},
    }


def _choice(chunks: Iterable[dict[str, Any]], index: int) -> dict[str, Any]:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    deltas = [choice["delta"] for choice in choices if "delta" in choice]
    return {
        "role_chunks": [number for number, delta in enumerate(deltas) if "role" in delta],
        "reasoning": "".join(delta.get("reasoning") or delta.get("reasoning_content") or "" for delta in deltas),
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "text": "".join(choice.get("text") or "" for choice in choices),
        "tool_calls": _tool_calls(deltas),
        "finish": [
            (number - len(choices), choice["finish_reason"], choice.get("stop_reason", choice.get("matched_stop")))
            for number, choice in enumerate(choices)
            if choice["finish_reason"] is not None or choice.get("stop_reason") is not None
        ],
        "token_ids": [token for choice in choices for token in choice.get("token_ids") or ()],
        "has_ids": any(choice.get("token_ids") is not None for choice in choices),
        "prompt_ids": [ids for choice in choices if (ids := choice.get("prompt_token_ids"))],
        "logprobs": _logprobs(choices),
        "members": set().union(*choices),
    }


def _tool_calls(deltas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls") or ()):
        function = part.get("function") or {}
        if "id" in part:
            assert part["index"] == len(calls), "tool calls begin one after the other"
            calls.append({"id": part["id"], "type": part["type"], "name": function["name"], "arguments": ""})
        calls[part["index"]]["arguments"] += function.get("arguments") or ""
    return calls


def _logprobs(choices: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    entries: dict[str, list[Any]] = {}
    for logprobs in (choice["logprobs"] for choice in choices if choice.get("logprobs")):
        for name, values in logprobs.items():
            entries.setdefault(name, []).extend(values or ())
    return entries
