"""One conversation on both roads: through two gateways that differ in nothing but `listen.fast_path`.

What must be the same: each byte that clients get, each request that engines see, what is counted, written and left.
Ids, ports and times are not: they are replaced by what they are. Nor are the chunks of a streamed answer: they are what
arrived at once.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from difflib import unified_diff
from pprint import pformat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

from proxy.fast_path import connection
from proxy.listener.replies import accepted_id
from proxy.observe.access_line import access_line
from proxy.observe.observers import RequestListener
from tests.asking import until
from tests.canned import CannedEngine
from tests.deployment import generations, releases
from tests.talking import Clients

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from proxy.observe.record import RequestRecord
    from tests.conftest import Deploy
    from tests.deployment import Deployment

    Conversation = Callable[["Clients"], Awaitable[None]]

_ID: Final = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}(-\d+(?=-))?(-[0-9a-f]{8})?"
)
_TIMES: Final = (
    (re.compile(r"Date: [^\r]*GMT"), "Date: now"),
    (re.compile(r'"created": ?\d+'), '"created":0'),
    (re.compile(r"\d+\.\d+ s\b"), "some s"),
    (re.compile(r"(?i)retry-after(-ms)?: \d+"), "retry-after: soon"),
)
_ROOM: Final = re.compile(r"('bootstrap_room':) [0-9]+")
_BLANKS: Final = re.compile(r"null +")
"""Token ids that were taken out leave blanks where they came in one piece."""

# Counted by time, or of this process and not of the gateway.
_UNTOLD_METRICS: Final = re.compile(
    r"(process|python)_.*|.*_(bucket|sum|created|share)|.*(lag|timestamp|fds|memory|oldest|cpu)_.*"
)
_CHUNK: Final = re.compile(r"(^|\r\n)[0-9a-f]+\r\n")
_OF_READS: Final = "pdproxy_inter_token_seconds_count []"
_UNTOLD_FIELDS: Final = re.compile(r"t_.*|dur|ttft|p_seconds")


class _Access(RequestListener):
    """Keeps the access lines, without times."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def request_ended(self, record: RequestRecord) -> None:
        fields = {
            name: value for name, value in access_line(record.facts).items() if not _UNTOLD_FIELDS.fullmatch(name)
        }
        self.lines.append(repr(fields))


class _Log(logging.Handler):
    """Keeps what the gateway logs; the engines' and libraries' lines are their own."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("proxy.") and not record.name.startswith("proxy.sim"):
            self.lines.append(f"{record.levelname} {record.getMessage()}")


class Course(NamedTuple):
    """What a conversation came to."""

    answers: list[list[tuple[str, str, str]]]
    asked: list[list[str]]
    """The requests that each engine saw."""
    metrics: dict[str, float]
    access: list[str]
    log: list[str]


class Roads:
    """Both of them; see `take`."""

    def __init__(self, deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
        self._deploy = deploy
        self._fast = 0

        def counted(given: str) -> str:
            self._fast += 1
            return accepted_id(given)

        monkeypatch.setattr(connection, "accepted_id", counted)  # the first that is done when one has begun

    async def take(
        self,
        talk: Conversation,
        *counts: Any,
        before: Callable[[Deployment], Awaitable[None] | None] | None = None,
        engines: Callable[[], tuple[Sequence[Any], Sequence[Any]]] | None = None,
        is_fast: int | None = None,
        unordered: bool = False,
        counts_reads: bool = True,
        **options: Any,
    ) -> Course:
        """The conversation on the fast path, after it was compared.

        `counts` and `options` are for `deploy`; `engines` makes those of each gateway instead. `before` prepares a
        gateway. `is_fast`: so many requests begin there; None: it depends. `unordered`: they run side by side.
        `counts_reads`: the engines' tokens come in the same reads, so that chunks and what is counted are the same.
        """
        courses, counts_of_fast = [], []
        for fast_path in (True, False):
            sections = {**options, "listen": {**options.get("listen", {}), "fast_path": fast_path}}
            gateway = await self._deploy(*(engines() if engines else counts), **sections)
            courses.append(await self._course(gateway, talk, before, unordered=unordered))
            if not counts_reads:
                courses[-1] = _without_reads(courses[-1])
            counts_of_fast.append(self._fast)
        fast, other = courses
        begun, none = counts_of_fast
        assert none == 0
        assert is_fast is None or begun == is_fast, f"{begun} requests began on the fast path, not {is_fast}"
        if found := [
            difference for told, untold in zip(fast, other, strict=True) for difference in _diff(told, untold)
        ]:
            pytest.fail("on the fast path (+) it is not as on the other (-):\n" + "\n".join(found), pytrace=False)
        return fast

    async def _course(
        self,
        gateway: Deployment,
        talk: Conversation,
        before: Callable[[Deployment], Awaitable[None] | None] | None,
        *,
        unordered: bool,
    ) -> Course:
        access, log = _Access(), _Log()
        gateway.worker.observers.add(access)
        if before is not None and (waits := before(gateway)) is not None:
            await waits
        self._fast = 0
        clients = Clients(gateway)
        logger = logging.getLogger("proxy")
        level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(log)
        try:
            await talk(clients)
            for line in clients.lines:
                line.writer.close()
            await clients.rest()
            await until(lambda: not gateway.worker.front.connections, "all connections to be closed")
        finally:
            logger.removeHandler(log)
            logger.setLevel(level)
        gateway.worker.observers.settle()
        named = _Names(gateway)
        in_order = sorted if unordered else list
        return Course(
            [[(named(head), named(body), end) for head, body, end in line.received] for line in clients.lines],
            [in_order(map(named, asked)) for asked in _requests(gateway)],
            _metrics(gateway, named),
            in_order(map(named, access.lines)),
            in_order(map(named, log.lines)),
        )


def _without_reads(course: Course) -> Course:
    """What does not depend on what came in one read."""
    answers = [[(head, _CHUNK.sub("", body), end) for head, body, end in line] for line in course.answers]
    metrics = {name: value for name, value in course.metrics.items() if name != _OF_READS}
    return course._replace(answers=answers, metrics=metrics)


def _diff(fast: object, other: object) -> list[str]:
    """The lines in which two values differ."""
    one, another = (pformat(value, width=200).splitlines() for value in (other, fast))
    return list(unified_diff(one, another, lineterm="", n=0))[2:]


class _Names:
    """Replaces what is different in each deployment by what it is."""

    def __init__(self, gateway: Deployment) -> None:
        self._ports: dict[str, str] = {}
        for role, engines in (("prefiller", gateway.prefillers), ("decoder", gateway.decoders)):
            for number, engine in enumerate(engines):
                self._ports[str(engine.port)] = f"{role}{number}"
                if port := getattr(engine, "bootstrap_port", None):
                    self._ports[str(port)] = f"{role}{number}-bootstrap"
        self._port = re.compile("|".join(rf"\b{port}\b" for port in self._ports))

    def __call__(self, text: str) -> str:
        text = self._port.sub(lambda found: self._ports[found[0]], text)
        for pattern, word in _TIMES:
            text = pattern.sub(word, text)
        return _BLANKS.sub("null", _ROOM.sub(r"\1 ROOM", _ID.sub("ID", text)))


def _requests(gateway: Deployment) -> list[list[str]]:
    """What each engine was asked, and then what any of them was told to let go, which may come at any time."""
    found = []
    for engine in gateway.engines:
        seen = engine.received if isinstance(engine, CannedEngine) else generations(engine)
        found.append([f"{one.path} {_headers(one)} {one.body!r}" for one in seen])
    found.append(sorted(str(one.body) for engine in gateway.engines for one in releases(engine)))
    return found


def _headers(seen: Any) -> dict[str, str]:
    return {name: value for name, value in seen.headers.items() if name != "content-length"}


def _metrics(gateway: Deployment, named: _Names) -> dict[str, float]:
    samples: defaultdict[str, float] = defaultdict(float)
    for family in gateway.worker.metrics.collect():
        for sample in family.samples:
            if sample.value and not _UNTOLD_METRICS.fullmatch(sample.name):
                samples[named(f"{sample.name} {sorted(sample.labels.items())}")] += float(sample.value)
    return dict(samples)
