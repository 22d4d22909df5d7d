"""Holes in the middle of a prompt, computed by lanes: equal to plain PyTorch over the same KV, whatever the batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.kv.segment import KVSegment  # noqa: E402
from kedge.reuse.holes import Holes, between, joined  # noqa: E402
from tests.integrations.vllm.conftest import SCHEDULING, VOCABULARY, Driver, receipt  # noqa: E402
from tests.integrations.vllm.lane_prompts import (  # noqa: E402
    HOLES,
    LENGTH,
    OTHER,
    ask,
    computed_by_torch,
    difference,
    first_logprobs,
    lane_engine,
    more_holes,
    recorded,
    tokens,
)

EXACT = 1e-4
EMPTY = KVSegment(torch.zeros(3, LENGTH, 2, 32), torch.zeros(3, LENGTH, 2, 32))
LAYOUTS: dict[str, Holes] = {
    "the planner's": (),
    "over several blocks": (range(60, 150),),
    "in one block": (range(65, 67), range(72, 73), range(80, 85), range(90, 94)),
    "single tokens": tuple(range(at, at + 1) for at in range(50, 290, 20)),
    "next to the end": (range(288, 294),),
    "right behind the exact prefix": (range(0, 70), range(120, 125)),
}


@pytest.fixture(scope="module", params=SCHEDULING, ids=["sync", "async"])
def taught(tiny_llama: Path, stock_answers: object, request: pytest.FixtureRequest) -> Iterator[Driver]:  # noqa: ARG001 - first
    with lane_engine(tiny_llama, asynchronous=request.param) as built:
        yield built


@pytest.mark.parametrize("layout", LAYOUTS)
def test_holes_are_what_torch_computes_over_translated_kv(taught: Driver, tiny_llama: Path, layout: str) -> None:
    holes = joined((*HOLES, *LAYOUTS[layout]), nearer_than=4)
    taught.reset()
    with recorded(taught) as recorder, more_holes(taught, LAYOUTS[layout]):
        output = ask(taught, OTHER, logprobs=VOCABULARY)
        found = recorder.read()
    assert recorder.admission() == [(hole.start, len(hole)) for hole in holes], "all in one pass"
    assert recorder.written is not None
    expected, logprobs = computed_by_torch(tiny_llama, tokens(OTHER), recorder.written, holes)
    assert difference(found, expected, holes) < EXACT
    assert difference(found, recorder.written, between(holes, 0)) == 0, "what was translated is left alone"
    assert float((first_logprobs(output) - logprobs).abs().max()) < EXACT
    counts = receipt(output)["tokens"]
    computed = sum(map(len, holes))
    assert counts == {"device": 0, "host": 0, "translated": LENGTH - computed, "computed": computed}
    assert recorder.hits == output.num_cached_tokens == counts["translated"], "vLLM counts holes as computed, too"
    full, _ = computed_by_torch(tiny_llama, tokens(OTHER), found, (range(LENGTH),))
    assert difference(found, full, holes) > 0.1, "else the comparison says nothing"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_over_true_kv_everything_is_as_in_dense_prefill(
    stock_answers: dict[Any, list[int]], taught: Driver, tiny_llama: Path, layout: str
) -> None:
    taught.reset()
    with recorded(taught) as recorder, more_holes(taught, LAYOUTS[layout]):
        true, logprobs = computed_by_torch(tiny_llama, tokens(OTHER), EMPTY, (range(LENGTH),))
        recorder.replacement = true
        output = ask(taught, OTHER, logprobs=VOCABULARY)
        found = recorder.read()
    assert receipt(output)["tokens"]["translated"] > 0
    assert difference(found, true) < EXACT
    assert float((first_logprobs(output) - logprobs).abs().max()) < EXACT
    assert list(output.outputs[0].token_ids) == stock_answers[OTHER][:12]
