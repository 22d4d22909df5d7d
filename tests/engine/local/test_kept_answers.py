"""An agent's answer leaves its KV for its readers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from kedge.engine.local.build import EngineParts
from kedge.engine.local.engine import LocalEngine
from kedge.kv.segment import KVSegment
from kedge.settings import AnchorSettings
from kedge.types import Completion, GenerateRequest, Namespace, ReuseMode, RunId, RunKey, SampleId, TenantId, Tokens
from tests.engine.local.conftest import engine_of, tiny_model
from tests.engine.local.stage import ASKED, prompt_of
from tests.engine.local.test_translation import OPEN, tokens

ANSWER = SampleId.parse("agent_writer@0")


@cache
def oracle() -> PreTrainedModel:
    return tiny_model("llama")


def engine(eos: int | None = None, **settings: object) -> LocalEngine:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = model.config.eos_token_id if eos is None else eos
    return engine_of(model, **{"anchors": AnchorSettings(**OPEN), **settings})


def reading(answer: Tokens, question: Tokens = ASKED, run: str = "run") -> GenerateRequest:
    """What the reader is asked; an answer of no tokens is yet to come."""
    return prompt_of("reader", question, answer, run=run)


def written(question: Tokens = ASKED, run: str = "run", **sampling: object) -> GenerateRequest:
    """What the writer is asked."""
    return prompt_of("writer", question, run=run, produces=str(ANSWER), **{"max_tokens": 8, **sampling})


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
def test_its_kv_is_that_of_the_answer(ends: str) -> None:
    with engine() as one:
        answer = serve(one, written()).tokens
    eos = first_of(answer, 4) if ends == "stop" else None
    with engine(eos) as one:
        asked = written(ignore_eos=ends == "length")
        done = serve(one, asked)
        assert (done.finish_reason, done.tokens) == (ends, answer[:4] if ends == "stop" else answer)
        kv = left(one, done.tokens)
    assert kv is not None
    expected = values_of(asked.tokens + done.tokens, asked.prompt_tokens)
    torch.testing.assert_close(kv.values, expected, rtol=1e-4, atol=1e-5)


def test_an_answer_that_ends_by_itself_takes_no_pass_more() -> None:
    """One pass for the prompt and four for the tokens."""
    with engine() as one:
        eos = first_of(serve(one, written()).tokens, 4)
    with engine(eos) as one:
        done = one.submit(written(ignore_eos=False)).result(60)
        assert one.query(lambda parts: parts.scheduler.passes) == 5
        one.wait_idle(60)
        assert done.finish_reason == "stop"
        assert left(one, done.tokens) is not None


@pytest.mark.parametrize("reuse", [ReuseMode.OFF, ReuseMode.EXACT])
def test_nothing_is_left_where_nothing_is_translated(reuse: ReuseMode) -> None:
    with engine() as one:
        done = serve(one, replace(written(), reuse=reuse))
        assert left(one, done.tokens[:1]) is None


def teach(engine: LocalEngine) -> None:
    for at in range(3):
        question = tokens(50 + at, len(ASKED))
        answer = serve(engine, written(question, f"past-{at}")).tokens
        serve(engine, reading(answer, question, f"past-{at}"))
    serve(engine, written())
    engine.query(lambda parts: parts.cache.clear())


def test_a_prompt_assembled_ahead_takes_the_answer() -> None:
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
