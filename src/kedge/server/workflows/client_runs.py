"""Runs that clients drive call by call, and their forecasts.

A run is forgotten when its client ends it, when no call has named it for a while, or when there are too many.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kedge.engine.base import Engine
from kedge.errors import LimitReached
from kedge.hints import ActionOutcome, Hints
from kedge.hints.without_prompt import ends_run, run_ended, took_forecast
from kedge.runner.prompts import fixed_prompts
from kedge.server.workflows.lookahead import Lookahead
from kedge.server.workflows.registry import Registered
from kedge.server.workflows.run_memory import ClientRun
from kedge.types import AgentId, GenerateRequest, Namespace, RequestId, ReuseMode, RunId, TenantId, Tokens
from kedge.workflow.forecast import AgentKey, Changes, ForecastBoard, RunKey, RunProgress
from kedge.workflow.graph import Step
from kedge.workflow.steps import NextRun

MAX_RUNS = 1024
"""Runs of a tenant."""
MAX_FORECAST_AGENTS = 16_384
"""Agents in all forecasts of a tenant that came in hints without a prompt."""
TTL = 600.0
"""Seconds without a call after which a run is over."""


class ClientRuns:
    """Runs that clients drive, and their forecasts for the engine. Belongs to the event loop."""

    def __init__(self, engine: Engine, default: ReuseMode, withdraw: Callable[[Sequence[RequestId]], None]) -> None:
        """`default` and `withdraw` are those of `Lookahead`."""
        self.board = ForecastBoard(TTL)
        self._engine = engine
        self._lookahead = Lookahead(engine, default, withdraw)
        self._runs: dict[TenantId, OrderedDict[RunKey, ClientRun]] = {}
        """By tenant, so that no tenant's runs evict another's, in the order of their last calls."""

    def touch(self, namespace: Namespace, hints: Hints, registered: Registered | None) -> ClientRun | None:
        """Return the run that `hints` name, if any, and take the forecast in them."""
        if not hints.run:
            return None
        now, runs = time.monotonic(), self._of(namespace)
        key = _key(namespace, hints)
        run = runs.setdefault(key, ClientRun(key, now))
        run.heard = now
        runs.move_to_end(key)
        self._forget_old(runs, now)
        self._take_forecast(run, hints, registered, now)
        return run

    def hint(self, namespace: Namespace, hints: Hints, registered: Registered | None) -> list[ActionOutcome]:
        """Take hints without a prompt, and return what becomes of those on a run. Raises like `require_room`."""
        self.require_room(namespace, hints)
        before = self.board.forecast(_key(namespace, hints))
        run, outcomes = self.touch(namespace, hints, registered), list[ActionOutcome]()
        if hints.steps is not None:
            is_newer = run is not None and self.board.forecast(run.key) is not before
            outcomes.append(took_forecast(hints.run, is_newer))
        if run and hints.final:
            self.end(run)
        elif run:
            self.look_ahead(run)
        return [*outcomes, run_ended()] if ends_run(hints) else outcomes

    def require_room(self, namespace: Namespace, hints: Hints) -> None:
        """Raise `LimitReached` if hints without a prompt begin a run, or bring a forecast, that exceeds the limits.

        Unlike calls with a prompt, such hints evict nothing.
        """
        if not hints.run:
            return
        now, runs, key = time.monotonic(), self._of(namespace), _key(namespace, hints)
        self._forget_old(runs, now)
        if key not in runs and len(runs) >= MAX_RUNS:
            raise _full("runs", len(runs), f"at most {MAX_RUNS} runs at once are kept", runs, now)
        named = len(hints.steps or ()) + sum(self._forecast_agents(one) for one in runs if one != key)
        if hints.steps and named > MAX_FORECAST_AGENTS:
            why = f"the forecasts of all runs have at most {MAX_FORECAST_AGENTS} agents"
            raise _full("agents", named, why, runs, now)

    def started(self, run: ClientRun, agent: AgentId) -> None:
        """Record the start of an agent's call."""
        if run.progress is not None:
            self._publish(run.progress.started(agent, time.monotonic()))
            run.called.clear()
        self.look_ahead(run)

    def finished(self, run: ClientRun, agent: AgentId) -> None:
        """Record the end of an agent's call."""
        if run.progress is not None:
            self._publish(run.progress.finished(agent, time.monotonic()))
            run.called.clear()
        self.look_ahead(run)

    def filled(
        self, run: ClientRun, registered: Registered, step: Step, request: GenerateRequest, asked: ReuseMode | None
    ) -> None:
        """Record a registered agent's call with its filled template; `asked` is the mode that the call names."""
        self._lookahead.called(run, registered, step, request, asked)

    def look_ahead(self, run: ClientRun) -> None:
        """Send the prompts of the upcoming agents to the engine."""
        if forecast := self.board.forecast(run.key):
            self._lookahead.expect(run, forecast.next_runs)

    def end(self, run: ClientRun) -> None:
        """Forget a run, in the engine too."""
        if self._of(run.key.namespace).pop(run.key, None) is not None:
            self._lookahead.end_run(run.key)
            self._publish(self.board.done(run.key, time.monotonic()))
            self._engine.end_run(run.key)

    def _of(self, namespace: Namespace) -> OrderedDict[RunKey, ClientRun]:
        return self._runs.setdefault(namespace.tenant, OrderedDict())

    def _take_forecast(self, run: ClientRun, hints: Hints, registered: Registered | None, now: float) -> None:
        if hints.steps is not None:
            run.progress = None
            known = self.board.forecast(run.key)
            seq = hints.seq if hints.seq is not None else known.seq + 1 if known else 0
            next_runs = {agent: NextRun(steps) for agent, steps in hints.steps.items()}
            self._publish(self.board.update(run.key, seq, next_runs, now))
            if self.board.forecast(run.key) is not known:
                run.called.clear()
        elif run.progress is None and registered is not None and self.board.forecast(run.key) is None:
            run.progress = RunProgress(registered.graph, run.key, self.board)
            self._publish(run.progress.begin(now), fixed_prompts(run.key, registered.prompts))

    def _publish(self, changes: Changes, begins: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        if changes:
            self._engine.forecast(changes, begins)

    def _forget_old(self, runs: OrderedDict[RunKey, ClientRun], now: float) -> None:
        while (oldest := next(iter(runs.values()), None)) and (len(runs) > MAX_RUNS or oldest.heard + TTL <= now):
            self.end(oldest)

    def _forecast_agents(self, key: RunKey) -> int:
        forecast = self.board.forecast(key)
        return len(forecast.next_runs) if forecast else 0


def _key(namespace: Namespace, hints: Hints) -> RunKey:
    return RunKey(namespace, hints.client, RunId(hints.run))


def _full(key: str, value: int, why: str, runs: Mapping[RunKey, ClientRun], now: float) -> LimitReached:
    """Return the error. There is room at the latest when the oldest run expires."""
    error = LimitReached(key, value, why)
    error.retry_after = next(iter(runs.values())).heard + TTL - now
    return error
