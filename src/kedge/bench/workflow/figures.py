"""The workloads of KVFlow's figures 5, 6 and 8 as data: who is called after whom, with which prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

from kedge.types import (
    AgentId,
    ClientId,
    GenerateRequest,
    ReuseMode,
    RunId,
    SampleId,
    SamplingParams,
    Segment,
    TenantId,
    Tokens,
)
from kedge.workflow.forecast import RunKey
from kedge.workflow.step_graph import Node, StepGraph

TENANT = TenantId("default")
Path = Callable[[int], str]
"""Turn -> the agent that is called in it."""


@dataclass(frozen=True)
class Flow:
    """One client's workflow: its agents' fixed prompts, who is called when, and what they are called with."""

    run: RunKey
    graph: StepGraph
    fixed: Mapping[AgentId, Tokens]
    path: Path
    dynamic: Callable[[int], Tokens]
    """Turn -> what is new in its prompt."""
    output: int
    reads_answer: bool = False
    """Whether every agent also reads the answer of the one before it."""

    def agent(self, turn: int) -> AgentId:
        return AgentId(self.path(turn))

    def request(self, turn: int, answer: Tokens = ()) -> GenerateRequest:
        """The call of `turn`; `answer` is the one of the turn before."""
        agent = self.agent(turn)
        new = self.dynamic(turn) + (answer if self.reads_answer else ())
        return GenerateRequest(
            (Segment(self.fixed[agent], "p0"), Segment(new, "new", SampleId(f"new@{turn}"))),
            SamplingParams(max_tokens=self.output, ignore_eos=True),
            ReuseMode.EXACT,
            tenant=self.run.tenant,
            client=ClientId(self.run.client_id),
            run=self.run.run_id,
            agent=agent,
        )


@dataclass(frozen=True)
class Workload:
    """One case of a figure: flows that run at once, and for how much of them the device has room."""

    name: str
    flows: tuple[Flow, ...]
    room: int
    """Tokens of the device tier."""
    calls: int
    """Calls of every flow in one trial, one after the other."""
    lead: int
    """Calls of every flow before the clock starts, so that nothing was prefetched while nobody waited."""

    @property
    def prompts(self) -> set[Tokens]:
        """The different fixed prompts."""
        return {tokens for flow in self.flows for tokens in flow.fixed.values()}


@dataclass(frozen=True)
class Sizes:
    """Tokens of every agent's fixed prompt, of what is new in a call, and of an answer."""

    fixed: int = 2048
    dynamic: int = 32
    output: int = 8

    @property
    def call(self) -> int:
        return self.fixed + self.dynamic + self.output

    def __str__(self) -> str:
        return f"{self.fixed}/{self.dynamic}/{self.output}"


def random_tokens(size: int, vocab: int, *seed: object) -> Tokens:
    """The same tokens for the same seed."""
    rng = Random(repr(seed))
    return tuple(rng.randrange(2, vocab) for _ in range(size))


def cycle(stages: int, branches: int = 1) -> StepGraph:
    """Stages one after the other and from the start again; of the `branches` agents of a stage one is called."""
    rows = [[f"a{stage * branches + one}" for one in range(branches)] for stage in range(stages)]
    nodes = []
    for stage, row in enumerate(rows):
        then = dict.fromkeys(rows[(stage + 1) % stages]) if branches > 1 else {}
        before = rows[stage - 1]
        after, loops = (before, []) if stage else ([], before)
        nodes += [Node(name, after, loops, then) for name in row]
    return StepGraph("cycle", tuple(nodes))


def synthetic_flow(name: str, agents: int, sizes: Sizes, vocab: int, seed: int, path: Path | None = None) -> Flow:
    """A cycle of agents with random prompts of their own."""
    return Flow(
        run=RunKey(TENANT, name, RunId("run")),
        graph=cycle(agents),
        fixed={AgentId(f"a{i}"): random_tokens(sizes.fixed, vocab, seed, name, i) for i in range(agents)},
        path=path or (lambda turn: f"a{turn % agents}"),
        dynamic=lambda turn: random_tokens(sizes.dynamic, vocab, seed, name, "new", turn),
        output=sizes.output,
    )


def single_flow(sizes: Sizes, vocab: int, seed: int, *, agents: int = 10, room: int = 4, lead: int = 2) -> Workload:
    """Figure 5: one workflow of agents in a cycle, one call at a time; the device has room for `room` of them."""
    flow = synthetic_flow("flow", agents, sizes, vocab, seed)
    return Workload(f"{sizes}, room for {room} of {agents}", (flow,), room * sizes.call, agents, lead)


def many_flows(sizes: Sizes, flows: int, room: int, vocab: int, seed: int, *, agents: int = 5) -> Workload:
    """Figure 6: independent workflows at once, each with agents and prompts of its own."""
    made = tuple(synthetic_flow(f"flow-{i}", agents, sizes, vocab, seed) for i in range(flows))
    return Workload(f"{sizes}, {flows} workflows", made, room, agents, 1)


# controls: what must not be slower than LRU, however wrong the forecast is -----------------------------------------


def unpressed(sizes: Sizes, vocab: int, seed: int) -> Workload:
    """Room for all agents and more."""
    made = single_flow(sizes, vocab, seed, room=12)
    return replace(made, name="no pressure")


def random_order(sizes: Sizes, vocab: int, seed: int) -> Workload:
    """Whoever is called next is drawn by lot; the graph still says that they form a cycle."""
    made = single_flow(sizes, vocab, seed)
    flow = replace(made.flows[0], path=lambda turn: f"a{Random(f'{seed}/{turn}').randrange(10)}")
    return replace(made, name="random order", flows=(flow,))


def branching(branches: int, sizes: Sizes, vocab: int, seed: int, *, agents: int = 8) -> Workload:
    """At every stage one of so many agents is called, drawn by lot; there is room for half of them all."""
    stages = agents // branches

    def path(turn: int) -> str:
        return f"a{turn % stages * branches + Random(f'{seed}/{turn}').randrange(branches)}"

    flow = replace(synthetic_flow("flow", agents, sizes, vocab, seed, path), graph=cycle(stages, branches))
    return Workload(f"{branches} branches", (flow,), agents // 2 * sizes.call, agents, 2)
