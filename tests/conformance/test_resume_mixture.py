"""Random requests that break off once or twice: the client gets the answer without faults."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from proxy.sim.model.tokenizer import MARKERS, SECTION_BEGIN
from tests.conformance.resuming import (
    NATIVE,
    PROFILES,
    chat,
    completion,
    content_of,
    difference,
    generated,
    serving,
    story,
    text_of,
    thoughts,
    uninterrupted,
)

TOKENS_IN_A_CHUNK = [{}, {}, {"tokens_per_step": 3}, {"stream_interval": 4}]


class Fault(NamedTuple):
    """A fault of a decoder after a number of tokens."""

    action: str
    tokens: int
    fields: dict[str, Any]


class Case(NamedTuple):
    """A request, the engines' options, and the faults of the first and the second decoder."""

    connector: str
    body: dict[str, Any]
    engine: dict[str, Any]
    chats: str
    faults: list[Fault]


@st.composite
def cases(draw: st.DrawFn, profile: str) -> Case:
    make = draw(st.sampled_from([completion, chat, thoughts, story]))
    body = make(draw(st.sampled_from(["What is it?", "Go on", "What now?", "Where to?"])))
    ids = generated(body)
    end = min(len(ids), body["max_tokens"])
    body |= draw(options(profile, body, end))
    end = min(end, body["max_tokens"])
    faults = [draw(first_fault(end, may_end="stop" not in body))]
    if draw(st.booleans()):
        action = draw(st.sampled_from(["recompute", "error_event", "reset_after_tokens"]))
        faults.append(Fault(action, draw(st.integers(action != "recompute", end)), {}))
    connector = draw(st.sampled_from(["vllm_pull", "vllm_pull", "vllm_pull", "plain"]))
    if connector == "plain":
        body.pop("n", None)  # several choices of one engine are not resumed
    chats = draw(st.sampled_from(["auto", "auto", "completions"]))
    if connector == "plain" and "messages" in body and "chat_template_kwargs" not in body:
        chats = "auto"  # in a completion, engines do not report empty reasoning
    return Case(connector, body, draw(st.sampled_from(TOKENS_IN_A_CHUNK)), chats, faults)


@st.composite
def options(draw: st.DrawFn, profile: str, body: dict[str, Any], end: int) -> dict[str, Any]:
    """Draw options of the request."""
    some = lambda: draw(st.integers(0, 3)) == 0  # noqa: E731 a coin that falls on its edge
    is_chat = "messages" in body
    members: dict[str, Any] = {}
    if not some():
        members["stream"] = True
        members["stream_options"] = {"include_usage": not some(), "continuous_usage_stats": some()}
    if some():
        members["return_token_ids"] = True
    if some():
        members["n"] = 2
    # With limits inside a call, versions before 0.27 invent the end of its arguments.
    if some() and ("tools" not in body or profile in NATIVE):
        members["max_tokens"] = draw(st.integers(1, end))
    if some() and (stop := draw(stops(body, end))):
        members["stop"] = [stop, "nowhere"]
        members["include_stop_str_in_output"] = some()
        if some():
            members["min_tokens"] = draw(st.integers(0, members.get("max_tokens", end)))
    # Before 0.33, offsets depend on the chunks if text is held back for stop strings.
    if some() and (is_chat or "stop" not in members or profile == "v0.33"):
        members |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 1}
    # Only engines know which tokens are hidden reasoning.
    if some() and is_chat and not {"return_token_ids", "logprobs"} & set(members):
        members["include_reasoning"] = False
    return members


@st.composite
def stops(draw: st.DrawFn, body: dict[str, Any], end: int) -> str:
    """Draw a stop string: a part of the answer, or one that only begins like it.

    It has no space at its ends, which may not be sent, and no part of a tool call, where only engines search.
    """
    ids = generated(body)
    begin = draw(st.integers(0, end - 1))
    until = draw(st.integers(begin + 1, min(end, begin + 12)))
    if SECTION_BEGIN in ids[:until] or any(token in MARKERS for token in ids[begin:until]):
        return ""
    text = text_of(body, begin, until).strip()
    return text + "!" if text and draw(st.booleans()) else text


@st.composite
def first_fault(draw: st.DrawFn, end: int, *, may_end: bool) -> Fault:
    actions = ["recompute", "recompute", "error_event", "reset_after_tokens"]
    if may_end:  # a complete answer would have no usage
        actions.append("end_without_finish")
    action = draw(st.sampled_from(actions))
    fields: dict[str, Any] = {}
    if action == "recompute":
        fields["merged"] = draw(st.integers(0, 3))
    if action == "end_without_finish":
        fields["done"] = draw(st.booleans())
    return Fault(action, draw(st.integers(0, end - 1)), fields)


@pytest.mark.parametrize("profile", PROFILES)
@given(data=st.data())
# Failures are not shrunk, because that takes longer than the time limit of a test.
@settings(max_examples=12, derandomize=True, deadline=None, phases=[Phase.generate])
async def test_any_request_is_resumed_correctly(profile: str, data: st.DataObject) -> None:
    case = data.draw(cases(profile))
    setup: dict[str, Any] = {"connector": case.connector, "engine": case.engine}
    expected = await uninterrupted(profile, case.body, **setup)
    async with serving(profile, **setup, resume={"chats": case.chats}) as gateway:
        for decoder, fault in zip(gateway.decoders, case.faults, strict=False):
            decoder.faults.add(fault.action, tokens=fault.tokens, times=1, **fault.fields)
        gateway.expects_inexact_pins = any(fault.tokens == 0 for fault in case.faults)
        assert not difference(content_of(await gateway.ask(case.body)), expected)
