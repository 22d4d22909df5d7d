"""Holes in the middle of a prompt, computed by lanes: equal to Transformers over the same KV.

In models with windows in some layers, too, where vLLM keeps all of their KV in one group of blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from kedge.reuse.holes import Holes, between, joined
from tests.integrations.vllm.conftest import VOCABULARY, Answers, Driver, receipt
from tests.integrations.vllm.lane_prompts import (
    HOLES,
    LENGTH,
    ONE,
    OTHER,
    PLAIN,
    WIDE,
    add,
    answers,
    ask,
    check_rest,
    first_logprobs,
    lane_engine,
    more_holes,
    recorded,
    solo,
    stock_of,
    tokens,
)
from tests.integrations.vllm.test_cache_groups import gemma2, gemma3, gpt_oss
from tests.transformers_over_kv import Reference, difference, reference

EXACT = 1e-4
LAYOUTS: dict[str, Holes] = {
    "the planner's": (),
    "over several blocks and a whole window": (range(60, 150),),
    "in one block": (range(65, 67), range(72, 73), range(80, 85), range(90, 94)),
    "single tokens": tuple(range(at, at + 1) for at in range(50, 290, 20)),
    "next to the end": (range(288, 294),),
    "right behind the exact prefix": (range(0, 70), range(120, 125)),
}
LLAMA = ("llama", "llama, asynchronous")
WINDOWS = {
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma3, a window longer than prompts": partial(gemma3, 512),
    "gpt_oss": gpt_oss,
    "gpt_oss, asynchronous": gpt_oss,
}


@dataclass
class Taught:
    """An engine that has learned, with what Transformers and stock vLLM say about its model."""

    engine: Driver
    reference: Reference
    stock: Answers


@pytest.fixture(scope="module", params=(*LLAMA, *WINDOWS))
def taught(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Taught]:
    folder = tiny_llama
    if request.param in WINDOWS:
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("windows")
        WINDOWS[request.param]().eval().save_pretrained(folder)
    stock = stock_of(folder)
    with lane_engine(folder, asynchronous="async" in request.param, disable_hybrid_kv_cache_manager=True) as built:
        assert len(built.scheduler.kv_cache_config.kv_cache_groups) == 1
        yield Taught(built, reference(folder), stock)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_holes_are_what_transformers_computes_over_translated_kv(taught: Taught, layout: str) -> None:
    holes = joined((*HOLES, *LAYOUTS[layout]), nearer_than=4)
    taught.engine.reset()
    with recorded(taught.engine) as recorder, more_holes(taught.engine, LAYOUTS[layout]):
        output = ask(taught.engine, OTHER, logprobs=VOCABULARY)
        found = recorder.read()
    assert recorder.admission() == [(hole.start, len(hole)) for hole in holes], "all in one pass"
    expected, logprobs = taught.reference.compute(tokens(OTHER), recorder.written, holes)
    assert difference(found, expected, holes) < EXACT
    assert difference(found, recorder.written, between(holes, 0)) == 0, "what was translated is left alone"
    assert float((first_logprobs(output) - logprobs).abs().max()) < EXACT
    computed = sum(map(len, holes))
    counts = receipt(output)["tokens"]
    assert counts == {"device": 0, "host": 0, "translated": LENGTH - computed, "computed": computed}
    assert recorder.hits == output.num_cached_tokens == counts["translated"], "vLLM counts holes as computed, too"
    full, _ = taught.reference.compute(tokens(OTHER), found, (range(LENGTH),))
    assert difference(found, full, holes) > 0.01, "else the comparison says nothing"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_over_true_kv_everything_is_as_in_dense_prefill(taught: Taught, layout: str) -> None:
    true, logprobs = taught.reference.dense(tokens(OTHER))
    assert len(true.keys) == taught.engine.worker._learner.pages.empty.keys.shape[0]
    taught.engine.reset()
    with recorded(taught.engine) as recorder, more_holes(taught.engine, LAYOUTS[layout]):
        recorder.replacement = true
        output = ask(taught.engine, OTHER, logprobs=VOCABULARY)
        found = recorder.read()
    assert receipt(output)["tokens"]["translated"] > 0
    assert difference(found, true) < EXACT
    assert float((first_logprobs(output) - logprobs).abs().max()) < EXACT
    assert list(output.outputs[0].token_ids) == taught.stock[OTHER][:12]


def test_a_busy_batch_answers_as_each_alone_and_pollutes_nothing(taught: Taught) -> None:
    engine = taught.engine
    with recorded(engine) as recorder, more_holes(engine, WIDE):
        alone = [solo(engine, ONE), solo(engine, OTHER)]
        engine.reset()
        decoding = [engine.add(PLAIN[at], 40) for at in (0, 1)]
        for _ in range(5):
            engine.step()
        first, prefill, second = add(engine, ONE), engine.add(PLAIN[2], 40), add(engine, OTHER)
        engine.run()
    widest = max(recorder.steps, key=len)
    assert len(widest) >= 2 * len(joined((*HOLES, *WIDE), 4)) + 2, "lanes of both beside decodes"
    assert answers(engine, first, second) == alone
    assert answers(engine, *decoding, prefill) == [taught.stock["plain", at] for at in (0, 1, 2)]
    again = engine.ask(tokens(OTHER), 40)
    assert again.num_cached_tokens == 0, "no translated block has a hash"
    assert list(again.outputs[0].token_ids) == taught.stock[OTHER]
    check_rest(engine)
