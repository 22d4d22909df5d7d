"""The order of a prompt in which agents share its beginning."""

from __future__ import annotations

from collections import Counter
from os.path import commonprefix

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.template import escape, parse
from kedge.workloads.miniature import TASKS, Task, role_last

PIECES = st.lists(
    st.one_of(st.just("{q}"), st.text("ab {}\n", min_size=1, max_size=8).map(escape)), min_size=1, max_size=6
).map("".join)


@pytest.mark.parametrize("topology", ["fully_connected", "chain", "debate"])
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_the_same_content_in_another_order(task: Task, topology: str) -> None:
    before, after = task.workflow(topology=topology), role_last(task.workflow(topology=topology))
    assert (after.ids, after.order, after.turns, after.waits_for) == (
        before.ids, before.order, before.turns, before.waits_for,
    )  # fmt: skip
    for old, new in zip(before.agents, after.agents, strict=True):
        assert new.system == ""
        assert new.placeholders == old.placeholders
        assert Counter(new.user.split()) == Counter(f"{old.system} {old.user}".split())
        assert (new.tool, new.sampling, new.title) == (old.tool, old.sampling, old.title)


def test_the_role_is_last() -> None:
    role = TASKS["math"].role("analyst")
    assert role_last(TASKS["math"].workflow()).agent("analyst").user == (
        "Question: {user_question}\n\nThe other agents say:\n\nMath Solver:\n{agent_solver_current}"
        f"\n\n{role.system}\n\nNow answer as Mathematical Analyst."
    )


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_agent_begins_as_the_next_one_up_to_its_last_value(task: Task) -> None:
    agents = role_last(task.workflow()).agents
    for one, other in zip(agents, agents[1:], strict=False):
        assert commonprefix([parse(one.user), parse(other.user)])[-1] == one.placeholders[-1]


@given(PIECES, PIECES)
def test_nothing_is_lost_of_any_template(system: str, user: str) -> None:
    if not user.strip():
        return
    (agent,) = role_last(Workflow("w", (Agent("a", system, user),), inputs=("q",))).agents
    assert Counter(texts(agent.user)) == Counter(texts(system) + texts(user))
    at = max((i for i, part in enumerate(parse(user)) if not isinstance(part, str)), default=-1)
    assert parse(agent.user)[: at + 1] == parse(user)[: at + 1]


def texts(template: str) -> list[str]:
    """The words and placeholders of a template."""
    return [word for part in parse(template) for word in (part.split() if isinstance(part, str) else [part.name])]
