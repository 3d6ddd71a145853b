"""Bootstrap servers: what they tell, how often they are asked, and that none of them can do harm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.connectors.bootstraps import BootstrapServers, bootstrap_address, parse_engines
from proxy.observe.metrics import Metrics
from proxy.upstream import AddressRules, EngineClient, HostNames
from tests.asking import until
from tests.canned import http
from tests.clock import Clock
from tests.connectors.registering import BootstrapServer, engines_told

PREFILLER = Backend(Role.PREFILL, "127.0.0.1", 1, slot=3)  # nothing listens there
TWO = ((0, "engine-0"), (1, "engine-1"))


@asynccontextmanager
async def asking(
    clock: Clock, networks: tuple[str, ...] = ("127.0.0.0/8",), addresses: Mapping[Backend, str] | None = None
) -> AsyncIterator[BootstrapServers]:
    async with HostNames(AddressRules(networks), (), Metrics()) as names, EngineClient(names) as client:
        yield BootstrapServers(client, clock, addresses=lambda: addresses or {})


async def refused(bootstraps: BootstrapServers, address: str) -> UpstreamError:
    with pytest.raises(UpstreamError) as caught:
        await bootstraps.query_engines(PREFILLER, address)
    assert caught.value.backend == PREFILLER
    assert "127.0.0.1" not in caught.value.message
    return caught.value


# Where they are


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        ("10.0.0.1", None, "http://10.0.0.1:8998"),
        ("prefill-1.local", 9000, "http://prefill-1.local:9000"),
        ("fd00::1", None, "http://[fd00::1]:8998"),
    ],
)
def test_server_is_beside_its_prefiller(host: str, port: int | None, address: str) -> None:
    assert bootstrap_address(Backend(Role.PREFILL, host, 7100, bootstrap_port=port), 8998) == address


# Answers of servers


def test_engines_are_sorted_by_rank() -> None:
    told = {str(rank): {"engine_id": f"engine-{rank}", "worker_addr": {"0": {"0": "tcp://x"}}} for rank in (10, 9, 0)}
    assert parse_engines(orjson.dumps(told)) == ((0, "engine-0"), (9, "engine-9"), (10, "engine-10"))
    assert parse_engines(b"{}") == ()


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"null", b"[]", b'"0"', b"{", b"\xff", b"[" * 100_000),
        *(b'{"0":null}', b'{"0":{}}', b'{"0":{"engine_id":7}}', b'{"0":{"engine_id":""}}'),
        b'{"0":{"engine_id":"%b"}}' % (b"x" * 257),
        *(b'{"%b":{"engine_id":"x"}}' % key for key in (b"", b"-1", b"1.5", b"x", b"10000", b"\xd9\xa1", b"1 ")),
        orjson.dumps({str(rank % 9999): {"engine_id": "x"} for rank in range(4097)}),
    ],
)
def test_invalid_answers_of_bootstrap_servers_are_refused(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_engines(answer)


@given(
    st.binary()
    | st.recursive(st.none() | st.integers(0, 9) | st.text(), lambda inner: st.dictionaries(st.text(), inner))
)
def test_anything_is_engines_or_refused(answer: object) -> None:
    try:
        engines = parse_engines(answer if isinstance(answer, bytes) else orjson.dumps(answer))
    except ValueError:
        return
    assert all(rank >= 0 and engine_id for rank, engine_id in engines)


# How often they are asked


async def test_concurrent_attempts_share_one_query(clock: Clock) -> None:
    async with BootstrapServer() as server, asking(clock) as bootstraps:
        told = await asyncio.gather(*(bootstraps.query_engines(PREFILLER, server.url) for _ in range(5)))
        assert told == [TWO] * 5
        assert await bootstraps.query_engines(PREFILLER, server.url) == TWO
        assert server.asked == ["/query"]


async def test_server_is_queried_again_after_some_seconds_and_when_forgotten(clock: Clock) -> None:
    async with BootstrapServer() as server, asking(clock) as bootstraps:
        await bootstraps.query_engines(PREFILLER, server.url)
        server.answer = engines_told("new")
        clock.now += 4.9
        assert await bootstraps.query_engines(PREFILLER, server.url) == TWO
        clock.now += 0.2
        assert await bootstraps.query_engines(PREFILLER, server.url) == ((0, "new"),)
        server.answer = engines_told("newer")
        bootstraps.forget_engines(PREFILLER)
        assert await bootstraps.query_engines(PREFILLER, server.url) == ((0, "newer"),)
        assert len(server.asked) == 3


async def test_known_bootstrap_answer_is_used_during_a_refresh(clock: Clock) -> None:
    async with BootstrapServer() as server, asking(clock) as bootstraps:
        await bootstraps.query_engines(PREFILLER, server.url)
        clock.now += 60
        server.answer = None
        first = asyncio.create_task(bootstraps.query_engines(PREFILLER, server.url))
        await until(lambda: len(server.asked) == 2, "the question")
        assert await bootstraps.query_engines(PREFILLER, server.url) == TWO
        assert len(server.asked) == 2
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        server.answer = engines_told("new")
        clock.now += 2
        assert await bootstraps.query_engines(PREFILLER, server.url) == ((0, "new"),)


async def test_known_bootstrap_answer_is_used_after_the_server_is_gone(clock: Clock) -> None:
    """It is a side door of the prefiller, which may do well without."""
    async with asking(clock) as bootstraps:
        async with BootstrapServer() as server:
            await bootstraps.query_engines(PREFILLER, server.url)
        clock.now += 60
        assert await bootstraps.query_engines(PREFILLER, server.url) == TWO
        bootstraps.forget_engines(PREFILLER)
        assert (await refused(bootstraps, server.url)).failure is Failure.CONNECT


async def test_waiting_attempts_share_a_failed_query(clock: Clock) -> None:
    async with BootstrapServer(answer=http(b"nonsense")) as server, asking(clock) as bootstraps:
        await asyncio.gather(*(refused(bootstraps, server.url) for _ in range(5)))
        assert len(server.asked) == 1
        server.answer = engines_told("engine-0", "engine-1")
        clock.now += 1
        assert await bootstraps.query_engines(PREFILLER, server.url) == TWO


async def test_waiting_attempt_queries_when_the_first_is_cancelled(clock: Clock) -> None:
    async with BootstrapServer(answer=None) as server, asking(clock) as bootstraps:
        first, second = (asyncio.create_task(bootstraps.query_engines(PREFILLER, server.url)) for _ in range(2))
        await until(lambda: len(server.asked) == 1, "the question")
        server.answer = engines_told("engine-0", "engine-1")
        first.cancel()
        assert await second == TWO
        await asyncio.gather(first, return_exceptions=True)


async def test_another_backend_in_the_same_slot_is_another(clock: Clock) -> None:
    other_server = BootstrapServer(answer=engines_told("other"))
    async with BootstrapServer() as one, other_server as other, asking(clock) as bootstraps:
        await bootstraps.query_engines(PREFILLER, one.url)
        one.answer = engines_told("neighbour")
        stranger = Backend(Role.PREFILL, "127.0.0.1", 7200, slot=PREFILLER.slot)
        assert await bootstraps.query_engines(stranger, one.url) == ((0, "neighbour"),)
        assert await bootstraps.query_engines(PREFILLER, other.url) == ((0, "other"),)  # its port was changed


async def test_server_that_was_forgotten_meanwhile_may_have_been_met(clock: Clock) -> None:
    async with BootstrapServer() as server, asking(clock) as bootstraps:
        await bootstraps.query_engines(PREFILLER, server.url)
        bootstraps.forget_engines(PREFILLER)
        bootstraps.mark_reachable(PREFILLER)
        assert await bootstraps.query_engines(PREFILLER, server.url) == TWO


DOUBTS = [
    (Failure.RESET, None, True),
    (Failure.STATUS, 500, True),
    (Failure.STATUS, 503, False),
    (Failure.STATUS, 400, False),
]


@pytest.mark.parametrize(("failure", "status", "doubted"), DOUBTS)
async def test_engines_are_asked_for_again_after_a_failure_of_theirs(
    clock: Clock, failure: Failure, status: int | None, doubted: bool
) -> None:
    async with BootstrapServer() as server, asking(clock) as bootstraps:
        await bootstraps.query_engines(PREFILLER, server.url)
        error = UpstreamError(failure, PREFILLER, "it failed", engine_status=status)
        with pytest.raises(UpstreamError), bootstraps.forget_on_failure(PREFILLER):
            raise error
        await bootstraps.query_engines(PREFILLER, server.url)
        assert len(server.asked) == 1 + doubted


DECODER = Backend(Role.DECODE, "127.0.0.1", 7300, slot=5)
NEIGHBOUR = Backend(Role.PREFILL, "127.0.0.1", 7200, slot=4)


@pytest.mark.parametrize(
    ("told", "is_met", "blamed"),
    [
        (("engine-0", "engine-1"), False, PREFILLER),
        (("engine-1", "engine-2"), False, PREFILLER),
        (("engine-0", "engine-1"), True, DECODER),
        (("engine-2",), False, DECODER),
    ],
)
async def test_shared_bootstrap_server_does_not_count_against_decoder(
    clock: Clock, told: tuple[str, ...], is_met: bool, blamed: Backend
) -> None:
    """However their bootstrap server is called: it may have several addresses."""
    async with BootstrapServer() as own, BootstrapServer(answer=engines_told(*told)) as other, asking(clock) as servers:
        await servers.query_engines(PREFILLER, own.url)
        await servers.query_engines(NEIGHBOUR, other.url)
        if is_met:
            servers.mark_reachable(PREFILLER)
        with pytest.raises(UpstreamError) as failed, servers.forget_on_failure(PREFILLER):
            raise UpstreamError(Failure.RESET, DECODER, "it failed")
        assert failed.value.backend == blamed
        assert (failed.value.failure is Failure.BOOTSTRAP) is (blamed is PREFILLER)


@pytest.mark.parametrize("is_same", [True, False])
async def test_shared_bootstrap_address_does_not_count_against_decoder(clock: Clock, is_same: bool) -> None:
    """This holds even before the engines of the other prefiller are queried."""
    addresses: dict[Backend, str] = {}
    async with BootstrapServer() as server, asking(clock, addresses=addresses) as servers:
        addresses |= {PREFILLER: server.url, NEIGHBOUR: server.url if is_same else "http://127.0.0.1:1"}
        await servers.query_engines(PREFILLER, server.url)
        with pytest.raises(UpstreamError) as failed, servers.forget_on_failure(PREFILLER):
            raise UpstreamError(Failure.RESET, DECODER, "it failed")
        assert failed.value.backend == (PREFILLER if is_same else DECODER)


# Those that do not answer as they should


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (http(b"{}"), Failure.CONNECT),
        (http(b"[]"), Failure.BAD_ANSWER),
        (http(b'{"0":{"engine_id":"x"}}', "404 Not Found"), Failure.BAD_ANSWER),
        (b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", Failure.BAD_ANSWER),
        (http(b'{"0":{"engine_id":"x"}}' + b" " * 1024 * 1024), Failure.BAD_ANSWER),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", Failure.BAD_ANSWER),
        (b"what?\r\n\r\n", Failure.BAD_ANSWER),
    ],
)
async def test_invalid_answer_of_a_bootstrap_server_is_the_prefillers_failure(
    clock: Clock, answer: bytes, failure: Failure
) -> None:
    async with BootstrapServer(answer=answer, closes=True) as server, asking(clock) as bootstraps:
        assert (await refused(bootstraps, server.url)).failure is failure
        assert server.asked == ["/query"]


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"])
async def test_server_that_hangs_is_waited_for_but_not_for_long(
    clock: Clock, answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.connectors.bootstraps._QUERY_TIMEOUT_SECONDS", 0.05)
    async with BootstrapServer(answer=answer) as server, asking(clock) as bootstraps:
        assert "did not answer" in (await refused(bootstraps, server.url)).message


async def test_added_instances_cannot_lead_where_no_instance_may_be(clock: Clock) -> None:
    async with BootstrapServer() as server, asking(clock, ("10.0.0.0/8",)) as bootstraps:
        error = await refused(bootstraps, server.url)
        assert error.failure is Failure.CONNECT
        assert "not allowed" in error.message
        assert server.asked == []
