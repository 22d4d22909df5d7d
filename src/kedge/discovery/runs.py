"""Runs of plain requests: which calls belong together, and who is expected next in each.

A call belongs to the run whose texts it reads, and one that reads none begins a run. What is expected next does not
need to know that: a new run takes over the *flow* of the run that was most likely to go on with this agent, as where a
client begins its next task. Forecasts are of flows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from kedge.discovery.successors import END, Successors
from kedge.structures.bounded import BoundedDict
from kedge.types import AgentId, RunId
from kedge.workflow.steps import NextRun

MAX_RUNS = 1024
"""Runs that are remembered; of more, the one whose last call was longest ago is over"""
CANDIDATES = 64
"""Idle runs, the latest ones, that another may take over from"""
UNKNOWN, LEAST = 0.3, 0.02
"""Probability of a successor where too little is known, and the least with which a run takes over from another"""
AT_ONCE = 0.02
"""Seconds that make no difference"""
PATIENCE, LEAST_SECONDS = 8, 5.0
"""A run is over after so many times the usual gap, and seconds, without a call"""


@dataclass(eq=False, slots=True)
class FoundRun:
    """A run, as far as it has come."""

    id: RunId
    flow: RunId
    """What forecasts and requests name it by; runs that follow one another may have one flow"""
    last: AgentId
    """Who called last"""
    running: int = 0
    """Calls without an answer yet"""
    answered: float = 0.0
    """When the last answer came"""
    is_open: bool = True
    """Whether it has a flow of its own: no other run has taken it over"""


class FoundRuns:
    """Gives calls to runs, and learns from that who calls after whom. One thread owns it; `now` is in seconds."""

    def __init__(self) -> None:
        self.successors = Successors()
        self._runs: BoundedDict[RunId, FoundRun] = BoundedDict(MAX_RUNS)
        self._idle: BoundedDict[RunId, FoundRun] = BoundedDict(CANDIDATES)
        """Runs that another may take over from"""
        self._count = 0

    def __len__(self) -> int:
        """Return how many runs are remembered."""
        return len(self._runs)

    def __contains__(self, run: RunId) -> bool:
        """Return whether a run is remembered."""
        return run in self._runs

    def arrive(self, agent: AgentId, now: float, read_from: RunId | None = None) -> FoundRun:
        """Return the run of a call; `read_from` is the one whose texts it reads, where that is known."""
        run = self._runs.get(read_from) if read_from else None
        if run is not None:
            self._observe(run, agent, now, reads=True)
        else:
            before, name = self._likeliest(agent, now), self._name()
            run = FoundRun(name, self._taken(before, agent, now) if before else name, agent)
        run.last = agent
        return self._called(run)

    def resume(self, run_id: RunId) -> FoundRun | None:
        """Return the run with this id, in which its last agent goes on; None for one that is not remembered."""
        run = self._runs.get(run_id)
        if run is None:
            return None
        self.successors.followed(run.last, reads=True)
        return self._called(run)

    def ended(self, run: FoundRun, now: float) -> None:
        """Take the end of a call, answered or not."""
        run.running -= 1
        run.answered = now
        if not run.running and run.is_open and not self.successors.is_read(run.last):
            self._idle[run.id] = run

    def over(self, now: float) -> Iterator[FoundRun]:
        """Forget the runs that nobody goes on with, and yield those with a flow. The least recently used are looked
        at.
        """
        for run in list(islice(self._runs.values(), CANDIDATES)):
            if not run.running and now - run.answered > LEAST_SECONDS + PATIENCE * self.successors.gap(run.last):
                del self._runs[run.id]
                self._idle.pop(run.id, None)
                if run.is_open:
                    self.successors.observe(run.last, END)
                    self.successors.followed(run.last, reads=False)
                    yield run

    def forecast(self, run: FoundRun) -> Mapping[AgentId, NextRun]:
        """Return the next runs of the agents that are expected in a run."""
        return self.successors.forecast(run.last, runs=run.running > 0)

    def _observe(self, run: FoundRun, agent: AgentId, now: float, *, reads: bool) -> None:
        """Learn that an agent calls after the last one of a run, and whether it reads texts of that run."""
        self.successors.followed(run.last, reads=reads)
        if not run.running:
            self.successors.observe(run.last, agent, now - run.answered)

    def _called(self, run: FoundRun) -> FoundRun:
        if not run.is_open:
            run.flow, run.is_open = self._name(), True
        run.running += 1
        self._idle.pop(run.id, None)
        self._runs[run.id] = run
        return run

    def _taken(self, run: FoundRun, agent: AgentId, now: float) -> RunId:
        """Return the flow of a run for another one that begins with an agent's call."""
        self._observe(run, agent, now, reads=False)
        run.is_open = False
        del self._idle[run.id]
        return run.flow

    def _name(self) -> RunId:
        self._count += 1
        return RunId(f"found-{self._count}")

    def _likeliest(self, agent: AgentId, now: float) -> FoundRun | None:
        odds = {one.id: (self._odds(one, agent, now), -one.answered) for one in self._idle.values()}
        best = max(odds, key=odds.__getitem__, default=None)
        return self._idle[best] if best is not None and odds[best][0] >= LEAST else None

    def _odds(self, run: FoundRun, agent: AgentId, now: float) -> float:
        """Return how likely a run goes on with an agent: the longer it has been idle, the less.

        Of runs that were answered at about the same time, the first goes on first: their clients were told in order.
        """
        probability, gap = self.successors.probability(run.last, agent), self.successors.gap(run.last)
        late = max(0.0, now - run.answered - gap - AT_ONCE)
        return (UNKNOWN if probability is None else probability) / (1 + late / (AT_ONCE + gap))
