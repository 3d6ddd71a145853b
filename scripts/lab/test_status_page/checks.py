"""Checks of the page. A check returns its problems as sentences."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from lab.common.processes import HOST
from lab.test_status_page.site import CLIENTS, DOOMED, KEY, MARKUP, Site
from proxy.tools.top import Scrape, counter_rate, histogram_quantile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser, Page

Scheme = Literal["light", "dark"]
SIZES: Final = {"wide": (1600, 1000), "narrow": (390, 844)}
SCHEMES: Final[tuple[Scheme, ...]] = ("light", "dark")
_EXPECTED: Final = ("Failed to load resource",)
"""Expected message of Chromium for error statuses and an unreachable gateway."""


@dataclass(slots=True)
class Tab:
    """An open page, and its errors."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    async def run(self, script: str, *arguments: Any) -> Any:
        """Run a JavaScript function. It gets the arguments as one array."""
        return await self.page.evaluate(script, list(arguments))

    async def give_key(self, key: str) -> None:
        """Type the admin key."""
        await self.page.fill("#key", key)
        await self.page.press("#key", "Enter")

    async def looks(self, times: int) -> None:
        """Wait for a number of refreshes."""
        for _ in range(times):
            async with self.page.expect_response("**/metrics"):
                pass
        await self.page.wait_for_timeout(200)  # the page is updated after its other requests


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Run Debian's Chromium."""
    from playwright.async_api import async_playwright  # installed by scripts/test-status-page only

    program = shutil.which("chromium")
    if program is None:
        sys.exit("there is no chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def tab(browser: Browser, url: str, size: str = "wide", scheme: Scheme = "light") -> AsyncIterator[Tab]:
    """Open the page in a private window."""
    width, height = SIZES[size]
    context = await browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    try:
        page = await context.new_page()
        opened_tab = Tab(page)
        page.on("pageerror", lambda error: opened_tab.complaints.append(f"error: {error}"))
        page.on("console", lambda message: _note(opened_tab, message.text))
        page.on("request", lambda request: _check_origin(opened_tab, request.url, url))
        await page.goto(url + "/")
        await page.wait_for_selector("#pools table")
        yield opened_tab
    finally:
        await context.close()


def _note(opened_tab: Tab, message: str) -> None:
    if not message.startswith(_EXPECTED):
        opened_tab.complaints.append(f"console: {message}")


def _check_origin(opened_tab: Tab, request: str, url: str) -> None:
    if not request.startswith((url + "/", "data:")):
        opened_tab.complaints.append(f"it asks {request}")


if TYPE_CHECKING:
    from playwright.async_api import Browser

_SHIFTS: Final = """
() => {
  window.shifts = [];
  const mayMove = (node) => (node.parentElement ?? node).closest(".unit, #failures, #failures ~ *") !== null;
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries().filter(({ value }) => value >= 0.001)) {
      const moved = entry.sources.filter(({ node }) => node && !mayMove(node));
      const names = moved.map(({ node }) => `${node.nodeName} ${node.textContent}`);
      if (names.length) window.shifts.push(`${entry.value.toFixed(4)}: ${names.join(", ")}`);
    }
  }).observe({ type: "layout-shift" });
}
"""
_WIDTHS: Final = "() => [document.documentElement.scrollWidth, window.innerWidth]"
_CONTRAST: Final = """
() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const linear = (c) => (c <= 0.04 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = channels(color).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if ((channels(color)[3] ?? 1) > 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const hasText = [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    if (!hasText || !node.checkVisibility()) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push(`${node.nodeName}.${node.className} ${ratio.toFixed(2)}: ${node.textContent}`);
  }
  return found;
}
"""
_FIGURES: Final = """
([earlier, later, seconds, names, histograms]) => {
  const [before, after] = [readScrape(earlier, 0), readScrape(later, 1000 * seconds)];
  return [
    names.map((name) => total(after, name)),
    names.map((name) => rate(before, after, name)),
    histograms.flatMap((name) => [0.5, 0.95, 0.99].map((share) => quantile(before, after, name, share))),
  ];
}
"""
_TIME_LINES: Final = """
() => [...document.querySelectorAll("#failures-table tbody th")].map((cell) => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  return new Set([...range.getClientRects()].map(({ top }) => Math.round(top))).size;
})
"""
_COUNTERS: Final = ("requests_total", "tokens_total", "instance_requests_total", "cpu_seconds_total", "no_such_total")
_HISTOGRAMS: Final = ("time_to_first_token_seconds", "inter_token_seconds", "stage_duration_seconds", "no_such_seconds")
_ASKED_APART_SECONDS: Final = 2.0
_LEAVES_SECONDS: Final = 0.2
_DRAWN_POINTS: Final = 3


async def text(shown: Tab, selector: str) -> str:
    return str(await shown.page.inner_text(selector))


async def agrees_with_top(browser: Browser, site: Site) -> list[str]:
    """Compare rates and percentiles with those of `pdproxy top`."""
    began, earlier = time.monotonic(), await site.metrics()
    await asyncio.sleep(_ASKED_APART_SECONDS)
    later, seconds = await site.metrics(), time.monotonic() - began
    names, histograms = ([f"pdproxy_{name}" for name in some] for some in (_COUNTERS, _HISTOGRAMS))
    before, after = Scrape.of(earlier, 0.0), Scrape.of(later, seconds)
    expected: list[list[float | None]] = [
        [after.total(name) for name in names],
        [counter_rate(before, after, name) for name in names],
        [histogram_quantile(before, after, name, share) for name in histograms for share in (0.5, 0.95, 0.99)],
    ]
    async with tab(browser, site.admin_url) as shown:
        found = await shown.run(_FIGURES, earlier, later, seconds, names, histograms)
    problems = [] if any(expected[1]) and any(expected[2]) else ["no requests between the two scrapes"]
    for page, top in zip(found, expected, strict=True):
        if not all(_are_equal(one, other) for one, other in zip(page, top, strict=True)):
            problems.append(f"the page shows {page}, and top {top}")
    return problems


async def lists_client_keys(browser: Browser, site: Site) -> list[str]:
    """Check that client keys are listed by their names, the one with the most engine time first."""
    async with tab(browser, site.admin_url) as shown:
        await shown.looks(4)
        rows = await shown.run(
            "() => [...document.querySelectorAll('#clients-table tbody th')].map((e) => e.textContent)"
        )
        problems = unless(rows == [*CLIENTS], f"the client keys are {rows}")
        problems += unless("sk-" not in await text(shown, "body"), "a client key is shown")
        tokens = await shown.run(
            "() => [...document.querySelectorAll('td[data-title=\"Tokens/s\"]')].map((e) => e.textContent)"
        )
        problems += unless(any(re.search("[1-9]", each) for each in tokens), f"the tokens per second are {tokens}")
        return problems + shown.complaints


async def keeps_its_charts(browser: Browser, site: Site) -> list[str]:
    """Check that the charts show the last minutes right after the page was opened, and after a reload."""
    problems = []
    async with tab(browser, site.admin_url) as shown:
        for step in ("open", "reload"):
            if step == "reload":
                await shown.page.reload()
            await shown.page.wait_for_function(
                "() => document.querySelectorAll('.chart path[d]:not([d=\"\"]):not(.area)').length === 4"
            )
            labels = await shown.run("() => [...document.querySelectorAll('.chart svg')].map((e) => e.ariaLabel)")
            problems += unless(all("now" in label for label in labels), f"after {step} the charts are {labels}")
            drawn = await shown.run("() => document.querySelector('.chart path:not(.area)').getAttribute('d')")
            problems += unless(drawn.count(",") >= _DRAWN_POINTS, f"after {step} the chart is {drawn}")
        return problems + shown.complaints


async def requires_admin_key(browser: Browser, site: Site) -> list[str]:
    """Check the page without a key, with a wrong one and with the right one, which must not leak."""
    problems = []
    async with tab(browser, site.admin_url) as shown:
        await shown.looks(2)
        problems += unless("3 workers" in await text(shown, "#tiles"), "the figures are not those of three workers")
        problems += unless("0.30" not in await text(shown, "#pools"), "engines are shown without the key")
        await shown.give_key("another-key")
        await shown.page.wait_for_selector("text=This is not the admin key")
        await shown.give_key(KEY)
        await shown.page.wait_for_selector("#configuration-table tbody tr")
        row_text = await text(shown, "body")
        problems += unless("0.30" in row_text, "no engine's version is shown")
        problems += unless("admission.max_running_decode" in row_text, "the configuration is not shown")
        problems += unless("kv.pin_seconds" not in row_text, "options with their default are shown without a request")
        await shown.page.check("#defaults")
        problems += unless("kv.pin_seconds" in await text(shown, "body"), "options with their default are not shown")
        kept = await shown.run("() => [document.documentElement.outerHTML, location.href, {...localStorage}]")
        problems += unless(KEY not in json.dumps(kept), "the key is somewhere in the page")
        await shown.page.click("#forget")
        await shown.page.wait_for_selector("#key-form:visible")
        problems += unless(await shown.page.is_hidden("#configuration"), "the configuration is shown without the key")
        problems += shown.complaints
    return problems


async def lists_failures(browser: Browser, site: Site) -> list[str]:
    """Check that a new failure is listed, and that its receipt opens and closes by keyboard."""
    async with tab(browser, site.admin_url) as shown:
        await shown.give_key(KEY)
        await shown.page.wait_for_selector("#failures-table tbody tr")
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVES_SECONDS):
                await site.ask(random.Random(3), "", "the-one-who-left")
        await site.ask(random.Random(1), DOOMED, "the-doomed-one")
        row = shown.page.locator("#failures-table tbody tr").filter(has_text="answered with status 500").first
        link, row_text = row.get_by_role("link"), await row.inner_text()
        problems = unless("an engine failed" in row_text and "500" in row_text, f"its row says {row_text!r}")
        lines = await shown.run(_TIME_LINES)
        problems += unless(set(lines) == {1}, f"times take {lines} lines")
        problems += unless("who-left" not in await text(shown, "#failures"), "clients that left are failures")
        await link.focus()
        await shown.page.keyboard.press("Enter")
        await shown.page.wait_for_function(
            "() => document.querySelector('#receipt .attempts tbody tr td.remarks')?.innerText.includes('500')"
        )
        await shown.looks(1)
        problems += unless(await shown.page.is_visible("#receipt"), "a refresh closes it")
        width, window = await shown.run(_WIDTHS)
        problems += unless(width <= window, f"the receipt makes the page {width} wide in a window of {window}")
        if site.pictures is not None:
            await shown.page.screenshot(path=site.pictures / "receipt.png")
        await shown.page.keyboard.press("Escape")
        problems += unless(await shown.page.is_hidden("#receipt"), "Escape does not close it")
        problems += unless(await link.evaluate("one => one === document.activeElement"), "the focus is lost")
        return problems + shown.complaints


async def escapes_markup(browser: Browser, site: Site) -> list[str]:
    """Check that engines' texts are escaped, and that the browser rejects injected code."""
    problems = []
    async with tab(browser, site.admin_url) as shown:
        await shown.give_key(KEY)
        async with site.odd_decoder():
            await shown.page.wait_for_function("text => document.body.innerText.includes(text)", arg=MARKUP)
            await shown.looks(1)
            created = await shown.run("() => [document.images.length, window.owned ?? null]")
            problems += unless(created == [0, None], "an engine's name has become an element")
        problems += shown.complaints
        for attack in (
            f"() => {{ document.body.innerHTML = {MARKUP!r}; }}",
            "() => { document.createElement('script').text = 'window.owned = 1'; }",
            "() => { setTimeout('window.owned = 1'); }",
            f"async () => {{ await fetch('{site.gateway.url}/livez', {{ mode: 'no-cors' }}); }}",
        ):
            try:
                await shown.run(attack)
                problems.append(f"the browser does not refuse {attack}")
            except Exception as error:  # noqa: BLE001, RUF100 Playwright converts exceptions of the page
                problems += unless(type(error).__name__ == "Error", f"{attack}: {error}")
        problems += unless(await shown.run("() => window.owned ?? null") is None, "a script of another was run")
    return problems


async def works_by_keyboard(browser: Browser, site: Site) -> list[str]:
    """Check that Tab reaches all controls in order, and that a refresh keeps the focus."""
    async with tab(browser, site.admin_url) as shown:
        await shown.page.wait_for_selector("#key-form:visible")
        reached = []
        for _ in range(6):
            await shown.page.keyboard.press("Tab")
            reached.append(await shown.run("() => document.activeElement.id || document.activeElement.textContent"))
        problems = unless(
            reached == ["Skip to the instances", "pause", "key", "Show more", "Metrics", "Readiness"],
            f"Tab leads to {reached}",
        )
        await shown.page.focus("#key")
        await shown.page.keyboard.type("half a k")
        await shown.looks(1)
        await shown.page.keyboard.type("ey")
        problems += unless(await shown.page.input_value("#key") == "half a key", "a refresh takes the focus")
        await shown.page.focus("#pause")
        await shown.page.keyboard.press("Enter")
        problems += unless(await text(shown, "#pause") == "Go on", "it is not paused")
        before = await text(shown, "#updated")
        await shown.page.wait_for_timeout(3000)
        problems += unless(await text(shown, "#updated") == before, "it goes on while it is paused")
        return problems + shown.complaints


async def shows_unreachable_gateway(browser: Browser, site: Site) -> list[str]:
    """Check the page while the gateway is unreachable, and afterwards."""
    async with tab(browser, site.admin_url) as shown:
        await shown.page.wait_for_selector('#summary:not([data-level="unknown"])')
        await asyncio.to_thread(site.gateway.end, signal.SIGKILL)
        await shown.page.wait_for_selector('#summary[data-level="gone"]')
        problems = unless("cannot be reached" in await text(shown, "#summary"), "the summary does not say so")
        await asyncio.to_thread(site.gateway.restart)
        await shown.page.wait_for_selector('#summary:not([data-level="gone"])')
        return problems + shown.complaints


async def works_without_admin_key(browser: Browser, site: Site) -> list[str]:
    """Check the page on loopback without any admin key."""
    site.gateway.reload(auth={})
    async with tab(browser, site.admin_url) as shown:
        await shown.page.wait_for_selector("#configuration-table tbody tr")
        return unless(await shown.page.is_hidden("#key-form"), "the page asks for a key") + shown.complaints


async def has_stable_layout(shown: Tab) -> list[str]:
    """Check that refreshes move no elements, nothing is wider than the window, and all text is readable."""
    async with shown.page.expect_response("**/admin/status") as waiting:
        pass
    reasons = await (await waiting.value).text()  # their number changes, and with it the height of the summary
    await shown.page.route("**/admin/status", lambda route: route.fulfill(body=reasons))
    await shown.looks(2)  # until then a rate has no figure
    await shown.run(_SHIFTS)
    await shown.looks(3)
    shifts = await shown.run("() => window.shifts")
    width, window = await shown.run(_WIDTHS)
    problems = unless(not shifts, f"elements have moved: {shifts}")
    problems += unless(width <= window, f"the page is {width} wide in a window of {window}")
    problems += [f"hard to read: {one}" for one in await shown.run(_CONTRAST)]
    rows = await shown.page.get_by_role("row").count()
    return problems + unless(rows > 8, f"there are {rows} rows") + shown.complaints


async def names_reasons(browser: Browser, site: Site) -> list[str]:
    """Check that the summary names each failing instance: by codes without the admin key, and by sentences with it."""
    names = {f"{HOST}:{engine.port}" for engine in site.failing}
    async with tab(browser, site.admin_url) as shown:
        await shown.page.wait_for_selector('#summary:is([data-level="impaired"], [data-level="degraded"])')
        found = await text(shown, "#summary")
        problems = unless(all(name in found for name in names), f"without the key the summary says {found!r}")
        await shown.give_key(KEY)
        await shown.page.wait_for_selector("#summary small:has-text('Look at')")
        found = await text(shown, "#summary")
        problems += unless(all(name in found for name in names), f"the summary says {found!r}")
        return problems + shown.complaints


async def lists_each_instance(shown: Tab, site: Site) -> list[str]:
    """Check that each instance has a row with its state."""
    problems = []
    for engine in (*site.prefill, *site.decode):
        name = shown.page.get_by_role("rowheader", name=f"{HOST}:{engine.port}")
        row_text = await shown.page.get_by_role("row").filter(has=name).inner_text()
        wanted = ("down" if not engine.is_running else "ejected") if engine in site.failing else "up"
        problems += unless(wanted in row_text, f"{engine.port} is {wanted}, but its row says {row_text!r}")
    return problems


def unless(holds: bool, problem: str) -> list[str]:
    return [] if holds else [problem]


def _are_equal(one: Any, other: Any) -> bool:
    return one is other if one is None or other is None else math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


ALONE: Final[dict[str, Callable[[Browser, Site], Any]]] = {
    "figures are those of top": agrees_with_top,
    "reasons": names_reasons,
    "client keys": lists_client_keys,
    "charts": keeps_its_charts,
    "the admin key": requires_admin_key,
    "failures": lists_failures,
    "markup of engines": escapes_markup,
    "by keyboard": works_by_keyboard,
    "the gateway is away": shows_unreachable_gateway,
    "without any admin key": works_without_admin_key,
}
"""Checks by name. The last two change the gateway."""
