"""Random conversations become chats, from which everything that the translation keeps can be read back."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.left_out import OmittedParts
from proxy.dialects.messages_request import translate_to_chat as chat_of_messages
from proxy.dialects.responses_request import seal_reasoning
from proxy.dialects.responses_request import translate_to_chat as chat_of_responses

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
NAME = st.from_regex(r"[a-z]{1,6}", fullmatch=True)
ID = st.from_regex(r"functions\.[a-z]{1,4}:[0-9]", fullmatch=True)
INPUT = st.dictionaries(
    NAME, st.one_of(TEXT, st.integers(-9, 9), st.booleans(), st.lists(TEXT, max_size=2)), max_size=3
)
PICTURE = TEXT.map(lambda text: text.encode().hex())


# Anthropic's messages


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def picture(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


CONTENT = st.lists(st.one_of(TEXT.map(text), PICTURE.map(picture)), min_size=1, max_size=3)
USER = CONTENT.map(lambda blocks: {"role": "user", "content": blocks})
RESULT = st.builds(lambda name, words: {"type": "tool_result", "tool_use_id": name, "content": [text(words)]}, ID, TEXT)
RESULTS = st.lists(RESULT, min_size=1, max_size=3).map(lambda blocks: {"role": "user", "content": blocks})
USE = st.builds(
    lambda name, tool, given: {"type": "tool_use", "id": name, "name": tool, "input": given}, ID, NAME, INPUT
)
SAID = st.builds(
    lambda thoughts, words, uses: [
        *([] if thoughts is None else [{"type": "thinking", "thinking": thoughts}]),
        *([] if words is None else [text(words)]),
        *uses,
    ],
    st.none() | TEXT,
    st.none() | TEXT,
    st.lists(USE, max_size=2),
)
ASSISTANT = SAID.filter(bool).map(lambda blocks: {"role": "assistant", "content": blocks})
MESSAGES = st.lists(st.one_of(USER, RESULTS, ASSISTANT), min_size=1, max_size=6)


def messages_again(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    for message in chat:
        match message["role"]:
            case "tool":
                block = {
                    "type": "tool_result",
                    "tool_use_id": message["tool_call_id"],
                    "content": [text(message["content"])],
                }
                told.append({"role": "user", "content": [block]})
            case "user":
                told.append({"role": "user", "content": _blocks(message["content"])})
            case _:
                thoughts = [{"type": "thinking", "thinking": message["reasoning"]}] if "reasoning" in message else []
                words = _blocks(message["content"]) if message.get("content") else []
                uses = [
                    {
                        "type": "tool_use",
                        "id": call["id"],
                        "name": call["function"]["name"],
                        "input": orjson.loads(call["function"]["arguments"]),
                    }
                    for call in message.get("tool_calls") or ()
                ]
                told.append({"role": "assistant", "content": [*thoughts, *words, *uses]})
    return told


def _blocks(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [text(content)]
    return [
        part if part["type"] == "text" else picture(part["image_url"]["url"].removeprefix("data:image/png;base64,"))
        for part in content
    ]


def one_result_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write results as a chat does, with a message for each."""
    told = []
    for message in messages:
        results = [block for block in message["content"] if block["type"] == "tool_result"]
        told += [{"role": "user", "content": [block]} for block in results] or [message]
    return told


@given(st.none() | TEXT, MESSAGES)
def test_messages_conversation_loses_nothing_in_translation(system: str | None, messages: Any) -> None:
    chat = chat_of_messages({"model": "m", "max_tokens": 8, "system": system, "messages": messages}, OmittedParts())[
        "messages"
    ]
    if system is not None:
        assert chat.pop(0) == {"role": "system", "content": system}
    assert messages_again(chat) == one_result_each(messages)


# OpenAI's items

THOUGHT = st.builds(
    lambda words, is_sealed: {
        "type": "reasoning",
        "summary": [],
        **(
            {"encrypted_content": seal_reasoning(words)}
            if is_sealed
            else {"content": [{"type": "reasoning_text", "text": words}]}
        ),
    },
    TEXT,
    st.booleans(),
)
CALL = st.one_of(
    st.builds(
        lambda name, tool, given: {
            "type": "function_call",
            "call_id": name,
            "name": tool,
            "arguments": orjson.dumps(given).decode(),
        },
        ID,
        NAME,
        INPUT,
    ),
    st.builds(
        lambda name, words: {"type": "custom_tool_call", "call_id": name, "name": "patch", "input": words}, ID, TEXT
    ),
)
OUTPUT = st.builds(lambda name, words: {"type": "function_call_output", "call_id": name, "output": words}, ID, TEXT)
SPOKEN = st.builds(
    lambda role, words: {"type": "message", "role": role, "content": words},
    st.sampled_from(["user", "assistant"]),
    TEXT,
)
ITEMS = st.lists(st.one_of(SPOKEN, THOUGHT, CALL, OUTPUT), min_size=1, max_size=8)


def told_by_items(items: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    told: list[tuple[str, ...]] = []
    for item in items:
        match item["type"]:
            case "message":
                told.append((item["role"], item["content"]))
            case "reasoning":
                words = item["content"][0]["text"] if "content" in item else None
                told.append(("reasoning", words or item["encrypted_content"]))
            case "function_call":
                told.append(("call", item["call_id"], item["name"], item["arguments"]))
            case "custom_tool_call":
                told.append(("call", item["call_id"], "patch", orjson.dumps({"input": item["input"]}).decode()))
            case _:
                told.append(("tool", item["call_id"], item["output"]))
    return told


def told_by_chat(chat: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    told: list[tuple[str, ...]] = []
    for message in chat:
        if "reasoning" in message:
            told.append(("reasoning", message["reasoning"]))
        if message["role"] == "tool":
            told.append(("tool", message["tool_call_id"], message["content"]))
        elif "content" in message:
            told.append((message["role"], message["content"]))
        told += [
            ("call", call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ]
    return told


def joined(told: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join consecutive texts and thoughts of the assistant."""
    found: list[tuple[str, ...]] = []
    for each in told:
        if found and each[0] == found[-1][0] and each[0] in ("reasoning", "assistant"):
            found[-1] = (each[0], found[-1][1] + each[1])
        else:
            found.append(each)
    return found


@given(ITEMS)
def test_responses_conversation_loses_nothing_in_translation(items: Any) -> None:
    chat = chat_of_responses({"model": "m", "input": items}, OmittedParts())["messages"]
    for message in chat:
        assert set(message) <= {"role", "content", "reasoning", "reasoning_content", "tool_calls", "tool_call_id"}
    expected = [(each[0], _unseal(each[1])) if each[0] == "reasoning" else each for each in told_by_items(items)]
    assert joined(told_by_chat(chat)) == joined(expected)


def _unseal(words: str) -> str:
    from base64 import b64decode

    return b64decode(words.removeprefix("pdproxy:")).decode() if words.startswith("pdproxy:") else words
