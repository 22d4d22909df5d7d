"""Tasks of real text: their questions, their order, what a grammar lets through, and the licences beside the files."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from kedge.engine.common.grammars import Grammars
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.errors import ConfigError
from kedge.models import default_model
from kedge.types import AgentId
from kedge.workloads import real
from kedge.workloads.base import QUESTION, Question
from kedge.workloads.miniature import MATH
from kedge.workloads.reading import PICKS, READING, questions

DATA = Path(real.__file__).with_name("data")
READER, CHECKER, FINAL = map(AgentId, ("reader", "checker", "final"))
ROW = {
    "context": "The tower has 12 bells, 112 steps and a “red” door.",
    "questions": [
        {"id": "a", "question": "How many bells?", "answers": ["12"]},
        {"id": "b", "question": "How many steps?", "answers": ["112"]},
        {"id": "c", "question": "Which door?", "answers": ['a "red" \\ door', "a “red” door"]},
        {"id": "d", "question": "What else?", "answers": ["x" * 61]},
    ],
}


@pytest.mark.parametrize("name", real.TEAMS)
def test_the_seed_orders_the_questions(name: str) -> None:
    team, asked = real.load(name)
    assert team.name == name
    assert asked == real.load(name, seed=0)[1]
    others = real.load(name, seed=1)[1]
    texts = [one.text for one in asked]
    assert texts != [one.text for one in others]
    assert sorted(texts) == sorted(one.text for one in others)
    assert len(asked) >= 250
    assert team.workflow().inputs == (QUESTION,)


@pytest.mark.parametrize("name", ["reading", "reading-picks", "reading-long"])
def test_every_paragraph_is_read_before_one_is_read_again(name: str) -> None:
    asked = real.load(name, seed=3)[1]
    assert len({one.facts["id"] for one in asked}) == len(asked)
    passages = [one.text.partition("\n\nQuestion: ")[0] for one in asked]
    count = len(set(passages))
    assert count > 100
    assert len(set(passages[:count])) == count


@pytest.mark.parametrize(("name", "licence"), [("gsm8k", "MIT License"), ("xquad-en", "CC BY-SA 4.0")])
def test_the_package_has_each_file_with_its_licence(name: str, licence: str) -> None:
    file = DATA / f"{name}.jsonl"
    assert file.stat().st_size < 150_000
    notice = (DATA / f"LICENSE-{name.partition('-')[0].upper()}.md").read_text(encoding="utf-8")
    assert licence in notice
    assert file.name in notice


def test_passages_are_short_and_hold_their_answers() -> None:
    for line in (DATA / "xquad-en.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert len(row["context"]) < 800
        assert all(answer in row["context"] for one in row["questions"] for answer in one["answers"])


def test_gold_answers_are_right_and_others_are_not() -> None:
    by_id = {one.facts["id"]: one for one in questions(ROW)}
    for said in ("12", "There are 12 bells.\nOr more?", "\nthe 12."):
        assert READING.right(FINAL, said, by_id["a"]) is True
    for said in ("11", "", "...", "It is\n12"):
        assert READING.right(FINAL, said, by_id["a"]) is False
    assert READING.right(CHECKER, "it has a RED door", by_id["c"]) is True
    assert READING.final("The “Red” Door.\nYes") == "red door"


def test_options_neither_hold_the_answer_nor_are_part_of_it() -> None:
    by_id = {one.facts["id"]: one for one in questions(ROW)}
    door = 'a "red" \\ door'
    assert by_id["a"].facts["options"] == ["12", door]
    assert by_id["c"].facts["options"] == ["112", "12", door]
    assert by_id["d"].facts["options"] == []
    assert PICKS.grammar(FINAL, by_id["d"]) == ""


def test_a_turn_of_a_session_begins_with_the_turns_before_it_and_their_answers() -> None:
    turns = real.load("reading-sessions", seed=1)[1]
    passage = [one.text.partition("\n\n")[0] for one in turns]
    firsts = [at for at, one in enumerate(passage) if at == 0 or one != passage[at - 1]]
    assert len(firsts) == len(set(passage)) > 20, "all turns about a passage stay together"
    for at, (before, after) in enumerate(pairwise(turns), 1):
        if at not in firsts:
            assert after.text.startswith(f"{before.text}\nAnswer: {before.answer}\n\nQuestion: ")
        else:
            assert after.text.count("Question: ") == 1


def test_only_readers_and_editors_pick() -> None:
    asked = questions(ROW)[0]
    assert PICKS.grammar(CHECKER, asked) == ""
    assert PICKS.grammar(READER, asked) == PICKS.grammar(FINAL, asked) != ""
    assert READING.grammar(FINAL, asked) == ""
    assert MATH.grammar(FINAL, asked) == ""


def accepted(grammars: Grammars, tokenizer: HFTokenizer, grammar: str, text: str) -> bool:
    """Whether a grammar lets through the tokens of a text and then the end."""
    state = grammars.begin(grammar)
    assert state
    for token in (*tokenizer.encode(text, special=False), tokenizer.inner.eos_token_id):
        if not state.allowed()[token // 8] >> token % 8 & 1:
            return False
        state.take(token)
    return True


def test_a_grammar_accepts_the_options_and_nothing_else() -> None:
    pytest.importorskip("llguidance")
    tokenizer = HFTokenizer.load(default_model())
    grammars = Grammars(tokenizer, {tokenizer.inner.eos_token_id}, len(tokenizer.inner))
    made = questions(ROW)
    asked = [*[one for one in made if one.facts["options"]], *real.load("reading-picks")[1][:30]]
    for one in asked:
        grammar = PICKS.grammar(FINAL, one)
        assert one.answer in one.facts["options"]
        for option in one.facts["options"]:
            pick = json.dumps({"answer": option}, ensure_ascii=False)
            assert accepted(grammars, tokenizer, grammar, pick), (grammar, option)
            assert PICKS.right(FINAL, pick, one) is (option == one.answer)
            assert not accepted(grammars, tokenizer, grammar, pick[:-1])
            assert not accepted(grammars, tokenizer, grammar, option)
        assert not accepted(grammars, tokenizer, grammar, "I do not know")


def test_a_file_replaces_the_packages_questions(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({**ROW, "context": ROW["context"] + "\u2028"}, ensure_ascii=False) + "\n")
    assert len(real.load("reading", file)[1]) == 4
    assert len(real.load("reading-picks", file)[1]) == 3
    with pytest.raises(ConfigError, match=r"mine\.jsonl:1.*is not a row of GSM8K"):
        real.load("gsm8k", file)
    with pytest.raises(ConfigError, match="no-such"):
        real.load("reading", tmp_path / "no-such.jsonl")
    with pytest.raises(
        ConfigError, match="must be one of gsm8k, reading, reading-picks, reading-long, reading-sessions"
    ):
        real.load("riddles")


def test_a_question_is_the_same_whatever_the_order() -> None:
    def by_id(seed: int) -> dict[str, Question]:
        return {one.facts["id"]: one for one in real.load("reading", seed=seed)[1]}

    assert by_id(0) == by_id(5)
