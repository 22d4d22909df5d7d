"""What the dashboard remembers, record by record, and how each is told to the page."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

from kedge.types import AgentId, Completion, Namespace, Receipt, Source, Tokens, WorkflowId
from kedge.workflow.forecast import RunKey

MOST_AGENTS_OF_A_RUN = 64
SAMPLES = 64
"""Times to first token by agent and kind; the median is of these."""


class Kind(StrEnum):
    """What most of a prompt's tokens were, for comparing times to first token."""

    COMPUTED = "computed"
    """Less than half of them were reused."""
    EXACT = "exact"
    TRANSLATED = "translated"
    """Half of them or more were reused, by translation in the main."""


class AgentState(StrEnum):
    """Where an agent is in a run."""

    EXPECTED = "expected"
    WAITING = "waiting"
    """Its request has no token yet."""
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    """Its request ended without an answer."""


class AgentName(NamedTuple):
    """An agent of a workflow, whatever the run; both are empty for a request that names none."""

    workflow: WorkflowId
    agent: AgentId


def kind_of(receipt: Receipt) -> Kind:
    """What a time to first token is to be compared as."""
    if 2 * (receipt.exact + receipt.translated) < receipt.prompt_tokens:
        return Kind.COMPUTED
    return Kind.TRANSLATED if receipt.translated > receipt.exact else Kind.EXACT


@dataclass(slots=True)
class Live:
    """A request that the engine has."""

    name: AgentName
    run: RunKey | None
    has_begun: bool = False


@dataclass(slots=True)
class AgentRecord:
    """What is remembered of an agent over all its runs."""

    calls: int = 0
    tokens: Counter[Source] = field(default_factory=Counter)
    ttft_ms: dict[Kind, deque[float]] = field(
        default_factory=lambda: {kind: deque(maxlen=SAMPLES) for kind in Kind},
    )
    fixed: tuple[Namespace, Tokens] | None = None
    """The namespace and the beginning that its prompts share, as it was last told."""

    def answered(self, completion: Completion) -> None:
        """Counts a call; one that was answered without a token has no time to first token."""
        receipt = completion.receipt
        self.calls += 1
        self.tokens.update(by_source(receipt))
        if completion.tokens:
            self.ttft_ms[kind_of(receipt)].append(completion.ttft_ms)

    def told(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "tokens": plain(self.tokens),
            "ttft_ms": {kind: _spread(samples) for kind, samples in self.ttft_ms.items()},
            "fixed": len(self.fixed[1]) if self.fixed else None,
        }


@dataclass(slots=True)
class RunRecord:
    """Where a run is; at most `MOST_AGENTS_OF_A_RUN` of its agents."""

    workflow: WorkflowId
    began: float
    has_ended: bool = False
    states: dict[AgentId, AgentState] = field(default_factory=dict)
    calls: Counter[AgentId] = field(default_factory=Counter)
    steps: dict[AgentId, float] = field(default_factory=dict)
    """Steps-to-execution; infinite where nobody can tell."""

    def put(self, agent: AgentId, state: AgentState) -> None:
        """An agent's state; a call is counted when it is done."""
        if self._has_room(agent):
            self.states[agent] = state
            self.calls[agent] += state is AgentState.DONE

    def expect(self, agent: AgentId, steps: float) -> None:
        """An agent's steps-to-execution; its state stays as it is."""
        if self._has_room(agent):
            self.states.setdefault(agent, AgentState.EXPECTED)
            self.steps[agent] = steps

    def _has_room(self, agent: AgentId) -> bool:
        return agent in self.states or len(self.states) < MOST_AGENTS_OF_A_RUN

    def end(self) -> None:
        self.has_ended = True
        self.steps.clear()

    def told(self, key: RunKey, now: float) -> dict[str, Any]:
        agents = {
            agent: {"state": state, "calls": self.calls[agent], "steps": finite(self.steps.get(agent))}
            for agent, state in self.states.items()
        }
        age = round(now - self.began, 1)
        return {"id": key.name, "workflow": self.workflow, "age_s": age, "ended": self.has_ended, "agents": agents}


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished generation."""

    number: int
    at: float
    name: AgentName
    run: RunKey | None
    receipt: Receipt
    ttft_ms: float
    total_ms: float

    def told(self, now: float) -> dict[str, Any]:
        """Without the engine's ids: their numbers would tell of other tenants."""
        return {
            "number": self.number,
            "age_s": round(now - self.at, 1),
            **self.name._asdict(),
            "run": self.run.name if self.run else "",
            "mode": self.receipt.mode,
            "kind": kind_of(self.receipt),
            "tokens": plain(by_source(self.receipt)),
            "ttft_ms": self.ttft_ms,
            "total_ms": self.total_ms,
            "misses": [{"segment": miss.segment, "reason": miss.reason} for miss in self.receipt.misses],
        }


def by_source(receipt: Receipt) -> dict[Source, int]:
    """A prompt's tokens by source."""
    return {source: receipt.tokens(source) for source in Source}


def plain(tokens: Mapping[Source, int]) -> dict[str, int]:
    """Tokens by every source there is, by name."""
    return {source.value: tokens.get(source, 0) for source in Source}


def finite(steps: float | None) -> float | None:
    """Steps as JSON has them: None where nobody can tell."""
    return steps if steps is not None and isfinite(steps) else None


def _spread(samples: deque[float]) -> dict[str, Any]:
    return {"median": median(samples) if samples else None, "count": len(samples)}
