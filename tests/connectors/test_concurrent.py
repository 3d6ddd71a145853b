"""Two legs at the same time: every order and kind of end, and cancellation."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import pytest

from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.connectors.concurrent import run_prefill_beside

PREFILLER = Backend(Role.PREFILL, "p", 1)
DECODER = Backend(Role.DECODE, "d", 1)


def failure(backend: Backend) -> UpstreamError:
    return UpstreamError(Failure.RESET, backend, "failed")


class Opened:
    """A response that records whether it was given back, and the error with which it was aborted."""

    def __init__(self) -> None:
        self.given_back = 0
        self.aborted: list[UpstreamError] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.given_back += 1

    def abort_exchange(self, error: UpstreamError) -> None:
        self.aborted.append(error)

    def make_failure(self, kind: Failure, message: str) -> UpstreamError:
        return UpstreamError(kind, DECODER, message)


class Leg:
    """A leg that the test ends, and that records whether it was cancelled."""

    def __init__(self) -> None:
        self._end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.is_cancelled = False
        self.has_begun = False

    async def run(self) -> Any:
        self.has_begun = True
        try:
            return await self._end
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise

    def ends(self, result: object = None) -> None:
        if isinstance(result, BaseException):
            self._end.set_exception(result)
        else:
            self._end.set_result(result)


class Legs:
    """A race in a separate task, which then waits until the test lets it continue or fail."""

    def __init__(self) -> None:
        self.prefill = Leg()
        self.decode = Leg()
        self.opened = Opened()
        self.rest = Leg()
        self.task = asyncio.create_task(self._attempt())

    async def _attempt(self) -> None:
        async with run_prefill_beside(self.prefill.run()) as leg:
            with await leg.await_first_result(self.decode.run()):
                await self.rest.run()

    async def begin(self) -> None:
        while not (self.prefill.has_begun and self.decode.has_begun):  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def open(self) -> None:
        """Let the decode leg answer, and wait for the rest of the attempt to begin."""
        await self.begin()
        self.decode.ends(self.opened)
        while not self.rest.has_begun:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def error(self) -> BaseException | None:
        """Wait for the end of the attempt, and return its error."""
        (result,) = await asyncio.gather(self.task, return_exceptions=True)
        return result


@pytest.fixture
async def legs() -> Legs:
    return Legs()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_response_is_there_before_the_prefill_leg_has_ended(legs: Legs) -> None:
    await legs.open()
    legs.rest.ends()
    assert await legs.error() is None
    assert legs.prefill.is_cancelled
    assert legs.opened.given_back == 1


async def test_prefill_leg_that_has_ended_well_lets_the_decode_leg_go_on(legs: Legs) -> None:
    await legs.begin()
    legs.prefill.ends()
    await turns(5)
    assert not legs.decode.is_cancelled
    await legs.open()
    legs.rest.ends()
    assert await legs.error() is None
    assert legs.opened.aborted == []


async def test_prefillers_failure_ends_the_opening_of_the_decode_leg(legs: Legs) -> None:
    await legs.begin()
    legs.prefill.ends(error := failure(PREFILLER))
    assert await legs.error() is error
    assert legs.decode.is_cancelled


async def test_decoders_failure_ends_the_prefill_leg(legs: Legs) -> None:
    await legs.begin()
    legs.decode.ends(error := failure(DECODER))
    assert await legs.error() is error
    assert legs.prefill.is_cancelled


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_prefillers_failure_is_raised_if_both_legs_fail_at_once(legs: Legs, first: str) -> None:
    await legs.begin()
    ends = [(legs.prefill, error := failure(PREFILLER)), (legs.decode, failure(DECODER))]
    for leg, told in ends if first == "prefill" else reversed(ends):
        leg.ends(told)
    assert await legs.error() is error


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_response_that_comes_as_the_prefiller_fails_is_given_back(legs: Legs, first: str) -> None:
    await legs.begin()
    ends: list[tuple[Leg, object]] = [(legs.prefill, error := failure(PREFILLER)), (legs.decode, legs.opened)]
    for leg, result in ends if first == "prefill" else reversed(ends):
        leg.ends(result)
    assert await legs.error() is error
    assert legs.opened.given_back == 1


@pytest.mark.parametrize("later", range(5))
async def test_response_that_arrives_during_cancellation_is_given_back(legs: Legs, later: int) -> None:
    """Whichever of the two is noticed first, and though one is in a hurry and cancels twice."""
    await legs.begin()
    legs.decode.ends(legs.opened)
    await turns(later)
    legs.task.cancel()
    await asyncio.sleep(0)
    legs.task.cancel()
    assert isinstance(await legs.error(), asyncio.CancelledError)
    await turns(3)
    assert legs.opened.given_back == 1
    assert legs.prefill.is_cancelled


@pytest.mark.parametrize("stage", ["begun", "prefilled", "opened"])
async def test_leaving_ends_both_legs(legs: Legs, stage: str) -> None:
    await legs.begin()
    if stage == "prefilled":
        legs.prefill.ends()
        await turns(5)
    if stage == "opened":
        await legs.open()
    legs.task.cancel()
    assert isinstance(await legs.error(), asyncio.CancelledError)
    assert legs.prefill.is_cancelled is (stage != "prefilled")
    assert legs.decode.is_cancelled is (stage != "opened")
    assert legs.opened.given_back == (stage == "opened")


async def test_leaving_before_the_first_turn_ends_both_legs(legs: Legs) -> None:
    legs.task.cancel()
    assert isinstance(await legs.error(), asyncio.CancelledError)


@pytest.mark.interpreted
async def test_prefill_leg_that_fails_later_aborts_the_answer(legs: Legs) -> None:
    await legs.open()
    legs.prefill.ends(error := failure(PREFILLER))
    await turns(3)
    assert legs.opened.aborted == [error]
    legs.rest.ends(error)  # the response's reader gets this error
    assert await legs.error() is error
    assert legs.opened.given_back == 1


async def test_decoders_later_failure_is_attributed_to_the_prefiller(legs: Legs) -> None:
    await legs.open()
    legs.prefill.ends(error := failure(PREFILLER))
    legs.rest.ends(symptom := failure(DECODER))
    assert await legs.error() is error
    assert error.__cause__ is symptom


async def test_decoder_failure_during_prefill_counts_against_decoder(legs: Legs) -> None:
    await legs.open()
    legs.rest.ends(error := failure(DECODER))
    assert await legs.error() is error
    assert legs.prefill.is_cancelled


@pytest.mark.interpreted
async def test_mistake_in_the_prefill_leg_is_not_lost(legs: Legs) -> None:
    await legs.open()
    legs.prefill.ends(mistake := ZeroDivisionError())
    await turns(3)
    (aborted,) = legs.opened.aborted
    legs.rest.ends(aborted)
    assert await legs.error() is mistake
