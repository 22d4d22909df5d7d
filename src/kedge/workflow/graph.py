"""Workflows: agents, the dependencies between them, and the order in which they run."""

import graphlib
import heapq
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import TIMEOUT_MAX
from typing import NamedTuple, Self

from kedge.checks import brief, is_number, require_sampling, require_text
from kedge.decisions import MAX_PICK
from kedge.errors import CycleError, RequestError, UnknownPlaceholder, WorkflowError
from kedge.guard import GuardMode
from kedge.types import AgentId, ReuseMode, SampleId, SamplingParams, ValueKind, take_value
from kedge.workflow.template import Placeholder, placeholders

Tool = Callable[[str, Mapping[str, str]], str]
"""A tool: an agent's answer and the run's inputs to the text of the result (the agent's `condition`)."""

_ID = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class Agent:
    """One role in a workflow. `system` and `user` are templates, see `kedge.workflow.template`.

    Raises `WorkflowError` naming the agent and the field for a value that can never work.
    """

    id: str
    system: str
    user: str
    tool: Tool | None = field(default=None, hash=False)
    title: str = ""
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    reuse: ReuseMode | None = None
    """How far this agent may reuse shared KV; None: as the run says."""
    guard: GuardMode | None = None
    """How far the quality guard acts on its translation; None: as the engine's settings say."""
    fidelity: float | None = None
    """Highest mean divergence (KL) of its answers from dense prefill, in nats a token, for which its prompts are
    translated; None: as the engine's settings say."""
    pick: str = ""
    """The text before what it picks in its answers, such as `answer is <letter>`: the guard compares what follows, up
    to the end of the line or as `kedge.decisions.pick_of` reads it. "": nothing in them is known to be a pick."""
    tool_seconds: float = 10.0
    """Time limit of the tool."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, list):
            object.__setattr__(self, "stop", tuple(self.stop))
        for key, kind in (("reuse", ReuseMode), ("guard", GuardMode)):
            take_value(self, key, kind)
            if not isinstance(found := getattr(self, key), kind | None):
                raise WorkflowError(f"agent {self.id}: {key}", brief(found), f"must be one of {', '.join(kind)}")
        if not _ID.fullmatch(self.id):
            raise WorkflowError("agent", self.id, "an id has only letters, digits, '_' and '-'")
        try:
            for key in ("system", "user", "title", "pick"):
                require_text(key, getattr(self, key), may_be_empty=True)
            if len(self.pick) > MAX_PICK:
                raise RequestError("pick", brief(self.pick), f"must have at most {MAX_PICK} characters")
            require_sampling(self.sampling, least_tokens=1)
        except RequestError as error:
            raise WorkflowError(f"agent {self.id}: {error.key}", error.value, error.why) from None
        if not (self.fidelity is None or (is_number(self.fidelity) and self.fidelity > 0)):
            raise WorkflowError(f"agent {self.id}: fidelity", brief(self.fidelity), "must be nats a token above 0")
        if not (is_number(self.tool_seconds) and 0 < self.tool_seconds <= TIMEOUT_MAX):
            why = f"must be more than 0 and at most {TIMEOUT_MAX}"
            raise WorkflowError(f"agent {self.id}: tool_seconds", brief(self.tool_seconds), why)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.max_tokens, self.temperature, self.top_p, self.seed, self.stop)

    @cached_property
    def placeholders(self) -> tuple[Placeholder, ...]:
        """The placeholders of both templates."""
        return placeholders(self.system, self.user)


class Step(NamedTuple):
    """One call of an agent in a run; turns count from 0."""

    agent: AgentId
    turn: int

    def sample(self, kind: ValueKind = ValueKind.AGENT) -> SampleId:
        """Return the sample that this step makes: its answer, or its tool's result."""
        return SampleId(kind, self.agent, self.turn)


@dataclass(frozen=True)
class Workflow:
    """Agents and the dependencies between them, as their templates state them.

    An agent that reads `{agent_X_current}` or `{condition_X_current}` waits for X in this turn. A pair `(X, Y)` in
    `loops` makes this a back edge: Y reads X's answer of the turn before, and nothing in the first one. History is
    never an edge; in the first turns it is empty.

    Raises `UnknownPlaceholder`, `CycleError` or another `WorkflowError`, all of them at construction.
    """

    name: str
    agents: tuple[Agent, ...]
    inputs: tuple[str, ...] = ("user_question",)
    turns: int = 1
    loops: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for key in ("agents", "inputs", "loops"):
            object.__setattr__(self, key, tuple(getattr(self, key)))
        if not self.agents:
            raise WorkflowError("agents", (), "a workflow needs at least one agent")
        for key, names in (("agents", self.ids), ("inputs", self.inputs)):
            if doubles := sorted(name for name, times in Counter(names).items() if times > 1):
                raise WorkflowError(key, doubles[0], "duplicate")
        if self.turns < 1:
            raise WorkflowError("turns", brief(self.turns), "must be at least 1")
        inputs = frozenset(self.inputs)
        for name in inputs:
            if Placeholder.parse(name).kind is not ValueKind.INPUT:
                raise WorkflowError("inputs", name, "this name is reserved for agents' answers")
        for agent in self.agents:
            if not agent.user.strip():
                raise WorkflowError(f"agent {agent.id}: user", agent.user, "the user message is empty")
        for agent in self.agents:
            for placeholder in agent.placeholders:
                self._check(agent, placeholder, inputs)
        reads = {(read.of, agent.id) for agent in self.agents for read in agent.placeholders if _is_current(read)}
        for pair in self.loops:
            if pair not in reads:
                raise WorkflowError("loops", pair, "the second does not read the first's current answer")
        order(self.ids, self.waits_for)

    def _check(self, agent: Agent, placeholder: Placeholder, inputs: Collection[str]) -> None:
        key, name = f"agent {agent.id}", placeholder.name
        if placeholder.kind is ValueKind.INPUT:
            if name not in inputs:
                raise UnknownPlaceholder(key, name, f"no input has this name (inputs: {', '.join(self.inputs)})")
        elif placeholder.of not in self._by_id:
            raise UnknownPlaceholder(key, name, f"there is no agent {placeholder.of!r}")
        elif placeholder.kind is ValueKind.CONDITION and self.agent(placeholder.of).tool is None:
            raise UnknownPlaceholder(key, name, f"agent {placeholder.of!r} has no tool")

    @cached_property
    def ids(self) -> tuple[AgentId, ...]:
        return tuple(AgentId(agent.id) for agent in self.agents)

    def agent(self, agent_id: str) -> Agent:
        """Return the agent with this id. Raises `WorkflowError` where there is none."""
        if agent_id not in self._by_id:
            raise WorkflowError("agent", agent_id, f"not one of {', '.join(self.ids)}")
        return self._by_id[agent_id]

    @cached_property
    def _by_id(self) -> Mapping[str, Agent]:
        return {agent.id: agent for agent in self.agents}

    @cached_property
    def _back_edges(self) -> frozenset[tuple[str, str]]:
        return frozenset(self.loops)

    def shortened(self, longest: int) -> Self:
        """Return the workflow with answers of at most `longest` tokens."""
        agents = (replace(one, max_tokens=min(one.max_tokens, longest)) for one in self.agents)
        return replace(self, agents=tuple(agents))

    @cached_property
    def waits_for(self) -> Mapping[AgentId, frozenset[AgentId]]:
        """Agent -> the agents that it waits for within one turn."""
        return {
            AgentId(agent.id): frozenset(
                AgentId(read.of)
                for read in agent.placeholders
                if _is_current(read) and (read.of, agent.id) not in self._back_edges
            )
            for agent in self.agents
        }

    @cached_property
    def order(self) -> tuple[AgentId, ...]:
        """The agents as they run in one turn: topological, otherwise as declared."""
        return order(self.ids, self.waits_for)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All calls of a run, turn by turn. The last one gives the final answer."""
        return tuple(Step(agent, turn) for turn in range(self.turns) for agent in self.order)

    def source(self, step: Step, placeholder: Placeholder) -> Step | None:
        """Return the step whose answer or tool result fills `placeholder`; None where that is before the first turn.

        Not for inputs, which no step makes.
        """
        back = placeholder.turns_back
        if _is_current(placeholder) and (placeholder.of, step.agent) in self._back_edges:
            back = 1
        return Step(AgentId(placeholder.of), step.turn - back) if step.turn >= back else None

    def sample(self, step: Step, placeholder: Placeholder) -> SampleId | None:
        """Return the sample that fills `placeholder`; None where that is before the first turn."""
        if placeholder.kind is ValueKind.INPUT:
            return SampleId(ValueKind.INPUT, placeholder.of)
        source = self.source(step, placeholder)
        return None if source is None else source.sample(placeholder.kind)

    @cached_property
    def read_answers(self) -> frozenset[Step]:
        """The steps whose answers some step of the run reads."""
        reads = ((step, read) for step in self.steps for read in self.agent(step.agent).placeholders)
        sources = (self.source(step, read) for step, read in reads if read.kind is ValueKind.AGENT)
        return frozenset(source for source in sources if source)

    @cached_property
    def needs(self) -> Mapping[Step, frozenset[Step]]:
        """Step -> the steps that must be done before it: those it reads from, and its own agent's last turn."""
        found = {step: {Step(step.agent, step.turn - 1)} if step.turn else set[Step]() for step in self.steps}
        for step, sources in found.items():
            reads = (read for read in self.agent(step.agent).placeholders if read.kind is not ValueKind.INPUT)
            sources.update(source for read in reads if (source := self.source(step, read)))
        return {step: frozenset(sources) for step, sources in found.items()}


def _is_current(placeholder: Placeholder) -> bool:
    return placeholder.kind is not ValueKind.INPUT and placeholder.turns_back == 0


def order(ids: Sequence[AgentId], waits_for: Mapping[AgentId, frozenset[AgentId]]) -> tuple[AgentId, ...]:
    """Return a topological order, otherwise as declared. Raises `CycleError`."""
    sorter, places = graphlib.TopologicalSorter(waits_for), {agent: at for at, agent in enumerate(ids)}
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        raise CycleError("agents", cycle, "each waits for the next; mark the back edge in `loops`") from None
    ready: list[int] = []
    done: list[AgentId] = []
    while sorter.is_active():
        for agent in sorter.get_ready():
            heapq.heappush(ready, places[agent])
        done.append(ids[heapq.heappop(ready)])
        sorter.done(done[-1])
    return tuple(done)
