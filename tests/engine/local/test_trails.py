"""What follows an agent's answer everywhere: its KV is left behind with the answer's, and translated with it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from kedge.engine.local.build import EngineParts
from kedge.engine.local.engine import LocalEngine
from kedge.kv.segment import KVSegment
from kedge.settings import AnchorSettings, PlannerConstants
from kedge.types import Completion, GenerateRequest, Namespace, ReuseMode, RunId, RunKey, SampleId, TenantId, Tokens
from tests.engine.local.conftest import engine_of, tiny_model
from tests.engine.local.stage import ASKED, prompt_of
from tests.engine.local.test_translation import OPEN, tokens

ANSWER = SampleId.parse("agent_writer@0")
TRAIL = tokens(3, 3)
"""Tokens that follow every value everywhere; two of them are held by default."""


@cache
def oracle() -> PreTrainedModel:
    return tiny_model("llama")


def engine(eos: int | None = None, **settings: object) -> LocalEngine:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = model.config.eos_token_id if eos is None else eos
    return engine_of(model, **{"anchors": AnchorSettings(**OPEN), **settings})


def alike(request: GenerateRequest) -> GenerateRequest:
    """The request where the same follows every value."""
    before = (None, *request.segments)
    return replace(
        request,
        segments=tuple(
            replace(one, trail=TRAIL) if one.is_placeholder
            else replace(one, tokens=TRAIL + one.tokens[len(TRAIL) :]) if last and last.is_placeholder
            else one
            for last, one in zip(before, request.segments, strict=False)
        ),
    )  # fmt: skip


def reading(answer: Tokens, question: Tokens = ASKED, run: str = "run") -> GenerateRequest:
    """What the reader is asked; an answer of no tokens is yet to come."""
    return alike(prompt_of("reader", question, answer, run=run))


def written(question: Tokens = ASKED, run: str = "run", **sampling: object) -> GenerateRequest:
    """What the writer is asked."""
    asked = prompt_of("writer", question, run=run, produces=str(ANSWER), **{"max_tokens": 8, **sampling})
    return replace(alike(asked), trail=TRAIL)


def serve(engine: LocalEngine, request: GenerateRequest) -> Completion:
    done = engine.submit(request).result(60)
    engine.wait_idle(60)
    return done


def left(engine: LocalEngine, said: Tokens) -> KVSegment | None:
    """Base KV that the writer left of these tokens."""

    def find(parts: EngineParts) -> KVSegment | None:
        entry = parts.learned[1].find(RunKey(Namespace(TenantId("default")), "client", RunId("run")), ANSWER, said, ())
        return entry and entry.kv

    return engine.query(find)


def values_of(prompt: Tokens, start: int) -> torch.Tensor:
    """Values [layers, tokens, heads, head_dim] of a text from a position on, as Transformers computes them."""
    with torch.inference_mode():
        cache = oracle()(torch.tensor([prompt]), use_cache=True).past_key_values
    return torch.stack([layer.values[0, :, start:].transpose(0, 1) for layer in cache.layers])


def first_of(answer: Tokens, at: int) -> int:
    """The token with which an answer would have ended at a place, were it the end of a sequence."""
    assert answer[at] not in answer[:at]
    return answer[at]


@pytest.mark.parametrize("ends", ["length", "stop"])
def test_its_kv_is_that_of_the_answer_with_what_follows(ends: str) -> None:
    with engine() as one:
        answer = serve(one, written()).tokens
    eos = first_of(answer, 4) if ends == "stop" else None
    with engine(eos) as one:
        asked = written(ignore_eos=ends == "length")
        done = serve(one, asked)
        assert (done.finish_reason, done.tokens) == (ends, answer[:4] if ends == "stop" else answer)
        assert left(one, done.tokens + asked.trail) is None, "no more than is held"
        kv = left(one, done.tokens + asked.trail[:2])
    assert kv is not None
    expected = values_of(asked.tokens + done.tokens + asked.trail[:2], asked.prompt_tokens)
    torch.testing.assert_close(kv.values, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("weak_error", "passes"), [(0.15, 5), (1e9, 6)])
def test_an_answer_takes_no_pass_more_where_what_follows_it_is_computed_again(weak_error: float, passes: int) -> None:
    """One pass for the prompt and four for the tokens; what follows is one that no offset predicts."""
    with engine() as one:
        eos = first_of(serve(one, written()).tokens, 4)
    with engine(eos, anchors=AnchorSettings(**{**OPEN, "weak_error": weak_error})) as one:
        asked = written(ignore_eos=False)
        done = one.submit(asked).result(60)
        assert one.query(lambda parts: parts.scheduler.passes) == passes
        one.wait_idle(60)
        assert done.finish_reason == "stop"
        assert left(one, done.tokens + (asked.trail[:2] if weak_error > 1 else ())) is not None


@pytest.mark.parametrize("reuse", [ReuseMode.OFF, ReuseMode.EXACT])
def test_nothing_is_left_where_nothing_is_translated(reuse: ReuseMode) -> None:
    with engine() as one:
        done = serve(one, replace(written(), reuse=reuse))
        assert left(one, done.tokens[:1]) is None


def test_it_is_not_a_part_of_the_answer_nor_of_what_is_cached() -> None:
    with engine() as one:
        asked = written()
        plain = serve(one, replace(asked, trail=(), request_id="plain", run=RunId("plain")))
        done = serve(one, asked)
        assert (done.tokens, done.text) == (plain.tokens, plain.text)
        follows = prompt_of("writer", asked.tokens + done.tokens + asked.trail + tokens(5, 64), None, ReuseMode.EXACT)
        again = replace(follows, segments=(replace(follows.segments[1], sample=None, name="p0"),))
        assert serve(one, again).receipt.exact < asked.prompt_tokens + len(done.tokens)


def test_where_the_model_has_no_room_for_it_the_answer_is_the_same() -> None:
    asked = written(tokens(9, 900))
    room = 1024 - asked.prompt_tokens
    with engine(kv_memory="128 blocks") as one:
        whole = serve(one, replace(asked, sampling=replace(asked.sampling, max_tokens=room)))
        assert len(whole.tokens) == room
        assert left(one, whole.tokens) is not None
        assert left(one, whole.tokens + asked.trail[:1]) is None


def teach(engine: LocalEngine) -> None:
    for at in range(3):
        question = tokens(50 + at, len(ASKED))
        answer = serve(engine, written(question, f"past-{at}")).tokens
        serve(engine, reading(answer, question, f"past-{at}"))
    serve(engine, written())
    engine.query(lambda parts: parts.cache.clear())


@pytest.mark.parametrize("trail", [0, 1, 2, 3])
def test_a_reader_computes_nothing_behind_it(trail: int) -> None:
    with engine(planner=PlannerConstants(by_cost=False, trail=trail, move="unlearned")) as one:
        teach(one)
        answer = serve(one, written(run="again")).tokens
        receipt = serve(one, reading(answer, run="again")).receipt
    assert receipt.translated, receipt.misses
    assert receipt.computed == 20 + 1, "its own first prefix, and the last token"


def test_a_prompt_assembled_ahead_takes_the_answer_with_what_follows() -> None:
    """Before, the answer was not known; the reader's request finds it in its prepared prompt."""
    outcomes = []
    for ahead in (False, True):
        with engine() as one:
            teach(one)
            if ahead:
                one.prepare(replace(reading((), run="again"), request_id="hint"))
            done = serve(one, written(run="again"))
            if ahead:  # a hint that is older than the answer takes nothing back
                one.prepare(replace(reading((), run="again"), request_id="late"))
                one.wait_idle(60)
            read = serve(one, reading(done.tokens, run="again"))
            outcomes.append((read.tokens, read.receipt.spans))
            assert (read.receipt.preassembled > 0) == ahead
    assert outcomes[0] == outcomes[1]
