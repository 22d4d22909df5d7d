"""Commands, as a terminal runs them."""

import json
import logging
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kedge.cli.main import EXIT_BAD_INPUT, app

WIDTH = 80


def kedge(*args: str, width: int = 200, **env: str | None) -> Any:
    """Run a command, without anybody's API keys. What it makes of the log ends with it."""
    root, before = logging.getLogger(), (logging.getLogger().handlers[:], logging.getLogger().level)
    try:
        return CliRunner().invoke(app, args, env={"COLUMNS": str(width), "KEDGE_API_KEYS": "", **env})
    finally:
        root.handlers[:], root.level = before


def shown(*args: str, **more: Any) -> str:
    """Return what a command shows that must succeed."""
    done = kedge(*args, **more)
    assert done.exit_code == 0, done.output
    return str(done.stdout)


def measured(folder: Path, *args: str) -> tuple[Any, str]:
    """Return the file that a measurement writes, and what it shows, which fits 80 columns."""
    file = folder / "measured.json"
    text = shown(*args, "--json", str(file), width=WIDTH)
    assert max(len(line) for line in text.splitlines() if str(file) not in line) <= WIDTH and "…" not in text
    return json.loads(file.read_text(encoding="utf-8")), text


def assert_refused(message: str, *args: str) -> None:
    """Check that a command says on one line what is wrong with its input, beginning so."""
    done = kedge(*args)
    assert (done.exit_code, done.stderr.count("\n")) == (EXIT_BAD_INPUT, 1), done.output
    assert done.stderr.startswith(f"error: {message}")
