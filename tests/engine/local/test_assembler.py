"""What an experiment may replace: the drawing of tokens, and the assembler."""

from __future__ import annotations

from dataclasses import replace

import torch

from kedge.engine.local.assembler import Assembler
from kedge.engine.local.sampler import Sampler
from kedge.types import FinishReason, ReuseMode
from tests.engine.local.conftest import engine_of, tiny_model
from tests.engine.local.test_translation import SETTINGS, request, tokens


def test_a_draw_sees_all_logits_and_decides() -> None:
    asked = request(tokens(1, 30), reuse=ReuseMode.OFF, max_tokens=5)
    seen: list[torch.Tensor] = []
    forced = iter([9, 8, 7, 6, 5])

    def draw(logits: torch.Tensor) -> int:
        seen.append(logits.clone())
        return next(forced)

    with engine_of(tiny_model("llama")) as engine:
        done = engine.submit(asked, draw).result(60)
        plain = engine.submit(replace(asked, request_id="plain")).result(60)
        drawn = engine.submit(replace(asked, request_id="drawn"), Sampler(asked.sampling)).result(60)
    assert done.tokens == (9, 8, 7, 6, 5)
    assert done.finish_reason is FinishReason.LENGTH
    assert plain.tokens == drawn.tokens
    prompt = torch.tensor([[*asked.tokens, *done.tokens]])
    with torch.no_grad():
        wanted = tiny_model("llama").eval()(prompt).logits[0, asked.prompt_tokens - 1 : -1]
    torch.testing.assert_close(torch.stack(seen), wanted, atol=1e-4, rtol=1e-4)


def test_an_assembler_of_ones_own_writes_every_plan() -> None:
    built: list[str] = []

    class Counting(Assembler):
        def assemble(self, request, table, plan):  # noqa: ANN001, ANN202
            built.append(f"{request.agent} {plan.translates}")
            return super().assemble(request, table, plan)

    with engine_of(tiny_model("llama")) as plain:
        runner, tokenizer = plain.runner, plain.tokenizer
    config = plain.config.model_copy(update=SETTINGS)
    with type(plain).from_runner(runner, tokenizer, config, assembler=Counting) as engine:
        for question, hint in ((50, 51), (60, 61), (50, 61)):
            engine.submit(request(tokens(question, 30), tokens(hint, 12))).result(60)
            engine.wait_idle(60)
    assert built == ["solver False", "solver False", "solver True"]
