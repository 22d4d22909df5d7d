"""`VLLMEngine` over a folder: what its processes have learned is there after an orderly stop."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.engine.base import Limiting, Quota, SelfSaving  # noqa: E402
from kedge.engine.common.model_folder import model_path  # noqa: E402
from kedge.errors import ConfigError  # noqa: E402
from kedge.integrations.vllm.engine.engine import VLLMEngine  # noqa: E402
from kedge.integrations.vllm.engine.options import KeepingOptions  # noqa: E402
from kedge.settings import EngineSettings  # noqa: E402
from kedge.types import (  # noqa: E402
    AgentId,
    GenerateRequest,
    ReuseMode,
    RunId,
    SampleId,
    SamplingParams,
    Segment,
    TenantId,
    ValueKind,
    WorkflowId,
)
from tests.integrations.vllm.conftest import prompt, save_tiny_llama  # noqa: E402

pytestmark = pytest.mark.slow

PATIENCE = 120.0
HEAD, TAIL = tuple(prompt(41, 1)), tuple(prompt(70, 2))
LEAD_IN, STAND_IN = tuple(prompt(5, 3)), tuple(prompt(4, 4))
NANO_SHAPE = {"vocab_size": 1152, "bos_token_id": 0, "eos_token_id": 1}
ACME = TenantId("acme")


def engine(model: Path, state: Path) -> VLLMEngine:
    own = {"max_model_len": 512, "num_gpu_blocks_override": 64, "max_num_seqs": 8}
    settings = EngineSettings(
        backend="vllm",
        anchors={"min_anchors": 4, "max_error": 50.0, "match_layer": 1},
        planner={"by_cost": False},
        guard={"mode": "off"},
        vllm=own,
    )
    return VLLMEngine(model, settings, keeping=KeepingOptions(state, 3600.0, {ACME: Quota(anchors=3)}))


def translated(built: VLLMEngine, seed: int, run: str) -> int:
    """Return how many tokens of a call with this question were translated."""
    value = Segment(tuple(prompt(60, seed)), "q", SampleId(ValueKind.INPUT, "q"), LEAD_IN, STAND_IN)
    request = GenerateRequest(
        (Segment(HEAD, "p0"), value, Segment(TAIL, "p1")),
        reuse=ReuseMode.TRANSLATE,
        workflow=WorkflowId("w"),
        run=RunId(run),
        agent=AgentId("a"),
        sampling=SamplingParams(max_tokens=2, ignore_eos=True),
    )
    return built.submit(request).result(PATIENCE).receipt.translated


def taught(built: VLLMEngine) -> int:
    """Ask questions until they are translated as they will be, in idle times between them. Returns how much that is."""
    until, counts = time.monotonic() + PATIENCE, [0, 0]
    while not counts[-1] or counts[-1] != counts[-2]:
        assert time.monotonic() < until, counts
        for seed in range(10, 17):
            translated(built, seed, f"run-{len(counts)}-{seed}")
            time.sleep(0.1)
        counts.append(translated(built, 12, f"again-{len(counts)}"))
    return counts[-1]


def test_a_stopped_engine_goes_on_where_it_ended(tmp_path: Path) -> None:
    model, state = save_tiny_llama(tmp_path / "model", **NANO_SHAPE), tmp_path / "state"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_path(None) / name, model)
    with engine(model, state) as built:
        assert isinstance(built, SelfSaving) and built.state == state
        before = taught(built)
    with engine(model, state) as built:
        assert translated(built, 12, "after") == before
        assert isinstance(built, Limiting)
        built.limit(ACME, Quota(anchors=3))
        built.limit(TenantId("other"), Quota())
        with pytest.raises(ConfigError, match="takes quotas at its start only"):
            built.limit(ACME, Quota(anchors=4))
