"""Validation of workflows, order and what a step reads."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.decisions import MAX_PICK
from kedge.errors import CycleError, UnknownPlaceholder, WorkflowError
from kedge.guard import GuardMode
from kedge.types import AgentId, ReuseMode
from kedge.workflow.graph import Agent, Step, Workflow, order
from kedge.workflow.template import Placeholder
from tests.engine.test_validation import IMPOSSIBLE_SAMPLING

UNREAD = (("a", "b"), ("x", "a"), ("b", "x"))
SAMPLED = ("max_tokens", "temperature", "top_p", "seed", "stop")


def agent(name: str, *reads: str, **kwargs: object) -> Agent:
    text = "Q {user_question}" + "".join(f" {{{read}}}" for read in reads)
    return Agent(name, "sys", text, **kwargs)  # type: ignore[arg-type]


def flow(*agents: Agent, **kwargs: object) -> Workflow:
    return Workflow("flow", agents, **kwargs)  # type: ignore[arg-type]


def test_order_is_topological_and_otherwise_as_declared() -> None:
    workflow = flow(agent("c", "agent_d_current"), agent("b"), agent("d"), agent("a", "agent_b_current"))
    assert workflow.order == ("b", "d", "c", "a")
    assert workflow.waits_for["c"] == {"d"}


@given(st.integers(0, 8).flatmap(lambda n: st.permutations(range(n))), st.sets(st.tuples(*[st.integers(0, 7)] * 2)))
def test_order_of_any_dag(permutation: list[int], pairs: set[tuple[int, int]]) -> None:
    ids = [AgentId(str(i)) for i in permutation]
    waits = {
        name: frozenset(AgentId(str(i)) for i, j in pairs if j == int(name) and i < j and str(i) in ids) for name in ids
    }
    result = order(ids, waits)
    assert sorted(result) == sorted(ids)
    assert all(result.index(before) < result.index(name) for name in ids for before in waits[name])


@pytest.mark.parametrize(
    ("read", "why"),
    [("nobody", "no input"), ("agent_x_current", "no agent 'x'"), ("agent_x_history_1", "no agent 'x'"),
     ("condition_b_current", "has no tool"), ("condition_x_history_1", "no agent 'x'"), ("agent_b", "no input")],
)  # fmt: skip
def test_unknown_placeholders_name_agent_and_placeholder(read: str, why: str) -> None:
    with pytest.raises(UnknownPlaceholder, match=why) as caught:
        flow(agent("b"), agent("a", read))
    assert (caught.value.key, caught.value.value) == ("agent a", read)


def test_cycle_is_named() -> None:
    with pytest.raises(CycleError) as caught:
        flow(agent("z"), agent("a", "agent_b_current"), agent("b", "agent_c_current"), agent("c", "agent_a_current"))
    assert caught.value.value == "a -> b -> c -> a"


def test_loop_reads_the_turn_before() -> None:
    workflow = flow(
        agent("writer", "agent_critic_current"), agent("critic", "agent_writer_current"),
        loops=(("critic", "writer"),), turns=2,
    )  # fmt: skip
    read = Placeholder.parse("agent_critic_current")
    assert workflow.order == ("writer", "critic")
    assert workflow.source(Step("writer", 0), read) is None
    assert workflow.source(Step("writer", 1), read) == ("critic", 0)
    assert workflow.source(Step("critic", 1), Placeholder.parse("agent_writer_current")) == ("writer", 1)
    assert workflow.needs[Step("writer", 1)] == {("critic", 0), ("writer", 0)}


def test_needs_and_steps() -> None:
    workflow = flow(agent("a", "agent_b_history_2"), agent("b", "agent_a_current"), turns=3)
    assert workflow.steps == (("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2))
    assert workflow.needs[Step("a", 0)] == frozenset()
    assert workflow.needs[Step("a", 1)] == {("a", 0)}
    assert workflow.needs[Step("a", 2)] == {("a", 1), ("b", 0)}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"agents": ()}, "agents"),
        ({"agents": (agent("a"), agent("a"))}, "agents"),
        ({"inputs": ("user_question", "user_question")}, "inputs"),
        ({"inputs": ("user_question", "agent_a_current")}, "inputs"),
        ({"inputs": ("user_question", "two words")}, "placeholder"),
        ({"turns": 0}, "turns"),
        *(({"agents": (agent("a"), agent("b", "agent_a_history_1")), "loops": (loop,)}, "loops") for loop in UNREAD),
        ({"agents": (Agent("a", "", " \n"),)}, "agent a: user"),
    ],
)
def test_bad_workflows(changes: dict[str, object], key: str) -> None:
    with pytest.raises(WorkflowError) as caught:
        replace(flow(agent("a")), **changes)  # type: ignore[arg-type]
    assert caught.value.key == key


def test_modes_may_be_given_as_their_values() -> None:
    one = agent("a", reuse="exact", guard="shadow")
    assert one.reuse is ReuseMode.EXACT and one.guard is GuardMode.SHADOW


@pytest.mark.parametrize(
    "changes",
    [{"max_tokens": 0}, {"tool_seconds": 0}, {"tool_seconds": math.nan}, {"tool_seconds": math.inf},
     {"tool_seconds": "9"}, {"reuse": "x"}, {"guard": 1},
     *({"fidelity": budget} for budget in (0, math.nan, "fp8", True)),
     *({"pick": text} for text in ("x" * (MAX_PICK + 1), 3, "\ud800")),
     *({key: value} for key in SAMPLED for value in IMPOSSIBLE_SAMPLING[key])],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_bad_agents_name_the_field(changes: dict[str, object]) -> None:
    with pytest.raises(WorkflowError, match=f"agent a: {next(iter(changes))}=.*: must ") as caught:
        agent("a", **changes)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("key", ["system", "user", "title"])
@pytest.mark.parametrize("text", ["half \ud800 of a pair", None, 5])
def test_an_agents_texts_are_unicode(key: str, text: object) -> None:
    texts = {"system": "", "user": "x", key: text}
    with pytest.raises(WorkflowError, match=f"agent a: {key}=.*: must be "):
        Agent("a", **texts)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "two words", "a@0", "{a}"])
def test_bad_ids(name: str) -> None:
    with pytest.raises(WorkflowError):
        Agent(name, "", "x")


def test_lists_become_tuples_so_that_a_workflow_has_a_hash() -> None:
    workflow = Workflow("w", [Agent("a", "", "{q}", stop=["x"])], ["q"])  # type: ignore[arg-type]
    assert hash(workflow) == hash(replace(workflow))
    assert workflow.agents[0].sampling.stop == ("x",)
