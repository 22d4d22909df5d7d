"""The task of tool calls: who calls what, for which question and after which answers."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice

import pytest

from kedge.decisions import PROSE, first_decision
from kedge.server.openai.tool_calls import Llama3Json
from kedge.workloads.base import Question
from kedge.workloads.miniature import TOOLS, MiniatureTeam, Role
from kedge.workloads.miniature.base import split_of
from kedge.workloads.miniature.math import NAMES
from kedge.workloads.miniature.tools import LIMIT, NOTHING, call, corrupt, search, stated

SEARCHER, SELLER, INSPECTOR, FINAL = TOOLS.roles
QUESTIONS = list(islice(TOOLS.questions("test", 3), 400))
STATED = next(question for question in QUESTIONS if question.facts["known"])
ABSENT = next(question for question in QUESTIONS if not question.facts["known"])


def spoken(question: Question, searcher: str | None = None) -> dict[str, str]:
    """What the others read of the Searcher: its reference answer or another, and what its tool finds."""
    answer = searcher or SEARCHER.reference(question)
    return {"agent_searcher_current": answer, "condition_searcher_current": search(answer, question)}


def test_questions_are_seeded_and_split() -> None:
    again = list(islice(TOOLS.questions("test", 3), 400))
    assert again == QUESTIONS and len({question.text for question in QUESTIONS}) == 400
    assert {split_of(question.text) for question in QUESTIONS} == {"test"}
    assert not {q.text for q in islice(TOOLS.questions("train", 3), 400)} & {q.text for q in QUESTIONS}


@pytest.mark.parametrize("role", TOOLS.roles, ids=lambda role: role.id)
def test_half_of_the_answers_are_calls(role: Role) -> None:
    decisions = Counter(first_decision(role.reference(question)) for question in QUESTIONS)
    assert len(decisions) == 2
    assert 0.42 < decisions[PROSE] / len(QUESTIONS) < 0.58


def test_the_number_is_in_the_passage_or_in_what_the_search_finds() -> None:
    for question in QUESTIONS:
        fact = f"{question.facts['name']} owns {question.answer} {question.facts['item']}."
        assert (fact in question.text) == question.facts["known"]
        assert question.facts["known"] or spoken(question)["condition_searcher_current"] == fact
        assert 1 <= question.facts["count"] <= 9


def test_each_agent_decides_by_what_it_reads() -> None:
    for question in QUESTIONS:
        known, many = question.facts["known"], question.facts["count"] > LIMIT
        decided = [first_decision(role.answer(question, spoken(question))) for role in TOOLS.roles]
        sells = "sell" if many else PROSE
        assert decided == [PROSE if known else "search", sells, "check" if known else PROSE, sells]


@pytest.mark.parametrize("role", [SELLER, FINAL], ids=lambda role: role.id)
def test_they_depend_on_another_agents_search(role: Role) -> None:
    name, item = ABSENT.facts["name"], ABSENT.facts["item"]
    for count in range(1, 10):
        found = {"condition_searcher_current": f"{name} owns {count} {item}."}
        answer = role.answer(ABSENT, found)
        assert answer == call("sell", item, count) if count > LIMIT else str(count) in answer
    for nothing in ({}, {"condition_searcher_current": NOTHING}, {"condition_searcher_current": "failed"}):
        assert role.answer(ABSENT, nothing) == call("search", "who", name)
    wrong = {"condition_searcher_current": f"{STATED.facts['name']} owns 99 pens."}
    assert role.answer(STATED, wrong) == role.reference(STATED), "the passage counts, where it has the number"


def test_the_inspector_depends_on_the_searchers_answer() -> None:
    claim = spoken(ABSENT, "The passage says that Tom owns 3 pens.")
    assert INSPECTOR.answer(ABSENT, claim) == call("check", ABSENT.facts["name"], 3)
    found = spoken(ABSENT)["condition_searcher_current"]
    assert INSPECTOR.answer(ABSENT, spoken(ABSENT)) == f"The search finds that {found}"
    assert INSPECTOR.answer(ABSENT, spoken(ABSENT, call("search", "who", "Nobody"))) == "The search finds nothing."


@pytest.mark.parametrize("role", TOOLS.roles, ids=lambda role: role.id)
def test_references_are_right_and_others_wrong(role: Role) -> None:
    for question in QUESTIONS[:100]:
        answer = role.reference(question)
        assert role.answer(question, spoken(question)) == answer
        assert role.correct(answer, question)
        assert not role.correct(corrupt(random.Random(question.text), answer), question)
        assert not role.correct("", question)


def test_calls_are_as_the_server_parses_them() -> None:
    for question in QUESTIONS[:100]:
        for role in TOOLS.roles:
            answer = role.reference(question)
            calls = Llama3Json().push(answer, last=True).calls
            assert [one.name for one in calls] == [name for name in [first_decision(answer)] if name != PROSE]
            assert all(len(json.loads(one.arguments)) == 1 for one in calls)


def test_the_tool_finds_only_the_asked_person() -> None:
    right = call("search", "who", ABSENT.facts["name"])
    assert search(right, Question(ABSENT.text, "", {})) == search(right, ABSENT) != NOTHING
    other = next(name for name in NAMES if name != ABSENT.facts["name"])
    bad = ("", "Look up: Tom.", right[:-1], right + right, call("sell", "pens", 4), call("search", "who", other))
    assert {search(text, ABSENT) for text in bad} == {NOTHING}
    assert search(right, Question("no question", "")) == NOTHING


def test_what_is_corrupted() -> None:
    rng = random.Random(0)
    searched = call("search", "who", "Tom")
    changed = {corrupt(rng, searched) for _ in range(200)}
    assert searched not in changed
    assert {first_decision(text) for text in changed} == {"search", PROSE}
    for text in (call("sell", "pens", 7), call("check", "Tom", 7), "The answer is 7.", "Tom owns 7 pens."):
        others = {corrupt(rng, text) for _ in range(200)}
        assert text not in others and {first_decision(other) for other in others} == {first_decision(text)}
        assert {len(other) for other in others} == {len(text)}
    assert corrupt(rng, "The search finds nothing.") == "The search finds nothing."


@pytest.mark.parametrize(
    ("text", "decision"),
    [
        ("The passage says that Tom owns 4 pens.", "4"),
        (' {"name":"sell","parameters":{"pens":7}}\n', '{"name":"sell","parameters":{"pens":7}}'),
        ("The search finds nothing.", None),
        ("", None),
    ],
)
def test_stated(text: str, decision: str | None) -> None:
    assert stated(text) == decision


def test_the_team_is_a_workload() -> None:
    team = MiniatureTeam(TOOLS)
    assert team.workflow().order == tuple(role.id for role in TOOLS.roles)
    assert team.first_decision(FINAL.reference(STATED)) in ("sell", PROSE)
    assert team.final(FINAL.reference(STATED)) is not None
