"""Decoding in models with recurrent layers: one call of a layer for all sequences, each as Transformers answers it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from kedge.engine.local.model import recurrent
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.recurrent import MARK
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sequence import RequestSequence
from kedge.engine.local.states import StackedStates
from kedge.types import GenerateRequest, ReuseMode, TenantId, Tokens
from tests.engine.local.model.test_architectures import HYBRID, ON_PUSH, model_of
from tests.engine.local.stepping import Stepped
from tests.engine.local.test_engine import greedy, prompt, request
from tests.marks import on_push

NAME = "Qwen3-Next, linear attention"
JAMBA = "Jamba, state space"
ANSWER = 64
PROMPTS = tuple(prompt(seed, 3 + 17 * seed) for seed in range(8))
"""Of 3 to 122 tokens"""


@cache
def runner(name: str) -> ModelRunner:
    return checked_runner(model_of(name))


@cache
def expected(name: str, tokens: Tokens, count: int = ANSWER) -> Tokens:
    return greedy(model_of(name), tokens, count)


def ask(tokens: Tokens, count: int = ANSWER, reuse: ReuseMode = ReuseMode.EXACT) -> GenerateRequest:
    return request(tokens, reuse, max_tokens=count)


def stepped(name: str = NAME, **changes: object) -> Stepped:
    return Stepped(model=runner(name), **changes)


def require_right(name: str, *sequences: RequestSequence) -> None:
    for one in sequences:
        asked = one.request
        assert tuple(one.response) == expected(name, asked.tokens, asked.sampling.max_tokens)


@contextmanager
def calls(of: ModelRunner) -> Iterator[list[int]]:
    """The rows [batch dimension] of every call of the first recurrent layer."""
    module = next(one for one in of.model.modules() if hasattr(one.forward, MARK))
    before, rows = module.forward, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        hidden = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
        rows.append(len(hidden))
        return before.args[0](*args, **kwargs)

    module.forward = partial(recurrent._by_share, counted)
    setattr(module.forward, MARK, True)
    try:
        yield rows
    finally:
        module.forward = before


def decoding(engine: Stepped) -> list[RequestSequence]:
    return [one for one in engine.core.scheduler.running if one.response]


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("name", on_push(HYBRID, ON_PUSH))
def test_64_tokens_are_those_of_transformers_however_many_decode_at_once(name: str, at_once: int) -> None:
    engine, sequences = stepped(name, max_batch_tokens=1024), []
    with calls(runner(name)) as rows:
        for start in range(0, len(PROMPTS), at_once):
            sequences += [engine.submit(ask(one)) for one in PROMPTS[start : start + at_once]]
            engine.rest()
    require_right(name, *sequences)
    # The first pass ends at snapshots, where seven prompts do not: these begin to answer one pass later.
    assert rows.count(8) == (ANSWER - 2 if at_once == 8 else 0)


def test_passes_of_eight_that_decode_call_a_layer_once() -> None:
    engine = stepped()
    for one in PROMPTS:
        engine.submit(ask(one))
    engine.until(lambda: len(decoding(engine)) == 8)
    with calls(runner(NAME)) as rows:
        for _ in range(10):
            engine.step()
    assert rows == [8] * 10
    engine.rest()


def test_rows_join_and_leave() -> None:
    """A request every third step, of different lengths of answers: each is in the stack while it decodes."""
    engine, sequences = stepped(max_batch_tokens=64), []
    with calls(runner(NAME)) as rows:
        for n, one in enumerate(PROMPTS):
            sequences.append(engine.submit(ask(one, 8 + 9 * (n % 3))))
            for _ in range(3):
                engine.step()
        engine.rest()
    require_right(NAME, *sequences)
    assert set(rows) >= {1, 2, 3}


def test_what_decodes_beside_a_long_prompt_decodes_together() -> None:
    engine = stepped(max_batch_tokens=32)
    short = [engine.submit(ask(one)) for one in PROMPTS[:4]]
    engine.until(lambda: len(decoding(engine)) == 4)
    long = engine.submit(ask(prompt(9, 300)))
    with calls(runner(NAME)) as rows:
        for _ in range(5):
            engine.step()
    assert rows == [4, 1] * 5
    engine.rest()
    require_right(NAME, *short, long)


@pytest.mark.parametrize("name", on_push(HYBRID, ON_PUSH))
def test_cancelled_rows_change_no_other_and_leave_no_memory(name: str) -> None:
    engine = stepped(name)
    sequences = [engine.submit(ask(one)) for one in PROMPTS]
    engine.until(lambda: len(decoding(engine)) == 8)
    for one in sequences[1::2]:
        engine.step()
        engine.core.requests.cancel(one.request.request_id)
    engine.step()
    kept = sequences[::2]
    stacks = {id(one.states.stack) for one in kept if one.states}
    stack = kept[0].states.stack if kept[0].states else None
    assert len(stacks) == 1
    assert isinstance(stack, StackedStates)
    assert stack.members == [one.states for one in kept]
    for one in kept[1:]:
        engine.core.requests.cancel(one.request.request_id)
    engine.step()
    assert kept[0].states is not None
    assert kept[0].states.stack is None
    engine.rest()
    require_right(name, kept[0])
    assert [one.states for one in sequences] == [None] * 8


@pytest.mark.parametrize("name", on_push([NAME, JAMBA, "Falcon-H1, state space", "LFM2, short convolutions"], ON_PUSH))
def test_a_full_pool_and_preempted_requests(name: str) -> None:
    engine = stepped(name, num_blocks=26)
    mine = [engine.submit(ask(prompt(seed, 40 + 7 * seed))) for seed in range(3)]
    engine.until(lambda: all(len(one.response) > 10 for one in mine))
    others = [engine.submit(replace(ask(prompt(10 + seed, 60)), tenant=TenantId("other"))) for seed in range(2)]
    engine.until(lambda: engine.core.scheduler.preempted)
    engine.rest()
    require_right(name, *mine, *others)


@pytest.mark.parametrize("name", on_push(HYBRID, ON_PUSH))
def test_snapshots_taken_of_rows_are_gone_on_from(name: str) -> None:
    """All turns end while others decode; the next ones go on from what was copied out of the stack."""
    engine = stepped(name)
    asked = PROMPTS[2:6]
    first = [engine.submit(ask(one, 40 - n)) for n, one in enumerate(asked)]
    engine.rest()
    require_right(name, *first)
    kept = engine.core.parts.snapshots._kept.values()
    assert len(kept) == 8
    for one in kept:
        tensors = [t for layer in one.states.layers for d in vars(layer).values() if isinstance(d, dict)
                   for t in d.values() if isinstance(t, torch.Tensor)]  # fmt: skip
        assert sum(t.untyped_storage().nbytes() for t in tensors) == one.states.nbytes > 0
    histories = [one + tuple(sequence.response) + prompt(20, 9) for one, sequence in zip(asked, first, strict=True)]
    second = [engine.submit(ask(one)) for one in histories]
    engine.rest()
    require_right(name, *second)
    computed = [len(one.request.tokens) + len(one.response) - 1 for one in first]
    assert [one.receipt().exact for one in second] == [size // 16 * 16 for size in computed]


def test_jamba_goes_on_token_by_token_where_several_are_computed_at_once() -> None:
    engine = stepped(JAMBA, max_batch_tokens=16)
    assert runner(JAMBA).recurrent.goes_on_by_token
    with calls(runner(JAMBA)) as rows:
        sequence = engine.submit(ask(prompt(1, 40), 4))
        engine.rest()
    require_right(JAMBA, sequence)
    assert len(rows) == 1 + (40 - 16) + 3
