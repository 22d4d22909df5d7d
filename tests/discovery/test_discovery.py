"""Agents, templates and shared text are found in plain prompts, and only in those of one's own namespace."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kedge.discovery import Discovery, Found, discovery
from kedge.discovery.bounds import MAX_BYTES, MAX_LOOKED_AT
from kedge.discovery.found_agents import FoundAgent
from kedge.discovery.known_texts import KnownText, KnownTexts
from kedge.discovery.templates import PromptTemplate, Slot
from kedge.structures import token_bytes
from kedge.structures.bounded import ENTRIES
from kedge.structures.prefixes import chain_of
from kedge.types import AgentId, GenerateRequest, RequestId, SampleId, Tokens, ValueKind, WorkflowId
from tests.discovery.teams import joined, judge, solver, words


class Team:
    """A team, with the discovery that sees its requests."""

    def __init__(self, found: Discovery, name: str = "team") -> None:
        self.found, self.name = found, name
        self.now = 0.0
        self._ids = (RequestId(f"{name}-{number}") for number in range(10**9))

    def ask(self, prompt: Tokens, answer: Tokens = ()) -> Found | None:
        request_id = next(self._ids)
        self.now += 1
        found = self.found.arrive(request_id, prompt, self.now)
        self.found.ended(request_id, answer, self.now + 0.5)
        return found

    def solver(self, question: Tokens) -> Tokens:
        return solver(question, self.name)

    def judge(self, question: Tokens, answer: Tokens) -> Tokens:
        return judge(question, answer, self.name)

    def run(self, number: int) -> tuple[Found | None, Found | None]:
        question, answer = words((self.name, "q", number), 60), words((self.name, "a", number), 25)
        solved = self.ask(self.solver(question), answer)
        return solved, self.ask(self.judge(question, answer), words((self.name, "verdict", number), 9))


def whole(found: Found) -> Tokens:
    return sum((one.tokens for one in found.segments), ())


def test_a_team_is_found_after_three_runs() -> None:
    team = Team(Discovery())
    assert [team.run(number) for number in range(2)] == [(None, None)] * 2
    team.run(2)
    solved, judged = team.run(3)
    assert solved and judged and solved.agent != judged.agent and solved.team == judged.team
    question, answer = words(("team", "q", 3), 60), words(("team", "a", 3), 25)
    assert [one.tokens for one in judged.segments[1::2]] == [question, answer]
    assert [one.is_placeholder for one in judged.segments] == [False, True, False, True, False]
    read, written = judged.segments[1], judged.segments[3]
    assert solved.segments[1].name == read.name and solved.segments[1].sample == read.sample
    assert solved.segments[1].base_context == read.base_context != ()
    assert solved.produces and written.sample == solved.produces and solved.produces.kind is ValueKind.AGENT
    assert judged.produces is None
    assert (solved.shared, judged.shared) == (0, 60 + 25)
    assert whole(judged) == team.judge(question, answer)
    for size, shared in ((7, 0), (8, 8)):
        _, again = (team.ask(team.solver(words("short", size))) for _ in range(2))
        assert again and again.shared == shared, "what is too short says nothing of where it is from"


def test_what_tokenizers_join_with_an_answer_is_not_taken_for_a_part_of_it() -> None:
    team = Team(Discovery())
    for number in range(5):
        question, answer = words(("q", number), 60), words(("a", number), 25)
        solved = team.ask(team.solver(question), answer)
        judged = team.ask(team.judge(question, (*answer[:-1], 7)))
    assert judged and solved and judged.segments[3].tokens == answer[:-1]
    assert judged.segments[3].sample == solved.produces


def test_an_answer_behind_a_space_is_one_from_its_second_token_on() -> None:
    team, digests = Team(Discovery()), list[str]()
    for number in range(6):
        question, answer = words(("q", number), 60), words(("a", number), 25)
        solved = team.ask(team.solver(question), answer)
        prompt = team.judge(question, joined(answer))
        judged = team.ask((*prompt[:-7], number, *prompt[-7:]))
        if judged and solved and solved.produces:
            before, read = judged.segments[3:5]
            assert (before.tokens, read.tokens) == (joined(answer)[:1], (*answer[1:], number))
            assert before.is_placeholder and not before.is_answer and before.name != read.name
            assert (read.sample, read.in_context) == (solved.produces, False)
            assert judged.run is solved.run and judged.shared == 60 + 24
            digests.append(GenerateRequest(judged.segments).template_digest)
    assert len({*digests}) == 1 < len(digests), "one template for all of them"


@pytest.mark.parametrize("part", [slice(40, None), slice(30), slice(20, 44)])
def test_what_an_agent_reads_of_an_answer_is_the_answers(part: slice) -> None:
    """As what follows the reasoning, its beginning, or the code in it."""
    team = Team(Discovery())
    for number in range(8):
        question, answer = words(("q", number), 60), words(("a", number), 64)
        solved = team.ask(team.solver(question), answer)
        judged = team.ask(team.judge(question, answer[part]))
        team.ask((*words("editor", 40), *joined(answer[part])))
    edited = team.ask((*words("editor", 40), *joined(answer[part])))
    assert judged and solved and edited
    assert judged.segments[3].tokens == answer[part] and edited.segments[-1].tokens == answer[part][1:]
    assert judged.segments[3].sample == edited.segments[-1].sample == solved.produces
    assert judged.run is solved.run and judged.shared == 60 + len(answer[part])


def test_a_question_that_answers_repeat_is_no_part_of_them() -> None:
    team = Team(Discovery())
    for number in range(8):
        question = words(("q", number), 60)
        answer = (*words(("a", number), 9), *question, *words(("b", number), 9))
        solved = team.ask(team.solver(question), answer)
        asked = team.ask((*words("reader", 50), *question, *words("now read", 7)))
        judged = team.ask(team.judge(question, answer))
    assert solved and asked and judged and judged.segments[3].sample == solved.produces
    assert solved.segments[1].sample == asked.segments[1].sample == judged.segments[1].sample


@pytest.mark.parametrize("varies", [False, True])
def test_what_answers_repeat_of_prompts_is_fixed_text_there(varies: bool) -> None:
    team, form = Team(Discovery()), words("form", 40)
    for number in range(8):
        question, said = words(("q", number), 60), form[number:][:20] if varies else form[:20]
        answer = (*words(("a", number), 30), *said, *words(("b", number), 9))
        solved = team.ask(team.solver(question), answer)
        judged = team.ask((*team.judge(question, answer), *form, number))
        asked = team.ask((*words("reader", 50), *question, *words("use", 4), *form, number))
    assert solved and judged and asked
    assert judged.segments[3].tokens == answer and judged.segments[3].sample == solved.produces
    assert [len(one.tokens) for one in judged.segments[4:]] == [7 + 40, 1]
    assert [len(one.tokens) for one in asked.segments] == [50, 60, 4 + 40, 1]


def test_names_and_contexts_stay_when_others_join() -> None:
    found = Discovery()
    team = Team(found)
    for number in range(4):
        team.run(number)
    before = team.run(4)
    third = Team(found, "third")
    for number in range(4):
        question = words(("team", "q", number), 60)
        third.ask((*words("reader", 40), *question, *words("end", 9)))
    after = team.run(4)
    names = [[[(s.name, s.base_context) for s in one.segments] for one in pair if one] for pair in (before, after)]
    assert names[0] == names[1] and len(names[0]) == 2
    asked = third.ask((*words("reader", 40), *words(("team", "q", 9), 60), *words("end", 9)))
    assert asked and before[0] and asked.segments[1].name == before[0].segments[1].name
    assert asked.team == before[0].team


def test_the_next_turn_of_a_session_is_left_alone() -> None:
    team = Team(Discovery())
    for number in range(4):
        team.run(number)
    prompt = team.solver(words("question", 60))
    assert team.ask(prompt, words("answer", 30))
    assert team.ask((*prompt, *words("answer", 30), *words("next", 40))) is None
    assert team.found.totals.turns == 1


def test_agents_that_have_a_long_beginning_in_common_are_told_apart() -> None:
    found = Discovery()
    team, agents = Team(found), dict[str, set[str]]()
    for number in range(12):
        for role in ("planner", "writer", "critic"):
            asked = team.ask((*words("rules", 200), *words(role, 100), *words(("q", number), 40), *words("now", 6)))
            if asked and number >= 8:
                agents.setdefault(role, set()).add(asked.agent)
                assert [len(one.tokens) for one in asked.segments] == [300, 40, 6]
    assert len(agents) == 3 and len(set.union(*agents.values())) == 3


def test_what_several_agents_begin_with_is_no_agent_once_they_are_known() -> None:
    found = Discovery()
    team = Team(found)
    for number in range(30):
        for role in ("planner", "writer", "critic"):
            team.ask((*words("rules", 200), *words(role, 100), *words((role, number), 40)))
    assert len(found.agents) == 3 and all(agent.head > 200 for agent in found.agents.values())


def test_an_agent_keeps_its_name_and_its_answers_when_copies_turn_out_to_be_it() -> None:
    found = Discovery()
    team, answers = Team(found), []
    frames = [words(("frame", number), 40) for number in range(3)]
    for number in range(60):
        question, answer = (*frames[number // 10 % 3], *words(("q", number), 30)), words(("a", number), 25)
        solved = team.ask((*words("solver", 770), *question), answer)
        judged = team.ask((*words("judge", 50), *answer, *words("now judge", 7)))
        answers.append(solved.produces if solved else None)
    assert solved and judged and judged.segments[1].sample == solved.produces == answers[-1]
    assert all(answers[-20:]) and len(found.agents) == 2


def test_examples_without_a_template_are_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[object]()
    monkeypatch.setattr(discovery, "learn", tried.append)
    team = Team(Discovery())
    for number in range(102):
        team.ask((*words("head", 48), *words(("all", number), 50)))
    assert len(tried) == 7  # of the 100 that might


def test_templates_are_learned_again_when_the_application_changes_its_prompts() -> None:
    team = Team(Discovery())
    for number in range(5):
        team.run(number)
    changed = [team.ask((*words(("team", "solver"), 40), *words(("q", n), 60), *words("please", 11))) for n in range(4)]
    assert changed[0] is None and changed[3] is not None
    assert all(team.run(9))


def test_labels_that_were_forgotten_are_known_again_once_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "MAX_VALUES", 3)
    found = Discovery()
    teams = [Team(found, name) for name in "abc"]
    for number, team in product(range(5), teams):
        before = team.run(number)
    assert all(before) and all(all(team.run(9)) for team in teams)


def test_an_unknown_request_or_one_that_ended_is_no_error() -> None:
    found = Discovery()
    assert found.ended(RequestId("unknown"), (1, 2, 3), 0) is None
    assert found.arrive(RequestId("a"), words("a", 40), 1) is None
    assert found.ended(RequestId("a"), (), 2) is None
    assert found.ended(RequestId("a"), words("answer", 20), 3) is None
    assert len(found.texts._texts) == 0
    assert found.arrive(RequestId("short"), (1, 2), 4) is None


def test_memory_is_bounded_by_a_crowd_of_one_off_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "MAX_BYTES", 40_000)
    found = Discovery()
    team = Team(found)
    for number in range(ENTRIES + 88):
        team.ask(words(("prompt", number), 100), words(("answer", number), 50))
    assert len(found.texts._texts) <= ENTRIES and found._examples._nbytes <= 40_000
    assert found._examples._nbytes == sum(len(one.prompt) for one in found._examples._requests)
    assert not found.agents
    for number in range(ENTRIES // 4):
        team.run(number)
    sayers = {label.args[0] for one in found.texts._texts.values() if one.sample for label in one.labels}
    assert found.agents and 0 < sum(len(one.prompt) for one in sayers) <= 40_000
    assert {*map(type, found._read)} == {int}, "no values, which may be long"


def prompts() -> st.SearchStrategy[list[Tokens]]:
    pieces = st.integers(0, 5).map(lambda piece: words(piece, 20))
    return st.lists(st.lists(pieces, min_size=1, max_size=5).map(lambda found: sum(found, ())), max_size=40)


def few_values(tokens: Tokens, size: int) -> list[int]:
    """Prefix hashes of which half are equal by chance."""
    return [sum(tokens[: at * size]) % 2 for at in range(1, len(tokens) // size + 1)]


@pytest.mark.parametrize("hashes", [chain_of, few_values, lambda tokens, size: [7] * (len(tokens) // size)])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompts())
def test_whatever_is_found_and_however_hashes_collide_the_segments_are_the_prompt(
    monkeypatch: pytest.MonkeyPatch, hashes: Callable[..., list[Any]], given_prompts: list[Tokens]
) -> None:
    monkeypatch.setattr(discovery, "chain_of", hashes)
    team, values = Team(Discovery()), dict[SampleId, Tokens]()
    for number, prompt in enumerate(given_prompts):
        found = team.ask(prompt, words(number % 7, 20))
        if found is not None:
            assert whole(found) == prompt
            assert all(one.tokens for one in found.segments)
            names = [one.name for one in found.segments]
            assert len(set(names)) == len(names)
            for one in found.segments:
                if one.sample and one.sample.kind is ValueKind.INPUT:
                    assert values.setdefault(one.sample, one.tokens) == one.tokens, "what is shared is the same text"


def test_tokens_are_found_where_they_begin_and_not_in_the_middle_of_bytes() -> None:
    data = token_bytes.pack([0, 256, 1 << 16, 256])
    assert token_bytes.find(data, token_bytes.pack([1 << 16])) == 2
    assert token_bytes.find(data, token_bytes.pack([1])) == -1
    assert token_bytes.find(data, token_bytes.pack([256]), 2) == 3
    made_for_it = token_bytes.pack([*[256] * 2 * ENTRIES, 1])
    assert token_bytes.find(made_for_it, token_bytes.pack([1])) == -1  # each 256 has one in the middle


def test_eighty_agents_that_take_turns() -> None:
    discovery, clock = Discovery(), 0
    for turn in range(5):
        for agent in range(80):
            clock += 1
            prompt = (*(1000 * (agent + 1) + at for at in range(512)), *range(clock * 40, clock * 40 + 32))
            discovery.arrive(RequestId(f"{turn}.{agent}"), prompt, float(clock))
    assert len(discovery.agents) == 80


# templates that are learned once more ---------------------------------------------------------------------------------


def test_what_all_answers_begin_with_becomes_a_part_of_them_once_they_are_known() -> None:
    """The first two answers are too short to be looked for."""
    team, opening, read = Team(Discovery()), words("all answers begin with this", 3), list[Tokens]()
    for number in range(11):
        question, answer = words(("q", number), 60), (*opening, *words(("a", number), 3 if number < 2 else 25))
        solved = team.ask(team.solver(question), answer)
        judged = team.ask(team.judge(question, answer), words(("verdict", number), 9))
        read += [judged.segments[3].tokens] if judged else []
    assert read[0] == words(("a", 2), 25) and read[-1] == answer
    assert solved and judged and solved.produces is not None and judged.segments[3].sample == solved.produces


def test_a_review_is_due_whenever_calls_have_doubled() -> None:
    assert [calls for calls in range(40) if discovery._is_due(calls)] == [3, 4, 5, 6, 8, 9, 10, 16, 17, 18, 32, 33, 34]


@pytest.mark.parametrize(
    ("label", "size", "is_kept"), [("x.0", 8, 1), ("answer.y", 8, 0), ("x.0", MAX_BYTES // MAX_LOOKED_AT // 4, 0)]
)
def test_short_prompts_with_answers_that_the_template_lacks_are_reviewed(label: str, size: int, is_kept: int) -> None:
    texts, said = KnownTexts(), words("said", 20)
    texts.put(KnownText(token_bytes.pack(said), (lambda: "answer.y",), SampleId(ValueKind.AGENT, "y", 0, "0")))
    template = PromptTemplate(token_bytes.pack(words("head", 16)), (Slot(label, b""),))
    agent = FoundAgent(AgentId("x"), WorkflowId("t"), 0, 16, [template], [AgentId("x")], calls=4)
    reviews = discovery.TemplateReviews(texts)
    assert reviews.take(agent, token_bytes.pack((*words("head", 16), *words("new", size), *said))) is None
    assert len(reviews._examples) == is_kept
