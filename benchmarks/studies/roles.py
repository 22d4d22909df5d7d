"""Conflicting roles: whether a text's KV from one role's prompt serves a role with the opposite answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from statistics import fmean
from typing import Self

from benchmarks.lab import methods as lab
from benchmarks.studies.study import Note, Plot, Row, Study, StudySettings
from benchmarks.workloads.roles import TASKS, Role, RoleTask, task_named
from kedge.bench.fidelity import Seen, summary
from kedge.bench.probe import Method, Probe, ProbeResult, compare_logits, method_named
from kedge.bench.shapes import Loaded, load_model, to_compare
from kedge.guard import EVERYTHING, GuardMode, GuardOrders
from kedge.reuse.guard.fidelity import RUNGS
from kedge.types import (
    AgentId,
    Completion,
    GenerateRequest,
    Namespace,
    RunId,
    RunKey,
    SampleId,
    SamplingParams,
    TenantId,
    Tokens,
    ValueKind,
    WorkflowId,
)
from kedge.workflow.template import Value, compile_agents
from kedge.workloads.base import QUESTION, Question

ALL = "all"
METHODS = ("kedge", "token", "epic", "rotation")


@dataclass(frozen=True)
class Handover:
    """One question in one direction, next to the second role's dense answer."""

    dense: bool
    right: bool
    kl: float
    same: bool
    computed: float
    translated: float


Dense = Mapping[Role, tuple[Completion, ProbeResult]]
"""Role -> its answer by dense prefill, and the same answer forced"""


class RoleServer:
    """One method's engine, which serves single roles of a task. A context manager."""

    def __init__(self, method: Method, loaded: Loaded, task: RoleTask) -> None:
        self.probe, self._reuse, self._task = Probe(method.components), method.reuse, task
        self.engine = method.open(loaded, components=self.probe.components)
        self._prompts = {}
        for first, second in product(task.roles, repeat=2):
            flow = task.workflow(dict.fromkeys((first, second)))  # a text's base KV is computed behind the first
            agents = (method.team(flow) if method.team else flow).agents
            self._prompts[first, second] = compile_agents(agents, self.engine.tokenizer)

    def ask(self, pair: tuple[Role, Role], at: int, question: Question) -> Completion:
        """Return the answer of the first or second role of a pair, constrained by its grammar. Every pair is a tenant
        of its own, so that it finds no KV that another one has left.
        """
        grammar = self._task.grammar(AgentId(pair[at].name), question)
        return self.engine.submit(self._request(pair, at, question, SamplingParams(32, grammar=grammar))).result()

    def force(
        self, pair: tuple[Role, Role], at: int, question: Question, answer: Tokens, guard: GuardOrders
    ) -> ProbeResult:
        """Return the same request's answer and logits where it is forced to `answer`."""
        request = replace(self._request(pair, at, question, SamplingParams(32)), guard=guard)
        return self.probe.submit(self.engine, request, answer).result()

    def _request(
        self, pair: tuple[Role, Role], at: int, question: Question, sampling: SamplingParams
    ) -> GenerateRequest:
        run, prompt = run_of(pair, question), self._prompts[pair][AgentId(pair[at].name)]
        text = Value(self.engine.tokenizer.encode(question.text, special=False), SampleId(ValueKind.INPUT, QUESTION))
        return GenerateRequest(
            prompt.fill(dict.fromkeys(prompt.placeholders, text)),
            sampling,
            self._reuse,
            tenant=run.namespace.tenant,
            workflow=WorkflowId(self._task.name),
            run=run.run_id,
            agent=prompt.agent,
            fixed=len(prompt.prefixes[0]),
        )

    def densely(self, question: Question) -> Dense:
        """Return both roles' answers, each alone."""
        found = {}
        for role in self._task.roles:
            answer = self.ask((role, role), 1, question)
            found[role] = answer, self.force((role, role), 1, question, answer.tokens, GuardOrders())
        return found

    def handovers(self, question: Question, dense: Dense) -> list[Handover]:
        """Serve a question in all four directions: the first role, then the second freely and, translated in the same
        way, forced to its dense answer.
        """
        found = []
        for first, second in product(self._task.roles, repeat=2):
            pair, (answer, forced) = (first, second), dense[second]
            self.ask(pair, 0, question)
            free = self.ask(pair, 1, question)
            other = self.force(pair, 1, question, answer.tokens, served_like(free))
            self.engine.end_run(run_of(pair, question))
            self.engine.wait_idle()
            receipt, right = free.receipt, partial(self._task.right, AgentId(second.name))
            found.append(
                Handover(
                    right(answer.text, question),
                    right(free.text, question),
                    compare_logits(forced.logits, other.logits)[0],
                    free.text == answer.text,
                    receipt.computed / receipt.prompt_tokens,
                    receipt.translated / receipt.prompt_tokens,
                )
            )
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()


def served_like(answer: Completion) -> GuardOrders:
    """Return the orders by which a prompt is translated once more as it was for `answer`, which a guard may have
    watched. Nothing is proved or learned by that.
    """
    if (known := answer.receipt.fidelity) is None:
        return GuardOrders()
    rung = next((number for number, one in enumerate(RUNGS) if one.name == known.rung), None)
    is_dense = rung is None or not answer.receipt.translated
    return GuardOrders(GuardMode.OFF, frozenset((EVERYTHING,) if is_dense else ()), rung=rung, held_out=True)


def run_of(pair: tuple[Role, Role], question: Question) -> RunKey:
    """Return the run in which a pair is asked a question."""
    return RunKey(Namespace(TenantId("-".join(role.name for role in pair))), "", RunId(question.text))


def measure_roles(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every task, method and direction; that of a role to itself is the control."""
    loaded = load_model(settings.model, to_compare())
    methods = {name: method_named(name, lab.METHODS) for name in settings.methods or METHODS}
    rows: list[Row] = []
    for task in TASKS.values() if settings.task == ALL else [task_named(settings.task)]:
        note(f"{task.name}, dense")
        asked = list(islice(task.questions(seed), settings.taught + settings.questions))
        with RoleServer(method_named("dense"), loaded, task) as dense:
            answers = [dense.densely(question) for question in asked]
        for name, method in methods.items():
            note(f"{task.name}, {name}")
            with RoleServer(method, loaded, task) as moved:
                learned = list(zip(asked, answers, strict=True))
                moved.probe.teaching = True
                for question, alone in learned[: settings.taught if method.learns else 0]:
                    moved.handovers(question, alone)
                moved.probe.teaching = False
                found = [moved.handovers(question, alone) for question, alone in learned[settings.taught :]]
            for at, (first, second) in enumerate(product(task.roles, repeat=2)):
                direction = f"{first.name}->{second.name}"
                about = {"task": task.name, "method": name, "direction": direction, "chance": task.chance}
                rows.append({**about, **_means([one[at] for one in found])})
    return rows


def _means(served: list[Handover]) -> Row:
    figures = summary([Seen(number, one.kl, float(one.right)) for number, one in enumerate(served)])
    (least, most), (low, high) = figures["ci95"]["top1"], figures["ci95"]["kl"]
    return {
        "accuracy_dense": fmean(one.dense for one in served),
        "accuracy": figures["top1"],
        "accuracy_low": least,
        "accuracy_high": most,
        "same_answer": fmean(one.same for one in served),
        "kl": figures["kl"],
        "kl_low": low,
        "kl_high": high,
        "computed": fmean(one.computed for one in served),
        "translated": fmean(one.translated for one in served),
    }


ROLES_STUDY = Study(
    "roles",
    "One text, two roles with opposite answers",
    "Not a table of KVCOMM. Public reports on Qwen3-4B, when a text's KV is moved from the other role's prompt: buyer "
    "and seller 81.8, 54.5 -> 12.7, 1.8 %, other tasks 97 -> 63 %, 80 -> 31 %.",
    measure_roles,
    Plot("direction", ("accuracy", "kl"), "method", of="task"),
    quick={"task": ALL, "questions": 2, "taught": 1, "methods": ("kedge",)},
    default={"task": ALL, "questions": 50, "taught": 10, "seeds": 1},
    notes=("a role to itself is the control: from its own earlier KV nothing may change.",),
)
