"""Draw the Mermaid diagrams of docs/ with Chromium, as SVG files that the documentation site shows."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

from lab.common.diagrams import Diagram, diagrams, file_of

_DOCS: Final = Path(__file__).parents[2] / "docs"
_MERMAID: Final = "11.17.2"
# Colours of Mermaid's theme, and the variables of Material's stylesheet that replace them, for light and dark.
_INK, _LINE, _GROUND, _FILL, _BORDER = "#212121", "#757575", "#fffffe", "#eceff8", "#4051b5"
_VARIABLES: Final = {
    _INK: "--md-default-fg-color",
    _LINE: "--md-default-fg-color--light",
    _GROUND: "--md-default-bg-color",
    _FILL: "--md-code-bg-color",
    _BORDER: "--md-typeset-a-color",
}
_OPTIONS: Final = {
    "startOnLoad": False,
    "theme": "base",
    "htmlLabels": False,  # labels of HTML would depend on the site's stylesheet
    "fontFamily": "sans-serif",
    "themeVariables": {
        "background": _GROUND,
        "edgeLabelBackground": _GROUND,
        "lineColor": _LINE,
        "noteBkgColor": _FILL,
        "noteBorderColor": _LINE,
        "noteTextColor": _INK,
        "primaryBorderColor": _BORDER,
        "primaryColor": _FILL,
        "primaryTextColor": _INK,
        "secondaryColor": _FILL,
        "tertiaryColor": _GROUND,
        "textColor": _INK,
    },
}
_PAGE: Final = """<!doctype html><meta charset="utf-8"><script src="{script}"></script><pre id="drawn"></pre><script>
mermaid.initialize({options});
mermaid.render("{name}", {text}).then(
  drawn => document.getElementById("drawn").textContent = drawn.svg,
  problem => document.getElementById("drawn").textContent = "problem: " + problem);
</script>"""
_SECONDS: Final = 120


def draw(diagram: Diagram, script: Path) -> str:
    """Return the diagram as SVG, in the colours of the site.

    Raises:
        ValueError: Mermaid or Chromium could not draw it. The message has the reason.

    """
    page = _PAGE.format(
        script=script.resolve().as_uri(),
        options=json.dumps(_OPTIONS),
        name=diagram.name,
        text=json.dumps(diagram.text),
    )
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "diagram.html")
        path.write_text(page, encoding="utf-8")
        command = [
            "chromium",
            "--headless",
            "--no-sandbox",
            f"--user-data-dir={directory}",
            "--virtual-time-budget=20000",
        ]
        result = subprocess.run(
            [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    match = re.search(r'<pre id="drawn">(.*?)</pre>', result.stdout, re.DOTALL)
    drawn = html.unescape(match[1]) if match else ""
    if not drawn.startswith("<svg"):
        raise ValueError(f"{diagram.page}: {drawn or result.stderr.strip()}")
    return _with_colours_of_the_site(drawn, diagram)


def _with_colours_of_the_site(svg: str, diagram: Diagram) -> str:
    svg = svg.replace("rgba(255, 255, 254, 0.5)", _GROUND)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable}, {colour})")
    return svg.replace("<svg ", f'<svg data-source="{diagram.digest}" ', 1) + "\n"


def _mermaid(directory: Path) -> Path:
    """Get Mermaid from npm's registry. Return the path of its script."""
    command = ["npm", "pack", "--silent", "--pack-destination", str(directory), f"mermaid@{_MERMAID}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(directory / f"mermaid-{_MERMAID}.tgz") as archive:
        archive.extract("package/dist/mermaid.min.js", directory, filter="data")
    return directory / "package" / "dist" / "mermaid.min.js"


def main() -> None:
    """Draw all diagrams. Exits with 1 if one cannot be drawn."""
    with tempfile.TemporaryDirectory() as directory:
        script = _mermaid(Path(directory))
        for path in sorted(_DOCS.rglob("*.md")):
            for diagram in diagrams(str(path.relative_to(_DOCS)), path.read_text(encoding="utf-8")):
                file = file_of(diagram)
                file.parent.mkdir(exist_ok=True)
                try:
                    file.write_text(draw(diagram, script), encoding="utf-8")
                except ValueError as problem:
                    sys.exit(f"scripts/docs: {problem}")
                print(file)


if __name__ == "__main__":
    main()
