"""A team on one guarded engine: its questions, the calls that answered them, and what the guard says of an agent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kedge.bench.shapes import Loaded
from kedge.engine.base import Stream
from kedge.engine.common.watched import WatchedEngine, Watcher
from kedge.engine.local.components import EngineComponents
from kedge.engine.local.engine import LocalEngine
from kedge.errors import GenerationFailed
from kedge.guard import GuardMode
from kedge.reuse.guard.comparison import TOP, WordingComparison, compare_wording
from kedge.runner.run import run
from kedge.settings import EngineSettings, GuardSettings, PlannerSettings
from kedge.types import AgentId, Completion, GenerateRequest, RequestId, ReuseMode, TenantId
from kedge.workflow.graph import Workflow
from kedge.workloads.base import QUESTION

Move = Literal["always", "unlearned", "never"]
LEARNED_MOVE: Move = "never"
"""All values are translated by anchors, so that faults of anchors show: offsets of what is moved without are zero"""
DEFAULT_MOVE: Move = PlannerSettings().move
PARTS = ("faults", "clean", "clean_default", "overhead")
"""What can be measured, by the names of the figures"""


@dataclass(frozen=True)
class GuardBenchSettings:
    """What all parts share. A question is one call of every agent of the team."""

    task: str = "code"
    """Of the bundled tasks; `code` depends most on what is translated"""
    parts: tuple[str, ...] = PARTS
    """What is measured"""
    faults: tuple[str, ...] = ()
    """Names of the faults to inject; none: all"""
    learned: int = 24
    """Questions that fill the pools before a fault"""
    before: int = 6
    """Questions after those, for the distributions without the fault"""
    limit: int = 50
    """Questions after which a fault counts as not found"""
    calls: int = 1000
    """Calls without a fault"""
    idle: bool = False
    """Whether checks are carried out after every question, as in a pause of the traffic; else only within their
    budget"""
    seconds: float = 20.0
    """Of each window that is timed"""
    pairs: int = 3
    """Windows with and without the guard, one after the other"""
    clients: int = 4
    seed: int = 0
    device: str = "auto"

    def engine(
        self, anchors: dict[str, object], guard: GuardSettings | None = None, move: Move = LEARNED_MOVE
    ) -> EngineSettings:
        """Return the settings of an engine that translates whatever the anchors, or `move`, allow."""
        given = {"device": self.device, "anchors": anchors, "planner": {"by_cost": False, "move": move}}
        return EngineSettings.model_validate({**given, "guard": (guard or GuardSettings()).model_dump()})


QUICK = GuardBenchSettings(learned=8, before=2, limit=20, calls=100, seconds=4.0, pairs=1)


WARMERS = 4
"""Questions that are answered side by side while pools fill"""
IDLE = 300.0
"""Most seconds to wait for the checks that are left"""


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A request with its answer."""

    request: GenerateRequest
    completion: Completion


@dataclass
class CallRecorder(Watcher):
    """A watcher that keeps every answered call."""

    calls: list[AnsweredCall] = field(default_factory=list)
    _open: dict[RequestId, GenerateRequest] = field(default_factory=dict)

    def submitted(self, request: GenerateRequest) -> None:
        self._open[request.request_id] = request

    def ended(self, tenant: TenantId, request_id: RequestId, completion: Completion | None = None) -> None:  # noqa: ARG002
        request = self._open.pop(request_id, None)
        if request and completion:
            self.calls.append(AnsweredCall(request, completion))


class RankedEngine(WatchedEngine):
    """An engine that gives the log-probabilities of every answer, so that it can be compared later."""

    def submit(self, request: GenerateRequest) -> Any:
        return super().submit(replace(request, logprobs=TOP))


class GuardLane(AbstractContextManager["GuardLane"]):
    """A team's engine. Questions are answered one after the other, but for those that warm it up."""

    def __init__(
        self,
        loaded: Loaded,
        flow: Workflow,
        config: EngineSettings,
        components: EngineComponents = EngineComponents(),  # noqa: B008 (it is frozen)
    ) -> None:
        runner, tokenizer = loaded
        self.flow, self.engine = flow, LocalEngine.from_runner(runner, tokenizer, config, components=components)

    def __exit__(self, *error: object) -> None:
        self.engine.close()

    def warm(self, questions: Iterable[str], flow: Workflow | None = None) -> None:
        """Answer questions side by side, and carry out all checks of them."""
        with ThreadPoolExecutor(WARMERS, "kedge-guard-bench") as pool:
            list(pool.map(lambda question: self.ask(question, flow), questions))
        self.engine.wait_idle(IDLE)

    def ask(
        self, question: str, flow: Workflow | None = None, reuse: ReuseMode = ReuseMode.TRANSLATE
    ) -> tuple[str, list[AnsweredCall]]:
        """Return the last agent's answer, and all calls in the order in which they ended."""
        recorder = CallRecorder()
        return self._run(question, flow or self.flow, reuse, recorder), recorder.calls

    def attempt(self, question: str) -> tuple[str, list[AnsweredCall]]:
        """As `ask`; where a call fails, which a fault may lead to, the answer is empty and the calls end before it."""
        recorder = CallRecorder()
        try:
            return self._run(question, self.flow, ReuseMode.TRANSLATE, recorder), recorder.calls
        except GenerationFailed:
            return "", recorder.calls

    def _run(self, question: str, flow: Workflow, reuse: ReuseMode, recorder: CallRecorder) -> str:
        ranked = RankedEngine(self.engine, recorder)
        return run(ranked, flow, {QUESTION: question}, reuse=reuse, on_tool_error="text").text

    def again(self, call: AnsweredCall) -> Stream:
        """Submit the request of another lane's call once more, computed densely."""
        request = replace(call.request, request_id=RequestId(f"{call.request.request_id}-dense"))
        return self.engine.submit(replace(request, reuse=ReuseMode.OFF, logprobs=TOP))

    def guarded(self, agent: AgentId) -> list[dict[str, Any]]:
        """Return the guard's records of an agent's placeholders."""
        return [one for one in guard_records(self.engine) if one["agent"] == agent]


def guard_records(engine: LocalEngine) -> list[dict[str, Any]]:
    """Return the guard's records of all placeholders."""
    guard: Any = engine.inspect()["guard"]
    return guard["agents"]


AT_ONCE = 8
"""Questions and prompts that are computed side by side"""


class DenseOracle(AbstractContextManager["DenseOracle"]):
    """The right answers. It shares the model with the lanes, so no lane may work while it does."""

    def __init__(self, loaded: Loaded, flow: Workflow, device: str) -> None:
        config = EngineSettings(device=device, guard=GuardSettings(mode=GuardMode.OFF))
        self._lane, self._known = GuardLane(loaded, flow, config), dict[str, str]()
        self._margin = GuardSettings().margin

    def __exit__(self, *error: object) -> None:
        self._lane.engine.close()

    def answers(self, questions: Sequence[str]) -> list[str]:
        """Return the last agent's answers to these questions, which the team answers without reuse."""
        new = [one for one in dict.fromkeys(questions) if one not in self._known]
        with ThreadPoolExecutor(AT_ONCE, "kedge-oracle") as pool:
            texts = pool.map(lambda question: self._lane.ask(question, reuse=ReuseMode.OFF)[0], new)
            self._known.update(zip(new, texts, strict=True))
        return [self._known[one] for one in questions]

    def compare(self, calls: Sequence[AnsweredCall]) -> list[WordingComparison]:
        """Compare answers with those to the same prompts without reuse, as the guard does."""
        streams = [(call, self._lane.again(call)) for call in calls]
        found = [compare_wording(stream.result(), call.completion, self._margin) for call, stream in streams]
        return [one for one in found if one is not None]
