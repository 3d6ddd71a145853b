"""Long answers: what is passed on is what a Document writes, and up to the end as it came."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.wire.document import REMOVED, Document, InvalidDocument, LongAnswer, join_body

USAGE = b'{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}'


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"null", b"[]", b'{"a":1', b'{"a":1}]', b'{"a":"\xff"}', b'{"usage":1e999', b'{"a":' + b"[" * 100_000),
        *(b'{"kv_transfer_params":{"a":tru}}', b'{"a":"\\ud800}'),
    ],
)
def test_long_answer_rejects_other_than_a_json_object(answer: bytes) -> None:
    with pytest.raises(InvalidDocument):
        LongAnswer(answer)


CHANGES: list[dict[str, Any]] = [
    {"usage": {"prompt_tokens": 3}},
    {"kv_transfer_params": REMOVED},
    {"kv_transfer_params": REMOVED, "usage": {"a": [1, "}"]}},
]


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize(
    "answer",
    [
        b'{"id":"a","choices":[{"index":0}],"usage":%b,"kv_transfer_params":null}',
        b'{"id":"a","usage":%b,"prompt_logprobs":[{"b":"}"}],"kv_transfer_params":{"usage":1}}',
        b'{"id":"a","kv_transfer_params":null,"usage":%b}',
        b'{"kv_transfer_params":null,"usage":%b}',
        b'{"usage":%b,"kv_transfer_params":null}',
        b'{"usage":%b,"kv_transfer_params":null,"choices":[{"x":1,"usage":2,"kv_transfer_params":3}]}',
        b'{"id":"a","choices":[{"x":",\\"usage\\":1}"}],"usage":%b,"kv_transfer_params":{"x":1,"usage":{}}}',
        b'{"x":1.50,"usage":%b, "kv_transfer_params" : null,"y":1e-05}',
        b'{"id": "a", "usage": %b, "kv_transfer_params": null}',
    ],
)
def test_long_answer_changes_its_end_as_a_document_would(answer: bytes, changes: dict[str, Any]) -> None:
    answer %= USAGE

    whole = LongAnswer(answer)
    written = whole.make_changed_body(changes)

    expected = join_body(Document(answer).make_changed_body(changes))
    assert written is None or orjson.loads(written) == orjson.loads(expected)
    if written is not None and orjson.dumps(whole.values) == answer:
        assert written == expected
    assert whole.values == orjson.loads(answer)


def test_answer_stays_as_it_was_written_up_to_its_end() -> None:
    answer = b'{"x": 1.50, "y":[1e-05],"usage":%b,"kv_transfer_params":null}' % USAGE

    assert LongAnswer(answer).make_changed_body(CHANGES[1]) == b'{"x": 1.50, "y":[1e-05],"usage":%b}' % USAGE


def test_long_answer_does_not_change_members_of_a_choice() -> None:
    answer = b'{"kv_transfer_params":null,"choices":[{"x":1,"usage":2,"kv_transfer_params":3}]}'

    assert LongAnswer(answer).make_changed_body(CHANGES[2]) is None
