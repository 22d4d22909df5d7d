"""One run of a workflow as its client follows it, as fields of the `kedge` hint for a server."""

import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kedge.hints.values import without_infinity
from kedge.integrations.edges import START
from kedge.types import AgentId, Namespace, RunId, RunKey, TenantId
from kedge.workflow.forecast import ForecastBoard, RunProgress
from kedge.workflow.step_graph import RunState, StepGraph


class Follower:
    """The agents that run in one run, and the hints for its calls. Thread-safe.

    Without a graph the hints name the run and the agent, and have no forecast.
    """

    def __init__(self, workflow: str, graph: StepGraph | None = None, run: str = "", client: str = "") -> None:
        """`run` is the run's id, by default a unique one. `client` tells equal ids of two applications apart."""
        self._may_continue = bool(run)
        self._head = {"workflow": workflow, "run": run or uuid.uuid4().hex, **_nonempty(client=client)}
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._seq = 0
        self._progress: RunProgress | None = None
        if graph is not None:
            self._progress = RunProgress(graph, RunKey(Namespace(TenantId("")), "", RunId("")), ForecastBoard())
            self._progress.state = RunState(done=frozenset(node for node in graph.ids if node == START))

    @property
    def run(self) -> str:
        """The id of the run."""
        return self._head["run"]

    def started(self, agent: str) -> None:
        """Note that `agent` has started, which it may do several times at once."""
        with self._lock:
            self._running[agent] += 1
            if self._progress is not None and self._running[agent] == 1:
                self._progress.started(AgentId(agent), 0.0)

    def finished(self, agent: str) -> None:
        """Note that `agent` has finished; it is done once all its starts have finished."""
        with self._lock:
            self._running[agent] -= 1
            if self._progress is not None and not self._running[agent]:
                self._progress.finished(AgentId(agent), 0.0)

    @contextmanager
    def calling(self, agent: str) -> Iterator[dict[str, Any]]:
        """Let `agent` run in a block, with the hints for its call. An empty name stands for an unknown agent."""
        if not agent:
            yield self.hints()
            return
        self.started(agent)
        try:
            yield self.hints(agent)
        finally:
            self.finished(agent)

    def hints(self, agent: str = "") -> dict[str, Any]:
        """Return the `kedge` field of a call by `agent` (empty: of no agent) with the present forecast."""
        with self._lock:
            forecast = {} if self._progress is None else self._forecast(_steps(self._progress))
        return {**self._head, **_nonempty(agent=agent), **forecast}

    def final_hints(self) -> dict[str, Any] | None:
        """Return the `kedge` field at the end of the run, None where the server needs none.

        A run whose id was given may be continued later: its forecast is emptied. Any other run is ended.
        """
        if not self._may_continue:
            return {**self._head, "final": True}
        with self._lock:
            return None if self._progress is None else {**self._head, **self._forecast({})}

    def _forecast(self, steps: dict[str, float | None]) -> dict[str, Any]:
        """Return a forecast with a number that grows, also across processes that take turns in the same run."""
        self._seq = max(self._seq + 1, time.time_ns())
        return {"seq": self._seq, "steps": steps}


def _steps(progress: RunProgress) -> dict[str, float | None]:
    """Return the steps-to-execution of every agent, None for one that is never reached."""
    known = progress.graph.next_runs(progress.state)
    return without_infinity({agent: one.steps for agent, one in known.items() if agent != START})


def _nonempty(**fields: str) -> dict[str, str]:
    return {name: value for name, value in fields.items() if value}
