"""An arbitrary configuration file, environment and command line.

The three parts are separated by form feeds, and variables and arguments by line ends.
"""

from __future__ import annotations

import re
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Final

from proxy.settings import SettingsError, load_settings, write_yaml
from tests.fuzz.cutting import spelled, words

WORDS: Final = words(
    r"""
    prefill decode connector workers passthrough host port seconds networks admin_key engine_api_key_file
    client_keys_file level base_delay_seconds on_missing listen:\n auth:\n admin:\n \n\x20\x20 :\x20 \n \x0c
    -\x20 * &a\x20 !!int\x20 !!binary\x20 |\n\x20 PROXY_ __ OPENAI_API_KEY= PROXY_AUTH__ADMIN_KEY=
    PROXY_LISTEN__PORT= --prefill\n --port\n 10.0.0.1:7100-7115 [::1]:80 http:// s3cr3t 2001-99-99 0x1f 1:60
    .inf .nan 1e400 null true { } [*120 9*4400 \xc3\xbc \xff \xed\xa0\x80 \x00 <<:\x20 ?\x20 10.0.0.0/8
    """
)

_folder = tempfile.TemporaryDirectory(prefix="pdproxy-fuzz-")
FILE = Path(_folder.name) / "options.yaml"

CANARY = "s3cr3t"
# As a secret, the canary must not appear in output. In other options it must.
_SECRET_LINE = re.compile(r"\s*(auth\.)?(engine_api_key|admin_key)\s*:[^,:{}\[\]]*")
_SECRET_VARIABLE = re.compile(r"OPENAI_API_KEY|PROXY_AUTH__(ENGINE_API_KEY|ADMIN_KEY)")


def check_options(data: bytes) -> None:
    """Check for settings, or a SettingsError of one line without secrets, and that printed settings are valid."""
    file, environment, line = (*spelled(data, WORDS).split(b"\f", 2), b"", b"")[:3]
    environ = dict(_variables(environment))
    argv = [word for word in _lines(line) if word not in ("-h", "--help", "--version")]
    is_told = _is_told(file, environ, argv)
    FILE.write_bytes(file)
    try:
        loaded = load_settings(["--config", str(FILE), *argv], environ, needs_backends=False)
    except SettingsError as error:
        text = str(error)
        assert text.splitlines() == [text]
        assert is_told or CANARY not in text
        return
    assert is_told or CANARY not in repr(loaded.settings)
    printed = write_yaml(loaded)
    assert is_told or CANARY not in printed
    FILE.write_text(printed, encoding="utf-8")
    if loaded.settings.auth.engine_api_key is loaded.settings.auth.admin_key is None:
        assert load_settings(["--config", str(FILE)], {}, needs_backends=False).settings == loaded.settings


def _lines(part: bytes) -> list[str]:
    """Return the words as the system passes them: without NUL, and with any bytes instead of UTF-8."""
    return [line for line in part.replace(b"\0", b"").decode("utf-8", "surrogateescape").split("\n") if line]


def _variables(part: bytes) -> list[tuple[str, str]]:
    pairs = (line.partition("=") for line in _lines(part))
    return [(name, value) for name, _, value in pairs if name not in ("PROXY_CONFIG", "")]


def _is_told(file: bytes, environ: dict[str, str], argv: list[str]) -> bool:
    """Return whether the canary is in an option that is not secret."""
    lines = [line for line in file.decode("utf-8", "replace").splitlines() if CANARY in line]
    variables = [name for name, value in environ.items() if CANARY in name + value]
    words = [before for before, word in pairwise(["", *argv]) if CANARY in word.partition("=")[0]]
    return not (
        all(map(_SECRET_LINE.fullmatch, lines))
        and all(map(_SECRET_VARIABLE.fullmatch, variables))
        and not words
        and not any(CANARY in word for word in argv)
    )
