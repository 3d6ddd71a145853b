"""The generated pages of docs. `python -m tests.reference_pages` writes them, and a test finds stale ones.

The texts are those of the product: the docstrings of options, the help of flags, the help of metrics. Only the causes
and remedies of errors are written here, in `errors.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tests.reference_pages import command_line, compatibility, errors, metrics, options, real_engines, status_codes

DOCS: Final = Path(__file__).parents[2] / "docs"
COMMAND: Final = ".venv/bin/python -m tests.reference_pages"
PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "compatibility.md": compatibility.page,
    "reference/cli.md": command_line.page,
    "reference/errors.md": errors.page,
    "reference/metrics.md": metrics.page,
    "reference/options.md": options.page,
    "reference/real-engines.md": real_engines.page,
    "reference/status-codes.md": status_codes.page,
}
"""The function that renders each page, by its path below docs."""
