"""vLLM with the plug-in on a real model: Transformers' tokens, from its own cache and from the plug-in's host tier."""

from collections.abc import Iterator

import pytest

from kedge.integrations.vllm.engine.engine import VLLMEngine
from kedge.models import SMOLLM2
from kedge.settings import EngineSettings
from kedge.types import Source
from tests.real import NEW, RealModel, in_ci, missing, request

PATIENCE = 120.0


def test_ci_has_the_real_model_beside_vllm() -> None:
    assert not (in_ci() and missing()), missing()


@pytest.fixture(scope="module")
def engine(smollm2: RealModel) -> Iterator[VLLMEngine]:  # noqa: ARG001 (it skips)
    own = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 9, "max_num_seqs": 4, "block_size": 32}
    config = EngineSettings(
        backend="vllm", tiers={"host_memory": "64 blocks"}, planner={"by_cost": False},
        guard={"mode": "off"}, vllm=own,
    )  # fmt: skip
    with VLLMEngine(SMOLLM2, config) as built:
        yield built


def test_its_tokens_are_those_of_transformers(engine: VLLMEngine, smollm2: RealModel) -> None:
    """Ask twice: the device holds one prompt or two, so that the second time KV comes from the host."""
    sources = set()
    for count in (2, NEW):
        for prompt in smollm2.prompts:
            done = engine.submit(request(prompt, count)).result(PATIENCE)
            assert len(done.tokens) == count and smollm2.greedy[prompt].agrees(done.tokens)
            sources |= {span.source for span in done.receipt.spans}
    assert sources == {Source.COMPUTED, Source.DEVICE, Source.HOST}
