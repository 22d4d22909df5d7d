"""Answers in pairs, by dense prefill and by a method, with their summary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from kedge.bench.lab.fidelity import Fidelity, Layers, consistency
from kedge.runner.run import AgentResult
from kedge.types import AgentId, Receipt

Choice = tuple[str | None, str | None]
"""Decisions of the last agent, by dense prefill and by the method; None is no decision."""


@dataclass(frozen=True)
class AnswerPair:
    """One agent's answer to one question: by dense prefill, and by a method in a team that uses it throughout."""

    question: int
    agent: AgentId
    dense: AgentResult
    other: AgentResult
    dense_right: bool | None
    """None for agents without a scored answer."""
    right: bool | None
    flipped: bool = False
    """Whether the first decision differs: the function that is called, or prose."""


@dataclass(frozen=True)
class ForcedPair:
    """One agent's request, forced to the answer of dense prefill and compared with dense prefill."""

    question: int
    agent: AgentId
    receipt: Receipt
    """The method's."""
    fidelity: Fidelity


@dataclass
class MethodRuns:
    """One method's results over all questions that count."""

    answers: list[AnswerPair] = field(default_factory=list)
    forced: list[ForcedPair] = field(default_factory=list)
    finals: list[Choice] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    """Choices of the last agent from shuffled candidates."""
    ttfts: list[float] = field(default_factory=list)
    """Milliseconds of every call in closed loop, where times compare."""
    teams: list[float] = field(default_factory=list)
    """Seconds of every team in closed loop, until its engine was idle again, where times compare."""

    def add(self, more: MethodRuns) -> None:
        """Append the results of further questions."""
        self.answers += more.answers
        self.forced += more.forced
        self.finals += more.finals
        self.choices += more.choices
        self.ttfts += more.ttfts
        self.teams += more.teams

    def summary(self) -> Summary:
        """Return the means over all questions."""
        return Summary.of(self)


@dataclass(frozen=True)
class Summary:
    """Means over all questions; None where nothing of the kind was measured."""

    questions: int
    accuracy_dense: float | None
    """The last agent's."""
    accuracy: float | None
    agents_dense: dict[str, float | None]
    agents: dict[str, float | None]
    same_final_answer: float | None
    flips: float | None
    """Share of calls whose first decision (the function that the answer calls, or prose) differs from that of dense
    prefill."""
    reuse_rate: float | None
    """Share of calls that translated (the paper's definition)."""
    reused_tokens: float | None
    """Share of prompt tokens that were not computed."""
    forced_reuse_rate: float | None
    """Share of forced calls that translated."""
    forced_reused_tokens: float | None
    """Share of their prompt tokens that were not computed."""
    kl: float | None
    top1: float | None
    error: Layers | None
    cosine: Layers | None
    judge_consistency: float | None
    computed_tokens: float | None
    """Share of prompt tokens that ran through the model, those of base prefills not counted."""
    ttft_ms: float | None
    """Median over calls."""
    teams_per_minute: float | None
    """One team at a time: by the median time of a team, from its first request until its engine is idle again."""

    @classmethod
    def of(cls, runs: MethodRuns) -> Summary:
        """Compute the means."""
        names = list(dict.fromkeys(pair.agent for pair in runs.answers))
        of_agent = {name: [pair for pair in runs.answers if pair.agent == name] for name in names}
        dense = {str(name): _mean(pair.dense_right for pair in pairs) for name, pairs in of_agent.items()}
        other = {str(name): _mean(pair.right for pair in pairs) for name, pairs in of_agent.items()}
        receipts = [pair.other.completion.receipt for pair in runs.answers]
        seen = [pair.fidelity for pair in runs.forced]
        return cls(
            questions=len({pair.question for pair in runs.answers} | {pair.question for pair in runs.forced}),
            accuracy_dense=dense[str(names[-1])] if names else None,
            accuracy=other[str(names[-1])] if names else None,
            agents_dense=dense,
            agents=other,
            same_final_answer=consistency(runs.finals) if runs.finals else None,
            flips=_mean(pair.flipped for pair in runs.answers),
            reuse_rate=_mean(receipt.translated > 0 for receipt in receipts),
            reused_tokens=_mean(map(_reused, receipts)),
            forced_reuse_rate=_mean(pair.receipt.translated > 0 for pair in runs.forced),
            forced_reused_tokens=_mean(_reused(pair.receipt) for pair in runs.forced),
            kl=_mean(one.kl for one in seen),
            top1=_mean(one.top1 for one in seen),
            error=_layers(one.error for one in seen),
            cosine=_layers(one.cosine for one in seen),
            judge_consistency=consistency(runs.choices) if runs.choices else None,
            computed_tokens=_mean(receipt.computed / receipt.prompt_tokens for receipt in receipts),
            ttft_ms=median(runs.ttfts) if runs.ttfts else None,
            teams_per_minute=60 / median(runs.teams) if runs.teams else None,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        return asdict(self)


def _reused(receipt: Receipt) -> float:
    return 1 - receipt.computed / receipt.prompt_tokens


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _layers(items: Iterable[Layers | None]) -> Layers | None:
    known = [item for item in items if item is not None]
    return Layers.mean(known) if known else None
