"""One fault at a time: calls of its agent until the guard stops them, and the answers that it changed until then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any

from kedge.bench.guard.faults import GuardFault
from kedge.bench.guard.lane import IDLE, AnsweredCall, GuardLane
from kedge.bench.guard.oracle import DenseOracle
from kedge.bench.guard.settings import GuardBenchSettings
from kedge.bench.lab.methods import Loaded
from kedge.guard import GuardMode
from kedge.settings import GuardSettings
from kedge.types import AgentId
from kedge.workloads.miniature import TASKS, Task, workflow

QUIET = 10
"""Calls in a row that translate nothing after which an agent counts as off without the guard"""
COMPARED = 20
"""Most calls whose distributions are compared"""


@dataclass(frozen=True, slots=True)
class FaultResult:
    """What became of one fault. A call is one of the agent that it concerns."""

    agent: AgentId
    calls: int
    """After the fault, until it was off or the questions were over"""
    translated: int
    """Of these, calls that were answered with translated KV"""
    before: int
    """Calls without the fault just before it"""
    translated_before: int
    """Of these, calls that were answered with translated KV; where there are none, the fault had nothing to meet"""
    off_after: int | None
    """Calls until translation was off; 0: nothing was translated any more; None: it stayed on, or never was"""
    changed_served: int
    """Final answers until then that differ from those of dense prefill"""
    changed_unguarded: int
    """Final answers to all questions that differ with the same fault and no guard; 0: it does no harm"""
    detected: bool
    kl_before: float
    """Mean of the largest divergence from dense prefill in each translated answer without the fault, in nats"""
    kl: float
    """The same with the fault"""
    changed_calls: float
    """Share of these answers that begin differently"""
    kl_unguarded: float
    """As `kl`, without the guard"""

    def as_json(self) -> dict[str, Any]:
        """Return the figures of the fault itself."""
        return {
            "off_after": self.off_after,
            "changed_served": self.changed_served,
            "changed_unguarded": self.changed_unguarded,
            "detected": self.detected,
        }

    def evidence(self) -> dict[str, Any]:
        """Return how much the fault changes, and for whom."""
        return {
            "agent": self.agent,
            "calls": self.calls,
            "translated_calls": self.translated,
            "calls_before": self.before,
            "translated_before": self.translated_before,
            "kl_before": self.kl_before,
            "kl": self.kl,
            "changed_calls": self.changed_calls,
            "kl_unguarded": self.kl_unguarded,
        }


@dataclass(frozen=True, slots=True)
class _Served:
    """A question after the fault, with the last agent's answer and the calls of the agent."""

    question: str
    text: str
    calls: tuple[AnsweredCall, ...]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What one engine served with a fault. `before` are the agent's calls without it."""

    agent: AgentId
    before: tuple[AnsweredCall, ...]
    served: Sequence[_Served]
    is_off: bool

    @property
    def calls(self) -> list[AnsweredCall]:
        """The agent's calls with the fault."""
        return [call for one in self.served for call in one.calls]


def measure_fault(
    make: Callable[[], GuardFault], loaded: Loaded, settings: GuardBenchSettings, oracle: DenseOracle
) -> FaultResult:
    """Fill the pools of an engine, inject the fault and ask until the guard has stopped it; then the same without a
    guard, for all questions.
    """
    guarded = _serve(make(), loaded, settings, GuardSettings())
    bare = _serve(make(), loaded, settings, GuardSettings(mode=GuardMode.OFF))
    return _result(guarded, bare, oracle, TASKS[settings.task])


def _serve(fault: GuardFault, loaded: Loaded, settings: GuardBenchSettings, guard: GuardSettings) -> _Outcome:
    task = TASKS[settings.task]
    clean = list(islice(texts(fault.learned(task), settings.seed), settings.learned + settings.before))
    later = islice(texts(fault.later(task), settings.seed + 1), settings.limit)
    config = settings.engine(dict(fault.anchors(settings.learned)), guard, fault.move)
    with GuardLane(loaded, workflow(task), config, fault.components()) as lane:
        fault.before(lane, clean[: settings.learned])
        lane.warm(clean[: settings.learned])
        before = [call for question in clean[settings.learned :] for call in lane.ask(question)[1]]
        lane.engine.wait_idle(IDLE)
        agent = fault.inject(lane)
        served, is_off = _ask(lane, agent, later, settings)
    return _Outcome(agent, tuple(call for call in before if call.request.agent == agent), served, is_off)


def texts(task: Task, seed: int) -> Iterator[str]:
    """Return the texts of a task's questions for tests, endless."""
    return (question.text for question in task.questions("test", seed))


def _ask(
    lane: GuardLane, agent: AgentId, questions: Iterable[str], settings: GuardBenchSettings
) -> tuple[list[_Served], bool]:
    """Ask until the guard withholds what the agent's calls would translate. Returns what was served, and whether it
    does.
    """
    served = []
    for question in questions:
        text, calls = lane.attempt(question)
        served.append(_Served(question, text, tuple(call for call in calls if call.request.agent == agent)))
        if settings.idle:
            lane.engine.wait_idle(IDLE)
        if any(record["withheld"] for record in lane.guarded(agent)):
            return served, True
    return served, False


def _result(guarded: _Outcome, bare: _Outcome, oracle: DenseOracle, task: Task) -> FaultResult:
    calls, translated_before = guarded.calls, sum(map(_is_translated, guarded.before))
    off_after = len(calls) if guarded.is_off else _stopped(calls) if translated_before else None
    kl_before, _ = _divergence(guarded.before, oracle)
    kl, changed = _divergence(calls, oracle)
    return FaultResult(
        agent=guarded.agent,
        calls=len(calls),
        translated=sum(map(_is_translated, calls)),
        before=len(guarded.before),
        translated_before=translated_before,
        off_after=off_after,
        changed_served=_changed(guarded.served, oracle, task),
        changed_unguarded=_changed(bare.served, oracle, task),
        detected=off_after is not None,
        kl_before=kl_before,
        kl=kl,
        changed_calls=changed,
        kl_unguarded=_divergence(bare.calls, oracle)[0],
    )


def _changed(served: Sequence[_Served], oracle: DenseOracle, task: Task) -> int:
    """Return how many final answers differ from those of dense prefill."""
    dense = oracle.answers([one.question for one in served])
    pairs = ((_decision(task, one.text), _decision(task, text)) for one, text in zip(served, dense, strict=True))
    return sum(ours != theirs for ours, theirs in pairs)


def _stopped(calls: Sequence[AnsweredCall]) -> int | None:
    """Return the number of calls up to the last translated one, if there has been none for long."""
    last = max((number for number, call in enumerate(calls, 1) if _is_translated(call)), default=0)
    return last if len(calls) - last >= QUIET else None


def _is_translated(call: AnsweredCall) -> bool:
    return call.completion.receipt.translated > 0


def _decision(task: Task, text: str) -> str:
    """Return the decision in an answer; one without any is all of it."""
    return task.final(text) or text


def _divergence(calls: Sequence[AnsweredCall], oracle: DenseOracle) -> tuple[float, float]:
    """Return the mean divergence of translated answers, and the share of those that begin differently."""
    seen = oracle.compare([call for call in calls if _is_translated(call)][:COMPARED])
    if not seen:
        return 0.0, 0.0
    return fmean(one.kl for one in seen), fmean(one.changed for one in seen)
