"""How often unknown names of models make the gateway ask the engines for their models. Time is virtual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from lab.replay import virtual_time
from proxy.balancer.models import ServedModels
from proxy.common.backend import Role
from proxy.common.errors import Failure, UnknownModel
from proxy.fleet.discovery.facts import make_engine_facts
from proxy.gateway.lanes import Lane, Lanes
from proxy.settings import Settings
from proxy.upstream import EngineClient, Upstream
from proxy.upstream.engine_client import BufferedResponse, EngineRequestError
from tests.fleet.discovery.engines import Gateway

PAUSE_SECONDS = 1.0
PATIENCE_SECONDS = 3.0
PREFILLERS, DECODERS = (1, 2), (3, 4)


class CountedEngines:
    """Two prefillers and two decoders of two models, which record the times of questions for their models."""

    def __init__(self, *, adapters_only: bool = False) -> None:
        """`adapters_only`: the engines differ only in their adapters, so they may serve names that they do not list."""
        self.times: dict[str, list[float]] = {}
        """Times of the questions, by address."""
        self.answer_seconds = 0.01
        self.fails = False
        gateway = Gateway(PREFILLERS, DECODERS)
        self.lists = {
            f"http://127.0.0.1:{port}": ["base", f"adapter-{port % 2}"] if adapters_only else [f"model-{port % 2}"]
            for port in (*PREFILLERS, *DECODERS)
        }
        """Names of models and adapters that each engine reports, by address."""
        self.prober = gateway.make_prober(cast("Upstream", self), cast("EngineClient", self))
        for role in (Role.PREFILL, Role.DECODE):
            for backend in gateway.pools[role].all_backends():
                gateway.health.on_probe(backend, True, "passed its health check")
                gateway.health.set_engine_facts(backend, make_engine_facts(None, self._list_models(backend.url)))
        models = ServedModels(gateway.roster, gateway.health, (Role.PREFILL, Role.DECODE))
        service: Any = SimpleNamespace(pools=None, connector=None)
        self.lanes = Lanes(
            models,
            Lane(service),
            lambda serving: Lane(service),
            Settings(),
            self.prober.refresh_models,
        )
        models.update_names()
        assert (models.has_several_groups, models.are_all_names_known) == (True, not adapters_only)

    async def get_body(self, url: str, path: str, timeout_seconds: float, headers: object) -> BufferedResponse:
        """Answer as EngineClient.get does."""
        assert path == "/v1/models"
        self.times.setdefault(url, []).append(asyncio.get_running_loop().time())
        await asyncio.sleep(min(self.answer_seconds, timeout_seconds))
        if self.fails or self.answer_seconds > timeout_seconds:
            raise EngineRequestError(Failure.TIMEOUT, "/v1/models did not answer")
        return self._list_models(url)

    def _list_models(self, url: str) -> BufferedResponse:
        first, *adapters = self.lists[url]
        listed = [{"id": first}, *({"id": name, "parent": first} for name in adapters)]
        return BufferedResponse(200, {}, orjson.dumps({"data": listed}))

    async def find(self, name: str, at: float = 0.0) -> float | None:
        """Look up a name at a time. Return the seconds until it was rejected, or None if it was not."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(at - loop.time())
        try:
            await self.lanes.find_lane(name)
        except UnknownModel:
            return loop.time() - at
        return None

    def check_times(self, questions: int) -> None:
        """Check that all engines were asked together, this number of times, and at most once a second."""
        assert set(self.times) == set(self.lists)
        assert len({tuple(times) for times in self.times.values()}) == 1
        times = next(iter(self.times.values()))
        assert len(times) == questions
        assert all(later - earlier >= PAUSE_SECONDS - 1e-9 for earlier, later in pairwise(times))


def in_virtual_time(course: Callable[[], Coroutine[Any, Any, None]]) -> None:
    virtual_time.run(course(), virtual_time.VirtualLoop())


@pytest.mark.parametrize("fails", [False, True])
def test_many_unknown_names_cost_one_question_a_second(fails: bool) -> None:
    async def course() -> None:
        engines = CountedEngines()
        engines.fails = fails
        waits = await asyncio.gather(*(engines.find(f"name-{at}", at / 100) for at in range(1000)))
        assert all(wait is not None and wait < PAUSE_SECONDS + 0.1 for wait in waits)
        engines.check_times(11)  # the first one, and one at the end of each second

    in_virtual_time(course)


@pytest.mark.parametrize("fails", [False, True])
def test_concurrent_requests_for_unknown_names_share_one_question(fails: bool) -> None:
    async def course() -> None:
        engines = CountedEngines()
        engines.fails = fails
        for burst in range(3):
            found = await asyncio.gather(*(engines.find(f"name-{burst}-{at}", 2.0 * burst) for at in range(500)))
            assert None not in found
        engines.check_times(3)

    in_virtual_time(course)


def test_one_request_after_the_other_waits_for_the_next_question() -> None:
    """A client that repeats its request at once gets one answer a second."""

    async def course() -> None:
        engines = CountedEngines()
        for _ in range(5):
            assert await engines.find("unknown", asyncio.get_running_loop().time()) is not None
        engines.check_times(5)

    in_virtual_time(course)


def test_engines_that_hang_are_not_asked_again_meanwhile() -> None:
    async def course() -> None:
        engines = CountedEngines()
        engines.answer_seconds = 60.0  # the question ends after 5 s, see Gateway
        waits = await asyncio.gather(*(engines.find(f"name-{at}", at / 10) for at in range(50)))
        assert all(wait is not None and wait < PATIENCE_SECONDS + 0.1 for wait in waits)
        engines.check_times(1)
        engines.answer_seconds = 0.01
        assert await engines.find("again", 10.0) is not None
        engines.check_times(2)

    in_virtual_time(course)


def test_names_that_engines_may_serve_unlisted_wait_for_no_further_question() -> None:
    async def course() -> None:
        engines = CountedEngines(adapters_only=True)
        loop = asyncio.get_running_loop()
        longest_seconds = 0.0
        for at in range(1000):
            began = loop.time()
            assert await engines.find(f"name-{at}", at / 100) is None
            longest_seconds = max(longest_seconds, loop.time() - max(began, at / 100))
        assert longest_seconds < 0.1
        engines.check_times(10)

    in_virtual_time(course)


def test_known_names_cost_no_question() -> None:
    async def course() -> None:
        engines = CountedEngines()
        for name in ("model-0", "model-1", "model-1:adapter"):
            assert await engines.find(name) is None
        assert engines.times == {}

    in_virtual_time(course)


def test_name_that_was_loaded_meanwhile_is_found_by_the_next_question() -> None:
    async def course() -> None:
        engines = CountedEngines()
        assert await engines.find("new") is not None
        for names in engines.lists.values():
            if names == ["model-1"]:
                names.append("new")
        assert await engines.find("new", 0.5) is None
        engines.check_times(2)

    in_virtual_time(course)
