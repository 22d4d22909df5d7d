"""Every question answered by dense prefill and by other methods, on engines that share one model.

Each method's requests have tenants of their own, so that none learns from another:

- forced: every agent reads the prompt of dense prefill and is forced to the answer that it gave there. The KV of an
  answer is what its own decoding left behind, so producers pass translated KV on, as in use.
- closed: the team answers by itself; every agent reads the others' answers by the same method.
- judged: some of the answers are made wrong, then the last agent reads all of them in a shuffled order; its choice is
  compared with its choice from the same prompt by dense prefill.

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
from typing import Any, Self

from kedge.bench.lab.fidelity import compare, shuffled
from kedge.bench.lab.methods import Loaded, Method, fitting_model, load_model, method_named, open_engine
from kedge.bench.lab.pairs import AnswerPair, Choice, ForcedPair, MethodRuns
from kedge.bench.lab.probe import Probe, ProbeResult, Recorder
from kedge.runner.run import AgentResult, RunResult, run
from kedge.settings import EngineSettings
from kedge.types import AgentId, GenerateRequest, Namespace, ReuseMode, RunId, RunKey, TenantId, Tokens, new_request_id
from kedge.workflow.graph import Workflow
from kedge.workflow.template import CompiledAgent, Value, compile_agents
from kedge.workloads.base import QUESTION, Question, Workload

FORCED, CLOSED, JUDGED = (TenantId(name) for name in ("forced", "closed", "judged"))
WRONG = 0.5
"""Share of candidates that are made wrong before they are judged."""
AT_ONCE = 8
"""Questions that dense prefill answers side by side: it learns nothing, so their order has no effect."""


@dataclass(frozen=True)
class LabSettings:
    """The team, the measures and the seed. `anchors`, `planner` and `engine` override the methods' own settings."""

    agents: int | None = None
    topology: str = "fully_connected"
    model: Path | None = None
    """None: the bundled one that has learned the task and all methods' prompts, see `fitting_model`"""
    taught: int = 0
    """First questions, which do not count: methods with anchors prefill them densely and learn from them, so that all
    pools hold the same samples. With 0, pools fill as they do in use."""
    taught_as: Callable[[Workflow], Workflow] = lambda flow: flow
    """The team of the taught questions, made from the team of the others."""
    forced: bool = True
    kv: bool = True
    """Whether the KV of forced requests is compared."""
    closed: bool = True
    judged: bool = False
    timed: bool = False
    """Whether teams answer one at a time in closed loop by dense prefill too, so that all methods' times compare."""
    fresh: bool = False
    """Whether every question is asked, in closed loop, by a team of which nothing is known."""
    seed: int = 0
    anchors: Mapping[str, Any] = field(default_factory=dict)
    planner: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)


def run_pairs(
    workload: Workload,
    questions: Iterable[Question],
    methods: Sequence[str] | Mapping[str, Method],
    settings: LabSettings = LabSettings(),  # noqa: B008 (it is frozen)
    on_question: Callable[[int], None] = lambda _: None,
) -> dict[str, MethodRuns]:
    """Run all methods on the same questions, next to dense prefill; the method `dense` is the ceiling of all measures.

    `on_question` is called with the number of the last answered question. Raises `ConfigError` for an unknown method.
    """
    chosen = methods if isinstance(methods, Mapping) else {name: method_named(name) for name in methods}
    with Lab(workload, chosen, settings) as lab:
        rest = iter(questions)
        lab.teach(list(islice(rest, settings.taught)))
        numbered = enumerate(rest)
        while some := list(islice(numbered, AT_ONCE)):
            lab.ask(some)
            on_question(some[-1][0])
    return lab.runs


class MethodBench:
    """One method's engine with a probe on its requests, and the method's own wording of prompts."""

    def __init__(self, method: Method, loaded: Loaded, settings: LabSettings) -> None:
        self.probe, self.reuse, self.method = Probe(method.components), method.reuse, method
        self.engine = open_engine(
            method, loaded, settings.anchors, settings.planner, self.probe.components, **settings.engine
        )
        self._compiled: dict[AgentId, CompiledAgent] = {}

    def team(self, flow: Workflow) -> Workflow:
        """Return the team as this method words it, which `look` words requests by from now on."""
        if self.method.team is None:
            return flow
        team = self.method.team(flow)
        self._compiled = compile_agents(team.agents, self.engine.tokenizer)
        return team

    def look(
        self, request: GenerateRequest, tenant: TenantId, run_id: RunId, answer: Tokens = (), *, kv: bool = False
    ) -> ProbeResult:
        """Serve a request in this method's mode and wording, for another tenant and run; force it to `answer` if there
        is one.
        """
        moved = replace(request, request_id=new_request_id(), tenant=tenant, run=run_id, reuse=self.reuse)
        return self.probe.submit(self.engine, self._worded(moved), answer, kv=kv).result()

    def _worded(self, request: GenerateRequest) -> GenerateRequest:
        """Return a request with the same values in this method's prompt."""
        if request.agent not in self._compiled:
            return request
        compiled = self._compiled[request.agent]
        values = {one.name: Value(one.tokens, one.sample) for one in request.segments if one.is_placeholder}
        filled = {place: values.get(place.name, Value((), None)) for place in compiled.placeholders}
        return replace(request, segments=compiled.fill(filled), trail=compiled.trail)


class Lab:
    """One engine per method and one for dense prefill, on one model; only one of them works at a time."""

    def __init__(self, workload: Workload, methods: Mapping[str, Method], settings: LabSettings) -> None:
        self._workload, self._settings = workload, settings
        self._flow = workload.workflow(settings.agents, settings.topology)
        self._taught_flow = settings.taught_as(self._flow)
        self._stack = ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(AT_ONCE, "kedge-lab"))
        model = settings.model or fitting_model(workload.name, methods.values())
        loaded = load_model(model, EngineSettings(**settings.engine))
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

    def teach(self, questions: Sequence[Question]) -> None:
        """Let all methods learn from dense prefills of the questions; nothing is counted. A method without anchors is
        asked the last one only, which computes base KV of its templates.
        """
        for bench in self._benches.values():
            bench.probe.teaching = True
        learning = {name: bench for name, bench in self._benches.items() if bench.method.learns}
        for question in questions[:-1]:
            self._serve([(0, question)], self._taught_flow, learning)
        for question in questions[-1:]:
            self._serve([(0, question)], self._taught_flow, self._benches)
        for bench in self._benches.values():
            bench.probe.teaching = False

    def ask(self, questions: Sequence[tuple[int, Question]]) -> None:
        """Answer numbered questions that count, at most `AT_ONCE`."""
        for name, runs in self._serve(questions, self._flow, self._benches):
            self.runs[name].add(runs)

    def _serve(
        self, questions: Sequence[tuple[int, Question]], flow: Workflow, benches: Mapping[str, MethodBench]
    ) -> list[tuple[str, MethodRuns]]:
        asked = list(self._pool.map(partial(self._answer_densely, flow), questions))
        served = []
        for name, bench in benches.items():
            timed = self._settings.timed and bench.method.is_timed
            compare = partial(self._compare, bench, bench.team(flow))
            runs = list(self._each(bench, asked, timed=timed)(compare, asked))
            if self._settings.judged:
                choices = self._each(bench, asked, timed=False)(partial(self._judged, bench), asked)
                for one, choice in zip(runs, choices, strict=True):
                    one.choices.append(choice)
            served += [(name, one) for one in runs]
        return served

    def _each(self, bench: MethodBench, asked: Sequence[DenseAnswers], *, timed: bool) -> Callable[..., Iterable[Any]]:
        """Return the map over questions: in turn where times count, or what earlier questions leave behind."""
        first = asked[0].number == 0 and not self._settings.taught  # leaves base KV of templates
        follows = bench.reuse is not ReuseMode.OFF and (first or bench.method.keeps)
        return map if timed or follows else self._pool.map

    def _answer_densely(self, flow: Workflow, numbered: tuple[int, Question]) -> DenseAnswers:
        number, question = numbered
        run_id = RunId(f"question-{next(self._asked)}")
        recorder = Recorder(self._dense.engine, self._dense.probe, kv=self._settings.kv and self._settings.forced)
        dense = _run(recorder, flow, question, ReuseMode.OFF, TenantId("dense"))
        results = [pending.result() for pending in recorder.pending]
        judge = self._judge(results, question, run_id) if self._settings.judged else None
        choice = self._choice(judge, self._dense) if judge else None
        return DenseAnswers(number, question, run_id, dense, results, judge, choice)

    def _compare(self, bench: MethodBench, flow: Workflow, asked: DenseAnswers) -> MethodRuns:
        runs = MethodRuns()
        if self._settings.forced:
            runs.forced += self._force(bench, asked)
        if self._settings.closed:
            self._close_loop(bench, flow, asked, runs)
        return runs

    def _judged(self, bench: MethodBench, asked: DenseAnswers) -> Choice:
        assert asked.judge
        return asked.choice, self._choice(asked.judge, bench)

    def _force(self, bench: MethodBench, asked: DenseAnswers) -> list[ForcedPair]:
        pairs = []
        for dense in asked.results:
            answer, kv = dense.completion.tokens, self._settings.kv and bench.method.team is None
            other = bench.look(dense.request, FORCED, asked.run_id, answer, kv=kv)
            receipt = other.completion.receipt
            pairs.append(ForcedPair(asked.number, dense.request.agent, receipt, compare(dense, other)))
        bench.engine.end_run(RunKey(Namespace(FORCED), "", asked.run_id))
        bench.engine.wait_idle()
        return pairs

    def _close_loop(self, bench: MethodBench, flow: Workflow, asked: DenseAnswers, runs: MethodRuns) -> None:
        # nothing is prepared ahead of a recorder's requests, so that all methods do the same work
        recorder = Recorder(bench.engine, bench.probe, kv=False)
        tenant = TenantId(f"{CLOSED}-{asked.number}") if self._settings.fresh else CLOSED
        began = time.perf_counter()
        result = _run(recorder, flow, asked.question, bench.reuse, tenant)
        bench.engine.wait_idle()  # what a method learns or computes behind its answers is its cost, too
        took = time.perf_counter() - began
        if bench.method.is_timed and self._settings.timed:
            runs.teams.append(took)
            runs.ttfts += [one.completion.ttft_ms for one in result.results]
        for pending in recorder.pending:
            pending.result()
        runs.answers += map(partial(self._pair, asked), asked.dense.results, result.results)
        runs.finals.append((self._workload.final(asked.dense.text), self._workload.final(result.text)))

    def _pair(self, asked: DenseAnswers, dense: AgentResult, other: AgentResult) -> AnswerPair:
        right, decision = self._workload.right, self._workload.first_decision
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
