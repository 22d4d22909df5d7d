"""Conflicting roles: every text has another gold for each role, and the grammar lets through the options alone."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.workloads.roles import TASKS, RoleTask, task_named
from kedge.engine.common.grammars import Grammars
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.errors import ConfigError
from kedge.models import default_model
from kedge.types import AgentId
from kedge.workloads.base import QUESTION
from tests.workloads.test_real import accepted


@pytest.fixture(params=TASKS.values(), ids=lambda task: task.name)
def task(request: pytest.FixtureRequest) -> RoleTask:
    return request.param


def test_the_roles_of_a_text_have_different_answers_that_are_in_it(task: RoleTask) -> None:
    asked = list(islice(task.questions(0), 300))
    assert len({one.text for one in asked}) == 300
    for one in asked:
        golds = one.facts["golds"]
        assert set(golds) == {role.name for role in task.roles}
        assert len(set(golds.values())) == 2
        assert len(set(one.facts["options"])) == round(1 / task.chance)
        assert set(golds.values()) < set(one.facts["options"])
        assert all(option in one.text for option in one.facts["options"])


def test_the_seed_decides(task: RoleTask) -> None:
    first, again, other = ([one.text for one in islice(task.questions(seed), 20)] for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_neither_role_reads_the_other(task: RoleTask) -> None:
    flow = task.workflow(task.roles)
    assert flow.ids == tuple(role.name for role in task.roles)
    assert all([placeholder.name for placeholder in agent.placeholders] == [QUESTION] for agent in flow.agents)
    assert flow.agents[0].system != flow.agents[1].system


def test_grammars_let_through_the_options_and_golds_are_right(task: RoleTask) -> None:
    pytest.importorskip("llguidance")
    tokenizer = HFTokenizer.load(default_model())
    grammars = Grammars(tokenizer, {tokenizer.inner.eos_token_id}, len(tokenizer.inner))
    for one in islice(task.questions(1), 3):
        for role in task.roles:
            agent, grammar = AgentId(role.name), task.grammar(AgentId(role.name), one)
            for option in one.facts["options"]:
                answer = f"{role.says} {option}"
                assert accepted(grammars, tokenizer, grammar, answer)
                assert task.right(agent, answer, one) is (option == one.facts["golds"][role.name])
            assert not accepted(grammars, tokenizer, grammar, f"{role.says} nothing")
            assert not task.right(agent, "", one)


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(ConfigError, match="task='chess': must be one of listing, debate, absence"):
        task_named("chess")
