"""Sentinel tokens: translated KV is compared with computed KV, and a refuted translation is computed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kedge.engine.local.sentinels import Sentinels
from kedge.guard import GuardOrders
from kedge.kv.storage import SlotTable
from kedge.reuse.plan import Sentinel
from kedge.types import GenerateRequest, ReuseMode, Source
from tests.engine.local.test_translation import Driver, relative, request, tokens

NAMES = frozenset(("user_question", "condition_solver_current"))
WATCHED = GuardOrders(sentinels=2, watched=NAMES)


def asked(seed: int, reuse: ReuseMode = ReuseMode.TRANSLATE, agent: str = "critic") -> GenerateRequest:
    made = request(tokens(seed, 30), tokens(seed + 1, 24), reuse, agent)
    return replace(made, guard=WATCHED if agent == "critic" else GuardOrders())


def driver(*seeds: int, refutes: bool = False) -> tuple[Driver, list[dict[Sentinel, float]]]:
    """An engine that has base KV of these values and offsets of others, and the errors of its later prompts."""
    made, seen = Driver(), []
    for taught in (50, 60):
        made.serve(asked(taught, agent="solver"))
        made.serve(asked(taught))
    for seed in seeds:
        made.serve(asked(seed, agent="solver"))
    made.core.judge = lambda _, errors: (seen.append(dict(errors)), refutes)[1]
    return made, seen


def test_sentinels_are_computed_and_lie_in_translated_values() -> None:
    made, seen = driver(70)
    served, _ = made.serve(asked(70))
    assert served.plan is not None and served.plan.translates
    assert len(seen) == 1 and len(seen[0]) == 4  # two in each of two values
    assert {one.position for one in seen[0]} <= set(served.plan.computed)
    assert all(33 <= one.position < 63 or 72 <= one.position < 96 for one in seen[0])
    assert all(error > 0 for error in seen[0].values())


def test_every_request_has_sentinels_of_its_own() -> None:
    made, seen = driver(70)
    for _ in range(6):
        made.serve(asked(70))
    assert len({frozenset(one) for one in seen}) > 1
    made.serve(replace(asked(70), guard=GuardOrders()))
    assert len(seen) == 6, "and without a guard none"


def test_a_refuted_translation_is_computed_before_the_first_token() -> None:
    made, seen = driver(70, refutes=True)
    served, kv = made.serve(asked(70))
    dense, expected = made.serve(asked(70, ReuseMode.OFF))
    assert len(seen) == 1
    assert relative(kv.values, expected.values) < 1e-5 and relative(kv.keys, expected.keys) < 1e-5
    assert served.response == dense.response
    receipt = served.receipt()
    assert receipt.tokens(Source.TRANSLATED) == 0 and receipt.prompt_tokens == 101
    assert any("the guard computed it" in miss.reason for miss in receipt.misses)


def test_what_is_not_a_number_leaves_nothing_behind() -> None:
    """It also reaches tokens before it that are computed in the same pass, under the mask."""
    made, seen = driver(70, refutes=True)
    for pool in made.core.parts.learned[0].pools.values():
        for table in pool.tables:
            table.arena.fill_(math.nan)
    served, kv = made.serve(asked(70))
    assert any(not math.isfinite(error) for error in seen[0].values())
    dense, expected = made.serve(asked(70, ReuseMode.OFF))
    assert relative(kv.values, expected.values) < 1e-5 and relative(kv.keys, expected.keys) < 1e-5
    assert served.response == dense.response


def test_what_was_refuted_is_learned_from() -> None:
    made, _ = driver(70, refutes=True)
    before = made.core.parts.stats()["learning"]["observed"]
    made.serve(asked(70))
    assert made.core.parts.stats()["learning"]["observed"] == before + 1


@pytest.mark.parametrize("part", ["keys", "values"])
def test_an_error_is_relative_to_what_is_computed_and_the_first_layer_does_not_count(part: str) -> None:
    storage = Driver().core.parts.storage
    table, sentinels = SlotTable.of([3, 1], storage.block_size), Sentinels(storage)
    torch.nn.init.normal_(storage.keys), torch.nn.init.normal_(storage.values)
    before = [sentinels.read(table, [Sentinel(at, False)]) for at in (2, 17)]
    getattr(storage, part)[0] += 1
    assert sentinels.errors(before) == [0.0, 0.0]
    getattr(storage, part)[:, table.slots[17]] *= 2  # half of what is there now is missing
    assert sentinels.errors(before) == pytest.approx([0.0, 0.5])
