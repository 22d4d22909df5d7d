"""Answers are found wherever a text quotes them, and forgotten one by one."""

from __future__ import annotations

from random import Random

import pytest

from kedge.discovery.known_texts import AnswerIndex
from kedge.discovery.token_bytes import pack, unpack
from kedge.types import SampleId, Tokens, ValueKind
from tests.discovery.teams import words


def sample(name: str) -> SampleId:
    return SampleId(ValueKind.AGENT, name)


def test_of_answers_that_are_equal_but_for_their_ends_the_latest_is_known() -> None:
    index, answer = AnswerIndex(), words("answer", 20)
    like = (0, 1, *answer[2:-2], 2, 3)
    assert index.equal(pack(answer)) is None
    index.put(pack(answer), sample("first"))
    assert index.equal(pack(like)) == sample("first")
    index.put(pack(like), sample("second"))
    index.drop(pack(answer), sample("first"))
    assert index.equal(pack(answer)) == sample("second")


def test_a_common_opening_does_not_make_a_prompt_expensive(monkeypatch: pytest.MonkeyPatch) -> None:
    index, answers = AnswerIndex(), [(*words("opening", 6), *words(f"rest {number}", 6)) for number in range(8)]
    for number, answer in enumerate(answers):
        index.put(pack(answer), sample(str(number)))
    text = pack((*answers[2], *answers[5]))
    assert [*index.find(text)] == [sample("5"), sample("2")]
    openings = pack([token for answer in answers for token in answer[:6]])
    assert len([*index._candidates(unpack(openings))]) == 64, "every answer at every opening"
    monkeypatch.setattr("kedge.discovery.known_texts.MAX_SEARCHED", len(unpack(openings)))
    compared = iter(index._candidates(unpack(openings)))
    monkeypatch.setattr(index, "_candidates", lambda _: compared)
    assert [*index.find(openings)] == [] and len([*compared]) == 64 - 48


def test_against_a_search_of_every_place() -> None:
    rng, index, known = Random(0), AnswerIndex(), dict[SampleId, Tokens]()
    for number in range(300):
        answer = tuple(rng.randrange(3) for _ in range(rng.randrange(8, 12)))
        if number % 3 == 0 and known:
            gone = rng.choice([*known])
            index.drop(pack(known[gone]), gone)
            del known[gone]
        for other in [one for one, tokens in known.items() if tokens[2:-2] == answer[2:-2]]:
            del known[other]
        known[sample(str(number))] = answer
        index.put(pack(answer), sample(str(number)))
        text = tuple(rng.randrange(3) for _ in range(40))
        places = ((at, one, tokens[2:-2]) for one, tokens in known.items() for at in range(40))
        true = [(at, one) for at, one, inner in places if text[at : at + len(inner)] == inner]
        found = [*index.find(pack(text))]
        assert sorted(found) == sorted(one for _, one in true)
    for one, tokens in known.items():
        index.drop(pack(tokens), one)
    assert not index._answers and not index._firsts
