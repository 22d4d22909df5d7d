"""Running a workflow on an engine: submit what can run, pass answers on, call tools."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from kedge.checks import is_unicode
from kedge.engine.base import Engine, Stream
from kedge.errors import KedgeError, MissingInput, RequestError
from kedge.runner.answers import AnswerReader, add_place
from kedge.runner.memory import RunMemory
from kedge.runner.prompts import RunPrompts, compiled, fixed_prompts
from kedge.runner.results import AgentResult, EventKind, RunEvent, RunResult
from kedge.runner.tools import OnToolError
from kedge.types import ClientId, GenerateRequest, Namespace, RequestId, ReuseMode, RunId, SampleId, TenantId, ValueKind
from kedge.workflow.forecast import ForecastBoard, RunKey, RunProgress
from kedge.workflow.graph import Step, Workflow
from kedge.workflow.step_graph import StepGraph
from kedge.workflow.template import Value


def run(
    engine: Engine,
    workflow: Workflow,
    inputs: Mapping[str, str],
    *,
    reuse: ReuseMode = ReuseMode.TRANSLATE,
    run_id: str | None = None,
    tenant: TenantId = TenantId("default"),  # noqa: B008 (a plain str)
    client: ClientId = ClientId(""),  # noqa: B008
    on_event: Callable[[RunEvent], None] | None = None,
    on_tool_error: OnToolError = "raise",
) -> RunResult:
    """Run all agents of `workflow`, and keep the engine informed of who runs next.

    Agents whose predecessors are done are submitted together. `run_id` must be unique among the tenant's runs that are
    going on (default: a new one). `on_event` is called in the thread that called `run`. A tool that fails or runs out
    of time fails the run, or with `on_tool_error="text"` its result is the name of the error's class.

    Raises `MissingInput` and `RequestError` for inputs, `ToolError`, `RequestError` for a response that was cancelled,
    and the error of any request that failed, with a note that names agent and turn. What else was running is
    cancelled then. Whatever happens, the engine goes on and forgets what the run shared.
    """
    check_inputs(workflow, inputs)
    key = RunKey(Namespace(tenant), client, RunId(run_id or f"run-{uuid.uuid4().hex[:12]}"))
    try:
        return RunLoop(engine, workflow, inputs, reuse, key, on_event, on_tool_error).execute()
    finally:
        engine.end_run(key)


def check_inputs(workflow: Workflow, inputs: Mapping[str, str]) -> None:
    """Raise `MissingInput` for an input without text, `RequestError` for invalid text or an unknown name."""
    for name in workflow.inputs:
        value = inputs.get(name)
        if not isinstance(value, str) or not value.strip():
            raise MissingInput(f"inputs.{name}", value, "a run needs a text that is not blank")
        if not is_unicode(value):
            raise RequestError(f"inputs.{name}", value, "has half of a surrogate pair")
    for name in inputs:
        if name not in workflow.inputs:
            raise RequestError("inputs", name, f"the workflow has only {', '.join(workflow.inputs)}")


@lru_cache(maxsize=16)
def step_graph(workflow: Workflow) -> StepGraph:
    """Return the step graph of a workflow, once for all its runs."""
    return StepGraph.of(workflow)


@dataclass(eq=False)
class RunLoop:
    """One run. The calling thread owns all state; a worker thread per request in flight posts to its queue."""

    engine: Engine
    workflow: Workflow
    inputs: Mapping[str, str]
    reuse: ReuseMode
    key: RunKey
    on_event: Callable[[RunEvent], None] | None
    on_tool_error: OnToolError
    memory: RunMemory = field(default_factory=RunMemory)
    results: dict[Step, AgentResult] = field(default_factory=dict)
    in_flight: dict[Step, RequestId] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)
    posted: queue.SimpleQueue[RunEvent | Future[AgentResult]] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        inputs = MappingProxyType(dict(self.inputs))
        prompts = compiled(self.workflow, self.engine.tokenizer)  # type: ignore[arg-type] # objects have a hash
        self.prompts = RunPrompts(self.key, self.workflow, prompts, (self.memory,))
        self.progress = RunProgress(step_graph(self.workflow), self.key, ForecastBoard())
        self.read = self.workflow.read_answers
        streams_text = self.on_event is not None
        self.reader = AnswerReader(inputs, self.on_tool_error, self.posted.put, streams_text, self.stopping)
        for name, text in inputs.items():
            self._remember(SampleId(ValueKind.INPUT, name), text)

    def execute(self) -> RunResult:
        """Run all steps. Raises as `run` does."""
        started = time.perf_counter()
        with ThreadPoolExecutor(len(self.workflow.agents), "kedge-run") as pool:
            try:
                begins = fixed_prompts(self.key, self.prompts.prompts)
                self.engine.forecast(self.progress.begin(time.monotonic()), begins)
                self._submit_ready(pool)
                while self.in_flight:
                    self._handle(self.posted.get(), pool)
            finally:
                self._stop()
                self.engine.forecast(self.progress.end(time.monotonic()))
        results = tuple(self.results[step] for step in self.workflow.steps)
        return RunResult(self.key.run_id, results, (time.perf_counter() - started) * 1e3)

    def _stop(self) -> None:
        self.stopping.set()
        for request_id in self.in_flight.values():
            self.engine.cancel(request_id)

    def _submit_ready(self, pool: ThreadPoolExecutor) -> None:
        for step in self.workflow.steps:
            if step not in self.results and step not in self.in_flight and self._is_ready(step):
                stream, agent = self._submit(step), self.workflow.agent(step.agent)
                pool.submit(self.reader.read, step, agent, stream).add_done_callback(self.posted.put)
                self._notify(RunEvent(EventKind.SUBMITTED, step.agent, step.turn, stream.request_id))
        self._prepare_next()

    def _prepare_next(self) -> None:
        """Give the engine the prompts, as far as they are known, of steps that wait only for what is running."""
        begun = self.results.keys() | self.in_flight.keys()
        for step in self.workflow.steps:
            if step not in begun and self.workflow.needs(step) <= begun:
                self.engine.prepare(self._request(step))

    def _is_ready(self, step: Step) -> bool:
        return self.workflow.needs(step) <= self.results.keys()

    def _submit(self, step: Step) -> Stream:
        """Submit a step's request, after the forecast, which an engine may pass on with it."""
        request = self._request(step)
        self.engine.forecast(self.progress.started(step.agent, time.monotonic()))
        try:
            stream = self.engine.submit(request)
        except KedgeError as error:
            add_place(error, step)
            raise
        self.in_flight[step] = request.request_id
        return stream

    def _request(self, step: Step) -> GenerateRequest:
        reuse = self.workflow.agent(step.agent).reuse or self.reuse
        return self.prompts.request(step, reuse, produces=step.sample() if step in self.read else None)

    def _handle(self, item: RunEvent | Future[AgentResult], pool: ThreadPoolExecutor) -> None:
        if isinstance(item, RunEvent):
            self._notify(item)
        else:
            self._take(item.result())
            self._submit_ready(pool)

    def _take(self, result: AgentResult) -> None:
        step = Step(result.agent, result.turn)
        del self.in_flight[step]
        self.results[step] = result
        self.engine.forecast(self.progress.finished(step.agent, time.monotonic()))
        self.memory.put(step.sample(), Value(result.completion.tokens, step.sample()), result.text)
        if result.tool_result is not None:
            self._remember(step.sample(ValueKind.CONDITION), result.tool_result)

    def _remember(self, sample: SampleId, text: str) -> None:
        """Remember a value that is a text and not an answer: answers are never tokenized again."""
        tokens = self.engine.tokenizer.encode(text, special=False) if text else ()
        self.memory.put(sample, Value(tokens, sample), text)

    def _notify(self, event: RunEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)
