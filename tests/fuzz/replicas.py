"""Messages in the shared store, of other gateways or of other programs."""

from __future__ import annotations

from typing import Final

from proxy.fleet.replicas.state import decode_news, decode_state, encode_news, encode_state, sum_tables
from tests.fuzz.cutting import spelled, words

WORDS: Final = words(
    r"""
    {"turn":1 "turn": "instances": "keys": "front": "verdicts": {"127.0.0.1:1":[1,2,3]} [1,2] [-1,0,0] { } [ ] , :
    "a" null 9007199254740993 -1 1.5 \x80 \x81 \x82 \xa2me \xa4turn \xa9instances \xa7prompts \xc4\x01a
    \x93\x01\x02\x03 \xcf \xff [*300 ]*300 \xed\xa0\x80
    """
)


def check_replicas(data: bytes) -> None:
    """Check that a message is read completely and written as it was, or is rejected without an exception."""
    raw = spelled(data, WORDS)
    message = decode_state(raw)
    if message is not None:
        assert decode_state(encode_state(message)) == message
        assert sum_tables([message.instances, {}]) == message.instances
    news = decode_news(raw)
    if news is not None:
        assert decode_news(encode_news(news)) == news
