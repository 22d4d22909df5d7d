"""`VLLMEngine` over a folder: what its processes have learned is there after an orderly stop."""

import time
from pathlib import Path
from typing import Any

import pytest

from kedge.errors import ConfigError
from kedge.guard import DecisionKind
from kedge.integrations.vllm.engine.engine import VLLMEngine
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.settings import EngineSettings, QuotaSettings
from kedge.types import Receipt
from tests.integrations.vllm.conftest import save_tiny_nano
from tests.integrations.vllm.engine.test_guard import PATIENCE, question

CHANGED = DecisionComparison({DecisionKind.FAR: True}, 1.0)
ACME = "acme"
MOST = 1 << 20


def engine(model: Path, state: Path) -> VLLMEngine:
    own = {"max_model_len": 384, "num_gpu_blocks_override": 16, "max_num_seqs": 4}  # prompts evict one another
    settings = EngineSettings(
        backend="vllm",
        anchors={"min_anchors": 4, "max_error": 50.0, "weak_error": 50.0},
        planner={"by_cost": False},
        guard={"mode": "off"},
        vllm=own,
    )
    return VLLMEngine(model, settings, state=state, quotas={ACME: QuotaSettings(anchor_bytes=MOST)})


def ask(built: VLLMEngine, number: int, run: str) -> Receipt:
    """Return the receipt of a call with this question."""
    return built.submit(question(number, run=run, count=2)).result(PATIENCE).receipt


def guard_of(built: VLLMEngine) -> list[dict[str, Any]]:
    """Return the guard's records of all agents."""
    guard: Any = built.inspect()["guard"]
    return list(guard["agents"])


def teach(built: VLLMEngine) -> None:
    """Ask questions, with idle times between them, until those are translated that are not cached."""
    until, translated = time.monotonic() + PATIENCE, 0
    while translated < 4:
        assert time.monotonic() < until, translated
        translated = 0
        for seed in range(10, 17):
            translated += ask(built, seed, f"run-{time.monotonic()}").translated > 0
            time.sleep(0.1)


def test_a_stopped_engine_goes_on_where_it_ended(tmp_path: Path) -> None:
    model, state = save_tiny_nano(tmp_path / "model"), tmp_path / "state"
    with engine(model, state) as built:
        assert built.state == state
        teach(built)
        before = ask(built, 12, "before")
        assert before.translated > 100
        for _ in range(40):
            built._guard.guard.observe(question(12, run="before"), ("q",), CHANGED)
        known = guard_of(built)
        assert known[0]["breaches"] > 0
    with engine(model, state) as built:
        after = ask(built, 12, "after")
        assert (after.computed, after.translated) == (before.computed, before.translated + before.exact)
        assert guard_of(built) == known, "the evidence against an agent outlives a restart"
        built.limit(ACME, QuotaSettings(anchor_bytes=MOST))
        built.limit("other", QuotaSettings())
        with pytest.raises(ConfigError, match="takes quotas at its start only"):
            built.limit(ACME, QuotaSettings(anchor_bytes=2 * MOST))
