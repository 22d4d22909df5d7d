"""Prompts that leave what is cached within a block: its beginning is copied, and answers are those of Transformers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.sequence import RequestSequence
from kedge.kv.storage import SlotTable
from kedge.settings import PlannerSettings
from kedge.types import GenerateRequest, Segment, Source, Span
from tests.engine.local.model.test_architectures import model_of
from tests.engine.local.stepping import Stepped, runner
from tests.engine.local.test_engine import greedy
from tests.engine.local.test_engine import request as exact_request
from tests.engine.local.test_translation import in_context, tokens
from tests.engine.local.test_translation import request as team_request

HEAD = tokens(30, 30)
"""A fixed prompt: a block of 16 tokens, and 14 of the next one"""
BLOCK = 16
KINDS = ("Llama", "Mistral, sliding window", "DeepSeek-V2, MLA")


def ask(seed: int, size: int = 20) -> GenerateRequest:
    """A prompt with the head and a value of its own, which begins as no other one does."""
    return exact_request((*HEAD, seed, *tokens(seed, size - 1)), max_tokens=4)


def require_right(sequence: RequestSequence) -> None:
    asked = sequence.request
    assert tuple(sequence.response) == greedy(runner().model, asked.tokens, asked.sampling.max_tokens)


def rows(engine: Stepped, blocks: SlotTable, start: int, stop: int) -> list[Tensor]:
    storage = engine.core.parts.storage
    return [pool[:, blocks.slots[start:stop]] for pool in (storage.keys, storage.values)]


# what is copied -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_copied_kv_is_that_of_the_block_it_comes_from(name: str) -> None:
    """With full attention, with windows that are shorter than the head, and with a latent cache."""
    engine = Stepped(model=checked_runner(model_of(name)))
    first = engine.serve(ask(1))
    blocks = engine.core.parts.cache.match(first.namespace, first.tokens)
    second = engine.submit(ask(2))
    engine.until(lambda: second.first_token is not None)
    assert [item.positions[0] for item in engine.passes[-1]] == [30]
    there, here = (rows(engine, table, BLOCK, 30) for table in (SlotTable.of(blocks, BLOCK), second.table))
    assert all(torch.equal(a, b) and a.any() for a, b in zip(there, here, strict=True))
    assert second.table.slots[BLOCK] != SlotTable.of(blocks, BLOCK).slots[BLOCK]
    engine.rest()
    assert second.receipt().spans == (Span(0, 30, Source.DEVICE), Span(30, 50, Source.COMPUTED))


# agents ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("move", ["always", "never"])
def test_an_agents_head_is_exact_from_its_second_call_on_whether_prompts_are_translated_or_not(move: str) -> None:
    """The reader's first prompt may be translated: then no block with the end of its head is exact as a whole."""
    engine = Stepped(planner=PlannerSettings(by_cost=False, move=move))
    heads, translated = [], []
    for seed in range(6):
        question, run = (seed, *tokens(seed, 39)), f"run-{seed}"
        engine.serve(in_context(team_request(question, run=run)))
        asked = in_context(team_request(question, agent="critic", run=run))
        reader = engine.serve(replace(asked, segments=(Segment(HEAD, "p0"), *asked.segments[1:])))
        translated.append(reader.plan.translates)
        heads.append(sum(min(one.stop, 30) - one.start for one in reader.plan.spans if one.source is Source.DEVICE))
    assert heads == [0, *[30] * 5]
    assert any(translated) and translated[0] == (move == "always")


# pressure -------------------------------------------------------------------------------------------------------------


def test_in_a_full_pool_every_answer_is_right() -> None:
    """The pool has room for two requests and little more; what is copied from comes and goes."""
    engine = Stepped(kv_memory="9 blocks")
    served = [engine.submit(ask(seed % 7, 20 + seed % 5)) for seed in range(24)]
    engine.rest()
    assert engine.stats("cache")["evictions"] > 0 < engine.stats("cache")["copied_hit_tokens"]
    assert engine.leased == 0
    for one in served:
        require_right(one)


def test_a_request_that_ends_between_the_copy_and_its_pass_leaves_nothing_behind() -> None:
    engine = Stepped()
    engine.serve(ask(1))
    cached = engine.stats("cache")["cached_blocks"]
    ended = engine.submit(ask(2))
    engine.core.scheduler.schedule()
    assert ended.admitted and engine.stats("cache")["copied_hit_tokens"] == 14
    assert engine.core.requests.cancel(ended.request.request_id)
    engine.core.parts.cache.check_integrity()
    assert (engine.leased, engine.stats("cache")["cached_blocks"]) == (0, cached)
    after = engine.serve(ask(3))
    assert after.receipt().exact == 30
    require_right(after)
