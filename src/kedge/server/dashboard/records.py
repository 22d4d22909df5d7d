"""What the dashboard remembers, record by record, and its JSON form for the page."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

from kedge.types import AgentId, Completion, Namespace, Receipt, Source, Tokens, WorkflowId

SAMPLES = 64
"""Times to first token by agent and kind; the median is of these."""


class PromptKind(StrEnum):
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


class Time(NamedTuple):
    """A time to first token, and the most requests in flight until then."""

    ttft_ms: float
    load: int


def kind_of(receipt: Receipt) -> PromptKind:
    """What a time to first token is to be compared as."""
    if 2 * (receipt.exact + receipt.translated) < receipt.prompt_tokens:
        return PromptKind.COMPUTED
    return PromptKind.TRANSLATED if receipt.translated > receipt.exact else PromptKind.EXACT


@dataclass(slots=True)
class AgentRecord:
    """What is remembered of an agent over all its runs."""

    calls: int = 0
    tokens: Counter[Source] = field(default_factory=Counter)
    times: dict[PromptKind, deque[Time]] = field(
        default_factory=lambda: {kind: deque(maxlen=SAMPLES) for kind in PromptKind},
    )
    fixed: tuple[Namespace, Tokens] | None = None
    """The namespace and the beginning that its prompts share, as of its last call."""

    def answered(self, completion: Completion, load: int) -> None:
        """Count a call; one that was answered without a token has no time to first token."""
        receipt = completion.receipt
        self.calls += 1
        self.tokens.update(by_source(receipt))
        if completion.tokens:
            self.times[kind_of(receipt)].append(Time(completion.ttft_ms, load))

    def to_dict(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "tokens": plain(self.tokens),
            "ttft_ms": {kind: _medians(times) for kind, times in self.times.items()},
            "fixed": len(self.fixed[1]) if self.fixed else None,
        }


def by_source(receipt: Receipt) -> dict[Source, int]:
    """A prompt's tokens by source."""
    return {source: receipt.tokens(source) for source in Source}


def plain(tokens: Mapping[Source, int]) -> dict[str, int]:
    """Tokens by every source there is, by name."""
    return {source.value: tokens.get(source, 0) for source in Source}


def finite(steps: float | None) -> float | None:
    """Return steps for JSON, which has no infinity: None where they are unknown."""
    return steps if steps is not None and isfinite(steps) else None


def _medians(times: deque[Time]) -> dict[str, Any]:
    """The median of some times, and of the loads that they were measured at."""
    medians = [median(values) for values in zip(*times, strict=True)] or [None, None]
    return {"median": medians[0], "load": medians[1], "count": len(times)}
