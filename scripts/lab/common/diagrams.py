"""Find the Mermaid diagrams of docs/ and their drawings. GitHub draws the text, and the site shows the drawings."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_DRAWINGS: Final = Path(__file__).parents[3] / "docs" / "images" / "diagrams"
_fence: Final = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Diagram:
    """One diagram of a page."""

    page: str
    """Path of the page below docs/."""
    number: int
    """Position among the diagrams of the page, from 1 on."""
    text: str

    @property
    def name(self) -> str:
        """Name of its file without suffix, and id of its drawing."""
        return f"{self.page.removesuffix('.md').replace('/', '-')}-{self.number}"

    @property
    def digest(self) -> str:
        """Identifies the text. The drawing has the digest of the text that it was drawn from."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def diagrams(page: str, markdown: str) -> list[Diagram]:
    """Return the diagrams of a page in their order."""
    return [Diagram(page, number, match[1]) for number, match in enumerate(_fence.finditer(markdown), 1)]


def file_of(diagram: Diagram) -> Path:
    """Return the path of the drawing."""
    return _DRAWINGS / f"{diagram.name}.svg"


def with_drawings(page: str, markdown: str) -> str:
    """Return a page's text with drawings in place of the diagrams' texts.

    Raises:
        ValueError: A drawing is missing, or was drawn from another text.

    """
    remaining = iter(diagrams(page, markdown))
    return _fence.sub(lambda _: _figure(next(remaining)), markdown)


def _figure(diagram: Diagram) -> str:
    path = file_of(diagram)
    drawing = path.read_text(encoding="utf-8") if path.exists() else ""
    if f'data-source="{diagram.digest}"' not in drawing:
        raise ValueError(f"docs/{diagram.page}: draw its diagrams again: scripts/docs diagrams")
    return f'<figure class="diagram">{drawing.strip()}</figure>'
