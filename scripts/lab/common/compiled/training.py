"""Training load: requests during which GCC counts the branches of the compiled gateway.

The requests are ordinary, and none is one that `scripts/bench` measures. They need not be complete: code that they do
not reach is compiled without counts.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

from lab.common import peers
from lab.common.fleet import Fleet
from lab.common.processes import HOST, unwind_on_signals

_MODEL: Final = "training"
_KEY: Final = "training"
_KEYS: Final = f"keys: [{{name: training, key: {_KEY}, max_concurrent: 1000, requests_per_minute: 1000000}}]\n"
_CLIENTS: Final = 16
_SENTENCE: Final = 'She wrote: "The river is wide here,\nand the bridge is old." '
_PICTURE: Final = "data:image/png;base64," + "iVBORw0KGgoAAAAN" * 20_000
_WORDS: Final = ("one", "two", "three", "four")
# Words of the prompt, tokens of the answer, and whether it is streamed.
_REQUESTS: Final = (
    *((30, 1, True), (30, 1, True), (30, 16, False), (30, 16, False)),
    *((100, 60, True), (300, 30, True), (300, 100, False), (20_000, 8, True)),
)


def train(directory: Path, rounds: int = 20) -> None:
    """Train the gateway in `directory` and stop it normally, so that it writes its counts.

    Each client sends every request `rounds` times. Exits if an answer is wrong.
    """
    with Fleet() as fleet:
        keys = fleet.directory / "keys.yaml"
        keys.write_text(_KEYS)
        keys.chmod(0o600)
        fleet.mock_engines(2, 2, "--model", _MODEL, "--decode-step-ms", "2")
        under = {"PROXY_AUTH__CLIENT_KEYS_FILE": str(keys)}
        gateway = fleet.keep(fleet.gateway(words=peers.ours(directory).words, environment=under))
        with ThreadPoolExecutor(_CLIENTS) as clients:
            list(clients.map(partial(_ask_all, gateway.port, rounds), range(_CLIENTS)))


def _ask_all(port: int, rounds: int, client: int) -> None:
    """Send all kinds of requests on one connection."""
    with closing(HTTPConnection(HOST, port, timeout=60)) as connection:
        for number in range(rounds):
            for words, tokens, stream in _REQUESTS:
                _ask(connection, _text(words, client + number), tokens, stream=stream)
        _ask(connection, [{"type": "image_url", "image_url": {"url": _PICTURE}}], 4, stream=True)


def _text(words: int, seed: int) -> str:
    """Return a text of at least this number of words. Texts of consecutive seeds differ."""
    return _WORDS[seed % len(_WORDS)] + str(seed) + _SENTENCE * (words // 11 + 1)


def _ask(connection: HTTPConnection, content: Any, tokens: int, *, stream: bool) -> None:
    request = {"model": _MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
    if stream:
        request.update(stream=True, stream_options={"include_usage": True})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_KEY}"}
    connection.request("POST", "/v1/chat/completions", json.dumps(request), headers)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200 or (stream and not body.endswith(b"data: [DONE]\n\n")):
        sys.exit(f"the gateway under training answered {answer.status}: {body[-1000:].decode(errors='replace')}")


if __name__ == "__main__":
    unwind_on_signals()
    train(Path(sys.argv[1]))
