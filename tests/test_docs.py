"""Pages of docs/: their size, their list in mkdocs.yml, their examples, and links that leave the site."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lab.common.diagrams import diagrams, file_of
from lab.common.docs_site import on_page_content, on_page_markdown, on_post_build
from lab.test_docs import Kind, blocks
from proxy.settings import load_settings

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
# The most words that a reader of a page must read. None: the page is generated.
MAX_WORDS: dict[str, int | None] = {
    "compatibility.md": None,
    "concepts/failures.md": 780,
    "concepts/health.md": 700,
    "concepts/kv-cache.md": 840,
    "concepts/local-prefill.md": 300,
    "concepts/overload.md": 730,
    "concepts/request-lifecycle.md": 500,
    "concepts/resume.md": 800,
    "concepts/routing.md": 1000,
    "concepts/terms.md": 500,
    "concepts/working-set.md": 400,
    "contributing/compiled.md": 800,
    "contributing/recipes.md": 2200,
    "contributing/scripts.md": 1500,
    "contributing/style.md": 800,
    "engines/sglang.md": 600,
    "engines/vllm-ascend.md": 600,
    "engines/vllm.md": 1050,
    "get-started/first-deployment.md": 700,
    "get-started/install.md": 400,
    "get-started/migrate.md": 600,
    "guides/client-keys.md": 620,
    "guides/clients.md": 700,
    "guides/configuration.md": 400,
    "guides/elastic-roles.md": 1100,
    "guides/discovery.md": 600,
    "guides/instances.md": 500,
    "guides/docker.md": 300,
    "guides/kubernetes.md": 800,
    "guides/launch.md": 500,
    "guides/models.md": 520,
    "guides/reverse-proxy.md": 500,
    "guides/scaling.md": 800,
    "guides/several-gateways.md": 600,
    "guides/systemd.md": 300,
    "guides/tls.md": 400,
    "guides/upgrades.md": 900,
    "index.md": 200,
    "operate/doctor.md": 700,
    "operate/incompatibilities.md": 500,
    "operate/observability.md": 730,
    "operate/security.md": 450,
    "operate/status.md": 700,
    "performance.md": 1020,
    "reference/access-log.md": 700,
    "reference/cli.md": None,
    "reference/connectors.md": 550,
    "reference/endpoints.md": 560,
    "reference/errors.md": None,
    "reference/metrics.md": None,
    "reference/options.md": None,
    "reference/real-engines.md": None,
    "reference/status-codes.md": None,
    "troubleshooting/alerts.md": 1300,
    "troubleshooting/index.md": 1300,
}
MAX_SENTENCE_WORDS = 35
OLD_ANCHORS = 81  # headings of OPERATING.md, without its title, before docs/
NOT_PROSE = re.compile(r"^( *)```[\s\S]*?^\1```$|^    .*$|<!--[\s\S]*?-->", re.MULTILINE)


class _Loader(yaml.SafeLoader):
    """Loads mkdocs.yml without calling the functions that it names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def words(page: str) -> int:
    """Return the number of words of a page, without code blocks and comments."""
    return sum(any(letter.isalnum() for letter in word) for word in NOT_PROSE.sub("", PAGES[page]).split())


def listed(entries: list[Any]) -> list[str]:
    """Return the pages of a part of mkdocs.yml's nav, in its order."""
    found: list[str] = []
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += listed(value) if isinstance(value, list) else [value]
    return found


def test_every_page_has_a_maximum_size() -> None:
    assert sorted(MAX_WORDS) == sorted(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_page_is_not_longer_than_its_maximum(page: str) -> None:
    longest = MAX_WORDS[page]
    assert longest is None or words(page) <= longest


def test_navigation_lists_every_page_once() -> None:
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]
    assert sorted(listed(nav)) == sorted(PAGES)


# The library of the site is stricter than GitHub: it needs four spaces, and an empty line before a list.
@pytest.mark.parametrize("page", PAGES)
def test_lists_look_the_same_on_github_and_on_the_site(page: str) -> None:
    lines = NOT_PROSE.sub("", PAGES[page]).splitlines()
    is_item = re.compile(r" *([-*]|\d+\.) ").match
    glued = [
        line for before, line in itertools.pairwise(lines) if is_item(line) and before.strip() and before[:1].isalpha()
    ]
    assert glued == []
    assert [line for line in lines if re.match(r" {1,3}([-*]|\d+\.) ", line)] == []


@pytest.mark.parametrize("page", PAGES)
def test_yaml_examples_are_valid_configurations(page: str, tmp_path: Path) -> None:
    for block in blocks(page, PAGES[page]):
        if block.kind is Kind.EXAMPLE and block.language == "yaml":
            options = {"prefill": ["a:1"], "decode": ["b:1"], **yaml.safe_load(block.text)}
            (tmp_path / "example.yaml").write_text(yaml.safe_dump(options))
            assert load_settings(["--config", str(tmp_path / "example.yaml")], {}).warnings == (), block.place


def test_links_out_of_docs_lead_to_the_source() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="engines/vllm.md"), meta={})
    text = "[a](../index.md#x) [b](../../DESIGN.md#y) [c](https://example.com/z) [d](#e) [f](../../configs)"
    assert on_page_markdown(text, page=page) == (
        "[a](../index.md#x) [b](https://example.com/pdproxy/blob/main/DESIGN.md#y) [c](https://example.com/z) [d](#e) "
        "[f](https://example.com/pdproxy/blob/main/configs)"
    )


def test_names_in_tables_may_be_broken_after_underscores() -> None:
    html = "<p><code>a_b</code></p><td><code>c_d</code> e_f</td>"
    assert on_page_content(html) == "<p><code>a_b</code></p><td><code>c_<wbr>d</code> e_f</td>"


def test_page_of_old_anchors_is_short_and_complete() -> None:
    text = (ROOT / "OPERATING.md").read_text()
    anchors = re.findall(r'<a id="([\w-]+)">', text)
    assert len(text.splitlines()) <= 60
    assert len(anchors) == len({*anchors}) == OLD_ANCHORS


def test_diagrams_are_drawn_from_the_texts_of_their_pages() -> None:
    drawings = {file_of(one): one.digest for page, text in PAGES.items() for one in diagrams(page, text)}
    assert sorted(drawings) == sorted((DOCS / "images/diagrams").iterdir())
    assert [path.name for path, digest in drawings.items() if digest not in path.read_text()] == []


def test_page_with_a_changed_diagram_is_rejected() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"), meta={})
    with pytest.raises(ValueError, match="scripts/docs diagrams"):
        on_page_markdown("```mermaid\nflowchart LR\n```\n", page=page)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("index.html", '<link rel="stylesheet" href="https://fonts.example.com/a.css">'),
        ("index.html", '<script src="//cdn.example.com/a.js"></script>'),
        ("index.html", '<img src="https://example.com/a.png">'),
        ("index.html", '<script>fetch("https://example.com/")</script>'),
        ("index.html", "<style>@import 'https://example.com/a.css'</style>"),
        ("index.html", '<pre class="mermaid">flowchart LR</pre>'),
        ("site.css", "body { background: url(https://example.com/a.png) }"),
        ("site.js", "load('https://example.com/a.js')"),
    ],
)
def test_site_that_loads_from_another_host_is_rejected(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=f"(?s)other hosts.*{file}"):
        on_post_build(config={"site_dir": tmp_path})


def test_links_and_namespaces_are_no_loads(tmp_path: Path) -> None:
    page = '<a href="https://example.com/">a</a><svg xmlns="http://www.w3.org/2000/svg"></svg><img src="a.png">'
    (tmp_path / "index.html").write_text(f'{page}<link rel="canonical" href="https://example.com/">')
    (tmp_path / "site.js").write_text("// see https://example.com/\nlet ns = 'http://www.w3.org/2000/svg'")
    on_post_build(config={"site_dir": tmp_path})


@pytest.mark.parametrize(
    ("page", "meta"), [("troubleshooting/index.md", {"search": {"boost": 3.0}}), ("index.md", {"hide": ["navigation"]})]
)
def test_search_ranks_troubleshooting_before_other_pages(page: str, meta: dict[str, object]) -> None:
    shown = SimpleNamespace(file=SimpleNamespace(src_uri=page), meta={})
    on_page_markdown(PAGES[page], page=shown)
    assert shown.meta == meta


def test_sdist_has_every_file_of_the_pages() -> None:
    (patterns,) = re.findall(r"^recursive-include docs (.*)$", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE)
    files = [path for path in DOCS.rglob("*") if path.is_file()]
    assert [path for path in files if not any(path.match(pattern) for pattern in patterns.split())] == []


def sentences(page: str) -> list[str]:
    """Return the sentences of a page, without code, tables and headings."""
    prose = re.sub(r"^ *(?:\||#|>).*$", "", NOT_PROSE.sub("", PAGES[page]), flags=re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose)
    return [
        sentence
        for paragraph in paragraphs
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))
        if sentence
    ]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_have_at_most_35_words(page: str) -> None:
    assert [sentence for sentence in sentences(page) if len(sentence.split()) > MAX_SENTENCE_WORDS] == []
