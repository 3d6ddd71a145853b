"""Recording legs from the network between the gateway and an engine."""

from __future__ import annotations

import orjson
import pytest

from lab.common.toxics import Direction
from lab.soak.evidence import Leg
from lab.soak.recorder import Recorder, edits
from proxy.connectors.releaser import RELEASE_MODEL

UP, DOWN = Direction
CLIENT = b'{"user": "soak-1.7", "stream": true, "temperature": 1.0}'
DECODE = b'{"user": "soak-1.7", "stream": true, "temperature": 1.0,"kv_transfer_params":{"do_remote_prefill":true}}'
PREFILL = b'{"user": "soak-1.7", "temperature": 1.0,"kv_transfer_params":{"do_remote_decode":true}}'
WHOLE = [b'data: {"choices":[{"finish_reason":null}]}\n\n', b'data: {"choices":[{"finish_reason":"stop"}]}\n\n']
DONE = b"data: [DONE]\n\n"


class Network:
    """A connection with a recorder, and a clock that advances by a second with each write."""

    def __init__(self) -> None:
        self.legs: list[Leg] = []
        self.seconds = 0.0
        self.recorder = Recorder("127.0.0.1:7200", self.legs.append, {"soak-1.7": CLIENT}.get, lambda: self.seconds)

    def ask(self, body: bytes, path: str = "/v1/completions", pieces: int = 1) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: a1\r\nContent-Length: {len(body)}\r\n\r\n"
        data = head.encode() + body
        for piece in range(pieces):
            self._pass(UP, data[piece * len(data) // pieces : (piece + 1) * len(data) // pieces])

    def answer(self, *chunks: bytes, status: str = "200 OK", ends: bool = True) -> None:
        self._pass(DOWN, f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for chunk in chunks:
            self._pass(DOWN, b"%x\r\n%b\r\n" % (len(chunk), chunk))
        if ends:
            self._pass(DOWN, b"0\r\n\r\n")

    def _pass(self, direction: Direction, data: bytes) -> None:
        self.recorder.on_data(direction, data)
        self.seconds += 1.0


@pytest.fixture
def network() -> Network:
    return Network()


def test_complete_answer_is_a_leg_with_its_times(network: Network) -> None:
    network.ask(DECODE)
    network.answer(*WHOLE, DONE)
    [leg] = network.legs
    assert (leg.stage, leg.user, leg.attempt, leg.instance) == ("decode", "soak-1.7", "a1", "127.0.0.1:7200")
    assert (leg.sent, leg.answered, leg.ended) == (0.0, 1.0, 5.0)
    assert (leg.status, leg.is_whole, leg.is_finished, leg.stream) == (200, True, True, True)
    assert leg.edited == ("kv_transfer_params",)


def test_requests_follow_each_other_on_a_connection_in_any_pieces(network: Network) -> None:
    network.ask(PREFILL, pieces=7)
    network.answer(b'{"choices": []}')
    network.ask(b"", path="/health")
    network.answer()
    network.ask(DECODE, pieces=3)
    network.answer(*WHOLE, DONE)
    assert [(leg.stage, leg.sent) for leg in network.legs] == [("prefill", 0.0), ("decode", 13.0)]


@pytest.mark.parametrize(
    ("chunks", "ends"),
    [
        ((*WHOLE, DONE), False),
        (WHOLE, True),
        ((WHOLE[0], DONE), True),
        ((WHOLE[1].replace(b"}]}", b',"stop_reason":"recomputed"}]}'), DONE), True),
        ((*WHOLE, b'data: {"error":{"message":"no"}}\n\n', DONE), True),
    ],
    ids=["cut", "without [DONE]", "without finish", "recomputed", "error"],
)
def test_unsuccessful_answers_are_not_finished(network: Network, chunks: tuple[bytes, ...], ends: bool) -> None:
    network.ask(DECODE)
    network.answer(*chunks, ends=ends)
    network.recorder.on_close()
    [leg] = network.legs
    assert not leg.is_finished
    assert leg.is_whole is ends


def test_connection_lost_before_the_answer_is_a_leg(network: Network) -> None:
    network.ask(DECODE)
    network.recorder.on_close()
    [leg] = network.legs
    assert (leg.answered, leg.status, leg.is_whole, leg.ended) == (None, None, False, 1.0)


def test_data_after_the_gateways_disconnect_is_ignored(network: Network) -> None:
    network.ask(DECODE)
    network.answer(WHOLE[0], ends=False)
    network.recorder.on_end(UP)
    network.answer(WHOLE[1], DONE)
    network.recorder.on_end(DOWN)
    [leg] = network.legs
    assert (leg.ended, leg.is_whole, leg.is_finished) == (3.0, False, False)


def test_release_is_recognised(network: Network) -> None:
    network.ask(orjson.dumps({"model": RELEASE_MODEL, "prompt": "x", "kv_transfer_params": {}}))
    network.answer(b"{}", status="404 Not Found")
    [leg] = network.legs
    assert (leg.stage, leg.user, leg.status, leg.edited) == ("release", "", 404, ())


def test_invalid_http_raises_no_error(network: Network) -> None:
    network.ask(DECODE)
    network.recorder.on_data(DOWN, b"\x00\x01\x02")
    network.recorder.on_close()
    assert not network.legs[0].is_whole


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (b'{"a":1.0,"b":[1,{"x":1,"y":2}],"c":"A"}', set()),
        (b'{"a":1.00,"b":[1,{"x":1,"y":2}],"c":"A"}', {"a"}),
        (b'{"a":"1.0","b":[1,{"x":1,"y":2}],"c":"A"}', {"a"}),
        (b'{"a":1.0,"b":[1,{"y":2,"x":1}],"c":"A"}', {"b"}),
        (b'{"a":1.0,"b":[1,{"x":1,"y":2}],"c":"A","d":null}', {"d"}),
        (b'{"a":1.0,"c":"A"}', {"b"}),
        (b'{"c":"A","a":1.0,"b":[1,{"x":1,"y":2}]}', {"order"}),
        (b"", {"a", "b", "c"}),
    ],
)
def test_edits_are_found_with_any_white_space(engine: bytes, expected: set[str]) -> None:
    assert edits(b'{"a": 1.0, "b": [1, {"x": 1, "y": 2}], "c": "\\u0041"}', engine) == expected
