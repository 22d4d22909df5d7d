"""Write `docs/reference/cli.md` from the commands themselves: `python scripts/cli_reference.py`.

A test compares the page with the output of this script, so that it stays up to date. Measurements have a line each, and
those that only a checkout has are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer.main

from kedge.cli.main import app

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
HEAD = """# Command line

Made by `scripts/cli_reference.py` from the commands' own help; `kedge COMMAND --help` says the same.
"""
BENCH = """
## kedge bench

Measurements, each against a baseline in the same run; `kedge bench NAME --help` has their options. In a checkout,
`kedge bench --help` lists more: those behind the [results](../results/README.md).

| measurement | what it does |
|---|---|
"""


def reference() -> str:
    """Return the page: every command with its arguments and options, and a line for each measurement."""
    commands = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    bench = commands.pop("bench").commands
    texts = [_command(name, one) for name, one in commands.items()]
    lines = (f"| `{name}` | {_line(one.help)} |\n" for name, one in bench.items())
    return HEAD + "".join(texts) + BENCH + "".join(lines)


def _command(name: str, command: Any) -> str:
    return f"\n## kedge {name}\n\n{_line(command.help)}\n" + "".join(_parameters(command))


def _parameters(command: Any) -> Iterator[str]:
    rows = [_row(one) for one in command.params if one.name != "help" and not getattr(one, "hidden", False)]
    if rows:
        yield "\n| argument or option | meaning |\n|---|---|\n"
        yield from rows


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.metavar or parameter.name.upper()]
    listed = ", ".join(f"`{name}`" for name in names)
    return f"| {_line(listed)} | {_line(getattr(parameter, 'help', ''))}{_default(parameter)} |\n"


def _default(parameter: Any) -> str:
    """Return what follows the help: the default, unless it is off, or found at run time."""
    value = parameter.default() if callable(parameter.default) else parameter.default
    if parameter.required:
        return " Required."
    if value in (None, False, "", (), []):
        return ""
    return f" Default: {value.value if isinstance(value, Enum) else value}."


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
