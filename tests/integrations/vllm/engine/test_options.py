"""Arguments of vLLM and the plug-in from `EngineSettings`, and refused ones. No vLLM is needed."""

import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from kedge.errors import ConfigError
from kedge.integrations.vllm.engine import options
from kedge.integrations.vllm.engine.options import FOREIGN, copy_dtype, refuse_foreign, require_vllm, vllm_arguments
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.settings import EngineSettings, QuotaSettings, TierSettings
from tests.cli.commands import kedge

TYPES = {
    "model": str, "dtype": Literal["auto", "float32"], "max_model_len": int, "block_size": int, "odd": "OnlyVLLMKnows",
    "data_parallel_size": int, "_api_process_count": int,
}  # fmt: skip
Arguments = make_dataclass("Arguments", TYPES.items())
"""As vLLM's `AsyncEngineArgs`"""


def arguments(is_cpu: bool = True, **own: Any) -> dict[str, Any]:
    return vllm_arguments(EngineSettings(backend="vllm", vllm=own), Path("m"), Arguments, is_cpu=is_cpu)


def test_vllms_own_arguments_reach_it_over_the_defaults() -> None:
    built = arguments(max_model_len="512", block_size=64)
    assert (built["max_model_len"], built["block_size"], built["dtype"], built["model"]) == (512, 64, "float32", "m")
    assert built["enable_prefix_caching"] is True
    assert "dtype" not in arguments(is_cpu=False)
    assert arguments(odd=[1])["odd"] == [1], "what only vLLM can check is passed on"


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"max_modl_len": 5}, "engine.vllm.max_modl_len=5: vLLM has no such"),
        ({"_api_process_count": 5}, "engine.vllm._api_process_count=5: vLLM has no such"),
        ({"max_model_len": "many"}, "engine.vllm.max_model_len='many': Input should be a valid integer"),
        ({"dtype": "float99"}, "engine.vllm.dtype='float99'"),
        ({"model": "x"}, "engine.vllm.model='x': Kedge sets it"),
        ({"data_parallel_size": 2}, "engine.vllm.data_parallel_size=2: one server has one replica"),
    ],
)
def test_bad_arguments_are_named(own: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arguments(**own)


def test_a_gguf_file_is_converted_to_the_dtype_that_vllm_computes_in() -> None:
    def asked(is_cpu: bool = True, **own: Any) -> str:
        return copy_dtype(EngineSettings(backend="vllm", vllm=own), is_cpu=is_cpu)

    assert (asked(), asked(is_cpu=False), asked(dtype="auto")) == ("float32", "bfloat16", "bfloat16")
    assert (asked(dtype="half"), asked(dtype="float"), asked(dtype="odd")) == ("float16", "float32", "bfloat16")


def test_settings_without_a_meaning_are_refused_unless_left_at_their_defaults() -> None:
    refuse_foreign(EngineSettings(backend="vllm", tiers=TierSettings(host_memory="5 blocks")))
    for section, names in FOREIGN.items():
        owner = type(getattr(EngineSettings(), section)) if section else EngineSettings
        for name in names:
            value = getattr(owner(), name)
            given = {section: {name: value}} if section else {name: value}
            key = f"engine.{section}.{name}" if section else f"engine.{name}"
            with pytest.raises(ConfigError, match=f"^{key}="):
                refuse_foreign(EngineSettings(backend="vllm", **given))


def test_without_vllm_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"engine.backend='vllm': is not installed: pip install 'kedge\[vllm\]'"):
        require_vllm()


# kedge serve ----------------------------------------------------------------------------------------------------------

KEYS = '[tenants.acme]\nanchor_bytes = 5\nhost_memory = "1MiB"\nkeys = ["sha256:' + "0" * 64 + '"]\n'


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--engine", "other"], "engine.backend='other'"),
        (["--engine", "vllm", "--device", "cpu"], "engine.device='cpu': vLLM runs on what it was built for"),
        (["--config", "kedge.toml"], "engine.vllm={"),
    ],
)
def test_serve_refuses_before_anything_is_loaded(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("fastapi")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    if "--config" in args:
        Path("kedge.toml").write_text("[engine.vllm]\nmax_model_len = 512\n")
    result = kedge("serve", "--port", "0", *args)
    assert (result.exit_code, result.stderr.splitlines()[-1][: len(message) + 7]) == (2, f"error: {message}")


def test_serve_gives_vllm_its_folder_and_the_quotas_of_tenants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    monkeypatch.chdir(tmp_path)
    Path("keys.toml").write_text(KEYS)
    seen: list[dict[str, Any]] = []

    class Started(Exception):
        pass

    def start(config: EngineSettings, **given: Any) -> None:  # noqa: ARG001 (as the engine has it)
        seen.append(given)
        raise Started

    monkeypatch.setattr("kedge.integrations.vllm.engine.engine.VLLMEngine", start)
    result = kedge("serve", "--port", "0", "--engine", "vllm", "--state", "kept", "--api-keys", "keys.toml")
    assert isinstance(result.exception, Started)
    assert seen == [{"state": Path("kept"), "quotas": {"acme": QuotaSettings(anchor_bytes=5, host_memory=1 << 20)}}]
    found = PluginSettings.model_validate(options.plugin_settings(EngineSettings(backend="vllm"), **seen[0]))
    assert found.state == tmp_path / "kept"
    config = EngineSettings(backend="vllm", tiers={"host_memory": "5 blocks"}, anchors={"capacity": 3})
    read = PluginSettings.model_validate(options.plugin_settings(config, None, {}))
    assert (read.tiers.host_memory, read.anchors.capacity) == ("5 blocks", 3)
    assert found.quotas == {"acme": QuotaSettings(anchor_bytes=5, host_memory=1 << 20)}
