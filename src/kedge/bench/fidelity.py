"""How near to dense prefill answers stay: the KL of every method beside that of rounded KV, on the same prompts.

A team answers each question by dense prefill. Then every method serves the same prompts, forced to the same answers,
and the distributions of the answers' tokens are compared. What production accepts is the yardstick: KV in fp8. Only
readers count, the agents behind the first: what the first one reads nobody has computed before it.

Questions are independent: methods that learn do so from others before, and from none that counts. So they are served
side by side, but for the first few, whose times to the first token count.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from kedge.bench.probe import SERVED, Method, ProbedRequest, ProbeResult, Recorder, force
from kedge.bench.shapes import Loaded, load_model, to_compare
from kedge.engine.local.build import on_scratch_thread
from kedge.engine.local.model.probe import ProbedSequence
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sequence import Work, flatten
from kedge.errors import ConfigError, TranslationRefused
from kedge.guard import EVERYTHING, GuardOrders
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.guard.fidelity import FAR
from kedge.runner.run import run
from kedge.types import Namespace, ReuseMode, RunId, RunKey, TenantId, Tokens, new_request_id
from kedge.workflow.graph import Workflow

TENANT = TenantId("fidelity")
DENSELY = GuardOrders(withheld=frozenset((EVERYTHING,)))
"""Orders for a prompt that is computed, whatever is known of it, and learned from"""
Note = Callable[[str], None]


def _by_token(most: int, kv: Tensor) -> Tensor:
    """Round to whole numbers up to `most`, scaled by the largest element of each token and head."""
    scale = kv.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most
    return (kv / scale).round() * scale


def _as_float8(dtype: torch.dtype, kv: Tensor) -> Tensor:
    """Round to a format of 8 bits with scale 1, as vLLM does by default; what is beyond its range becomes its end."""
    end = torch.finfo(dtype).max
    return kv.clamp(-end, end).to(dtype).to(kv.dtype)


YARDSTICKS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda kv: kv.bfloat16().to(kv.dtype),
    "int8": partial(_by_token, 127),
    "fp8 e4m3": partial(_as_float8, torch.float8_e4m3fn),
    "fp8 e5m2": partial(_as_float8, torch.float8_e5m2),
    "int4": partial(_by_token, 7),
}
"""Roundings of KV, keys rotated, each [..., head_dim]: what serving systems store to save memory"""


@dataclass(frozen=True)
class FidelitySettings:
    """What is measured, and on what."""

    model: Path | None = None
    """None: the bundled one, which says nothing about quality"""
    questions: int = 50
    """Questions that count"""
    taught: int = 10
    """Questions before them, which methods with anchors learn from"""
    tokens: int = 24
    """First tokens of each answer, which are compared"""
    timed: int = 5
    """First questions that are served alone, for their times"""
    at_once: int = 8
    """Questions side by side after these"""
    cold: int = 10
    """First questions of a method that proves what it serves, without which its figures are given too"""
    engine: Mapping[str, Any] = field(default_factory=lambda: {"kv_memory": 512 << 20})
    """Settings of all engines, of which there is one for each method: little memory will do for so few requests"""


@dataclass(frozen=True)
class Seen:
    """One answer, forced to that of dense prefill, compared with it."""

    question: int
    kl: float
    """Mean KL(dense ‖ other) in nats a token"""
    top1: float
    """Share of tokens at which both have the same argmax"""
    computed: int = 0
    translated: int = 0
    prompt: int = 0
    """Prompt tokens: those that ran through the model, those with translated KV, and all"""

    @classmethod
    def of(cls, question: int, dense: Tensor, other: Tensor, **tokens: int) -> Self:
        """Compare the logits [rows, vocab] of one answer."""
        rows = min(len(dense), len(other))
        dense, other = dense[:rows].double(), other[:rows].double()
        log_p, log_q = dense.log_softmax(1), other.log_softmax(1)
        kl, same = (log_p.exp() * (log_p - log_q)).sum(1).mean(), dense.argmax(1) == other.argmax(1)
        return cls(question, float(kl), float(same.double().mean()), **tokens)


def summary(seen: Sequence[Seen]) -> dict[str, Any]:
    """Return means over answers, with 95 % intervals of KL, agreement, and answers without a changed token: by
    bootstrap over questions, since what one of them shares makes its answers alike.
    """
    by_question: dict[int, list[Seen]] = {}
    for one in seen:
        by_question.setdefault(one.question, []).append(one)
    means = np.array(
        [
            [fmean(one.kl for one in some), fmean(one.top1 for one in some), fmean(one.top1 == 1 for one in some)]
            for some in by_question.values()
        ]
    )
    draws = np.random.default_rng(0).integers(len(means), size=(2000, len(means)))
    low, high = np.quantile(means[draws].mean(1), (0.025, 0.975), axis=0)
    prompt = sum(one.prompt for one in seen)
    names = ("kl", "top1", "same")
    return {
        **dict(zip(names, means.mean(0).tolist(), strict=True)),
        "computed": sum(one.computed for one in seen) / prompt if prompt else None,
        "translated": sum(one.translated for one in seen) / prompt if prompt else None,
        "questions": len(means),
        "ci95": {name: [float(low[i]), float(high[i])] for i, name in enumerate(names)},
    }


@dataclass(frozen=True)
class Asked:
    """A question as dense prefill answers it: one result for each agent, in speaking order."""

    number: int
    run: RunId
    results: tuple[ProbeResult, ...]

    def answer(self, agent: int) -> Tokens:
        """Return what an agent's requests are forced to: its answer, or of an empty one the token that ended it."""
        one = self.results[agent]
        return one.completion.tokens or (int(one.logits[0].argmax()),)


class MethodServer:
    """One method's engine. It is taught, and then serves questions from which it learns nothing."""

    def __init__(self, method: Method, loaded: Loaded, settings: FidelitySettings) -> None:
        self.method = method
        self.engine = method.open(loaded, **settings.engine)
        self._rows = settings.tokens
        self.seen: list[Seen] = []
        self.ttft_ms: list[float] = []
        self.cold = settings.cold

    def teach(self, asked: Sequence[Asked]) -> None:
        """Prefill questions densely and learn from them, agent by agent. A method that learns nothing gets the last one
        only, which leaves the KV of its templates; one that proves what it serves gets none.
        """
        if self.method.guard is not None:
            return
        for one in asked if self.method.learns else asked[-1:]:
            for _ in self._forced([one], DENSELY):
                self.engine.wait_idle()

    def ask(self, asked: Sequence[Asked], *, timed: bool) -> None:
        """Serve questions side by side, each agent's prompts together, and compare the readers' answers. A method that
        proves what it serves gets them one after the other, learns from each, and has its times from all.
        """
        proves = self.method.guard is not None
        for some in [[one] for one in asked] if proves else [asked]:
            for agent, results in enumerate(self._forced(some, GuardOrders(held_out=not proves))):
                if agent and (timed or proves):
                    self.ttft_ms += [one.completion.ttft_ms for one in results]
                if agent:
                    on_scratch_thread(partial(self._compare, some, agent, results))
            self.engine.wait_idle()

    def _forced(self, asked: Sequence[Asked], orders: GuardOrders) -> Iterator[list[ProbeResult]]:
        """Yield the results of one agent after the other: an answer's KV is what its own decoding leaves behind."""
        for agent in range(len(asked[0].results)):
            pending = [self._begin(one, agent, orders) for one in asked]
            yield [one.result() for one in pending]
        for one in asked:
            self.engine.end_run(RunKey(Namespace(TENANT), "", one.run))

    def _begin(self, asked: Asked, agent: int, orders: GuardOrders) -> ProbedRequest:
        changes: dict[str, Any] = {"reuse": self.method.reuse, "guard": orders, "tenant": TENANT, "run": asked.run}
        request = replace(asked.results[agent].request, request_id=new_request_id(), **changes)
        return force(self.engine, request, asked.answer(agent), self._rows)

    def _compare(self, asked: Sequence[Asked], agent: int, results: Sequence[ProbeResult]) -> None:
        for one, result in zip(asked, results, strict=True):
            receipt = result.completion.receipt
            tokens = {"computed": receipt.computed, "translated": receipt.translated, "prompt": receipt.prompt_tokens}
            self.seen.append(Seen.of(one.number, one.results[agent].logits, result.logits, **tokens))

    def as_json(self) -> dict[str, Any]:
        """Return the method's figures."""
        figures = {**summary(self.seen), "ttft_ms": median(self.ttft_ms) if self.ttft_ms else None}
        if self.method.guard is None:
            return figures
        guard: Any = self.engine.inspect()["guard"]
        agents = {one["agent"]: one["fidelity"] for one in guard["agents"]}
        later = [one for one in self.seen if one.question >= self.cold]
        far = fmean(one.kl > FAR for one in self.seen)
        return {**figures, "far": far, "later": summary(later) if later else None, "proofs": agents}


class DenseTeam:
    """Dense prefill of a team's questions, and the yardsticks on the KV that it leaves."""

    def __init__(self, flow: Workflow, loaded: Loaded, settings: FidelitySettings) -> None:
        self._runner, self._flow = loaded[0], flow.shortened(settings.tokens)
        self.engine = SERVED["dense"].open(loaded, **settings.engine)
        self._rows = settings.tokens
        self.seen: dict[str, list[Seen]] = {name: [] for name in YARDSTICKS}
        self.ttft_ms: list[float] = []

    def answer(self, numbered: tuple[int, Mapping[str, str]], *, kv: bool = True) -> Asked:
        """Let the team answer a question, the inputs of a run."""
        number, inputs = numbered
        recorder = Recorder(self.engine, self._rows, kv=kv)
        run(recorder, self._flow, inputs, reuse=ReuseMode.OFF, tenant=TENANT, on_tool_error="text")
        results = {one.request.agent: one.result() for one in recorder.pending}
        return Asked(number, RunId(f"question-{number}"), tuple(results[agent] for agent in self._flow.order))

    def measure_yardsticks(self, asked: Iterable[Asked]) -> None:
        """Compare what the readers' answers are over rounded KV, and drop the KV."""
        for one in asked:
            for agent, result in enumerate(one.results):
                if agent:
                    for name, logits in over_rounded(self._runner, result, one.answer(agent)).items():
                        self.seen[name].append(Seen.of(one.number, result.logits, logits))


@torch.inference_mode()
def over_rounded(
    runner: ModelRunner,
    dense: ProbeResult,
    answer: Tokens,
    roundings: Mapping[str, Callable[[Tensor], Tensor]] = YARDSTICKS,
) -> dict[str, Tensor]:
    """Return the logits [rows, vocab] of a forced answer over the prompt's KV in each rounding: one pass for all.

    The prompt's last token is computed again, as its logits are those of the answer's first.
    """
    assert dense.kv is not None
    prompt = dense.request.prompt_tokens
    tokens = [*dense.request.tokens, *answer]
    storage = PagedStorage(runner.spec, len(tokens) * len(roundings), 1, runner.device, runner.rotary)
    work = []
    for number, rounding in enumerate(roundings.values()):
        start = number * len(tokens)
        work.append(Work(ProbedSequence.at(tokens, start), [*range(prompt - 1, len(tokens) - 1)]))
        storage.write(SlotTable(torch.arange(start, start + prompt)), 0, dense.kv, None)
        for pool in (storage.keys, storage.values):
            pool[:, start : start + prompt] = rounding(pool[:, start : start + prompt])
    logits = runner.forward(flatten(work, storage)).cpu()
    return dict(zip(roundings, logits.split(len(answer)), strict=True))


def measure(
    flow: Workflow,
    questions: Sequence[Mapping[str, str]],
    methods: Mapping[str, Method],
    settings: FidelitySettings,
    note: Note = lambda _: None,
) -> dict[str, Any]:
    """Return the figures of dense prefill, of all yardsticks and of all methods, as plain data. `questions` are inputs.

    Raises `ConfigError` for too few of them or several turns, `TranslationRefused` where no KV can be translated.
    """
    if flow.turns > 1:
        raise ConfigError("turns", flow.turns, "each agent may be called once")
    lessons = settings.taught
    if len(questions) < lessons + settings.questions:
        why = f"with those learned from before it takes {lessons + settings.questions}, and there are {len(questions)}"
        raise ConfigError("questions", settings.questions, why)
    note("loading the model")
    loaded = load_model(settings.model, to_compare(**settings.engine))
    if loaded[0].refusal:
        raise TranslationRefused("model", str(settings.model), loaded[0].refusal)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(settings.at_once, "kedge-fidelity"))
        team = DenseTeam(flow, loaded, settings)
        stack.enter_context(team.engine)
        served = {name: MethodServer(method, loaded, settings) for name, method in methods.items()}
        for one in served.values():
            stack.enter_context(one.engine)
        note(f"{lessons} questions to learn from")
        numbered = list(enumerate(questions[: lessons + settings.questions], -lessons))
        if lessons:
            asked = list(pool.map(partial(team.answer, kv=False), numbered[:lessons]))
            for name, one in served.items():
                note(f"{name} learns")
                one.teach(asked)
        counted = numbered[lessons:]
        starts = range(settings.timed, len(counted), settings.at_once)
        together = [counted[at : at + settings.at_once] for at in starts]
        for some in (*([one] for one in counted[: settings.timed]), *together):
            timed = some[0][0] < settings.timed
            asked = list(pool.map(team.answer, some))
            if timed:
                team.ttft_ms += [one.completion.ttft_ms for one in asked[0].results[1:]]
            on_scratch_thread(partial(team.measure_yardsticks, asked))
            asked = [replace(one, results=tuple(replace(of, kv=None) for of in one.results)) for one in asked]
            for one in served.values():
                one.ask(asked, timed=timed)
            getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # glibc would keep gigabytes of freed logits
            note(f"{some[-1][0] + 1} of {settings.questions} questions")
        return {
            "dense": {"ttft_ms": median(team.ttft_ms) if team.ttft_ms else None},
            "yardsticks": {name: summary(seen) for name, seen in team.seen.items()},
            "methods": {name: one.as_json() for name, one in served.items()},
        }
