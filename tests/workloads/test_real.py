"""Tasks of real text: their questions, their order, what is read out of answers, and the licences beside the files."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from kedge.errors import ConfigError
from kedge.workloads import real
from kedge.workloads.base import QUESTION
from kedge.workloads.gsm8k import code, number
from kedge.workloads.reading import READING, questions

DATA = Path(real.__file__).with_name("data")
ROW = {
    "context": "The tower has 12 bells and a “red” door.",
    "questions": [
        {"id": "a", "question": "How many bells?", "answers": ["12"]},
        {"id": "b", "question": "Which door?", "answers": ["a door", "a “red” door"]},
    ],
}


@pytest.mark.parametrize("name", real.TEAMS)
def test_the_seed_orders_the_questions(name: str) -> None:
    team, asked = real.load(name)
    others = real.load(name, seed=1)[1]
    assert asked == real.load(name, seed=0)[1] != others
    assert sorted(one.text for one in asked) == sorted(one.text for one in others)
    assert len(asked) >= 250 and team.workflow().inputs == (QUESTION,)
    assert {agent.max_tokens for agent in team.workflow().shortened(24).agents} == {24}


@pytest.mark.parametrize("name", ["reading", "reading-long"])
def test_every_paragraph_is_read_before_one_is_read_again(name: str) -> None:
    passages = [one.text.partition("\n\nQuestion: ")[0] for one in real.load(name, seed=3)[1]]
    count = len(set(passages))
    assert count > 100
    assert len(set(passages[:count])) == count


def test_a_turn_of_a_session_begins_with_the_turns_before_it_and_their_answers() -> None:
    turns = real.load("reading-sessions", seed=1)[1]
    passages = [one.text.partition("\n\n")[0] for one in turns]
    firsts = [at for at, one in enumerate(passages) if at == 0 or one != passages[at - 1]]
    assert len(firsts) == len(set(passages)) > 20, "all turns about a passage stay together"
    for at, (before, after) in enumerate(pairwise(turns), 1):
        if at in firsts:
            assert after.text.count("Question: ") == 1
        else:
            assert after.text.startswith(f"{before.text}\nAnswer: {before.answer}\n\nQuestion: ")


@pytest.mark.parametrize(("name", "licence"), [("gsm8k", "MIT License"), ("xquad-en", "CC BY-SA 4.0")])
def test_the_package_has_each_file_with_its_licence(name: str, licence: str) -> None:
    file = DATA / f"{name}.jsonl"
    assert file.stat().st_size < 150_000
    notice = (DATA / f"LICENSE-{name.partition('-')[0].upper()}.md").read_text(encoding="utf-8")
    assert licence in notice and file.name in notice


@pytest.mark.parametrize(
    ("said", "question", "right"),
    [
        ("12", "bells", True),
        ("There are 12 bells.\nOr more?", "bells", True),
        ("\nthe 12.", "bells", True),
        ("it has a RED door", "door", True),
        ("11", "bells", False),
        ("...", "bells", False),
        ("It is\n12", "bells", False),
    ],
)
def test_an_answers_first_line_has_to_hold_a_gold_answer(said: str, question: str, right: bool) -> None:
    (asked,) = (one for one in questions(ROW) if question in one.text.partition("Question: ")[2])
    assert READING.right("final", said, asked) is right


def test_a_file_replaces_the_packages_questions(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({**ROW, "context": ROW["context"] + "\u2028"}, ensure_ascii=False) + "\n")
    assert len(real.load("reading", file)[1]) == 2
    with pytest.raises(ConfigError, match=r"mine\.jsonl:1.*is not a row of GSM8K"):
        real.load("gsm8k", file)
    with pytest.raises(ConfigError, match="no-such"):
        real.load("reading", tmp_path / "no-such.jsonl")
    with pytest.raises(ConfigError, match="must be one of gsm8k, reading, reading-long"):
        real.load("riddles")


# GSM8K ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("He has 3 + 4 = 7. The answer is 7.", "7"),
        ("The answer is $1,200.50", "1200.5"),
        ("The answer is: **42**", "42"),
        ("First the answer is 3, no: the answer is 4. It took 9 minutes.", "4"),
        ("so #### -10", "-10"),
        ("12 apples and 5 pears", "5"),
        ("The answer is -0.0", "0"),
        ("nothing", None),
        ("", None),
    ],
)
def test_the_number_that_an_answer_states(text: str, stated: str | None) -> None:
    assert number(text) == stated


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("Here:\n```python\ndef f():\n    return 1\n```\nDone.", "def f():\n    return 1"),
        ("```\n$ ls\n```\n```py\nimport math\nprint(math.pi)\n```", "import math\nprint(math.pi)"),
        ("```python\ndef a(): pass\n```\nbetter:\n```python\ndef b(): pass\n```", "def b(): pass"),
        ("```\nprint(6 * 7)\n```", "print(6 * 7)"),
        ("```python\nprint('unended)\n```", "print('unended)"),
        ("```python\ndef cut_short():\n    return", "def cut_short():\n    return"),
        ("Sure.\n\nfrom typing import List\n\ndef f(): ...\n", "from typing import List\n\ndef f(): ..."),
        ("I would use a loop.", None),
    ],
)
def test_the_program_in_an_answer(text: str, program: str | None) -> None:
    assert code(text) == program
