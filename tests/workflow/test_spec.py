"""Workflow files: good ones build what Python builds, bad ones name file, key and value."""

import json
import math
import re
from pathlib import Path

import pytest

from kedge.errors import CycleError, SpecError, UnknownPlaceholder, WorkflowError
from kedge.types import ReuseMode
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.spec import Appended, build_step_graph, build_workflow, load_flow, load_workflow, parse
from kedge.workflow.step_graph import Node, StepGraph
from kedge.workflow.topologies import Wording, connect, random
from kedge.workloads.sandbox import answer_as_python

EXAMPLES = Path(__file__).parents[2] / "examples"

OWN = """
name: two
inputs: [task]
turns: 2
loops: [[b, a]]
agents:
  - {id: a, system: S, user: "{task} {agent_b_current}", max_tokens: 5, stop: [x], reuse: off, temperature: 1}
  - id: b
    user: "{agent_a_current} {condition_a_history_1}"
    title: B
"""


def shout(answer: str, inputs: object) -> str:  # noqa: ARG001
    return answer.upper()


def write(folder: Path, text: str | bytes, name: str = "flow.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_yaml_builds_what_python_builds(tmp_path: Path) -> None:
    text = OWN.replace("stop: [x]", "stop: [x], tool: shout")
    first = Agent(
        "a", "S", "{task} {agent_b_current}", shout, max_tokens=5, temperature=1, stop=("x",), reuse=ReuseMode.OFF
    )
    second = Agent("b", "", "{agent_a_current} {condition_a_history_1}", title="B")
    expected = Workflow("two", (first, second), ("task",), 2, (("b", "a"),))
    assert load_workflow(write(tmp_path, text), {"shout": shout}) == expected


def test_json_is_the_same(tmp_path: Path) -> None:
    data = {"name": "n", "agents": [{"id": "a", "user": "{user_question}", "max_tokens": 9}]}
    expected = Workflow("n", (Agent("a", "", "{user_question}", max_tokens=9),))
    assert load_workflow(write(tmp_path, json.dumps(data), "flow.JSON")) == expected


def test_topology_and_wording() -> None:
    agents = [{"id": name, "system": name} for name in "abcd"]
    data = {"name": "t", "agents": agents, "topology": {"kind": "random", "seed": 5}, "wording": {"intro": "Hear:"}}
    bare = [Agent(name, name, "") for name in "abcd"]
    assert build_workflow(data) == connect("t", bare, random(bare, seed=5), Wording(intro="Hear:"))


def test_python_tool() -> None:
    agent = {"id": "a", "user": "{user_question}", "tool": "python", "tool_append": "print(f())", "tool_seconds": 3.0}
    built = build_workflow({"name": "n", "agents": [agent]}).agents[0]
    assert (built.tool, built.tool_seconds) == (Appended(answer_as_python, "print(f())"), 3.0)
    assert built.tool is not None
    assert built.tool("def f():\n    return 6 * 7", {}) == "42"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.name)
def test_examples_load(file: Path) -> None:
    assert load_workflow(file).steps


def spec(**changes: object) -> dict[str, object]:
    return {"name": "n", "agents": [{"id": "a", "user": "{user_question}"}], **changes}


def agent_spec(**changes: object) -> dict[str, object]:
    return spec(agents=[{"id": "a", "user": "{user_question}", **changes}])


@pytest.mark.parametrize(
    ("data", "key", "value"),
    [
        (spec(nam="x"), "nam", "x"),
        (spec(name=3), "name", 3),
        (spec(name="\ud800"), "name", "\ud800"),
        (spec(inputs={"a": 16**5000}), "inputs", "a dict with a long integer"),
        (spec(turns="2"), "turns", "2"),
        (spec(turns=True), "turns", True),
        (spec(loops=[["a"]]), "loops.0", "['a']"),
        (spec(agents={}), "agents", "{}"),
        (agent_spec(max_token=3), "agents.0.max_token", 3),
        (agent_spec(max_tokens=3.5), "agents.0.max_tokens", 3.5),
        (agent_spec(reuse="all"), "agents.0.reuse", "all"),
        (agent_spec(tool="rm"), "agents.0.tool", "rm"),
        (agent_spec(tool="os:system"), "agents.0.tool", "os:system"),
        (agent_spec(tool_append="x"), "agents.0.tool", None),
        (spec(agents=[{"id": "a"}]), "agents.0.user", None),
        (spec(topology="chain"), "agents.0.user", "{user_question}"),
        (spec(agents=[{"id": "a"}], topology="ring"), "topology", "ring"),
        (spec(agents=[{"id": "a"}], topology={"kind": "chain", "seed": 1}), "topology.chain", "{'seed': 1}"),
        (spec(agents=[{"id": "a"}], topology={"kind": "chain", "size": 1}), "topology.size", 1),
        (spec(agents=[{"id": "a"}], topology="debate", turns=3), "turns", 3),
    ],
)
def test_bad_specs_name_key_and_value(data: dict[str, object], key: str, value: object) -> None:
    with pytest.raises(SpecError) as caught:
        build_workflow(data, source="flow.yaml")
    assert (caught.value.key, caught.value.value) == (f"flow.yaml: {key}", value)


BUDGETS = "\nfidelity: fast\nagents: [{id: a, user: x, fidelity: %s}, {id: b, user: x}]"


@pytest.mark.parametrize(
    ("said", "nats"), [("strict", 0.0003), ("0.004", 0.004), (".inf", math.inf), ("any", math.inf)]
)
def test_a_budget_of_fidelity_is_an_agents_or_the_workflows(tmp_path: Path, said: str, nats: float) -> None:
    flow = load_workflow(write(tmp_path, "name: n" + BUDGETS % said))
    assert [agent.fidelity for agent in flow.agents] == [nats, 0.01]


@pytest.mark.parametrize(("said", "shown"), [("best", "'best'"), ("0", "0"), ("on", "True")])
def test_another_budget_of_fidelity_says_what_is_accepted(tmp_path: Path, said: str, shown: str) -> None:
    why = f"fidelity={shown}: Value error, must be one of strict, fp8, fast, any, or nats a token above 0"
    for text in (BUDGETS % said, BUDGETS.replace("fast", said) % "fp8"):
        with pytest.raises(SpecError, match=re.escape(why)):
            load_workflow(write(tmp_path, "name: n" + text))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("flow.yaml", b"name: \xff\xfe", "is not YAML: 'utf-8' codec"),
        ("flow.yaml", b"name: [", "is not YAML"),
        ("flow.yaml", b"name: a\nname: b", "duplicate key 'name'"),
        ("flow.yaml", b"name: !!python/object:os.system x", "is not YAML: aliases and tags are not accepted"),
        ("flow.yaml", b"name: !!timestamp x", "is not YAML: aliases and tags"),
        ("flow.yaml", b"name: &a [*a]", "is not YAML: aliases and tags"),
        ("flow.yaml", b"one: &a {}\ntwo: {<<: *a}", "is not YAML: aliases and tags"),
        ("flow.yaml", b"- a", "is a mapping"),
        ("flow.yaml", b"", "is a mapping"),
        ("flow.json", b"{", "is not JSON"),
        ("flow.json", b'{"name": "a", "name": "b"}', "duplicate key 'name'"),
        ("flow.json", b"[" * 100_000, "is not JSON"),
        ("flow.toml", b"", "a workflow file ends in"),
    ],
)
def test_files_that_are_no_workflow(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    path = write(tmp_path, content, name)
    with pytest.raises(SpecError, match=why) as caught:
        load_workflow(path)
    assert name in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    for name in ("nothing.yaml", "folder.yaml"):
        with pytest.raises(SpecError, match="cannot be read"):
            load_workflow(tmp_path / name)


def test_a_file_of_many_names_is_read_in_one_pass() -> None:
    names = [f"n{number}" for number in range(100_000)]
    assert parse(json.dumps(dict.fromkeys(names)).encode(), ".json", "", "") == dict.fromkeys(names)
    agent = Agent("a", "", "".join(f"{{{name}}}" for name in names))
    with pytest.raises(WorkflowError, match="does not read"):
        Workflow("n", (agent,), tuple(names), loops=(("a", "a"),))


def test_wrong_workflows_keep_their_error_and_name_the_file(tmp_path: Path) -> None:
    unknown = write(tmp_path, "name: n\nagents: [{id: a, user: '{x}'}]")
    with pytest.raises(UnknownPlaceholder) as caught:
        load_workflow(unknown)
    assert caught.value.__notes__ == [f"in {unknown}"]
    with pytest.raises(CycleError):
        build_workflow(spec(agents=[{"id": "a", "user": "{agent_a_current}"}]))


GRAPH = """
name: review
graph:
  planner: {loops: [reviewer, [fixer, writer]]}
  searcher: {after: [planner]}
  coder: {after: [planner], agent: writer}
  writer: {after: [searcher, coder]}
  fixer: {after_any: [searcher, [planner, coder]]}
  reviewer: {after: [writer], then: {planner: 0.3, publisher: 0.7}}
  publisher: {after: [reviewer], then: [end, archive]}
  end: {after: [publisher]}
  archive: {after: [publisher]}
  alone:
"""


def test_a_step_graph_is_what_python_builds_and_cannot_be_run(tmp_path: Path) -> None:
    expected = StepGraph(
        "review",
        (
            Node("planner", loops=["reviewer", {"fixer", "writer"}]),
            Node("searcher", after=["planner"]),
            Node("coder", after=["planner"], agent="writer"),
            Node("writer", after=[{"searcher", "coder"}]),
            Node("fixer", after=["searcher", {"planner", "coder"}]),
            Node("reviewer", after=["writer"], then={"planner": 0.3, "publisher": 0.7}),
            Node("publisher", after=["reviewer"], then={"end": None, "archive": None}),
            Node("end", after=["publisher"]),
            Node("archive", after=["publisher"]),
            Node("alone"),
        ),
    )
    file = write(tmp_path, GRAPH)
    assert load_flow(file) == expected
    assert expected.nodes[6].odds == {"end": 0.5, "archive": 0.5}
    with pytest.raises(SpecError, match="no prompts"):
        load_workflow(file)


def nodes(**fields: object) -> dict[str, object]:
    return {"name": "n", "graph": {"a": {}, "b": fields}}


@pytest.mark.parametrize(
    ("data", "key", "value"),
    [
        (nodes(after=["x"]), "node b: after", "x"),
        (nodes(then={"a": 1.5}), "node b: then.a", 1.5),
        (nodes(afer=["a"]), "graph.b.afer", "['a']"),
        (nodes(after="a"), "graph.b.after", "a"),
        (nodes(after=["a"], after_any=["a"]), "graph.b.after_any", "['a']"),
        (nodes(after_any=[]), "graph.b.after_any", "[]"),
        (nodes(after=["a"], then={"a": "much"}), "graph.b.then.dict[constrained-str,nullable[float]].a", "much"),
        ({"name": "n", "graph": []}, "graph", "[]"),
        ({"name": "n", "graph": {}, "agents": []}, "agents", "[]"),
    ],
)
def test_bad_step_graph_files_name_key_and_value(data: dict[str, object], key: str, value: object) -> None:
    with pytest.raises(WorkflowError) as caught:
        build_step_graph(data, source="flow.yaml")
    is_wrong = key.startswith("node ")  # else it is none at all
    assert (caught.value.key, caught.value.value) == (key if is_wrong else f"flow.yaml: {key}", value)
    assert getattr(caught.value, "__notes__", None) == ["in flow.yaml"] or not is_wrong
