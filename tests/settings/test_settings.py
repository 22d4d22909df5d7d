"""File < environment < flags, and every bad value named."""

import os
from pathlib import Path

import pytest

from kedge.errors import ConfigError
from kedge.settings import EngineSettings, Settings, TierSettings
from kedge.types import ReuseMode


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("KEDGE_")]:
        monkeypatch.delenv(name)


def toml(text: str, name: str = "kedge.toml") -> Path:
    Path(name).write_text(text, encoding="utf-8")
    return Path(name)


def test_later_layers_win(monkeypatch: pytest.MonkeyPatch) -> None:
    toml("[server]\nreuse = 'off'\n[engine]\nblock_size = 1\nmax_running = 1\nmax_batch_tokens = 1\n")
    monkeypatch.setenv("KEDGE_ENGINE__MAX_RUNNING", "2")
    monkeypatch.setenv("KEDGE_ENGINE__MAX_BATCH_TOKENS", "2")
    settings = Settings.load(engine={"max_batch_tokens": 3})
    assert settings.server.reuse is ReuseMode.OFF
    assert (settings.engine.block_size, settings.engine.max_running, settings.engine.max_batch_tokens) == (1, 2, 3)


def test_a_flag_that_was_not_given_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_SERVER__REUSE", "exact")
    settings = Settings.load(server={"reuse": None}, engine={"model": None, "device": "cpu"})
    assert (settings.server.reuse, settings.engine.model, settings.engine.device) == (ReuseMode.EXACT, None, "cpu")


def test_a_named_file_replaces_the_default_one() -> None:
    toml("[server]\nreuse = 'off'")
    assert Settings.load(toml("[engine.anchors]\ncapacity = 7", "other.toml")).engine.anchors.capacity == 7
    assert Settings.load(Path("other.toml")).server.reuse is None


@pytest.mark.parametrize(("text", "size"), [("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("4096", 4096), (4096, 4096)])
def test_sizes_may_have_units(text: object, size: int) -> None:
    assert Settings.load(engine={"kv_memory": text}).engine.kv_memory == size


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ({"reuse": "maybe"}, "reuse", "maybe"),
        ({"engine": {"block_size": 0}}, "engine.block_size", 0),
        ({"engine": {"kv_memory": "lots"}}, "engine.kv_memory", "lots"),
        ({"engine": {"anchors": {"max_bytes": "3 lots"}}}, "engine.anchors.max_bytes", "3 lots"),
        ({"engine": {"device": "tpu"}}, "engine.device", "tpu"),
        ({"engine": {"guard": {"fidelity": "best"}}}, "engine.guard.fidelity", "best"),
        ({"engine": {"tiers": {"host_memory": "lots"}}}, "engine.tiers.host_memory", "lots"),
        ({"engine": {"anchors": {"capacity": True}}}, "engine.anchors.capacity", True),
        ({"engine": {"anchors": {"weak_error": 0.0}}}, "engine.anchors.weak_error", 0.0),
        ({"engine": {"kv_memory": 10**20}}, "engine.kv_memory", 10**20),
        ({"engine": {"kv_memory": f"{10**20} blocks"}}, "engine.kv_memory", f"{10**20} blocks"),
        ({"engine": {"guard": {"fidelity": 10**400}}}, "engine.guard.fidelity", "an integer of 1329 bits"),
        ({"engine": {"blocksize": 16}}, "engine.blocksize", 16),
        ({"engine": 3}, "engine", 3),
        ({"server": {"model_name": " "}}, "server.model_name", " "),
        ({"server": {"allowed_hosts": "kedge, kedge:8000"}}, "server.allowed_hosts.1", "kedge:8000"),
        ({"server": {"tool_call_parser": "pythonic"}}, "server.tool_call_parser", "pythonic"),
        ({"server": {"max_in_flight": 0}}, "server.max_in_flight", 0),
        ({"server": {"limits": {"hints_per_minute": True}}}, "server.limits.hints_per_minute", True),
        ({"colour": "red"}, "colour", "red"),
    ],
)
def test_a_bad_value_is_named(flags: dict[str, object], key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.load(**flags)
    assert (caught.value.key, caught.value.value) == (key, value)
    assert str(caught.value).startswith(f"{key}={caught.value.value!r}: ")
    assert value not in ("lots", "3 lots") or caught.value.why == "must be a size such as 2GiB"


def test_all_bad_keys_are_named() -> None:
    with pytest.raises(ConfigError, match=r"engine\.block_size=0.*also wrong: engine\.max_running"):
        EngineSettings(block_size=0, max_running=0)


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("KEDGE_SERVER__REUSE", "no", "server.reuse"),
        ("KEDGE_ENGINE__BLOCK_SIZE", "x", "engine.block_size"),
        ("KEDGE_ENGINE__NOTHING", "1", "engine.nothing"),
        ("KEDGE_SERVER__LIMITS", "5", "server.limits"),
        ("KEDGE_ENGINE", "{'block_size': 3}", "engine"),
        ("KEDGE_ENGINE_BLOCK_SIZE", "3", "KEDGE_ENGINE_BLOCK_SIZE"),
        ("KEDGE_ENGINE_ANCHORS__CAPACITY", "3", "KEDGE_ENGINE_ANCHORS__CAPACITY"),
    ],
)
def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, key: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        Settings.load(server={"limits": {}})
    assert (caught.value.key, caught.value.value) == (key, value)


def test_foreign_variables_are_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KEDGE_SERVER_PORT", "tcp://10.0.0.1:8000")  # of Kubernetes
    assert Settings.load() == Settings()


@pytest.mark.parametrize("content", [b"reuse = ", b"\xff\xfe", b"reuse = " + b"[" * 5000, b"reuse = " + b"1" * 5000])
def test_a_broken_file_is_named(content: bytes) -> None:
    Path("kedge.toml").write_bytes(content)
    for file, name in ((None, "kedge"), (Path("none.toml"), "none")):
        with pytest.raises(ConfigError, match=rf"file='{name}\.toml'"):
            Settings.load(file)


@pytest.mark.parametrize(
    ("text", "found"),
    [("[engine]\nblock_size = 'x'\n", r"engine\.block_size='x'"), ("engine = 'big'\n", "engine='big'")],
)
def test_what_the_file_gets_wrong_is_not_hidden_by_a_flag(text: str, found: str) -> None:
    toml(text)
    with pytest.raises(ConfigError, match=found):
        Settings.load(engine={"max_running": 2})


def test_a_server_in_the_file_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    toml("[server]\nport = 9\nlog_format = 'json'\n[server.limits]\nanchor_bytes = '2MiB'\n")
    monkeypatch.setenv("KEDGE_SERVER__STATE", "state")
    monkeypatch.setenv("KEDGE_SERVER__ALLOWED_HOSTS", "kedge, kedge.example 10.0.0.1")
    monkeypatch.setenv("KEDGE_SERVER__LIMITS__REQUESTS_IN_FLIGHT", "5")
    server = Settings.load(server={"port": 10, "host": None}).server
    assert (server.host, server.port, server.log_format, server.state) == ("127.0.0.1", 10, "json", Path("state"))
    assert server.allowed_hosts == ("kedge", "kedge.example", "10.0.0.1")
    assert (server.limits.requests_in_flight, server.limits.anchor_bytes) == (5, 2 << 20)


def test_the_host_tier_is_sized_by_blocks_or_by_memory() -> None:
    assert TierSettings().host_pool_size(100) == 0
    assert TierSettings(host_memory=1024).host_pool_size(100) == 10
    assert TierSettings(host_memory="3 blocks").host_pool_size(100) == 3
    assert TierSettings(host_memory="0 blocks").host_pool_size(100) == 0
    with pytest.raises(ConfigError, match=r"engine\.tiers\.host_memory=10: too small: a block has 100 bytes"):
        TierSettings(host_memory=10).host_pool_size(100)
