"""All parts of `kedge bench guard`: faults, and clean traffic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.guard.faults import (
    DEFAULT_MOVE,
    FAULTS,
    IDLE,
    LEARNED_MOVE,
    PARTS,
    AnsweredCall,
    DenseOracle,
    GuardBenchSettings,
    GuardFault,
    GuardLane,
    GuardTask,
    Move,
    guard_records,
    guard_task,
)
from kedge.bench.shapes import Loaded, load_model, to_compare
from kedge.errors import ConfigError
from kedge.reuse.guard.fidelity import FAR
from kedge.types import AgentId

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
    detected: bool
    kl_before: float
    """Mean divergence of translated answers from dense prefill without the fault, in nats a token"""
    kl: float
    """The same with the fault: little where it does no harm"""
    far: float
    """Share of these answers that count as changed"""

    def as_json(self) -> dict[str, Any]:
        """Return the figures of the fault itself: `lived` are the calls that it was served in."""
        return {
            "off_after": self.off_after,
            "lived": self.translated,
            "changed_served": self.changed_served,
            "detected": self.detected,
        }

    def evidence(self) -> dict[str, Any]:
        """Return how much the fault changes, and for whom."""
        names = ("agent", "calls", "translated_before", "kl_before", "kl", "far")
        return {**{name: getattr(self, name) for name in names}, "calls_before": self.before}


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


class Proofs(AbstractContextManager["Proofs"]):
    """What engines learn and prove before faults, kept so that each way of moving values is proved but once."""

    def __init__(self, settings: GuardBenchSettings) -> None:
        self._settings, self._folder = settings, TemporaryDirectory(prefix="kedge-guard-")
        self._known = set[Move]()

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def prepare(self, fault: GuardFault, lane: GuardLane, task: GuardTask) -> None:
        """Fill the pools of an engine and ask until its last agent is translated; or take what is known."""
        move = lane.engine.config.planner.move
        folder = Path(self._folder.name) / move
        if fault.learns_alike and move in self._known:
            lane.engine.load(folder)
            return
        questions = fault.learned(task).texts(self._settings.seed)
        learned = list(islice(questions, self._settings.learned))
        fault.before(lane, learned)
        lane.warm(learned)
        lane.prove(islice(questions, self._settings.limit))
        if fault.learns_alike:
            lane.engine.save(folder)
            self._known.add(move)


def measure_fault(
    fault: GuardFault, loaded: Loaded, settings: GuardBenchSettings, oracle: DenseOracle, proofs: Proofs
) -> FaultResult:
    """Let an engine prove how it translates, inject the fault and ask until the guard has stopped it."""
    task = guard_task(settings.task)
    clean, later = (one.texts(settings.seed + 1) for one in (fault.learned(task), fault.later(task)))
    config = settings.engine(move=fault.move)
    with GuardLane(loaded, task.flow, config, fault.components()) as lane:
        proofs.prepare(fault, lane, task)
        before = list[AnsweredCall]()
        for question in islice(clean, settings.before):
            before += lane.ask(question)[1]
            lane.engine.wait_idle(IDLE)
        agent = fault.inject(lane)
        asked = islice(later, settings.before, settings.before + settings.limit)
        served, is_off = _ask(lane, agent, asked, settings)
    return _result(
        _Outcome(agent, tuple(call for call in before if call.request.agent == agent), served, is_off), oracle, task
    )


def _ask(
    lane: GuardLane, agent: AgentId, questions: Iterable[str], settings: GuardBenchSettings
) -> tuple[list[_Served], bool]:
    """Ask until the guard has stopped the agent's translation. Returns what was served, and whether it has."""
    served = []
    for question in questions:
        text, calls = lane.attempt(question)
        served.append(_Served(question, text, tuple(call for call in calls if call.request.agent == agent)))
        if settings.idle:
            lane.engine.wait_idle(IDLE)
        if lane.stopped(agent):
            return served, True
    return served, False


def _result(outcome: _Outcome, oracle: DenseOracle, task: GuardTask) -> FaultResult:
    calls, translated_before = outcome.calls, sum(map(_is_translated, outcome.before))
    off_after = (len(calls) if outcome.is_off else _stopped(calls)) if translated_before else None
    seen = _divergences(calls, oracle)
    return FaultResult(
        agent=outcome.agent,
        calls=len(calls),
        translated=sum(map(_is_translated, calls)),
        before=len(outcome.before),
        translated_before=translated_before,
        off_after=off_after,
        changed_served=_changed(outcome.served, oracle, task),
        detected=off_after is not None,
        kl_before=fmean(_divergences(outcome.before, oracle) or [0.0]),
        kl=fmean(seen or [0.0]),
        far=fmean([one > FAR for one in seen] or [0.0]),
    )


def _changed(served: Sequence[_Served], oracle: DenseOracle, task: GuardTask) -> int:
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


def _decision(task: GuardTask, text: str) -> str:
    """Return the decision in an answer; one without any is all of it."""
    return task.final(text) or text


def _divergences(calls: Sequence[AnsweredCall], oracle: DenseOracle) -> list[float]:
    """Return the mean divergences of translated answers."""
    return oracle.compare([call for call in calls if _is_translated(call)][:COMPARED])


ROUND = 20
"""Questions between two looks at the guard"""


@dataclass(frozen=True, slots=True)
class CleanResult:
    """The guard's record of traffic without a fault."""

    calls: int
    translated: int
    """Of these, calls that were answered with translated KV"""
    checks: int
    false_alarms: int
    """Times that an agent became suspect"""
    ever_off: bool
    """Whether an agent was switched off on evidence: too many changed answers"""


def measure_clean(
    loaded: Loaded, settings: GuardBenchSettings, move: Move, progress: Callable[[str], None] = lambda _: None
) -> CleanResult:
    """Ask a team of clients until there have been `settings.calls` calls."""
    task, calls, translated = guard_task(settings.task), 0, 0
    questions, flow = task.texts(settings.seed), task.flow
    with GuardLane(loaded, flow, settings.engine(move=move)) as lane, ThreadPoolExecutor(settings.clients) as pool:
        while calls < settings.calls:
            wanted = min(ROUND, -(-(settings.calls - calls) // len(flow.agents)))
            for _, answered in pool.map(lane.ask, list(islice(questions, wanted))):
                calls += len(answered)
                translated += sum(call.completion.receipt.translated > 0 for call in answered)
            progress(f"clean, move {move}: {calls} of {settings.calls} calls")
        figures: Any = lane.engine.inspect()["guard"]
        records = guard_records(lane.engine)
    suspicions, breaches = (_by_agent(records, name) for name in ("suspicions", "breaches"))
    return CleanResult(calls, translated, figures["checks_done"], suspicions, breaches > 0)


def _by_agent(records: list[dict[str, Any]], name: str) -> int:
    """Return a count summed over agents: one alarm concerns several placeholders of an agent at once."""
    most: dict[str, int] = {}
    for record in records:
        most[record["agent"]] = max(most.get(record["agent"], 0), record[name])
    return sum(most.values())


Progress = Callable[[str], None]


def measure(settings: GuardBenchSettings, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Measure the chosen parts, one after the other, on one model; return the figures as written to a file of results,
    with how much each fault changes: one that changes nothing is none. Raises `ConfigError` for an unknown name.
    """
    task = guard_task(settings.task)
    for key, names, known in (("fault", settings.faults, FAULTS), ("part", settings.parts, PARTS)):
        for name in names:
            _check(key, name, known)
    for name in settings.faults:
        if not FAULTS[name]().fits(task):
            raise ConfigError("fault", name, f"{settings.task} cannot have it: its questions, or its model's size")
    with _one_thread():
        loaded = load_model(settings.model, to_compare(device=settings.device))
        found: dict[str, Any] = {"evidence": {}}
        if "faults" in settings.parts:
            faults = _faults(loaded, settings, progress)
            found["faults"] = {name: one.as_json() for name, one in faults.items()}
            found["evidence"] = {name: one.evidence() for name, one in faults.items()}
        for name, move in (("clean", LEARNED_MOVE), ("clean_default", DEFAULT_MOVE)):
            if name in settings.parts:
                found[name] = asdict(measure_clean(loaded, settings, move, progress))
        return found


def _faults(loaded: Loaded, settings: GuardBenchSettings, progress: Progress) -> dict[str, FaultResult]:
    faults, task = {}, guard_task(settings.task)
    names = [name for name, make in FAULTS.items() if make().fits(task)]
    if settings.model is not None:  # its engine moves values in one way
        names = [name for name in names if name == (bare := name.removeprefix("default_")) or bare not in FAULTS]
    with DenseOracle(loaded, task.flow, settings.device) as oracle, Proofs(settings) as proofs:
        for name in settings.faults or names:
            progress(f"fault: {name}")
            faults[name] = measure_fault(FAULTS[name](), loaded, settings, oracle, proofs)
    return faults


def _check(key: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(key, name, f"must be one of {', '.join(known)}")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run the model on one thread: it is too small for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
