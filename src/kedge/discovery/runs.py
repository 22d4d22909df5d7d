"""Runs of plain requests: which calls belong together, and who is expected next in each.

A call belongs to the run whose texts it reads, and one that reads none begins a run. What is expected next does not
need to know that: a new run takes over the *flow* of the run that was most likely to go on with this agent, as where a
client begins its next task. Forecasts are of flows.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, count, islice

from kedge.discovery.bounds import EXAMPLES, LEAST_TOKENS, MAX_AGENTS, MAX_LOOKED_AT, MAX_OF_ONE, MAX_VALUES
from kedge.structures.bounded import BoundedDict
from kedge.types import AgentId, RunId, SampleId, Segment
from kedge.workflow.steps import NextRun

UNKNOWN, LEAST_ODDS = 0.3, 0.02
"""Probability of a successor where too little is known; the least with which a run takes over from another, and with
which a call is part of a forecast"""
AT_ONCE = 0.02
"""Seconds that make no difference"""
PATIENCE = 8
"""A run is over after so many times the usual gap without a call, or `USUAL_GAP` if that is more"""


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
        self._runs: BoundedDict[RunId, FoundRun] = BoundedDict(MAX_AGENTS)
        self._idle: BoundedDict[RunId, FoundRun] = BoundedDict(MAX_LOOKED_AT)
        """Runs that another may take over from"""
        self._numbers = count(1)

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
            odds = {one.id: (self._odds(one, agent, now), -one.answered) for one in self._idle.values()}
            best = max(odds, key=odds.__getitem__, default=None)
            before = self._idle[best] if best is not None and odds[best][0] >= LEAST_ODDS else None
            name = self._name()
            if before:  # the run takes over its flow
                self._observe(before, agent, now, reads=False)
                before.is_open = False
                del self._idle[before.id]
            run = FoundRun(name, before.flow if before else name, agent)
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
        for run in list(islice(self._runs.values(), MAX_LOOKED_AT)):
            if not run.running and now - run.answered > PATIENCE * max(USUAL_GAP, self.successors.gap(run.last)):
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

    def _name(self) -> RunId:
        return RunId(f"found-{next(self._numbers)}")

    def _odds(self, run: FoundRun, agent: AgentId, now: float) -> float:
        """Return how likely a run goes on with an agent: the longer it has been idle, the less.

        Of runs that were answered at about the same time, the first goes on first: their clients were told in order.
        """
        probability, gap = self.successors.probability(run.last, agent), self.successors.gap(run.last)
        late = max(0.0, now - run.answered - gap - AT_ONCE)
        return (UNKNOWN if probability is None else probability) / (1 + late / (AT_ONCE + gap))


MEMORY = 32
"""Calls after which old ones count for a third"""
USUAL = 0.5
"""Share of an agent's calls after which texts of its run were read, from which on that is expected"""
LEAST_CALLS, LEAST_SHARE = 2.0, 0.15
"""Calls of an agent, and share of them that went on to another, from which on that is expected again"""
USUAL_GAP = 1.0
"""Seconds from an answer to the next call, until some were observed"""
END = AgentId("")
"""What follows the last agent of a run"""


@dataclass(eq=False, slots=True)
class _After:
    """What followed one agent. Weights lose a share with every call."""

    weights: dict[AgentId, float] = field(default_factory=dict)
    total: float = 0.0
    gap: float = USUAL_GAP
    """Seconds from its answer to the next call, as a moving mean"""
    likely: dict[AgentId, float] | None = None
    """What is expected to follow it, None where that has to be found out again"""
    calls: int = 0
    """Calls of which it is known whether texts of their run were read next"""
    is_read: float = 0.0
    """Share of them after which some were, as a moving mean"""


class Successors:
    """The successors of each agent with their probabilities: an online model of the step graph (KVFlow, section 3.1).

    One thread owns it.
    """

    def __init__(self) -> None:
        self._after: BoundedDict[AgentId, _After] = BoundedDict(MAX_AGENTS)

    def observe(self, before: AgentId, after: AgentId, gap: float | None = None) -> None:
        """Take note that `after` (or `END`) called next, `gap` seconds after the answer of `before`."""
        known = self._after.use(before, _After)
        keep = 1 - 1 / MEMORY
        known.weights = {agent: weight * keep for agent, weight in known.weights.items()}
        known.weights[after] = known.weights.get(after, 0.0) + 1
        if len(known.weights) > MAX_OF_ONE:
            del known.weights[min(known.weights, key=known.weights.__getitem__)]
        known.total, known.likely = sum(known.weights.values()), None
        if gap is not None:
            known.gap += (gap - known.gap) / min(known.total, MEMORY)

    def followed(self, before: AgentId, *, reads: bool) -> None:
        """Take note of whether the next call after `before` read texts of its run."""
        known = self._after.use(before, _After)
        known.calls = min(known.calls + 1, MEMORY)
        known.is_read += (reads - known.is_read) / known.calls

    def is_read(self, before: AgentId) -> bool:
        """Return whether the next call usually reads texts of the run that an agent has called in."""
        return self._of(before).is_read >= USUAL

    def probability(self, before: AgentId, after: AgentId) -> float | None:
        """Return how likely `after` calls next; None where too little is known."""
        known = self._of(before)
        return known.weights.get(after, 0.0) / known.total if known.total >= LEAST_CALLS else None

    def gap(self, before: AgentId) -> float:
        """Return the usual seconds from an agent's answer to the next call."""
        return self._of(before).gap

    def likely(self, before: AgentId) -> Mapping[AgentId, float]:
        """Return the agents that are expected to call next, with their probabilities."""
        known = self._of(before)
        if known.total < LEAST_CALLS:
            return {}
        if known.likely is None:
            least = LEAST_SHARE * known.total
            often = {agent: weight for agent, weight in known.weights.items() if weight >= least and agent != END}
            known.likely = {agent: weight / known.total for agent, weight in often.items()}
        return known.likely

    def forecast(self, last: AgentId, *, runs: bool) -> dict[AgentId, NextRun]:
        """Return the next runs of all agents that are expected after `last`, which `runs` now or has answered."""
        found = {last: NextRun(0.0)} if runs else {}
        queue = deque([(last, 1.0 if runs else 0.0, 1.0)])
        while queue:
            agent, steps, odds = queue.popleft()
            for after, share in self.likely(agent).items():
                if after not in found and odds * share >= LEAST_ODDS:
                    found[after] = NextRun(steps, odds * share)
                    queue.append((after, steps + 1, odds * share))
        return found

    def _of(self, agent: AgentId) -> _After:
        return self._after.get(agent) or _After()

    def edges(self) -> list[tuple[AgentId, AgentId, float]]:
        """Return all expected successions with their probabilities."""
        return [(agent, after, share) for agent in self._after for after, share in self.likely(agent).items()]


MOST_SHARED = 0.25
"""Share of the values of a kind that were read in several runs, up to which one tells which run it is of"""


@dataclass(eq=False, slots=True)
class _RunText:
    """An answer or another value."""

    run: RunId | None
    """The run that it is of; None where several have it"""
    readers: set[AgentId] = field(default_factory=set)
    """Agents that read it in this run; more of them tell nothing"""


@dataclass(eq=False, slots=True)
class _ValueKind:
    """Values with one label."""

    values: int = 0
    shared: int = 0
    """Those that one agent read in several runs"""


class TextsOfRuns:
    """The texts of runs by their samples: which run a call belongs to by what it reads. One thread owns it.

    An answer is of the run that gave it, unless others gave the same one. Another value, such as a question, is of the
    run that read it first, until an agent that has read it there comes with it in another run. Where that happens
    often, such as with dates, values of its kind tell nothing. `is_known` tells whether a run is still remembered.
    """

    def __init__(self, is_known: Callable[[RunId], bool]) -> None:
        self._is_known = is_known
        self._texts: BoundedDict[SampleId, _RunText] = BoundedDict(MAX_VALUES)
        self._kinds: BoundedDict[str, _ValueKind] = BoundedDict(MAX_VALUES)

    def answered(self, sample: SampleId, run: RunId, equal: SampleId | None) -> None:
        """Take note of an answer of a run. `equal` is an earlier one with the same text."""
        earlier = self._texts.get(equal) if equal else None
        is_shared = earlier is not None and earlier.run != run and self._is_live(earlier)
        self._texts[sample] = _RunText(None if is_shared else run)

    def find(self, agent: AgentId, segments: Iterable[Segment], quoted: Iterable[SampleId] = ()) -> RunId | None:
        """Return the run that an agent's call belongs to; None where nothing that it reads tells.

        The last answer in the prompt counts first, then those that are `quoted` in its values; they are looked at only
        where they are needed. Without any, all values that tell must be of one run, in which the agent has not read
        them yet: who reads the same again may be in another run.
        """
        values = [one for one in segments if one.sample]
        answers = (one.sample for one in reversed(values) if one.is_answer)
        if run := next(filter(None, map(self._run_of, chain(answers, quoted))), None):
            return run
        runs = {self._run_of(one.sample) for one in values if self._tells(agent, one)} - {None}
        return runs.pop() if len(runs) == 1 else None

    def read(self, agent: AgentId, run: RunId, segments: Iterable[Segment]) -> None:
        """Take note of what a call of a run reads."""
        for one in segments:
            if one.sample is None or one.is_answer:
                continue
            kind, known = self._kinds.use(one.sample.of, _ValueKind), self._texts.get(one.sample)
            if known is None or not self._is_live(known):
                kind.values += 1
                self._texts[one.sample] = known = _RunText(run)
            elif known.run not in (run, None) and agent in known.readers:
                kind.shared += 1
                known.run = None
            if len(known.readers) < MAX_OF_ONE:
                known.readers.add(agent)
            else:
                known.run = None

    def _run_of(self, sample: SampleId | None) -> RunId | None:
        known = self._texts.get(sample) if sample else None
        return known.run if known and known.run and self._is_known(known.run) else None

    def _is_live(self, text: _RunText) -> bool:
        """Return whether runs that are remembered have a text; of several runs, all are taken to be."""
        return text.run is None or self._is_known(text.run)

    def _tells(self, agent: AgentId, segment: Segment) -> bool:
        assert segment.sample is not None
        if segment.is_answer or len(segment.tokens) < LEAST_TOKENS:
            return False
        known, kind = self._texts.get(segment.sample), self._kinds.get(segment.sample.of)
        if known is None or kind is None or agent in known.readers:
            return False
        return kind.values >= EXAMPLES and kind.shared <= MOST_SHARED * kind.values
