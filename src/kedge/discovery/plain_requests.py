"""Plain requests of all namespaces, completed by what was found out about them, and the forecasts of found runs."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from kedge.discovery.bounds import MAX_LOOKED_AT
from kedge.discovery.discovery import Discovery, Found
from kedge.discovery.report import PlainTotals, Served, find_waste
from kedge.discovery.runs import FoundRun
from kedge.settings import DiscoveryMode, DiscoverySettings
from kedge.structures import token_bytes
from kedge.structures.bounded import BoundedDict
from kedge.types import AgentKey, GenerateRequest, Namespace, RequestId, ReuseMode, RunKey, Tokens, WorkflowId
from kedge.workflow.forecast import ForecastBoard
from kedge.workflow.steps import NextRun


@dataclass(slots=True)
class ForecastChanges:
    """What has changed since the last look."""

    next_runs: dict[AgentKey, NextRun | None] = field(default_factory=dict)
    """Agents whose next run has changed; None: it is not known any more"""
    prompts: dict[AgentKey, Tokens] = field(default_factory=dict)
    """What the prompts of newly expected agents begin with"""
    teams: dict[AgentKey, WorkflowId] = field(default_factory=dict)
    """The teams of these agents"""


class FoundForecasts:
    """Forecasts of all found runs. They expire as those of clients do, or when nobody goes on with the run."""

    def __init__(self) -> None:
        self._board, self._numbers = ForecastBoard(), count()
        self._changes = ForecastChanges()
        self._expected: set[AgentKey] = set()

    def follow(self, namespace: Namespace, discovery: Discovery, run: FoundRun, now: float) -> None:
        """Take the progress of a run, and the ends of others, at `now` in seconds."""
        key = RunKey(namespace, "", run.flow)
        changes = dict(self._board.update(key, next(self._numbers), discovery.runs.forecast(run), now))
        for over in discovery.runs.over(now):
            changes.update(self._board.done(RunKey(namespace, "", over.flow), now))
        for agent, next_run in changes.items():
            self._changes.next_runs[agent] = next_run
            if next_run is None:
                self._expected.discard(agent)
            elif agent not in self._expected and agent.namespace == namespace:
                self._expected.add(agent)
                known = discovery.agents.get(agent.agent)
                self._changes.prompts[agent] = token_bytes.unpack(known.templates[0].head) if known else ()
                self._changes.teams[agent] = known.team if known else WorkflowId("")

    def forget(self, namespace: Namespace) -> None:
        """Expect nothing more in a namespace."""
        gone = self._board.forget(namespace)
        self._changes.next_runs.update(gone)
        self._expected.difference_update(gone)

    def take(self) -> ForecastChanges | None:
        """Return what has changed since the last call; None where nothing has."""
        if not self._changes.next_runs:
            return None
        taken, self._changes = self._changes, ForecastChanges()
        return taken


logger = logging.getLogger(__name__)
MAX_NAMESPACES = 64
"""Namespaces that something is found out about; of the tenant with most, the one that asked longest ago goes first"""


class PlainRequests:
    """Looks at plain requests, and completes them as far as the settings allow. One thread owns it.

    An error in here costs a request what was found out about it, and nothing else.
    """

    def __init__(self, settings: DiscoverySettings, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing known. `clock` is in seconds."""
        self._mode, self._clock = settings.mode, clock
        self.forecasts = FoundForecasts()
        self._namespaces: BoundedDict[Namespace, Discovery] = BoundedDict(
            MAX_NAMESPACES, lambda one, _: self.forecasts.forget(one), owner=lambda one: one.tenant
        )

    def arrived(self, request: GenerateRequest) -> GenerateRequest:
        """Return a request as it is served. What its client said of it stays."""
        if not request.is_plain or self._mode is DiscoveryMode.OFF or request.reuse is ReuseMode.OFF:
            return request
        discovery, now = self._namespaces.use(request.namespace, Discovery), self._clock()
        try:
            found = discovery.arrive(request.request_id, request.tokens, now)
            if found and self._forecasts and not request.run:
                self.forecasts.follow(request.namespace, discovery, found.run, now)
        except Exception:
            logger.exception("request %s is served as it is", request.request_id)
            discovery.totals.failures += 1
            return request
        return request if found is None else self._completed(request, found)

    def ended(
        self, namespace: Namespace, request_id: RequestId, answer: Sequence[int] = (), served: Served | None = None
    ) -> None:
        """Take the answer to a request, without tokens where there is none, and where its prompt came from.

        One that was not looked at is ignored.
        """
        if discovery := self._namespaces.get(namespace):
            now = self._clock()
            run = discovery.ended(request_id, answer, now, served)
            if run is not None and self._forecasts:
                self.forecasts.follow(namespace, discovery, run, now)

    def clear(self) -> None:
        """Forget everything."""
        while self._namespaces:
            self.forecasts.forget(self._namespaces.popitem()[0])

    @property
    def totals(self) -> PlainTotals:
        """What was found out in all namespaces that are known now."""
        return sum((one.totals for one in self._namespaces.values()), PlainTotals())

    def stats(self) -> dict[str, object]:
        """Return the mode, the totals, and how many agents and runs are known now."""
        known = self._namespaces.values()
        agents, runs = sum(len(one.agents) for one in known), sum(len(one.runs) for one in known)
        return {"mode": self._mode.value, **self.totals.to_dict(), "agents": agents, "runs": runs}

    def report(self, owns: Callable[[Namespace], bool] = lambda _: True) -> dict[str, object]:
        """Return what was found in the namespaces that `owns` picks, as plain data without any text of a prompt."""
        owned = {namespace: one for namespace, one in self._namespaces.items() if owns(namespace)}
        known = owned.values()
        totals = sum((one.totals for one in known), PlainTotals())
        agents = [agent for one in known for agent in one.agents.values()]
        agents.sort(key=lambda one: one.calls, reverse=True)
        return {
            "mode": self._mode.value,
            "namespaces": [str(namespace) for namespace in owned],
            **totals.to_dict(),
            "runs": sum(len(one.runs) for one in known),
            "agents": [one.to_dict() for one in agents[:MAX_LOOKED_AT]],
            "follows": [edge for one in known for edge in one.runs.successors.edges()][:MAX_LOOKED_AT],
            "why_not": totals.why_not.most_common(),
            "findings": find_waste(agents)[:MAX_LOOKED_AT],
        }

    @property
    def _forecasts(self) -> bool:
        return self._mode in (DiscoveryMode.EXACT, DiscoveryMode.TRANSLATE)

    def _completed(self, request: GenerateRequest, found: Found) -> GenerateRequest:
        if not self._forecasts:
            return request
        named = replace(
            request,
            workflow=request.workflow or found.team,
            run=request.run or found.run.flow,
            agent=request.agent or found.agent,
            fixed=len(found.segments[0].tokens) if request.fixed is None else request.fixed,
        )
        if self._mode is DiscoveryMode.EXACT:
            return named
        produces = request.produces or found.produces
        return replace(named, segments=found.segments, reuse=ReuseMode.TRANSLATE, produces=produces)
