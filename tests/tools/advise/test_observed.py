"""The utilisation of both sides, from the metrics of gateways."""

from __future__ import annotations

import pytest

from proxy.tools.advise import DemandReport, MissingMetric, observe_demand, read_metrics


def exposition(
    *,
    computing: tuple[int, ...] = (0, 0),
    streams: float = 0.0,
    tokens: float = 0.0,
    prefilled: int = 0,
    waiting: int = 0,
    refused: int = 0,
    decoders_up: tuple[int, ...] = (1, 1),
) -> str:
    lines = [f'pdproxy_instance_up{{role="prefill",address="p{place}:1"}} 1' for place in range(len(computing))]
    lines += [f'pdproxy_instance_up{{role="decode",address="d{place}:1"}} {up}' for place, up in enumerate(decoders_up)]
    for place, load in enumerate(computing):
        lines.append(f'pdproxy_instance_load_tokens{{role="prefill",address="p{place}:1",kind="compute"}} {load}')
        lines.append(f'pdproxy_instance_load_tokens{{role="prefill",address="p{place}:1",kind="kv"}} 99')
    return "\n".join(
        [
            *lines,
            f"pdproxy_queued_requests {waiting}",
            f'pdproxy_rejected_total{{reason="queue_full"}} {refused}',
            'pdproxy_rejected_total{reason="too_large"} 50',
            f'pdproxy_stage_duration_seconds_count{{stage="prefill"}} {prefilled}',
            f'pdproxy_stage_duration_seconds_sum{{stage="stream"}} {streams}',
            f'pdproxy_tokens_total{{kind="completion"}} {tokens}',
            'pdproxy_tokens_total{kind="prompt"} 1000000',
            "",
        ]
    )


def seen(*expositions: str, token_seconds: float = 0.1, streams_when_full: float | None = None) -> DemandReport:
    """Ten seconds lie between two of them."""
    samples = [read_metrics(10.0 * number, [text]) for number, text in enumerate(expositions)]
    return observe_demand(samples, token_seconds, streams_when_full)


def test_prefiller_is_busy_while_it_computes_and_not_while_it_keeps_kv() -> None:
    found = seen(
        exposition(computing=(5, 0)),
        exposition(computing=(7, 1), tokens=10),
        exposition(computing=(7, 0), tokens=20),
        exposition(computing=(0, 0), tokens=30),
    )
    assert found.split.prefill_busy == pytest.approx((0.5 + 1.0 + 0.5 + 0.0) / 4)


def test_demand_includes_queued_and_refused_requests() -> None:
    full = (9, 9)
    found = seen(
        exposition(computing=full, prefilled=100, waiting=10, refused=5),
        exposition(computing=full, prefilled=200, waiting=40, refused=25, tokens=10),
    )
    assert found.split.prefill_busy == pytest.approx(1.5)


def test_decoder_is_as_busy_as_its_streams_are_many() -> None:
    """400 stream seconds in 20 s are 20 streams, at two decoders; the third is down."""
    found = seen(
        exposition(decoders_up=(1, 1, 0)),
        exposition(streams=400.0, tokens=8000, decoders_up=(1, 1, 0)),
        exposition(streams=400.0, tokens=8000, decoders_up=(1, 1, 0)),
        streams_when_full=20,
    )
    assert (found.streams, found.token_seconds) == (pytest.approx(10.0), pytest.approx(0.05))
    assert (found.split.decoders, found.split.decode_busy) == (2, pytest.approx(0.5))


def test_capacity_of_decoders_is_estimated_from_their_pace() -> None:
    """A token takes 20 ms and 4 ms more for each stream: 100 ms with 20 of them."""
    texts, streams, tokens = [exposition()], 0.0, 0.0
    for each in (4, 6, 8, 10, 12, 8):
        streams += 2 * 10.0 * each
        tokens += 2 * 10.0 * each / (0.020 + 0.004 * each)
        texts.append(exposition(streams=streams, tokens=tokens))
    found = seen(*texts)
    assert found.streams_when_full == pytest.approx(20.0)
    assert found.split.decode_busy == pytest.approx(8.0 / 20.0)
    assert not found.notes


def test_guess_is_called_one() -> None:
    found = seen(exposition(), exposition(streams=100.0, tokens=2000))
    assert found.split.decode_busy == pytest.approx(0.05 / 0.1)
    assert "--decode-streams" in found.notes[0]


def test_several_gateways_are_added_up() -> None:
    before = read_metrics(0.0, [exposition(), exposition()])
    after = read_metrics(
        10.0, [exposition(computing=(1, 0), tokens=5, streams=60.0), exposition(computing=(0, 1), tokens=5)]
    )
    found = observe_demand([before, after], 0.1, 6.0)
    assert (found.split.split_name, found.split.prefill_busy) == ("2P2D", pytest.approx(0.5))
    assert found.streams == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        ((exposition(), exposition()), "no answer ended"),
        ((exposition(decoders_up=()), exposition(decoders_up=(), tokens=1)), "no healthy prefiller"),
        (("up 1\n",), "not metrics of pdproxy"),
        (("<html>",), "not metrics of pdproxy"),
        (("pdproxy_queued_requests many\n",), "the metrics cannot be parsed: "),
    ],
)
def test_missing_metric_is_named(texts: tuple[str, ...], why: str) -> None:
    with pytest.raises(MissingMetric, match=why):
        seen(*texts)


def test_low_load_is_no_ground_for_advice() -> None:
    quiet = [exposition(streams=2.0 * number, tokens=20 * number) for number in range(3)]
    with pytest.raises(
        MissingMetric, match=r"too low for advice: 0\.1 streams on each decoder, and prefillers compute 0%"
    ):
        seen(*quiet)
    busy = [exposition(streams=2.0 * number, tokens=20 * number, computing=(9, 0)) for number in range(3)]
    assert seen(*busy).split.prefill_busy == 0.5
