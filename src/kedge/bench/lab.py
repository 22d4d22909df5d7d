"""Every question answered by dense prefill and by other methods, on engines that share one model.

Per question and method, each in a tenant of its own so that none learns from another:

- forced: every agent reads what it reads with dense prefill and is forced to the answer that it gave there. The KV of
  an answer is what its own decoding left behind, so producers pass translated KV on, as in use.
- closed: the team answers by itself; everyone reads what the others said by the same method.
- judged: some of the answers are made wrong, then the last agent reads all of them in a shuffled order; what it chooses
  is compared with its choice from the same prompt by dense prefill.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

from kedge.bench.fidelity import compare, is_answer, shuffled
from kedge.bench.methods import Loaded, Method, load_model, method_named, open_engine
from kedge.bench.pairs import AnswerPair, ForcedPair, MethodRuns
from kedge.bench.probe import Probe, Recorder, Sight
from kedge.config import EngineConfig
from kedge.engine.run import RunResult, run
from kedge.types import GenerateRequest, ReuseMode, RunId, TenantId, Tokens, new_request_id
from kedge.workflow.graph import Workflow
from kedge.workloads.base import QUESTION, Question, Workload

FORCED, CLOSED, JUDGED = (TenantId(name) for name in ("forced", "closed", "judged"))
WRONG = 0.5
"""How often a candidate is made wrong before it is judged"""


@dataclass(frozen=True)
class LabSettings:
    """What is asked for. `anchors`, `planner` and `engine` are settings that win over the methods' own."""

    agents: int | None = None
    topology: str = "fully_connected"
    model: Path | None = None
    taught: int = 0
    """Questions that come first and do not count: every method prefills them densely and learns from them, so that all
    pools hold the same samples. 0: pools fill as they do in use"""
    taught_as: Callable[[Workflow], Workflow] = lambda flow: flow
    """What the team is while it is taught"""
    forced: bool = True
    kv: bool = True
    """Whether the KV of forced requests is compared"""
    closed: bool = True
    judged: bool = False
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
    """All methods on the same questions, next to dense prefill; the method `dense` is the ceiling of all measures.

    `on_question` is told the number of each question that is done. Raises `ConfigError` for an unknown method.
    """
    chosen = methods if isinstance(methods, Mapping) else {name: method_named(name) for name in methods}
    with Lab(workload, chosen, settings) as lab:
        asked = iter(questions)
        for question in islice(asked, settings.taught):
            lab.teach(question)
        for number, question in enumerate(asked):
            lab.ask(number, question)
            on_question(number)
    return lab.runs


class Bench:
    """One method's engine, and eyes for its requests."""

    def __init__(self, method: Method, loaded: Loaded, settings: LabSettings) -> None:
        self.probe, self.reuse = Probe(method.parts), method.reuse
        self.engine = open_engine(
            method, loaded, settings.anchors, settings.planner, self.probe.parts, **settings.engine
        )

    def look(
        self, request: GenerateRequest, tenant: TenantId, run_id: RunId, answer: Tokens = (), *, kv: bool = False
    ) -> Sight:
        """The request served in this method's mode, for another tenant and run; forced to `answer` if there is one."""
        moved = replace(request, request_id=new_request_id(), tenant=tenant, run=run_id, reuse=self.reuse)
        return self.probe.submit(self.engine, moved, answer, kv=kv).result()


class Lab:
    """One engine per method and one for dense prefill, on one model; only one of them works at a time."""

    def __init__(self, workload: Workload, methods: Mapping[str, Method], settings: LabSettings) -> None:
        self._workload, self._settings = workload, settings
        self._flow = workload.workflow(settings.agents, settings.topology)
        self._school = settings.taught_as(self._flow)
        self._stack = ExitStack()
        loaded = load_model(settings.model, EngineConfig(**settings.engine))
        self._dense = self._open(method_named("dense"), loaded)
        self._benches = {name: self._open(method, loaded) for name, method in methods.items()}
        self._asked = 0
        self.runs = {name: MethodRuns() for name in methods}

    def _open(self, method: Method, loaded: Loaded) -> Bench:
        bench = Bench(method, loaded, self._settings)
        self._stack.enter_context(bench.engine)
        return bench

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def teach(self, question: Question) -> None:
        """All methods learn from dense prefills of a question; nothing is counted."""
        for bench in self._benches.values():
            bench.probe.teaching = True
        self._serve(question, lambda _: MethodRuns(), 0, self._school)
        for bench in self._benches.values():
            bench.probe.teaching = False

    def ask(self, number: int, question: Question) -> None:
        """One question that counts."""
        self._serve(question, self.runs.__getitem__, number, self._flow)

    def _serve(self, question: Question, runs_of: Callable[[str], MethodRuns], number: int, flow: Workflow) -> None:
        self._asked += 1
        recorder = Recorder(self._dense.engine, self._dense.probe, kv=self._settings.kv and self._settings.forced)
        dense = _run(recorder, flow, question, ReuseMode.OFF, TenantId("dense"))
        sights = [pending.result() for pending in recorder.pending]
        judge = self._judge(sights, question) if self._settings.judged else None
        choice = self._choice(judge, self._dense) if judge else None
        for name, bench in self._benches.items():
            runs = runs_of(name)
            if self._settings.forced:
                runs.forced += self._force(bench, sights, number)
            if self._settings.closed:
                self._close_loop(bench, flow, question, dense, runs, number)
            if judge:
                runs.choices.append((choice, self._choice(judge, bench)))

    def _run_id(self) -> RunId:
        return RunId(f"question-{self._asked}")

    def _force(self, bench: Bench, sights: list[Sight], number: int) -> list[ForcedPair]:
        pairs = []
        for dense in sights:
            answer, kv = dense.completion.tokens, self._settings.kv
            other = bench.look(dense.request, FORCED, self._run_id(), answer, kv=kv)
            translated = other.completion.receipt.translated > 0
            pairs.append(ForcedPair(number, dense.request.agent, translated, compare(dense, other)))
        bench.engine.end_run(FORCED, self._run_id())
        bench.engine.wait_idle()
        return pairs

    def _close_loop(
        self, bench: Bench, flow: Workflow, question: Question, dense: RunResult, runs: MethodRuns, number: int
    ) -> None:
        # nothing is prepared ahead of a recorder's requests, so that all methods do the same work
        recorder = Recorder(bench.engine, bench.probe, kv=False)
        result = _run(recorder, flow, question, bench.reuse, CLOSED)
        for pending in recorder.pending:
            pending.result()
        right, final = self._workload.right, self._workload.final
        for ours, theirs in zip(dense.results, result.results, strict=True):
            rights = (right(one.agent, one.text, question) for one in (ours, theirs))
            runs.answers.append(AnswerPair(number, ours.agent, ours, theirs, *rights))
        runs.finals.append((final(dense.text), final(result.text)))
        bench.engine.wait_idle()

    def _judge(self, sights: list[Sight], question: Question) -> Judge:
        rng = random.Random(f"{self._settings.seed}/{question.text}")
        encode = self._dense.engine.tokenizer.encode
        last = next(s.request for s in sights if s.request.agent == self._flow.agents[-1].id)
        read = {segment.sample for segment in last.segments if is_answer(segment)}
        candidates = {}
        for sight in (s for s in sights if s.request.produces in read):
            said = sight.completion
            wrong = self._workload.corrupt(rng, said.text) if rng.random() < WRONG else said.text
            tokens = said.tokens if wrong == said.text else encode(wrong, special=False)
            candidates[sight.request] = tokens
        return Judge(candidates, shuffled(_reading(last, candidates), rng), self._run_id())

    def _choice(self, judge: Judge, bench: Bench) -> str | None:
        for producer, answer in judge.candidates.items():
            bench.look(producer, JUDGED, judge.run_id, answer)
        sight = bench.look(judge.request, JUDGED, judge.run_id)
        bench.engine.end_run(JUDGED, judge.run_id)
        bench.engine.wait_idle()
        return self._workload.final(sight.completion.text)


def _run(engine: Any, flow: Workflow, question: Question, reuse: ReuseMode, tenant: TenantId) -> RunResult:
    return run(engine, flow, {QUESTION: question.text}, reuse=reuse, tenant=tenant, on_tool_error="text")


@dataclass(frozen=True)
class Judge:
    """What the last agent is to choose from: who says what, and the request that reads it in another order."""

    candidates: Mapping[GenerateRequest, Tokens]
    request: GenerateRequest
    run_id: RunId


def _reading(request: GenerateRequest, candidates: Mapping[GenerateRequest, Tokens]) -> GenerateRequest:
    """`request` where every producer has given its candidate for an answer."""
    said = {producer.produces: answer for producer, answer in candidates.items()}
    segments = tuple(
        replace(segment, tokens=said[segment.sample]) if is_answer(segment) and segment.sample in said else segment
        for segment in request.segments
    )
    return replace(request, segments=segments)
