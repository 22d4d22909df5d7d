"""Registered workflows, and runs of them that clients drive call by call: their forecasts, what their agents read, and
hints for the prompts to come.

A run is forgotten when its client ends it, when no call has named it for a while, or when there are too many. An answer
is remembered with its token ids, so that an agent that reads it later reads the same sample: the KV that decoding left
behind is then its base KV.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from kedge.checks import require_text
from kedge.engine.base import Engine, Tokenizer
from kedge.errors import NotFound, RequestError
from kedge.guard import GuardMode
from kedge.hints import ActionOutcome, Hints
from kedge.hints.without_prompt import RUN_ENDED, ends_run, took_forecast
from kedge.runner.prompts import NOTHING, Remembered, RunPrompts, fixed_prompts
from kedge.structures.bounded import ENTRIES, BoundedDict
from kedge.types import (
    AgentId,
    AgentKey,
    Completion,
    GenerateRequest,
    Namespace,
    ReuseMode,
    RunKey,
    SampleId,
    TenantId,
    Tokens,
    ValueKind,
)
from kedge.workflow.export import columns, workflow_edges
from kedge.workflow.forecast import Changes, ForecastBoard, RunProgress
from kedge.workflow.graph import Agent, Step, Workflow
from kedge.workflow.step_graph import StepGraph
from kedge.workflow.steps import NextRun
from kedge.workflow.template import CompiledAgent, Placeholder, Value

PREPARED_AGENTS = 4
"""Agents of a run whose next prompts are given to the engine, which keeps a few of all runs"""


@dataclass(frozen=True)
class Registered:
    """Registered workflow with its reuse modes and compiled prompts."""

    workflow: Workflow
    reuse: ReuseMode | None
    """Mode of agents without a mode of their own; None for the server's default."""
    prompts: Mapping[AgentId, CompiledAgent]
    """Prompts of all agents, compiled for the served model."""

    @cached_property
    def drawn(self) -> dict[str, Any]:
        """The workflow as a picture needs it: agents by column, and who hears whom. Takes a while the first time."""
        flow = self.workflow
        edges = [{"from": edge.start, "to": edge.to, "loop": edge.is_loop} for edge in workflow_edges(flow)]
        titles = {agent.id: agent.title for agent in flow.agents if agent.title}
        return {"name": flow.name, "columns": columns(flow), "edges": edges, "titles": titles}

    def agent(self, name: str) -> Agent:
        """Return the agent with this id. Raises `NotFound`."""
        if name not in self.workflow.ids:
            raise NotFound("agent", name, f"the workflow {self.workflow.name!r} has {', '.join(self.workflow.ids)}")
        return self.workflow.agent(name)

    def mode(self, agent: Agent, default: ReuseMode, asked: ReuseMode | None = None) -> ReuseMode:
        """Return the reuse mode of `agent`. Its own mode overrides `asked`, which is for a whole run."""
        return agent.reuse or asked or self.reuse or default

    def for_run(
        self, default: ReuseMode, asked: ReuseMode | Mapping[str, ReuseMode] | None, guard: GuardMode | None
    ) -> Workflow:
        """Return the workflow with a mode in every agent: that `asked` for by its name, which overrides everything
        else, or as `mode` says. `guard` is the guard's mode for agents without one of their own.

        Raises `NotFound` for an unknown agent.
        """
        whole, named = (None, asked) if isinstance(asked, Mapping) else (asked, {})
        by_name = {self.agent(name).id: mode for name, mode in named.items()}
        agents = (
            replace(one, reuse=by_name.get(one.id) or self.mode(one, default, whole), guard=one.guard or guard)
            for one in self.workflow.agents
        )
        return replace(self.workflow, agents=tuple(agents))


class ClientRuns:
    """The runs of all tenants. Belongs to the event loop.

    Where the server fills templates, the engine gets hints: from what calls have bound, the answers and the forecast
    follows what the next agents are going to read, as far as it is known yet. A wrong guess costs idle time and changes
    no answer, see `Engine.prepare`. The engine drops hints that the forecast does not expect any more.
    """

    def __init__(self, engine: Engine, default: ReuseMode) -> None:
        """`default`: the reuse mode where neither agent nor workflow has one."""
        self.board = ForecastBoard()
        self._engine, self._default = engine, default
        self.by_tenant = defaultdict[TenantId, OrderedDict[RunKey, ClientRun]](OrderedDict)
        """So that no tenant's runs evict another's, in the order of their last calls."""

    def touch(self, namespace: Namespace, hints: Hints, registered: Registered | None) -> ClientRun | None:
        """Return the run that `hints` name, if any, and take the forecast in them. A session alone takes no room of
        runs: nothing is known of what follows it.
        """
        now, runs = time.monotonic(), self.by_tenant[namespace.tenant]
        key = RunKey(namespace, hints.client, hints.run)
        is_session = hints.run == hints.session and not (hints.workflow or hints.steps is not None)
        if hints.run and key not in runs and not is_session:
            runs[key] = ClientRun(key, now)
        if run := runs.get(key):
            run.heard = now
            runs.move_to_end(key)
        self._forget_old(now)
        if run:
            self._take_forecast(run, hints, registered, now)
        return run

    def hint(self, namespace: Namespace, hints: Hints, registered: Registered | None) -> list[ActionOutcome]:
        """Take hints without a prompt, and return what becomes of those on a run."""
        before = self.board.forecast(RunKey(namespace, hints.client, hints.run))
        run, outcomes = self.touch(namespace, hints, registered), list[ActionOutcome]()
        if hints.steps is not None:
            outcomes.append(took_forecast(run is not None and self.board.forecast(run.key) is not before))
        if run and hints.final:
            self.end(run)
        elif run:
            self.look_ahead(run)
        return [*outcomes, RUN_ENDED] if ends_run(hints) else outcomes

    def answered(self, run: ClientRun, hints: Hints, step: Step | None, answer: Completion) -> None:
        """Record the whole answer to a call; of a step also what others read of it."""
        if step:
            remembered = Remembered.read(step.sample(), answer.text, self._engine.tokenizer, answer.tokens)
            run.answers[step.sample()] = remembered
        if hints.final:
            self.end(run)
        elif hints.agent:
            self.moved(run, hints.agent, has_ended=True)

    def moved(self, run: ClientRun, agent: AgentId, *, has_ended: bool) -> None:
        """Record the start of an agent's call, or its end."""
        if has_ended:
            run.end_call(agent)
        if run.progress is not None:
            move = run.progress.finished if has_ended else run.progress.started
            self._publish(move(agent, time.monotonic()))
            run.called.clear()
        self.look_ahead(run)

    def look_ahead(self, run: ClientRun) -> None:
        """Give the engine the prompts, as far as they are known, of the agents that run next by the forecast."""
        forecast = self.board.forecast(run.key)
        for agent in run.near(forecast.next_runs) if forecast else ():
            self._engine.prepare(run.request(agent, self._default))

    def end(self, run: ClientRun) -> None:
        """Forget a run, in the engine too."""
        if self.by_tenant[run.key.namespace.tenant].pop(run.key, None) is not None:
            self._publish(self.board.done(run.key, time.monotonic()))
            self._engine.end_run(run.key)

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
            run.progress = RunProgress(StepGraph.of(registered.workflow), run.key, self.board)
            self._publish(run.progress.begin(now), fixed_prompts(run.key, registered.prompts))

    def _publish(self, changes: Changes, begins: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        if changes:
            self._engine.forecast(changes, begins)

    def _forget_old(self, now: float) -> None:
        """Forget every tenant's runs that were not heard of for the forecasts' `ttl`, and the oldest beyond `ENTRIES`.
        O(tenants).
        """
        for runs in self.by_tenant.values():
            while (oldest := next(iter(runs.values()), None)) and (
                len(runs) > ENTRIES or oldest.heard + self.board.ttl <= now
            ):
                self.end(oldest)


@dataclass
class ClientRun:
    """Run that a client drives."""

    key: RunKey
    heard: float
    progress: RunProgress | None = None
    """None where no registered workflow has a forecast for the run, or the client sends its own."""
    turns: Counter[AgentId] = field(default_factory=Counter)
    answers: BoundedDict[SampleId, Remembered] = field(default_factory=lambda: BoundedDict(ENTRIES))
    registered: Registered | None = None
    """The workflow of its last call whose template the server has filled; None where there was none"""
    asked: ReuseMode | None = None
    """The reuse mode that this call named; the run's other calls are expected to name it, too"""
    values: BoundedDict[SampleId, Remembered] = field(default_factory=lambda: BoundedDict(ENTRIES))
    """What was read last. A client may have bound another text than the answer, so these go before the answers."""
    running: Counter[AgentId] = field(default_factory=Counter)
    """Calls in flight by agent."""
    called: BoundedDict[AgentId, None] = field(default_factory=lambda: BoundedDict(ENTRIES))
    """Agents that have called since the forecast was made; clients may name any."""

    def call(self, agent: AgentId, *, fills: bool) -> Step | None:
        """Count a call of `agent` as in flight. Returns its next turn where it `fills` its template."""
        self.running[agent] += 1
        self.called[agent] = None
        if not fills:
            return None
        self.turns[agent] += 1
        return Step(agent, self.turns[agent] - 1)

    def end_call(self, agent: AgentId, undone: Step | None = None) -> None:
        """Count a call of `agent` as ended; without an answer its step is `undone`, if that is the agent's newest."""
        self.running -= Counter({agent: 1})
        if undone and self.turns[agent] == undone.turn + 1:
            self.turns[agent] -= 1

    def read(self, registered: Registered, step: Step, filled: GenerateRequest, asked: ReuseMode | None) -> None:
        """Remember what a step has read, `filled` for its template. What is left out of its prompt is empty."""
        self.registered, self.asked = registered, asked
        values = {one.name: Value(one.tokens, one.sample) for one in filled.segments if one.is_placeholder}
        for placeholder in registered.prompts[step.agent].placeholders:
            if sample := registered.workflow.sample(step, placeholder):
                self.values[sample] = Remembered.of(values.get(placeholder.name, NOTHING))

    def near(self, next_runs: Mapping[AgentId, NextRun]) -> list[AgentId]:
        """Return the agents of `registered` that run within a step, soonest first, unless their call has come."""
        known = self.registered.workflow.ids if self.registered else ()
        acting = self.running.keys() | self.called.keys()
        soon = [one for one in known if one in next_runs and one not in acting and next_runs[one].steps <= 1]
        return sorted(soon, key=lambda agent: next_runs[agent].steps)[:PREPARED_AGENTS]

    def request(self, agent: AgentId, default: ReuseMode) -> GenerateRequest:
        """Return the next call of an agent of `registered`."""
        assert self.registered
        prompts = RunPrompts(self.key, self.registered.workflow, self.registered.prompts, (self.values, self.answers))
        reuse = self.asked or self.registered.mode(self.registered.agent(agent), default)
        return prompts.request(Step(agent, self.turns[agent]), reuse)


def values_for(
    prompt: CompiledAgent,
    bindings: Mapping[str, str],
    tokenizer: Tokenizer,
    registered: Registered,
    run: ClientRun | None,
    step: Step,
) -> dict[Placeholder, Value]:
    """Return what fills an agent's placeholders: the client's bindings, and the answers of its run.

    A binding's sample is named by its tokens, so that equal texts are one sample. Special tokens that it spells out are
    read as plain text. Raises `RequestError` for a binding that is no Unicode or that the agent does not read, or a
    placeholder without a value.
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
            known = Remembered(NOTHING) if sample is None else run.answers.get(sample)
        if known is not None and text in (None, known.text):
            values[placeholder] = known.value
            continue
        if text is None:
            raise RequestError("kedge.bindings", placeholder.name, "has no value")
        require_text(f"kedge.bindings.{placeholder.name}", text, may_be_empty=True)
        tokenizer.measure(text)
        tokens = tokenizer.encode(text, special=False, inside=True) if text else ()
        digest = hashlib.blake2b(repr(tokens).encode(), digest_size=12).hexdigest()
        values[placeholder] = Value(tokens, SampleId(placeholder.kind, placeholder.of, placeholder.turns_back, digest))
    return values
