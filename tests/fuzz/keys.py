"""A file with the keys of clients, of anything at all."""

from __future__ import annotations

import re

from proxy.settings import SettingsError
from proxy.settings.client_keys import load_client_keys
from tests.fuzz.cutting import spelled
from tests.fuzz.options import CANARY, FILE

WORDS = (
    *(b"keys:\n", b"  - name: ", b"    key: ", b"    key_sha256: ", b"    max_concurrent: "),
    *(
        b"    requests_per_minute: ",
        b"team-a",
        CANARY.encode(),
        b"sk-",
        b"0" * 64,
        b"16",
        b"\n",
        b'"',
        b"'",
        b"- ",
        b": ",
    ),
    *(b"{", b"}", b"[", b"]", b",", b"*", b"&a ", b"!x ", b"!!binary ", b"!!timestamp ", b"|\n ", b"null", b"true"),
    *(b"1.5", b"-1", b"\xc3\xbc", b"\xff"),
)
_NAME = re.compile(rf"name['\"]?\s*:[^\n]*{CANARY}")


def check_keys(data: bytes) -> None:
    """Keys or SettingsError, whose one line tells nothing of what may be a key."""
    file = spelled(data, WORDS)
    FILE.write_bytes(file)
    try:
        keys = load_client_keys(FILE)
    except SettingsError as error:
        text = str(error)
        assert text.splitlines() == [text]
        assert CANARY not in text or text.endswith("is given twice")
        return
    assert keys
    assert len({key.name for key in keys}) == len({key.key_sha256 for key in keys}) == len(keys)
    assert CANARY not in repr(keys) or _NAME.search(file.decode())
