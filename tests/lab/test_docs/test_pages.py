"""Blocks of a page, and similarity of outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.test_docs import PAGES, Block, Kind, PageError, blocks, missing_lines, without_comment

ROOT = Path(__file__).parents[3]

PAGE = """# Words

Some of them.

    pdproxy --prefill a:1 \\
        --decode b:1
    curl localhost:1999/livez   # is it alive?

<!-- not run: needs engines -->
    pdproxy top

```
scripts/demo
```

<!-- output of: scripts/demo -->

    12 tokens

    in 3 ms

- a list
    that goes on

<!-- file: keys.yaml -->
    keys:
      - name: a

Drawn:

    client ──► gateway
       │

1. A step:

    <!-- not run: needs engines -->
    ```bash
    pdproxy top
      --once
    ```

```yaml
prefill: []
```

```mermaid
flowchart
```
"""


def test_page_has_blocks_of_all_kinds() -> None:
    assert blocks("P.md", PAGE) == [
        Block(
            "P.md:5",
            Kind.COMMANDS,
            "",
            "pdproxy --prefill a:1 \\\n    --decode b:1\ncurl localhost:1999/livez   # is it alive?",
        ),
        Block("P.md:10", Kind.NOT_RUN, "needs engines", "pdproxy top"),
        Block("P.md:13", Kind.COMMANDS, "", "scripts/demo"),
        Block("P.md:18", Kind.OUTPUT, "scripts/demo", "12 tokens\n\nin 3 ms"),
        Block("P.md:26", Kind.FILE, "keys.yaml", "keys:\n  - name: a"),
        Block("P.md:31", Kind.PICTURE, "", "client ──► gateway\n   │"),
        Block("P.md:38", Kind.NOT_RUN, "needs engines", "pdproxy top\n  --once", "bash"),
        Block("P.md:43", Kind.EXAMPLE, "", "prefill: []", "yaml"),
        Block("P.md:47", Kind.PICTURE, "", "flowchart", "mermaid"),
    ]


def test_command_has_continuation_lines_and_no_comment() -> None:
    first, second = blocks("P.md", PAGE)[0].commands
    assert first == "pdproxy --prefill a:1 \\\n    --decode b:1"
    assert without_comment(second) == "curl localhost:1999/livez"


@pytest.mark.parametrize(
    "page", ["\n    kubectl apply -f x\n", "\n    keys:\n", "<!-- not run: -->\n    pdproxy\n", "```\nmake\n```"]
)
def test_block_of_unknown_kind_is_rejected(page: str) -> None:
    with pytest.raises(PageError, match=r"P\.md:\d: "):
        blocks("P.md", page)


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_the_pages_has_a_kind(name: str) -> None:
    blocks(name, (ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("printed", "is_shown"),
    [
        ("prefill  127.0.0.1:7411   up     0       0      8.1", True),
        ("first token  p50 -, p95 1,430 ms", True),
        ("prefill  127.0.0.1:7411   down     0       0      8.1", False),
        ("first token  p50 70 ms", False),
        ("another line", False),
    ],
)
def test_outputs_match_with_other_numbers_and_addresses(printed: str, is_shown: bool) -> None:
    shown = "prefill  localhost:7100  up     13      5,500  0.0\nfirst token  p50 70 ms, p95 430 ms\n"
    assert missing_lines(f"\n{printed}\n", shown) == ([] if is_shown else [printed])
