"""Workflows in YAML and JSON files.

    name: math team
    topology: fully_connected          # writes every `user` text; without it each agent has its own
    agents:
      - {id: solver, title: Math Solver, system: You are a math solver.}
      - {id: programmer, system: Write solve()., tool: python, tool_append: "print(solve())"}
      - {id: final, system: You decide.}

A tool is named, never imported by a file: from `TOOLS` or from what the caller passes. A file with `graph` in place of
agents is a step graph without prompts, for a workflow that another framework drives:

    name: review
    graph:
      planner: {loops: [reviewer]}                                # may run again once the reviewer is done
      searcher: {after: [planner]}
      coder: {after: [planner]}
      writer: {after: [searcher, coder]}                          # waits for both
      fixer: {after_any: [searcher, [planner, coder]]}            # waits for the one, or for both of the others
      reviewer: {after: [writer], then: {planner: 0.3, publisher: 0.7}}       # one of them comes next
      publisher: {after: [reviewer]}
"""

import json
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from kedge.checks import MAX_COUNT, brief
from kedge.errors import SpecError, WorkflowError
from kedge.guard import GuardMode
from kedge.settings.sections import Fidelity
from kedge.types import ReuseMode
from kedge.workflow.graph import Agent, Tool, Workflow
from kedge.workflow.step_graph import Node, StepGraph
from kedge.workflow.topologies import TOPOLOGIES, Wording, connect

TOOLS: dict[str, str] = {"python": "kedge.workloads.sandbox:answer_as_python"}
"""Tools that every file may name -> where they are, imported when first named."""


@dataclass(frozen=True)
class Appended:
    """A tool that is called with some text after the answer, such as the call of a function that the answer defines."""

    tool: Tool
    text: str

    def __call__(self, answer: str, inputs: Mapping[str, str]) -> str:
        return self.tool(f"{answer}\n{self.text}", inputs)


def tool_name(tool: Tool) -> str:
    """Return the name of the function that a tool is."""
    inner = tool.tool if isinstance(tool, Appended) else tool
    return getattr(inner, "__name__", type(inner).__name__)


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, str_max_length=MAX_COUNT)  # a length checks Unicode, too

    def given(self, *leave_out: str) -> dict[str, Any]:
        """Return the fields that the file sets; what is built from them has the defaults of the others."""
        return {key: getattr(self, key) for key in self.model_fields_set if key not in leave_out}


_BARE = BeforeValidator(lambda value: {False: "off", True: "on"}[value] if isinstance(value, bool) else value)
"""Accepts a bare `off` or `on`, which YAML reads as false and true."""
GuardChoice = Literal["off", "shadow", "on"]


class AgentSpec(_Spec):
    """An agent; every key means what it means in `Agent`, and those left out have its defaults."""

    id: str
    system: str = ""
    user: str | None = None
    title: str = ""
    tool: str | None = None
    tool_append: str | None = None
    tool_seconds: float = 0.0
    max_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 0.0
    seed: int | None = None
    stop: list[str] = []
    reuse: Annotated[Literal["off", "exact", "translate"] | None, _BARE] = None
    guard: Annotated[GuardChoice | None, _BARE] = None
    fidelity: Fidelity | None = None
    pick: str = ""


class TopologySpec(_Spec):
    """A topology and its options."""

    kind: str
    width: int = 0
    turns: int = 0
    seed: int = 0
    share: float = 0.0


class WorkflowSpec(_Spec):
    """A workflow file."""

    name: str
    agents: list[AgentSpec]
    inputs: list[str] = ["user_question"]
    turns: int = 1
    loops: list[Annotated[list[str], Field(min_length=2, max_length=2)]] = []
    guard: Annotated[GuardChoice | None, _BARE] = None
    fidelity: Fidelity | None = None
    """Both of the agents that have none of their own"""
    topology: TopologySpec | None = None
    wording: dict[Literal["header", "intro", "speaker", "tool", "footer"], str] = {}
    """The texts of user messages, see `Wording`"""

    @field_validator("topology", mode="before")
    @classmethod
    def _short(cls, value: object) -> object:
        """Accept a topology without options as its name alone."""
        return {"kind": value} if isinstance(value, str) else value


_AnyOf = Annotated[list[str | list[str]], Field(min_length=1)]


class NodeSpec(_Spec):
    """A node of a step graph, see `Node`. `after` is one set of nodes, all of which it waits for."""

    after: list[str] | None = None
    after_any: _AnyOf | None = None
    loops: _AnyOf = []
    then: dict[str, float | None] | list[str] = {}
    agent: str = ""


class StepGraphSpec(_Spec):
    """A file with a step graph."""

    name: str
    graph: dict[str, NodeSpec | None]


def load_workflow(path: str | Path, tools: Mapping[str, Tool] | None = None) -> Workflow:
    """Return the workflow of a `.yaml`, `.yml` or `.json` file; `tools` adds to those that it may name.

    Raises `SpecError` naming file, key and value for a file that is no workflow, and `UnknownPlaceholder`,
    `CycleError` or another `WorkflowError` for a workflow that is wrong.
    """
    return build_workflow(_read(Path(path)), tools, source=str(path))


def load_flow(path: str | Path, tools: Mapping[str, Tool] | None = None) -> Workflow | StepGraph:
    """Return the workflow, or the step graph without prompts, of a `.yaml`, `.yml` or `.json` file.

    Raises as `load_workflow` does.
    """
    data, source = _read(Path(path)), str(path)
    return build_step_graph(data, source) if _is_graph(data) else build_workflow(data, tools, source)


def _read(path: Path) -> object:
    if path.suffix.lower() not in _READERS:
        raise SpecError("path", str(path), f"a workflow file ends in {', '.join(_READERS)}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SpecError("path", str(path), f"cannot be read: {error.strerror}") from error
    return parse(content, path.suffix, "path", str(path))


def parse(content: bytes, suffix: str, key: str, value: object) -> object:
    """Parse a workflow file, YAML or JSON by its `suffix`.

    Raises `SpecError`, which names `key` and `value`, for invalid text, or a key that stands twice in a mapping.
    """
    try:
        return _READERS[suffix.lower()](content.decode("utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError(key, value, f"is not {suffix[1:].upper()}: {error}") from error


def build_workflow(data: object, tools: Mapping[str, Tool] | None = None, source: str = "workflow") -> Workflow:
    """Build the workflow of parsed YAML or JSON; `source` names it in errors, which are those of `load_workflow`."""
    if _is_graph(data):
        raise SpecError(f"{source}: graph", "…", "a step graph has no prompts: it can be inspected, not run")
    spec = _validated(data, source, WorkflowSpec)
    try:
        agents = tuple(_agent(agent, i, spec, tools or {}, source) for i, agent in enumerate(spec.agents))
        if spec.topology is None:
            loops = tuple((speaker, listener) for speaker, listener in spec.loops)
            return Workflow(spec.name, agents, tuple(spec.inputs), spec.turns, loops)
        return _connected(spec, spec.topology, agents, source)
    except WorkflowError as error:
        error.add_note(f"in {source}")
        raise


def build_step_graph(data: object, source: str = "workflow") -> StepGraph:
    """Build the step graph of parsed YAML or JSON; `source` names it in errors.

    Raises `SpecError` for what is no step graph, and `CycleError` or another `WorkflowError` for one that is wrong.
    """
    spec = _validated(data, source, StepGraphSpec)
    try:
        nodes = []
        for name, given in spec.graph.items():
            node = given or NodeSpec()
            if node.after is not None and node.after_any is not None:
                key = f"{source}: graph.{name}.after_any"
                raise SpecError(key, brief(node.after_any), "stands beside `after`: only one may")
            then = dict.fromkeys(node.then) if isinstance(node.then, list) else node.then
            after = node.after_any or ([] if node.after is None else [node.after])
            nodes.append(Node(name, after, node.loops, then, node.agent))
        return StepGraph(spec.name, tuple(nodes))
    except WorkflowError as error:
        error.add_note(f"in {source}")
        raise


def _is_graph(data: object) -> bool:
    return isinstance(data, dict) and "graph" in data


_S = TypeVar("_S", bound=_Spec)
_WHY = {"extra_forbidden": "there is no such field", **dict.fromkeys(("model_type", "dict_type"), "must be a mapping")}


def _validated(data: object, source: str, kind: type[_S]) -> _S:
    if not isinstance(data, dict):
        raise SpecError(source, brief(data), "a workflow is a mapping with `name` and `agents`")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, first["loc"]))
        why = _WHY.get(first["type"], first["msg"])
        raise SpecError(f"{source}: {key}", brief(first["input"]), why) from None


def _agent(spec: AgentSpec, at: int, flow: WorkflowSpec, tools: Mapping[str, Tool], source: str) -> Agent:
    key = f"{source}: agents.{at}"
    if (spec.user is None) != (flow.topology is not None):
        raise SpecError(f"{key}.user", spec.user, "is needed without `topology`, which writes it otherwise")
    if spec.tool is None and spec.model_fields_set & {"tool_append", "tool_seconds"}:
        raise SpecError(f"{key}.tool", None, "is needed for tool_append and tool_seconds")
    values = spec.given("id", "system", "user", "tool", "tool_append", "reuse", "guard", "fidelity")
    reuse = ReuseMode(spec.reuse) if spec.reuse else None
    guard = GuardMode(mode) if (mode := spec.guard or flow.guard) else None
    tool = _tool(spec, tools, f"{key}.tool")
    fidelity = flow.fidelity if spec.fidelity is None else spec.fidelity
    return Agent(spec.id, spec.system, spec.user or "", tool, reuse=reuse, guard=guard, fidelity=fidelity, **values)


def _tool(spec: AgentSpec, tools: Mapping[str, Tool], key: str) -> Tool | None:
    if spec.tool is None:
        return None
    if spec.tool not in tools and spec.tool not in TOOLS:
        raise SpecError(key, spec.tool, f"no tool has this name (known: {', '.join(sorted({*tools, *TOOLS}))})")
    tool: Tool = tools[spec.tool] if spec.tool in tools else pkgutil.resolve_name(TOOLS[spec.tool])
    return tool if spec.tool_append is None else Appended(tool, spec.tool_append)


def _connected(spec: WorkflowSpec, topology: TopologySpec, agents: tuple[Agent, ...], source: str) -> Workflow:
    for key in sorted(spec.model_fields_set & {"turns", "loops"}):
        raise SpecError(f"{source}: {key}", getattr(spec, key), "is set by the topology")
    if topology.kind not in TOPOLOGIES:
        raise SpecError(f"{source}: topology", topology.kind, f"not one of {', '.join(TOPOLOGIES)}")
    options = topology.given("kind")
    try:
        chosen = TOPOLOGIES[topology.kind](agents, **options)
    except TypeError as error:
        raise SpecError(f"{source}: topology.{topology.kind}", brief(options), "it has no such option") from error
    return connect(spec.name, agents, chosen, Wording(**spec.wording), tuple(spec.inputs))


class _Yaml(yaml.SafeLoader):
    """Plain YAML: a key stands once in a mapping, no alias multiplies what it stands for, no tag makes an object."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.tag is not None:
            raise yaml.MarkedYAMLError(problem="aliases and tags are not accepted", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        _no_double(keys)
        return super().construct_mapping(node, deep)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _no_double([key for key, _ in pairs])
    return dict(pairs)


def _no_double(keys: list[str]) -> None:
    if doubles := [key for key, times in Counter(keys).items() if times > 1]:
        raise ValueError(f"duplicate key {doubles[0]!r}")


_READERS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys((".yaml", ".yml"), lambda text: yaml.load(text, _Yaml)),  # noqa: S506 (a safe loader)
    ".json": lambda text: json.loads(text, object_pairs_hook=_unique),
}
