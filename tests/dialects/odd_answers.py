"""A grammar of engines' answers in which any member may be of another type, missing, doubled or out of order."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import strategies as st

from proxy.wire.python_json import dumps
from tests.canned import event_stream, http

ODD: Final[st.SearchStrategy[Any]] = st.sampled_from(
    [
        *(None, True, False, 0, -1, 7, 2**40, 10**25, 1.5, "", "x", " \n", "\ud83d", [], {}, [None], [[]], [7], ["x"]),
        *({"text": "a"}, [{"type": "text", "text": "a"}], [{"type": "image"}], {"type": "stop"}, {"a": {"b": []}}),
    ]
)
ABSENT: Final = object()


def usually(*values: Any) -> st.SearchStrategy[Any]:
    """One of the values, or something odd, or nothing at all."""
    return st.one_of(*[st.sampled_from(values)] * 20, ODD, st.just(ABSENT))


def members(**strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object without the members that are absent."""
    return st.fixed_dictionaries(strategies).map(
        lambda drawn: {name: value for name, value in drawn.items() if value is not ABSENT}
    )


def mostly(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What the strategy draws, and now and then something odd."""
    return st.one_of(*[strategy] * 30, ODD)


ARGUMENTS: Final = st.sampled_from(
    [
        "",
        "{}",
        '{"a":',
        "1}",
        '{"a":"x\ny"}',
        "\t",
        "null",
        "[1]",
        '{"x":NaN}',
        '{"a":"\\ud83d"}',
        "{",
        "}",
        "}}",
        {"a": 1},
    ]
)
CALL: Final = members(
    index=usually(0, 0, 0, 1, 2, ABSENT),
    id=usually("call_a", "call_b", None, ABSENT, ABSENT),
    type=usually("function", ABSENT),
    function=mostly(
        members(name=usually("f", "g", None, ABSENT, ABSENT), arguments=st.one_of(ARGUMENTS, ARGUMENTS, ODD))
    ),
)
TEXTS: Final = usually("Hello", " there", "\n", "ü🙂", "", None, ABSENT)
DELTA: Final = st.one_of(
    members(content=TEXTS),
    members(reasoning=TEXTS),
    members(reasoning_content=TEXTS, content=usually(None, ABSENT)),
    members(tool_calls=mostly(st.lists(CALL, min_size=1, max_size=3))),
    members(tool_calls=mostly(st.lists(CALL, min_size=1, max_size=2)), content=TEXTS),
    members(role=usually("assistant"), content=usually("", None)),
)
FINISHES: Final = usually("stop", "length", "tool_calls", "content_filter")
USAGE: Final = mostly(
    members(
        prompt_tokens=usually(7),
        completion_tokens=usually(3),
        total_tokens=usually(10),
        prompt_tokens_details=usually(None, {"cached_tokens": 4}, {"cached_tokens": "4"}, {"cached_tokens": -4}),
        completion_tokens_details=usually(None, {"reasoning_tokens": 1}, {"reasoning_tokens": [1]}),
    )
)
HEAD: Final = {
    "id": st.one_of(*[st.just("chatcmpl-1")] * 50, ODD),
    "object": st.just("chat.completion.chunk"),
    "created": st.one_of(*[st.just(1_700_000_000)] * 50, ODD),
    "model": st.one_of(*[st.just("sim")] * 50, ODD),
}


def chunk(delta: st.SearchStrategy[Any], finish: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A chunk with mostly one choice."""
    choice = members(
        index=st.one_of(*[st.just(0)] * 40, ODD),
        delta=mostly(delta),
        finish_reason=finish,
        logprobs=st.one_of(*[st.just(ABSENT)] * 40, ODD),
        token_ids=st.one_of(*[st.sampled_from([ABSENT, [5], [6, 7], []])] * 40, ODD),
        stop_reason=st.one_of(*[st.just(ABSENT)] * 40, ODD),
    )
    return st.fixed_dictionaries({**HEAD, "choices": mostly(st.lists(choice, min_size=1, max_size=1))})


def event(payload: Any) -> bytes:
    return b"data: " + dumps(payload) + b"\n\n"


UNFINISHED: Final = st.one_of(*[st.none()] * 50, ODD)
CHUNKS: Final = chunk(DELTA, UNFINISHED).map(event)
STRANGE: Final = st.sampled_from(
    [
        *(b": ping\n\n", b"data: {}\n\n", b"data: [1]\n\n", b"data: nonsense\n\n", b"data: null\n\n", b"event: x\n\n"),
        b'data: {"error":{"message":"out of order","code":500}}\n\n',
        b'data: {"choices":{}}\n\n',
        b"data: [DONE]\n\n",
    ]
)
USAGES: Final = st.fixed_dictionaries({**HEAD, "choices": st.just([]), "usage": USAGE}).map(event)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """The pieces of a stream, which usually ends as it should."""
    events = [draw(chunk(members(role=usually("assistant"), content=usually("")), st.none())) for _ in range(1)]
    pieces = [event(each) for each in events][: draw(st.integers(0, 1))]
    pieces += draw(st.lists(st.one_of(*[CHUNKS] * 20, STRANGE, USAGES), max_size=8))
    often = st.sampled_from([True] * 14 + [False])
    if draw(often):
        pieces.append(event(draw(chunk(st.one_of(*[st.just({})] * 4, DELTA), FINISHES))))
    if draw(often):
        pieces.append(draw(USAGES))
    if draw(often):
        pieces.append(b"data: [DONE]\n\n")
    return event_stream(pieces, is_whole=True)


@st.composite
def wholes(draw: st.DrawFn) -> list[bytes]:
    """A whole chat completion."""
    message = members(
        role=usually("assistant"),
        content=TEXTS,
        reasoning=usually(None, ABSENT, "hm"),
        tool_calls=st.one_of(st.just(ABSENT), mostly(st.lists(CALL, max_size=3))),
    )
    choice = members(
        index=usually(0), message=mostly(message), finish_reason=FINISHES, stop_reason=usually(None, ABSENT)
    )
    told = st.fixed_dictionaries({**HEAD, "choices": mostly(st.lists(choice, min_size=1, max_size=1)), "usage": USAGE})
    return [http(dumps(draw(mostly(told))))]
