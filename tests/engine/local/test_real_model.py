"""The embedded engine on a real model: its tokens are Transformers', wherever KV was before."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.engine.local.engine import LocalEngine
from tests.real import NEW, RealModel, request

BLOCK = 16


def answers(engine: LocalEngine, smollm2: RealModel, count: int = NEW, numbers: range = range(4)) -> list[int]:
    """Ask one after the other, check all tokens, and return how many of each prompt's were in the cache."""
    exact = []
    for number in numbers:
        prompt = smollm2.prompts[number]
        done = engine.submit(request(prompt, count)).result(60)
        assert len(done.tokens) == count and smollm2.greedy[prompt].agrees(done.tokens), f"prompt {number}"
        exact.append(done.receipt.exact)
        engine.wait_idle(60)
    return exact


def common(smollm2: RealModel) -> int:
    """Return how many tokens all prompts begin with."""
    return next(at for at, tokens in enumerate(zip(*smollm2.prompts, strict=False)) if len(set(tokens)) > 1)


def test_a_shared_beginning_and_the_same_prompts_again(smollm2: RealModel) -> None:
    with smollm2.engine() as engine:
        assert answers(engine, smollm2, 1, range(1)) == [0]
        for count, computed in ((NEW, None), (8, BLOCK)):
            streams = [engine.submit(request(prompt, count)) for prompt in smollm2.prompts]
            for prompt, stream in zip(smollm2.prompts, streams, strict=True):
                done = stream.result(60)
                assert len(done.tokens) == count and smollm2.greedy[prompt].agrees(done.tokens)
                assert done.receipt.exact >= (len(prompt) - computed if computed else common(smollm2) - 1)
            engine.wait_idle(60)


@pytest.mark.parametrize("count", [8, pytest.param(NEW, marks=pytest.mark.slow)])
def test_blocks_that_were_on_the_host_come_back(smollm2: RealModel, count: int) -> None:
    """The device holds the longest prompt and its answer, the host all."""
    room = -(-(len(max(smollm2.prompts, key=len)) + NEW) // BLOCK)
    tiers: dict[str, Any] = {"host_memory": f"{4 * room} blocks", "backup_hits": 0, "policy": "lru"}
    with smollm2.engine(kv_memory=f"{room} blocks", block_size=BLOCK, tiers=tiers) as engine:
        answers(engine, smollm2, count=1)
        exact = answers(engine, smollm2, count)
        stats: Any = engine.inspect()["cache"]
        assert all(one > common(smollm2) for one in exact)
        assert stats["host_hit_tokens"] > 0 and stats["evictions"] > 0
        assert stats["failed_copies"] == 0
