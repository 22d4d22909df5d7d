"""One run of a workflow as a client follows it, told to a server in the fields of the `kedge` hint."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kedge.integrations.edges import START
from kedge.types import AgentId, Namespace, RunId, TenantId
from kedge.workflow.forecast import ForecastBoard, RunKey, RunProgress
from kedge.workflow.step_graph import RunState, StepGraph


class Follower:
    """What runs in one run, and the hints that follow from it. Any thread may call it.

    Without a graph nothing is forecast: the hints say only whose call it is.
    """

    def __init__(self, workflow: str, graph: StepGraph | None = None, run: str = "", client: str = "") -> None:
        """`run`: its id; default: one that nobody else has. `client`: whose it is, where two may use the same ids."""
        self._may_go_on = bool(run)
        self._head = {"workflow": workflow, "run": run or uuid.uuid4().hex, **_if_said(client=client)}
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._progress = None if graph is None else _Progress(graph)
        self._seq = 0

    @property
    def run(self) -> str:
        """The id of the run."""
        return self._head["run"]

    def started(self, agent: str) -> None:
        """`agent` runs, once more where it ran already."""
        with self._lock:
            self._running[agent] += 1
            if self._progress is not None and self._running[agent] == 1:
                self._progress.started(agent)

    def finished(self, agent: str) -> None:
        """`agent` is done, unless it runs more than once."""
        with self._lock:
            self._running[agent] -= 1
            if self._progress is not None and not self._running[agent]:
                self._progress.finished(agent)

    @contextmanager
    def calling(self, agent: str) -> Iterator[dict[str, Any]]:
        """While it lasts, `agent` runs; gives the hints for its call. An empty name: nobody knows who calls."""
        if not agent:
            yield self.hints()
            return
        self.started(agent)
        try:
            yield self.hints(agent)
        finally:
            self.finished(agent)

    def hints(self, agent: str = "") -> dict[str, Any]:
        """The `kedge` field: who calls, if anyone, and the forecast as it is now."""
        with self._lock:
            forecast = {} if self._progress is None else self._forecast(self._progress.steps)
        return {**self._head, **_if_said(agent=agent), **forecast}

    def over(self) -> dict[str, Any] | None:
        """The `kedge` field at the end of the run; None where there is nothing to say.

        A run whose id was given may go on later: for now, nothing is expected of it. Any other is forgotten.
        """
        if not self._may_go_on:
            return {**self._head, "final": True}
        with self._lock:
            return None if self._progress is None else {**self._head, **self._forecast({})}

    def _forecast(self, steps: dict[str, float | None]) -> dict[str, Any]:
        """`seq` grows, also over the processes that serve the same run one after the other."""
        self._seq = max(self._seq + 1, time.time_ns())
        return {"seq": self._seq, "steps": steps}


class _Progress:
    """A run's progress with its forecast, without a clock: it is as good as what the client sees."""

    def __init__(self, graph: StepGraph) -> None:
        self._board = ForecastBoard(ttl=math.inf)
        self._key = RunKey(Namespace(TenantId("")), "", RunId(""))
        self._run = RunProgress(graph, self._key, self._board)
        self._run.state = RunState(done=frozenset(node for node in graph.ids if node == START))
        self._run.begin(0.0)

    def started(self, agent: str) -> None:
        self._run.started(AgentId(agent), 0.0)

    def finished(self, agent: str) -> None:
        self._run.finished(AgentId(agent), 0.0)

    @property
    def steps(self) -> dict[str, float | None]:
        """Agent -> its steps-to-execution, None where it is never reached."""
        forecast = self._board.forecast(self._key)
        next_runs = {} if forecast is None else forecast.next_runs
        return {
            agent: one.steps if math.isfinite(one.steps) else None for agent, one in next_runs.items() if agent != START
        }


def _if_said(**fields: str) -> dict[str, str]:
    return {name: value for name, value in fields.items() if value}
