"""Messages whose decoder is lost behind each of their tokens, beside the same message undisturbed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from tests.asking import until
from tests.conformance.resuming import difference, serving
from tests.deployment import Deployment

Asking = Callable[[Deployment], Awaitable[dict[str, Any]]]
"""Asks for a message and puts together what comes."""

FAULTS: Final = {
    "recomputed": "recompute",
    "killed": "reset_after_tokens",
    "aborted": "abort",
    "stalled": "stall_after_tokens",
}


async def differences(asking: Asking, profile: str, fault: str, places: Iterable[int]) -> dict[int, str]:
    """Return the differences from the undisturbed message, by the number of tokens after which the decoder was lost."""
    async with serving(profile, decoders=1) as gateway:
        expected = await asking(gateway)
    found: dict[int, str] = {}
    seconds = 0.05 if fault == "stalled" else 5.0
    timeouts = dict.fromkeys(("first_token_seconds", "idle_seconds", "answer_seconds"), seconds)
    async with serving(profile, decoders=1, timeouts=timeouts, resume={"pressure_seconds": 0.0}) as gateway:
        [decoder] = gateway.decoders
        for place in places:
            await until(lambda: not gateway.worker.releaser.pending_count, "releases of KV")
            decoder.faults.clear()
            decoder.faults.add(FAULTS[fault], tokens=place, times=1)
            gateway.expects_inexact_pins |= place == 0
            try:
                if wrong := difference(await asking(gateway), expected):
                    found[place] = wrong
            except AssertionError as wrong:
                found[place] = str(wrong).partition("\n")[0]
        assert decoder.faults
    return found


async def from_another_decoder(asking: Asking, profile: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an undisturbed message, and messages of requests that lost their decoder before the first token.

    One of two decoders fails. At least one message was requested from it.
    """
    async with serving(profile) as gateway:
        expected = await asking(gateway)
        gateway.expects_inexact_pins = True
        decoder = gateway.decoders[0]
        decoder.faults.add(FAULTS["killed"], path="/v1/chat", tokens=0)
        answers: list[dict[str, Any]] = []
        while not any(rule["fired"] for rule in decoder.faults.describe()):
            assert len(answers) < 20
            answers.append(await asking(gateway))
        return expected, answers
