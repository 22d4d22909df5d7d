"""An engine in a process of its own on a real model: Transformers' tokens, and a shared beginning computed once."""

from __future__ import annotations

from functools import partial

from kedge.engine.local.engine import LocalEngine
from kedge.engine.process.engine import ProcessEngine
from kedge.models import SMOLLM2
from kedge.settings import EngineSettings
from tests.real import NEW, RealModel, request


def test_its_tokens_are_those_of_transformers(smollm2: RealModel) -> None:
    config = EngineSettings(dtype="float32", device="cpu", kv_memory="64 blocks", planner={"by_cost": False})
    with ProcessEngine(partial(LocalEngine, SMOLLM2, config)) as engine:
        engine.submit(request(smollm2.prompts[0], 1)).result(60)
        for stream, prompt in [(engine.submit(request(prompt)), prompt) for prompt in smollm2.prompts]:
            done = stream.result(60)
            assert len(done.tokens) == NEW and smollm2.greedy[prompt].agrees(done.tokens)
            assert done.receipt.exact > 0
            assert done.text == smollm2.loaded[1].decode(done.tokens)
