"""The sub-command: its flags, scrapes and report."""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import orjson

from proxy.settings import SettingsError
from proxy.settings.cli import Parser
from proxy.tools.advise.observed import Unknown, observed, read
from proxy.tools.advise.split import advised, verdict
from proxy.tools.flag_numbers import positive

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from proxy.tools.advise.observed import Observed, Sample

_open: Final = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # without http_proxy
_TIMEOUT_SECONDS: Final = 5.0
_MOST_BYTES: Final = 16 * 1024 * 1024
_FEWEST_SCRAPES: Final = 10
_MOST_SCRAPES: Final = 60
_DESCRIPTION: Final = """\
Watch the metrics of running gateways for a while, and say which side of the fleet is the bottleneck, prefillers or
decoders, and what moving one instance from one to the other would do."""


def main(argv: Sequence[str]) -> int:
    """Run the sub-command and return its exit code. Raises SettingsError."""
    flags = read_flags(argv)
    try:
        samples = _samples(flags.metrics, flags.seconds)
        found = observed(samples, flags.token_ms / 1000, flags.decode_streams)
    except Unknown as error:
        print(f"pdproxy advise: {error}", file=sys.stderr)
        return 1
    print(as_json(found).decode() if flags.json else as_table(found))
    return 0


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Read the flags of the sub-command. Raises SettingsError."""
    parser = Parser(prog="pdproxy advise", description=_DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--metrics",
        action="append",
        required=True,
        metavar="URL",
        help="of a gateway, as http://gateway:1999/metrics; repeatable, for all that share the engines",
    )
    add("--seconds", type=positive, default=60.0, help="to watch, while there is load (default: 60)")
    add("--token-ms", type=positive, default=100.0, help="a decoder is full at this time a token (default: 100)")
    add("--decode-streams", type=positive, metavar="N", help="or with this number of streams (default: learned)")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(argv)


def _samples(urls: Sequence[str], seconds: float) -> list[Sample]:
    began = time.monotonic()
    scrapes = min(_MOST_SCRAPES, max(_FEWEST_SCRAPES, round(seconds)))
    samples = []
    for number in range(scrapes + 1):
        time.sleep(max(0.0, began + number * seconds / scrapes - time.monotonic()))
        samples.append(read(time.monotonic(), [_get(url) for url in urls]))
    return samples


def _get(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"--metrics: {url} is no URL; say http://gateway:1999/metrics")
    try:
        with _open(url, timeout=_TIMEOUT_SECONDS) as answer:
            return str(answer.read(_MOST_BYTES).decode(errors="replace"))
    except (OSError, ValueError) as error:
        raise Unknown(f"{url} does not answer: {getattr(error, 'reason', error)}") from None


def as_table(found: Observed) -> str:
    """Return the report as text."""
    now = found.split
    lines = [f"{'split':16}{'prefillers busy':>17}{'decoders busy':>15}{'carries':>10}"]
    for split in now.alternatives():
        name = f"{split.name} (now)" if split is now else split.name
        busy = f"{split.prefill_busy:17.0%}{split.decode_busy:15.0%}"
        lines.append(f"{name:16}{busy}{split.carries:9.2f}×")
    pace = f"{1000 * found.token_seconds:.1f} ms a token"
    lines += [
        "",
        f"{found.streams:.1f} streams at each decoder, {pace}; full with {found.streams_when_full:.1f}.",
        *(f"Note: {note}." for note in found.notes),
        verdict(now),
    ]
    return "\n".join(lines)


def as_json(found: Observed) -> bytes:
    """Return the report as JSON."""
    now = found.split
    splits = [{"split": each.name, **asdict(each), "carries": each.carries} for each in now.alternatives()]
    return orjson.dumps(
        {
            "now": now.name,
            "advised": advised(now).name,
            "bottleneck": now.bottleneck,
            "verdict": verdict(now),
            "splits": splits,
            "decode_streams": found.streams,
            "decode_streams_when_full": found.streams_when_full,
            "token_seconds": found.token_seconds,
            "notes": found.notes,
        },
        option=orjson.OPT_INDENT_2,
    )
