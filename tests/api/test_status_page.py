"""The status page and its restrictions for browsers. scripts/test-status-page opens it in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import proxy.api.status_page as package
from proxy import __version__
from proxy.api.status_page import StatusPage
from tests.api.conftest import Gateway
from tests.conftest import Deploy

SOURCES = {
    path.name: path.read_text()
    for path in Path(package.__file__).parent.iterdir()
    if path.suffix in (".html", ".css", ".js")
}
SCRIPTS = "".join(text for name, text in SOURCES.items() if name.endswith(".js"))
BROWSERS = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


async def test_browser_may_run_only_the_scripts_of_the_page(gateway: Gateway) -> None:
    client = await gateway.serve(StatusPage().routes())
    async with client.get("/") as answer:
        page, headers = await answer.text(), answer.headers
    told = dict(directive.partition(" ")[::2] for directive in headers["Content-Security-Policy"].split("; "))
    (script,) = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall(r"<style[^>]*>(.*?)</style>", page, re.DOTALL)
    assert told == {
        "default-src": "'none'",
        "script-src": hash_of(script),
        "style-src": hash_of(style),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    assert (headers["X-Frame-Options"], headers["Cache-Control"]) == ("DENY", "no-store")


async def test_status_page_is_one_document(gateway: Gateway) -> None:
    client = await gateway.serve(StatusPage().routes())
    async with client.get("/") as answer:
        page = await answer.text()
    for name, text in SOURCES.items():
        assert name == "page.html" or text in page, f"{name} is not served"
    assert re.findall(r'(?:src|href)="(?!data:)[^"]*(?::|//)', page) == []
    assert re.findall(r"@import|url\(|\sstyle=|\son[a-z]+=", page.partition("<script>")[0]) == []


def test_scripts_create_no_markup_from_text() -> None:
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|setHTML|DOMParser|eval\(|new Function|srcdoc"
    assert re.findall(markup, SCRIPTS) == []
    assert set(re.findall(r"(?:local|session)Storage", SCRIPTS)) == {"sessionStorage"}


async def test_browsers_get_the_status_page_and_programs_the_routes(deploy: Deploy) -> None:
    gateway = await deploy()
    for accept, kind in (
        (BROWSERS, "text/html"),
        ("*/*", "application/json"),
        ("application/json", "application/json"),
    ):
        async with gateway.session.get(gateway.url + "/", headers={"Accept": accept}) as answer:
            assert (answer.status, answer.content_type, answer.headers["Vary"]) == (200, kind, "Accept")
            if kind == "application/json":
                assert (await answer.json())["version"] == __version__
