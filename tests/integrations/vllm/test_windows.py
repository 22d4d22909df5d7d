"""Translation of models with windows in some layers, where vLLM keeps all of their KV in one group of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.kv.segment import KVSegment  # noqa: E402
from kedge.reuse.holes import Holes, between, joined  # noqa: E402
from tests.integrations.vllm.conftest import (  # noqa: E402
    VOCABULARY,
    Driver,
    driver,
    receipt,
)
from tests.integrations.vllm.lane_prompts import (  # noqa: E402
    HOLES,
    LENGTH,
    ONE,
    OTHER,
    PLAIN,
    WIDE,
    add,
    answers,
    ask,
    difference,
    first_logprobs,
    lane_engine,
    more_holes,
    recorded,
    solo,
    tokens,
)
from tests.integrations.vllm.test_cache_groups import (  # noqa: E402
    gemma2,
    gemma3,
    gpt_oss,
)
from tests.integrations.vllm.test_lanes import state  # noqa: E402
from tests.integrations.vllm.window_models import Reference  # noqa: E402

EXACT = 1e-4
LAYOUTS: dict[str, Holes] = {
    "the planner's": (),
    "over several blocks and a whole window": (range(60, 150),),
    "single tokens": tuple(range(at, at + 1) for at in range(50, 290, 20)),
    "right behind the exact prefix": (range(0, 70), range(120, 125)),
}


MODELS = {
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
    stock: dict[Any, list[int]]


@pytest.fixture(scope="module", params=MODELS)
def taught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Taught]:
    torch.manual_seed(0)
    folder: Path = tmp_path_factory.mktemp("windows")
    MODELS[request.param]().eval().save_pretrained(folder)
    prompts: dict[Any, list[int]] = {number: tokens(number) for number in (ONE, OTHER)}
    prompts.update({("plain", at): one for at, one in enumerate(PLAIN)})
    with driver(folder, plugged=False) as plain:
        stock = {name: plain.answer(one, count=40) for name, one in prompts.items()}
    with lane_engine(folder, asynchronous="async" in request.param, disable_hybrid_kv_cache_manager=True) as built:
        assert len(built.scheduler.kv_cache_config.kv_cache_groups) == 1
        yield Taught(built, Reference(folder), stock)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_holes_are_what_transformers_computes_over_translated_kv(taught: Taught, layout: str) -> None:
    holes = joined((*HOLES, *LAYOUTS[layout]), nearer_than=4)
    taught.engine.reset()
    with recorded(taught.engine) as recorder, more_holes(taught.engine, LAYOUTS[layout]):
        output = ask(taught.engine, OTHER, logprobs=VOCABULARY)
        found = recorder.read()
    assert recorder.admission() == [(hole.start, len(hole)) for hole in holes], "all in one pass"
    assert recorder.written is not None
    expected, logprobs = taught.reference.compute(tokens(OTHER), recorder.written, holes)
    assert difference(found, expected, holes) < EXACT
    assert difference(found, recorder.written, between(holes, 0)) == 0, "what was translated is left alone"
    assert float((first_logprobs(output) - logprobs).abs().max()) < EXACT
    computed = sum(map(len, holes))
    counts = {"device": 0, "host": 0, "translated": LENGTH - computed, "computed": computed}
    assert receipt(output)["tokens"] == counts
    full, _ = taught.reference.compute(tokens(OTHER), found, (range(LENGTH),))
    assert difference(found, full, holes) > 0.01, "else the comparison says nothing"


def test_over_true_kv_everything_is_as_in_dense_prefill(taught: Taught) -> None:
    taught.engine.reset()
    layers = len(taught.reference.compute(tokens(ONE), empty(taught), (range(LENGTH),))[0].keys)
    assert layers == taught.engine.worker._learner.pages.empty.keys.shape[0]
    true, logprobs = taught.reference.compute(tokens(OTHER), empty(taught), (range(LENGTH),))
    with recorded(taught.engine) as recorder, more_holes(taught.engine, WIDE):
        recorder.replacement = true
        output = ask(taught.engine, OTHER, logprobs=VOCABULARY)
        found = recorder.read()
    assert receipt(output)["tokens"]["translated"] > 0
    assert difference(found, true) < EXACT
    assert float((first_logprobs(output) - logprobs).abs().max()) < EXACT
    assert list(output.outputs[0].token_ids) == taught.stock[OTHER][:12]


def empty(taught: Taught) -> KVSegment:
    layers, _, *shape = taught.engine.worker._learner.pages.empty.keys.shape
    return KVSegment(torch.zeros(layers, LENGTH, *shape), torch.zeros(layers, LENGTH, *shape))


def test_a_busy_batch_answers_as_each_alone_and_pollutes_nothing(taught: Taught) -> None:
    engine = taught.engine
    alone = [solo(engine, ONE), solo(engine, OTHER)]
    engine.reset()
    before = state(engine)
    decoding = [engine.add(PLAIN[at], 40) for at in (0, 1)]
    for _ in range(5):
        engine.step()
    first, prefill, second = add(engine, ONE), engine.add(PLAIN[2], 40), add(engine, OTHER)
    engine.run()
    assert answers(engine, first, second) == alone
    assert answers(engine, *decoding, prefill) == [taught.stock["plain", at] for at in (0, 1, 2)]
    again = engine.ask(tokens(OTHER), 40)
    assert again.num_cached_tokens == 0, "no translated block has a hash"
    assert list(again.outputs[0].token_ids) == taught.stock[OTHER]
    assert state(engine) == before
