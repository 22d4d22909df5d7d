"""All parts of `kedge bench guard`: faults, and clean traffic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import fmean
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
    Move,
    guard_records,
)
from kedge.bench.shapes import Loaded, load_model
from kedge.errors import ConfigError
from kedge.guard import GuardMode
from kedge.settings import EngineSettings, GuardSettings
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
        return {name: getattr(self, name) for name in ("off_after", "changed_served", "changed_unguarded", "detected")}

    def evidence(self) -> dict[str, Any]:
        """Return how much the fault changes, and for whom."""
        names = ("agent", "calls", "translated_before", "kl_before", "kl", "changed_calls", "kl_unguarded")
        given = {name: getattr(self, name) for name in names}
        return {**given, "translated_calls": self.translated, "calls_before": self.before}


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
    task, calls, translated = TASKS[settings.task], 0, 0
    questions = texts(task, settings.seed)
    flow = workflow(task)
    with GuardLane(loaded, flow, settings.engine({}, move=move)) as lane, ThreadPoolExecutor(settings.clients) as pool:
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
    _check("task", settings.task, TASKS)
    for key, names, known in (("fault", settings.faults, FAULTS), ("part", settings.parts, PARTS)):
        for name in names:
            _check(key, name, known)
    for name in settings.faults:
        if not FAULTS[name]().fits(TASKS[settings.task]):
            raise ConfigError("fault", name, f"the questions of {settings.task} are all of one kind")
    with _one_thread():
        loaded = load_model(None, EngineSettings(device=settings.device))
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
    faults, task = {}, TASKS[settings.task]
    with DenseOracle(loaded, workflow(task), settings.device) as oracle:
        for name in settings.faults or [name for name, make in FAULTS.items() if make().fits(task)]:
            progress(f"fault: {name}")
            faults[name] = measure_fault(FAULTS[name], loaded, settings, oracle)
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
