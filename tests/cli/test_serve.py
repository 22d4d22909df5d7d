"""`kedge serve`: what it makes of its options, without opening a port."""

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.cli import serve as command
from kedge.engine.common.folder_lock import lock_folder
from kedge.engine.common.state.files import MANIFEST, saved_dtype
from kedge.engine.echo import EchoEngine
from kedge.server.tenancy import hashed, load_keys
from kedge.settings import LimitSettings, Settings
from tests.cli.commands import assert_refused, kedge, shown


@pytest.fixture
def listened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[Any, ...]]]:
    monkeypatch.chdir(tmp_path)
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(command, "open_engine", lambda *_: EchoEngine())
    monkeypatch.setattr(command, "require_free_port", lambda *_: None)
    monkeypatch.setattr(command, "_listen", lambda *args: calls.append(args))
    yield calls


def test_options_reach_the_server(listened: list[tuple[Any, ...]]) -> None:
    asked = "--port 9 --reuse off --max-tokens 7 --tokens-per-minute 5 --requests-in-flight 2 --tools"
    shown("serve", "some/model", *asked.split(), "--allowed-host", "kedge", "--allowed-host", "::1")
    _, config, keys = listened[0]
    assert (config.model_name, config.reuse, config.default_max_tokens, config.tools) == ("model", "off", 7, True)
    assert config.limits == LimitSettings(requests_in_flight=2, tokens_per_minute=5)
    assert (keys.is_open, config.port) == (True, 9)
    assert (config.host, config.allowed_hosts) == ("127.0.0.1", ("kedge", "::1"))


def test_an_open_address_is_warned_of(listened: list[tuple[Any, ...]]) -> None:
    told = kedge("serve", "--host", "0.0.0.0", "--log-format", "json").stderr.splitlines()
    assert [json.loads(line)["message"][:12] for line in told] == ["no API keys:", "no host name"]
    assert listened[0][1].tool_call_parser is None
    assert (listened[0][1].model_name, listened[0][1].tools) == (None, False)
    flags = ("--tool-call-parser", "hermes", "--allowed-host", "kedge")
    assert not kedge("serve", "--host", "0.0.0.0", *flags, KEDGE_API_KEYS=f"a:{hashed('k')}").stderr
    assert listened[1][1].tool_call_parser == "hermes"
    assert not listened[1][2].is_open


@pytest.mark.parametrize("name", ["acme", "a.b", "*"])
def test_a_new_key_is_one_that_its_own_lines_let_in(tmp_path: Path, name: str) -> None:
    result = kedge("serve", "--new-key", name)
    key, lines = re.search(r"once: (\S+)\n\n(.*)", result.output, re.DOTALL).groups()
    file = tmp_path / "keys.toml"
    file.write_text(lines)
    assert load_keys(file, None, LimitSettings()).of_headers({"authorization": f"Bearer {key}"}).id == name
    assert key not in lines


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--new-key", "acme corp"], "--new-key='acme corp': must have 1 to 64 letters"),
        (["--new-key", "a,b"], "--new-key='a,b'"),
        (["--device", "tpu"], "engine.device='tpu'"),
        (["--allowed-host", "kedge:8000"], "server.allowed_hosts.0='kedge:8000'"),
        (["--tool-call-parser", "guess"], "server.tool_call_parser='guess'"),
    ],
)
def test_bad_input_is_one_line(listened: list[tuple[Any, ...]], args: list[str], message: str) -> None:
    assert_refused(message, "serve", *args)
    assert not listened


def test_auto_is_the_dtype_of_what_was_saved(tmp_path: Path) -> None:
    server, keys = {"state": tmp_path, "engine_process": False}, load_keys(None, None, LimitSettings())
    for dtype in ("bfloat16", "auto"):
        with command.open_engine(Settings(engine={"dtype": dtype}, server=server), keys) as engine:
            assert engine.inspect()["dtype"] == "bfloat16"
            engine.save(tmp_path)
            engine.load(tmp_path)
    assert saved_dtype(tmp_path / MANIFEST) is None, "a folder that cannot be read is told when it is opened"


def test_a_taken_port_is_told_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "open_engine", lambda *_: pytest.fail("the model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = f"server.port={port}: cannot listen on %s: Address already in use\n"
        assert_refused(wrong % "127.0.0.1", "serve", "--port", str(port))
        found = [(socket.AF_INET, 0, 0, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        assert_refused(wrong % "localhost", "serve", "--host", "localhost", "--port", str(port))


def test_a_used_folder_is_told_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "open_engine", lambda *_: pytest.fail("the model was loaded"))
    for folder in (tmp_path / "replica-0" / "rank-0", tmp_path):
        used = lock_folder(folder, "state")
        assert_refused(f"server.state='{folder}': another", "serve", "--port", "0", "--state", str(tmp_path))
        os.close(used)
    file = str(tmp_path / "lock")
    assert_refused(f"server.state='{file}': cannot be used", "serve", "--port", "0", "--state", file)
