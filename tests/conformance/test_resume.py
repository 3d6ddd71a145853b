"""Exact resume with vLLM: decoders fail at any place, and the client gets the answer without faults.

Each row has a request, the place and the fault, and the expected action by engine version. The request goes to the
first of two decoders. Every answer is compared with that of a gateway without faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.sim.model.tokenizer import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    END,
    SECTION_BEGIN,
    SECTION_END,
    THINK_END,
    render_chat,
)
from tests.asking import Answer, ask
from tests.canned import CannedEngine, data, event_stream
from tests.conformance.resuming import (
    NATIVE,
    PROFILES,
    WITH_USAGE,
    Place,
    actions,
    after,
    before,
    causes,
    chat,
    completion,
    content_of,
    difference,
    differences,
    generated,
    in_character,
    past,
    past_space,
    serving,
    story,
    text_of,
    thoughts,
    uninterrupted,
)
from tests.deployment import Deployment, deployed, generations

ERROR = "error"
"""Expectation instead of an action: the client gets an error."""
RETRIED = ""
"""Expectation instead of an action: the request is retried, because it had no token. A retry is no resume."""


@dataclass(frozen=True)
class Row:
    """One row of the tables.

    `does`: actions in all versions, or `before 0.27 / since`; several are joined by +. `then`: number of tokens after
    which the second decoder breaks off, too; None: it does not.
    """

    kind: str
    body: Mapping[str, Any]
    where: str
    place: Place
    does: str
    fault: str = "recompute"
    fields: Mapping[str, Any] = field(default_factory=dict)
    then: int | None = None

    def __str__(self) -> str:
        details = [self.fault, *(f"{name}={value}" for name, value in self.fields.items())]
        return "-".join([self.kind, self.where.replace(" ", "_"), *details])

    def expected(self, profile: str) -> list[str]:
        before, _, since = self.does.partition(" / ")
        does = since if since and profile in NATIVE else before
        return sorted(action for action in does.split("+") if action)


def rows(
    kind: str, body: Mapping[str, Any], *lines: tuple[Any, ...], profiles: tuple[str, ...] = PROFILES
) -> list[tuple[Row, str]]:
    return [(Row(kind, body, *line), profile) for line in lines for profile in profiles]


def features_of(row: tuple[Row, str]) -> set[object]:
    """Return the features of a row that the short suite must cover.

    It runs each row with an engine that takes token ids of a chat and with one that does not, if there are such rows.
    It runs each kind of answer with all versions.
    """
    return {(str(row[0]), row[1] in NATIVE), (row[0].kind, row[1])}


# Actions at every place

CONTINUE = "raw_tokens / chat_tokens"
CONTINUE_TWICE = "raw_tokens+raw_tokens / chat_tokens+chat_tokens"
ROLL_BACK = "raw_tokens / roll_back"
TOKENS_TWICE = "completion_tokens+completion_tokens"

STREAMED_CHAT = rows(
    *("chat", story(**WITH_USAGE)),
    ("before the first token", after(0), "restart"),
    ("behind the first token", after(1), CONTINUE),
    ("in reasoning", after(10), CONTINUE),
    ("behind a space in reasoning", past_space(after(10)), CONTINUE),
    ("in a character of reasoning", in_character(after(0)), CONTINUE),
    ("before </think>", before(THINK_END), CONTINUE),
    ("at </think>", past(THINK_END, 1), CONTINUE),
    ("in a character of content", in_character(past(THINK_END, 1)), CONTINUE),
    ("behind </think>", past(THINK_END, 2), CONTINUE),
    ("in content", past(THINK_END, 10), CONTINUE),
    ("behind a space in content", past_space(past(THINK_END, 1)), CONTINUE),
    ("before the tool calls", before(SECTION_BEGIN), CONTINUE),
    ("at the tool calls", past(SECTION_BEGIN, 1), ROLL_BACK),
    ("at a call", past(CALL_BEGIN, 1), ROLL_BACK),
    ("in its name", past(CALL_BEGIN, 12), ROLL_BACK),
    ("before its arguments", before(ARGUMENT_BEGIN), ROLL_BACK),
    ("at its arguments", past(ARGUMENT_BEGIN, 1), "suffix / roll_back"),
    ("in its arguments", past(ARGUMENT_BEGIN, 5), "suffix"),
    ("before its end", before(CALL_END), "suffix"),
    ("at its end", past(CALL_END, 1), "suffix"),
    ("at the next call", past(CALL_BEGIN, 1, nth=2), "suffix"),
    ("in the next name", past(CALL_BEGIN, 12, nth=2), "suffix"),
    ("in a character of the next arguments", in_character(past(ARGUMENT_BEGIN, 1, nth=2)), "suffix"),
    ("at the end of the next call", past(CALL_END, 1, nth=2), "suffix"),
    ("at the end of the tool calls", past(SECTION_END, 1), "raw_tokens"),
)

WHOLE_CHAT = rows(
    *("whole-chat", story()),
    ("before the first token", after(0), "restart"),
    ("in reasoning", after(10), "restart"),
    ("in content", after(63), "restart"),
    ("where a restart would be expensive", after(64), CONTINUE),
    ("at the tool calls", past(SECTION_BEGIN, 1), ROLL_BACK),
    ("in a name", past(CALL_BEGIN, 12), ROLL_BACK),
    ("in its arguments", past(ARGUMENT_BEGIN, 5), "suffix"),
    ("in the next name", past(CALL_BEGIN, 12, nth=2), "suffix"),
    ("at the end of the tool calls", past(SECTION_END, 1), "raw_tokens"),
    profiles=("v0.23", "v0.27", "v0.33"),
)

PLAIN_CHAT = rows(
    *("plain-chat", chat(**WITH_USAGE)),
    ("in the first character", after(1), CONTINUE),
    ("behind the first character", after(3), CONTINUE),
    ("in a word", after(10), CONTINUE),
    profiles=("v0.18", "v0.27", "v0.33"),
)

STREAMED_COMPLETION = rows(
    *("completion", completion(**WITH_USAGE)),
    ("before the first token", after(0), "restart"),
    ("behind the first token", after(1), "completion_tokens"),
    ("in a word", after(10), "completion_tokens"),
    ("in a character", in_character(after(5)), "completion_tokens"),
    ("before the last token", after(39), "completion_tokens"),
    profiles=("v0.18", "v0.27", "v0.33"),
)

WHOLE_COMPLETION = rows(
    *("whole-completion", completion(max_tokens=100)),
    ("before the first token", after(0), "restart"),
    ("early", after(63), "restart"),
    ("late", after(64), "completion_tokens"),
    profiles=("v0.18", "v0.33"),
)


@pytest.mark.covering(
    "row profile", [*STREAMED_CHAT, *WHOLE_CHAT, *PLAIN_CHAT, *STREAMED_COMPLETION, *WHOLE_COMPLETION], features_of
)
async def test_answer_is_resumed_at_any_place(row: Row, profile: str) -> None:
    await check(profile, row)


async def check(
    profile: str, row: Row, *, connector: str = "vllm_pull", engine: Mapping[str, Any] | None = None, **sections: Any
) -> None:
    """Check one answer that the first decoder breaks off."""
    body = dict(row.body)
    expected = await uninterrupted(profile, body, connector=connector, engine=engine)
    tokens = row.place(generated(body, **(engine or {})))
    async with serving(profile, connector=connector, engine=engine, **sections) as gateway:
        for decoder, count in zip(gateway.decoders, (tokens, row.then), strict=False):
            if count is not None:
                decoder.faults.add(row.fault, tokens=count, times=1, **row.fields)
        # The gateway cannot know whether the KV cache of an answer without a token was fetched.
        gateway.expects_inexact_pins = tokens == 0
        answer = await gateway.ask(body)
        if row.expected(profile) == [ERROR]:
            check_resume_error(gateway, answer)
        else:
            assert not difference(content_of(answer), expected)
            assert actions(gateway) == row.expected(profile)
            assert not gateway.metrics("pdproxy_resume_failures_total")


def check_resume_error(gateway: Deployment, answer: Answer, why: str = "") -> None:
    """Check for the error of an answer that had begun and cannot be completed."""
    assert "could not be resumed" in answer.error["message"]
    assert why in answer.error["message"]
    assert answer.error["type"] == "server_error"
    assert sum(gateway.metrics("pdproxy_resume_failures_total").values()) == 1
    if answer.is_stream:
        assert answer.status == 200
        assert not answer.is_whole
        assert b"[DONE]" not in answer.body
        assert b"recomputed" not in answer.body[: answer.body.rindex(b"data: ")]
        assert [event for event in answer.events if "error" in event] == answer.events[-1:]
    else:
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1


# Actions after every fault

SHORT: dict[str, Any] = {"timeouts": {"idle_seconds": 0.3}}

FAULTS = [
    *rows(
        *("chat", story(**WITH_USAGE)),
        ("in content", past(THINK_END, 10), CONTINUE, "recompute", {"merged": 3}),
        ("behind a space", past_space(after(10)), CONTINUE, "recompute", {"merged": 3}),
        ("at a call", past(CALL_BEGIN, 1), ROLL_BACK, "recompute", {"merged": 3}),
        ("at the arguments", past(ARGUMENT_BEGIN, 3), ROLL_BACK, "recompute", {"merged": 4}),
        ("in arguments", past(ARGUMENT_BEGIN, 8), "suffix", "recompute", {"merged": 3}),
        ("in content", past(THINK_END, 10), CONTINUE, "reset_after_tokens"),
        ("in content", past(THINK_END, 10), CONTINUE, "kill"),
        ("in content", past(THINK_END, 10), CONTINUE, "stall_after_tokens"),
        ("in content", past(THINK_END, 10), CONTINUE, "end_without_finish"),
        ("in content", past(THINK_END, 10), CONTINUE, "end_without_finish", {"done": True}),
        ("in content", past(THINK_END, 10), CONTINUE, "error_event"),
        ("in content", past(THINK_END, 10), CONTINUE, "abort"),
        ("in arguments", past(ARGUMENT_BEGIN, 5), "suffix", "kill"),
        ("before the first token", after(0), RETRIED, "reset_after_tokens"),
        ("before the first token", after(0), RETRIED, "end_without_finish"),
        ("before the first token", after(0), "restart", "end_without_finish", {"done": True}),
        ("before the first token", after(0), RETRIED, "error_event"),
        profiles=("v0.23", "v0.33"),
    ),
    # Older engines say `tool_calls` instead of `abort` once a call has begun, and nothing before the first token.
    *rows(
        *("chat", story(**WITH_USAGE)),
        ("in a name", past(CALL_BEGIN, 12), ROLL_BACK, "abort"),
        ("in arguments", past(ARGUMENT_BEGIN, 5), "suffix", "abort"),
        ("before the first token", after(0), RETRIED, "abort"),
        profiles=("v0.33",),
    ),
    *rows(
        *("whole-chat", thoughts()),
        ("early", after(50), "restart", "kill"),
        ("late", after(70), CONTINUE, "kill"),
        ("late", after(70), CONTINUE, "stall_after_tokens"),
        ("late", after(70), CONTINUE, "end_without_finish"),
        ("late", after(70), CONTINUE, "error_event"),
        ("late", after(70), CONTINUE, "abort"),
        ("late", after(70), CONTINUE, "recompute", {"merged": 3}),
        profiles=("v0.27", "v0.30"),
    ),
    *rows(
        *("completion", completion(**WITH_USAGE)),
        ("in its only chunk", after(3), "completion_tokens", "recompute", {"merged": 3}),
        ("in a word", after(10), "completion_tokens", "recompute", {"merged": 3}),
        ("in a character", in_character(after(5)), "completion_tokens", "reset_after_tokens"),
        ("in a word", after(10), "completion_tokens", "error_event"),
        ("in a word", after(10), "completion_tokens", "abort"),
        profiles=("v0.18", "v0.33"),
    ),
]


@pytest.mark.covering("row profile", FAULTS, features_of)
async def test_answer_is_resumed_after_any_fault(row: Row, profile: str) -> None:
    await check(profile, row, **(SHORT if row.fault == "stall_after_tokens" else {}))


# Two breaks in one answer

TWICE = rows(
    *("chat", story(**WITH_USAGE)),
    ("in reasoning, at once", after(10), CONTINUE_TWICE, "recompute", {}, 0),
    ("in reasoning, soon", after(10), CONTINUE_TWICE, "recompute", {}, 1),
    ("in reasoning, in content", after(10), CONTINUE_TWICE, "recompute", {}, 45),
    ("in reasoning, in a name", after(10), "raw_tokens+raw_tokens / chat_tokens+roll_back", "recompute", {}, 68),
    ("in content, in arguments", past(THINK_END, 9), "raw_tokens+suffix / chat_tokens+suffix", "recompute", {}, 40),
    (
        "in a name, in it again",
        past(CALL_BEGIN, 9),
        "raw_tokens+raw_tokens / roll_back+roll_back",
        "recompute",
        {},
        5,
    ),
    ("in a name, in arguments", past(CALL_BEGIN, 9), "raw_tokens+suffix / roll_back+suffix", "recompute", {}, 25),
    ("in arguments, soon", past(ARGUMENT_BEGIN, 5), "suffix+suffix", "recompute", {}, 2),
    ("in arguments, in the next name", past(ARGUMENT_BEGIN, 5), "suffix+suffix", "recompute", {}, 20),
    ("in reasoning, in content", after(10), CONTINUE_TWICE, "reset_after_tokens", {}, 45),
    profiles=("v0.23", "v0.30", "v0.33"),
) + rows(
    *("completion", completion(**WITH_USAGE, return_token_ids=True)),
    ("in a word, at once", after(10), TOKENS_TWICE, "recompute", {}, 0),
    ("in a word, in a character", after(10), TOKENS_TWICE, "recompute", {}, 4),
    ("in a character, at once", in_character(after(5)), TOKENS_TWICE, "recompute", {}, 1),
    profiles=("v0.18", "v0.33"),
)


@pytest.mark.covering("row profile", TWICE, features_of)
async def test_answer_is_resumed_twice(row: Row, profile: str) -> None:
    await check(profile, row, decoders=2 if row.fault == "recompute" else 3)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("profile", ["v0.23", "v0.33"])
async def test_answer_ends_with_an_error_after_too_many_resumes(profile: str, stream: bool) -> None:
    async with serving(profile, resume={"max_attempts": 2}) as gateway:
        for decoder in gateway.decoders:
            decoder.faults.add("recompute", tokens=5)
        answer = await gateway.ask(chat("Go on", stream=stream))
        check_resume_error(gateway, answer, "broke off 3 times")
        assert len(generations(*gateway.decoders)) == 3
        # The streamed part is correct: five tokens from each decoder.
        if stream:
            assert answer.text == text_of(chat("Go on"), 0, 15)


# Answers that cannot be resumed

MEDIA = [{"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {}}]}]
NAMES: dict[str, Any] = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string"}, "minItems": 9}},
}
JSON: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "names", "schema": NAMES}}}
FORCED: dict[str, Any] = {"tool_choice": "required"}

NOT_RESUMABLE = [
    *rows("json", thoughts(**WITH_USAGE, **JSON), ("in reasoning", after(10), "error / chat_tokens")),
    *rows("json", thoughts(**WITH_USAGE, **JSON), ("in content", after(60), "error"), profiles=("v0.18", "v0.33")),
    *rows(
        *("json-greedy", thoughts(**WITH_USAGE, **JSON, temperature=0)),
        ("in content", after(60), "replay"),
        profiles=("v0.23", "v0.33"),
    ),
    *rows("whole-json", thoughts(**JSON), ("in content", after(70), "restart"), profiles=("v0.18", "v0.33")),
    *rows(
        *("forced", story(**WITH_USAGE, **FORCED)),
        ("in arguments", past(ARGUMENT_BEGIN, 5), "error"),
        profiles=("v0.18", "v0.33"),
    ),
    *rows(
        *("forced-greedy", story(**WITH_USAGE, **FORCED, temperature=0.0)),
        ("in arguments", past(ARGUMENT_BEGIN, 5), "replay"),
        ("in the next name", past(CALL_BEGIN, 12, nth=2), "replay"),
        ("in arguments, sooner", past(ARGUMENT_BEGIN, 5), "replay+replay", "recompute", {}, 20),
        ("in arguments, later", past(ARGUMENT_BEGIN, 5), "replay+replay", "recompute", {}, 120),
        profiles=("v0.23", "v0.33"),
    ),
    *rows("media", chat(**WITH_USAGE, messages=MEDIA), ("in content", after(10), "error"), profiles=("v0.18", "v0.33")),
    *rows(
        *("media-greedy", chat(**WITH_USAGE, messages=MEDIA, temperature=0)),
        ("in content", after(10), "replay"),
        profiles=("v0.27", "v0.30"),
    ),
    *rows("whole-media", chat(messages=MEDIA, max_tokens=90), ("late", after(80), "restart"), profiles=("v0.30",)),
    *rows(
        *("regex-completion", completion(**WITH_USAGE, structured_outputs={"regex": ".*"})),
        ("in a word", after(10), "error"),
        profiles=("v0.33",),
    ),
]


@pytest.mark.covering("row profile", NOT_RESUMABLE, features_of)
async def test_answer_that_cannot_be_resumed_restarts_or_fails(row: Row, profile: str) -> None:
    await check(profile, row)


@pytest.mark.parametrize("what", ["text", "ids", "end"])
async def test_replay_with_a_different_answer_is_an_error(what: str) -> None:
    """The client has text that only the first engine would have continued."""
    body = chat(**WITH_USAGE, messages=MEDIA, temperature=0)
    tokens = 3 if what == "end" else 12
    ids = generated(body)[:tokens]
    if what == "ids":
        ids[-3] += 1
    last = {
        "index": 0,
        "delta": {"content": "something else" if what == "text" else text_of(body, 0, tokens)},
        "finish_reason": "stop",
        "token_ids": ids,
    }
    events = [data({"id": "chatcmpl-2", "choices": [last]}), data({"choices": [], "usage": {}}), b"data: [DONE]\n\n"]
    first, second = SimulatedEngine(), CannedEngine("both", event_stream(events))
    async with deployed([], [first, second], connector="plain") as gateway:
        first.faults.add("recompute", tokens=10)
        answer = await gateway.ask(body)
        check_resume_error(gateway, answer)
        assert actions(gateway) == ["replay"]


# Options of requests

IDS: dict[str, Any] = {"return_token_ids": True}
CHAT_LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
COUNTED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}

OPTIONS = [
    *rows(
        *("ids", story(**WITH_USAGE, **IDS)),
        ("in a character", in_character(after(0)), CONTINUE),
        ("behind a space", past_space(after(10)), CONTINUE),
        ("in a name", past(CALL_BEGIN, 12), ROLL_BACK),
        ("in a character of arguments", in_character(past(ARGUMENT_BEGIN, 1, nth=2)), "suffix"),
        profiles=("v0.23", "v0.27", "v0.33"),
    ),
    *rows(
        *("ids-completion", completion(**WITH_USAGE, **IDS)),
        ("in its only chunk", after(2), "completion_tokens", "recompute", {"merged": 2}),
        profiles=("v0.18", "v0.33"),
    ),
    *rows("whole-ids", thoughts(**IDS), ("late", after(70), CONTINUE), profiles=("v0.18", "v0.30")),
    *rows(
        "first-ids",
        chat(**WITH_USAGE, **IDS),
        ("in the first character", after(1), CONTINUE),
        profiles=("v0.23", "v0.33"),
    ),
    *rows(
        *("logprobs", story(**WITH_USAGE, **CHAT_LOGPROBS)),
        ("in a character", in_character(after(0)), CONTINUE),
        ("at </think>", past(THINK_END, 1), CONTINUE),
        ("in a name", past(CALL_BEGIN, 12), ROLL_BACK),
        ("in arguments", past(ARGUMENT_BEGIN, 5), "suffix"),
        profiles=("v0.18", "v0.27", "v0.33"),
    ),
    *rows("whole-logprobs", thoughts(**CHAT_LOGPROBS), ("late", after(70), CONTINUE), profiles=("v0.23", "v0.30")),
    *rows(
        *("bare-logprobs", chat(**WITH_USAGE, logprobs=True)),
        ("in a word", after(10), CONTINUE),
        profiles=("v0.23", "v0.33"),
    ),
    *rows(
        *("logprobs-completion", completion(**WITH_USAGE, logprobs=1)),
        ("in a word", after(10), "completion_tokens"),
        ("in a character", in_character(after(5)), "completion_tokens"),
        ("in a character, soon", in_character(after(5)), TOKENS_TWICE, "recompute", {}, 1),
        profiles=("v0.18", "v0.33"),
    ),
    *rows(
        *("whole-logprobs-completion", completion(max_tokens=90, logprobs=2)),
        ("late", after(75), "completion_tokens"),
        profiles=("v0.27", "v0.33"),
    ),
    *rows("counted", story(**COUNTED), ("in content", past(THINK_END, 10), CONTINUE), profiles=("v0.18", "v0.33")),
    *rows("counted", story(**COUNTED), ("in arguments", past(ARGUMENT_BEGIN, 5), "suffix"), profiles=NATIVE),
    *rows(
        *("counted-completion", completion(**COUNTED)),
        ("in a word", after(10), "completion_tokens"),
        profiles=("v0.18", "v0.33"),
    ),
    *rows("uncounted", story(stream=True), ("in content", past(THINK_END, 10), CONTINUE), profiles=("v0.18", "v0.33")),
    *rows(
        *("hidden-thoughts", story(**WITH_USAGE, include_reasoning=False)),
        ("in reasoning", after(10), "restart"),
        ("in content", past(THINK_END, 10), CONTINUE),
        ("in arguments", past(ARGUMENT_BEGIN, 5), "suffix"),
        profiles=("v0.23", "v0.33"),
    ),
    *rows(
        *("whole-hidden-thoughts", story(include_reasoning=False)),
        ("in content", past(THINK_END, 23), CONTINUE),
        profiles=("v0.23", "v0.33"),
    ),
    *rows(
        *("limit", story(**WITH_USAGE, max_tokens=60)),
        ("in content", past(THINK_END, 10), CONTINUE),
        ("before the last token", after(59), CONTINUE),
        profiles=("v0.18", "v0.33"),
    ),
    *rows(
        *("limit-in-a-call", story(**WITH_USAGE, max_tokens=100)),
        ("in content", past(THINK_END, 10), CONTINUE),
        ("in arguments", past(ARGUMENT_BEGIN, 5), "suffix"),
        profiles=("v0.27", "v0.30", "v0.33"),
    ),
    *rows(
        *("limit-in-a-name", story(**WITH_USAGE, max_tokens=82)),
        ("in content", past(THINK_END, 10), CONTINUE),
        profiles=("v0.23", "v0.27"),
    ),
    *rows(
        *("new-limit", chat(**WITH_USAGE, max_tokens=7, max_completion_tokens=30)),
        ("in a word", after(10), CONTINUE),
        profiles=("v0.18", "v0.33"),
    ),
    *rows(
        *("no-limit", {name: value for name, value in thoughts(**WITH_USAGE).items() if name != "max_tokens"}),
        ("in content", after(60), CONTINUE),
        profiles=("v0.18", "v0.33"),
    ),
    *rows(
        *("no-limit", {name: value for name, value in completion(**WITH_USAGE).items() if name != "max_tokens"}),
        ("in a word", after(10), "completion_tokens"),
        profiles=("v0.18", "v0.33"),
    ),
    *rows("least", thoughts(**WITH_USAGE, min_tokens=70), ("early", after(50), CONTINUE), profiles=("v0.18", "v0.33")),
    *rows(
        "three", story(**WITH_USAGE, n=3), ("in content", past(THINK_END, 10), CONTINUE), profiles=("v0.18", "v0.33")
    ),
    *rows(
        "three-ids",
        story(stream=True, n=3, **IDS),
        ("in arguments", past(ARGUMENT_BEGIN, 5), "suffix"),
        profiles=("v0.23", "v0.33"),
    ),
    *rows("whole-three", thoughts(n=3), ("late", after(70), CONTINUE), profiles=("v0.18", "v0.33")),
    *rows(
        *("prompts", completion(**WITH_USAGE, **IDS, prompt=["What is it?", [104, 105, 32], "Go on"], logprobs=1)),
        ("in a word", after(10), "completion_tokens"),
        profiles=("v0.18", "v0.33"),
    ),
    *rows(
        *("whole-prompts", completion(prompt=["Go on", "What is it?"], max_tokens=90)),
        ("late", after(70), "completion_tokens"),
        profiles=("v0.18", "v0.33"),
    ),
]


@pytest.mark.covering("row profile", OPTIONS, features_of)
async def test_answer_is_resumed_with_any_request_option(row: Row, profile: str) -> None:
    # With `min_tokens`, the answer does not end at its usual place.
    await check(profile, row, engine={"eos_after": 20} if "min_tokens" in row.body else None)


# Stop strings

STOPS = [
    ("completion", completion(), 20, 25),
    ("beginning", completion(), 2, 6),
    ("reasoning", thoughts(), 10, 16),
    ("end of reasoning", thoughts(), 37, 41),
    ("beginning of content", thoughts(), 44, 48),
    ("content", thoughts(), 54, 60),
]
"""Kind of text, request, and the tokens of the stop string in it."""

STOPPED = [
    pytest.param(profile, body, begin, end, id=f"{name.replace(' ', '_')}-{profile}")
    for name, body, begin, end in STOPS
    for profile in (("v0.23", "v0.33") if "content" in name or "reasoning" in name else ("v0.27",))
]


@pytest.mark.parametrize(("profile", "body", "begin", "end"), STOPPED)
async def test_stop_string_across_the_break_ends_the_answer(
    profile: str, body: dict[str, Any], begin: int, end: int
) -> None:
    stopped = {**body, "stream": True, "stop": text_of(body, begin, end)}
    assert not await differences(profile, stopped, range(begin - 1, end))


@pytest.mark.parametrize(("profile", "body", "begin", "end"), STOPPED)
async def test_partial_stop_string_stays_in_the_answer(
    profile: str, body: dict[str, Any], begin: int, end: int
) -> None:
    unstopped = {**body, "stream": True, "stop": ["nowhere", text_of(body, begin, end) + "!"], **IDS}
    assert not await differences(profile, unstopped, range(begin, end + 6, 2))


@pytest.mark.parametrize(("profile", "body", "begin", "end"), STOPPED)
async def test_text_held_back_by_a_crashed_engine_is_not_lost(
    profile: str, body: dict[str, Any], begin: int, end: int
) -> None:
    stopped = {**body, "stream": True, "stop": text_of(body, begin, end)}
    assert not await differences(profile, stopped, range(begin + 1, end, 2), fault="error_event")


@pytest.mark.parametrize("profile", ["v0.23", "v0.33"])
@pytest.mark.parametrize(("fault", "then"), [("recompute", 1), ("recompute", 8), ("end_without_finish", 3)])
@pytest.mark.parametrize("body", [completion(), thoughts()], ids=["completion", "thoughts"])
async def test_stop_string_across_two_breaks_ends_the_answer(
    profile: str, fault: str, then: int, body: dict[str, Any]
) -> None:
    stopped = {**body, "stream": True, "stop": text_of(body, 22, 31)}
    assert not await differences(profile, stopped, (18, 23, 26), fault=fault, then=then)


@pytest.mark.parametrize("chats", ["auto", "completions"])
async def test_stop_string_may_begin_with_space_before_the_break(chats: str) -> None:
    """Engines hold back this space until more reasoning follows."""
    body = thoughts(stream=True)
    stop = text_of(body, 20, 26)
    assert stop.startswith(" ")
    assert not await differences("v0.33", {**body, "stop": stop}, (20, 21, 22), chats=chats)


@pytest.mark.parametrize("profile", ["v0.23", "v0.33"])
@pytest.mark.parametrize("body", [completion(), thoughts()], ids=["completion", "thoughts"])
async def test_included_stop_string_is_complete(profile: str, body: dict[str, Any]) -> None:
    stopped = {**body, "stream": True, "stop": text_of(body, 20, 31), "include_stop_str_in_output": True}
    assert not await differences(profile, stopped, (19, 22, 28))


@pytest.mark.parametrize("profile", ["v0.23", "v0.33"])
@pytest.mark.parametrize("fault", ["recompute", "error_event"])
async def test_text_not_yet_sent_is_still_reasoning(profile: str, fault: str) -> None:
    """The client has token ids, and no text that shows their kind."""
    body = thoughts(stream=True, stop="nowhere", **IDS)
    assert not await differences(profile, body, (1, 2, 5), fault=fault)
    assert not await differences(profile, body, (2, 4), fault=fault, then=2)


@pytest.mark.parametrize("least", [22, 26, 40])
async def test_stop_string_counts_only_after_min_tokens(least: int) -> None:
    body = completion(max_tokens=60)
    stopped = {**body, "stream": True, "stop": text_of(body, 20, 25), "min_tokens": least}
    assert not await differences("v0.33", stopped, (18, 21, 23, 28))


async def test_logprob_offsets_are_correct_after_text_was_held_back() -> None:
    body = completion()
    stopped = {**body, "stream": True, "stop": text_of(body, 20, 25) + "!", "logprobs": 1}
    assert not await differences("v0.33", stopped, (15, 22))


@pytest.mark.parametrize("profile", ["v0.23", "v0.33"])
@pytest.mark.parametrize("body", [completion(), thoughts()], ids=["completion", "thoughts"])
async def test_few_extra_tokens_count_after_a_stop_string_across_the_break(profile: str, body: dict[str, Any]) -> None:
    """The next engine holds back the text of some tokens, fewer than the stop string has characters."""
    stop = text_of(body, 20, 25)
    stopped = {**body, **WITH_USAGE, **IDS, "stream": True, "stop": stop}
    (expected,) = (await uninterrupted(profile, stopped))["choices"].values()
    async with serving(profile) as gateway:
        gateway.decoders[0].faults.add("recompute", tokens=22)
        answered = content_of(await gateway.ask(stopped))
    (choice,), (usage,) = answered["choices"].values(), answered["usages"]
    length = len(expected["token_ids"])
    assert {**choice, "token_ids": choice["token_ids"][:length]} == expected
    assert 0 <= len(choice["token_ids"]) - length < len(stop)
    assert usage["completion_tokens"] == len(choice["token_ids"])


# Failures during a resume


@pytest.mark.parametrize(
    ("profile", "does"),
    [("v0.23", ["raw_tokens"] * 2), ("v0.30", ["chat_tokens"] * 2), ("v0.33", ["chat_tokens"])],
)
async def test_decoder_that_cannot_load_kv_of_a_resumed_answer_is_replaced(profile: str, does: list[str]) -> None:
    """Up to 0.30 the stream ends without an error, as in recomputation. Later versions report the failure."""
    body = thoughts(**WITH_USAGE)
    expected = await uninterrupted(profile, body)
    async with serving(profile, decoders=3) as gateway:
        gateway.decoders[0].faults.add("recompute", tokens=10)
        gateway.decoders[1].faults.add("load_failure", times=1)
        gateway.expects_inexact_pins = True
        assert not difference(content_of(await gateway.ask(body)), expected)
        assert actions(gateway) == does


@pytest.mark.parametrize("profile", ["v0.23", "v0.33"])
@pytest.mark.parametrize("fault", ["refuse_status", "missing_kv_params"])
async def test_prefiller_that_fails_a_resumed_answer_is_replaced(profile: str, fault: str) -> None:
    body = thoughts(**WITH_USAGE)
    expected = await uninterrupted(profile, body)
    async with serving(profile, prefillers=2) as gateway:
        gateway.decoders[0].faults.add("recompute", tokens=50)
        gateway.prefillers[0].faults.add(fault, skip=1)
        assert not difference(content_of(await gateway.ask(body)), expected)
        assert [len(generations(prefiller)) for prefiller in gateway.prefillers] == [2, 1]


@pytest.mark.parametrize("stream", [True, False])
async def test_engine_error_during_resume_is_not_a_client_error(stream: bool) -> None:
    """The rejected request is the gateway's own."""
    async with serving("v0.33") as gateway:
        gateway.decoders[0].faults.add("recompute", tokens=70)
        gateway.decoders[1].faults.add("refuse_status", path="/v1/chat/completions", status=400)
        answer = await gateway.ask(thoughts(stream=stream))
        check_resume_error(gateway, answer)


@pytest.mark.parametrize("profile", ["v0.18", "v0.33"])
async def test_resumed_answer_uses_the_same_prefiller_and_another_decoder(profile: str) -> None:
    async with serving(profile, prefillers=3, decoders=3) as gateway:
        gateway.decoders[0].faults.add("recompute", tokens=10)
        assert (await gateway.ask(thoughts(stream=True))).is_done
        assert [len(generations(prefiller)) for prefiller in gateway.prefillers] == [2, 0, 0]
        assert sorted(len(generations(decoder)) for decoder in gateway.decoders) == [0, 1, 1]
        assert len(generations(gateway.decoders[0])) == 1


async def test_resumed_answer_avoids_the_failed_decoder_even_if_it_is_idle() -> None:
    async with serving("v0.33", engine={"decode_step_ms": 1.0, "eos_after": None}) as gateway:
        busy, failing = gateway.decoders
        failing.faults.add("error_event", tokens=10)
        async with gateway.asking(chat(stream=True, max_tokens=100_000)) as client:
            await client.has_tokens(1)
            assert (await gateway.ask(thoughts(stream=True))).is_done
        assert [len(generations(busy)), len(generations(failing))] == [2, 1]


async def test_only_decoder_resumes_its_own_answer() -> None:
    assert not await differences("v0.33", story(**WITH_USAGE), (0, 10, 60, 90))


@pytest.mark.parametrize(
    "place", [after(0), after(10), past(ARGUMENT_BEGIN, 5)], ids=["first", "reasoning", "arguments"]
)
@pytest.mark.parametrize("connector", ["vllm_pull", "plain"])
async def test_resumed_answer_reports_the_cached_tokens_of_its_first_attempt(connector: str, place: Place) -> None:
    """The engine's cache contains the first part of the same answer at the second attempt."""
    engine = {"prompt_tokens_details": True, "block_size": 4}
    body = story(**WITH_USAGE)
    expected = await uninterrupted("v0.30", body, connector=connector, engine=engine)
    async with serving("v0.30", connector=connector, engine=engine, decoders=1) as gateway:
        gateway.decoders[0].faults.add("recompute", tokens=place(generated(body)), times=1)
        gateway.expects_inexact_pins = True
        answered = content_of(await gateway.ask(body))
    details = answered["usages"][0]["prompt_tokens_details"]
    if connector == "plain":  # the lost engine had not reported it
        assert details["cached_tokens"] <= answered["usages"][0]["prompt_tokens"]
    else:
        assert details == expected["usages"][0]["prompt_tokens_details"]


# Answers that are complete already


async def test_answer_that_fills_the_context_ends_without_resume() -> None:
    """No engine that could resume the answer has a longer context."""
    body = thoughts(**WITH_USAGE)
    prompt = len(render_chat(body))
    expected = await uninterrupted("v0.30", {**body, "max_tokens": 60})
    options: dict[str, Any] = {"profile_name": "v0.30", "prompt_tokens_details": False}
    decoders = [SimulatedEngine(role="decode", max_model_len=prompt + room, **options) for room in (100, 60)]
    async with deployed([SimulatedEngine(role="prefill", **options)], [*decoders]) as gateway:
        gateway.decoders[0].faults.add("recompute", tokens=60)
        assert not difference(content_of(await gateway.ask(body)), expected)
        assert actions(gateway) == ["finish"]
        assert not generations(gateway.decoders[1])


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize("fields", [{}, IDS], ids=["text", "ids"])
async def test_answer_with_its_last_token_ends_without_resume(make: Any, fields: dict[str, Any]) -> None:
    """The engine is lost between its last token and the finish reason."""
    body = make(**WITH_USAGE, max_tokens=20, **fields)
    expected = await uninterrupted("v0.27", body, connector="plain")
    async with SimulatedEngine(profile_name="v0.27") as engine, aiohttp.ClientSession() as session:
        complete = await ask(session, engine.url, {**body, **IDS})
    chunks = [event for event in complete.events if event != "[DONE]" and event["choices"]]
    del chunks[-1]["choices"][0]["stop_reason"]
    chunks[-1]["choices"][0]["finish_reason"] = None
    lost = CannedEngine("both", event_stream(map(data, chunks), is_whole=False), closes=True)
    async with deployed([], [lost], connector="plain", resume={"chats": "native"}) as gateway:
        assert not difference(content_of(await gateway.ask(body)), expected)
        assert actions(gateway) == ["finish"]


# Settings


@pytest.mark.parametrize(
    ("profile", "chats", "does"),
    [
        ("v0.33", "completions", ["raw_tokens"]),
        ("v0.30", "native", ["chat_tokens"]),
        ("v0.27", "completions", ["raw_tokens"]),
        ("v0.23", "ascend_private", ["chat_tokens"]),
    ],
)
async def test_resume_method_of_chats_is_configurable(profile: str, chats: str, does: list[str]) -> None:
    engine = {"private_prompt_ids": chats == "ascend_private"}
    body = thoughts(**WITH_USAGE)
    expected = await uninterrupted(profile, body, engine=engine)
    async with serving(profile, engine=engine, resume={"chats": chats}) as gateway:
        gateway.decoders[0].faults.add("recompute", tokens=50)
        assert not difference(content_of(await gateway.ask(body)), expected)
        assert actions(gateway) == does


@pytest.mark.parametrize(("profile", "parser"), [("v0.33", ""), ("v0.33", "kimi_k2"), ("v0.23", "kimi_k2")])
@pytest.mark.parametrize("thinking", [False, True])
async def test_raw_completions_show_special_tokens_like_the_chat(profile: str, parser: str, thinking: bool) -> None:
    """Answers with `ignore_eos` have end tokens in their middle, which are text only if a parser reads them."""
    body = thoughts(**WITH_USAGE) if thinking else chat(**WITH_USAGE)
    body |= {"ignore_eos": True, "max_tokens": 350, **IDS}
    engine = {"reasoning_parser": parser}
    expected = await uninterrupted(profile, body, engine=engine)
    assert expected["choices"][0]["token_ids"][60:].count(END) > 1
    assert not await differences(profile, body, (5, 60, 90, 160), engine=engine, chats="completions")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("place", [after(70), past(CALL_BEGIN, 12)], ids=["content", "name"])
async def test_engine_that_ignores_prompt_ids_is_detected(stream: bool, place: Place) -> None:
    """The engine should take token ids, according to its version, but it echoes a different prompt."""
    body = story(**WITH_USAGE) if stream else story()
    expected = await uninterrupted("v0.33", body)
    async with serving("v0.33", decoders=3) as gateway:
        gateway.decoders[0].faults.add("recompute", tokens=place(generated(body)))
        for decoder in gateway.decoders:
            decoder.faults.add("ignore_prompt_ids")
        for prefiller in gateway.prefillers:
            prefiller.faults.add("ignore_prompt_ids")
        assert not difference(content_of(await gateway.ask(body)), expected)
        assert actions(gateway) in (["chat_tokens", "raw_tokens"], ["raw_tokens", "roll_back"])
        assert causes(gateway) == ["not_resumed", "recomputed"]


@pytest.mark.parametrize("profile", ["v0.23", "v0.33"])
@pytest.mark.parametrize("make", [completion, chat])
async def test_answer_without_token_ids_cannot_be_resumed(profile: str, make: Any) -> None:
    async with serving(profile) as gateway:
        gateway.decoders[0].faults.add("drop_token_ids")
        gateway.decoders[0].faults.add("recompute", tokens=10)
        answer = await gateway.ask(make(stream=True))
        check_resume_error(gateway, answer, "token ids")


@pytest.mark.parametrize("fault", ["recompute", "end_without_finish", "kill", "abort"])
@pytest.mark.parametrize("mode", ["off", "restart-only"])
async def test_broken_stream_is_not_resumed_if_resume_is_disabled(mode: str, fault: str) -> None:
    async with serving("v0.33", resume={"mode": mode}) as gateway:
        gateway.decoders[0].faults.add(fault, tokens=10)
        answer = await gateway.ask(chat(stream=True))
        codes = {"recompute": "decode_recomputed", "abort": "decode_aborted"}
        assert answer.error["code"] == codes.get(fault, "decode_broken")
        assert not answer.is_whole
        assert answer.text == text_of(chat(), 0, 10)
        assert actions(gateway) == []
        assert not generations(gateway.decoders[1])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("mode", "tokens"), [("restart-only", 0), ("restart-only", 10), ("off", 0), ("off", 10)])
async def test_unsent_answer_restarts_if_configured(mode: str, tokens: int, stream: bool) -> None:
    """An answer restarts only while the client has received nothing of it."""
    body = chat(**(WITH_USAGE if stream else {}))
    expected = await uninterrupted("v0.33", body)
    async with serving("v0.33", resume={"mode": mode}) as gateway:
        gateway.decoders[0].faults.add("recompute", tokens=tokens)
        gateway.expects_inexact_pins = True
        answer = await gateway.ask(body)
        if mode == "restart-only" and not (stream and tokens):
            assert not difference(content_of(answer), expected)
            assert actions(gateway) == ["restart"]
        else:
            assert answer.error["code"] == "decode_recomputed"
            assert actions(gateway) == []


@pytest.mark.parametrize("mode", ["off", "restart-only"])
@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize("fields", [{}, {"n": 2}], ids=["one", "two"])
async def test_unwatched_answers_have_requested_token_ids(mode: str, make: Any, fields: dict[str, Any]) -> None:
    body = make(stream=True, **fields)
    expected = await uninterrupted("v0.30", body | IDS)
    async with serving("v0.30", resume={"mode": mode}) as gateway:
        assert not difference(content_of(await gateway.ask(body | IDS)), expected)
        assert (await gateway.ask(body)).is_done
        assert "return_token_ids" not in generations(*gateway.decoders)[-1].body


@pytest.mark.parametrize(
    "body", [completion(echo=True), thoughts(include_reasoning=False, **IDS)], ids=["echo", "hidden"]
)
async def test_answers_are_not_watched_if_watching_would_change_them(body: dict[str, Any]) -> None:
    expected = await uninterrupted("v0.30", body)
    tokens = body["max_tokens"] - 10
    async with serving("v0.30") as gateway:
        gateway.decoders[0].faults.add("recompute", tokens=tokens)
        broken = await gateway.ask({**body, "stream": True})
        assert broken.error["code"] == "decode_recomputed"
        assert not broken.is_whole
        assert actions(gateway) == []
    async with serving("v0.30") as gateway:
        gateway.decoders[0].faults.add("recompute", tokens=tokens)
        assert not difference(content_of(await gateway.ask(body)), expected)
        assert actions(gateway) == ["restart"]


# One engine for prefill and decode

PLAIN = [
    *rows(
        *("chat", story(**WITH_USAGE)),
        ("before the first token", after(0), "restart"),
        ("in reasoning", after(10), CONTINUE),
        ("in a name", past(CALL_BEGIN, 12), ROLL_BACK),
        ("in arguments", past(ARGUMENT_BEGIN, 5), "suffix"),
        ("in content", past(THINK_END, 10), CONTINUE, "kill"),
        ("in reasoning, in content", after(10), CONTINUE_TWICE, "recompute", {}, 45),
        profiles=("v0.23", "v0.33"),
    ),
    *rows(
        *("whole-chat", thoughts()),
        ("early", after(50), "restart"),
        ("late", after(70), CONTINUE),
        profiles=("v0.23", "v0.33"),
    ),
    *rows(
        *("completion", completion(**WITH_USAGE, **IDS, logprobs=1)),
        ("in a character", in_character(after(5)), "completion_tokens"),
        ("in a word", after(10), "completion_tokens", "end_without_finish"),
        profiles=("v0.18", "v0.33"),
    ),
]


@pytest.mark.covering("row profile", PLAIN, features_of)
async def test_answer_is_resumed_without_prefillers(row: Row, profile: str) -> None:
    await check(profile, row, connector="plain")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 10])
async def test_several_choices_of_one_engine_are_not_resumed(stream: bool, tokens: int) -> None:
    """The gateway does not watch the choices separately."""
    body = chat(stream=stream, n=2)
    expected = await uninterrupted("v0.33", body, connector="plain")
    async with serving("v0.33", connector="plain") as gateway:
        gateway.decoders[0].faults.add("recompute", tokens=tokens)
        answer = await gateway.ask(body)
        if stream and tokens:
            assert answer.error["code"] == "decode_recomputed"
            assert not answer.is_whole
        else:
            assert not difference(content_of(answer), expected)
            assert actions(gateway) == ["restart"]


# Answers without faults


@pytest.mark.parametrize("fields", [{}, IDS, {"include_reasoning": False}], ids=["plain", "ids", "hidden"])
@pytest.mark.parametrize("make", [completion, chat, thoughts, story])
@pytest.mark.parametrize(("profile", "stream"), [("v0.18", False), ("v0.33", True), ("v0.33", False)])
async def test_watching_an_answer_does_not_change_it(
    profile: str, stream: bool, make: Any, fields: dict[str, Any]
) -> None:
    body = make(**(WITH_USAGE if stream else {}), **fields)
    async with serving(profile) as gateway:
        alone = content_of(await ask(gateway.session, gateway.decoders[0].url, body))
        assert not difference(content_of(await gateway.ask(body)), alone)
