"""Commands, as a terminal runs them."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kedge.cli.main import EXIT_BAD_INPUT, app

WIDTH = 80


def kedge(*args: str, width: int = 200, **env: str | None) -> Any:
    """Run a command, without anybody's API keys."""
    return CliRunner().invoke(app, args, env={"COLUMNS": str(width), "KEDGE_API_KEYS": "", **env})


def measured(folder: Path, *args: str) -> tuple[Any, str]:
    """Return the file that a measurement writes, and what it shows, which fits 80 columns."""
    file = folder / "measured.json"
    done = kedge(*args, "--json", str(file), width=WIDTH)
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stdout.splitlines() if str(file) not in line]
    assert max(map(len, lines)) <= WIDTH and "…" not in done.stdout
    return json.loads(file.read_text(encoding="utf-8")), done.stdout


def assert_refused(message: str, *args: str) -> None:
    """Check that a command says on one line what is wrong with its input, beginning so."""
    done = kedge(*args)
    assert (done.exit_code, done.stderr.count("\n")) == (EXIT_BAD_INPUT, 1), done.output
    assert done.stderr.startswith(f"error: {message}")
