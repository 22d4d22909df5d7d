"""`kedge serve --state`: the server keeps what was learned, and nothing else outlives its process."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Self

import httpx
import pytest

from kedge.cli.serve import EXIT_ENGINE_ENDED
from kedge.engine.common.state import saving
from kedge.engine.common.state.files import MANIFEST
from kedge.engine.echo import EchoEngine
from kedge.engine.local.engine import LocalEngine
from kedge.errors import ConfigError
from kedge.server import app
from kedge.server.app import create_app
from kedge.server.tenancy import hashed, load_keys
from kedge.settings import LimitSettings, ServerSettings
from tests.engine.common.state.test_files import damage
from tests.engine.common.state.test_snapshot import ask, engine, files_of
from tests.engine.local.conftest import tiny_model, tiny_tokenizer
from tests.processes import children, is_alive, linux_only
from tests.server.conftest import YAML, Served, serving, wait_until

ROOT = Path(__file__).parents[2]


@contextmanager
def served(built: LocalEngine, folder: Path, interval: float = 60.0) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saving, "SNAPSHOT_SECONDS", interval)
        with serving(built, ServerSettings(state=folder)) as running:
            yield running


def test_snapshots_are_taken_while_it_runs(tmp_path: Path) -> None:
    with engine() as built, served(built, tmp_path, 0.05) as running:
        ask(built, 50)
        wait_until(lambda: (tmp_path / MANIFEST).exists() and b'"pool"' in (tmp_path / MANIFEST).read_bytes())
        text = running.http().get("/metrics").text
        assert snapshots_of(text, "saved") >= 1
        assert "kedge:last_snapshot_timestamp_seconds{" in text


def snapshots_of(metrics: str, status: str) -> float:
    found = re.search(rf'kedge:snapshots_total{{.*status="{status}".*}} (\S+)', metrics)
    return float(found[1]) if found else 0


def test_one_damaged_file_costs_a_server_one_pool(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine() as first, served(first, tmp_path):
        ask(first, 50)
    victim = files_of(tmp_path, "pool")[0]
    damage(victim, "flipped bit")
    with engine() as second, served(second, tmp_path) as running:
        assert second.inspect()["anchors"]["pools"] == 1
        assert snapshots_of(running.http().get("/metrics").text, "damaged") == 1
    assert f"{victim.name} has another content than its name says" in caplog.text
    with engine() as third, served(third, tmp_path):
        assert third.inspect()["anchors"]["pools"] == 1, "the snapshot at the end kept the sound rest"


def test_an_engine_without_state_and_a_folder_that_somebody_else_uses_are_wrong_settings(tmp_path: Path) -> None:
    with engine() as first, served(first, tmp_path), engine() as second:
        with pytest.raises(ConfigError, match="another process"):
            create_app(second, ServerSettings(state=tmp_path))
        with pytest.raises(ConfigError, match="EchoEngine has no state"):
            app.snapshots_of(EchoEngine(), tmp_path, lambda _: None)


def test_a_tenants_limits_reach_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[tenants.a]\nkeys = ["{hashed("k")}"]\nanchor_bytes = "1MiB"\nhost_memory = "2MiB"')
    with engine() as built:
        create_app(built, keys=load_keys(file, f"b:{hashed('l')}", LimitSettings(anchor_bytes=7)))
        limits = built.query(lambda parts: parts.anchors.limits)
        assert limits == {"a": 1 << 20, "b": 7}
        block = built.runner.spec.bytes_per_token * 16
        assert built.query(lambda parts: parts.cache.tiers.limits) == {"a": (2 << 20) // block}
    with pytest.raises(ConfigError, match="cannot bound"):
        create_app(EchoEngine(), keys=load_keys(None, f"b:{hashed('l')}", LimitSettings(anchor_bytes=7)))


# real processes -------------------------------------------------------------------------------------------------------

MORTAL = """
import logging
from kedge.cli import serve
from kedge.cli.main import app
from kedge.engine.echo import EchoEngine
from kedge.workflow.spec import TOOLS
from kedge.workloads.sandbox import run_python

class Mortal(EchoEngine):
    def submit(self, request):
        if "die" in self.tokenizer.decode(request.tokens):
            self.fail(RuntimeError("boom"))
        return super().submit(request)

    def close(self):
        super().close()
        logging.info("the engine is closed")

def hang(answer, inputs):
    run_python("import time; time.sleep(1000)", seconds=1000)

TOOLS["hang"] = "__main__:hang"
serve.HANG_SECONDS = 3.0
serve.open_engine = lambda settings, _: Mortal()
app()"""
HANGS = """
name: hangs
agents: [{id: a, user: "{user_question}", tool: hang, tool_seconds: 1000}]
"""
LIMIT = 300.0
"""Seconds that a process may run"""


class Process:
    """`kedge serve`, run by some code, and its log."""

    def __init__(self, code: str, *args: str, folder: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "KEDGE_API_KEYS": "",
            "KEDGE_ENGINE__PLANNER__BY_COST": "false",  # what is learned here is not to depend on this machine
            "KEDGE_ENGINE__PLANNER__MOVE": "never",  # of answers too, at the first question
        }
        code = f"from kedge.engine.common.state import saving; saving.SNAPSHOT_SECONDS = 0.2\n{code}"
        command = [sys.executable, "-c", code, "serve", *args, "--port", "0", "--log-format", "json"]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder)
        self.watchdog = Timer(LIMIT, self.popen.kill)  # its log ends then, so that no test waits for a line for ever
        self.watchdog.start()
        self.lines: list[str] = []
        self.http = httpx.Client(base_url=re.search(r"http://\S+", self.until("running on http"))[0], timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.watchdog.cancel()
        self.popen.kill()
        self.popen.communicate()

    def until(self, text: str) -> str:
        """Read the log up to a line with this text."""
        assert self.popen.stderr
        for line in self.popen.stderr:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"it ended without {text!r}: {self.lines}")


@linux_only
def test_neither_a_tool_nor_the_code_that_it_runs_keeps_the_process(tmp_path: Path) -> None:
    with Process(MORTAL, "--tools", folder=tmp_path) as running:
        running.http.post("/v1/workflows", content=HANGS, headers=YAML).raise_for_status()
        sleeps = {"inputs": {"user_question": "?"}}
        events = running.http.post("/v1/workflows/hangs/runs", json=sleeps).json()["events"]
        with running.http.stream("GET", events) as told:
            assert any(line == "event: answered" for line in told.iter_lines())
        wait_until(lambda: bool(children(running.popen.pid)))
        codes = children(running.popen.pid)
        assert running.http.post("/v1/completions", json={"prompt": "die"}).json()["error"]["code"] == "engine_closed"
        assert running.http.get("/health").status_code == 503
        assert "boom" in running.until("the engine ended by itself")
        assert running.popen.wait(60) == EXIT_ENGINE_ENDED
        wait_until(lambda: not any(map(is_alive, codes)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_engine_is_closed_before_a_signal_ends_its_server(tmp_path: Path, number: int) -> None:
    """Else vLLM's engine core would go on for ever, with the memory of its GPU, and its last snapshot were lost."""
    with Process(MORTAL, folder=tmp_path) as running:
        running.popen.send_signal(number)
        assert running.until("the engine is closed") and running.popen.wait(60) == -signal.SIGTERM


def test_a_signal_ends_the_first_process_of_a_container_too() -> None:
    """Which the kernel protects from signals of its own, as if they were blocked."""
    blocked = "import signal; from kedge.cli.serve import end_by_signal; signal.pthread_sigmask(0, [15])"
    done = subprocess.run([sys.executable, "-c", f"{blocked}; end_by_signal(15)"], check=False, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM


FLOW = """
name: pair
agents:
  - {id: first, system: You are a solver., user: "Solve this. {user_question} Now answer.", max_tokens: 8}
  - {id: last, system: You end., user: "Q: {user_question} A: {agent_first_current} So:", max_tokens: 8}
"""
SERVE = "from kedge.cli.main import app; app()"


@pytest.mark.slow
def test_a_server_that_is_killed_comes_back_with_its_anchors(tmp_path: Path) -> None:
    model, state = tmp_path / "tiny", tmp_path / "state"
    tiny_model("llama").save_pretrained(model)
    tiny_tokenizer().inner.save_pretrained(model)
    args = (str(model), "--state", str(state))
    with Process(SERVE, *args, folder=tmp_path) as running:
        running.http.post("/v1/workflows", content=FLOW, headers=YAML).raise_for_status()
        for question in ("one and two", "three and four"):
            body = {"inputs": {"user_question": question}, "stream": True, "reuse": "translate"}
            assert "event: finished" in running.http.post("/v1/workflows/pair/runs", json=body).text
        running.until(r"saved 2 pools")
        running.popen.send_signal(signal.SIGKILL)
        assert running.popen.wait(60) == -signal.SIGKILL
    shutil.copytree(state, tmp_path / "copy")
    with Process(SERVE, *args, folder=tmp_path) as running:
        assert any("loaded 2 pools" in line for line in running.lines)
        running.http.post("/v1/workflows", content=FLOW, headers=YAML).raise_for_status()
        with running.http.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}
        ) as answer:
            lines = answer.iter_lines()
            told = [next(lines)]
            running.popen.send_signal(signal.SIGTERM)
            told += [line for line in lines if line]
        assert told[-1] == "data: [DONE]"
        assert running.until(r"saved 2 pools")
        assert running.popen.wait(60) == -signal.SIGTERM
