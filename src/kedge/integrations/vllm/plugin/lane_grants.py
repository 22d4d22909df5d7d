"""Lanes of waiting requests: who is admitted with lanes in this step, who is held back, and what is to be scheduled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from vllm.v1.request import Request

from kedge.integrations.vllm.plugin.answer_tails import AnswerTails
from kedge.integrations.vllm.plugin.base_jobs import BaseJobs
from kedge.integrations.vllm.plugin.candidates import TranslationCandidate
from kedge.reuse.holes import Holes
from kedge.reuse.lanes import LaneBudget, WaitingPrompt, grant, lane_tokens

NO_LANES = "the scheduler grants none"


class AdmittedLanes(NamedTuple):
    """The lanes of a request that was admitted in this step: all of its holes but the last."""

    request_id: str
    lanes: Holes


class LaneGrants:
    """The lanes of one scheduler's requests. Without `open`, no request gets any."""

    def __init__(self, candidates: Mapping[str, TranslationCandidate], tails: AnswerTails, bases: BaseJobs) -> None:
        """`candidates`: all requests that may be translated, by vLLM's ids. `tails` and `bases` get lanes too."""
        self._candidates, self.tails, self.bases = candidates, tails, bases
        self.max_lanes = 0
        self.base_share = 0.0
        """The share of a step's time that base prefills may take beside requests"""
        self._hold_back: Callable[[], None] = lambda: None
        self._granted: dict[str, Holes] = {}
        self._admitted: list[AdmittedLanes] = []

    def open(self, max_lanes: int, hold_back: Callable[[], None]) -> None:
        """Let requests have so many lanes each. `hold_back` ends the admissions of the step under way."""
        self.max_lanes, self._hold_back = max_lanes, hold_back

    @property
    def is_wanted(self) -> bool:
        """Whether lanes may be granted in this step: to a request, to the end of an answer or to a base prefill."""
        return self.tails.is_wanted or bool(self.bases) or self._has_gaps

    @property
    def _has_gaps(self) -> bool:
        return any(len(candidate.holes) > 1 for candidate in self._candidates.values())

    def grant_none(self) -> None:
        """Grant no lanes in this step, in which none are wanted."""
        self._granted = {}
        self.tails.take_granted()
        self.bases.take_granted()

    def grant(
        self, waiting: Iterable[Request], deferred: Collection[Request], budget: LaneBudget, demand: int
    ) -> LaneBudget:
        """Grant lanes for this step, see `kedge.reuse.lanes.grant`. Returns what they take.

        `waiting` are vLLM's requests in the order of service, of which `deferred` were not ready when last looked at.
        """
        self._granted = {}
        if self._has_gaps:
            self._granted = grant(self._prompts(waiting, deferred), budget, demand)
        rows = sum(len(holes) - 1 for holes in self._granted.values())
        return LaneBudget(sum(map(lane_tokens, self._granted.values())), rows)

    def _prompts(self, waiting: Iterable[Request], deferred: Collection[Request]) -> Iterator[WaitingPrompt]:
        for request in waiting:
            candidate = self._candidates.get(request.request_id)
            if candidate and len(candidate.holes) > 1:
                yield WaitingPrompt(request.request_id, request.num_tokens, candidate.holes, candidate.refusals)
            elif request not in deferred:
                yield WaitingPrompt(request.request_id, request.num_tokens)

    def holes_of(self, candidate: TranslationCandidate) -> Holes | None:
        """Return the holes to be computed if a request is admitted now; None where it has to wait for its lanes."""
        if len(candidate.holes) <= 1:
            return candidate.holes
        granted = self._granted.get(candidate.request.request_id)
        if granted is None:
            candidate.refusals += 1
            self._hold_back()
        return granted

    def admit(self, candidate: TranslationCandidate) -> None:
        """Take a request that is admitted with its planned holes."""
        candidate.holes = ()
        if len(candidate.planned) > 1:
            self._admitted.append(AdmittedLanes(candidate.request.request_id, candidate.planned[:-1]))

    @property
    def taken(self) -> LaneBudget:
        """What the lanes of this step take of it: of requests admitted in it, ends of answers and base prefills."""
        if not (self._admitted or self.tails.has_granted or self.bases.has_granted):
            return LaneBudget(0, 0)
        lanes = [lane for admitted in self._admitted for lane in admitted.lanes]
        parts = (LaneBudget(sum(map(len, lanes)), len(lanes)), self.tails.taken, self.bases.taken)
        return LaneBudget(*map(sum, zip(*parts, strict=True)))

    def take_admitted(self) -> list[AdmittedLanes]:
        """Return the lanes of the requests that were admitted since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted
