"""What two scrapes tell."""

from __future__ import annotations

import os

import pytest
from rich.console import Console

from proxy.tools.keyboard import Keyboard
from proxy.tools.top import (
    SORTS,
    Scrape,
    TopView,
    ViewControls,
    _MetricsPlace,
    _run_with_keys,
    _take_view,
    counter_growth,
    counter_rate,
    histogram_quantile,
    make_view,
    view_as_table,
    view_as_text,
)


def scrape(at: float, *lines: str) -> Scrape:
    return Scrape.of("\n".join(lines) + "\n", at)


STATE = 'pdproxy_instance_state{role="decode",address="10.0.0.3:7100"}'
REQUESTS = 'pdproxy_instance_requests_total{role="decode",address="10.0.0.3:7100",result="%s"}'


def test_rate_is_growth_by_time() -> None:
    before = scrape(10.0, 'pdproxy_tokens_total{kind="completion"} 100', 'pdproxy_tokens_total{kind="prompt"} 5')
    after = scrape(12.0, 'pdproxy_tokens_total{kind="completion"} 500', 'pdproxy_tokens_total{kind="prompt"} 5')
    assert counter_rate(before, after, "pdproxy_tokens_total", kind="completion") == 200.0
    assert counter_rate(before, after, "pdproxy_tokens_total") == 200.0
    assert counter_rate(before, after, "pdproxy_other_total") == 0.0


def test_counter_that_was_reset_has_grown_by_its_value() -> None:
    before, after = scrape(0.0, "pdproxy_x_total 100"), scrape(1.0, "pdproxy_x_total 7")
    assert counter_growth(before, after, "pdproxy_x_total") == {(): 7.0}


@pytest.mark.parametrize(("share", "seconds"), [(0.5, 1.0), (0.75, 1.5), (0.95, 1.9)])
def test_quantile_is_that_of_prometheus(share: float, seconds: float) -> None:
    before = scrape(0.0, *(f'pdproxy_t_bucket{{le="{bound}"}} 3' for bound in ("1.0", "2.0", "+Inf")))
    counts = (("1.0", 53), ("2.0", 103), ("+Inf", 103))
    after = scrape(1.0, *(f'pdproxy_t_bucket{{le="{bound}"}} {count}' for bound, count in counts))
    assert histogram_quantile(before, after, "pdproxy_t", share) == pytest.approx(seconds)
    assert histogram_quantile(after, after, "pdproxy_t", share) is None


def test_instance_has_a_row_with_its_problems() -> None:
    misfit = 'pdproxy_instance_misfit{role="decode",address="10.0.0.3:7100",kind="kv_not_fetched"} 1'
    before = scrape(0.0, f"{REQUESTS % 'ok'} 10", f"{REQUESTS % 'reset'} 0")
    pair = 'pdproxy_status_reason{code="pair_apart",kind="pair",subject="10.0.0.1:7100 10.0.0.3:7100"} 1'
    after = scrape(2.0, f"{STATE} 3", misfit, pair, f"{REQUESTS % 'ok'} 14", f"{REQUESTS % 'reset'} 2")
    (row,) = make_view(before, after).rows
    assert (row.role, row.address, row.state, row.misfits) == (
        "decode",
        "10.0.0.3:7100",
        "ejected",
        "kv_not_fetched, pair_apart 10.0.0.1:7100",
    )
    assert (row.requests_per_second, row.failures_per_second) == (3.0, 1.0)


def of_key(name: str, seconds: float, limited: int, first_tokens: tuple[int, int]) -> list[str]:
    """Return the series of a client key."""
    key = f'key="{name}"'
    fast, every = first_tokens
    return [
        f"pdproxy_key_inflight_requests{{{key}}} 3",
        f'pdproxy_key_engine_seconds_total{{{key},role="decode"}} {seconds}',
        f'pdproxy_key_requests_total{{{key},result="ok"}} 10',
        f'pdproxy_key_requests_total{{{key},result="limited"}} {limited}',
        f'pdproxy_key_tokens_total{{{key},kind="completion"}} 400',
        f'pdproxy_key_time_to_first_token_seconds_bucket{{{key},le="0.1"}} {fast}',
        f'pdproxy_key_time_to_first_token_seconds_bucket{{{key},le="1.0"}} {every}',
        f'pdproxy_key_time_to_first_token_seconds_bucket{{{key},le="+Inf"}} {every}',
    ]


def test_first_line_has_the_state_and_its_reasons() -> None:
    names = [f"d:{number}" for number in range(7)]
    reasons = [
        f'pdproxy_status_reason{{code="instance_silent",kind="instance",subject="{name}"}} 1.0' for name in names
    ]
    after = scrape(2.0, "pdproxy_status_state 2.0", *reasons)
    shown = ", ".join(f"instance_silent ({name})" for name in names[:5])
    assert make_view(after, after).lines[0] == f"status       impaired, {shown}, 2 more"
    healthy = scrape(2.0, "pdproxy_status_state 0.0")
    assert make_view(healthy, healthy).lines[0] == "status       healthy"


def test_client_keys_with_the_most_engine_time_stand_first() -> None:
    before = scrape(0.0, *of_key("a", 0, 0, (0, 0)), *of_key("b", 0, 0, (0, 0)))
    after = scrape(2.0, *of_key("a", 2.0, 0, (8, 8)), *of_key("b", 6.0, 5, (0, 8)))
    assert make_view(before, after).keys == [
        ("b", "75 %", "3", "2.5", "2.5", "0.0", "0.0", "0.0", "955 ms"),
        ("a", "25 %", "3", "0.0", "0.0", "0.0", "0.0", "0.0", "95 ms"),
    ]
    many = [line for number in range(12) for line in of_key(f"k{number}", number, 0, (0, 0))]
    assert [cells[0] for cells in make_view(scrape(0.0, "x 1"), scrape(2.0, *many)).keys][:2] == ["k11", "k10"]
    assert len(make_view(scrape(0.0, "x 1"), scrape(2.0, *many)).keys) == 10


def instances(*loads: tuple[str, int, float]) -> Scrape:
    """Return a scrape of decoders: the address, the requests in flight, and the tokens per second of each."""
    lines = []
    for address, in_flight, tokens in loads:
        labels = f'{{role="decode",address="{address}"}}'
        lines += [
            f"pdproxy_instance_state{labels} 1",
            f"pdproxy_instance_inflight{labels} {in_flight}",
            f"pdproxy_instance_tokens_per_second{labels} {tokens}",
        ]
    return scrape(2.0, *lines, f"{STATE} 3")


def addresses(controls: ViewControls, after: Scrape) -> list[str]:
    return [row.address.partition(":")[0] for row in controls.arranged(make_view(after, after)).rows]


def test_keys_sort_reverse_and_filter_the_instances() -> None:
    after = instances(("a:1", 5, 10.0), ("b:1", 9, 30.0), ("c:1", 7, 20.0))
    controls = ViewControls()
    assert addresses(controls, after) == ["10.0.0.3", "a", "b", "c"]
    controls = controls.pressed("s")
    assert controls.sort == "flight"
    assert addresses(controls, after) == ["b", "c", "a", "10.0.0.3"]
    assert addresses(controls.pressed("r"), after) == ["10.0.0.3", "a", "c", "b"]
    assert addresses(controls.pressed("b"), after) == ["10.0.0.3"]
    for heading in SORTS:
        assert len(addresses(ViewControls(sort=heading), after)) == 4
    assert ViewControls().pressed("S").sort == SORTS[-1]
    assert ViewControls().pressed("p").pressed("x").is_paused


def test_help_names_the_keys_and_the_order() -> None:
    shown = ViewControls(sort="KV", is_reversed=True).arranged(TopView((), ()))
    assert "now: KV, reversed" in shown.help
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(view_as_table(shown))
    assert "q quit" in capture.get()


@pytest.mark.parametrize(("capacity", "cell"), [("", "500"), ("2000", "25 %")])
def test_kv_memory_is_a_share_if_the_capacity_is_known(capacity: str, cell: str) -> None:
    labels = '{role="decode",address="10.0.0.3:7100"'
    lines = [f'pdproxy_instance_load_tokens{labels},kind="kv"}} 500']
    lines += [f"pdproxy_instance_kv_capacity_tokens{labels}}} {capacity}"] if capacity else []
    after = scrape(2.0, f"{STATE} 1", *lines)
    assert make_view(after, after).rows[0].cells()[4] == cell


def test_keys_change_a_running_table_and_q_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    after = instances(("a:1", 5, 10.0), ("b:1", 9, 30.0))
    controller, terminal = os.openpty()
    with os.fdopen(terminal) as stdin, os.fdopen(controller, "wb", buffering=0) as keys:
        monkeypatch.setattr("sys.stdin", stdin)
        shown: list[TopView] = []

        def show(one: TopView) -> None:
            shown.append(one)
            if len(one.rows) == 3 and len(shown) < 100:
                keys.write(b"s" if one.rows[0].address.startswith("10.") else b"q")

        with Keyboard() as keyboard:
            _run_with_keys(keyboard, lambda before: (make_view(after, after), after), None, show, 0.01)
    assert [row.address for row in shown[-1].rows][:2] == ["b:1", "a:1"]


def test_text_and_table_say_the_same() -> None:
    shown = make_view(scrape(0.0, "x 1"), scrape(2.0, f"{STATE} 1", *of_key("team-a", 1.0, 0, (1, 1))))
    assert "team-a" in view_as_text(shown)
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(view_as_table(shown))
    assert capture.get().split() == view_as_text(shown).split()
    assert "\x1b" not in view_as_text(shown)


def test_gateway_that_is_away_is_said_to_be_and_its_return_is_no_growth() -> None:
    shown, before = _take_view(_MetricsPlace("127.0.0.1", 9, None), scrape(0.0, "pdproxy_requests_total 5"))
    assert before is None
    assert "does not answer" in view_as_text(shown)
