"""Listeners hear of a request's stages and of its end, and who does not want to hear is not called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.observe.observers import Observers, RequestListener
from proxy.terms import Stage
from proxy.wire.openai import Api
from tests.asking import request

if TYPE_CHECKING:
    from proxy.observe.outcome import Outcome
    from proxy.observe.record import RequestRecord
    from proxy.observe.timeline import Timeline
    from tests.conftest import Deploy


class Spans(RequestListener):
    """What a tracer would make of it."""

    def __init__(self) -> None:
        self.spans: list[tuple[Stage, float]] = []
        self.ended: list[str] = []

    def stage_ended(self, timeline: Timeline, stage: Stage, began: float, ended: float) -> None:
        self.spans.append((stage, ended - began))

    def request_ended(self, record: RequestRecord, outcome: Outcome) -> None:
        self.ended.append(outcome.term)


class Counter(RequestListener):
    """Wants to know of beginnings only."""

    def __init__(self) -> None:
        self.begun = 0

    def request_began(self, record: RequestRecord) -> None:
        self.begun += 1


def test_a_listener_hears_only_what_it_listens_to() -> None:
    spans, counter = Spans(), Counter()
    observers = Observers((spans, counter))
    record = observers.begin("chat", "r1")
    assert record.stage_listeners == (spans,)
    timeline = record.timeline()
    timeline.enter(Stage.PREFILL)
    timeline.leave()
    observers.end(record)
    assert counter.begun == 1
    assert [stage for stage, _ in spans.spans] == [Stage.PREFILL]
    assert spans.ended == ["--"]


async def test_a_listener_sees_the_stages_of_a_streamed_answer(deploy: Deploy) -> None:
    deployment = await deploy(1, 1)
    spans = Spans()
    deployment.worker.observers.add(spans)
    answer = await deployment.ask(request(Api.CHAT, "hello", stream=True))
    assert answer.is_done
    assert [stage for stage, _ in spans.spans] == [Stage.PREFILL, Stage.HANDOFF, Stage.FIRST_TOKEN, Stage.STREAM]
    assert all(seconds >= 0 for _, seconds in spans.spans)
    assert spans.ended == ["--"]
