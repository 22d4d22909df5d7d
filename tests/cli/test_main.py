"""The app: its commands, the version, and errors as one clean line."""

from __future__ import annotations

import subprocess
import sys

import typer
from typer.testing import CliRunner

from kedge import __version__
from kedge.cli.main import EXIT_BAD_INPUT, app
from kedge.errors import ConfigError

cli = CliRunner()


def failing(error: Exception) -> typer.Typer:
    """An app of the same kind whose command raises."""
    broken = typer.Typer(cls=app.info.cls)

    @broken.callback()
    def _group() -> None: ...

    @broken.command()
    def fail() -> None:
        raise error

    return broken


def test_version() -> None:
    result = cli.invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"kedge {__version__}\n")


def test_an_error_is_one_line_without_a_traceback() -> None:
    error = ConfigError("block_size", "x", "is\nno [number]")
    error.add_note("in kedge.toml")
    result = cli.invoke(failing(error), ["fail"])
    assert result.exit_code == EXIT_BAD_INPUT
    assert result.stderr == "error: block_size='x': is no [number] (in kedge.toml)\n"
    assert result.stdout == ""


def test_a_bug_is_not_hidden() -> None:
    bug = ZeroDivisionError("a bug")
    assert cli.invoke(failing(bug), ["fail"]).exception is bug


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from kedge.cli.main import app; app(['--help'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60).returncode == 0
