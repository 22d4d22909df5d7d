"""Calls of agents in workflows as data: their order and their prompts (KVFlow, figure 5)."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from kedge.types import (
    AgentId,
    ClientId,
    GenerateRequest,
    Namespace,
    ReuseMode,
    RunId,
    RunKey,
    SampleId,
    SamplingParams,
    Segment,
    TenantId,
    Tokens,
    ValueKind,
)
from kedge.workflow.step_graph import Node, StepGraph

TENANT = TenantId("default")
CallPath = Callable[[int], str]
"""Turn -> the agent that is called in it."""


@dataclass(frozen=True)
class Flow:
    """One client's workflow: its agents' fixed prompts, the order of its calls, and each call's new tokens."""

    run: RunKey
    graph: StepGraph
    fixed: Mapping[AgentId, Tokens]
    path: CallPath
    dynamic: Callable[[int], Tokens]
    """Turn -> the new part of its prompt."""
    output: int
    reads_answer: bool = False
    """Whether every agent also reads the answer of the one before it."""

    def agent(self, turn: int) -> AgentId:
        """Return the agent that is called in `turn`."""
        return AgentId(self.path(turn))

    def request(self, turn: int, answer: Tokens = ()) -> GenerateRequest:
        """Return the call of `turn`; `answer` is the one of the turn before."""
        agent = self.agent(turn)
        new = self.dynamic(turn) + (answer if self.reads_answer else ())
        return GenerateRequest(
            (Segment(self.fixed[agent], "p0"), Segment(new, "new", SampleId(ValueKind.INPUT, "new", turn))),
            SamplingParams(max_tokens=self.output, ignore_eos=True),
            ReuseMode.EXACT,
            tenant=self.run.namespace.tenant,
            client=ClientId(self.run.client_id),
            run=self.run.run_id,
            agent=agent,
        )


@dataclass(frozen=True)
class FlowWorkload:
    """One case of a figure: concurrent flows and the room on the device."""

    name: str
    flows: tuple[Flow, ...]
    room: int
    """Tokens of the device tier."""
    calls: int
    """Calls of every flow in one trial, one after the other."""
    lead: int
    """Calls of every flow before the clock starts, so that nothing was prefetched while the engine was idle."""

    @property
    def prompts(self) -> set[Tokens]:
        """The distinct fixed prompts."""
        return {tokens for flow in self.flows for tokens in flow.fixed.values()}


@dataclass(frozen=True)
class Sizes:
    """Tokens of every agent's fixed prompt, of a call's new part, and of an answer."""

    fixed: int = 2048
    dynamic: int = 32
    output: int = 8

    @property
    def call(self) -> int:
        """Tokens of a whole call."""
        return self.fixed + self.dynamic + self.output

    def __str__(self) -> str:
        return f"{self.fixed}/{self.dynamic}/{self.output}"


def random_tokens(size: int, vocab: int, *seed: object) -> Tokens:
    """Return random token ids, the same for the same seed."""
    rng = Random(repr(seed))
    return tuple(rng.randrange(2, vocab) for _ in range(size))


def cycle(stages: int, branches: int = 1) -> StepGraph:
    """Return the graph of stages in a cycle; of the `branches` agents of a stage one is called."""
    rows = [[f"a{stage * branches + one}" for one in range(branches)] for stage in range(stages)]
    nodes = []
    for stage, row in enumerate(rows):
        then = dict.fromkeys(rows[(stage + 1) % stages]) if branches > 1 else {}
        before = rows[stage - 1]
        after, loops = (before, []) if stage else ([], before)
        nodes += [Node(name, after, loops, then) for name in row]
    return StepGraph("cycle", tuple(nodes))


def synthetic_flow(name: str, agents: int, sizes: Sizes, vocab: int, seed: int, path: CallPath | None = None) -> Flow:
    """Return a cycle of agents with random prompts of their own."""
    return Flow(
        run=RunKey(Namespace(TENANT), name, RunId("run")),
        graph=cycle(agents),
        fixed={AgentId(f"a{i}"): random_tokens(sizes.fixed, vocab, seed, name, i) for i in range(agents)},
        path=path or (lambda turn: f"a{turn % agents}"),
        dynamic=lambda turn: random_tokens(sizes.dynamic, vocab, seed, name, "new", turn),
        output=sizes.output,
    )


def single_flow(sizes: Sizes, vocab: int, seed: int, *, agents: int = 10, room: int = 4, lead: int = 2) -> FlowWorkload:
    """Return figure 5: one workflow of agents in a cycle, one call at a time, with room for `room` of them on the
    device.
    """
    flow = synthetic_flow("flow", agents, sizes, vocab, seed)
    return FlowWorkload(f"{sizes}, room for {room} of {agents}", (flow,), room * sizes.call, agents, lead)


def spread(values: Iterable[float], digits: int) -> dict[str, float]:
    """Return median, minimum and maximum."""
    ordered = sorted(values)
    picked = {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1]}
    return {name: round(value, digits) for name, value in picked.items()}


def percentile(values: list[float], share: float, digits: int) -> float | None:
    """Return the nearest-rank percentile; None of no values."""
    ordered = sorted(values)
    return round(ordered[int(share * (len(ordered) - 1) + 0.5)], digits) if ordered else None


def with_given(settings: Any, **given: object) -> Any:
    """Return settings with the values that are not None."""
    return replace(settings, **{name: value for name, value in given.items() if value is not None})
