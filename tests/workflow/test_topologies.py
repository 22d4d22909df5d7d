"""Who hears whom, and the prompts that follow from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.errors import WorkflowError
from kedge.workflow.graph import Agent
from kedge.workflow.topologies import (
    MAX_WRITTEN,
    TOPOLOGIES,
    Topology,
    Wording,
    chain,
    connect,
    debate,
    fully_connected,
    layered,
    mesh,
    random,
    star,
)


def team(size: int) -> list[Agent]:
    return [Agent(letter, f"You are {letter}.", "") for letter in "abcdefghij"[:size]]


def who(topology: Topology) -> dict[str, str]:
    assert all(not heard.turns_back for hears in topology.reads.values() for heard in hears)
    return {name: "".join(heard.agent for heard in hears) for name, hears in topology.reads.items()}


def test_fully_connected_chain_star_and_layered() -> None:
    assert who(fully_connected(team(4))) == {"a": "", "b": "a", "c": "ab", "d": "abc"}
    assert who(chain(team(4))) == {"a": "", "b": "a", "c": "b", "d": "c"}
    assert who(star(team(4))) == {"a": "", "b": "", "c": "", "d": "abc"}
    assert who(layered(team(6))) == {"a": "", "b": "", "c": "ab", "d": "ab", "e": "cd", "f": "e"}
    assert who(layered(team(6), width=3)) == {"a": "", "b": "", "c": "", "d": "abc", "e": "abc", "f": "de"}


def test_mesh_is_a_grid() -> None:
    """a b c / d e f / g h, and i decides."""
    assert who(mesh(team(9))) == {
        "a": "", "b": "a", "c": "b", "d": "a", "e": "bd", "f": "ce", "g": "d", "h": "eg", "i": "fh",
    }  # fmt: skip


def test_random_is_seeded_and_spans_from_star_to_fully_connected() -> None:
    assert random(team(8), seed=3) == random(team(8), seed=3)
    assert random(team(8), seed=3) != random(team(8), seed=4)
    assert random(team(5), share=0) == star(team(5))
    assert who(random(team(4), share=1)) == {"a": "", "b": "a", "c": "ab", "d": "c"}


def test_debate_hears_the_turn_before() -> None:
    topology = debate(team(3), turns=4)
    assert topology.turns == 4
    assert topology.reads == {"a": (("b", 1),), "b": (("a", 1),), "c": (("a", 0), ("b", 0))}


@given(st.sampled_from(sorted(TOPOLOGIES)), st.integers(1, 10))
def test_every_topology_connects_at_any_size(name: str, size: int) -> None:
    workflow = connect("w", team(size), TOPOLOGIES[name](team(size)))
    assert workflow.order[-1] == team(size)[-1].id
    heard = {read.of for agent in workflow.agents for read in agent.placeholders}
    assert {agent.id for agent in workflow.agents[:-1]} <= heard


def test_a_topology_needs_agents_and_options_that_can_work() -> None:
    for topology in TOPOLOGIES.values():
        with pytest.raises(WorkflowError, match="topology: agents"):
            topology([])
    for name, option, value in (("layered", "width", 0), ("random", "share", 1.5), ("debate", "turns", 0)):
        with pytest.raises(WorkflowError, match=f"topology: {option}"):
            TOPOLOGIES[name](team(3), **{option: value})
    with pytest.raises(WorkflowError, match=f"exceed {MAX_WRITTEN} characters"):
        connect("t", team(10), fully_connected(team(10)), Wording(speaker="{title}" * (MAX_WRITTEN // 300)))


def test_connect_writes_the_prompts() -> None:
    agents = [Agent("a", "", "", title="The {Curly}", tool=lambda answer, _: answer), Agent("b", "", "")]
    wording = Wording("Q {task}", "\nHeard:", "\n{title}: ", " -> ", "\nYou, {title}!")
    workflow = connect("w", agents, fully_connected(agents), wording, inputs=("task",))
    assert workflow.agents[0].user == "Q {task}\nYou, The {{Curly}}!"
    expected = "Q {task}\nHeard:\nThe {{Curly}}: {agent_a_current} -> {condition_a_current}\nYou, b!"
    assert workflow.agents[1].user == expected
