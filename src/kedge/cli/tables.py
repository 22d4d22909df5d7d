"""Tables for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text


def table_of(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = ()) -> Group:
    """Return a title and a table without cells that are cut; `left` are the headings of left-aligned columns.

    Headings are broken between words, into lines as short as the cells: 13 columns of figures fit 80 characters.
    """
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for column, heading in enumerate(headings):
        width = max(map(len, [*heading.split(), *(row[column] for row in rows)]))
        lines = textwrap.wrap(heading, width, break_on_hyphens=False)
        table.add_column("\n".join(lines), justify="left" if heading in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return Group(Text(title, style="italic"), table)  # a table would break its own title at its width
