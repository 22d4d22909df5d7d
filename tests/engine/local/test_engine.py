"""The embedded engine against Transformers itself."""

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kedge.engine.local.attention.paged import Batch
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import ForwardFailed
from kedge.settings import TierSettings
from kedge.types import GenerateRequest, ReuseMode, SamplingParams, Segment
from tests.engine.local.conftest import DEVICE, FAMILIES, at_rest, engine_of, served, tiny_model
from tests.real import NEW, RealModel


def prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(256) for _ in range(length))


def request(tokens: tuple[int, ...], reuse: ReuseMode = ReuseMode.EXACT, **sampling: object) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **sampling})
    return GenerateRequest((Segment(tokens, "p0"),), params, reuse)


def greedy(model: PreTrainedModel, tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Transformers' own greedy continuation."""
    model.set_attn_implementation("eager")
    ids = torch.tensor([tokens], device=model.device)
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    model.set_attn_implementation("kedge")
    return tuple(out[0, len(tokens) :].tolist())


SIZES = (5, 70, 200)
NARROW = {"kv_memory": "32 blocks", "tiers": TierSettings(host_memory="200 blocks", backup_hits=0)}
ON_GPU = DEVICE.type == "cuda"


@pytest.mark.parametrize(
    ("family", "room"),
    [
        *(pytest.param(one, {}, id=one) for one in FAMILIES),
        *(pytest.param(one, NARROW, id=f"{one}-tiers") for one in (FAMILIES if ON_GPU else ["llama"])),
    ],
)
def test_every_family_continues_as_transformers_does(family: str, room: dict[str, object]) -> None:
    """From the second time on with KV of the cache, be it on the host; on a GPU with graphs."""
    model = tiny_model(family).to(DEVICE)
    expected = [greedy(model, prompt(i, n), 24) for i, n in enumerate(SIZES)]
    with engine_of(model, max_batch_tokens=64, **room) as engine:
        assert (engine.runner.graphs is not None) == ON_GPU
        for _ in range(3):
            streams = [engine.submit(request(prompt(i, n))) for i, n in enumerate(SIZES)]
            again = [stream.result(120) for stream in streams]
            assert [one.tokens for one in again] == expected
        if not room:
            assert [one.receipt.exact for one in again] == [4, 69, 199], "all but the last token, also within blocks"
        at_rest(engine)


def test_a_failing_batch_ends_its_requests_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    expected = greedy(model, prompt(1, 40), 24)
    forward = ModelRunner.forward

    def fails_on_long_prompts(runner: ModelRunner, batch: Batch) -> torch.Tensor:
        if len(batch.tokens) > 100:
            raise RuntimeError("out of memory")
        return forward(runner, batch)

    monkeypatch.setattr(ModelRunner, "forward", fails_on_long_prompts)
    with engine_of(model) as engine:
        with pytest.raises(ForwardFailed, match="out of memory"):
            engine.submit(request(prompt(0, 200))).result(60)
        assert engine.submit(request(prompt(1, 40))).result(60).tokens == expected
        at_rest(engine)


SIZE = 16


def answers(engine: LocalEngine, smollm2: RealModel, count: int = NEW, numbers: range = range(4)) -> list[int]:
    """Ask one after the other, check all tokens, and return how many of each prompt's were in the cache."""
    exact = []
    for number in numbers:
        prompt = smollm2.prompts[number]
        done = served(engine, request(prompt, max_tokens=count))
        assert len(done.tokens) == count and smollm2.greedy[prompt].agrees(done.tokens), f"prompt {number}"
        exact.append(done.receipt.exact)
    return exact


def common(smollm2: RealModel) -> int:
    """Return how many tokens all prompts begin with."""
    return next(at for at, tokens in enumerate(zip(*smollm2.prompts, strict=False)) if len(set(tokens)) > 1)


def test_a_shared_beginning_and_the_same_prompts_again(smollm2: RealModel) -> None:
    with smollm2.engine() as engine:
        assert answers(engine, smollm2, 1, range(1)) == [0]
        for count, computed in ((NEW, None), (8, SIZE)):
            streams = [engine.submit(request(prompt, max_tokens=count)) for prompt in smollm2.prompts]
            for prompt, stream in zip(smollm2.prompts, streams, strict=True):
                done = stream.result(60)
                assert len(done.tokens) == count and smollm2.greedy[prompt].agrees(done.tokens)
                assert done.receipt.exact >= (len(prompt) - computed if computed else common(smollm2) - 1)
            engine.wait_idle(60)


@pytest.mark.parametrize("count", [8, pytest.param(NEW, marks=pytest.mark.slow)])
def test_blocks_that_were_on_the_host_come_back(smollm2: RealModel, count: int) -> None:
    """The device holds the longest prompt and its answer, the host all."""
    room = -(-(len(max(smollm2.prompts, key=len)) + NEW) // SIZE)
    tiers: dict[str, Any] = {"host_memory": f"{4 * room} blocks", "backup_hits": 0, "policy": "lru"}
    with smollm2.engine(kv_memory=f"{room} blocks", block_size=SIZE, tiers=tiers) as engine:
        answers(engine, smollm2, count=1)
        exact = answers(engine, smollm2, count)
        stats: Any = engine.inspect()["cache"]
        assert all(one > common(smollm2) for one in exact)
        assert stats["host_hit_tokens"] > 0 and stats["evictions"] > 0
        assert stats["failed_copies"] == 0
