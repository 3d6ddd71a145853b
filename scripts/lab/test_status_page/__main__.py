"""Test the status page in Chromium: a gateway under load, with a dead and a failing decoder."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop

from lab.common.processes import called_from, unwind_on_signals
from lab.test_status_page.checks import ALONE, SCHEMES, SIZES, chromium, has_stable_layout, lists_each_instance, tab
from lab.test_status_page.site import KEY, Site, site

if TYPE_CHECKING:
    from playwright.async_api import Browser, ViewportSize

_PICTURE: Final[ViewportSize] = {"width": 1240, "height": 880}
"""Size of the picture in docs/operate/status.md."""


async def run(directory: Path, pictures: Path | None) -> list[str]:
    """Run all checks. Return the problems."""
    problems: list[str] = []

    def report(name: str, found: list[str]) -> None:
        print(f"{'not ok' if found else 'ok'}: {name}", flush=True)
        problems.extend(f"{name}: {one}" for one in found)

    async with site(directory) as shown, shown.busy(), chromium() as browser:
        shown.pictures = pictures
        await shown.break_down()
        for size in SIZES:
            for scheme in SCHEMES:
                report(f"{size}, {scheme}", await look(browser, shown, size, scheme))
        for name, check in ALONE.items():
            report(name, await check(browser, shown))
    return problems


async def look(browser: Browser, shown: Site, size: str, scheme: str) -> list[str]:
    """Check the page with the admin key, and take pictures if wanted."""
    async with tab(browser, shown.admin_url, size, scheme) as one:  # type: ignore[arg-type]
        await one.give_key(KEY)
        await one.page.wait_for_selector("#configuration-table tbody tr")
        problems = await has_stable_layout(one) + await lists_each_instance(one, shown)
        if (pictures := shown.pictures) is not None:
            await one.page.screenshot(path=pictures / f"{size}-{scheme}.png", full_page=True)
            if (size, scheme) == ("wide", "light"):
                await one.page.set_viewport_size(_PICTURE)
                await one.page.screenshot(path=pictures / "status-page.png")
    return problems


def main() -> None:
    """Run the checks. Exits with 1 if there are problems."""
    unwind_on_signals()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a killed engine logs errors
    parser = argparse.ArgumentParser(prog="scripts/test-status-page", description=__doc__)
    parser.add_argument("--pictures", metavar="DIRECTORY", help="take pictures and write them to this directory")
    options = parser.parse_args()
    pictures = called_from() / options.pictures if options.pictures else None
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        problems = uvloop.run(run(Path(temporary), pictures))
    for problem in problems:
        print(f"wrong: {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
