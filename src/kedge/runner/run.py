"""Running a workflow on an engine: submit what can run, pass answers on, call tools; its events and its result."""

import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Literal

from kedge.checks import brief, is_unicode
from kedge.engine.base import Engine, Stream
from kedge.engine.common.stream import settle
from kedge.errors import EngineClosed, KedgeError, MissingInput, RequestError, ToolError, WorkflowError
from kedge.runner.prompts import Remembered, RunPrompts, compiled, fixed_prompts
from kedge.types import (
    AgentId,
    AgentKey,
    ClientId,
    Completion,
    FinishReason,
    GenerateRequest,
    Namespace,
    RequestId,
    ReuseMode,
    RunId,
    RunKey,
    SampleId,
    TenantId,
    Tokens,
    ValueKind,
)
from kedge.workflow.forecast import Changes, ForecastBoard, RunProgress
from kedge.workflow.graph import Agent, Step, Workflow
from kedge.workflow.spec import tool_name
from kedge.workflow.step_graph import StepGraph

OnToolError = Literal["raise", "text"]
"""Whether a failed tool fails the run, or its result is the name of the error's class."""


@dataclass(frozen=True, slots=True)
class AgentResult:
    """An agent's answer in one turn, and the result of its tool."""

    agent: AgentId
    turn: int
    completion: Completion
    tool_result: str | None = None

    @property
    def text(self) -> str:
        """The answer."""
        return self.completion.text


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run. `results` are in the order of `Workflow.steps`, whatever order they ran in."""

    run_id: RunId
    results: tuple[AgentResult, ...]
    total_ms: float

    @property
    def text(self) -> str:
        """The answer of the last agent in the last turn."""
        return self.results[-1].text

    def of(self, agent: str, turn: int = -1) -> AgentResult:
        """Return an agent's result in a turn, counted from the end if negative. Raises `WorkflowError` without one."""
        results = [result for result in self.results if result.agent == agent]
        if not -len(results) <= turn < len(results):
            raise WorkflowError(f"agent {agent}: turn", turn, f"it has answered {len(results)} times")
        return results[turn]


class EventKind(StrEnum):
    """What has happened in a run."""

    SUBMITTED = "submitted"
    TEXT = "text"
    ANSWERED = "answered"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that happened to one step of a run."""

    kind: EventKind
    agent: AgentId
    turn: int
    request_id: RequestId
    text: str = ""
    """TEXT: what became certain; ANSWERED: the whole answer; TOOL: the tool's result."""
    completion: Completion | None = None
    """Only with ANSWERED."""


def run(
    engine: Engine,
    workflow: Workflow,
    inputs: Mapping[str, str],
    *,
    reuse: ReuseMode | str = ReuseMode.TRANSLATE,
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
    if reuse not in [*ReuseMode]:
        raise RequestError("reuse", brief(reuse), f"must be one of {', '.join(ReuseMode)}")
    key = RunKey(Namespace(tenant), client, RunId(run_id or f"run-{uuid.uuid4().hex[:12]}"))
    try:
        return RunLoop(engine, workflow, inputs, ReuseMode(reuse), key, on_event, on_tool_error).execute()
    finally:
        engine.end_run(key)


def check_inputs(workflow: Workflow, inputs: Mapping[str, str]) -> None:
    """Raise `RequestError` for an unknown name or invalid text, `MissingInput` for an input without text."""
    for name in inputs:
        if name not in workflow.inputs:
            raise RequestError("inputs", name, f"the workflow has only {', '.join(workflow.inputs)}")
    for name in workflow.inputs:
        value = inputs.get(name)
        if not isinstance(value, str) or not value.strip():
            raise MissingInput(f"inputs.{name}", value, "a run needs a text that is not blank")
        if not is_unicode(value):
            raise RequestError(f"inputs.{name}", value, "has half of a surrogate pair")


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
    memory: dict[SampleId, Remembered] = field(default_factory=dict)
    results: dict[Step, AgentResult] = field(default_factory=dict)
    in_flight: dict[Step, RequestId] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)
    """Once it is set, no tool is called any more."""
    posted: queue.SimpleQueue[RunEvent | Future[AgentResult]] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.inputs = MappingProxyType(dict(self.inputs))
        prompts = compiled(self.workflow, self.engine.tokenizer)  # type: ignore[arg-type] # objects have a hash
        self.prompts = RunPrompts(self.key, self.workflow, prompts, (self.memory,))
        self.progress = RunProgress(StepGraph.of(self.workflow), self.key, ForecastBoard())
        for name, text in self.inputs.items():
            self._remember(SampleId(ValueKind.INPUT, name), text)

    def execute(self) -> RunResult:
        """Run all steps. Raises as `run` does."""
        started = time.perf_counter()
        with ThreadPoolExecutor(len(self.workflow.agents), "kedge-run") as pool:
            try:
                begins = fixed_prompts(self.key, self.prompts.prompts)
                self._submit_ready(pool, self.progress.begin(time.monotonic()), begins)
                while self.in_flight:
                    item = self.posted.get()
                    if isinstance(item, RunEvent):
                        self._notify(item)
                    else:
                        self._submit_ready(pool, self._take(item.result()))
            finally:
                self.stopping.set()
                with suppress(EngineClosed):  # it may be why the run ends
                    for request_id in self.in_flight.values():
                        self.engine.cancel(request_id)
                self.engine.forecast(self.progress.end(time.monotonic()))
        results = tuple(self.results[step] for step in self.workflow.steps)
        return RunResult(self.key.run_id, results, (time.perf_counter() - started) * 1e3)

    def _submit_ready(
        self, pool: ThreadPoolExecutor, changes: Changes, fixed: Mapping[AgentKey, Tokens] = MappingProxyType({})
    ) -> None:
        """Submit what can start now, after one forecast of all that changed: an engine takes a message for each."""
        begun, needs = self.results.keys() | self.in_flight.keys(), self.workflow.needs
        ready = [step for step in self.workflow.steps if step not in begun and needs[step] <= self.results.keys()]
        for step in ready:
            changes = {**changes, **self.progress.started(step.agent, time.monotonic())}
        self.engine.forecast(changes, fixed)
        for step in ready:
            stream, agent = self._submit(step), self.workflow.agent(step.agent)
            pool.submit(self._read, step, agent, stream).add_done_callback(self.posted.put)
            self._notify(RunEvent(EventKind.SUBMITTED, step.agent, step.turn, stream.request_id))
        begun |= self.in_flight.keys()
        for step in self.workflow.steps:  # the engine gets what is known of prompts that wait only for what is running
            if step not in begun and needs[step] <= begun:
                self.engine.prepare(self._request(step))

    def _submit(self, step: Step) -> Stream:
        request = self._request(step)
        try:
            stream = self.engine.submit(request)
        except KedgeError as error:
            add_place(error, step)
            raise
        self.in_flight[step] = request.request_id
        return stream

    def _request(self, step: Step) -> GenerateRequest:
        reuse = self.workflow.agent(step.agent).reuse or self.reuse
        return self.prompts.request(step, reuse, produces=step.sample() if step in self.workflow.read_answers else None)

    def _take(self, result: AgentResult) -> Changes:
        """Keep a result. Returns what it changes of the forecast."""
        step = Step(result.agent, result.turn)
        del self.in_flight[step]
        self.results[step] = result
        self._remember(step.sample(), result.text, result.completion.tokens)
        if result.tool_result is not None:
            self._remember(step.sample(ValueKind.CONDITION), result.tool_result)
        return self.progress.finished(step.agent, time.monotonic())

    def _remember(self, sample: SampleId, text: str, answer: Tokens = ()) -> None:
        self.memory[sample] = Remembered.read(sample, text, self.engine.tokenizer, answer)

    def _notify(self, event: RunEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)

    # threads of their own, one for each step --------------------------------------------------------------------

    def _read(self, step: Step, agent: Agent, stream: Stream) -> AgentResult:
        """Wait for the end of `stream` and of the agent's tool, and return both results.

        Raises the stream's error, `ToolError`, or `RequestError` for a response that was cancelled.
        """
        try:
            if self.on_event is not None:
                for delta in stream:
                    self._post(EventKind.TEXT, step, stream, delta.text)
            completion, result = stream.result(), None
            if completion.finish_reason is FinishReason.CANCELLED:
                raise RequestError(f"agent {step.agent}", completion.request_id, "its response was cancelled")
            self._post(EventKind.ANSWERED, step, stream, completion.text, completion)
            if agent.tool is not None and not self.stopping.is_set():
                result = tool_result(agent, completion.text, self.inputs, self.on_tool_error)
                self._post(EventKind.TOOL, step, stream, result)
        except KedgeError as error:
            add_place(error, step)
            raise
        return AgentResult(step.agent, step.turn, completion, result)

    def _post(self, kind: EventKind, step: Step, stream: Stream, text: str, done: Completion | None = None) -> None:
        self.posted.put(RunEvent(kind, step.agent, step.turn, stream.request_id, text, done))


def add_place(error: KedgeError, step: Step) -> None:
    """Note in an error which step it is from."""
    error.add_note(f"agent {step.agent}, turn {step.turn}")


def tool_result(agent: Agent, answer: str, inputs: Mapping[str, str], on_error: OnToolError) -> str:
    """Return the result of the agent's tool. Raises `ToolError` where it fails and `on_error` is "raise"."""
    try:
        return call_tool(agent, answer, inputs)
    except ToolError as error:
        if on_error == "raise":
            raise
        return type(error.__cause__ or error).__name__


def call_tool(agent: Agent, answer: str, inputs: Mapping[str, str]) -> str:
    """Return the result of the agent's tool. Raises `ToolError` when it raises, takes too long or returns no text.

    A thread cannot be ended from outside: a tool that runs out of time goes on in the background, unheard.
    """
    assert agent.tool is not None
    box: Future[object] = Future()
    call = partial(agent.tool, answer, inputs)
    threading.Thread(target=settle, args=(box, call), name="kedge-tool", daemon=True).start()
    key, name = f"agent {agent.id}: tool", tool_name(agent.tool)
    try:
        error = box.exception(agent.tool_seconds)
    except TimeoutError as late:
        raise ToolError(key, name, f"ran longer than {agent.tool_seconds} s") from late
    if error is not None:
        raise ToolError(key, name, f"raised {type(error).__name__}: {error}") from error
    result = box.result()
    if not isinstance(result, str):
        raise ToolError(key, name, f"answered {result!r}, not text")
    if not is_unicode(result):
        raise ToolError(key, name, "answered with half of a surrogate pair")
    return result
