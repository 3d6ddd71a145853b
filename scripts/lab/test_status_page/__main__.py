"""The status page in Chromium, in front of a gateway under load, of whose decoders one is down and one fails."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop

from lab.common.processes import called_from, unwind_on_signals
from lab.test_status_page.checks import ALONE, SCHEMES, SIZES, chromium, keeps_still, tab, tells_of_each
from lab.test_status_page.site import KEY, Site, site

if TYPE_CHECKING:
    from playwright.async_api import Browser, ViewportSize

_PICTURE: Final[ViewportSize] = {"width": 1240, "height": 880}
"""Of the picture in OPERATING.md."""


async def run(directory: Path, pictures: Path | None) -> list[str]:
    """Returns what is wrong."""
    problems: list[str] = []

    def tell(name: str, found: list[str]) -> None:
        print(f"{'not ok' if found else 'ok'}: {name}", flush=True)
        problems.extend(f"{name}: {one}" for one in found)

    async with site(directory) as shown, shown.busy(), chromium() as browser:
        await shown.break_down()
        for size in SIZES:
            for scheme in SCHEMES:
                tell(f"{size}, {scheme}", await look(browser, shown, size, scheme, pictures))
        for name, check in ALONE.items():
            tell(name, await check(browser, shown))
    return problems


async def look(browser: Browser, shown: Site, size: str, scheme: str, pictures: Path | None) -> list[str]:
    """As somebody looks who has the key. Draws what is seen, if wanted."""
    async with tab(browser, shown.admin_url, size, scheme) as one:  # type: ignore[arg-type]
        await one.give_key(KEY)
        await one.page.wait_for_selector("#configuration-table tbody tr")
        problems = await keeps_still(one) + await tells_of_each(one, shown)
        if pictures is not None:
            await one.page.screenshot(path=pictures / f"{size}-{scheme}.png", full_page=True)
            if (size, scheme) == ("wide", "light"):
                await one.page.set_viewport_size(_PICTURE)
                await one.page.screenshot(path=pictures / "page.png")
    return problems


def main() -> None:
    """Ends with 1 if anything is wrong."""
    unwind_on_signals()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # an engine is killed under its requests
    parser = argparse.ArgumentParser(prog="scripts/test-status-page", description=__doc__)
    parser.add_argument("--pictures", metavar="DIRECTORY", help="take pictures, and leave them there")
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
