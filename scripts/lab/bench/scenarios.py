"""Loads, which are the same for every measured program."""

from __future__ import annotations

import json
from dataclasses import dataclass

from lab.common.engines import MEBIBYTE, MODEL, TEXT_BYTES_PER_TOKEN

# The prompt has quotes and line ends, so that JSON parsers meet escapes.
_TEXT = 'The "quick" brown fox jumps over the lazy dog, and the proxy passes on what it said.\n'


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load: each client sends requests for `seconds`, or a single one if there is a spread."""

    name: str
    title: str
    figures: tuple[str, ...]
    """Names of its figures in `lab.bench.course`."""
    connections: int
    seconds: float
    max_tokens: int
    stream: bool = True
    pace_ms: int = 0
    """Time between two tokens of a stream. 0: as fast as the engine can write."""
    prompt_bytes: int = 400
    media_bytes: int = 0
    """Size of an image in the prompt, as base64."""
    spread_seconds: float = 0.0
    """If positive, each client sends one request, and they begin within this time."""
    rest_seconds: float = 0.0
    """Minimum time between the starts of two requests of a client."""
    beside: Scenario | None = None
    """A load of other clients at the same time, whose answers are only counted."""
    is_measured_directly: bool = False
    """Engines are measured without a program, too."""
    needs_fresh_program: bool = False
    """The program is started for this scenario, which is measured once, because memory is a figure."""
    saturates: bool = False
    """The program may use all cores."""

    def body(self, **more: object) -> bytes:
        """Return the JSON body of every request."""
        text = (_TEXT * (self.prompt_bytes // len(_TEXT) + 1))[: self.prompt_bytes]
        content: object = text
        if self.media_bytes:
            image = {"url": "data:image/png;base64," + ("iVBORw0KGgoAAAAN" * (self.media_bytes // 16))}
            content = [{"type": "text", "text": text}, {"type": "image_url", "image_url": image}]
        request = {
            "model": f"{MODEL}-{self.pace_ms}ms",
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": content},
            ],
            "temperature": 0.7,
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            **more,
        }
        if self.stream:
            request["stream_options"] = {"include_usage": True}
        return json.dumps(request, separators=(",", ":")).encode()


SHORT_STREAM = "short-stream"
SHORT_ANSWER = "short-answer"
PACED = "paced"
PACED_20_MS = "paced-20ms"
PACED_50_MS = "paced-50ms"
BURST = "burst"
LARGE_PROMPT = "large-prompt"
MEDIA = "media"
BESIDE_MEDIA = "beside-media"
SLOW_1000 = "slow-1000"
SLOW_5000 = "slow-5000"
SATURATED_STREAM = "saturated-stream"
SATURATED_ANSWER = "saturated-answer"

_PER_REQUEST = ("cpu_per_request", "requests_per_second")
_FIRST_TOKEN = ("first_token_p50", "first_token_p99")
_ADDED = ("added_p50", "added_p99", "gap_p99")


def scenarios(seconds: float) -> list[Scenario]:
    """Return all scenarios. Each takes about `seconds`; slow streams also take the time to begin them."""
    return [
        Scenario(SHORT_STREAM, "1-token streams, 32 at a time", _PER_REQUEST, 32, seconds, max_tokens=1),
        Scenario(
            SHORT_ANSWER,
            "16 tokens, not streamed, 32 at a time",
            _PER_REQUEST,
            32,
            seconds,
            max_tokens=16,
            stream=False,
        ),
        _paced(
            PACED,
            "200 streams, 20 tokens/s each",
            200,
            seconds,
            pace_ms=50,
            figures=("cpu_per_token", "cpu_per_further_token", *_FIRST_TOKEN, *_ADDED),
        ),
        Scenario(
            PACED_20_MS,
            "64-token streams, 20 ms a token, 200 at a time",
            ("cpu_per_token", *_FIRST_TOKEN, "gap_p99"),
            200,
            seconds,
            max_tokens=64,
            pace_ms=20,
        ),
        Scenario(
            PACED_50_MS,
            "40-token streams, 50 ms a token, 200 at a time",
            ("cpu_per_token", *_FIRST_TOKEN, "gap_p99"),
            200,
            seconds,
            max_tokens=40,
            pace_ms=50,
        ),
        Scenario(
            BURST,
            "128-token streams, as fast as tokens come, 16 at a time",
            ("cpu_per_token", *_PER_REQUEST),
            16,
            seconds,
            max_tokens=128,
        ),
        Scenario(
            LARGE_PROMPT,
            "256 KiB prompts, 1-token streams, 8 at a time",
            _PER_REQUEST,
            8,
            seconds,
            max_tokens=1,
            prompt_bytes=1 << 18,
        ),
        _media(seconds, connections=2),
        _paced(
            BESIDE_MEDIA,
            "50 streams, 20 tokens/s each, while a client sends 8 MiB five times a second",
            50,
            seconds,
            pace_ms=50,
            figures=("beside", *_ADDED),
            beside=_media(seconds, connections=1, rest_seconds=0.2),
        ),
        _slow(SLOW_1000, 1000, spread_seconds=2.0, held_seconds=seconds),
        _slow(SLOW_5000, 5000, spread_seconds=6.0, held_seconds=seconds),
        *(_shape(prompt, connections, 2 * seconds / 3) for prompt, connections in ((1, 1), (1, 16), (1, 100), (8, 64))),
        Scenario(
            SATURATED_STREAM,
            "both cores: 1-token streams, 256 at a time",
            _PER_REQUEST,
            256,
            seconds,
            max_tokens=1,
            is_measured_directly=True,
            saturates=True,
        ),
        Scenario(
            SATURATED_ANSWER,
            "both cores: 16 tokens, not streamed, 256 at a time",
            _PER_REQUEST,
            256,
            seconds,
            max_tokens=16,
            stream=False,
            saturates=True,
        ),
    ]


def named(name: str, seconds: float = 1.0) -> Scenario:
    """Return the scenario of this name."""
    (found,) = (scenario for scenario in scenarios(seconds) if scenario.name == name)
    return found


def _paced(
    name: str,
    title: str,
    connections: int,
    seconds: float,
    *,
    figures: tuple[str, ...],
    pace_ms: int,
    beside: Scenario | None = None,
) -> Scenario:
    """Return a scenario of streams that begin within a second and last `seconds`."""
    tokens = max(2, round(1000 * seconds / pace_ms))
    return Scenario(
        name,
        title,
        figures,
        connections,
        seconds,
        max_tokens=tokens,
        pace_ms=pace_ms,
        spread_seconds=1.0,
        beside=beside,
        is_measured_directly=True,
    )


def _shape(prompt: int, connections: int, seconds: float) -> Scenario:
    """Return a load of SGLang's published figures: thousands of tokens in, and part of 1K out."""
    tokens = max(2, round(50 * seconds))
    return Scenario(
        f"{prompt}k-{connections}",
        f"{prompt}K tokens in, {tokens} of 1K out at 50 tokens/s, {connections} at a time",
        # A single stream has a single first token, too few for a percentile.
        ("cpu_per_token", *(_FIRST_TOKEN if connections > 1 else ()), "gap_p99"),
        connections,
        seconds,
        max_tokens=tokens,
        pace_ms=20,
        prompt_bytes=prompt * 1024 * TEXT_BYTES_PER_TOKEN,
        spread_seconds=0.5,
    )


def _slow(name: str, connections: int, *, spread_seconds: float, held_seconds: float) -> Scenario:
    """Return a scenario of streams with a token per second that are all open for a while."""
    tokens = round(spread_seconds + held_seconds) + 1
    return Scenario(
        name,
        f"{connections:,} streams, 1 token/s each",
        ("cpu_per_token", "cpu_per_further_token", "memory", "memory_per_stream", "gap_p99"),
        connections,
        spread_seconds + held_seconds,
        max_tokens=tokens,
        pace_ms=1000,
        spread_seconds=spread_seconds,
        needs_fresh_program=True,
    )


def _media(seconds: float, *, connections: int, rest_seconds: float = 0.0) -> Scenario:
    return Scenario(
        MEDIA,
        f"8 MiB images, not streamed, {connections} at a time",
        (*_PER_REQUEST, "memory"),
        connections,
        seconds,
        max_tokens=1,
        stream=False,
        media_bytes=8 * MEBIBYTE,
        rest_seconds=rest_seconds,
    )
