"""What a call reads tells its run only where no other run may have it."""

from __future__ import annotations

from kedge.discovery.bounds import EXAMPLES, LEAST_TOKENS, MAX_OF_ONE
from kedge.discovery.runs import TextsOfRuns
from kedge.types import AgentId, RunId, SampleId, Segment, ValueKind

A, B, C = map(AgentId, "abc")
ONE, TWO = RunId("one"), RunId("two")


def answer(name: str) -> Segment:
    return Segment((1,) * 20, "answer", SampleId(ValueKind.AGENT, name))


def value(name: str, kind: str = "question", size: int = 20) -> Segment:
    return Segment((1,) * size, kind, SampleId(ValueKind.INPUT, kind, 0, name))


def sample(segment: Segment) -> SampleId:
    assert segment.sample
    return segment.sample


def texts(forgotten: set[RunId] | None = None) -> TextsOfRuns:
    return TextsOfRuns(lambda run: run not in (forgotten or ()))


def knowing(found: TextsOfRuns, kind: str = "question") -> TextsOfRuns:
    """With values enough of a kind that are each of one run."""
    for number in range(EXAMPLES):
        found.read(C, RunId(f"other {number}"), [value(f"other {number}", kind)])
    return found


def test_the_last_answer_counts_and_then_those_that_are_quoted() -> None:
    found = texts()
    found.answered(sample(answer("x")), ONE, None)
    found.answered(sample(answer("y")), TWO, None)
    assert found.find(A, [answer("x"), value("q"), answer("y")]) == TWO
    assert found.find(A, [value("q")], [sample(answer("x")), sample(answer("y"))]) == ONE
    assert found.find(A, [value("q"), answer("z")]) is None


def test_an_answer_of_two_runs_tells_nothing_until_the_first_is_forgotten() -> None:
    forgotten = set[RunId]()
    found = texts(forgotten)
    found.answered(sample(answer("x")), ONE, None)
    found.answered(sample(answer("again")), ONE, sample(answer("x")))
    assert found.find(A, [answer("again")]) == ONE
    found.answered(sample(answer("y")), TWO, sample(answer("again")))
    assert found.find(A, [answer("y")]) is None
    found.answered(sample(answer("z")), TWO, sample(answer("x")))
    assert found.find(A, [answer("z")]) is None
    forgotten.add(ONE)
    found.answered(sample(answer("v")), TWO, sample(answer("x")))
    assert found.find(A, [answer("v")]) == TWO


def test_a_value_tells_agents_that_have_not_read_it_once_its_kind_is_known() -> None:
    found = texts()
    found.read(A, ONE, [value("q")])
    assert found.find(B, [value("q")]) is None
    knowing(found)
    assert found.find(B, [value("q")]) == ONE and found.find(A, [value("q")]) is None
    found.read(A, TWO, [value("p")])
    assert found.find(B, [value("q"), value("p")]) is None, "they are of two runs"
    found.read(A, TWO, [value("q")])
    assert found.find(B, [value("q")]) is None, "two runs have it"


def test_values_that_come_again_in_other_runs_and_short_ones_tell_nothing() -> None:
    found = knowing(texts(), "date")
    for number in range(3):
        found.read(A, RunId(f"first {number}"), [value(f"date {number}", "date")])
        found.read(A, RunId(f"second {number}"), [value(f"date {number}", "date")])
    found.read(A, ONE, [value("today", "date")])
    assert found.find(B, [value("today", "date")]) is None
    knowing(found).read(A, ONE, [value("q", size=LEAST_TOKENS - 1), value("p")])
    assert found.find(B, [value("q", size=LEAST_TOKENS - 1)]) is None and found.find(B, [value("p")]) == ONE


def test_a_value_with_too_many_readers_tells_nothing() -> None:
    found = knowing(texts())
    for number in range(MAX_OF_ONE):
        assert found.find(B, [value("q")]) == (ONE if number else None)
        found.read(AgentId(str(number)), ONE, [value("q")])
    found.read(AgentId("one more"), ONE, [value("q")])
    assert found.find(B, [value("q")]) is None


def test_a_value_of_a_forgotten_run_is_of_the_next_one() -> None:
    forgotten = set[RunId]()
    found = knowing(texts(forgotten))
    found.read(A, ONE, [value("q")])
    forgotten.add(ONE)
    assert found.find(B, [value("q")]) is None
    found.read(A, TWO, [value("q")])
    assert found.find(B, [value("q")]) == TWO
