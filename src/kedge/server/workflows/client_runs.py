"""Runs that a client drives itself, call by call: who is expected next, and for how long they are remembered.

Runs are forgotten when a client says so, when nothing was heard of them for a while, or when there are too many.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kedge.engine.base import Engine
from kedge.errors import LimitReached
from kedge.runner.prompts import fixed_prompts
from kedge.server.hints import Hints
from kedge.server.workflows.lookahead import Lookahead
from kedge.server.workflows.registry import Registered
from kedge.server.workflows.run_memory import AgentRun
from kedge.types import AgentId, GenerateRequest, Namespace, RequestId, ReuseMode, RunId, TenantId, Tokens
from kedge.workflow.forecast import AgentKey, Changes, ForecastBoard, RunKey, RunProgress
from kedge.workflow.graph import Step
from kedge.workflow.steps import NextRun

MOST_RUNS, MOST_FORECAST = 1024, 16_384
"""Runs of a tenant, and agents that the forecasts of all of them may speak of where no call of a model comes along."""
TTL = 600.0
"""Seconds after which a run that nobody mentions is over."""


class AgentRuns:
    """The runs that clients drive, and what they tell the engine. Only the event loop's thread touches it."""

    def __init__(self, engine: Engine, default: ReuseMode, withdraw: Callable[[Sequence[RequestId]], None]) -> None:
        """`default` and `withdraw` as `Lookahead` takes them."""
        self.board = ForecastBoard(TTL)
        self._engine = engine
        self._lookahead = Lookahead(engine, default, withdraw)
        self._runs: dict[TenantId, OrderedDict[RunKey, AgentRun]] = {}
        """By tenant, so that nobody's runs push out another's, and by the time of the last word."""

    def touch(self, namespace: Namespace, hints: Hints, registered: Registered | None) -> AgentRun | None:
        """The run that `hints` speak of, if any; a forecast in them is passed on."""
        if not hints.run:
            return None
        now, runs = time.monotonic(), self._of(namespace)
        key = _key(namespace, hints)
        run = runs.setdefault(key, AgentRun(key, now))
        run.heard = now
        runs.move_to_end(key)
        self._forget_old(runs, now)
        self._take_forecast(run, hints, registered, now)
        return run

    def require_room(self, namespace: Namespace, hints: Hints) -> None:
        """For hints without a prompt: what they begin pushes out nothing. Raises `LimitReached` for a run, or a
        forecast, that is one too many."""
        if not hints.run:
            return
        now, runs, key = time.monotonic(), self._of(namespace), _key(namespace, hints)
        self._forget_old(runs, now)
        if key not in runs and len(runs) >= MOST_RUNS:
            raise _full("runs", len(runs), f"at most {MOST_RUNS} runs at once are remembered", runs, now)
        named = len(hints.steps or ()) + sum(self._forecast_agents(one) for one in runs if one != key)
        if hints.steps and named > MOST_FORECAST:
            why = f"the forecasts of all runs speak of at most {MOST_FORECAST} agents"
            raise _full("agents", named, why, runs, now)

    def started(self, run: AgentRun, agent: AgentId) -> None:
        """An agent's call begins."""
        if run.progress is not None:
            self._tell(run.progress.started(agent, time.monotonic()))
            run.called.clear()
        self.look_ahead(run)

    def finished(self, run: AgentRun, agent: AgentId) -> None:
        """An agent's call has ended."""
        if run.progress is not None:
            self._tell(run.progress.finished(agent, time.monotonic()))
            run.called.clear()
        self.look_ahead(run)

    def filled(
        self, run: AgentRun, registered: Registered, step: Step, request: GenerateRequest, asked: ReuseMode | None
    ) -> None:
        """A registered agent's call begins, with its template filled; `asked` is the mode that it names."""
        self._lookahead.called(run, registered, step, request, asked)

    def look_ahead(self, run: AgentRun) -> None:
        """Tells the engine the prompts of those who are expected next."""
        if forecast := self.board.forecast(run.key):
            self._lookahead.expect(run, forecast.next_runs)

    def end(self, run: AgentRun) -> None:
        """Forgets a run, in the engine too."""
        if self._of(run.key.namespace).pop(run.key, None) is not None:
            self._lookahead.end_run(run.key)
            self._tell(self.board.done(run.key, time.monotonic()))
            self._engine.end_run(run.key)

    def _of(self, namespace: Namespace) -> OrderedDict[RunKey, AgentRun]:
        return self._runs.setdefault(namespace.tenant, OrderedDict())

    def _take_forecast(self, run: AgentRun, hints: Hints, registered: Registered | None, now: float) -> None:
        if hints.steps is not None:
            run.progress = None
            known = self.board.forecast(run.key)
            seq = hints.seq if hints.seq is not None else known.seq + 1 if known else 0
            next_runs = {agent: NextRun(steps) for agent, steps in hints.steps.items()}
            self._tell(self.board.update(run.key, seq, next_runs, now))
            if self.board.forecast(run.key) is not known:
                run.called.clear()
        elif run.progress is None and registered is not None and self.board.forecast(run.key) is None:
            run.progress = RunProgress(registered.graph, run.key, self.board)
            self._tell(run.progress.begin(now), fixed_prompts(run.key, registered.prompts))

    def _tell(self, changes: Changes, begins: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        if changes:
            self._engine.forecast(changes, begins)

    def _forget_old(self, runs: OrderedDict[RunKey, AgentRun], now: float) -> None:
        while (oldest := next(iter(runs.values()), None)) and (len(runs) > MOST_RUNS or oldest.heard + TTL <= now):
            self.end(oldest)

    def _forecast_agents(self, key: RunKey) -> int:
        forecast = self.board.forecast(key)
        return len(forecast.next_runs) if forecast else 0


def _key(namespace: Namespace, hints: Hints) -> RunKey:
    return RunKey(namespace, hints.client, RunId(hints.run))


def _full(key: str, value: int, why: str, runs: Mapping[RunKey, AgentRun], now: float) -> LimitReached:
    """There is room once a run has ended: at the latest when nothing was heard of the oldest for long enough."""
    error = LimitReached(key, value, why)
    error.retry_after = next(iter(runs.values())).heard + TTL - now
    return error
