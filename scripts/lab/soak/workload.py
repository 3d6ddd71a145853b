"""The requests of clients, a fixed set for each seed.

Most are ordinary, some have several prompts or samples, some are invalid, and some clients disconnect early. Their JSON
has a form that no library writes, so that any re-serialisation is detected.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from proxy.wire.openai import OPENAI_APIS, Api

MODEL = "sim"
_SIZE = 300
_TEXT = (
    "Write down what the river said to the bridge, in the words of the bridge; then let the river answer. “Enough!” "
    "cried the café, señor, über alles 日本語 🙂 and again: once more, slowly, from the beginning to the end.\n"
)
_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {parameter: {}}}}}
    for name, parameter in (("find", "q"), ("show", "at"))
]
_THINKING = {"chat_template_kwargs": {"thinking": True}}
# No library writes or keeps this form of numbers, white space and escapes.
_ODDITIES = '"temperature" : 1.00e0,\t"x_big": 36893488147419103232, "x_text": "\\u0041\\/b",  "x_last": [ 1,2 ]'


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the workload."""

    number: int
    api: Api
    fields: dict[str, Any]
    status: int = 200
    """Expected status. With 400 and no fields, the body is not JSON."""
    leaves_after_seconds: float | None = None
    """Time after which the client disconnects. None: never."""

    @property
    def stream(self) -> bool:
        return bool(self.fields.get("stream"))

    @property
    def asks_usage(self) -> bool:
        """Whether the client requests usage in a stream."""
        return bool((self.fields.get("stream_options") or {}).get("include_usage"))

    @property
    def units(self) -> int:
        """Number of sequences to generate."""
        prompt = self.fields.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) else 1
        return prompts * int(self.fields.get("n") or 1)

    def body(self, user: str) -> bytes:
        """Return the body. `user` identifies the request in the legs at engines."""
        if not self.fields:
            return f'{{"user": "{user}", "messages": [{{"role": "user", "content": "half'.encode()
        members = json.dumps({"user": user, **self.fields}, ensure_ascii=self.number % 2 == 0)
        return f"{members[:-1]} ,{_ODDITIES} }}".encode()


def request_number(user: str) -> int:
    """Return the number of the request with this `user_name`."""
    return int(user.rpartition(".")[2])


def user_name(serial: int, request: Request) -> str:
    """Return the name of a request: its id, and the `user` in its body."""
    return f"soak-{serial}.{request.number}"


def clean_request() -> Request:
    """Return the short request that checks regularly that the gateway serves."""
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "Are you well?"}], "max_tokens": 4}
    return Request(_SIZE, Api.CHAT, fields)


def workload(seed: int) -> list[Request]:
    """Return all requests. The last one is `clean_request`."""
    draw = random.Random(seed)
    return [*(_request(number, draw) for number in range(_SIZE)), clean_request()]


def _request(number: int, draw: random.Random) -> Request:
    kind = draw.random()
    if kind < 0.05:
        return _mistake(number, draw)
    api = draw.choice(list(OPENAI_APIS))
    fields = {"model": MODEL, **_prompt(number, api, draw), **_length(draw), **_options(api, draw)}
    if kind < 0.11:
        # Clients disconnect during the prefill, during the answer, or after it.
        return Request(number, api, fields | {"max_tokens": 200}, leaves_after_seconds=round(draw.uniform(0.0, 1.5), 3))
    if kind < 0.17:
        fields["n"] = draw.randint(2, 3)
    elif kind < 0.21 and api is Api.COMPLETIONS:
        fields["prompt"] = [_text(number, draw), _text(number, draw)]
    return Request(number, api, fields)


def _mistake(number: int, draw: random.Random) -> Request:
    """Return an invalid request, which the gateway or only an engine can detect."""
    text = _text(number, draw)
    mistakes: list[tuple[dict[str, Any], int]] = [
        ({}, 400),
        ({"model": MODEL, "prompt": text, "stream": "yes"}, 400),
        ({"model": MODEL, "prompt": text, "n": 0}, 400),
        ({"model": MODEL, "prompt": text, "max_tokens": -1}, 400),
        ({"model": "none such", "prompt": text}, 404),
        ({"model": MODEL}, 400),
    ]
    fields, status = draw.choice(mistakes)
    return Request(number, Api.COMPLETIONS, fields, status)


def _prompt(number: int, api: Api, draw: random.Random) -> dict[str, Any]:
    text = _text(number, draw)
    if api is Api.COMPLETIONS:
        return {"prompt": text}
    return {"messages": [{"role": "system", "content": "You are a bridge."}, {"role": "user", "content": text}]}


def _text(number: int, draw: random.Random) -> str:
    """Return a unique prompt. Many are short and few are long."""
    length = min(6000, int(draw.lognormvariate(5.0, 1.2)))
    return f"[{number}] " + (_TEXT * (length // len(_TEXT) + 1))[:length]


def _length(draw: random.Random) -> dict[str, Any]:
    short, middle, long = (1, 12), (20, 80), (100, 220)
    return {"max_tokens": draw.randint(*draw.choices((short, middle, long), weights=(3, 5, 2))[0])}


def _options(api: Api, draw: random.Random) -> dict[str, Any]:
    """Return random options of a request."""
    options: dict[str, Any] = {}
    if draw.random() < 0.65:
        options["stream"] = True
        if draw.random() < 0.5:
            options["stream_options"] = {"include_usage": True, "continuous_usage_stats": draw.random() < 0.2}
    if draw.random() < 0.15:
        options["return_token_ids"] = True
    if draw.random() < 0.1:
        options["stop"] = ["thunder", "über "]
    if draw.random() < 0.1:
        options["seed"] = draw.randint(0, 2**31)
    if api is Api.CHAT and draw.random() < 0.5:
        options |= _THINKING
        if draw.random() < 0.5:
            options["tools"] = _TOOLS
    return options
