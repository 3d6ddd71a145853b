"""Lists of token ids are known by their bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.document import are_token_ids, count_token_ids

SCALARS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.none() | st.booleans()


@given(value=st.lists(SCALARS | st.text(max_size=3) | st.lists(SCALARS, max_size=3), max_size=6) | SCALARS | st.text())
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n ", ":")])
def test_token_ids_are_counted_in_plain_lists(value: Any, separators: tuple[str, str]) -> None:
    written = memoryview(json.dumps(value, separators=separators).encode())
    begins_with_id = isinstance(value, list) and bool(value) and type(value[0]) is int
    is_flat = begins_with_id and not any(isinstance(item, str | list) for item in value)
    assert are_token_ids(written) == begins_with_id
    assert count_token_ids(written) == (len(value) if is_flat else None)


@pytest.mark.parametrize(
    "written", [b"[]", b"[ ]", b"{}", b'"[1]"', b"[1.5]", b"[1e3,2]", b"[true]", b"[-1.0 ,2]", b"12"]
)
def test_other_values_are_not_token_ids(written: bytes) -> None:
    assert not are_token_ids(memoryview(written))
