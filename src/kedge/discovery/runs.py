"""Runs of plain requests: which calls belong together, and who is expected next in each.

A call belongs to the run whose answers it reads. Where it reads none, it belongs to the run that is most likely to go
on with it: its last agent is often followed by this one, and has answered lately.
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
"""Idle runs, the latest ones, that a call may belong to"""
UNKNOWN, LEAST = 0.3, 0.02
"""Probability of a successor where too little is known, and the least with which a call belongs to a run"""
AT_ONCE = 0.02
"""Seconds that make no difference"""
PATIENCE, LEAST_SECONDS = 8, 5.0
"""A run is over after so many times the usual gap, and seconds, without a call"""


@dataclass(eq=False, slots=True)
class FoundRun:
    """A run, as far as it has come."""

    id: RunId
    last: AgentId
    """Who called last"""
    running: int = 1
    """Calls without an answer yet"""
    answered: float = 0.0
    """When the last answer came"""


class FoundRuns:
    """Gives calls to runs, and learns from that who calls after whom. One thread owns it; `now` is in seconds."""

    def __init__(self) -> None:
        self.successors = Successors()
        self._runs: BoundedDict[RunId, FoundRun] = BoundedDict(MAX_RUNS)
        self._count = 0

    def __len__(self) -> int:
        """Return how many runs are remembered."""
        return len(self._runs)

    def arrive(self, agent: AgentId, now: float, read_from: RunId | None = None) -> FoundRun:
        """Return the run of a call; `read_from` is the one whose answers it reads, where that is known."""
        run = self._runs.get(read_from) if read_from else self._likeliest(agent, now)
        if run is None:
            self._count += 1
            run = FoundRun(RunId(f"found-{self._count}"), agent)
        else:
            if not run.running:
                self.successors.observe(run.last, agent, now - run.answered)
            run.last, run.running = agent, run.running + 1
        self._runs[run.id] = run
        return run

    def ended(self, run: FoundRun, now: float) -> None:
        """Take the end of a call, answered or not."""
        run.running -= 1
        run.answered = now

    def over(self, now: float) -> Iterator[FoundRun]:
        """Forget the runs that nobody goes on with, and yield them. The least recently used are looked at."""
        for run in list(islice(self._runs.values(), CANDIDATES)):
            if not run.running and now - run.answered > LEAST_SECONDS + PATIENCE * self.successors.gap(run.last):
                del self._runs[run.id]
                self.successors.observe(run.last, END)
                yield run

    def forecast(self, run: FoundRun) -> Mapping[AgentId, NextRun]:
        """Return the next runs of the agents that are expected in a run."""
        return self.successors.forecast(run.last, runs=run.running > 0)

    def _likeliest(self, agent: AgentId, now: float) -> FoundRun | None:
        idle = islice((one for one in reversed(self._runs.values()) if not one.running), CANDIDATES)
        odds = {one.id: (self._odds(one, agent, now), -one.answered) for one in idle}
        best = max(odds, key=odds.__getitem__, default=None)
        return self._runs[best] if best is not None and odds[best][0] >= LEAST else None

    def _odds(self, run: FoundRun, agent: AgentId, now: float) -> float:
        """Return how likely a run goes on with an agent: the longer it has been idle, the less.

        Of runs that were answered at about the same time, the first goes on first: their clients were told in order.
        """
        probability, gap = self.successors.probability(run.last, agent), self.successors.gap(run.last)
        late = max(0.0, now - run.answered - gap - AT_ONCE)
        return (UNKNOWN if probability is None else probability) / (1 + late / (AT_ONCE + gap))
