"""Which agents read whose answers: the topologies of the paper, and a builder that makes a workflow from one.

Agents are given in speaking order and the last one decides: it reads all answers that no other agent reads.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from kedge.checks import brief
from kedge.errors import WorkflowError
from kedge.types import AgentId, ValueKind
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.template import Placeholder, escape

MAX_WRITTEN = 1 << 24
"""Characters of all user messages of a workflow"""


class AnswerSource(NamedTuple):
    """An agent whose answer is read: this turn's, or that of some turns back."""

    agent: AgentId
    turns_back: int = 0


@dataclass(frozen=True)
class Topology:
    """The answers that each agent reads, in the order of its prompt, and the number of turns."""

    reads: Mapping[AgentId, tuple[AnswerSource, ...]]
    turns: int = 1


def fully_connected(agents: Sequence[Agent]) -> Topology:
    """Let every agent read all before it."""
    return _topology(agents, ((i, j) for j in range(len(agents)) for i in range(j)))


def chain(agents: Sequence[Agent]) -> Topology:
    """Let every agent read the one before it."""
    return _topology(agents, ((i, i + 1) for i in range(len(agents) - 1)))


def star(agents: Sequence[Agent]) -> Topology:
    """Make the last agent the hub: it reads all others, which read no answers."""
    return _topology(agents, ())


def layered(agents: Sequence[Agent], *, width: int = 2) -> Topology:
    """Form layers of `width` agents; each agent reads the whole layer before its own."""
    _require("width", width, width >= 1, "must be at least 1")
    count = len(agents) - 1
    return _topology(agents, ((i, j) for j in range(count) for i in range(j) if j // width - i // width == 1))


def mesh(agents: Sequence[Agent]) -> Topology:
    """Form a square grid, filled row by row; each agent reads its left and its upper neighbour."""
    count = len(_at_least_one(agents)) - 1
    side = max(1, math.ceil(math.sqrt(count)))
    left = ((j - 1, j) for j in range(count) if j % side)
    upper = ((j - side, j) for j in range(side, count))
    return _topology(agents, [*upper, *left])


def random(agents: Sequence[Agent], *, seed: int = 0, share: float = 0.5) -> Topology:
    """Let every agent read each one before it with probability `share`; the same for the same seed."""
    _require("share", share, 0 <= share <= 1, "must be in [0, 1]")
    rng = Random(seed)
    return _topology(agents, [(i, j) for j in range(len(agents) - 1) for i in range(j) if rng.random() < share])


def debate(agents: Sequence[Agent], *, turns: int = 2) -> Topology:
    """Let all but the last answer every turn and read the others' answers of the turn before; the last reads all."""
    _require("turns", turns, turns >= 1, "must be at least 1")
    *ids, judge = (AgentId(agent.id) for agent in _at_least_one(agents))
    reads = {listener: tuple(AnswerSource(speaker, 1) for speaker in ids if speaker != listener) for listener in ids}
    return Topology({**reads, judge: tuple(map(AnswerSource, ids))}, turns)


TOPOLOGIES: dict[str, Callable[..., Topology]] = {
    topology.__name__: topology for topology in (fully_connected, chain, star, layered, mesh, random, debate)
}


def _topology(agents: Sequence[Agent], edges: Iterable[tuple[int, int]]) -> Topology:
    """Return the topology of (speaker, listener) pairs of positions, without the deciding agent, which is last."""
    ids = [AgentId(agent.id) for agent in _at_least_one(agents)]
    pairs = list(edges)
    unread = set(range(len(ids) - 1)) - {speaker for speaker, _ in pairs}
    pairs += [(speaker, len(ids) - 1) for speaker in sorted(unread)]
    reads: dict[AgentId, list[AnswerSource]] = {name: [] for name in ids}
    for speaker, listener in pairs:
        reads[ids[listener]].append(AnswerSource(ids[speaker]))
    return Topology({name: tuple(sources) for name, sources in reads.items()})


def _at_least_one(agents: Sequence[Agent]) -> Sequence[Agent]:
    _require("agents", agents, bool(agents), "a topology needs at least one agent")
    return agents


def _require(key: str, value: object, good: bool, why: str) -> None:
    if not good:
        raise WorkflowError(f"topology: {key}", brief(value), why)


@dataclass(frozen=True)
class Wording:
    """The text of a user message: header, then the answers that are read, then footer. All of them are templates.

    `{title}` in `speaker` and `footer` is the title of an agent.
    """

    header: str = "Question: {user_question}"
    intro: str = "\n\nThe other agents say:"
    """Before the answers, where there are any."""
    speaker: str = "\n\n{title}:\n"
    """Before each answer."""
    tool: str = "\nThe tool answers:\n"
    """Between an answer and the result of its tool."""
    footer: str = "\n\nNow answer as {title}."


def presented(agent: str, title: str, wording: Wording, turns_back: int = 0, *, has_tool: bool) -> str:
    """Return how a prompt presents the answer of an agent, and the result of its tool if it has one."""
    answer, result = (
        f"{{{Placeholder(kind, agent, turns_back).name}}}" for kind in (ValueKind.AGENT, ValueKind.CONDITION)
    )
    text = _titled(wording.speaker, title or agent) + answer
    return text + wording.tool + result if has_tool else text


def _titled(text: str, title: str) -> str:
    return text.replace("{title}", escape(title))


def _require_room(agents: Sequence[Agent], topology: Topology, wording: Wording) -> None:
    """Raise `WorkflowError` where user messages would be too long together: a few lines may ask for gigabytes."""
    title = max((len(agent.title or agent.id) for agent in agents), default=0)
    sizes = {key: len(text) + text.count("{title}") * title for key, text in vars(wording).items()}
    reads = sum(map(len, topology.reads.values())) * (sizes["speaker"] + sizes["tool"])
    written = reads + len(agents) * (sizes["header"] + sizes["intro"] + sizes["footer"])
    _require("agents", len(agents), written <= MAX_WRITTEN, f"their user messages exceed {MAX_WRITTEN} characters")


def connect(
    name: str,
    agents: Sequence[Agent],
    topology: Topology,
    wording: Wording | None = None,
    inputs: tuple[str, ...] = ("user_question",),
) -> Workflow:
    """Make a workflow of these agents, whose `user` templates are written anew from the topology and the wording."""
    wording = wording or Wording()
    _require_room(agents, topology, wording)
    by_id = {agent.id: agent for agent in agents}
    written = []
    for agent in agents:
        reads = [(by_id[source], turns_back) for source, turns_back in topology.reads[AgentId(agent.id)]]
        answers = [presented(one.id, one.title, wording, back, has_tool=bool(one.tool)) for one, back in reads]
        middle = [wording.intro, *answers] if answers else []
        user = "".join([wording.header, *middle, _titled(wording.footer, agent.title or agent.id)])
        written.append(replace(agent, user=user))
    return Workflow(name, tuple(written), inputs, topology.turns)
