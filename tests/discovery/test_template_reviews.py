"""Templates get better when more of what agents read is known."""

from __future__ import annotations

from kedge.discovery import Discovery, Found
from kedge.discovery.bounds import MAX_BYTES, MAX_LOOKED_AT
from kedge.discovery.discovery import TemplateReviews
from kedge.discovery.found_agents import FoundAgent
from kedge.discovery.known_texts import KnownText, KnownTexts
from kedge.discovery.templates import PromptTemplate, Slot
from kedge.discovery.token_bytes import pack
from kedge.types import AgentId, RequestId, SampleId, Tokens, ValueKind, WorkflowId
from tests.discovery.teams import judge, solver, words

OPENING = words("all answers begin with this", 3)
SHORT = 2
"""Questions whose answers are too short to be looked for"""


def answer(number: int) -> Tokens:
    return (*OPENING, *words(("a", number), 3 if number < SHORT else 25))


def asked(found: Discovery, number: int, role: str, prompt: Tokens, said: Tokens) -> Found | None:
    request_id = RequestId(f"{role}-{number}")
    got = found.arrive(request_id, prompt, float(number))
    found.ended(request_id, said, float(number))
    return got


def judged(found: Discovery, count: int) -> list[Tokens]:
    """Let a team answer so many questions. Returns what the judge is found to read of the solver, where it is found."""
    read = []
    for number in range(count):
        question = words(("q", number), 60)
        asked(found, number, "solver", solver(question), answer(number))
        got = asked(found, number, "judge", judge(question, answer(number)), words(("verdict", number), 9))
        read += [got.segments[3].tokens] if got else []
    return read


def test_what_all_answers_begin_with_becomes_a_part_of_them_once_they_are_known() -> None:
    read = judged(Discovery(), 10)
    assert read[0] == answer(SHORT)[len(OPENING) :]
    assert read[-1] == answer(9)


def test_what_becomes_an_answer_is_the_samples_that_its_agent_produces() -> None:
    found = Discovery()
    judged(found, 10)
    question = words(("q", 10), 60)
    solved = asked(found, 10, "solver", solver(question), answer(10))
    seen = asked(found, 10, "judge", judge(question, answer(10)), ())
    assert solved and seen and solved.produces == seen.segments[3].sample and solved.produces is not None


def agent_with(template: PromptTemplate, calls: int) -> FoundAgent:
    return FoundAgent(AgentId("x"), WorkflowId("t"), 0, 16, [template], [AgentId("x")], calls)


def prompt(number: int) -> bytes:
    return pack((*words("head", 16), *words(("said", number), 20), *words("tail", 6)))


def template(label: str) -> PromptTemplate:
    return PromptTemplate(pack(words("head", 16)), (Slot(label, b"", pack(words("tail", 6))),))


def taken(calls: list[int], label: str = "x.0") -> list[bool]:
    """Return at which calls of an agent that reads answers there is a better template; `label`: what fills its slot."""
    texts = KnownTexts()
    for number in calls:
        said = pack(words(("said", number), 20))
        texts.put(KnownText(said, (lambda: "answer.y",), SampleId(ValueKind.AGENT, "y", 0, str(number))))
    reviews = TemplateReviews(texts)
    return [reviews.take(agent_with(template(label), number), prompt(number)) is not None for number in calls]


def test_a_review_is_due_whenever_calls_have_doubled() -> None:
    assert taken([1, 2, 7]) == [False] * 3
    assert taken([3, 4, 5]) == [False, False, True]
    assert taken([7, 11, 12, 13, 15, 16, 31, 32, 33]) == [False] * 7 + [False, True]


def test_a_template_that_has_the_answers_is_kept() -> None:
    assert taken([4, 5, 6, 7], "answer.y") == [False] * 4


def test_long_prompts_are_not_looked_at() -> None:
    size = MAX_BYTES // MAX_LOOKED_AT // 4
    texts = KnownTexts()
    texts.put(KnownText(pack(words("said", 20)), (lambda: "answer.y",), SampleId(ValueKind.AGENT, "y", 0, "0")))
    reviews = TemplateReviews(texts)
    long = [
        pack((*words("head", 16), *words(("new", n), size), *words("said", 20), *words("tail", 6))) for n in range(3)
    ]
    assert [reviews.take(agent_with(template("x.0"), 4 + at), one) for at, one in enumerate(long)] == [None] * 3
    assert not reviews._examples
