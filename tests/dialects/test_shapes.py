"""A chat of a known shape is what it would be if it was read anew: the same call, the same bodies, the same errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.connectors.prefill_body import Prefill, prefill_body
from proxy.dialects.openai import ChatCompletions
from proxy.dialects.shapes import Shapes
from proxy.errors import BadRequest
from proxy.resume.vllm import VLLM
from proxy.settings import Cost
from proxy.wire.document import REMOVED, Document, InvalidDocument, joined
from proxy.wire.shape import UNCHANGED, ShapedDocument

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.call import Call

pytestmark = pytest.mark.interpreted  # for its pool

CHATS: Final = ChatCompletions()
COST: Final = Cost(bytes_per_token=3)
HEADERS: Final = {"traceparent": "00-1"}
ASKED: Final = {"do_remote_decode": True, "remote_host": None}
PREFILL: Final = Prefill(ASKED)
BOOTSTRAPS: Final[list[dict[str, Any]]] = [
    {"bootstrap_host": "[::1]", "bootstrap_port": None, "bootstrap_room": 7},
    {"rid": "\u2028", "return_token_ids": REMOVED},
    {"return_token_ids": False, "x": [1]},
]
KV: Final = b'{"do_remote_prefill": true,"remote_block_ids":[1, 2]}'

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ['"', "\\", "}]", '"messages"', '"messages": [', "[", "]", '}], "', "\u2028", "🙂", "x" * 600]
)
MEMBERS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "model": TEXTS,
    "stream": st.sampled_from([True, False, None, 1, 0, "yes"]),
    "stream_options": st.sampled_from([{"include_usage": True}, {}, None, {"include_usage": 0, "x": [1]}, 7]),
    "max_tokens": st.sampled_from([1, 16, 0, -1, None, "5", 2.0, "many"]),
    "max_completion_tokens": st.sampled_from([1, 33, None, "5"]),
    "temperature": st.sampled_from([0.7, 0, 1e-7]),
    "stop": st.sampled_from([["a", "}]"], "b", []]),
    "tools": st.sampled_from([[], [{"type": "function", "function": {"name": "f"}}]]),
    "tool_choice": st.sampled_from(["auto", "required", {"type": "function"}]),
    "metadata": st.sampled_from([{"messages": [{}]}, {"user_id": "me"}]),
    "user": TEXTS,
    # Not of ordinary chats.
    "seed": st.just(7),
    "logprobs": st.just(True),
    "kv_transfer_params": st.just({"do_remote_prefill": True}),
    "prompt": TEXTS,
}
ORDINARY: Final = [
    name for name in MEMBERS if name not in ("tools", "seed", "logprobs", "kv_transfer_params", "prompt")
]
PARTS = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url", "input_audio"])}, optional={"text": TEXTS})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"])},
        optional={
            "content": TEXTS | st.none() | st.lists(PARTS, max_size=2),
            "reasoning": TEXTS,
            "tool_calls": st.just([{"id": "1"}]),
        },
    ),
    min_size=1,
    max_size=3,
)
LIMITS: Final = ("max_tokens", "max_completion_tokens")
SPELLINGS: Final[list[Callable[[object], bytes]]] = [
    orjson.dumps,
    lambda value: json.dumps(value).encode(),
    lambda value: json.dumps(value, ensure_ascii=False).encode(),
    lambda value: json.dumps(value, separators=(",", ":")).encode(),
    lambda value: json.dumps(value, indent=1).encode(),
]
SPOILS: Final = [
    *(b"[1,]", b'[{"a":1}],"stream":true,"x":[{}]', b'[{"a":\xff}]', b'[{"a":1e400}]', b"[{}", b"{}", b'"}]"', b"null"),
    *(b"[" * 300 + b"{}" + b"]" * 300, b'[{"role":"user"}]]', b'["a",{}]', b'[{"a":"\\ud800"}]', b'[{"a":1,"a":2}]'),
    b"[" * 1023 + b"{}" + b"]" * 1023,
]
"""In place of messages, some of which nobody reads."""


@st.composite
def chats(draw: st.DrawFn) -> list[bytes]:
    """Those of one application."""
    names = draw(
        st.lists(st.sampled_from(draw(st.sampled_from([ORDINARY, ORDINARY, list(MEMBERS)]))), max_size=5, unique=True)
    )
    middle = draw(st.integers(0, len(names)))
    before, behind = names[:middle], names[middle:]
    members = {name: draw(MEMBERS[name]) for name in names}
    space = draw(st.sampled_from(["", " ", "\n"]))
    again = draw(st.sampled_from([*[b""] * 9, b',"stream":false', b',"messages":[]', b',"\\u006dessages":[{}]']))
    spelled = draw(st.sampled_from(SPELLINGS))
    told = []
    for _ in range(4):
        mark = "the messages are to stand here"
        body = {name: members[name] for name in before} | {"messages": mark} | {name: members[name] for name in behind}
        messages = MESSAGES.map(draw(st.sampled_from([*[spelled] * 5, *SPELLINGS])))
        text = spelled(body).replace(
            spelled(mark), draw(st.one_of(messages, messages, messages, st.sampled_from(SPOILS))), 1
        )
        told.append(text[:-1] + again + space.encode() + b"}")
    return told


def facts(call: Call) -> tuple[Any, ...]:
    """What a call is, without its document."""
    return (
        *(call.api, call.prompt_tokens, call.output_tokens, call.stream, call.include_usage, call.headers),
        *(call.changes, call.output_limit, call.is_ordinary, call.kv_params, call.alias, call.asked),
        *(call.values, call.prefix_keys, call.session, list(call.values)),
    )


def bodies(call: Call, prefill: Callable[[Call], Any]) -> list[bytes]:
    """What engines get of it, in the ways that it is sent."""
    observed = VLLM.observed(call)
    told = [
        body
        for each in (call, observed, observed.changed({"max_tokens": 3}), observed.changed({"messages": []}))
        for body in (
            *(each.body(changes) for changes in ({}, UNCHANGED, *BOOTSTRAPS)),
            *(prefill(each), each.body_with_kv(KV)),
        )
    ]
    # Of a limit that is spelled as a string engines take a number, and so might what is shown of it.
    shown = [bytes(call.document.view(name)) for name in call.values if name not in LIMITS]
    return [joined(body) for body in told] + shown


def anew(raw: bytes) -> Call | None:
    try:
        return CHATS.parse(Document(raw), COST, HEADERS)
    except (BadRequest, InvalidDocument):
        return None


def check(shapes: Shapes, raw: bytes) -> bool:
    """Whether it was of a known shape."""
    known = shapes.call(raw, HEADERS)
    if known is None:
        return False
    expected = anew(raw)
    assert expected is not None
    assert facts(known) == facts(expected)
    pool: Any = Versions()
    by_constants = bodies(known, lambda call: PREFILL.body(call, pool, pool))
    assert by_constants == bodies(expected, lambda call: prefill_body(call, pool, pool, ASKED))
    assert bodies(known, lambda call: PREFILL.body(call, pool, pool)) == by_constants  # nothing was spoilt
    return True


class Versions:
    """A pool whose engines have told nothing."""

    def engine_version(self, _: object) -> None:
        return None


@given(raws=chats())
def test_a_chat_of_a_known_shape_is_what_it_is_if_it_is_read(raws: list[bytes]) -> None:
    shapes = Shapes(CHATS, COST)
    for raw in [*raws, *raws, *raws]:
        check(shapes, raw)


@pytest.mark.parametrize("spelled", SPELLINGS[:4])
def test_ordinary_chats_are_known_from_their_third_on(spelled: Callable[[object], bytes]) -> None:
    shapes = Shapes(CHATS, COST)
    raws = [
        spelled({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 5, "stream": True})
        for text in ("a", "ü", '"}]')
    ]
    assert [check(shapes, raw) for raw in raws] == [False, False, True]


@pytest.mark.parametrize("spoilt", SPOILS)
def test_what_nobody_reads_is_not_read_because_of_its_shape(spoilt: bytes) -> None:
    shapes = Shapes(CHATS, COST)
    before, behind = b'{"messages":', b',"model":"m"}'
    for _ in range(3):
        is_known = check(shapes, before + b'[{"role":"user","content":"hi"}]' + behind)
    assert is_known
    check(shapes, before + spoilt + behind)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[{}],"seed":1}',
        b'{"messages":[{}],"tools":[]}',
        b'{"messages":[{}],"stream":"yes"}',
        b'{"messages":[{}],"stream":true,"stream":true}',
        b'{"messages":[{}],"messages":[{}]}',
        b'{"messages":[],"messages":[{}]}',
        b'{"metadata":{"messages":[{}]}}',
        b'{"user":"\\"messages\\"","metadata":[{}]}',
        b'{"messages":[{}],"user":"' + b"x" * 1024 + b'"}',
        b'{"messages":[{"content":"' + b"x" * 4096 + b'"}]}',
        *(b"", b"{}", b"[", b"}]", b'"messages"', b'"messages"[}]', b'{"messages":[{}]'),
    ],
)
def test_all_else_is_read_each_time(raw: bytes) -> None:
    shapes = Shapes(CHATS, COST)
    assert [check(shapes, raw) for _ in range(4)] == [False] * 4


def test_what_is_kept_of_shapes_is_bounded_and_no_message() -> None:
    shapes = Shapes(CHATS, COST)
    for number in range(300):
        for secret in (b"a secret", b"another secret", b"a third secret"):
            raw = b'{"messages":[{"content":"%b"}],"max_tokens":%d}' % (secret, number)
            is_known = check(shapes, raw)
        assert is_known
    assert len(shapes._known) <= 128
    for _ in range(4):  # where messages do not end as they do elsewhere, something in them looks like their end
        assert not check(shapes, b'{"messages":[{"content":"}] a secret"} ],"max_tokens":7}')
    kept = [told for shape, _ in shapes._known.values() for told in (shape.empty.values, shape._frames)]
    assert "secret" not in repr(kept) + repr(list(shapes._known))
    for number in range(2000):
        shapes.call(b'{"messages":[{}],"user":"%d"}' % number, {})
    assert len(shapes._seen) <= 1024


def test_a_document_of_a_shape_keeps_its_own_values() -> None:
    shapes = Shapes(CHATS, COST)
    raw = b'{"messages":[{"content":"hi"}],"max_tokens":5}'
    calls = [shapes.call(raw, {}) for _ in range(4)]
    first, second = (call for call in calls if call is not None)
    assert isinstance(first.document, ShapedDocument)
    first.document.values.update({"max_tokens": 7})
    assert second.values["max_tokens"] == 5
