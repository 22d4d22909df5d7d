"""The Agent Step Graph: which agent can run next, and how soon each of them (KVFlow, section 3.1).

    graph = StepGraph("review", (
        Node("planner", loops=["reviewer"]),
        Node("searcher", after=["planner"]),
        Node("writer", after=[{"planner", "searcher"}]),
        Node("reviewer", after=["writer"], then={"planner": 0.3, "publisher": 0.7}),
        Node("publisher", after=["reviewer"]),
    ))
    graph.steps(running={"planner"}, done=())        # searcher 1, writer 2, reviewer 3, publisher 4

It is a forecast only: no agent is kept from running because the graph did not expect it.
"""

import graphlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple, Self

from kedge.errors import CycleError, WorkflowError
from kedge.types import AgentId
from kedge.workflow.graph import Step, Workflow
from kedge.workflow.steps import Alternative, NextRun, Nodes, search


class RunState(NamedTuple):
    """State of a run: the nodes that run, and the nodes that are done in this iteration of their loops."""

    running: Nodes = frozenset()
    done: Nodes = frozenset()


@dataclass(frozen=True)
class Node:
    """One invocation of an agent.

    `after` and `loops` are alternatives: any of them suffices, and each is a set of nodes that must all be done. A bare
    name stands for a set of one. `loops` are the back edges: they let a node run again, and never for the first
    time. A node with nothing in `after` can run from the start. `then` says that only one of some nodes comes next,
    with probabilities or None; those without one share evenly what the others leave.

    Raises `WorkflowError` for an empty alternative, and for probabilities outside 0..1 or with a sum above 1.
    """

    id: str
    after: Iterable[Collection[str]] = ()
    loops: Iterable[Collection[str]] = ()
    then: Mapping[str, float | None] = field(default_factory=dict, hash=False)
    agent: str = ""
    """The agent that is invoked; default: the one named as the node."""

    def __post_init__(self) -> None:
        for key in ("after", "loops"):
            object.__setattr__(self, key, tuple(self._alternative(key, names) for names in getattr(self, key)))
        object.__setattr__(self, "agent", AgentId(self.agent or self.id))
        object.__setattr__(self, "then", MappingProxyType(dict(self.then)))
        given = {name: value for name, value in self.then.items() if value is not None}
        for name, value in given.items():
            if not 0 <= value <= 1:
                raise WorkflowError(f"node {self.id}: then.{name}", value, "a probability is in 0..1")
        if math.fsum(given.values()) > 1:  # exact: ten times 0.1 is 1
            raise WorkflowError(f"node {self.id}: then", given, "the probabilities have a sum above 1")

    def _alternative(self, key: str, names: Collection[str]) -> frozenset[str]:
        if not names:
            raise WorkflowError(f"node {self.id}: {key}", names, "an alternative needs at least one node")
        return frozenset({names} if isinstance(names, str) else names)

    @cached_property
    def odds(self) -> Mapping[str, float]:
        """The nodes of `then` with the probability of each."""
        given = [value for value in self.then.values() if value is not None]
        share = max(0.0, 1 - sum(given)) / max(1, len(self.then) - len(given))
        return {name: share if value is None else value for name, value in self.then.items()}


@dataclass(frozen=True)
class StepGraph:
    """The nodes of a workflow and what each waits for. Immutable; one serves any number of runs.

    Raises, all of them at construction: `CycleError` for nodes that can never run because they wait for each other or
    for themselves with no back edge in `loops`; another `WorkflowError` for an unknown or duplicate node, for a back
    edge that closes no loop, and for a choice in `then` that does not wait for its node.
    """

    name: str
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        if not self.nodes:
            raise WorkflowError("nodes", (), "a step graph needs at least one node")
        if doubles := [node for node, count in Counter(self.ids).items() if count > 1]:
            raise WorkflowError("nodes", doubles[0], "duplicate")
        for node in self.nodes:
            for key, names in (("after", _members(node.after)), ("loops", _members(node.loops)), ("then", node.then)):
                for name in names:
                    if name not in self._by_id:
                        raise WorkflowError(f"node {node.id}: {key}", name, "there is no such node")
        try:
            graphlib.TopologicalSorter({node.id: set(_members(node.after)) for node in self.nodes}).prepare()
        except graphlib.CycleError as error:
            why = "each waits for the one before, so none can run; move the back edge to `loops`"
            raise CycleError("nodes", " -> ".join(error.args[1]), why) from None
        for node in self.nodes:
            for members in node.loops:
                if self.descendants(node.id).isdisjoint(members):
                    raise WorkflowError(f"node {node.id}: loops", sorted(members), "none of them comes after it")
            for name in node.then:
                chosen = self._by_id[name]
                if not _waits_for((*chosen.after, *chosen.loops), node.id):
                    raise WorkflowError(f"node {node.id}: then", name, f"has no {node.id!r} in its `after` or `loops`")

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, workflow: Workflow) -> Self:
        """Return the graph of a workflow, once for all its runs: a node for every turn of every agent, so that it knows
        how the run ends.
        """

        def name(step: Step) -> str:
            return f"{step.agent}@{step.turn}" if workflow.turns > 1 else step.agent

        def node(step: Step) -> Node:
            needs = {name(need) for need in workflow.needs[step]}
            return Node(name(step), after=[needs] if needs else (), agent=step.agent)

        return cls(workflow.name, tuple(node(step) for step in workflow.steps))

    # queries -------------------------------------------------------------------------------------------------

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(node.id for node in self.nodes)

    @cached_property
    def nodes_of(self) -> Mapping[AgentId, tuple[str, ...]]:
        """Agent -> its nodes, as declared."""
        found: dict[AgentId, tuple[str, ...]] = {}
        for node in self.nodes:
            agent = AgentId(node.agent)
            found[agent] = (*found.get(agent, ()), node.id)
        return found

    def steps(self, running: Iterable[str], done: Iterable[str]) -> dict[str, float]:
        """Return the steps-to-execution by node, `UNKNOWN` where it is never reached. See `RunState` for the arguments.

        A running node has 0. What could run at once has 1 while something runs and 0 while nothing does. A node that is
        done counts to its next iteration. Raises `WorkflowError` for a node that is not there.
        """
        found = self._search(frozenset(running), frozenset(done))
        return {node: next_run.steps for node, next_run in found.items()}

    def next_runs(self, state: RunState) -> dict[AgentId, NextRun]:
        """Return by agent the next run of its soonest, then likeliest node. Raises as `steps` does."""
        found = self._search(*state)
        nodes = {agent: [found[node] for node in nodes] for agent, nodes in self.nodes_of.items()}
        return {agent: min(runs, key=lambda one: (one.steps, -one.probability)) for agent, runs in nodes.items()}

    def started(self, state: RunState, node: str) -> RunState:
        """Return the state once `node` runs. If it was done before, its descendants begin a new iteration."""
        again = self.descendants(node) if node in state.done else frozenset[str]()
        return RunState(state.running | {node}, state.done - again)

    def finished(self, state: RunState, node: str) -> RunState:
        """Return the state once `node` is done."""
        return RunState(state.running - {node}, state.done | {node})

    def descendants(self, node: str) -> Nodes:
        """Return `node` and all that comes after it without a back edge."""
        found, todo = {node}, [node]
        while todo:
            new = self._followers[todo.pop()] - found
            found |= new
            todo += new
        return frozenset(found)

    def _search(self, running: Nodes, done: Nodes) -> dict[str, NextRun]:
        for key, names in (("running", running), ("done", done)):
            if unknown := names - self._by_id.keys():
                raise WorkflowError(key, min(unknown), f"not a node of {self.name}")
        entries = (node.id for node in self.nodes if not node.after)
        return search(self._alternatives, self._opens, entries, running, done)

    # the search's tables --------------------------------------------------------------------------------------

    @cached_property
    def _by_id(self) -> Mapping[str, Node]:
        return {node.id: node for node in self.nodes}

    @cached_property
    def _alternatives(self) -> tuple[Alternative, ...]:
        return tuple(
            self._alternative(node, frozenset(names), is_loop)
            for node in self.nodes
            for is_loop, alternatives in ((False, node.after), (True, node.loops))
            for names in alternatives
        )

    def _alternative(self, node: Node, members: Nodes, is_loop: bool) -> Alternative:
        choosers = [one for one in map(self._by_id.__getitem__, sorted(members)) if node.id in one.then]
        odds = {one.id: one.odds[node.id] for one in choosers}
        return Alternative(node.id, members, is_loop, odds, {one.id: self._rivals(one, node) for one in choosers})

    def _rivals(self, chooser: Node, chosen: Node) -> Nodes:
        forward = (name for name in chooser.then if _waits_for(self._by_id[name].after, chooser.id))
        return frozenset(name for name in forward if name != chosen.id)

    @cached_property
    def _opens(self) -> Mapping[str, list[int]]:
        """Node -> the alternatives that it is a member of."""
        opens: dict[str, list[int]] = {node: [] for node in self.ids}
        for at, one in enumerate(self._alternatives):
            for member in one.members:
                opens[member].append(at)
        return opens

    @cached_property
    def _followers(self) -> Mapping[str, set[str]]:
        """Node -> the nodes that wait for it, back edges apart."""
        followers: dict[str, set[str]] = {node: set() for node in self.ids}
        for node in self.nodes:
            for name in _members(node.after):
                followers[name].add(node.id)
        return followers


def _members(alternatives: Iterable[Collection[str]]) -> Iterator[str]:
    for names in alternatives:
        yield from sorted(names)


def _waits_for(alternatives: Iterable[Collection[str]], name: str) -> bool:
    return any(name in names for names in alternatives)
