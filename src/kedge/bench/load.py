"""Teams of agents under load: closed-loop clients for a fixed time, one reuse mode after the other.

All modes answer the same questions. Each combination of case, number of clients and mode has a fresh engine around the
same weights. The clock starts with the first request, so a mode's learning and proof count as measured time. Only the
process is warmed up, by one team without reuse before the first measurement. Engines of the case `warm` start from the
saved state of a run before.

Every client runs its team again and again, each time with a new question that depends on its number alone. Each call
counts as its share of a team, and one under way at the end of the window by the share of its time within it: whole runs
alone would lose as many as there are clients. The measurement waits for such calls for as long as the window was; no
new ones are accepted. Calls of failed runs do not count.
"""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from kedge.bench.flows import percentile
from kedge.bench.shapes import SHAPES, Loaded, load_model, random_runner
from kedge.engine.base import Engine
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.common.watched import WatchedEngine, WatchedStream, Watcher
from kedge.engine.local.engine import LocalEngine
from kedge.errors import ConfigError, EngineClosed, KedgeError
from kedge.runner.run import run
from kedge.settings import EngineSettings
from kedge.settings.loading import merge
from kedge.types import Completion, FinishReason, GenerateRequest, RequestId, ReuseMode, RunId, TenantId
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.topologies import Wording, connect, fully_connected
from kedge.workloads import reading, real
from kedge.workloads.base import QUESTION, Team

LONG = "-long"
COLD, WARM = "cold", "warm"
TAUGHT = 30
"""Questions that a warm team has answered before the clock starts"""
PREFIX, LEAD, TAIL = 512, 24, 16
"""Tokens of a random agent's own prefix, before each text that it reads, and behind all of them."""
AGENTS = 5
Questions = Callable[[str], Iterator[str]]
"""Client name -> its endless questions, the same on every call."""


@dataclass(frozen=True)
class LoadTeam:
    """A workflow with its questions, and the thresholds that it needs."""

    flow: Workflow
    questions: Questions
    anchors: Mapping[str, Any] = field(default_factory=dict)
    guard: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TeamSizes:
    """Tokens of a random team's question and of each of its answers."""

    question: int
    answer: int


USUAL, LONG_QUESTION = TeamSizes(500, 64), TeamSizes(1000, 32)
"""The sizes of the cases with a random model."""
OPEN = {"max_error": 1e9, "weak_error": 1e9}
"""Thresholds that share everything: random weights have no meaning to keep. The criterion's work stays in the clock."""
OPEN_GUARD = {"fidelity": math.inf, "max_changed": 1.0}
"""Thresholds of a guard that finds nothing changed, for the same reason. Its checks stay in the clock."""


def case_of(case: str, settings: LoadSettings) -> tuple[Loaded, LoadTeam]:
    """Return the model and the team of a case. Raises `ConfigError` for an unknown size."""
    if settings.model is not None:
        asked = reading.LONG if case.endswith(LONG) else reading.READING
        return load_model(settings.model, settings.engine()), reading_team(settings.seed, asked)
    (runner, _), vocab = random_runner(settings.model_size, settings.device), SHAPES[settings.model_size]["vocab_size"]
    runner.eos_token_ids = frozenset()
    sizes = LONG_QUESTION if case.endswith(LONG) else USUAL
    return (runner, word_tokenizer(vocab)), random_team(vocab, sizes, settings.seed)


def reading_team(seed: int, team: Team = reading.READING) -> LoadTeam:
    """Return a team that reads, with questions about paragraphs of XQuAD, in another order for each client."""
    workload, rows = real.load(team.name, None, seed)
    texts = [question.text for question in rows]
    return LoadTeam(workload.workflow(), drawn(seed, lambda rng: rng.sample(texts, len(texts))))


def random_team(vocab: int, sizes: TeamSizes, seed: int) -> LoadTeam:
    """Return five agents for random weights, whose questions and answers have exactly the given sizes."""
    questions = drawn(seed, lambda rng: [_text(rng, vocab, sizes.question)])
    return LoadTeam(random_flow(vocab, sizes.answer), questions, OPEN, OPEN_GUARD)


def drawn(seed: int, some: Callable[[Random], list[str]]) -> Questions:
    """Return the questions that `some` makes, again and again, of random numbers, which are each client's own."""

    def questions(client: str) -> Iterator[str]:
        rng = Random(f"load/{seed}/{client}")
        while True:
            yield from some(rng)

    return questions


def word_tokenizer(vocab: int) -> HFTokenizer:
    """Return a tokenizer of `vocab` words: one token per word, 0 for an unknown word."""
    raw = Tokenizer(WordLevel({f"w{token}": token for token in range(vocab)}, unk_token="w0"))
    raw.pre_tokenizer = WhitespaceSplit()
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=raw))


def random_flow(vocab: int, answer: int) -> Workflow:
    """Return a workflow in which every agent reads the question and all answers before its own."""
    rng = Random("load/templates")
    base_context = _text(rng, vocab, LEAD)
    wording = Wording(
        header=f"{base_context} {{user_question}} ",
        intro="",
        speaker=f" {_text(rng, vocab, LEAD - 1)} {{title}} ",
        footer=f" {_text(rng, vocab, TAIL - 1)} {{title}}",
    )
    agents = [
        Agent(f"agent-{i}", _text(rng, vocab, PREFIX - LEAD), "", title=_text(rng, vocab, 1), max_tokens=answer)
        for i in range(AGENTS)
    ]
    return connect("load", agents, fully_connected(agents), wording)


def _text(rng: Random, vocab: int, size: int) -> str:
    return " ".join(f"w{rng.randrange(vocab)}" for _ in range(size))


now: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A successful call with its run and its times."""

    run: RunId
    began: float
    ended: float
    completion: Completion


class CallLog(Watcher):
    """A watcher that records every successful call."""

    def __init__(self, calls: list[TimedCall]) -> None:
        self._calls = calls
        self._begun: dict[RequestId, tuple[RunId, float]] = {}

    def submitted(self, request: GenerateRequest) -> None:
        self._begun[request.request_id] = request.run, now()

    def ended(self, tenant: TenantId, request_id: RequestId, completion: Completion | None = None) -> None:  # noqa: ARG002
        begun = self._begun.pop(request_id, None)
        if begun and completion and completion.finish_reason is not FinishReason.CANCELLED:
            self._calls.append(TimedCall(*begun, now(), completion))


class WindowEngine(WatchedEngine):
    """An `Engine` in front of another that records every successful call.

    It accepts no calls after `deadline`; those under way go on.
    """

    def __init__(self, engine: Engine, deadline: float, calls: list[TimedCall]) -> None:
        super().__init__(engine, CallLog(calls))
        self._deadline = deadline

    def submit(self, request: GenerateRequest) -> WatchedStream:
        if now() >= self._deadline:
            raise EngineClosed("engine", request.request_id, "the window has ended")
        return super().submit(request)


@dataclass(frozen=True, slots=True)
class TeamRun:
    """A finished run: its end, its duration and, if it failed, the error."""

    id: RunId
    ended: float
    seconds: float
    error: str | None = None


@dataclass
class LoadRecord:
    """The observations of one combination. Times are on the clock of `now`."""

    began: float
    seconds: float
    calls_per_run: int
    calls: list[TimedCall] = field(default_factory=list)
    runs: list[TeamRun] = field(default_factory=list)
    guard: Mapping[str, Any] = field(default_factory=dict)
    """The guard's figures at the end."""
    cpu_seconds: float = 0.0
    """Of this process within the window: fewer where others had its cores."""

    @property
    def deadline(self) -> float:
        """The end of the window."""
        return self.began + self.seconds

    def as_json(self) -> dict[str, Any]:
        """Return the figures of the calls and runs within the window; None where there are none."""
        runs = [one for one in self.runs if one.ended <= self.deadline]
        failed = Counter(one.error for one in runs if one.error)
        spoiled = {one.id for one in runs if one.error}
        good = [one for one in self.calls if one.run not in spoiled]
        calls = [one for one in good if one.ended <= self.deadline]
        ttft = [one.completion.ttft_ms for one in calls]
        latency = [one.seconds for one in runs if not one.error]
        receipts = [one.completion.receipt for one in calls]
        tokens = sum(receipt.prompt_tokens for receipt in receipts)
        sources = {name: sum(getattr(one, name) for one in receipts) for name in ("translated", "exact", "computed")}
        return {
            "teams_per_min": round(self._teams_per_min(good, 0.0), 3),
            "teams_per_min_last_third": round(self._teams_per_min(good, 2 / 3), 3),
            "ttft_p50_ms": percentile(ttft, 0.5, 2),
            "ttft_p90_ms": percentile(ttft, 0.9, 2),
            "ttft_p99_ms": percentile(ttft, 0.99, 2),
            "latency_p50_s": percentile(latency, 0.5, 4),
            "latency_p99_s": percentile(latency, 0.99, 4),
            **{f"{name}_share": round(some / tokens, 4) if tokens else None for name, some in sources.items()},
            "cpu_share": round(self.cpu_seconds / self.seconds, 3),
            "calls": len(calls),
            "runs": len(latency),
            "errors": failed.total(),
            "errors_by_kind": dict(failed),
            **self._fidelity([one.completion for one in good]),
        }

    def _fidelity(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """Return the mean KL of answers as measured on their agent's rung (0 by dense prefill), the tokens that checks
        computed over those that the answers took, and what is proved of each agent.
        """
        noted = [(one.receipt.fidelity.mean, one.receipt.translated) for one in answers if one.receipt.fidelity]
        took, checked = sum(one.receipt.computed + len(one.tokens) for one in answers), self.guard.get("checked_tokens")
        return {
            "kl": round(fmean(kl if kl and moved else 0.0 for kl, moved in noted), 6) if noted else None,
            "proof_share": round(checked / took, 4) if took and checked is not None else None,
            "proofs": {one["agent"]: one["fidelity"] for one in self.guard.get("agents", ())},
        }

    def _teams_per_min(self, calls: list[TimedCall], start: float) -> float:
        """Return the rate from a share `start` of the window to its end; a call counts by its time within it."""
        first, last = self.began + start * self.seconds, self.deadline
        done = sum(max(0.0, min(one.ended, last) - max(one.began, first)) / (one.ended - one.began) for one in calls)
        return 60 * done / self.calls_per_run / (last - first)


def warm(engine: Engine, team: LoadTeam) -> None:
    """Run the team once without reuse, for the first use of kernels, memory and tools."""
    inputs = {QUESTION: next(team.questions("warm-up"))}
    run(engine, team.flow, inputs, reuse=ReuseMode.OFF, on_tool_error="text")


def teach(engine: LocalEngine, team: LoadTeam, questions: int, folder: Path) -> None:
    """Let the team answer before the clock, one question after the other, and save what is learned and proved."""
    for question in islice(team.questions("taught"), questions):
        run(engine, team.flow, {QUESTION: question}, on_tool_error="text")
        engine.wait_idle()
    engine.save(folder)


def drive(
    opened: AbstractContextManager[Engine], team: LoadTeam, seconds: float, clients: int, mode: ReuseMode
) -> LoadRecord:
    """Let so many clients run on an engine until the window ends. The engine is closed in any case.

    A client runs the team with one question after the other; failed runs are counted.
    """

    def loop(client: str) -> None:
        for number, question in enumerate(team.questions(client)):
            began, run_id, failed = now(), RunId(f"{client}-{number}"), None
            if began >= record.deadline:
                return
            try:
                run(engine, team.flow, {QUESTION: question}, reuse=mode, run_id=run_id, on_tool_error="text")
            except KedgeError as error:
                failed = type(error)
            record.runs.append(TeamRun(run_id, now(), now() - began, failed.__name__ if failed else None))
            if failed and issubclass(failed, EngineClosed):
                return

    with ThreadPoolExecutor(clients, "kedge-client") as pool:
        with opened as inner:
            record, began = LoadRecord(now(), seconds, len(team.flow.steps)), time.process_time()
            engine = WindowEngine(inner, record.deadline, record.calls)
            loops = [pool.submit(loop, f"client-{i}") for i in range(clients)]
            wait(loops, timeout=seconds)
            record.cpu_seconds = time.process_time() - began
            wait(loops, timeout=record.deadline - now() + seconds)
            with suppress(EngineClosed):
                record.guard = inner.inspect().get("guard") or {}
        for one in loops:
            one.result()
    return record


Key = tuple[str, int, ReuseMode]
"""A case, the number of clients, and their mode."""


@dataclass(frozen=True)
class LoadSettings:
    """What is measured: every mode with every number of clients in every case."""

    cases: tuple[str, ...] = ()
    """None: all that there are"""
    clients: tuple[int, ...] = (1, 8, 32)
    modes: tuple[ReuseMode, ...] = tuple(ReuseMode)
    seconds: float = 120.0
    """Window of each combination of case, clients and mode."""
    kv_memory: str | None = None
    """Size of the device tier; None is the engine's default, here and below."""
    anchor_memory: str | None = None
    """Size of all pools of anchors, and of all base KV."""
    model_size: str = "32m"
    """Size of the random model."""
    model: Path | None = None
    """A real model, in place of a random one: its cases are a cold and a warm start."""
    dtype: str = "auto"
    """Of the real model."""
    device: str = "auto"
    seed: int = 0

    @property
    def case_names(self) -> tuple[str, ...]:
        """The cases there are."""
        real = (COLD, WARM, f"{COLD}{LONG}", f"{WARM}{LONG}")
        return real if self.model else (self.model_size, f"{self.model_size}{LONG}")

    def engine(self, team: LoadTeam | None = None) -> EngineSettings:
        """Return the settings of a team's engine. Raises `ConfigError`."""
        bounds = dict.fromkeys(("max_bytes", "max_base_bytes"), self.anchor_memory)
        anchors, guard = (team.anchors, team.guard) if team else ({}, {})
        settings = {"device": self.device, "dtype": self.dtype, "kv_memory": self.kv_memory, "guard": guard}
        return EngineSettings.model_validate(merge(settings, {"anchors": {**anchors, **bounds}}))


def measure(
    settings: LoadSettings, progress: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Yield the figures of each combination as soon as they are there. Raises `ConfigError`."""
    cases = settings.cases or settings.case_names
    for case in cases:
        if case not in settings.case_names:
            raise ConfigError("case", case, f"must be one of {', '.join(settings.case_names)}")
    settings.engine()
    for case in cases:
        progress(f"{case}: loading and warming up")
        loaded, team = case_of(case, settings)
        taught = TAUGHT if case.startswith(WARM) else 0
        with TemporaryDirectory() as folder:
            with LocalEngine.from_runner(*loaded, settings.engine(team)) as engine:
                warm(engine, team)
                teach(engine, team, taught, Path(folder))
            for clients, mode in product(settings.clients, settings.modes):
                progress(f"{case}: {clients} clients, {mode}")
                loaded[0].graphs = None  # CUDA graphs keep the storage of theirs
                gc.collect()  # earlier engines are reference cycles
                state = Path(folder) if taught else None
                yield (case, clients, mode), load(loaded, team, settings, clients, mode, state).as_json()


def load(
    loaded: Loaded, team: LoadTeam, settings: LoadSettings, clients: int, mode: ReuseMode, state: Path | None = None
) -> LoadRecord:
    """Measure one combination on an engine of its own, which starts from `state` if there is one."""
    engine = LocalEngine.from_runner(*loaded, settings.engine(team))
    if state:
        engine.load(state)
    return drive(engine, team, settings.seconds, clients, mode)
