"""A grammar of engines' answers in which any member may be of another type, missing, doubled or out of order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, Final, NamedTuple

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


def mostly(
    strategy: st.SearchStrategy[Any], *others: st.SearchStrategy[Any], times: int = 30
) -> st.SearchStrategy[Any]:
    """Draw from the strategy `times` times as often as from one of the others, by default an odd value.

    `one_of` counts a strategy that it gets several times as one.
    """
    rest = st.one_of(*(others or (ODD,)))
    return st.sampled_from([True] * times + [False]).flatmap(lambda is_usual: strategy if is_usual else rest)


def usually(*values: Any) -> st.SearchStrategy[Any]:
    """One of the values, or something odd, or nothing at all."""
    return mostly(st.sampled_from(values), ODD, st.just(ABSENT), times=20)


def members(**strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw an object without the members that are absent."""
    return st.fixed_dictionaries(strategies).map(
        lambda drawn: {name: value for name, value in drawn.items() if value is not ABSENT}
    )


ERRORS: Final = (
    *(b'{"message":"out of order","code":500}', b'{"message":7}', b'{"message":"no","type":[],"code":"400"}'),
    *(b'"no"', b"7", b"[]", b"{}", b"null", b"true"),
)
REFUSALS: Final = (
    *(b'{"error":%b}' % each for each in ERRORS),
    *(
        b'{"object":"error","message":"no","code":400}',
        b"",
        b"null",
        b"[7]",
        b'"no"',
        b"\xff",
        b"<html>no</html>",
        b"{",
    ),
)
"""Bodies of engines' errors."""
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
    "id": mostly(st.just("chatcmpl-1"), times=50),
    "object": st.just("chat.completion.chunk"),
    "created": mostly(st.just(1_700_000_000), times=50),
    "model": mostly(st.just("sim"), times=50),
}


IDS: Final = mostly(st.sampled_from([ABSENT, [5], [6, 7], []]), times=40)
OFTEN: Final = st.sampled_from([True] * 14 + [False])


def seldom(value: Any = None) -> st.SearchStrategy[Any]:
    """Something odd, but mostly this value, or by default no member at all."""
    return mostly(st.just(ABSENT if value is None else value), times=40)


def chunk(delta: st.SearchStrategy[Any], finish: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw a chunk of a chat, usually with one choice."""
    choice = members(
        index=seldom(0),
        delta=mostly(delta),
        finish_reason=finish,
        logprobs=seldom(),
        token_ids=IDS,
        stop_reason=seldom(),
    )
    return st.fixed_dictionaries({**HEAD, "choices": mostly(st.lists(choice, min_size=1, max_size=1))})


def event(payload: Any) -> bytes:
    return b"data: " + dumps(payload) + b"\n\n"


UNFINISHED: Final = mostly(st.none(), times=50)
CHUNKS: Final = chunk(DELTA, UNFINISHED).map(event)
STRANGE: Final = st.sampled_from(
    [
        *(b": ping\n\n", b"data: {}\n\n", b"data: [1]\n\n", b"data: nonsense\n\n", b"data: null\n\n", b"event: x\n\n"),
        *(b'data: {"error":%b}\n\n' % each for each in ERRORS),
        b'data: {"choices":{}}\n\n',
        b"data: [DONE]\n\n",
    ]
)
USAGES: Final = st.fixed_dictionaries({**HEAD, "choices": st.just([]), "usage": USAGE}).map(event)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Draw the pieces of a streamed chat, which usually ends correctly."""
    events = [draw(chunk(members(role=usually("assistant"), content=usually("")), st.none())) for _ in range(1)]
    pieces = [event(each) for each in events][: draw(st.integers(0, 1))]
    last = chunk(mostly(st.just({}), DELTA, times=4), FINISHES).map(event)
    return draw(ended(pieces, CHUNKS, last))


@st.composite
def ended(
    draw: st.DrawFn, pieces: list[bytes], chunks: st.SearchStrategy[bytes], last: st.SearchStrategy[bytes]
) -> list[bytes]:
    """Draw the pieces of a stream that begins with `pieces`."""
    pieces = pieces + draw(st.lists(mostly(chunks, STRANGE, USAGES, times=20), max_size=8))
    if draw(OFTEN):
        pieces.append(draw(last))
    if draw(OFTEN):
        pieces.append(draw(USAGES))
    if draw(OFTEN):
        pieces.append(b"data: [DONE]\n\n")
    return event_stream(pieces, is_whole=True)


KV_PARAMS: Final = mostly(
    members(
        do_remote_prefill=usually(True),
        do_remote_decode=usually(False),
        remote_engine_id=usually("engine-1"),
        remote_block_ids=usually([[1, 2]]),
        remote_host=usually("127.0.0.1"),
        remote_port=usually(5600),
        remote_request_id=usually("r-1"),
        tp_size=usually(2, ABSENT),
        remote_pcp_size=usually(1, ABSENT, ABSENT),
    )
)
"""KV parameters that a vLLM prefiller names for a decoder to fetch."""
PREFILL_FINISHES: Final = usually("length", "length", "length", "stop", "abort")


def body(payload: st.SearchStrategy[Any]) -> st.SearchStrategy[list[bytes]]:
    """Draw a whole answer, usually with this payload."""
    return mostly(payload).map(lambda told: [http(dumps(told))])


def whole_chat(
    finishes: st.SearchStrategy[Any] = FINISHES, **beside: st.SearchStrategy[Any]
) -> st.SearchStrategy[list[bytes]]:
    """Draw a whole chat completion with these members beside its choices."""
    message = members(
        role=usually("assistant"),
        content=TEXTS,
        reasoning=usually(None, ABSENT, "hm"),
        tool_calls=st.one_of(st.just(ABSENT), mostly(st.lists(CALL, max_size=3))),
    )
    choice = members(
        index=usually(0), message=mostly(message), finish_reason=finishes, stop_reason=usually(None, ABSENT)
    )
    return body(
        st.fixed_dictionaries(
            {**HEAD, "choices": mostly(st.lists(choice, min_size=1, max_size=1)), "usage": USAGE, **beside}
        )
    )


# Completions

COMPLETION_HEAD: Final = {**HEAD, "object": st.just("text_completion")}
TOKEN_LOGPROBS: Final = usually(
    None,
    ABSENT,
    {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}], "text_offset": [0]},
    {"tokens": [None], "token_logprobs": ["x"], "text_offset": None},
)


def completion(finish: st.SearchStrategy[Any], **beside: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw a completion, or a chunk of one, usually with one choice."""
    choice = members(
        index=seldom(0),
        text=TEXTS,
        finish_reason=finish,
        logprobs=TOKEN_LOGPROBS,
        stop_reason=seldom(),
        token_ids=IDS,
        prompt_token_ids=mostly(st.sampled_from([ABSENT, None, [1, 2, 3]]), times=40),
    )
    return st.fixed_dictionaries(
        {**COMPLETION_HEAD, "choices": mostly(st.lists(choice, min_size=1, max_size=1)), **beside}
    )


# SGLang's /generate

NATIVE_FINISHES: Final = usually(
    *({"type": "stop", "matched": 7}, {"type": "length", "length": 3}, {"type": "stop"}, {"type": "length"}),
    {"type": "abort", "message": "no", "status_code": 500},
    {"type": "abort"},
)
NATIVE_LOGPROBS: Final = usually(ABSENT, [[-0.5, 5, None]], [[-0.5, 5, "a"], [-0.1, 6, "b"]], [])
"""Lists that grow with the answer."""


def meta_info(finish: st.SearchStrategy[Any], tokens: int) -> st.SearchStrategy[Any]:
    """Draw the usage of an answer with this number of tokens."""
    return mostly(
        members(
            id=usually("r-1"),
            finish_reason=finish,
            prompt_tokens=usually(7),
            completion_tokens=usually(tokens),
            cached_tokens=usually(4),
            input_token_logprobs=NATIVE_LOGPROBS,
            output_token_logprobs=NATIVE_LOGPROBS,
            routed_experts=usually(ABSENT, "AAECAw==", "AAECAwQF", "x"),
        )
    )


def native(text: str, finish: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw an answer, whole or partial, with one token for each character."""
    ids = [5] * len(text)
    return members(text=usually(text), output_ids=usually(ids), meta_info=meta_info(finish, len(ids)))


@st.composite
def native_streams(draw: st.DrawFn) -> list[bytes]:
    """Draw the pieces of an answer whose events repeat all earlier text."""
    parts = draw(st.lists(st.sampled_from(["Hello", " there", "\n", "ü🙂", "", "\ud83d"]), max_size=6))
    pieces = [draw(native(text, st.none()).map(event)) for text in accumulate(parts)]
    for _ in range(draw(st.sampled_from([0] * 6 + [1]))):
        pieces.insert(draw(st.integers(0, len(pieces))), draw(STRANGE))
    if draw(OFTEN):
        pieces.append(draw(native("".join(parts), NATIVE_FINISHES).map(event)))
    if draw(OFTEN):
        pieces.append(b"data: [DONE]\n\n")
    return event_stream(pieces, is_whole=True)


# Answers of the engines of a pair

REFUSED: Final = st.builds(
    lambda body, status, content_type: [http(body, status, content_type)],
    st.sampled_from(REFUSALS),
    st.sampled_from(["400 Bad Request", "404 Not Found", "422 Unprocessable", "500 Broken", "502 Bad Gateway"]),
    st.sampled_from(["application/json", "text/html; charset=utf-8", "text/event-stream", "x"]),
)


class Told(NamedTuple):
    """An engine's answer on one of its routes."""

    stream: list[bytes]
    """The decoder, if it is asked for a stream."""
    whole: list[bytes]
    prefill: list[bytes]
    """The prefiller of vLLM."""
    prefill_of_sglang: list[bytes]
    """The answer of an SGLang prefiller, which gets the decoder's request."""


def told(
    stream: st.SearchStrategy[list[bytes]],
    whole: Callable[..., st.SearchStrategy[list[bytes]]],
) -> st.SearchStrategy[Told]:
    """Draw answers of engines. `whole`: makes whole answers with a finish reason and members beside it."""
    of_vllm = whole(PREFILL_FINISHES, kv_transfer_params=KV_PARAMS)
    return st.builds(
        Told,
        mostly(stream, whole(), REFUSED, times=20),
        mostly(whole(), stream, REFUSED, times=20),
        mostly(of_vllm, stream, REFUSED, times=20),
        mostly(st.one_of(stream, whole()), REFUSED, times=20),
    )


def _whole_completion(
    finish: st.SearchStrategy[Any] = FINISHES, **beside: st.SearchStrategy[Any]
) -> st.SearchStrategy[list[bytes]]:
    return body(completion(finish, usage=USAGE, **beside))


def _whole_native(
    finish: st.SearchStrategy[Any] = NATIVE_FINISHES, **beside: st.SearchStrategy[Any]
) -> st.SearchStrategy[list[bytes]]:
    return body(native("Hello", finish))


CHATS: Final = told(streams(), whole_chat)
COMPLETIONS: Final = told(
    ended([], completion(UNFINISHED).map(event), completion(FINISHES).map(event)), _whole_completion
)
NATIVE: Final = told(native_streams(), _whole_native)
CALLBACK: Final = members(
    token_ids=usually([]),
    do_remote_prefill=usually(False),
    do_remote_decode=seldom(True),
    remote_block_ids=usually([[1, 2, 3]]),
    remote_engine_id=usually("5f1c"),
    remote_host=usually("127.0.0.1"),
    remote_port=usually(30100),
    remote_cached_tokens=seldom(0),
)
"""The members of a vLLM-Ascend decoder's callback, besides the id of its request."""
