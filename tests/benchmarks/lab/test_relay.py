"""RelayCaching against a twin of plain PyTorch and Transformers: its choice of tokens, and every key and value."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cosine_similarity

from benchmarks.lab.methods import SUFFIX, RelayCaching, relay
from kedge.errors import ConfigError
from kedge.kv.segment import KVSegment
from kedge.types import GenerateRequest, ReuseMode, RunId, SampleId, Segment, Source, Tokens
from tests.benchmarks.driver import ComponentsDriver
from tests.benchmarks.lab.twins import moved, plain_prefill, recomputed
from tests.engine.local.test_translation import request, tokens

SAID = SampleId.parse("agent_critic@0")


def producer(run: str = "run", size: int = 24) -> GenerateRequest:
    """An agent whose answer others read."""
    asked = request(tokens(70, 30), agent="critic", run=run, max_tokens=size)
    return replace(asked, produces=SAID, request_id=f"producer-{run}")


def reader(answer: Tokens, run: str = "run") -> GenerateRequest:
    """An agent that reads the answer behind a role and a question of its own."""
    segments = (
        Segment(tokens(20, 20), "p0"),
        Segment(tokens(70, 30), "user_question", SampleId.parse("input_user_question@0"), tokens(1, 3), tokens(2, 6)),
        Segment(tokens(7, 9), "p1"),
        Segment(answer, "agent_critic_current", SAID, tokens(1, 3), tokens(2, 6)),
        Segment(tokens(8, 5), "p2"),
    )
    return replace(request(tokens(70, 30), run=run), segments=segments, request_id=f"reader-{run}")


def served(choice: RelayCaching):  # noqa: ANN201
    """The first question ever: a producer, and its reader."""
    driver = ComponentsDriver(replace(relay().components, assembler=choice))
    said, _ = driver.serve(producer())
    asked = reader(tuple(said.response))
    return (driver, asked, *driver.serve(asked))


def decoded(driver: ComponentsDriver, asked: GenerateRequest) -> tuple[range, KVSegment]:
    """The answer's positions, and KV of the prompt whose answer has the KV that Transformers gives it behind its
    producer's prompt (keys rotated to their places here); the rest is dense.
    """
    answer, start = asked.segments[3].tokens, producer().prompt_tokens
    there = slice(start, start + len(answer))
    own_keys, own_values, _ = plain_prefill(driver, (*producer().tokens, *answer))
    positions = range(59, 59 + len(answer))
    unrotated = driver.runner.rotary.unrotate(own_keys[:, there], there)
    placed = moved(driver, KVSegment(unrotated, own_values[:, there]), positions.start)
    keys, values, _ = plain_prefill(driver, asked.tokens)
    keys[:, positions], values[:, positions] = placed.keys, placed.values
    return positions, KVSegment(keys, values)


def chosen_by_twin(driver: ComponentsDriver, asked: GenerateRequest, choice: RelayCaching) -> set[int]:
    """Loops over single tokens, on what Transformers itself gives: the values and the attention of a dense prefill."""
    positions, reused = decoded(driver, asked)
    layer = driver.runner.spec.layers // 2
    _, values, attentions = plain_prefill(driver, asked.tokens)
    far = {
        p: 1 - float(cosine_similarity(values[layer, p].flatten(), reused.values[layer, p].flatten(), dim=0))
        for p in positions
    }
    if choice.share is not None:
        return set(sorted(far, key=far.__getitem__)[-math.ceil(choice.share * len(far)) :])
    last = positions[-SUFFIX:]
    seen = {p: sum(float(attentions[layer][head, q, p]) for head in range(4) for q in last) for p in positions}
    mean_far, mean_seen = (sum(one.values()) / len(one) for one in (far, seen))
    return {p for p in positions if far[p] > choice.deviation * mean_far or seen[p] > choice.influence * mean_seen}


@pytest.mark.parametrize(
    "choice",
    [RelayCaching(), RelayCaching(deviation=1e9), RelayCaching(influence=1e9), RelayCaching(0.25), RelayCaching(0.6)],
    ids=["both", "influence", "deviation", "a quarter", "60 %"],
)
def test_choice_and_kv_are_those_of_the_twin_on_the_first_question_ever(choice: RelayCaching) -> None:
    driver, asked, sequence, kv = served(choice)
    positions, reused = decoded(driver, asked)
    chosen = chosen_by_twin(driver, asked, choice)
    assert {p for p in sequence.plan.computed if p in positions} == chosen
    assert 0 < len(chosen) < len(positions)
    assert set(sequence.plan.computed) == set(range(asked.prompt_tokens)) - set(positions) | chosen
    keys, values, _ = plain_prefill(driver, asked.tokens)
    below = driver.runner.spec.layers // 2
    mixed = KVSegment(
        torch.cat([keys[:below], reused.keys[below:]]), torch.cat([values[:below], reused.values[below:]])
    )
    keys, values = recomputed(driver, asked.tokens, mixed, sequence.plan.computed)
    got = moved(driver, kv, 0)
    torch.testing.assert_close(got.keys, keys, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(got.values, values, atol=1e-4, rtol=1e-3)


def test_nothing_corrected_is_the_decoded_kv_at_its_new_place() -> None:
    driver, asked, sequence, kv = served(RelayCaching(0.0))
    positions, reused = decoded(driver, asked)
    assert sequence.receipt().tokens(Source.TRANSLATED) == len(positions)
    got = moved(driver, kv, 0)
    at = slice(positions.start, positions.stop)
    torch.testing.assert_close(got.keys[:, at], reused.keys[:, at], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(got.values[:, at], reused.values[:, at], atol=1e-4, rtol=1e-3)


def test_everything_corrected_is_dense_prefill() -> None:
    driver, asked, sequence, kv = served(RelayCaching(1.0))
    assert sequence.plan.computed == list(range(asked.prompt_tokens))
    _, dense = driver.serve(replace(asked, reuse=ReuseMode.OFF, request_id="dense"))
    torch.testing.assert_close(kv.values, dense.values, atol=1e-4, rtol=1e-4)


def test_only_what_an_agent_of_this_run_decoded_is_relayed_and_no_base_kv_is_prefilled() -> None:
    driver, asked, sequence, _ = served(RelayCaching(0.0))
    question = range(20, 50)
    assert set(question) <= set(sequence.plan.computed)
    assert {miss.segment for miss in sequence.plan.misses} == {"user_question", "p2"}
    other, _ = driver.serve(replace(reader(asked.segments[3].tokens, run="other"), run=RunId("other")))
    assert not other.plan.translates
    assert driver.core.parts.learning.stats()["base_prefills_done"] == 0


def test_exact_prefixes_stay_exact() -> None:
    driver = ComponentsDriver(relay(0.5).components)
    said, _ = driver.serve(producer())
    asked = reader(tuple(said.response))
    begun = replace(asked, segments=asked.segments[:1], request_id="warm")
    driver.core.requests  # noqa: B018
    clear, driver.core.parts.cache.clear = driver.core.parts.cache.clear, lambda: None  # type: ignore[method-assign]
    driver.serve(begun)
    sequence, _ = driver.serve(asked)
    clear()
    assert sequence.receipt().exact > 0
    assert sequence.receipt().translated == len(said.response) // 2


@pytest.mark.parametrize(
    ("choice", "key"),
    [
        ({"share": -0.1}, "share"),
        ({"share": 1.5}, "share"),
        ({"deviation": 0}, "deviation"),
        ({"influence": -1}, "influence"),
    ],
)
def test_bad_values_are_named(choice: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError, match=f"relay.{key}"):
        RelayCaching(**choice)
