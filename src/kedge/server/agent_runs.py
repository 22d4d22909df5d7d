"""Runs that a client drives itself, call by call: what their agents have said, and who is expected next.

An answer is remembered with its token ids, so that an agent that reads it later reads the same sample: the KV that
decoding left behind is then its base KV. Runs are forgotten when a client says so, when nothing was heard of them for
a while, or when there are too many.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kedge.engine.base import Engine, Tokenizer
from kedge.errors import RequestError
from kedge.server import prompts
from kedge.server.hints import Hints
from kedge.server.registry import Registered
from kedge.types import AgentId, Completion, RunId, SampleId, TenantId, Tokens
from kedge.workflow.forecast import AgentKey, Changes, ForecastBoard, RunKey, RunProgress
from kedge.workflow.graph import Step
from kedge.workflow.steps import NextRun
from kedge.workflow.template import CompiledAgent, Kind, Placeholder, Value

MOST_RUNS, MOST_ANSWERS = 1024, 1024
"""Runs of a tenant, and answers that a run remembers."""
TTL = 600.0
"""Seconds after which a run that nobody mentions is over."""


@dataclass
class AgentRun:
    """One run that a client drives."""

    key: RunKey
    heard: float
    progress: RunProgress | None = None
    """None where no registered workflow says who comes next, or the client says it itself."""
    turns: Counter[AgentId] = field(default_factory=Counter)
    answers: dict[Step, tuple[str, Value]] = field(default_factory=dict)
    """What was said, as text and as the sample that it is."""

    def begin(self, agent: AgentId) -> Step:
        """The next turn of `agent`."""
        self.turns[agent] += 1
        return Step(agent, self.turns[agent] - 1)

    def give_back(self, step: Step) -> None:
        """A turn that could not begin did not happen."""
        if self.turns[step.agent] == step.turn + 1:
            self.turns[step.agent] -= 1

    def keep(self, step: Step, completion: Completion) -> None:
        """Remembers an answer."""
        if completion.tokens and len(self.answers) < MOST_ANSWERS:
            self.answers[step] = completion.text, Value(completion.tokens, sample_of(step))


def sample_of(step: Step) -> SampleId:
    """The sample that an agent's answer is."""
    return SampleId(f"agent_{step.agent}@{step.turn}")


def values_for(
    prompt: CompiledAgent,
    bindings: Mapping[str, str],
    tokenizer: Tokenizer,
    registered: Registered,
    run: AgentRun | None,
    step: Step,
) -> dict[Placeholder, Value]:
    """What fills an agent's placeholders: the bindings, and what its run remembers.

    Raises `RequestError` for a binding that the agent does not read, or a placeholder that nothing is known of.
    """
    prompts.require_known(bindings, prompt.placeholders)
    values: dict[Placeholder, Value] = {}
    for placeholder in prompt.placeholders:
        text = bindings.get(placeholder.name)
        known = _remembered(registered, run, step, placeholder)
        if text is None and known is None:
            raise RequestError("kedge.bindings", placeholder.name, "has no value")
        if known is not None and text in (None, known[0]):
            values[placeholder] = known[1]
        else:
            values[placeholder] = prompts.value_of(tokenizer, placeholder, text or "")
    return values


def _remembered(
    registered: Registered, run: AgentRun | None, step: Step, placeholder: Placeholder
) -> tuple[str, Value] | None:
    if run is None or placeholder.kind is not Kind.AGENT:
        return None
    source = registered.workflow.source(step, placeholder)
    return ("", Value((), SampleId(""))) if source is None else run.answers.get(source)


class AgentRuns:
    """The runs that clients drive, and what they tell the engine. Only the event loop's thread touches it."""

    def __init__(self, engine: Engine) -> None:
        self.board = ForecastBoard(TTL)
        self._engine = engine
        self._runs: dict[str, OrderedDict[RunKey, AgentRun]] = {}
        """By tenant, so that nobody's runs push out another's, and by the time of the last word."""

    def touch(self, namespace: TenantId, hints: Hints, registered: Registered | None) -> AgentRun | None:
        """The run that `hints` speak of, if any; a forecast in them is passed on."""
        if not hints.run:
            return None
        now, runs = time.monotonic(), self._of(namespace)
        key = RunKey(namespace, hints.client, engine_id(hints))
        run = runs.setdefault(key, AgentRun(key, now))
        run.heard = now
        runs.move_to_end(key)
        self._forget_old(runs, now)
        self._take_forecast(run, hints, registered, now)
        return run

    def started(self, run: AgentRun, agent: AgentId) -> None:
        """An agent's call begins."""
        if run.progress is not None:
            self._tell(run.progress.started(agent, time.monotonic()))

    def finished(self, run: AgentRun, agent: AgentId) -> None:
        """An agent's call has ended."""
        if run.progress is not None:
            self._tell(run.progress.finished(agent, time.monotonic()))

    def end(self, run: AgentRun) -> None:
        """Forgets a run, in the engine too."""
        if self._of(run.key.tenant).pop(run.key, None) is not None:
            self._tell(self.board.done(run.key, time.monotonic()))
            self._engine.end_run(run.key.tenant, run.key.run_id)

    def _of(self, namespace: TenantId) -> OrderedDict[RunKey, AgentRun]:
        tenant, _, _ = namespace.partition("/")
        return self._runs.setdefault(tenant, OrderedDict())

    def _take_forecast(self, run: AgentRun, hints: Hints, registered: Registered | None, now: float) -> None:
        if hints.steps is not None:
            run.progress = None
            known = self.board.forecast(run.key)
            seq = hints.seq if hints.seq is not None else known.seq + 1 if known else 0
            next_runs = {agent: NextRun(steps) for agent, steps in hints.steps.items()}
            self._tell(self.board.update(run.key, seq, next_runs, now))
        elif run.progress is None and registered is not None and self.board.forecast(run.key) is None:
            run.progress = RunProgress(registered.graph, run.key, self.board)
            begins = {AgentKey(*run.key, agent): tokens for agent, tokens in registered.beginnings.items() if tokens}
            self._tell(run.progress.begin(now), begins)

    def _tell(self, changes: Changes, begins: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        if changes:
            self._engine.forecast(changes, begins)

    def _forget_old(self, runs: OrderedDict[RunKey, AgentRun], now: float) -> None:
        while (oldest := next(iter(runs.values()))) and (len(runs) > MOST_RUNS or oldest.heard + TTL <= now):
            self.end(oldest)


def engine_id(hints: Hints) -> RunId:
    """A client's run as the engine knows it. Runs that the server drives have no `/` in their ids."""
    return RunId(f"{hints.client}/{hints.run}")
