"""Tokens of an answer: when they are told, and those that are forced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.learning import Learning
from kedge.engine.local.sampler import Draw, ForcedAnswer
from kedge.engine.local.sequence import RequestSequence
from kedge.settings import AnchorSettings
from kedge.types import GenerateRequest, Receipt, Source, Tokens
from tests.engine.local.conftest import engine_of, tiny_model
from tests.engine.local.stage import ASKED, prompt_of
from tests.engine.local.test_translation import OPEN

ANSWER = "agent_writer@0"
ODD = {3, 4, 17}
"""Tokens of the answer that are drawn against the odds."""


def opened(**settings: object) -> LocalEngine:
    planner = {"by_cost": False}
    return engine_of(tiny_model("llama"), anchors=AnchorSettings(**OPEN), planner=planner, **settings)


def written() -> GenerateRequest:
    return prompt_of("writer", ASKED, produces=ANSWER, max_tokens=24, ignore_eos=True)


def against_the_odds() -> Draw:
    """The likeliest token, but at `ODD` places the unlikeliest."""
    drawn: list[int] = []

    def draw(logits: Tensor) -> int:
        drawn.append(int(logits.argmin() if len(drawn) in ODD else logits.argmax()))
        return drawn[-1]

    return draw


def read(engine: LocalEngine, draw: Draw | None) -> tuple[Tokens, Receipt, int]:
    """The writer's answer, the reader's receipt, and where the answer begins in the reader's prompt."""
    done = engine.submit(written(), draw).result(60)
    engine.wait_idle(60)
    asked = prompt_of("reader", ASKED, done.tokens)
    at = next(i for i, one in enumerate(asked.segments) if one.is_answer)
    return done.tokens, engine.submit(asked).result(60).receipt, sum(len(one.tokens) for one in asked.segments[:at])


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_the_first_token_is_told_before_anything_is_kept_of_its_prompt(
    max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    tell, started = RequestSequence.tell, Learning.started

    def noted_tell(self: RequestSequence, text: str, tokens: Tokens = (), *more: Any) -> None:
        happened.extend(["told"] * len(tokens))
        tell(self, text, tokens, *more)

    def noted_start(self: Learning, sequence: RequestSequence) -> None:
        happened.append("started")
        started(self, sequence)

    monkeypatch.setattr(RequestSequence, "tell", noted_tell)
    monkeypatch.setattr(Learning, "started", noted_start)
    with opened() as engine:
        done = engine.submit(prompt_of("writer", ASKED, max_tokens=max_tokens, ignore_eos=True)).result(60)
    assert len(done.tokens) == max_tokens
    assert happened == ["told", "started", *["told"] * (max_tokens - 1)]


def noted(draw: Draw, seen: list[Tensor]) -> Draw:
    """The same draw, which also keeps the logits."""

    def drawn(logits: Tensor) -> int:
        seen.append(logits.clone())
        return draw(logits)

    return drawn


@pytest.mark.parametrize("batch_tokens", [7, 2048])
def test_a_forced_answer_in_one_pass_is_the_one_that_is_forced_step_by_step(batch_tokens: int) -> None:
    """Its logits and what its readers find of it; also where a pass has no room for all of it."""
    engines = [opened(max_batch_tokens=batch_tokens) for _ in range(2)]
    seen = list[Tensor]()
    with engines[0] as one, engines[1] as other:
        slow = read(one, noted(against_the_odds(), seen))
        forced = ForcedAnswer(slow[0], rows=20)
        quick = read(other, forced)
    assert quick[0] == slow[0] and quick[2] == slow[2]
    assert quick[1].spans == slow[1].spans and any(span.source is Source.TRANSLATED for span in quick[1].spans)
    assert sorted(forced.logits) == list(range(20))
    for at, row in forced.logits.items():
        assert torch.allclose(row, seen[at], atol=1e-4), at
