"""The course of a conversation: a text of all that it causes, in which nothing is random or depends on time."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final
from unittest.mock import patch

import orjson
from aiohttp.web_protocol import RequestHandler

from tests.asking import until
from tests.canned import CannedEngine, Received
from tests.deployment import Deployment, deployed
from tests.recorded.conversation import Conversation
from tests.talking import Clients

_MAX_LINE: Final = 2000
"""A longer line is cut to its ends and a digest."""
_SHORT_LINE: Final = 100
"""A longer line that is like the line before is cut to the difference."""
_IDS: Final = re.compile(
    r"([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f]))(-\d+(?=-))?"
    r"(-[0-9a-f]{8}\b)?"
)
_BLOCKS: Final = re.compile(r"(?<=\"remote_block_ids\":)\[\[[\d,]*\]\]")
_RANDOM: Final = (
    (re.compile(r"Date: [^\r\n]*GMT"), "Date: now"),
    (re.compile(r'"(created|created_at|completed_at)": ?\d+'), r'"\1":0'),
    (re.compile(r"\d+\.\d+ s\b"), "some s"),
    (re.compile(r"(?i)(retry-after(-ms)?): \d+"), r"\1: soon"),
    (re.compile(r'"(e2e_latency|request_received_ts|queue_time)":[\d.e-]+'), r'"\1":0'),
    (re.compile(r'"bootstrap_room":(\d+)'), r'"bootstrap_room":"ROOM"'),
    (re.compile(r":\d+/v1/metaserver"), ":callbacks/v1/metaserver"),
    (re.compile(r"null +"), "null"),  # token ids that were taken out of one piece leave blanks
)
# Metrics of this process, of how long something took or in how many pieces it came, and of judgements about these.
_VARYING: Final = re.compile(
    r"(process|python)_.*|.*_(bucket|created|share)|.*_(seconds|ratio)_sum|pdproxy_inter_token_.*"
    r"|.*_engine_seconds_total|.*(lag|timestamp|fds|memory|oldest|cpu)_.*"
    r"|pdproxy_status_.*|pdproxy_instance_(tokens_per_second|kv_capacity_tokens)"
)
_TIMES: Final = re.compile(r"t_.*|dur|ttft|p_seconds")
"""Members of the access log."""
_BETWEEN_ENGINES: Final = re.compile(rb"GET |POST /_mock/")
"""Health checks, and requests of simulated engines to each other."""
_RELEASES: Final = re.compile(r"/abort_request|pdproxy-release")


@dataclass
class _Wiretap:
    """Keeps the bytes that servers of aiohttp receive. Simulated engines are such servers."""

    pieces: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Port, number of the connection, and bytes, in the order of their arrival."""
    _connections: dict[RequestHandler, int] = field(default_factory=dict)

    @contextmanager
    def listening(self) -> Iterator[None]:
        receive = RequestHandler.data_received

        def data_received(handler: RequestHandler, data: bytes) -> None:
            if handler.transport is not None:
                connection = self._connections.setdefault(handler, len(self._connections))
                self.pieces.append((handler.transport.get_extra_info("sockname")[1], connection, bytes(data)))
            receive(handler, data)

        with patch.object(RequestHandler, "data_received", data_received):
            yield

    def requests(self, port: int) -> list[bytes]:
        """Return the requests at a port, in the order of their first bytes."""
        streams: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for number, (at, connection, data) in enumerate(self.pieces):
            if at == port:
                streams[connection].append((number, data))
        return [request for _, request in sorted(each for pieces in streams.values() for each in _split(pieces))]


def _split(pieces: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Cut the pieces of one connection into requests, each with the number of its first piece."""
    data, first = b"", -1
    for number, piece in pieces:
        if not data:
            first = number
        data += piece
        while (size := _size(data)) and len(data) >= size:
            yield first, data[:size]
            data, first = data[size:], number
    if data:
        yield first, data + b"\n(cut)"


def _size(data: bytes) -> int:
    """Return the length of the first request, or 0 if its head is not whole."""
    head, separator, _ = data.partition(b"\r\n\r\n")
    length = re.search(rb"\r\nContent-Length: (\d+)", head, re.IGNORECASE)
    return len(head) + 4 + (int(length[1]) if length else 0) if separator else 0


class _AccessLog(logging.Handler):
    """Keeps the lines of requests, without times."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields: Mapping[str, object] = vars(record)["fields"]
        self.lines.append(orjson.dumps({name: fields[name] for name in fields if not _TIMES.fullmatch(name)}).decode())


class _Log(logging.Handler):
    """Keeps what the gateway logs. The lines of engines and libraries are their own."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(("proxy.sim", "proxy.access")):
            self.lines.append(f"{record.levelname} {record.getMessage()}")


@contextmanager
def _heard(name: str, handler: logging.Handler) -> Iterator[None]:
    """Have a handler take the records of a logger in the block."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


async def course(
    conversation: Conversation, fast_path: bool, store: Callable[[], Path], *, tells_log: bool = False
) -> str:
    """Have the conversation with a new gateway, and return its course."""
    settings = conversation.settings
    settings = {**settings, "listen": {**settings.get("listen", {}), "fast_path": fast_path}}
    wiretap, access, log = _Wiretap(), _AccessLog(), _Log()
    with ExitStack() as stack:
        stack.enter_context(wiretap.listening())
        prefillers, decoders = conversation.make_engines(store)
        async with deployed(prefillers, decoders, connector=conversation.connector, **settings) as gateway:
            if conversation.loses_kv:
                gateway.may_stay_pinned = 4
                gateway.expects_inexact_pins = gateway.expects_resent = True
            if conversation.prepare is not None and (waits := conversation.prepare(gateway)) is not None:
                await waits
            wiretap.pieces.clear()
            before = _metrics(gateway)
            clients = Clients(gateway)
            with _heard("proxy.access", access), _heard("proxy", log):
                await conversation.talk(clients)
                for line in clients.lines:
                    line.writer.close()
                await clients.rest()
                await until(lambda: not gateway.worker.client_listener.connection_count, "all connections to be closed")
                gateway.worker.request_observers.flush_batch()
            after = _metrics(gateway)
            sections = {
                **_answers(clients),
                **_requests(gateway, wiretap),
                "metrics": _changes(before, after),
                "access log": access.lines,
                **({"log": log.lines} if tells_log else {}),
            }
            name = _Names(gateway)
    named = {title: [*map(name.plain, texts)] for title, texts in sections.items()}
    for title, texts in named.items():
        if conversation.is_unordered:
            texts[:] = [_BLOCKS.sub("BLOCKS", _IDS.sub("ID", text)) for text in texts]
        if conversation.is_unordered and title.startswith("client"):
            texts[1] = "\n\n".join(sorted(texts[1].split("\n\n"), key=_index))
        elif conversation.is_unordered or title.endswith(("releases", "metrics")):
            texts.sort(key=lambda text: _IDS.sub("", text))
    lines = [line for title, texts in named.items() for line in _section(title, map(name.ids, texts))]
    return "\n".join(lines) + "\n"


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    changed = {name: after.get(name, 0) - before.get(name, 0) for name in {**before, **after}}
    return [f"{name} {change:+g}" for name, change in changed.items() if change]


def _section(title: str, texts: Iterable[str]) -> Iterator[str]:
    yield f"=== {title}"
    before: dict[str, str] = {}
    for text in texts:
        for line in text.split("\n"):
            kind = line[:6]
            yield _cut(_abridged(line, before.get(kind, "")) if len(line) > _SHORT_LINE else line)
            before[kind] = line


def _abridged(line: str, before: str) -> str:
    """Replace both ends of a line by their lengths if the line before has the same ends, and if they are most of it."""
    most = min(len(line), len(before))
    begin = next((at for at in range(most) if line[at] != before[at]), most)
    end = next((at for at in range(most - begin) if line[-1 - at] != before[-1 - at]), most - begin)
    return f"{line[:6]}[{begin}]{line[begin : len(line) - end]}[{end}]" if begin + end > len(line) / 2 else line


def _cut(line: str) -> str:
    line = line.encode("unicode_escape").decode() if not line.isprintable() else line
    if len(line) <= _MAX_LINE:
        return line
    half, digest = _MAX_LINE // 4, sha256(line.encode()).hexdigest()
    return f"{line[:half]} … {len(line)} characters with SHA-256 {digest} … {line[-half:]}"


def _answers(clients: Clients) -> dict[str, list[str]]:
    return {
        f"client {number}, answer {which}: {ending}": [_head(head), body]
        for number, line in enumerate(clients.lines)
        for which, (head, body, ending) in enumerate(line.received)
    }


def _index(event: str) -> int:
    """Return the index of the choice in an event, or a large number if it has none."""
    found = re.search(r'"index":(\d+)', event)
    return int(found[1]) if found else 1000


def _requests(gateway: Deployment, wiretap: _Wiretap) -> dict[str, list[str]]:
    """Return the requests to each engine. Requests that release KV may come at any time, and stand apart."""
    found = {}
    for role, engines in (("prefiller", gateway.prefillers), ("decoder", gateway.decoders)):
        for number, engine in enumerate(engines):
            if isinstance(engine, CannedEngine):
                requests = [_request(one) for one in engine.received]
            else:
                requests = [one.decode() for one in wiretap.requests(engine.port) if not _BETWEEN_ENGINES.match(one)]
            releases = [one for one in requests if _RELEASES.search(one)]
            found[f"{role} {number}"] = [one for one in requests if one not in releases]
            found[f"{role} {number}, releases"] = releases
    return {title: list(map(_without_length, requests)) for title, requests in found.items() if requests}


def _request(received: Received) -> str:
    lines = [f"POST {received.path} HTTP/1.1", *(f"{name}: {value}" for name, value in received.headers.items())]
    return "\r\n".join([*lines, "", received.body.decode()])


def _head(text: str) -> str:
    """Return the lines of a head."""
    return text.replace("\r\n", "\n").removesuffix("\n")


def _without_length(request: str) -> str:
    """Drop the header with the length of the body, which changes with random numbers in it."""
    head, _, body = request.partition("\r\n\r\n")
    return "\n\n".join([_head(re.sub(r"(?i)\r\ncontent-length: \d+", "", head)), body])


def _metrics(gateway: Deployment) -> dict[str, float]:
    gateway.worker.request_observers.flush_batch()
    samples: defaultdict[str, float] = defaultdict(float)
    for family in gateway.worker.metrics.collect():
        for sample in family.samples:
            if not _VARYING.fullmatch(sample.name):
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                samples[f"{sample.name}{{{labels}}}"] += float(sample.value)
    return samples


class _Names:
    """Replaces ports by the names of their servers, ids by numbers, and times by words."""

    def __init__(self, gateway: Deployment) -> None:
        self._ports = {gateway.url.rpartition(":")[2]: "gateway"}
        for role, engines in (("prefiller", gateway.prefillers), ("decoder", gateway.decoders)):
            for number, engine in enumerate(engines):
                self._ports[str(engine.port)] = f"{role}{number}"
                if port := getattr(engine, "bootstrap_port", None):
                    self._ports[str(port)] = f"{role}{number}-bootstrap"
        self._port = re.compile(rf"(?:\b127\.0\.0\.1:)?\b({'|'.join(self._ports)})\b")
        self._ids: dict[str, int] = {}

    def plain(self, text: str) -> str:
        """Return the text with names for ports and random words, and with its ids."""
        text = self._port.sub(lambda found: self._ports[found[1]], text)
        for pattern, word in _RANDOM:
            text = pattern.sub(word, text)
        return text

    def ids(self, text: str) -> str:
        """Return the text with numbers for its ids, in the order in which they come."""
        return _IDS.sub(self._id, text)

    def _id(self, found: re.Match[str]) -> str:
        """Engines add random digits to some ids."""
        number = self._ids.setdefault(found[1], len(self._ids))
        return f"ID{number}{found[2] or ''}{'-random' if found[3] else ''}"
