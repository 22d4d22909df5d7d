"""Tables that fit a terminal of any width: what does not fit beside the row's name goes into another table below."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class FittingTable:
    """A table with cells that are never cut: columns that do not fit are shown in further tables with the same rows.

    The first `keys` columns identify a row and are repeated in every table. Headings break between words. A text in a
    key column is folded only where it leaves no room for a single other column.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    keys: int = 1
    left: frozenset[str] = field(default_factory=frozenset)
    """Headings of left-aligned columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style="italic")
        yield from map(self._build, self._groups(console, options))

    def _groups(self, console: Console, options: ConsoleOptions) -> Iterator[list[int]]:
        """Yield the columns of each table: as many as fit, at least one beside the keys."""
        keys = list(range(self.keys))
        group = keys
        for column in range(self.keys, len(self.headings)):
            if len(group) > len(keys) and self._width([*group, column], console, options) > options.max_width:
                yield group
                group = keys
            group = [*group, column]
        yield group

    def _width(self, columns: Sequence[int], console: Console, options: ConsoleOptions) -> int:
        return Measurement.get(console, options.update(width=sys.maxsize), self._build(columns)).maximum

    def _build(self, columns: Sequence[int]) -> Table:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for column in columns:
            justify: JustifyMethod = "left" if self.headings[column] in self.left else "right"
            table.add_column(self._wrapped(column), justify=justify, no_wrap=column >= self.keys, overflow="fold")
        for row in self.rows:
            table.add_row(*(row[column] for column in columns))
        return table

    def _wrapped(self, column: int) -> str:
        """Wrap the heading in lines no longer than the widest cell or the longest word."""
        heading = self.headings[column]
        widest = max((len(row[column]) for row in self.rows), default=0)
        width = max([widest, *map(len, heading.split())])
        lines = textwrap.wrap(heading, width, break_long_words=False, break_on_hyphens=False)
        return "\n".join(lines)
