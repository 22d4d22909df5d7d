"""Kedge beside other connectors, in vLLM's `MultiConnector`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.integrations.vllm.conftest import BLOCK, Driver, driver, prompt, receipt  # noqa: E402
from tests.integrations.vllm.test_translation import ANCHORS, VALUES, hints, tokens  # noqa: E402

AGENTS = 6
FIXED = [prompt(4 * BLOCK + 8, 700 + agent) for agent in range(AGENTS)]
SIZE: dict[str, Any] = {"num_gpu_blocks_override": 20, "max_model_len": 256}
KEDGE = {
    "kv_connector": "KedgeConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kedge.integrations.vllm.plugin.connector",
    "kv_connector_extra_config": {
        "planner": {"by_cost": False}, "anchors": ANCHORS, "tiers": {"host_blocks": 40},
    },
}  # fmt: skip


def cycle(built: Driver) -> list[list[int]]:
    """Answers of agents that do not fit the device at once, in two turns."""
    answers = []
    for agent in [*range(AGENTS)] * 2:
        steps = {f"a{other}": (other - agent) % AGENTS for other in range(AGENTS)}
        given = {"run": "r", "agent": f"a{agent}", "fixed_tokens": 4 * BLOCK, "steps": steps}
        answers.append(built.answer(FIXED[agent], count=8, kedge=given))
    return answers


@pytest.fixture(scope="module")
def stock(tiny_llama: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Answers to the cycle, and to prompts with values."""
    with driver(tiny_llama, plugged=False, **SIZE) as plain:
        return cycle(plain), [plain.answer(tokens(value), count=8) for value in VALUES]


@pytest.mark.parametrize("is_first", [True, False])
def test_beside_another_connector_kv_is_cached_and_not_translated(
    tiny_llama: Path, stock: tuple[list[list[int]], list[list[int]]], is_first: bool, tmp_path: Path
) -> None:
    """The other one saves the blocks of every request by its tokens, and loads them for the next one with these."""
    from vllm.config import KVTransferConfig

    extra = {"shared_storage_path": str(tmp_path)}
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    both = {"connectors": [KEDGE, other] if is_first else [other, KEDGE]}
    config = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=both)
    with driver(tiny_llama, plugged=False, kv_transfer_config=config, **SIZE) as built:
        assert cycle(built) == stock[0]
        for value, expected in zip(VALUES, stock[1], strict=True):
            for _ in range(2):
                output = built.ask(tokens(value), count=8, kedge=hints(value))
                assert list(output.outputs[0].token_ids) == expected
            found = receipt(output)
            assert found["tokens"]["translated"] == 0 and "another KV connector" in found["misses"][0]["reason"]
        connector = built.connector.sub_connectors[0 if is_first else 1]
        assert connector._scheduler.totals()["blocks_loaded"] > 0, "the host tier goes on"
        assert any(tmp_path.iterdir()), "and so does the other connector"
        assert built.pool.get_num_free_blocks() == built.pool.num_gpu_blocks - 1
