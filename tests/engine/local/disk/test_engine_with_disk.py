"""The disk tier inside the engine: a restarted server hits what it had, and no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kedge.engine.local.engine import LocalEngine
from kedge.errors import ConfigError
from kedge.types import GenerateRequest, SamplingParams, Segment, Source, TenantId
from tests.engine.local.conftest import engine_of, tiny_model
from tests.engine.local.test_engine import prompt
from tests.engine.local.tiering import AMPLE, BLOCK, OUT, engine_with, expected, figures

LONG = 64
SETTINGS = {"host_blocks": AMPLE, "backup_hits": 0, "policy": "lru"}


def ask(engine: LocalEngine, number: int, tenant: str = "default", check: bool = True) -> Any:
    tokens = prompt(number, LONG)
    request = GenerateRequest((Segment(tokens, "p0"),), SamplingParams(OUT, ignore_eos=True), tenant=TenantId(tenant))
    done = engine.submit(request).result(60)
    if check:
        assert done.tokens == expected(tokens)
    return done.receipt


def written(engine: LocalEngine) -> dict[str, float]:
    """Waits until nothing is to be written; what the disk tier counts."""
    while engine.query(lambda parts: parts.cache.tiers.disk.writing):
        engine.wait_idle(60)
    return figures(engine)["cache"]["disk"]


def test_histories_are_hits_after_a_restart(tmp_path: Path) -> None:
    with engine_with(**SETTINGS, disk_path=tmp_path) as engine:
        for number in range(3):
            assert ask(engine, number).exact == 0
    with engine_with(**SETTINGS, disk_path=tmp_path) as engine:
        for number in range(3):
            receipt = ask(engine, number)
            assert receipt.exact == receipt.tokens(Source.HOST) == LONG - BLOCK
        assert figures(engine)["cache"]["disk"]["read"] > 0
        assert figures(engine)["cache"]["corrupt_blocks"] == 0


def test_what_the_host_evicts_comes_back(tmp_path: Path) -> None:
    with engine_with(**{**SETTINGS, "host_blocks": 12}, disk_path=tmp_path) as engine:
        for number in range(4):
            ask(engine, number)
            written(engine)
        assert [ask(engine, number).exact for number in range(4)] == [LONG - BLOCK] * 4
        assert figures(engine)["cache"]["disk"]["read"] > 0


def test_other_tenants_and_models_find_nothing(tmp_path: Path) -> None:
    with engine_with(**SETTINGS, disk_path=tmp_path) as engine:
        ask(engine, 0)
        written(engine)
    with engine_with(**SETTINGS, disk_path=tmp_path) as engine:
        assert ask(engine, 0, "another").exact == 0
        assert figures(engine)["cache"]["disk_blocks"] > 0
    tiers = {**SETTINGS, "disk_path": tmp_path}
    with engine_of(tiny_model("qwen2"), num_blocks=64, block_size=BLOCK, tiers=tiers) as engine:
        assert figures(engine)["cache"]["disk_blocks"] == 0
        assert ask(engine, 0, check=False).exact == 0


def test_damaged_files_change_no_token(tmp_path: Path) -> None:
    with engine_with(**SETTINGS, disk_path=tmp_path) as engine:
        for number in range(3):
            ask(engine, number)
    for path in tmp_path.glob("*.kv.safetensors"):
        content = bytearray(path.read_bytes())
        content[-2000] ^= 64
        path.write_bytes(content)
    with engine_with(**SETTINGS, disk_path=tmp_path) as engine:
        for number in range(3):
            ask(engine, number)
        assert figures(engine)["cache"]["disk"]["corrupt"] > 0
        assert [ask(engine, number).exact for number in range(3)] == [LONG - BLOCK] * 3


def test_a_cleared_engine_leaves_no_files(tmp_path: Path) -> None:
    with engine_with(**SETTINGS, disk_path=tmp_path) as engine:
        ask(engine, 0)
        written(engine)
        engine.clear()
    assert not list(tmp_path.glob("*.kv.safetensors"))


def test_a_folder_in_use_is_a_bad_setting(tmp_path: Path) -> None:
    with engine_with(**SETTINGS, disk_path=tmp_path), pytest.raises(ConfigError, match="another process"):
        engine_of(tiny_model("llama"), block_size=BLOCK, tiers={**SETTINGS, "disk_path": tmp_path})
