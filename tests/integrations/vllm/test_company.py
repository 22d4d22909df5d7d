"""Kedge beside other connectors, in vLLM's `MultiConnector`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.integrations.vllm.plugin.settings import SCHEDULER
from tests.integrations.vllm.conftest import driver, receipt
from tests.integrations.vllm.test_translation import EXTRA, VALUES, hints, tokens

SIZE: dict[str, Any] = {"num_gpu_blocks_override": 20, "max_model_len": 256}
KEDGE = {
    "kv_connector": "KedgeConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kedge.integrations.vllm.plugin.connector",
    "kv_connector_extra_config": {
        **EXTRA, "tiers": {"host_memory": "40 blocks"},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def stock(tiny_llama: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Answers to the cycle, and to prompts with values."""
    with driver(tiny_llama, plugged=False, **SIZE) as plain:
        return plain.cycle(), [plain.answer(tokens(value), count=8) for value in VALUES]


def example(folder: Path) -> dict[str, Any]:
    """It saves the blocks of every request by its tokens, and loads them for the next one with these."""
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}


def offloading(_: Path) -> dict[str, Any]:
    """vLLM's own host tier, with copies by PyTorch."""
    worker = {"spec_name": "PlainOffloading", "spec_module_path": "tests.integrations.vllm.plain_offloading"}
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24, **worker}}


def has_worked(other: Any, folder: Path) -> bool:
    """Whether another connector has done something."""
    from tests.integrations.vllm.plain_offloading import PlainWorker

    return any(folder.iterdir()) if other is example else PlainWorker.stored > 0


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("other", [example, offloading])
def test_beside_another_connector_kv_is_cached_and_not_translated(
    tiny_llama: Path,
    stock: tuple[list[list[int]], list[list[int]]],
    other: Callable[[Path], dict[str, Any]],
    is_first: bool,
    tmp_path: Path,
) -> None:
    from vllm.config import KVTransferConfig

    company = {"kv_role": "kv_both", **other(tmp_path)}
    both = {"connectors": [KEDGE, company] if is_first else [company, KEDGE]}
    config = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=both)
    why = "another KV connector"
    with driver(tiny_llama, plugged=False, kv_transfer_config=config, scheduler_cls=SCHEDULER, **SIZE) as built:
        assert built.cycle() == stock[0]
        for value, expected in zip(VALUES, stock[1], strict=True):
            for _ in range(2):
                output = built.ask(tokens(value), count=8, kedge=hints(value))
                assert list(output.outputs[0].token_ids) == expected
            found = receipt(output)
            assert found["tokens"]["translated"] == 0 and why in found["misses"][0]["reason"]
        connector = built.connector._connectors[0 if is_first else 1]
        assert connector._scheduler.totals()["blocks_loaded"] > 0, "the host tier goes on"
        assert has_worked(other, tmp_path), "and so does the other connector"
        assert built.pool.get_num_free_blocks() == built.pool.num_gpu_blocks - 1
