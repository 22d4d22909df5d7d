"""Plain requests on vLLM, without a word of the client: what agents share is found, and translated if that is set."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.testing import assert_close

from kedge.integrations.vllm.plugin.settings import SCHEDULER
from kedge.kv.segment import KVSegment
from tests.discovery.teams import judge, solver, words
from tests.integrations.vllm.conftest import VOCABULARY, Driver, driver, receipt

ANCHORS = {"min_anchors": 2, "max_error": 1e9, "weak_error": 1e9}
ANSWER = 24


def ask(engine: Driver, tokens: tuple[int, ...], **more: Any) -> Any:
    return engine.ask(list(tokens), count=ANSWER, **more)


def team(engine: Driver, number: int, **more: Any) -> tuple[Any, Any]:
    question = words(("q", number), 60, VOCABULARY)
    solved = ask(engine, solver(question, vocab=VOCABULARY), **more)
    return solved, ask(engine, judge(question, tuple(solved.outputs[0].token_ids), vocab=VOCABULARY), **more)


@pytest.fixture(scope="module")
def stock(tiny_llama: Path) -> list[list[int]]:
    """The judges' answers of stock vLLM."""
    with driver(tiny_llama, plugged=False) as plain:
        return [list(team(plain, number)[1].outputs[0].token_ids) for number in range(6)]


@pytest.fixture(scope="module")
def translating(tiny_llama: Path, stock: object) -> Iterator[Driver]:  # noqa: ARG001 - one engine at a time
    """An engine that has found a team."""
    extra = {"anchors": ANCHORS, "discovery": {"mode": "translate"}}
    with driver(tiny_llama, extra=extra, scheduler_cls=SCHEDULER) as built:
        for number in range(10):
            team(built, number)
        yield built


def test_by_default_answers_are_stock_vllms(tiny_llama: Path, stock: list[list[int]]) -> None:
    with driver(tiny_llama, scheduler_cls=SCHEDULER) as observing:
        outputs = [team(observing, number)[1] for number in range(6)]
        assert [list(one.outputs[0].token_ids) for one in outputs] == stock
        assert all(one.kv_transfer_params is None for one in outputs)
        totals = observing.side.plain.totals
        assert totals.known_agents > 0 and totals.shared_tokens > 0 and totals.failures == 0
        assert totals.exact_tokens >= 8 * 16 and totals.translated_tokens == 0


@pytest.fixture
def kept(translating: Driver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], KVSegment]]:
    """The answers that are kept in a test, and their KV."""
    bases, kept = translating.worker._learner.bases, list[tuple[tuple[int, ...], KVSegment]]()
    put = bases.put_sample

    def noted(run: Any, sample: Any, tokens: tuple[int, ...], kv: KVSegment) -> None:
        kept.append((tokens, kv))
        put(run, sample, tokens, kv)

    monkeypatch.setattr(bases, "put_sample", noted)
    return kept


def test_an_answer_of_a_found_team_is_kept(translating: Driver, kept: list[Any]) -> None:
    """Its reader's prompt then needs no prefill of the answer, nor of the other text that they share."""
    solved, judged = team(translating, 35)
    assert [tokens for tokens, _ in kept] == [(*solved.outputs[0].token_ids,)]
    assert receipt(judged)["tokens"]["translated"] >= 60 + ANSWER
    assert translating.side.plain.totals.failures == 0


def cannot_tell(_: list[int]) -> list[int]:
    raise NotImplementedError


def test_of_an_answer_with_reasoning_what_follows_is_kept(
    translating: Driver, kept: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = solver(words(("q", 36), 60, VOCABULARY), vocab=VOCABULARY)
    for contents in (None, lambda ids: ids[6:], lambda _: [], lambda _: [VOCABULARY], cannot_tell):
        parser = contents and SimpleNamespace(extract_content_ids=contents)
        monkeypatch.setattr(translating.side.translations, "reasoner", parser)
        ask(translating, prompt)
    (answer, kv), (said, late), *others = kept
    assert said == answer[6:]
    assert_close((late.keys, late.values), (kv.keys[:, 6:], kv.values[:, 6:]))
    assert [tokens for tokens, _ in others] == [answer] * 3, "where the parser cannot tell, all of it is"


def test_another_tenant_has_nothing_of_it(translating: Driver) -> None:
    for number in range(2):
        judged = team(translating, number, salt="other")[1]
        assert judged.kv_transfer_params is None
