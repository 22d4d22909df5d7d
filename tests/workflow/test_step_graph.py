"""Steps-to-execution against a naive fixed point and against a simulated run, and what is refused at load time."""

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kedge.errors import CycleError, WorkflowError
from kedge.types import AgentId, AgentKey, Namespace, RunId, TenantId
from kedge.workflow.export import lanes
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.spec import build_step_graph
from kedge.workflow.step_graph import Node, RunState, StepGraph
from kedge.workflow.steps import UNKNOWN, NextRun


def graph(*nodes: Node) -> StepGraph:
    return StepGraph("test", nodes)


def ring(size: int) -> StepGraph:
    """Figure 5: agents in a row, the last of which starts the first again."""
    first = Node("a0", loops=[f"a{size - 1}"])
    return graph(first, *(Node(f"a{at}", after=[f"a{at - 1}"]) for at in range(1, size)))


# exact cases ----------------------------------------------------------------------------------------------------


def test_an_agent_with_several_nodes_has_the_soonest() -> None:
    twice = graph(Node("draft", agent="writer"), Node("critic", after=["draft"]), Node("x", ["critic"], agent="writer"))
    assert twice.nodes_of == {"writer": ("draft", "x"), "critic": ("critic",)}
    assert twice.next_runs(RunState(done=frozenset({"draft"}))) == {"writer": NextRun(1), "critic": NextRun(0)}


# workflows ------------------------------------------------------------------------------------------------------


def test_a_workflow_has_a_node_for_every_turn() -> None:
    writer = Agent("w", "", "{user_question} {agent_c_current}")
    critic = Agent("c", "", "{agent_w_current}")
    flow = Workflow("loop", (writer, critic), turns=2, loops=(("c", "w"),))
    unrolled = StepGraph.of(flow)
    assert unrolled.steps((), ()) == {"w@0": 0, "c@0": 1, "w@1": 2, "c@1": 3}
    assert unrolled.next_runs(RunState(done=frozenset({"w@0", "c@0", "w@1"}))) == {"w": (UNKNOWN, 0), "c": (0, 1)}


# oracles --------------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> StepGraph:
    """Any graph of up to seven nodes: alternatives of sets, back edges to ancestors, choices."""
    names = [f"n{at}" for at in range(draw(st.integers(1, 7)))]
    after: dict[str, list[frozenset[str]]] = {}
    for at, name in enumerate(names):
        sets = st.frozensets(st.sampled_from(names[:at] or names), min_size=1, max_size=3)
        after[name] = draw(st.lists(sets, max_size=3)) if at else []
    plain = graph(*(Node(name, after[name]) for name in names))
    loops = {name: draw(st.lists(loops_to(plain, name), max_size=2)) for name in names}
    heard = {n: [m for m in names if any(n in s for s in (*after[m], *loops[m]))] for n in names}
    then = {n: draw(st.lists(st.sampled_from(heard[n]), unique=True)) if heard[n] else [] for n in names}
    shuffled = draw(st.permutations(names))
    return graph(*(Node(n, after[n], loops[n], dict.fromkeys(then[n])) for n in shuffled))


def loops_to(plain: StepGraph, name: str) -> st.SearchStrategy[frozenset[str]]:
    below = st.frozensets(st.sampled_from(sorted(plain.descendants(name))), min_size=1, max_size=2)
    return st.tuples(below, st.frozensets(st.sampled_from(plain.ids), max_size=1)).map(lambda two: two[0] | two[1])


def still_needed(of: StepGraph, node: Node, names: Iterable[str], is_loop: bool, state: RunState) -> set[str]:
    by_id = {other.id: other for other in of.nodes}
    active = state.running | state.done
    used = node.id in state.done and not is_loop
    for name in set(names) & state.done:
        if node.id in by_id[name].then:
            others = set(by_id[name].then) - {node.id}
            used |= any(other in active and any(name in s for s in by_id[other].after) for other in others)
    return set(names) if used else set(names) - state.done


def naive_next_runs(of: StepGraph, state: RunState) -> dict[str, NextRun]:
    """Aggregation functions applied over and over until nothing changes."""
    first = 1.0 if state.running else 0.0
    by_id = {node.id: node for node in of.nodes}
    found = {node.id: NextRun(0.0 if node.id in state.running else math.inf, 1.0) for node in of.nodes}

    def ways(node: Node) -> list[NextRun]:
        result = [] if node.after or node.id in state.done else [NextRun(first, 1.0)]
        for is_loop, alternatives in ((False, node.after), (True, node.loops)):
            for names in alternatives:
                needed = still_needed(of, node, names, is_loop, state)
                steps = max((found[name].steps for name in needed), default=first - 1) + 1
                sure = {name: found[name].probability if name in needed else 1.0 for name in names}
                result.append(NextRun(steps, min(sure[name] * by_id[name].odds.get(node.id, 1.0) for name in names)))
        return result

    def aggregate(node: Node) -> NextRun:
        steps = min((way.steps for way in ways(node)), default=math.inf)
        total = sum(way.probability for way in ways(node) if way.steps == steps)
        return NextRun(steps, min(1.0, total)) if steps < math.inf else NextRun(math.inf, 0.0)

    for _ in range(3 * len(of.nodes) + 3):
        found |= {node.id: aggregate(node) for node in of.nodes if node.id not in state.running}
    return found


@given(graphs(), st.data())
def test_the_pass_finds_the_fixed_point(of: StepGraph, data: st.DataObject) -> None:
    running = data.draw(st.frozensets(st.sampled_from(of.ids)))
    state = RunState(running, data.draw(st.frozensets(st.sampled_from(of.ids))) - running)
    expected = naive_next_runs(of, state)
    assert of.steps(*state) == {name: one.steps for name, one in expected.items()}
    for name, one in of.next_runs(state).items():
        assert one.probability == pytest.approx(expected[name].probability)


def ready(of: StepGraph, state: RunState) -> list[str]:
    """The nodes that could run at once and do not run yet."""
    return [name for name in of.ids if name not in state.running and naive_ready(of, name, state)]


def naive_ready(of: StepGraph, name: str, state: RunState) -> bool:
    node = next(node for node in of.nodes if node.id == name)
    kinds = ((False, names) for names in node.after), ((True, names) for names in node.loops)
    entry = not node.after and name not in state.done
    return entry or any(not still_needed(of, node, names, loop, state) for kind in kinds for loop, names in kind)


@given(graphs(), st.lists(st.integers(0, 30), max_size=25))
def test_a_run_never_ends_up_with_a_node_both_running_and_done(of: StepGraph, picks: list[int]) -> None:
    state = RunState()
    for pick in picks:
        moves = [*ready(of, state), *sorted(state.running)]
        if not moves:
            break
        node = moves[pick % len(moves)]
        state = of.finished(state, node) if node in state.running else of.started(state, node)
        assert not state.running & state.done
        assert all(of.steps(*state)[running] == 0 for running in state.running)
        assert set(ready(of, state)) <= {name for name, steps in of.steps(*state).items() if steps <= 1}


# refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "key", "value"),
    [
        ((), "nodes", ()),
        ((Node("a"), Node("a")), "nodes", "a"),
        ((Node("a", after=["x"]),), "node a: after", "x"),
        ((Node("a"), Node("b", after=[{"a", "x"}])), "node b: after", "x"),
        ((Node("a", loops=["x"]),), "node a: loops", "x"),
        ((Node("a", then={"x": None}),), "node a: then", "x"),
        ((Node("a"), Node("b", after=["a"], loops=["a"])), "node b: loops", ["a"]),
        ((Node("a", then={"b": 1.0}), Node("b")), "node a: then", "b"),
        ({"after": [()]}, "node a: after", ()),
        ({"after": [""]}, "node a: after", ""),
        ({"loops": [()]}, "node a: loops", ()),
        ({"then": {"b": -0.1}}, "node a: then.b", -0.1),
        ({"then": {"b": 1.1}}, "node a: then.b", 1.1),
        ({"then": {"b": math.nan}}, "node a: then.b", math.nan),
        ({"then": {"b": 0.7, "c": 0.4}}, "node a: then", {"b": 0.7, "c": 0.4}),
    ],
)
def test_bad_graphs_and_bad_nodes_name_field_and_value(
    nodes: tuple[Node, ...] | dict[str, Any], key: str, value: object
) -> None:
    with pytest.raises(WorkflowError) as caught:
        Node("a", **nodes) if isinstance(nodes, dict) else StepGraph("bad", nodes)
    assert (caught.value.key, caught.value.value) == (key, pytest.approx(value, nan_ok=True))


def test_unreachable_nodes_are_a_cycle_that_is_named() -> None:
    for waits_for in ("a", "b"):
        with pytest.raises(CycleError, match="loops") as caught:
            graph(Node("start"), Node("a", after=[waits_for]), Node("b", after=[{"a", "start"}]))
        assert caught.value.value in (("a -> a",) if waits_for == "a" else ("a -> b -> a", "b -> a -> b"))


def test_states_of_other_graphs_are_refused() -> None:
    with pytest.raises(WorkflowError, match="running='x'"):
        ring(2).steps({"x"}, ())
    with pytest.raises(WorkflowError, match="done='y'"):
        ring(2).next_runs(RunState(done=frozenset({"y"})))  # type: ignore[arg-type]


def test_ten_probabilities_of_a_tenth_are_one() -> None:
    assert sum(Node("a", then={f"b{at}": 0.1 for at in range(10)}).odds.values()) == pytest.approx(1)


def calls_in_a_pass(nodes: int) -> int:
    """Count the calls of functions, Python's own included, in a pass around a ring."""
    graph, calls = ring(nodes), Counter[str]()
    sys.setprofile(lambda _, event, __: calls.update([event]))
    try:
        steps = graph.steps({"a0"}, ())
    finally:
        sys.setprofile(None)
    assert steps[f"a{nodes - 1}"] == nodes - 1
    return calls["call"] + calls["c_call"]


def test_a_pass_over_ten_thousand_nodes_stays_linear() -> None:
    assert 0 < calls_in_a_pass(10_000) < 11 * calls_in_a_pass(1000)


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kvflow.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
YAML = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_s_examples_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(PYTHON[0], names)
    steps = names["graph"].steps(running={"analyst"}, done={"solver"})
    assert steps == {"solver": UNKNOWN, "analyst": 0, "programmer": 1, "inspector": 2, "final": 3}
    exec(PYTHON[1] + PYTHON[2], names)
    graph = build_step_graph(yaml.safe_load(YAML[0]))
    assert graph == names["graph"]
    searcher = AgentKey(Namespace(TenantId("tenant")), "client", RunId("run-1"), AgentId("searcher"))
    assert names["changes"][searcher] == (0, 1.0) and names["board"].forecast(searcher[:3]).ended
    drawn = [[node.id for node in lane] for lane in lanes(graph)]
    assert " → ".join(f"[{' | '.join(lane)}]" for lane in drawn) in PAGE.splitlines(), "as `kedge inspect` draws it"
