"""Who calls after whom is learned from calls as they come, alone or interleaved, and runs are told apart."""

from operator import itemgetter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.discovery import runs as runs_module
from kedge.discovery.bounds import EXAMPLES, LEAST_TOKENS, MAX_OF_ONE
from kedge.discovery.runs import END, FoundRun, FoundRuns, Successors, TextsOfRuns
from kedge.types import AgentId, RunId, SampleId, Segment, ValueKind
from kedge.workflow.steps import NextRun


def agent(name: object) -> AgentId:
    return AgentId(str(name))


def test_a_circle_is_one_flow_with_known_steps() -> None:
    found = FoundRuns()
    for call in range(20):
        run = found.arrive(agent(f"a{call % 5}"), call)
        found.ended(run, call + 0.9)
    assert run.flow == "found-1"
    assert found.forecast(run) == {agent(f"a{step}"): NextRun(float(step), 1.0) for step in range(5)}
    found.arrive(agent("a0"), 21.0)
    assert found.forecast(run)[agent("a0")] == NextRun(0.0)
    assert found.forecast(run)[agent("a1")] == NextRun(1.0, 1.0)


def test_interleaved_flows_are_told_apart_by_who_follows_whom() -> None:
    found, rng, flows = FoundRuns(), Random(0), 16
    turns, last, right = [0] * flows, [RunId("")] * flows, 0
    events: list[tuple[float, int, FoundRun | None]] = [(rng.random(), flow, None) for flow in range(flows)]
    for event in range(2 * flows * 60):
        now, flow, run = events.pop(events.index(min(events, key=itemgetter(0))))
        if run:
            found.ended(run, now)
            events.append((now + 0.01, flow, None))
            continue
        run = found.arrive(agent(f"{flow}/{turns[flow] % 5}"), now)
        right += event >= flows * 60 and run.flow == last[flow]
        last[flow], turns[flow] = run.flow, turns[flow] + 1
        events.append((now + rng.uniform(0.5, 1.5), flow, run))
    assert right >= 0.95 * flows * 30
    expected = [found.successors.likely(agent(f"{flow}/{at}")) for flow in range(flows) for at in range(5)]
    true = [agent(f"{flow}/{(at + 1) % 5}") for flow in range(flows) for at in range(5)]
    assert sum(max(one, key=one.__getitem__, default=None) == who for one, who in zip(expected, true, strict=True)) > 76


def test_a_run_that_reads_nothing_is_another_one_that_takes_over_a_flow_until_that_is_read_from() -> None:
    found = FoundRuns()
    one = found.arrive(agent("a"), 0)
    found.ended(one, 1)
    two = found.arrive(agent("a"), 1.1)
    assert two is not one and two.flow == one.flow
    found.ended(two, 2)
    assert found.arrive(agent("b"), 2.1, one.id) is one and one.flow != two.flow
    assert found.forecast(one) == {agent("b"): NextRun(0.0)}


def test_a_run_whose_texts_are_usually_read_next_is_not_taken_over() -> None:
    found = FoundRuns()
    for start in range(0, 30, 10):
        run = found.arrive(agent("a"), start)
        found.ended(run, start + 1)
        found.ended(found.arrive(agent("b"), start + 2, run.id), start + 3)
    waits = found.arrive(agent("a"), 40)
    found.ended(waits, 41)
    assert found.arrive(agent("a"), 41.1).flow != waits.flow
    session = found.arrive(agent("s"), 50)
    found.ended(session, 51)
    assert found.resume(session.id) is session and session.running == 1
    found.ended(session, 52)
    assert found.arrive(agent("s"), 53).flow != session.flow
    assert found.resume(RunId("forgotten")) is None


def test_a_run_that_nobody_goes_on_with_is_over_and_that_is_learned() -> None:
    found = FoundRuns()
    for start in range(0, 400, 100):
        for at, name in enumerate("ab"):
            run = found.arrive(agent(name), start + at)
            found.ended(run, start + at + 0.5)
        assert [one.id for one in found.over(start + 50)] == [run.id]
    assert found.successors.probability(agent("b"), END) == 1
    assert found.successors.likely(agent("b")) == {}
    waits = found.arrive(agent("a"), 500)
    assert not list(found.over(10_000)) and waits.running == 1


def test_forecasts_look_ahead_as_far_as_something_is_expected() -> None:
    successors = Successors()
    for _ in range(3):
        for at in range(40):
            successors.observe(agent(at), agent(at + 1))
    forecast = successors.forecast(agent(0), runs=False)
    assert len(forecast) == 40 and forecast[agent(40)].steps == 39
    assert all(one.probability == 1 for one in forecast.values())


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=200))
def test_memory_is_bounded_and_probabilities_add_up(calls: list[tuple[int, int]]) -> None:
    found = FoundRuns()
    for now, (who, ends) in enumerate(calls):
        run = found.arrive(agent(who), now)
        if ends:
            found.ended(run, now + 0.5)
        for known in found.successors._after.values():
            assert len(known.weights) <= MAX_OF_ONE + 1
            assert abs(known.total - sum(known.weights.values())) < 1e-9
        assert all(0 < one.probability <= 1 + 1e-9 for one in found.forecast(run).values())
    assert len(found) <= runs_module.MAX_AGENTS


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
    found.read(A, ONE, [value("short", size=LEAST_TOKENS - 1)])
    assert found.find(B, [value("short", size=LEAST_TOKENS - 1)]) is None
    found.read(A, TWO, [value("p")])
    assert found.find(B, [value("q"), value("p")]) is None, "they are of two runs"
    found.read(A, TWO, [value("q")])
    assert found.find(B, [value("q")]) is None, "two runs have it"


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
