"""What commands show and write: tables for a terminal, and results as JSON."""

import json
import platform
import textwrap
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kedge import __version__
from kedge.cli.preflight import partial_of

Row = Mapping[str, Any]
"""Figures as they are written to a file of results."""
Columns = Mapping[str, tuple[str, str]]
"""Heading -> figure and its format."""


def terminal(*, stderr: bool = False) -> Console:
    """Return a console that shows texts as they are: those of users, models and servers may look like markup."""
    return Console(stderr=stderr, markup=False, highlight=False)


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


def cells(row: Row, columns: Columns) -> list[str]:
    """Return a row's figures in their formats; "-" for one that is None or not there."""
    found = ((row.get(name), form) for name, form in columns.values())
    return ["-" if figure is None else format(figure, form) for figure, form in found]


def save(console: Console, file: Path | None, results: Mapping[str, object]) -> None:
    """Write results with a description of the machine, and print the file's path; None is for no file."""
    if file is not None:
        write(file, results)
        console.print(f"results: {file}")


def write(file: Path, results: Mapping[str, object]) -> None:
    """Write results with a description of the machine, atomically: if interrupted, the file keeps its earlier
    content. A link goes on leading to it; a pipe or a device is written to as it is.
    """
    text = json.dumps({"machine": _machine(), **results}, indent=1, ensure_ascii=False)
    partial = partial_of(file) or file
    partial.write_text(text + "\n", encoding="utf-8")
    if partial != file:
        partial.replace(file.resolve())


def _machine() -> dict[str, object]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": gpu,
        "python": platform.python_version(),
        "kedge": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
