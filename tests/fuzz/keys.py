"""Files of client keys with arbitrary bytes."""

from __future__ import annotations

import re
from typing import Final

from proxy.settings import SettingsError
from proxy.settings.client_keys import load_client_keys
from tests.fuzz.cutting import spelled, words
from tests.fuzz.options import CANARY, FILE

WORDS: Final = words(
    r"""
    keys:\n \x20\x20-\x20name:\x20 \x20\x20\x20\x20key:\x20 \x20\x20\x20\x20key_sha256:\x20
    \x20\x20\x20\x20max_concurrent:\x20 \x20\x20\x20\x20requests_per_minute:\x20 team-a s3cr3t sk-
    0000000000000000000000000000000000000000000000000000000000000000 16 \n " \' -\x20 :\x20 { } [ ] , * &a\x20
    !x\x20 !!binary\x20 !!timestamp\x20 |\n\x20 null true 1.5 -1 \xc3\xbc \xff
    """
)
_NAME = re.compile(rf"name['\"]?\s*:[^\n]*{CANARY}")


def check_keys(data: bytes) -> None:
    """Check that a file gives keys, or a SettingsError of one line that contains no key."""
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
