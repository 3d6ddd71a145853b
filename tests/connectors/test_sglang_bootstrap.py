"""SGLang's protocol: both legs at once, which meet in a room, and neither waits for the other in vain."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.common.backend import Backend, Load, Role
from proxy.connectors import sglang_bootstrap
from proxy.connectors.sglang_bootstrap import bootstrap_members, choose_room_of_rank
from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import api_of, request, until
from tests.canned import data
from tests.conftest import Deploy
from tests.connectors import meeting
from tests.connectors.meeting import ANSWER, Act, ActingEngine, Exchange, answers, hangs, resets, says, streams
from tests.deployment import Deployment

FLAT = b'{"object":"error","message":"no room","type":"BadRequestError","param":null,"code":400}'
TOLD = {"error": {"object": "error", "message": "transfer failed", "type": "x", "param": None, "code": 500}}
ADDED = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "rid")


class Pair:
    """One prefiller, one decoder and the gateway in front."""

    def __init__(self, gateway: Deployment, prefillers: list[ActingEngine], decoders: list[ActingEngine]) -> None:
        self.gateway = gateway
        self.prefillers = prefillers
        self.decoders = decoders
        self.prefiller = prefillers[0]
        self.decoder = decoders[0]

    def blamed(self) -> dict[tuple[str, ...], float]:
        """How requests went, by instance name, result and role."""
        return self.gateway.metrics("pdproxy_instance_requests_total")

    def results(self, engine: ActingEngine) -> dict[str, float]:
        name = f"{engine.host}:{engine.port}"
        return {labels[1]: count for labels, count in self.blamed().items() if name in labels}


async def start(
    deploy: Deploy, prefill: Act = answers, decode: Act = answers, *, pairs: int = 1, **sections: Any
) -> Pair:
    prefillers = [ActingEngine("prefill", act=prefill) for _ in range(pairs)]
    decoders = [ActingEngine("decode", act=decode) for _ in range(pairs)]
    sections = {"retry": {"max_attempts": 1}, **sections}
    gateway = await deploy(prefillers, decoders, connector="sglang_bootstrap", **sections)
    return Pair(gateway, prefillers, decoders)


# Bodies of the legs


async def test_both_engines_get_the_clients_bytes_and_where_they_meet(deploy: Deploy) -> None:
    pair = await start(deploy)
    sent = b'{"messages" : [{"role":"user","content":"\\/"}], "max_tokens":7, "min_tokens": 3,"x":1.0,"stream":false}'
    async with pair.gateway.session.post(pair.gateway.url + Api.CHAT.path, data=sent) as response:
        assert orjson.loads(await response.read()) == ANSWER
    (prefill,), (decode,) = pair.prefiller.received, pair.decoder.received
    assert prefill.body == decode.body
    assert prefill.path == decode.path == Api.CHAT.path
    assert prefill.headers["x-request-id"] == decode.headers["x-request-id"] == pair.decoder.bodies[0]["rid"]
    members = {name: pair.decoder.bodies[0][name] for name in ADDED}
    assert orjson.loads(decode.body) == {**orjson.loads(sent), **members}
    assert b'"content":"\\/"' in decode.body
    assert members["bootstrap_host"] == "127.0.0.1"
    assert members["bootstrap_port"] is None
    assert 0 < members["bootstrap_room"] < 2**63


async def test_bootstrap_port_is_the_prefillers(deploy: Deploy) -> None:
    pair = await start(deploy)
    (backend,) = pair.gateway.worker.pools.prefill.all_backends()
    pair.gateway.roster.add_for_administrator(Backend(Role.PREFILL, backend.host, backend.port, bootstrap_port=8998))
    await pair.gateway.ask(request(Api.CHAT))
    assert pair.decoder.bodies[0]["bootstrap_port"] == pair.prefiller.bodies[0]["bootstrap_port"] == 8998


async def test_clients_own_room_is_not_used(deploy: Deploy) -> None:
    pair = await start(deploy)
    mine: dict[str, Any] = {
        "bootstrap_host": "10.6.6.6",
        "bootstrap_port": 6,
        "bootstrap_room": 6,
        "rid": "",
        "routed_dp_rank": 6,
    }
    await pair.gateway.ask(request(Api.CHAT, **mine, disagg_prefill_dp_rank=6, data_parallel_rank=6))
    for body in (*pair.prefiller.bodies, *pair.decoder.bodies):
        assert body["bootstrap_host"] == "127.0.0.1"
        assert body["bootstrap_room"] != 6
        assert body["rid"]
        assert not set(body) & {"routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"}


@pytest.mark.parametrize("stream", [True, False])
async def test_every_sequence_has_a_separate_room(deploy: Deploy, stream: bool) -> None:
    pair = await start(deploy)
    answer = await pair.gateway.ask(request(Api.CHAT, n=3, stream=stream))
    assert set(answer.texts) == {0, 1, 2}
    met = Counter(body["bootstrap_room"] for body in (*pair.prefiller.bodies, *pair.decoder.bodies))
    assert list(met.values()) == [2, 2, 2]
    assert all("n" not in body for body in pair.prefiller.bodies)


def test_ipv6_host_stands_in_brackets() -> None:
    members = bootstrap_members(Backend(Role.PREFILL, "fd00::1", 1, bootstrap_port=5), "0" * 32, rank=0, dp_size=1)
    assert members["bootstrap_host"] == "[fd00::1]"
    assert members["bootstrap_port"] == 5


@given(st.integers(0, 2**64 - 1), st.integers(1, 64), st.data())
def test_room_is_a_positive_number_of_63_bits_on_its_rank(drawn: int, dp_size: int, choice: st.DataObject) -> None:
    rank = choice.draw(st.integers(0, dp_size - 1))
    number = choose_room_of_rank(drawn, rank, dp_size)
    assert 0 < number < 2**63
    assert number % dp_size == rank


def test_rooms_are_as_different_as_what_they_are_drawn_from() -> None:
    assert len({choose_room_of_rank(drawn, 1, 4) for drawn in range(10_000)}) == 10_000


async def test_requests_are_spread_over_the_ranks_of_a_prefiller(deploy: Deploy) -> None:
    pair = await start(deploy, meeting.when_let_go, meeting.when_let_go, sglang={"dp_size": 4})
    asked = [asyncio.create_task(pair.gateway.ask(request(Api.CHAT))) for _ in range(8)]
    await pair.prefiller.works(8)
    assert Counter(body["bootstrap_room"] % 4 for body in pair.prefiller.bodies) == dict.fromkeys(range(4), 2)
    pair.prefiller.let_go.set()
    pair.decoder.let_go.set()
    await asyncio.gather(*asked)


async def test_rank_is_free_when_its_prefill_is_done(deploy: Deploy) -> None:
    """Test this for long answers.

    The first and the third request were prefilled on one rank. The second one is still running on the other.
    """

    async def prefill(exchange: Exchange) -> None:
        await (answers if len(exchange.engine.received) in (1, 3) else meeting.when_let_go)(exchange)

    pair = await start(deploy, prefill, meeting.when_let_go, sglang={"dp_size": 2})
    asked = []
    for turn, running in enumerate((0, 1, 1, 2)):
        asked.append(asyncio.create_task(pair.gateway.ask(request(Api.CHAT))))
        await pair.prefiller.works(turn + 1)
        await until(lambda running=running: prefills(pair) == running, "the prefiller to be done")
    first, second, third, fourth = (body["bootstrap_room"] % 2 for body in pair.prefiller.bodies)
    assert first == third == fourth != second
    pair.prefiller.let_go.set()
    pair.decoder.let_go.set()
    await asyncio.gather(*asked)


def prefills(pair: Pair) -> int:
    """How many the prefiller works on, as far as the gateway knows."""
    (backend,) = pair.gateway.worker.pools.prefill.all_backends()
    return pair.gateway.scoreboard.running_requests(backend.slot)


# Both legs go well


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_both_have_the_request_before_either_answers(deploy: Deploy, first: str, stream: bool) -> None:
    pair = await start(
        deploy,
        meeting.answers_when(lambda: pair.decoder) if first == "prefill" else meeting.when_let_go,
        meeting.answers_when(lambda: pair.prefiller),
    )
    answer = await pair.gateway.ask(request(Api.CHAT, stream=stream))
    assert answer.is_done
    assert answer.text == "Hello"
    assert pair.prefiller.aborted == pair.decoder.aborted == []
    assert set(pair.results(pair.prefiller)) == set(pair.results(pair.decoder)) == {"ok"}


async def test_prefillers_answer_is_read_to_the_end(deploy: Deploy) -> None:
    """Otherwise its connection would be good for nothing."""
    pair = await start(deploy, decode=meeting.when_let_go)
    (prefiller,), upstream = pair.gateway.worker.pools.prefill.all_backends(), pair.gateway.worker.upstream
    used: list[object] = []
    for turn in range(3):
        asked = asyncio.create_task(pair.gateway.ask(request(Api.CHAT, stream=True)))
        await pair.decoder.works(turn + 1)
        await until(lambda: not compute(pair, Role.PREFILL), "the prefiller to be done")
        pair.decoder.let_go.set()
        assert (await asked).is_done
        pair.decoder.let_go.clear()
        used += upstream._idle[prefiller.key]
    assert used == [used[0]] * 3


@pytest.mark.interpreted
@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.parametrize("decode", [hangs, meeting.begins_and_hangs])
async def test_defect_in_reading_the_prefill_ends_the_request_and_is_logged(
    deploy: Deploy,
    decode: Act,
    fast_path: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mistaken(_: bytes) -> None:
        raise ValueError("a mistake")

    monkeypatch.setattr(sglang_bootstrap, "find_answer_error", mistaken)
    pair = await start(deploy, decode=decode, listen={"fast_path": fast_path})
    answer = await pair.gateway.ask(request(Api.CHAT, stream=True))
    assert answer.status == 500 or not answer.is_done
    (told,) = pair.gateway.problems
    assert "unexpected ValueError: POST /v1/chat/completions" in told
    pair.gateway.problems.clear()


def compute(pair: Pair, role: Role) -> int:
    (backend,) = pair.gateway.worker.pools.pool_of(role).all_backends()
    return pair.gateway.scoreboard.load_of(backend.slot).compute_tokens


@pytest.mark.parametrize("late", [True, False])
async def test_decoder_is_charged_when_it_allocates_memory(deploy: Deploy, late: bool) -> None:
    """A decoder with the policy `prefill_complete` takes memory when the prompt is computed (SGLang PR #40703)."""
    gateway = await deploy(connector="sglang_bootstrap", decoder={"allocates_after_prefill": late})
    (prefiller,), (decoder,) = gateway.prefillers, gateway.decoders
    (backend,) = gateway.worker.pools.decode.all_backends()

    def kv() -> int:
        return gateway.scoreboard.load_of(backend.slot).kv_tokens

    with decoder.held():
        with prefiller.held(prefills=True):
            asking = asyncio.create_task(gateway.ask(request(Api.CHAT, stream=True)))
            await decoder.wait_until(lambda state: state.waiting_rooms == 1)
            assert (kv() == 0) is late
        await until(lambda: kv() > 0, "the charge")
    assert (await asking).is_done
    assert kv() == 0


async def test_prefiller_is_free_when_it_has_answered(deploy: Deploy) -> None:
    pair = await start(deploy, decode=meeting.begins_and_hangs)
    async with pair.gateway.asking(request(Api.CHAT, stream=True)) as client:
        await client.has_tokens(1)
        (backend,) = pair.gateway.worker.pools.prefill.all_backends()
        await until(lambda: pair.gateway.scoreboard.load_of(backend.slot) == Load(), "the prefiller to be free")
        assert compute(pair, Role.DECODE)


@pytest.mark.parametrize("stream", [True, False])
async def test_prompt_usage_of_the_decoder_is_authoritative(deploy: Deploy, stream: bool) -> None:
    """SGLang's decoder has it from the prefiller."""
    pair = await start(deploy)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await pair.gateway.ask(request(Api.CHAT, **options))
    assert answer.usage == ANSWER["usage"]
    assert pair.gateway.metrics("pdproxy_tokens_total") == {("cached",): 5, ("completion",): 2, ("prompt",): 9}


async def test_echo_with_logprobs_is_refused(deploy: Deploy) -> None:
    pair = await start(deploy)
    answer = await pair.gateway.ask(request(Api.COMPLETIONS, echo=True, logprobs=1))
    assert answer.status == 400
    assert answer.error["param"] == "echo"
    assert not pair.prefiller.received


# One leg fails

FAILURES: dict[str, tuple[Act, int, bytes | None, str, bool]] = {
    # what it does, the status and the body for the client, what it is called, may the engine still work
    "flat 400": (says(FLAT, "400 Bad Request"), 400, FLAT, "invalid_request", False),
    "flat 503": (says(FLAT, "503 Service Unavailable"), 503, FLAT, "status", False),
    "flat 500": (says(FLAT, "500 Internal Server Error"), 500, FLAT, "status", False),
    "reset": (resets, 502, None, "reset", True),
    "error in its stream": (streams(data(TOLD), meeting.DONE), 500, orjson.dumps(TOLD), "status", False),
    "broken HTTP": (says(b"", "999 What"), 502, None, "bad_answer", True),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_failing_leg_ends_the_other_at_once(deploy: Deploy, role: Role, name: str) -> None:
    act, status, body, failure, may_work = FAILURES[name]

    async def fail(exchange: Exchange) -> None:
        await (pair.decoder if role is Role.PREFILL else pair.prefiller).works()
        await act(exchange)

    legs = (fail, hangs) if role is Role.PREFILL else (hangs, fail)
    pair = await start(deploy, *legs)
    failing, other = (pair.prefiller, pair.decoder) if role is Role.PREFILL else (pair.decoder, pair.prefiller)
    answer = await pair.gateway.ask(request(Api.CHAT, stream=True))
    assert answer.status == status
    if body is not None:
        assert answer.body == body
    attempt_id = pair.decoder.bodies[0]["rid"]
    await until(lambda: other.hung_up == 1 and other.aborted == [attempt_id], "the other leg to end")
    assert failing.aborted == [attempt_id] * may_work
    assert pair.results(failing) == {failure: 1}
    assert pair.results(other) == {"abandoned": 1}


async def test_prefiller_that_cannot_be_reached_ends_the_decode_leg(deploy: Deploy) -> None:
    pair = await start(deploy, decode=hangs, admission={"wait_seconds": 0.5})
    assert pair.prefiller._server is not None
    pair.prefiller._server.close()
    await asyncio.sleep(0)
    for _ in range(2):  # after a wait, as it might only be restarting, and then at once
        answer = await pair.gateway.ask(request(Api.CHAT))
        assert (answer.status, answer.error["code"]) == (503, "no_healthy_prefill")
    await until(lambda: pair.decoder.hung_up == len(pair.decoder.received), "the decode leg to end")
    assert pair.prefiller.aborted == []


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_leg_that_is_too_slow_ends_both(deploy: Deploy, role: Role) -> None:
    timeouts = {"prefill_seconds": 0.02, "answer_seconds": 0.05}
    if role is Role.DECODE:
        pair = await start(deploy, decode=hangs, timeouts=timeouts)
    else:
        pair = await start(deploy, hangs, hangs, timeouts=timeouts)
    answer = await pair.gateway.ask(request(Api.CHAT))
    assert answer.status == 504
    assert answer.error["code"] == f"{role}_timeout"
    await until(lambda: pair.decoder.hung_up == 1 and len(pair.decoder.aborted) == 1, "the decode leg to end")
    assert len(pair.prefiller.aborted) == (role is Role.PREFILL)


async def test_prefiller_that_fails_in_the_middle_of_the_answer_ends_it_as_an_error(deploy: Deploy) -> None:
    """Which cannot be where the decoder has begun to answer, but then something else is wrong."""

    async def fail_later(exchange: Exchange) -> None:
        await exchange.engine.let_go.wait()
        await resets(exchange)

    pair = await start(deploy, fail_later, meeting.begins_and_hangs)
    async with pair.gateway.session.post(
        pair.gateway.url + Api.CHAT.path, json=request(Api.CHAT, stream=True)
    ) as response:
        assert b"Hel" in await response.content.readany()
        pair.prefiller.let_go.set()
        rest = await response.content.readuntil(b"\n\n")
    assert orjson.loads(rest.removeprefix(b"data: "))["error"]["code"] == "prefill_reset"
    await until(lambda: pair.decoder.hung_up == 1, "the decode leg to end")
    assert pair.results(pair.decoder) == {"abandoned": 1}


async def test_decoder_that_fails_in_the_middle_ends_the_answer_as_an_error(deploy: Deploy) -> None:
    pair = await start(deploy, decode=meeting.begins_and_resets)
    async with pair.gateway.session.post(
        pair.gateway.url + Api.CHAT.path, json=request(Api.CHAT, stream=True)
    ) as response:
        assert b"Hel" in await response.content.readany()
        pair.decoder.let_go.set()
        rest = await response.content.readuntil(b"\n\n")
    assert orjson.loads(rest.removeprefix(b"data: "))["error"]["code"] == "decode_broken"
    assert pair.prefiller.aborted == []


async def test_error_in_the_stream_reaches_the_client_in_the_engines_words(deploy: Deploy) -> None:
    pair = await start(deploy, decode=streams(*meeting.CHUNKS[:2], data(TOLD), meeting.DONE))
    answer = await pair.gateway.ask(request(Api.CHAT, stream=True))
    assert answer.error == TOLD["error"]
    assert pair.decoder.aborted == []


async def test_aborted_prefill_is_a_failure(deploy: Deploy) -> None:
    aborted = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "abort"}]}
    pair = await start(deploy, streams(data(aborted), meeting.DONE), hangs)
    answer = await pair.gateway.ask(request(Api.CHAT, stream=True))
    assert (answer.status, answer.error["code"]) == (503, "prefill_aborted")
    assert set(pair.results(pair.prefiller)) == {"aborted"}


async def test_prefiller_failure_wins_when_both_fail(deploy: Deploy) -> None:
    """A decoder whose KV cache does not arrive answers 500."""

    async def fail_late(exchange: Exchange) -> None:
        exchange.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 3\r\n\r\n")
        await exchange._writer.drain()
        pair.prefiller.let_go.set()
        await exchange.hang()

    async def fail(exchange: Exchange) -> None:
        await exchange.engine.let_go.wait()
        await says(FLAT, "500 Internal Server Error")(exchange)

    pair = await start(deploy, fail, fail_late)
    answer = await pair.gateway.ask(request(Api.CHAT))
    assert answer.body == FLAT
    assert pair.results(pair.prefiller) == {"status": 1}
    assert pair.results(pair.decoder) == {"abandoned": 1}


async def test_another_pair_and_another_room_are_tried(deploy: Deploy) -> None:
    failed: list[Any] = []

    async def fail_once(exchange: Exchange) -> None:
        if not failed:
            failed.append(exchange.engine)
            await says(FLAT, "503 Service Unavailable")(exchange)
        else:
            await answers(exchange)

    pair = await start(deploy, fail_once, answers, pairs=2, retry={"max_attempts": 3})
    assert (await pair.gateway.ask(request(Api.CHAT))).text == "Hello"
    seen = [body for engine in pair.prefillers for body in engine.bodies]
    assert len(seen) == 2
    assert seen[0]["bootstrap_room"] != seen[1]["bootstrap_room"]
    assert seen[0]["rid"] != seen[1]["rid"]
    assert [len(engine.received) for engine in pair.prefillers] == [1, 1]


async def test_pair_whose_hand_overs_fail_is_kept_apart(deploy: Deploy) -> None:
    pair = await start(deploy, hangs, says(FLAT, "500 Internal Server Error"))
    for _ in range(2):
        assert (await pair.gateway.ask(request(Api.CHAT))).status == 500
    assert sum(pair.gateway.metrics("pdproxy_pair_quarantines_total").values()) == 1


# Clients that leave


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_ends_both_legs(deploy: Deploy, stream: bool) -> None:
    pair = await start(deploy, hangs, hangs)
    async with pair.gateway.asking(request(Api.CHAT, stream=stream)) as client:
        await pair.prefiller.works()
        await pair.decoder.works()
        await client.leave()
    for engine in (pair.prefiller, pair.decoder):
        await until(lambda engine=engine: engine.hung_up and engine.aborted, "both legs to end")
        assert engine.aborted == [engine.bodies[0]["rid"]]
        assert pair.results(engine) == {"abandoned": 1}


async def test_client_that_leaves_later_is_no_news_to_the_prefiller(deploy: Deploy) -> None:
    pair = await start(deploy, decode=meeting.begins_and_hangs)
    async with pair.gateway.asking(request(Api.CHAT, stream=True)) as client:
        await client.has_tokens(1)
        await until(lambda: not compute(pair, Role.PREFILL), "the prefiller to be done")
        await client.leave()
    await until(lambda: pair.decoder.aborted, "the decoder to be told")
    assert pair.prefiller.aborted == []


async def test_aborts_per_engine_are_limited(deploy: Deploy) -> None:
    pair = await start(deploy, decode=hangs)
    decoder = pair.decoder
    decoder.answers_aborts = asyncio.Event()
    asked = [asyncio.create_task(pair.gateway.ask(request(Api.CHAT))) for _ in range(30)]
    await decoder.works(30)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await until(lambda: decoder.hung_up == 30 and len(decoder.aborted) >= 8, "all to be hung up")
    async with pair.gateway.session.get(decoder.url) as answer:  # what was on its way has arrived
        assert answer.status == 200
    assert len(decoder.aborted) == 8
    decoder.answers_aborts.set()
    await until(lambda: len(decoder.aborted) == 30, "all to be told")


async def test_body_of_an_api_goes_to_its_own_route(deploy: Deploy) -> None:
    pair = await start(deploy)
    for api in OPENAI_APIS:
        body = request(api)
        assert api_of(body) is api
        await pair.gateway.ask(body)
    assert [received.path for received in pair.prefiller.received] == [api.path for api in OPENAI_APIS]
