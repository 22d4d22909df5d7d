"""Runs that clients drive call by call: their forecasts, what their agents read, and hints for the prompts to come.

A run is forgotten when its client ends it, when no call has named it for a while, or when there are too many. An answer
is remembered with its token ids, so that an agent that reads it later reads the same sample: the KV that decoding left
behind is then its base KV.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType

from kedge.checks import require_text
from kedge.engine.base import Engine, Tokenizer
from kedge.errors import LimitReached, RequestError
from kedge.hints import ActionOutcome, Hints
from kedge.hints.without_prompt import ends_run, run_ended, took_forecast
from kedge.runner.prompts import NOTHING, Remembered, RunMemory, RunPrompts, fixed_prompts
from kedge.server.workflows.registry import Registered
from kedge.structures.bounded import BoundedDict
from kedge.types import (
    AgentId,
    Completion,
    GenerateRequest,
    Namespace,
    RequestId,
    ReuseMode,
    RunId,
    SampleId,
    TenantId,
    Tokens,
    ValueKind,
)
from kedge.workflow.forecast import AgentKey, Changes, ForecastBoard, RunKey, RunProgress
from kedge.workflow.graph import Step
from kedge.workflow.steps import NextRun
from kedge.workflow.template import CompiledAgent, Placeholder, Value

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
        self.lookahead = Lookahead(engine, default, withdraw)
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
        forecasts = [self.board.forecast(one) for one in runs if one != key]
        named = len(hints.steps or ()) + sum(len(one.next_runs) for one in forecasts if one)
        if hints.steps and named > MAX_FORECAST_AGENTS:
            why = f"the forecasts of all runs have at most {MAX_FORECAST_AGENTS} agents"
            raise _full("agents", named, why, runs, now)

    def moved(self, run: ClientRun, agent: AgentId, *, has_ended: bool) -> None:
        """Record the start of an agent's call, or its end."""
        if run.progress is not None:
            move = run.progress.finished if has_ended else run.progress.started
            self._publish(move(agent, time.monotonic()))
            run.called.clear()
        self.look_ahead(run)

    def look_ahead(self, run: ClientRun) -> None:
        """Send the prompts of the upcoming agents to the engine."""
        if forecast := self.board.forecast(run.key):
            self.lookahead.expect(run, forecast.next_runs)

    def end(self, run: ClientRun) -> None:
        """Forget a run, in the engine too."""
        if self._of(run.key.namespace).pop(run.key, None) is not None:
            self.lookahead.end_run(run.key)
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


def _key(namespace: Namespace, hints: Hints) -> RunKey:
    return RunKey(namespace, hints.client, RunId(hints.run))


def _full(key: str, value: int, why: str, runs: Mapping[RunKey, ClientRun], now: float) -> LimitReached:
    """Return the error. There is room at the latest when the oldest run expires."""
    error = LimitReached(key, value, why)
    error.retry_after = next(iter(runs.values())).heard + TTL - now
    return error


MAX_ANSWERS = 1024
"""Answers of a run that are remembered."""


@dataclass
class ClientRun:
    """Run that a client drives."""

    key: RunKey
    heard: float
    progress: RunProgress | None = None
    """None where no registered workflow has a forecast for the run, or the client sends its own."""
    turns: Counter[AgentId] = field(default_factory=Counter)
    answers: RunMemory = field(default_factory=lambda: RunMemory(MAX_ANSWERS))
    running: Counter[AgentId] = field(default_factory=Counter)
    """Calls in flight by agent."""
    called: set[AgentId] = field(default_factory=set)
    """Agents that have called since the forecast was made."""

    @property
    def acting(self) -> Set[AgentId]:
        """Agents whose expected call has come, so that the forecast does not yet cover their next one."""
        return self.running.keys() | self.called

    def call(self, agent: AgentId) -> None:
        """Count a call of `agent` as in flight."""
        self.running[agent] += 1
        self.called.add(agent)

    def end_call(self, agent: AgentId) -> None:
        """Count a call of `agent` as ended, or as one that could not begin."""
        self.running -= Counter({agent: 1})

    def begin(self, agent: AgentId) -> Step:
        """Begin the next turn of `agent`."""
        self.turns[agent] += 1
        return Step(agent, self.turns[agent] - 1)

    def give_back(self, step: Step) -> None:
        """Take back a turn that could not begin, if it is the agent's newest."""
        if self.turns[step.agent] == step.turn + 1:
            self.turns[step.agent] -= 1

    def keep(self, step: Step, completion: Completion, tokenizer: Tokenizer) -> None:
        """Remember an answer that is not empty, as others read it."""
        if tokens := tokenizer.plain(completion.tokens):
            self.answers.put(step.sample(), Value(tokens, step.sample()), completion.text)


def values_for(
    prompt: CompiledAgent,
    bindings: Mapping[str, str],
    tokenizer: Tokenizer,
    registered: Registered,
    run: ClientRun | None,
    step: Step,
) -> dict[Placeholder, Value]:
    """Return what fills an agent's placeholders: the client's bindings, and the answers of its run.

    Raises `RequestError` for a binding that the agent does not read, or a placeholder without a value.
    """
    names = {placeholder.name for placeholder in prompt.placeholders}
    for name in bindings:
        if name not in names:
            raise RequestError("kedge.bindings", name, f"the agent reads only {', '.join(sorted(names)) or 'nothing'}")
    values: dict[Placeholder, Value] = {}
    for placeholder in prompt.placeholders:
        text, known = bindings.get(placeholder.name), None
        if run is not None and placeholder.kind is ValueKind.AGENT:
            sample = registered.workflow.sample(step, placeholder)
            known = Remembered(NOTHING, "") if sample is None else run.answers.find(sample)
        if text is None and known is None:
            raise RequestError("kedge.bindings", placeholder.name, "has no value")
        if known is not None and text in (None, known.text):
            values[placeholder] = known.value
        else:
            values[placeholder] = value_of(tokenizer, placeholder, text or "")
    return values


PREPARED_STEPS = 1.0
"""Steps-to-execution up to which an agent's prompt is given to the engine."""
PREPARED_RUNS, PREPARED_AGENTS, MAX_VALUES = 16, 4, 64
"""Runs of a tenant that get hints; hints of a run; values that are remembered of a run."""


class Lookahead:
    """The engine's hints for upcoming prompts. Belongs to the event loop.

    This is for runs whose templates the server fills. What a call has bound is remembered, and so are the answers: from
    them and the forecast follows what the next agents are going to read, as far as it is known yet. A wrong guess costs
    idle time and changes no answer, see `kedge.engine.base.Engine.prepare`. Hints that are no longer valid are
    withdrawn: by the engine itself where the forecast does not expect the agent any more or the run has ended, and from
    here where there are too many.
    """

    def __init__(self, engine: Engine, default: ReuseMode, withdraw: Callable[[Sequence[RequestId]], None]) -> None:
        """`default`: the reuse mode where neither agent nor workflow has one. `withdraw` cancels hints, soon."""
        self._engine, self._default, self._withdraw = engine, default, withdraw
        self._runs: dict[TenantId, BoundedDict[RunKey, _KnownRun]] = {}
        """By tenant, and by the time of the last call."""

    def called(
        self, run: ClientRun, registered: Registered, step: Step, filled: GenerateRequest, asked: ReuseMode | None
    ) -> None:
        """Take in the call of a registered agent, with `filled` for its template.

        `asked` is the reuse mode that the call names; the run's other calls are expected to name it, too.
        """
        known = self._of(run.key).use(run.key, lambda: _KnownRun(registered))
        known.registered, known.asked = registered, asked
        known.read(filled, step)

    def expect(self, run: ClientRun, next_runs: Mapping[AgentId, NextRun]) -> None:
        """Give the engine the prompts, as far as they are known, of the agents that run next by the forecast."""
        known = self._of(run.key).get(run.key)
        if known is None:
            return
        requests = [known.request(run, agent, self._default) for agent in known.near(run, next_runs)]
        for request in requests:
            self._engine.prepare(request)
        hints = {request.agent: request.request_id for request in requests}
        self._withdraw([hint for agent, hint in known.hints.items() if agent not in hints])
        known.hints = hints

    def end_run(self, key: RunKey) -> None:
        """Forget a run that has ended. The engine drops its hints by itself."""
        self._of(key).pop(key, None)

    def _of(self, key: RunKey) -> BoundedDict[RunKey, _KnownRun]:
        return self._runs.setdefault(key.namespace.tenant, BoundedDict(PREPARED_RUNS, self._evicted))

    def _evicted(self, _: RunKey, oldest: _KnownRun) -> None:
        self._withdraw([*oldest.hints.values()])


@dataclass
class _KnownRun:
    """What one run's calls have bound, and the hints that the engine has of it."""

    registered: Registered
    asked: ReuseMode | None = None
    values: RunMemory = field(default_factory=lambda: RunMemory(MAX_VALUES))
    """What was read last. A client may have bound another text than the answer, so these go before the answers."""
    hints: dict[AgentId, RequestId] = field(default_factory=dict)
    """Expected agents with the ids of their hints."""

    def read(self, filled: GenerateRequest, step: Step) -> None:
        """Remember the values that a step has read. What is left out of its prompt is empty."""
        self.hints.pop(step.agent, None)
        values = {one.name: Value(one.tokens, one.sample) for one in filled.segments if one.is_placeholder}
        for placeholder in self.registered.prompts[step.agent].placeholders:
            if sample := self.registered.workflow.sample(step, placeholder):
                self.values.put(sample, values.get(placeholder.name, NOTHING))

    def near(self, run: ClientRun, next_runs: Mapping[AgentId, NextRun]) -> list[AgentId]:
        """Return the agents that run next, soonest first, without those whose expected call has come already."""
        known = [agent for agent in self.registered.workflow.ids if agent in next_runs and agent not in run.acting]
        soon = [agent for agent in known if next_runs[agent].steps <= PREPARED_STEPS]
        return sorted(soon, key=lambda agent: next_runs[agent].steps)[:PREPARED_AGENTS]

    def request(self, run: ClientRun, agent: AgentId, default: ReuseMode) -> GenerateRequest:
        """Return the agent's next call."""
        registered = self.registered
        prompts = RunPrompts(run.key, registered.workflow, registered.prompts, (self.values, run.answers))
        reuse = self.asked or registered.mode(registered.agent(agent), default)
        return prompts.request(Step(agent, run.turns[agent]), reuse)


def value_of(tokenizer: Tokenizer, placeholder: Placeholder, text: str) -> Value:
    """Return the value that `text` is. Its sample is named by its tokens, so that equal texts are one sample.

    Special tokens that are spelled out in `text` are read as plain text. Raises `RequestError` for invalid Unicode.
    """
    require_text(f"kedge.bindings.{placeholder.name}", text, may_be_empty=True)
    tokenizer.measure(text)
    tokens = tokenizer.encode(text, special=False, inside=True) if text else ()
    digest = hashlib.blake2b(repr(tokens).encode(), digest_size=12).hexdigest()
    return Value(tokens, SampleId(placeholder.kind, placeholder.of, placeholder.turns_back, digest))
