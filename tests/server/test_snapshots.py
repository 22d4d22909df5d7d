"""`kedge serve --state`: the server keeps what was learned, and goes on without where it cannot."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kedge.engine.common.state import saving
from kedge.engine.common.state.files import MANIFEST
from kedge.engine.echo import EchoEngine
from kedge.engine.local.engine import LocalEngine
from kedge.errors import ConfigError
from kedge.server import app
from kedge.server.app import create_app
from kedge.settings import ServerSettings
from tests.engine.common.state.test_snapshot import ask, engine, files_of
from tests.engine.common.state_helpers import change, damage, record_files
from tests.engine.local.conftest import tiny_model
from tests.server.conftest import YAML, Served, serving, wait_until
from tests.server.test_failure import process


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


def test_a_server_starts_whatever_is_damaged(tmp_path: Path) -> None:
    with engine() as first, served(first, tmp_path):
        ask(first, 50)
    for file in [*record_files(tmp_path), tmp_path / MANIFEST]:
        damage(file, "random")
    with engine() as second, served(second, tmp_path) as running:
        assert second.inspect()["anchors"]["pools"] == 0
        assert running.http().get("/ready").status_code == 200
        ask(second, 50)
    with engine() as third, served(third, tmp_path) as running:
        assert third.inspect()["anchors"]["pools"] == 2
        assert snapshots_of(running.http().get("/metrics").text, "damaged") == 0


def test_state_of_another_model_is_refused_and_moved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine() as first, served(first, tmp_path):
        ask(first, 50)
    kept = {file.name for file in record_files(tmp_path)}
    change(tmp_path / MANIFEST, identity="another model")
    with engine() as second, served(second, tmp_path) as running:
        assert second.inspect()["anchors"]["pools"] == 0
        assert snapshots_of(running.http().get("/metrics").text, "refused") == 1
    assert "the saved state is refused" in caplog.text
    assert {file.name for file in record_files(tmp_path / "refused-1")} == kept


def test_a_disk_that_fails_ends_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine() as built, served(built, tmp_path, 0.05) as running:
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        ask(built, 50)
        wait_until(lambda: "No space left" in caplog.text)
        monkeypatch.undo()
        assert 'status="failed"' in running.http().get("/metrics").text
        assert running.http().get("/ready").status_code == 200
    with engine() as second, served(second, tmp_path):
        assert second.inspect()["anchors"]["pools"] == 2, "the last snapshot was a good one again"


def test_an_engine_without_state_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="EchoEngine has no state"):
        app.snapshots_of(EchoEngine(), tmp_path, lambda _: None)


def test_a_folder_that_cannot_be_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with engine() as built:
        snapshots = app.snapshots_of(built, tmp_path / "file" / "below", lambda _: None)
        with pytest.raises(ConfigError, match=r"server\.state"):
            snapshots.load()


def test_a_folder_that_somebody_else_uses_is_a_wrong_setting(tmp_path: Path) -> None:
    with (
        engine() as first,
        served(first, tmp_path),
        engine() as second,
        pytest.raises(ConfigError, match="another process"),
    ):
        create_app(second, ServerSettings(state=tmp_path))


def test_a_tenants_limits_reach_the_engine(tmp_path: Path) -> None:
    from kedge.server.tenancy import hashed, load_keys
    from kedge.settings import LimitSettings

    file = tmp_path / "keys.toml"
    file.write_text(f'[tenants.a]\nkeys = ["{hashed("k")}"]\nanchor_bytes = "1MiB"\nhost_memory = "2MiB"')
    with engine() as built:
        create_app(built, keys=load_keys(file, f"b:{hashed('l')}", LimitSettings(anchor_bytes=7)))
        limits = built.query(lambda parts: parts.learned[0].limits)
        assert limits == {"a": 1 << 20, "b": 7}
        block = built.runner.spec.bytes_per_token * 16
        assert built.query(lambda parts: parts.cache.tiers.limits) == {"a": (2 << 20) // block}
    with pytest.raises(ConfigError, match="cannot bound"):
        create_app(EchoEngine(), keys=load_keys(None, f"b:{hashed('l')}", LimitSettings(anchor_bytes=7)))


# real processes -------------------------------------------------------------------------------------------------------

FLOW = """
name: pair
agents:
  - {id: first, system: You are a solver., user: "Solve this. {user_question} Now answer.", max_tokens: 8}
  - {id: last, system: You end., user: "Q: {user_question} A: {agent_first_current} So:", max_tokens: 8}
"""


SERVE = "from kedge.cli.main import app; app()"


def run_flow(http: httpx.Client, question: str) -> list[dict[str, object]]:
    body = {"inputs": {"user_question": question}, "stream": True, "reuse": "translate"}
    lines = http.post("/v1/workflows/pair/runs", json=body).text.splitlines()
    done = json.loads(next(line for line in reversed(lines) if line.startswith("data: "))[6:])
    return [agent["receipt"] for agent in done["agents"]]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.local.conftest import tiny_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().inner.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_server_that_is_killed_comes_back_with_its_anchors(model_folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    args = (str(model_folder), "--state", str(state))
    with process(SERVE, *args, folder=tmp_path) as running:
        running.http.post("/v1/workflows", content=FLOW, headers=YAML).raise_for_status()
        for question in ("one and two", "three and four"):
            run_flow(running.http, question)
        running.until(r"saved 2 pools")
        running.popen.send_signal(signal.SIGKILL)
        assert running.popen.wait(60) == -signal.SIGKILL
    shutil.copytree(state, tmp_path / "copy")
    with process(SERVE, *args, folder=tmp_path) as running:
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
