"""Chromium, and the page in it as somebody has it before them."""

from __future__ import annotations

import shutil
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser, Page

Scheme = Literal["light", "dark"]
SIZES: Final = {"wide": (1600, 1000), "narrow": (390, 844)}
SCHEMES: Final[tuple[Scheme, ...]] = ("light", "dark")
_EXPECTED: Final = ("Failed to load resource",)
"""What Chromium says of every answer that is an error, and of a gateway that is away."""


@dataclass(slots=True)
class Tab:
    """One open page, and what it has complained about."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    async def run(self, script: str, *arguments: Any) -> Any:
        """What a function of JavaScript makes of its arguments, which are given as one array."""
        return await self.page.evaluate(script, list(arguments))

    async def give_key(self, key: str) -> None:
        """As one types it."""
        await self.page.fill("#key", key)
        await self.page.press("#key", "Enter")

    async def looks(self, times: int) -> None:
        """Wait until the page has asked so often again."""
        for _ in range(times):
            async with self.page.expect_response("**/metrics"):
                pass
        await self.page.wait_for_timeout(200)  # it is shown when the other questions are answered, too


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Debian's."""
    from playwright.async_api import async_playwright  # which the script installs, and no other needs

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
    """The page, opened as anew as in a private window."""
    width, height = SIZES[size]
    context = await browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    try:
        page = await context.new_page()
        made = Tab(page)
        page.on("pageerror", lambda error: made.complaints.append(f"error: {error}"))
        page.on("console", lambda said: _note(made, said.text))
        page.on("request", lambda asked: _is_own(made, asked.url, url))
        await page.goto(url + "/")
        await page.wait_for_selector("#pools table")
        yield made
    finally:
        await context.close()


def _note(made: Tab, said: str) -> None:
    if not said.startswith(_EXPECTED):
        made.complaints.append(f"console: {said}")


def _is_own(made: Tab, asked: str, url: str) -> None:
    if not asked.startswith((url + "/", "data:")):
        made.complaints.append(f"it asks {asked}")
