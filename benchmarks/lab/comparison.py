"""Every question answered by dense prefill and by other methods, on engines that share one model.

Each method's requests have tenants of their own, so that none learns from another:

- closed: the team answers by itself; every agent reads the others' answers by the same method.
- judged: some of the answers are made wrong, then the last agent reads all of them in a shuffled order; its choice is
  compared with its choice from the same prompt by dense prefill.

Pools fill as they do in use. `kedge bench fidelity` compares answers that are forced to those of dense prefill.

A method with prompts of its own reads the same values in these, and is compared with dense prefill of the usual ones.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, Self

from benchmarks.lab.methods import METHODS
from kedge.bench.probe import ChangingEngine, Method, Probe, ProbeResult, Recorder, constrained, method_named
from kedge.bench.shapes import Loaded, load_model, to_compare
from kedge.decisions import first_decision
from kedge.runner.run import AgentResult, RunResult, run
from kedge.types import (
    AgentId,
    GenerateRequest,
    Namespace,
    ReuseMode,
    RunId,
    RunKey,
    TenantId,
    Tokens,
    new_request_id,
)
from kedge.workflow.graph import Workflow
from kedge.workflow.template import CompiledAgent, Value, compile_agents
from kedge.workloads.base import QUESTION, Question, Team


def shuffled(request: GenerateRequest, rng: Random) -> GenerateRequest:
    """Return the judge's request with the other agents' answers in a random order; the rest stays in place."""
    places = [i for i, segment in enumerate(request.segments) if segment.is_answer]
    order = rng.sample(places, len(places))
    segments = list(request.segments)
    for place, source in zip(places, order, strict=True):
        given = request.segments[source]
        segments[place] = replace(segments[place], tokens=given.tokens, sample=given.sample)
    return replace(request, segments=tuple(segments))


def consistency(choices: Iterable[tuple[str | None, str | None]]) -> float:
    """Return the share of pairs with the same choice, 1 for no pairs. None matches nothing."""
    same = [a == b and a is not None for a, b in choices]
    return fmean(same) if same else 1.0


Choice = tuple[str | None, str | None]
"""Decisions of the last agent, by dense prefill and by the method; None is no decision."""


@dataclass(frozen=True)
class AnswerPair:
    """One agent's answer to one question: by dense prefill, and by a method in a team that uses it throughout."""

    question: int
    agent: AgentId
    dense: AgentResult
    other: AgentResult
    dense_right: bool | None
    """None for agents without a scored answer."""
    right: bool | None
    flipped: bool = False
    """Whether the first decision differs: the function that is called, or prose."""


@dataclass
class MethodRuns:
    """One method's results over all questions that count."""

    answers: list[AnswerPair] = field(default_factory=list)
    finals: list[Choice] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    """Choices of the last agent from shuffled candidates."""
    ttfts: list[float] = field(default_factory=list)
    """Milliseconds of every call in closed loop, where times compare."""
    teams: list[float] = field(default_factory=list)
    """Seconds of every team in closed loop, until its engine was idle again, where times compare."""

    def add(self, more: MethodRuns) -> None:
        """Append the results of further questions."""
        self.answers += more.answers
        self.finals += more.finals
        self.choices += more.choices
        self.ttfts += more.ttfts
        self.teams += more.teams

    def summary(self) -> Summary:
        """Return the means over all questions."""
        return Summary.of(self)


@dataclass(frozen=True)
class Summary:
    """Means over all questions; None where nothing of the kind was measured."""

    questions: int
    accuracy_dense: float | None
    """The last agent's."""
    accuracy: float | None
    agents_dense: dict[str, float | None]
    agents: dict[str, float | None]
    same_final_answer: float | None
    flips: float | None
    """Share of calls whose first decision (the function that the answer calls, or prose) differs from that of dense
    prefill."""
    reuse_rate: float | None
    """Share of calls that translated (the paper's definition)."""
    reused_tokens: float | None
    """Share of prompt tokens that were not computed."""
    judge_consistency: float | None
    computed_tokens: float | None
    """Share of prompt tokens that ran through the model, those of base prefills not counted."""
    ttft_ms: float | None
    """Median over calls."""
    teams_per_minute: float | None
    """One team at a time: by the median time of a team, from its first request until its engine is idle again."""

    @classmethod
    def of(cls, runs: MethodRuns) -> Summary:
        """Compute the means."""
        names = list(dict.fromkeys(pair.agent for pair in runs.answers))
        of_agent = {name: [pair for pair in runs.answers if pair.agent == name] for name in names}
        dense = {str(name): _mean(pair.dense_right for pair in pairs) for name, pairs in of_agent.items()}
        other = {str(name): _mean(pair.right for pair in pairs) for name, pairs in of_agent.items()}
        receipts = [pair.other.completion.receipt for pair in runs.answers]
        return cls(
            questions=len({pair.question for pair in runs.answers}),
            accuracy_dense=dense[str(names[-1])] if names else None,
            accuracy=other[str(names[-1])] if names else None,
            agents_dense=dense,
            agents=other,
            same_final_answer=consistency(runs.finals) if runs.finals else None,
            flips=_mean(pair.flipped for pair in runs.answers),
            reuse_rate=_mean(receipt.translated > 0 for receipt in receipts),
            reused_tokens=_mean(1 - receipt.computed / receipt.prompt_tokens for receipt in receipts),
            judge_consistency=consistency(runs.choices) if runs.choices else None,
            computed_tokens=_mean(receipt.computed / receipt.prompt_tokens for receipt in receipts),
            ttft_ms=median(runs.ttfts) if runs.ttfts else None,
            teams_per_minute=60 / median(runs.teams) if runs.teams else None,
        )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


CLOSED, JUDGED = TenantId("closed"), TenantId("judged")
WRONG = 0.5
"""Share of candidates that are made wrong before they are judged."""
AT_ONCE = 8
"""Questions that dense prefill answers side by side: it learns nothing, so their order has no effect."""


@dataclass(frozen=True)
class LabSettings:
    """The team, the measures and the seed. `anchors` and `engine` override the methods' own settings."""

    agents: int | None = None
    model: Path | None = None
    """None: the bundled one, which has not learned prompts with the role last"""
    judged: bool = False
    timed: bool = False
    """Whether teams answer one at a time in closed loop by dense prefill too, so that all methods' times compare."""
    seed: int = 0
    anchors: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)


def run_pairs(
    workload: Team,
    questions: Iterable[Question],
    methods: Sequence[str] | Mapping[str, Method],
    settings: LabSettings = LabSettings(),  # noqa: B008 (it is frozen)
    on_question: Callable[[int], None] = lambda _: None,
) -> dict[str, MethodRuns]:
    """Run all methods on the same questions, next to dense prefill; the method `dense` is the ceiling of all measures.

    `on_question` is called with the number of the last answered question. Raises `ConfigError` for an unknown method.
    """
    chosen = methods if isinstance(methods, Mapping) else {name: method_named(name, METHODS) for name in methods}
    with Lab(workload, chosen, settings) as lab:
        numbered = enumerate(questions)
        while some := list(islice(numbered, AT_ONCE)):
            lab.ask(some)
            on_question(some[-1][0])
    return lab.runs


class MethodBench:
    """One method's engine with a probe on its requests, and the method's own wording of prompts."""

    def __init__(self, method: Method, loaded: Loaded, settings: LabSettings) -> None:
        self.probe, self.reuse, self.method = Probe(method.components), method.reuse, method
        self.engine = method.open(loaded, settings.anchors, {}, self.probe.components, **settings.engine)
        self._compiled: dict[AgentId, CompiledAgent] = {}

    def team(self, flow: Workflow) -> Workflow:
        """Return the team as this method words it, which `look` words requests by from now on."""
        if self.method.team is None:
            return flow
        team = self.method.team(flow)
        self._compiled = compile_agents(team.agents, self.engine.tokenizer)
        return team

    def look(self, request: GenerateRequest, tenant: TenantId, run_id: RunId, answer: Tokens = ()) -> ProbeResult:
        """Serve a request in this method's mode and wording, for another tenant and run; force it to `answer` if there
        is one.
        """
        moved = replace(request, request_id=new_request_id(), tenant=tenant, run=run_id, reuse=self.reuse)
        return self.probe.submit(self.engine, self._worded(moved), answer).result()

    def _worded(self, request: GenerateRequest) -> GenerateRequest:
        """Return a request with the same values in this method's prompt."""
        if request.agent not in self._compiled:
            return request
        compiled = self._compiled[request.agent]
        values = {one.name: Value(one.tokens, one.sample) for one in request.segments if one.is_placeholder}
        filled = {place: values.get(place.name, Value((), None)) for place in compiled.placeholders}
        return replace(request, segments=compiled.fill(filled))


class Lab:
    """One engine per method and one for dense prefill, on one model; only one of them works at a time."""

    def __init__(self, workload: Team, methods: Mapping[str, Method], settings: LabSettings) -> None:
        self._workload, self._settings = workload, settings
        self._flow = workload.workflow(settings.agents)
        self._stack = ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(AT_ONCE, "kedge-lab"))
        model = settings.model
        loaded = load_model(model, to_compare(**settings.engine))
        self._dense = self._open(method_named("dense"), loaded)
        self._benches = {name: self._open(method, loaded) for name, method in methods.items()}
        self._asked = count(1)
        self.runs = {name: MethodRuns() for name in methods}

    def _open(self, method: Method, loaded: Loaded) -> MethodBench:
        bench = MethodBench(method, loaded, self._settings)
        self._stack.enter_context(bench.engine)
        return bench

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def ask(self, questions: Sequence[tuple[int, Question]]) -> None:
        """Answer numbered questions that count, at most `AT_ONCE`."""
        asked = list(self._pool.map(self._answer_densely, questions))
        for name, bench in self._benches.items():
            timed = self._settings.timed and bench.method.is_timed
            close_loop = partial(self._close_loop, bench, bench.team(self._flow))
            runs = list(self._each(bench, asked, timed=timed)(close_loop, asked))
            if self._settings.judged and bench.method.guard is None:
                choices = self._each(bench, asked, timed=False)(partial(self._judged, bench), asked)
                for one, choice in zip(runs, choices, strict=True):
                    one.choices.append(choice)
            for one in runs:
                self.runs[name].add(one)

    def _each(self, bench: MethodBench, asked: Sequence[DenseAnswers], *, timed: bool) -> Callable[..., Iterable[Any]]:
        """Return the map over questions: in turn where times count, or what earlier questions leave behind."""
        # The first question leaves base KV of templates, and each is learned from.
        follows = bench.reuse is not ReuseMode.OFF and (asked[0].number == 0 or bench.method.keeps)
        return map if timed or follows else self._pool.map

    def _answer_densely(self, numbered: tuple[int, Question]) -> DenseAnswers:
        number, question = numbered
        run_id = RunId(f"question-{next(self._asked)}")
        recorder = Recorder(
            self._dense.engine, self._dense.probe, partial(constrained, self._workload, question), kv=False
        )
        dense = _run(recorder, self._flow, question, ReuseMode.OFF, TenantId("dense"))
        results = [pending.result() for pending in recorder.pending]
        judge = self._judge(results, question, run_id) if self._settings.judged else None
        choice = self._choice(judge, self._dense) if judge else None
        return DenseAnswers(number, question, run_id, dense, results, judge, choice)

    def _judged(self, bench: MethodBench, asked: DenseAnswers) -> Choice:
        assert asked.judge
        return asked.choice, self._choice(asked.judge, bench)

    def _close_loop(self, bench: MethodBench, flow: Workflow, asked: DenseAnswers) -> MethodRuns:
        # nothing is prepared ahead of a recorder's requests, so that all methods do the same work
        runs = MethodRuns()
        prepare = partial(constrained, self._workload, asked.question)
        recorder = Recorder(bench.engine, bench.probe, prepare, kv=False)
        # a guard watches no request whose tokens a probe draws
        engine = recorder if bench.method.guard is None else ChangingEngine(bench.engine, prepare)
        began = time.perf_counter()
        result = _run(engine, flow, asked.question, bench.reuse, CLOSED)
        bench.engine.wait_idle()  # what a method learns or computes behind its answers is its cost, too
        took = time.perf_counter() - began
        if bench.method.is_timed and self._settings.timed:
            runs.teams.append(took)
            runs.ttfts += [one.completion.ttft_ms for one in result.results]
        for pending in recorder.pending:
            pending.result()
        runs.answers += map(partial(self._pair, asked), asked.dense.results, result.results)
        runs.finals.append((self._workload.final(asked.dense.text), self._workload.final(result.text)))
        return runs

    def _pair(self, asked: DenseAnswers, dense: AgentResult, other: AgentResult) -> AnswerPair:
        right, decision = self._workload.right, first_decision
        dense_right, is_right = (right(one.agent, one.text, asked.question) for one in (dense, other))
        flipped = decision(dense.text) != decision(other.text)
        return AnswerPair(asked.number, dense.agent, dense, other, dense_right, is_right, flipped)

    def _judge(self, results: list[ProbeResult], question: Question, run_id: RunId) -> JudgeQuestion:
        rng = random.Random(f"{self._settings.seed}/{question.text}")
        encode = self._dense.engine.tokenizer.encode
        last = next(one.request for one in results if one.request.agent == self._flow.agents[-1].id)
        read = {segment.sample for segment in last.segments if segment.is_answer}
        candidates = {}
        for result in (one for one in results if one.request.produces in read):
            done = result.completion
            wrong = self._workload.corrupt(rng, done.text) if rng.random() < WRONG else done.text
            tokens = done.tokens if wrong == done.text else encode(wrong, special=False)
            candidates[result.request] = tokens
        return JudgeQuestion(candidates, shuffled(_reading(last, candidates), rng), run_id)

    def _choice(self, judge: JudgeQuestion, bench: MethodBench) -> str | None:
        if bench.reuse is ReuseMode.TRANSLATE:  # nothing else reads what the producers leave behind
            for producer, answer in judge.candidates.items():
                bench.look(producer, JUDGED, judge.run_id, answer)
        result = bench.look(judge.request, JUDGED, judge.run_id)
        bench.engine.end_run(RunKey(Namespace(JUDGED), "", judge.run_id))
        bench.engine.wait_idle()
        return self._workload.final(result.completion.text)


def _run(engine: Any, flow: Workflow, question: Question, reuse: ReuseMode, tenant: TenantId) -> RunResult:
    return run(engine, flow, {QUESTION: question.text}, reuse=reuse, tenant=tenant, on_tool_error="text")


@dataclass(frozen=True)
class DenseAnswers:
    """A question with its answers by dense prefill."""

    number: int
    question: Question
    run_id: RunId
    dense: RunResult
    results: list[ProbeResult]
    judge: JudgeQuestion | None
    choice: str | None
    """The judge's, by dense prefill."""


@dataclass(frozen=True)
class JudgeQuestion:
    """The candidates for the last agent's choice, and the request that reads them in a shuffled order."""

    candidates: Mapping[GenerateRequest, Tokens]
    request: GenerateRequest
    run_id: RunId


def _reading(request: GenerateRequest, candidates: Mapping[GenerateRequest, Tokens]) -> GenerateRequest:
    """Return `request` with every producer's candidate in the place of its answer."""
    answers = {producer.produces: answer for producer, answer in candidates.items()}
    segments = tuple(
        replace(segment, tokens=answers[segment.sample]) if segment.is_answer and segment.sample in answers else segment
        for segment in request.segments
    )
    return replace(request, segments=segments)
