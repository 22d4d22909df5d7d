"""`kedge inspect --architectures`: what Kedge serves and translates, and why not more, found by trying small models."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from kedge.engine.local.model.replica import TriedArchitecture


def show_architectures(console: Console) -> None:
    """Try a small random model of every architecture, and print what Kedge does with it."""
    from kedge.engine.local.model.replica import ARCHITECTURES, verdict

    with console.status("trying small models") as status, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about their random weights and unusual sizes
        rows = []
        for one in ARCHITECTURES:
            status.update(f"trying {one.name}")
            rows.append((one.name, *_cells(verdict(one))))
    table = Table("architecture", "exact reuse", "translation", title="small models with random weights")
    table.columns[2].overflow = "fold"
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _cells(found: TriedArchitecture) -> tuple[str, str]:
    """Return what is shown about exact reuse and about translation."""
    if found.refusal:
        return "no", f"no: {found.refusal}"
    return "yes", f"no: {found.translation_refusal}" if found.translation_refusal else "yes"
