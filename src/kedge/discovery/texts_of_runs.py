"""Which run a call belongs to by what it reads.

An answer is of the run that gave it, unless others gave the same one. Another value, such as a question, is of the run
that read it first, until an agent that has read it there comes with it in another run. Where that happens often, such
as with dates, values of its kind tell nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain

from kedge.structures.bounded import BoundedDict
from kedge.types import AgentId, RunId, SampleId, Segment, ValueKind

MAX_SAMPLES, MAX_KINDS, MAX_READERS = 8192, 4096, 32
"""Texts, their kinds, and agents that read one of them, that are remembered"""
LEAST_TOKENS = 8
"""Tokens of a value that may tell which run it is of"""
LEAST_VALUES, MOST_SHARED = 3, 0.25
"""Values of a kind, and share of them that were read in several runs, with which one tells which run it is of"""


@dataclass(eq=False, slots=True)
class _RunText:
    """An answer or another value."""

    run: RunId | None
    """The run that it is of; None where several have it"""
    readers: set[AgentId] = field(default_factory=set)
    """Agents that read it in this run"""


@dataclass(eq=False, slots=True)
class _ValueKind:
    """Values with one label."""

    values: int = 0
    shared: int = 0
    """Those that one agent read in several runs"""

    @property
    def tells(self) -> bool:
        return self.values >= LEAST_VALUES and self.shared <= MOST_SHARED * self.values


class TextsOfRuns:
    """The texts of runs by their samples. One thread owns it. `is_known` tells whether a run is still remembered."""

    def __init__(self, is_known: Callable[[RunId], bool]) -> None:
        self._is_known = is_known
        self._texts: BoundedDict[SampleId, _RunText] = BoundedDict(MAX_SAMPLES)
        self._kinds: BoundedDict[str, _ValueKind] = BoundedDict(MAX_KINDS)

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
        answers = (one.sample for one in reversed(values) if _is_answer(one))
        if run := next(filter(None, map(self._run_of, chain(answers, quoted))), None):
            return run
        runs = {self._run_of(one.sample) for one in values if self._tells(agent, one)} - {None}
        return runs.pop() if len(runs) == 1 else None

    def read(self, agent: AgentId, run: RunId, segments: Iterable[Segment]) -> None:
        """Take note of what a call of a run reads."""
        for one in segments:
            if one.sample and not _is_answer(one):
                self._read(agent, run, one.sample)

    def _read(self, agent: AgentId, run: RunId, sample: SampleId) -> None:
        kind, known = self._kinds.use(sample.of, _ValueKind), self._texts.get(sample)
        if known is None or not self._is_live(known):
            kind.values += 1
            self._texts[sample] = known = _RunText(run)
        elif known.run not in (run, None) and agent in known.readers:
            kind.shared += 1
            known.run = None
        if len(known.readers) < MAX_READERS:
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
        if _is_answer(segment) or len(segment.tokens) < LEAST_TOKENS:
            return False
        known, kind = self._texts.get(segment.sample), self._kinds.get(segment.sample.of)
        return known is not None and kind is not None and kind.tells and agent not in known.readers


def _is_answer(segment: Segment) -> bool:
    return segment.sample is not None and segment.sample.kind is ValueKind.AGENT
