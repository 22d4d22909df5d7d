"""Known texts are found in prompts, as they are or with their ends joined with what is around them."""

import tracemalloc
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.discovery import known_texts
from kedge.discovery.known_texts import AnswerIndex, KnownText, KnownTexts
from kedge.discovery.templates import Occurrence
from kedge.structures import token_bytes
from kedge.structures.token_bytes import pack, unpack
from kedge.types import SampleId, Tokens, ValueKind
from tests.discovery.teams import words

ANSWER = tuple(range(50, 62))
SAMPLE = SampleId(ValueKind.AGENT, "a", 0, "01")


def known(*tokens: int, label: str = "a", sample: SampleId | None = None) -> KnownText:
    return KnownText(token_bytes.pack(tokens), (lambda: label,), sample)


def found(texts: KnownTexts, *prompt: int, start: int = 0) -> tuple[Occurrence, ...]:
    return texts.find(token_bytes.pack(prompt), start)


def test_a_text_is_found_whole_or_without_its_ends() -> None:
    texts = KnownTexts()
    texts.put(known(*ANSWER))
    assert found(texts, 1, 2, *ANSWER, 3) == (Occurrence(2, 14, "a"),)
    assert found(texts, 1, 2, *ANSWER[:-1], 3) == (Occurrence(2, 13, "a"),)
    assert found(texts, 1, 2, *ANSWER[1:-2], 3) == (Occurrence(2, 11, "a"),)
    assert found(texts, 1, 2, *ANSWER[1:-3], 3, 4) == ()
    assert found(texts, *ANSWER, start=5) == ()


def test_the_longest_of_texts_that_overlap_is_found() -> None:
    texts = KnownTexts()
    texts.put(known(*ANSWER[:9], label="short"))
    texts.put(known(*ANSWER, label="long"))
    texts.put(known(*range(9), label="unrelated"))
    assert [one.label for one in found(texts, *range(9), *ANSWER)] == ["unrelated", "long"]


def test_a_text_without_a_name_yet_is_not_found_and_is_later() -> None:
    texts, label = KnownTexts(), [""]
    texts.put(KnownText(token_bytes.pack(ANSWER), (lambda: label[0],)))
    assert found(texts, *ANSWER) == ()
    label[0] = "named"
    assert [one.label for one in found(texts, *ANSWER)] == ["named"]


@pytest.mark.parametrize("head", [(), (7,), (7, 8), (7, 8, 9)])
@pytest.mark.parametrize("tail", [(), (7,), (7, 8)])
def test_an_answer_is_known_in_a_value_whose_ends_a_tokenizer_has_joined(head: Tokens, tail: Tokens) -> None:
    texts = KnownTexts()
    texts.put(known(*ANSWER, sample=SAMPLE))
    texts.put(known(*range(20)))
    for first, last in product(range(4), range(4)):
        value = (*head, *ANSWER[first : len(ANSWER) - last], *tail)
        is_known = max(first, last) <= 2 and len(head) <= first + 1 and len(tail) <= 1
        part = (len(head), len(value) - len(tail), SAMPLE) if is_known else None
        assert texts.index.quoted(pack(value)) == part
    assert texts.index.quoted(pack(range(20))) is texts.index.quoted(b"") is None


def test_a_part_that_several_answers_have_tells_of_none() -> None:
    texts, part = KnownTexts(), words("verdict", 20)
    for number in range(2):
        texts.put(known(*words(number, 20), *part, sample=sample(str(number))))
        found = texts.quoted(pack((7, *part)), is_answer=True)
        assert found == ((1, 21, sample("0")) if number == 0 else None)
    assert texts.quoted(pack(part), is_answer=False) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(8, 40), st.booleans()), max_size=60))
def test_memory_is_bounded_and_what_was_forgotten_is_no_answer(puts: list[tuple[int, int, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_texts, "MAX_BYTES", 400)
        texts = KnownTexts()
        for first, size, is_answer in puts:
            texts.put(known(*range(first, first + size), sample=SAMPLE if is_answer else None))
            assert texts.nbytes == sum(one.nbytes for one in texts._texts.values()) <= 400
            answers = [one.tokens for one in texts._texts.values() if one.sample]
            assert sum(map(len, texts.index._answers.values())) == len(answers)
            assert all(texts.index.quoted(one) == (0, token_bytes.size(one), SAMPLE) for one in answers)


def test_the_bytes_that_are_counted_are_those_that_are_taken() -> None:
    texts, rng = KnownTexts(), Random(0)
    answers = [rng.choices(range(10_000, 90_000), k=4000) for _ in range(40)]
    tracemalloc.start()
    for number, tokens in enumerate(answers):
        texts.put(known(*tokens, sample=sample(str(number))))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.9 * taken < texts.nbytes < 1.1 * taken


def test_an_answer_that_another_repeats_is_called_by_who_had_it_first() -> None:
    texts, labels = KnownTexts(), ["", ""]
    for number, sample in enumerate((SAMPLE, SampleId(ValueKind.AGENT, "b", 0, "02"), SAMPLE)):
        texts.put(KnownText(token_bytes.pack(ANSWER), (lambda at=number: labels[at],), sample))  # type: ignore[misc]
    assert found(texts, *ANSWER) == ()
    labels[1] = "who repeats it"
    assert [one.label for one in found(texts, *ANSWER)] == ["who repeats it"]
    labels[0] = "who had it first"
    assert [one.label for one in found(texts, *ANSWER)] == ["who had it first"]
    assert texts.index.equal(token_bytes.pack(ANSWER)) == SAMPLE


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
    assert len([*index._candidates(openings)]) == 64, "every answer at every opening"
    monkeypatch.setattr("kedge.discovery.known_texts.MAX_SEARCHED", len(unpack(openings)))
    compared = iter(index._candidates(openings))
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
