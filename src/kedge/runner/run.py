"""Running a workflow on an engine: submit what can run, pass answers on, call tools."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Literal

from kedge.checks import is_unicode
from kedge.engine.base import Engine, Preparing, Stream, Tokenizer
from kedge.errors import KedgeError, MissingInput, RequestError, ToolError, WorkflowError
from kedge.types import (
    AgentId,
    ClientId,
    Completion,
    FinishReason,
    GenerateRequest,
    RequestId,
    ReuseMode,
    RunId,
    SampleId,
    TenantId,
    WorkflowId,
)
from kedge.workflow.forecast import AgentKey, ForecastBoard, RunKey, RunProgress
from kedge.workflow.graph import Agent, Step, Workflow
from kedge.workflow.spec import tool_name
from kedge.workflow.step_graph import StepGraph
from kedge.workflow.template import CompiledAgent, Kind, Placeholder, Value, compile_agents


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What one agent said in one turn, and what its tool made of it."""

    agent: AgentId
    turn: int
    completion: Completion
    tool_result: str | None = None

    @property
    def text(self) -> str:
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
        """What `agent` said in a turn (negative: from the end). Raises `WorkflowError` where it did not."""
        said = [result for result in self.results if result.agent == agent]
        if not -len(said) <= turn < len(said):
            raise WorkflowError(f"agent {agent}: turn", turn, f"it spoke {len(said)} times")
        return said[turn]


class EventKind(StrEnum):
    SUBMITTED = "submitted"
    TEXT = "text"
    ANSWERED = "answered"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that happened in a run."""

    kind: EventKind
    agent: AgentId
    turn: int
    request_id: RequestId
    text: str = ""
    """TEXT: what became certain; ANSWERED: the whole answer; TOOL: the tool's result."""
    completion: Completion | None = None
    """With ANSWERED."""


OnToolError = Literal["raise", "text"]


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
    """Runs all agents of `workflow`; those whose predecessors are done are submitted together. The engine is
    told all the while who runs next.

    `run_id` must be unique among the tenant's runs that are going on (default: a new one). `on_event` is called in the
    thread that called `run`. A tool that fails or runs out of time fails the run, or with `on_tool_error="text"` its
    result is the name of the error's class.

    Raises `MissingInput` and `RequestError` for inputs, `ToolError`, `RequestError` for a response that was cancelled,
    and the error of any request that failed, with a note that names agent and turn. What else was running is
    cancelled then. Whatever happens, the engine goes on and forgets what the run shared.
    """
    check_inputs(workflow, inputs)
    key = RunId(run_id or f"run-{uuid.uuid4().hex[:12]}")
    try:
        return _Run(engine, workflow, inputs, reuse, RunKey(tenant, client, key), on_event, on_tool_error).execute()
    finally:
        engine.end_run(tenant, key)


def check_inputs(workflow: Workflow, inputs: Mapping[str, str]) -> None:
    """Raise `MissingInput` for an input without a text, `RequestError` for one that cannot be or that nobody reads."""
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
def compiled(workflow: Workflow, tokenizer: Tokenizer) -> Mapping[AgentId, CompiledAgent]:
    """The compiled prompts of a workflow, once per workflow and tokenizer."""
    return compile_agents(workflow.agents, tokenizer)


@lru_cache(maxsize=16)
def step_graph(workflow: Workflow) -> StepGraph:
    """The step graph of a workflow, once for all its runs."""
    return StepGraph.of(workflow)


@dataclass(eq=False)
class _Run:
    """One run. The calling thread owns all state; a worker thread per request in flight posts to its queue."""

    engine: Engine
    workflow: Workflow
    inputs: Mapping[str, str]
    reuse: ReuseMode
    key: RunKey
    on_event: Callable[[RunEvent], None] | None
    on_tool_error: OnToolError
    results: dict[Step, AgentResult] = field(default_factory=dict)
    values: dict[tuple[Kind, Step], Value] = field(default_factory=dict)
    in_flight: dict[Step, RequestId] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)
    posted: queue.SimpleQueue[RunEvent | Future[AgentResult]] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        encode = partial(self.engine.tokenizer.encode, special=False)
        self.inputs = MappingProxyType(dict(self.inputs))
        self.prompts = compiled(self.workflow, self.engine.tokenizer)  # type: ignore[arg-type] # objects have a hash
        self.given = {name: Value(encode(text), SampleId(f"input_{name}@0")) for name, text in self.inputs.items()}
        self.progress = RunProgress(step_graph(self.workflow), self.key, ForecastBoard())
        self.read = frozenset(
            self.workflow.source(step, placeholder)
            for step in self.workflow.steps
            for placeholder in self.prompts[step.agent].placeholders
            if placeholder.kind is Kind.AGENT
        )

    def execute(self) -> RunResult:
        started = time.perf_counter()
        with ThreadPoolExecutor(len(self.workflow.agents), "kedge-run") as pool:
            try:
                self._begin()
                self._submit_ready(pool)
                while self.in_flight:
                    self._handle(self.posted.get(), pool)
            finally:
                self._stop()
                self.engine.forecast(self.progress.end(time.monotonic()))
        results = tuple(self.results[step] for step in self.workflow.steps)
        return RunResult(self.key.run_id, results, (time.perf_counter() - started) * 1e3)

    def _begin(self) -> None:
        """Tells who runs how soon, and what every agent's prompt begins with."""
        begins = {AgentKey(*self.key, agent): prompt.prefixes[0] for agent, prompt in self.prompts.items()}
        prompts = {key: tokens for key, tokens in begins.items() if tokens}
        self.engine.forecast(self.progress.begin(time.monotonic()), prompts)

    def _stop(self) -> None:
        self.stopping.set()
        for request_id in self.in_flight.values():
            self.engine.cancel(request_id)

    def _submit_ready(self, pool: ThreadPoolExecutor) -> None:
        for step in self.workflow.steps:
            if step not in self.results and step not in self.in_flight and self._is_ready(step):
                stream = self._submit(step)
                pool.submit(self._follow, step, stream).add_done_callback(self.posted.put)
                self._tell(RunEvent(EventKind.SUBMITTED, step.agent, step.turn, stream.request_id))
        self._prepare_next()

    def _prepare_next(self) -> None:
        """Tells the prompts of those who can run as soon as what runs is done, as far as they are known."""
        if isinstance(self.engine, Preparing):
            begun = self.results.keys() | self.in_flight.keys()
            for step in self.workflow.steps:
                if step not in begun and self.workflow.needs(step) <= begun:
                    self.engine.prepare(self._request(step))

    def _is_ready(self, step: Step) -> bool:
        return self.workflow.needs(step) <= self.results.keys()

    def _submit(self, step: Step) -> Stream:
        request = self._request(step)
        try:
            stream = self.engine.submit(request)
        except KedgeError as error:
            error.add_note(_where(step))
            raise
        self.in_flight[step] = request.request_id
        self.engine.forecast(self.progress.started(step.agent, time.monotonic()))
        return stream

    def _request(self, step: Step) -> GenerateRequest:
        """A step's call. What it reads and nobody has said yet are segments without tokens."""
        agent, prompt = self.workflow.agent(step.agent), self.prompts[step.agent]
        values = {placeholder: self._value(step, placeholder) for placeholder in prompt.placeholders}
        return GenerateRequest(
            segments=prompt.fill(values, self._pending(values.values())),
            sampling=agent.sampling,
            reuse=agent.reuse or self.reuse,
            tenant=self.key.tenant,
            client=ClientId(self.key.client_id),
            workflow=WorkflowId(self.workflow.name),
            run=self.key.run_id,
            agent=step.agent,
            fixed=len(prompt.prefixes[0]),
            produces=_sample(Kind.AGENT, step) if step in self.read else None,
            trail=prompt.trail,
        )

    def _value(self, step: Step, placeholder: Placeholder) -> Value:
        if placeholder.kind is Kind.INPUT:
            return self.given[placeholder.of]
        source = self.workflow.source(step, placeholder)
        if source is None:
            return Value((), SampleId(""))
        return self.values.get((placeholder.kind, source)) or Value((), _sample(placeholder.kind, source))

    def _pending(self, values: Iterable[Value]) -> frozenset[SampleId]:
        """Those samples that are yet to come."""
        said = {value.sample for value in (*self.given.values(), *self.values.values())}
        return frozenset(value.sample for value in values if value.sample) - said

    def _handle(self, item: RunEvent | Future[AgentResult], pool: ThreadPoolExecutor) -> None:
        if isinstance(item, RunEvent):
            self._tell(item)
        else:
            self._take(item.result())
            self._submit_ready(pool)

    def _take(self, result: AgentResult) -> None:
        step = Step(result.agent, result.turn)
        del self.in_flight[step]
        self.results[step] = result
        self.engine.forecast(self.progress.finished(step.agent, time.monotonic()))
        self.values[Kind.AGENT, step] = Value(result.completion.tokens, _sample(Kind.AGENT, step))
        if result.tool_result is not None:
            result_text = result.tool_result
            tokens = self.engine.tokenizer.encode(result_text, special=False) if result_text else ()
            self.values[Kind.CONDITION, step] = Value(tokens, _sample(Kind.CONDITION, step))

    def _tell(self, event: RunEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)

    # a worker's thread ------------------------------------------------------------------------------------------

    def _follow(self, step: Step, stream: Stream) -> AgentResult:
        try:
            return self._answer(step, stream)
        except KedgeError as error:
            error.add_note(_where(step))
            raise

    def _answer(self, step: Step, stream: Stream) -> AgentResult:
        if self.on_event is not None:
            for delta in stream:
                self._post(EventKind.TEXT, step, stream, delta.text)
        completion = stream.result()
        if completion.finish_reason is FinishReason.CANCELLED:
            raise RequestError(f"agent {step.agent}", completion.request_id, "its response was cancelled")
        self._post(EventKind.ANSWERED, step, stream, completion.text, completion)
        result = self._tool_result(self.workflow.agent(step.agent), completion.text)
        if result is not None:
            self._post(EventKind.TOOL, step, stream, result)
        return AgentResult(step.agent, step.turn, completion, result)

    def _post(self, kind: EventKind, step: Step, stream: Stream, text: str, done: Completion | None = None) -> None:
        self.posted.put(RunEvent(kind, step.agent, step.turn, stream.request_id, text, done))

    def _tool_result(self, agent: Agent, answer: str) -> str | None:
        if agent.tool is None or self.stopping.is_set():
            return None
        try:
            return call_tool(agent, answer, self.inputs)
        except ToolError as error:
            if self.on_tool_error == "raise":
                raise
            return type(error.__cause__ or error).__name__


def _where(step: Step) -> str:
    return f"agent {step.agent}, turn {step.turn}"


def _sample(kind: Kind, step: Step) -> SampleId:
    return SampleId(f"{kind}_{step.agent}@{step.turn}")


def call_tool(agent: Agent, answer: str, inputs: Mapping[str, str]) -> str:
    """The result of the agent's tool. Raises `ToolError` when it raises, takes too long or answers with no text.

    A thread cannot be ended from outside: a tool that runs out of time goes on in the background, unheard.
    """
    assert agent.tool is not None
    box: Future[object] = Future()
    threading.Thread(target=_settle, args=(box, agent, answer, inputs), name="kedge-tool", daemon=True).start()
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


def _settle(box: Future[object], agent: Agent, answer: str, inputs: Mapping[str, str]) -> None:
    assert agent.tool is not None
    try:
        box.set_result(agent.tool(answer, inputs))
    except BaseException as error:  # foreign code: whatever it raises, exit included, is the tool's failure
        box.set_exception(error)
