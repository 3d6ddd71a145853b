"""A view as plain text, and as a refreshing table for a terminal, which requires `rich`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.tools.top.view import HEADINGS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from proxy.tools.top.view import View


def as_text(shown: View) -> str:
    """Return lines without control characters."""
    table = [HEADINGS, *(row.cells() for row in shown.rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(HEADINGS))]
    rows = ("  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in table)
    return "\n".join([*shown.lines, "", *rows])


def as_table(shown: View) -> RenderableType:
    """Return a table for a terminal. Raises ImportError without the extra `tui`."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(HEADINGS):
        is_number = 2 < number < len(HEADINGS) - 1
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    for row in shown.rows:
        style = "" if row.is_well else "yellow" if row.state == "up" else "bold red"
        table.add_row(*(Text(cell) for cell in row.cells()), style=style)
    return Group(*map(Text, shown.lines), Text(), table)
