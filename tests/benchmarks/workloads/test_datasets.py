"""Loading, prompting and scoring of the data sets: gold answers score 100 %, wrong ones 0 %.

The rows here are a handful of our own in the shape of each data set. With `KEDGE_DATA` set to a folder that holds
`gsm8k.jsonl` or `humaneval-py.jsonl`, the whole of them is checked as well.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.workloads import humaneval, mathematics, mmlu
from benchmarks.workloads.catalog import NAMES, load
from benchmarks.workloads.mathematics import boxed
from benchmarks.workloads.rows import DatasetSource
from kedge.errors import ConfigError, WorkflowError
from kedge.types import AgentId
from kedge.workloads import gsm8k, real
from kedge.workloads.base import QUESTION, Question, Team
from kedge.workloads.gsm8k import run_program

FINAL = AgentId("final")
SQUARES = '''from typing import List

def scale(x):
    """ Twice x """
    return 2 * x

def doubled_sum(xs: List[int]) -> int:
    """ The sum of all numbers, each doubled.
    >>> doubled_sum([1, 2])
    6
    >>> doubled_sum([])
    0
    """
'''
ROWS: dict[str, list[dict[str, object]]] = {
    "gsm8k": [
        {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7 pens.\n#### 7"},
        {"question": "A house costs 2,000,000 and loses 550,000. What is it worth?", "answer": "So\n#### 1,450,000"},
        {"question": "It was 5 degrees and fell by 15. How warm is it?", "answer": "5 - 15 = -10\n#### -10"},
    ],
    "math500": [
        {"problem": "Half of one?", "answer": r"\frac{1}{2}", "subject": "Algebra", "level": 1, "solution": "…"},
        {"problem": "Solve x^2=4.", "answer": r"\{-2, 2\}", "subject": "Algebra", "level": 2},
        {"problem": "Polar form?", "answer": r"\left( 3, \frac{\pi}{2} \right)", "subject": "Precalculus", "level": 2},
        {"problem": "Which text?", "answer": r"\text{Evelyn}", "subject": "Algebra", "level": 1},
    ],
    "aime": [{"Problem": "How many?", "Answer": 33}, {"problem": "And now?", "answer": "033"}],
    "humaneval": [
        {
            "prompt": SQUARES,
            "canonical_solution": "    return sum(map(scale, xs))\n",
            "entry_point": "doubled_sum",
            "test": "def check(candidate):\n    assert candidate([1, 2]) == 6\n    assert candidate([]) == 0\n",
        },
    ],
    "mmlu": [
        {"question": "2 + 2?", "choices": ["3", "4", "5", "6"], "answer": 1, "subject": "arithmetic"},
        {"question": "Capital of France?", "choices": ["Rome", "Bern", "Oslo", "Paris"], "answer": 3},
    ],
}
GOLD = {
    "gsm8k": "I checked it.\nThe answer is {}.",
    "math500": r"Hence \boxed{{{}}}.",
    "aime": r"Hence \boxed{{{}}}.",
    "humaneval": "This is it:\n```python\n{}\n```",
    "mmlu": "B is tempting, A is not. The answer is {}.",
}


def file_of(folder: Path, name: str) -> Path:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]), encoding="utf-8")
    return file


@pytest.fixture(params=ROWS)
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Team, list[Question]]:
    team, questions = load(request.param, file_of(tmp_path, request.param))
    return request.param, team, list(questions)


def test_gold_answers_are_right_and_wrong_ones_are_not(loaded: tuple[str, Team, list[Question]]) -> None:
    name, team, questions = loaded
    assert len(questions) == len(ROWS[name])
    for seed, asked in enumerate(questions):
        gold = GOLD[name].format(asked.answer)
        assert team.right(FINAL, gold, asked) is True, asked
        bad = team.corrupt(random.Random(seed), gold)
        assert bad != gold
        assert team.right(FINAL, bad, asked) is False, bad
        for nothing in ("", "I do not know.", r"\boxed{}"):
            assert team.right(FINAL, nothing, asked) is False


def test_the_gold_solution_itself_is_right(loaded: tuple[str, Team, list[Question]]) -> None:
    name, team, questions = loaded
    if name == "gsm8k":
        solutions = {str(row["question"]): str(row["answer"]) for row in ROWS[name]}
        for asked in questions:
            assert team.right(FINAL, solutions[asked.text], asked) is True


@pytest.mark.parametrize("agents", [2, 3, 4, 5])
def test_teams_of_two_to_five_read_question_and_each_other(
    loaded: tuple[str, Team, list[Question]], agents: int
) -> None:
    _, team, _ = loaded
    flow = team.workflow(agents)
    assert flow.ids[-1] == FINAL
    assert flow.inputs == (QUESTION,)
    for place, agent in enumerate(flow.agents):
        read = {placeholder.name for placeholder in agent.placeholders}
        heard = {f"agent_{other.id}_current" for other in flow.agents[:place]}
        tools = {f"condition_{other.id}_current" for other in flow.agents[:place] if other.tool}
        assert read == {QUESTION} | heard | tools
        assert agent.max_tokens >= 512


def test_teams_have_bounds(loaded: tuple[str, Team, list[Question]]) -> None:
    _, team, _ = loaded
    for wrong in ({"agents": 6}, {"agents": 0}, {"topology": "pyramid"}):
        with pytest.raises(WorkflowError):
            team.workflow(**wrong)
    assert len(team.workflow(topology="star").agents) == 5


def test_equal_mathematics_is_right_in_any_spelling() -> None:
    cases = [(r"\frac{1}{2}", "0.5"), (r"\{-2, 2\}", r"\{2,-2\}"), ("2x+2", "2(x+1)"), (r"10\%", r"10")]
    for gold, said in cases:
        asked = Question("", gold)
        assert mathematics.is_equal(said, asked), (gold, said)
    assert not mathematics.is_equal("0.51", Question("", r"\frac{1}{2}"))
    assert mathematics.is_integer("33", Question("", "033"))


def test_without_math_verify_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert mathematics.is_equal("x", Question("", "x"))
    with pytest.raises(ConfigError, match=r"kedge\[data\]"):
        mathematics.is_equal("y", Question("", "x"))


def test_silent_agents_have_nothing_to_be_right_about() -> None:
    asked = Question("", "7")
    assert gsm8k.GSM8K.right(AgentId("programmer"), "print(7)", asked) is None
    assert mmlu.TEAM.right(AgentId("searcher"), "Search: seven", asked) is None
    assert gsm8k.GSM8K.right(AgentId("solver"), "The answer is 7.", asked) is True


def test_the_programmers_tool_runs_the_code_and_nothing_else() -> None:
    assert run_program("```python\nprint(6 * 7)\n```", {}) == "42"
    assert run_program("```python\nprint(1 / 0)\n```", {}) == "ZeroDivisionError"
    assert run_program("```python\nx = 1\n```", {}) == "nothing"
    assert run_program("I would multiply.", {}) == "no code found"
    assert run_program("```python\nopen('/etc/passwd')\n```", {}) == "PermissionError"


def test_the_examples_of_a_docstring_are_run() -> None:
    good = f"```python\n{SQUARES}    return sum(map(scale, xs))\n```"
    shown = humaneval.run_examples(good, {QUESTION: SQUARES})
    assert shown == "doubled_sum([1, 2]) gives 6\ndoubled_sum([]) gives 0"
    assert humaneval.run_examples("no code", {QUESTION: SQUARES}) == "no code found"
    assert humaneval.run_examples(good, {QUESTION: "def f(): ..."}) == "the request has no examples"


def test_code_may_lean_on_what_the_prompt_defines_before_it() -> None:
    asked = humaneval.question(ROWS["humaneval"][0])
    assert humaneval.passes("def doubled_sum(xs):\n    return scale(sum(xs))", asked)
    assert not humaneval.passes("def doubled_sum(xs):\n    print('passed')\n    exit(0)", asked)
    assert not humaneval.passes("def doubled_sum(xs):\n    while True: pass", replace_limits(asked))


def replace_limits(asked: Question) -> Question:
    """The same question with a test that gives up at once, so that the endless loop is not waited for."""
    return Question(asked.text, asked.answer, {**asked.facts, "test": "raise SystemExit(3)\ndef check(_): ..."})


def test_look_up_finds_titles() -> None:
    team = mmlu.with_articles(mmlu.TEAM, {"Paris": "Paris is a city.", "Oslo": "Oslo too."})
    tool = next(agent.tool for agent in team.agents if agent.tool)
    assert tool("Search: paris; Atlantis; OSLO.", {}) == "paris: Paris is a city.\noslo: Oslo too."
    assert tool("Paris", {}) == mmlu.LookUp()("Search: Paris", {}) == "Nothing found."


def test_bad_files_are_named_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    for text, where in (('{"question": "q"}', "bad.jsonl:1"), ("{}\nnot json", "bad.jsonl:2"), ("[1]", "bad.jsonl:1")):
        file.write_text(text if "not json" not in text else json.dumps(ROWS["gsm8k"][0]) + "\nnot json")
        with pytest.raises(ConfigError, match=where):
            load("gsm8k", file)
    with pytest.raises(ConfigError, match="nowhere"):
        load("gsm8k", tmp_path / "nowhere.jsonl")
    file.write_text(json.dumps({"question": "?", "choices": ["a"], "answer": 0}))
    with pytest.raises(ConfigError, match="is not a row of"):
        load("mmlu", file)


def test_the_hub_is_asked_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def load_dataset(*args: object, **kwargs: object) -> list[dict[str, object]]:
        asked.append((args, kwargs))
        return ROWS["math500"]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    answers = [question.answer for question in load("math500")[1]]
    assert answers == [row["answer"] for row in ROWS["math500"]]
    assert asked == [(("HuggingFaceH4/MATH-500", None), {"split": "test"})]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"kedge\[data\]"):
        DatasetSource("some/thing", "test", gsm8k.question).questions()


def test_the_catalog_knows_all_and_no_more(tmp_path: Path) -> None:
    assert set(NAMES) == {"math", "choice", "code", *real.TEAMS, *ROWS}
    with pytest.raises(ConfigError, match="workload='chess'"):
        load("chess")
    with pytest.raises(ConfigError, match="are generated"):
        load("math", tmp_path)
    for name in ("math", "choice", "code"):
        workload, questions = load(name, seed=3)
        _, again = load(name, seed=3)
        first = next(iter(questions))
        assert workload.name == name
        assert first == next(iter(again))
        assert workload.workflow().agents


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{unfinished", None),
        (r"\boxed{}", ""),
        ("none", None),
    ],
)
def test_boxed(text: str, content: str | None) -> None:
    assert boxed(text) == content


# the whole data sets --------------------------------------------------------------------------------------------------


def whole(name: str) -> Path:
    file = Path(os.environ.get("KEDGE_DATA", "/nonexistent")) / name
    if not file.is_file():
        pytest.skip(f"KEDGE_DATA has no {name}")
    return file


def test_all_of_gsm8k() -> None:
    file = whole("gsm8k.jsonl")
    team, questions = load("gsm8k", file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    solutions = {row["question"].strip(): row["answer"] for row in rows}
    for seed, asked in enumerate(questions):
        solution = solutions[asked.text]
        assert team.right(FINAL, solution, asked)
        assert team.right(FINAL, f"The answer is {asked.answer}.", asked)
        assert not team.right(FINAL, team.corrupt(random.Random(seed), solution), asked)


def by_heart(asked: Question) -> str:
    """A program that knows what the tests assert: `candidate(…) == …` as a table."""
    facts = re.findall(r"assert candidate\((.*)\) == (.*)$", asked.facts["test"], re.MULTILINE)
    table = "".join(f"    (repr(({args},)), {value}),\n" for args, value in facts)
    return f"def {asked.facts['entry']}(*args):\n    return dict([\n{table}    ])[repr(args)]\n"


@pytest.mark.slow
def test_all_of_humaneval() -> None:
    _, questions = load("humaneval", whole("humaneval-py.jsonl"))
    listed = list(questions)
    assert len(listed) == 161
    for asked in listed:
        assert humaneval.passes(f"# ours\n{by_heart(asked)}", asked), asked.facts["entry"]
        assert not humaneval.passes(f"def {asked.facts['entry']}(*_):\n    return object()", asked)
