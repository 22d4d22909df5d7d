"""Further cases of `kedge bench vllm`: controls, the workflows of KVFlow's figures 6 and 8, sessions and accuracy.

Sessions: every client asks, waits for the answer, pauses, and asks again with all of its history, on stock vLLM, on
stock with its own CPU offloading, and with the plug-in; pauses are shortened recorded ones, and no hints are given.
Accuracy (KVCOMM, Table 1): each of the bundled model's teams, or a real model's, answers by itself, translated and
densely, on vLLM and on the embedded engine, whatever it costs and without a guard; pools fill from empty.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.vllm.team import team_case
from benchmarks.workflow.measure import QUICK, CaseSizes, many_flows, peer, unpressed
from kedge.bench.demo import AgentScore, Comparison, TeamScore, answer, team
from kedge.bench.fidelity import Seen, summary
from kedge.bench.flows import FlowWorkload, single_flow, with_given
from kedge.bench.probe import ChangingEngine, method_named
from kedge.bench.shapes import load_model, to_compare
from kedge.bench.vllm import (
    BLOCK,
    Case,
    Figures,
    KvRoom,
    Progress,
    VllmBenchSettings,
    VllmCall,
    VllmLane,
    measure_flow,
)
from kedge.engine.base import Engine
from kedge.engine.common.model_folder import model_path
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.integrations.vllm.engine.engine import VLLMEngine
from kedge.integrations.vllm.plugin.settings import SCHEDULER
from kedge.reuse.guard.comparison import TOP, divergence
from kedge.settings import EngineSettings
from kedge.types import Completion, ReuseMode, Tokens
from kedge.workloads import real
from kedge.workloads.miniature import TASKS

METHOD = "kedge"
"""The embedded engine's method: the default, as on vLLM."""
READING = ("reading",)
"""What a real model is asked"""
ARGUMENTS = {"max_model_len": 2048, "num_gpu_blocks_override": 512, "max_num_seqs": 64}
"""vLLM's: room for a team, and rows for the parts of a prompt that are computed side by side."""
COMPARED: Mapping[str, Any] = {"planner": {"by_cost": False}, "guard": {"mode": "off"}}
"""What vLLM has in common with the lab's engines."""
SETTLE_S = 300.0
"""Seconds after which base prefills count as stuck."""
Scores = Mapping[str, Comparison]
"""Task -> both modes' scores."""


@dataclass(frozen=True)
class AccuracySettings:
    """The teams and the number of questions for each."""

    questions: int = 50
    tasks: Sequence[str] = tuple(TASKS)
    seed: int = 0
    model: Path | None = None


QUICK_ACCURACY = AccuracySettings(questions=4)
"""Fewer questions."""


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return a team's figures: shares of right answers, and the calls and prompt tokens of the translated mode."""
    dense, translated = comparison.dense.agents, comparison.translated.agents
    return {
        "agents": [
            {"agent": name, "accuracy_dense": dense[name].accuracy, "accuracy_translated": score.accuracy}
            for name, score in translated.items()
        ],
        "same_final_answer": comparison.same_final_answer,
        "same_answers": comparison.same_answers,
        **until_parting(comparison),
        "calls": _total(comparison.translated, lambda score: score.calls),
        "translated_calls": _total(comparison.translated, lambda score: score.translated_calls),
        "tokens": comparison.translated.tokens(),
    }


def until_parting(comparison: Comparison) -> dict[str, Any]:
    """Return the mean KL of a token up to where answers part, in nats, and its interval by bootstrap over calls: of
    agents behind the first, as long as all before them have answered alike. Nothing where no log-probabilities are.
    """
    seen: list[Seen] = []
    for number, (dense, other) in enumerate(zip(comparison.dense.runs, comparison.translated.runs, strict=True)):
        for place, (one, two) in enumerate(zip(dense.results, other.results, strict=True)):
            if place and (kls := _divergences(one.completion, two.completion)):
                seen.append(Seen(number, statistics.fmean(kls), float(one.text == two.text)))
            if one.text != two.text:
                break  # later agents read different prompts
    if not seen:
        return {}
    figures = summary(seen)
    return {"kl_until_parting": figures["kl"], "kl_ci95": figures["ci95"]["kl"], "compared_calls": len(seen)}


def _divergences(dense: Completion, other: Completion) -> list[float]:
    found = []
    for ours, theirs in zip(dense.logprobs, other.logprobs, strict=False):
        found.append(divergence(ours, theirs))
        if ours.token != theirs.token:
            break
    return found


def _total(score: TeamScore, count: Callable[[AgentScore], int]) -> int:
    return sum(map(count, score.agents.values()))


def measure_accuracy(settings: AccuracySettings, progress: Progress) -> Figures:
    """Let all teams answer on vLLM, then on the embedded engine. Raises `ConfigError`."""
    return accuracy_figures({"vllm": _on_vllm(settings, progress), "embedded": _embedded(settings, progress)})


def accuracy_figures(engines: Mapping[str, Scores]) -> Figures:
    """Return all scores by engine."""
    return {name: {task: comparison_json(one) for task, one in found.items()} for name, found in engines.items()}


def _on_vllm(settings: AccuracySettings, progress: Progress) -> Scores:
    progress("accuracy: starting vLLM")
    with VLLMEngine(settings.model, EngineSettings(backend="vllm", **COMPARED, vllm=ARGUMENTS)) as engine:
        return scores(engine, lambda: settle(engine), settings, lambda what: progress(f"accuracy: vLLM, {what}"))


def _embedded(settings: AccuracySettings, progress: Progress) -> Scores:
    with method_named(METHOD).open(load_model(settings.model, to_compare())) as engine:
        return scores(engine, engine.wait_idle, settings, lambda what: progress(f"accuracy: embedded, {what}"))


def scores(engine: Engine, settle: Callable[[], object], settings: AccuracySettings, progress: Progress) -> Scores:
    """Return both modes' scores by task.

    Dense prefill comes second: vLLM caches what it computes, and the same prompts would then be found in its prefix
    cache, with nothing left to translate.
    """
    asked = engine if settings.model is None else ChangingEngine(engine, partial(replace, logprobs=TOP))
    return {name: _compared(asked, settle, name, settings, progress) for name in settings.tasks}


def _compared(
    engine: Engine, settle: Callable[[], object], task: str, settings: AccuracySettings, progress: Progress
) -> Comparison:
    workload, asked = team(task, settings.questions, settings.seed)

    def answered(reuse: ReuseMode) -> TeamScore:
        def note(score: TeamScore) -> None:
            progress(f"{task}, {reuse.value}: {len(score.finals)} of {settings.questions} questions")

        return answer(engine, workload, asked, reuse, settle, note)

    translated = answered(ReuseMode.TRANSLATE)
    return Comparison(answered(ReuseMode.OFF), translated)


def settle(engine: VLLMEngine, seconds: float = SETTLE_S) -> None:
    """Wait until no base prefill is left. Raises `TimeoutError` after so many seconds."""
    deadline = time.monotonic() + seconds
    while base_prefills(engine):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{base_prefills(engine)} base prefills are left after {seconds:g} s")
        time.sleep(0.01)


def base_prefills(engine: VLLMEngine) -> int:
    """Return the number of base prefills that are waiting or running."""
    figures: Any = engine.inspect()
    return int(figures["requests"]["base_prefills"])


STOCK, NATIVE, KEDGE, KEDGE_HOST = "stock", "stock_offloading", "kedge", "kedge_host"
LANES = (STOCK, NATIVE, KEDGE, KEDGE_HOST)
SPREAD = 1.65
"""Standard deviation of the logarithm of a pause"""


@dataclass(frozen=True)
class SessionLoad:
    """The sessions (tokens) and the time that they are measured for."""

    live: Sequence[int] = (4, 16)
    """Sessions at once: below the cliff, and past it"""
    head: int = 768
    added: int = 96
    output: int = 12
    turns: tuple[int, int] = (4, 12)
    """Fewest and most turns of a session"""
    pause_s: float = 0.3
    """Median pause"""
    longest_pause_s: float = 5.0
    room: int = 6
    """Sessions of mean length that the device holds"""
    host: int = 4
    """Size of the host tier in rooms of the device"""
    warm_s: float = 24.0
    """So long that even where each first turn has to be computed, one after the other, all have been"""
    measured_s: float = 40.0
    trials: int = 2
    """Runs of every engine, each with other sessions; engines take turns"""
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.head + self.turns[1] * (self.added + self.output)

    @property
    def kv(self) -> KvRoom:
        """The device's room."""
        mean = self.head + sum(self.turns) / 4 * (self.added + self.output)
        return KvRoom(int(self.room * mean), self.longest + BLOCK)


QUICK_LOAD = SessionLoad(warm_s=4.0, measured_s=12.0, trials=1)
"""Shorter measurements."""
Trials = Sequence[Sequence["VllmTurn"]]
"""The turns of each run"""


@dataclass(frozen=True)
class VllmTurn:
    """A turn and when its answer had come, in seconds since the start."""

    ended: float
    call: VllmCall


def sessions_figures(load: SessionLoad, turns: Mapping[int, Mapping[str, Trials | None]]) -> Figures:
    """Return all engines' figures by live sessions. None: vLLM cannot run that on this machine."""
    live = {
        str(count): {name: trials and medians(trials, load.measured_s) for name, trials in lanes.items()}
        for count, lanes in turns.items()
    }
    return {"settings": asdict(load), "room_tokens": load.kv.tokens, "live": live}


def medians(trials: Trials, seconds: float) -> dict[str, Any]:
    """Return the medians of all runs' figures, and the figures of each run."""
    each = [figures(turns, seconds) for turns in trials]
    return {**{name: round(statistics.median(one[name] for one in each), 4) for name in each[0]}, "trials": each}


def figures(turns: Sequence[VllmTurn], seconds: float) -> dict[str, Any]:
    """Return rates and times of the turns that ended within so many seconds."""
    firsts = sorted(turn.call.ttft_s for turn in turns)
    prompt = sum(len(turn.call.prompt) for turn in turns)
    return {
        "turns": len(turns),
        "turns_per_min": round(60 * len(turns) / seconds, 1),
        "hit": round(sum(turn.call.cached for turn in turns) / prompt, 4),
        "ttft_p50_s": round(statistics.median(firsts), 4),
        "ttft_p99_s": round(firsts[int(0.99 * (len(firsts) - 1) + 0.5)], 4),
    }


Words = Callable[[random.Random, int], Tokens]
"""The next tokens of a session: so many"""


def random_words(vocab: int) -> Words:
    """Return tokens by chance, for random weights."""
    return lambda draw, count: tuple(draw.randrange(2, vocab) for _ in range(count))


def read_words(model: Path) -> Words:
    """Return passages of XQuAD in a model's tokens, from any place on and over and over."""
    encode = HFTokenizer.load(model).encode
    asked = real.load("reading")[1]
    text = encode("\n\n".join(dict.fromkeys(one.text.partition("\n\nQuestion: ")[0] for one in asked)), special=False)

    def words(draw: random.Random, count: int) -> Tokens:
        start = draw.randrange(len(text))
        return tuple(itertools.islice(itertools.cycle(text), start, start + count))

    return words


class SessionClient:
    """One session after the other, each turn after the answer to the one before. The same on every engine."""

    def __init__(self, load: SessionLoad, words: Words, number: int) -> None:
        self._load, self._words = load, words
        self._random = random.Random(f"{load.seed}:{number}")
        self._history = Tokens()

    def prompts(self) -> Iterator[Tokens]:
        """Yield the next prompt, for ever; call `took` with each answer. The first session begins part way."""
        draw, load = self._random, self._load
        skipped = draw.randrange(load.turns[1])
        while True:
            self._history = self._tokens(load.head + skipped * (load.added + load.output))
            for _ in range(max(1, draw.randint(*load.turns) - skipped)):
                self._history += self._tokens(load.added)
                yield self._history
            skipped = 0

    def took(self, answer: Tokens) -> float:
        """Take an answer. Returns the seconds of the pause that follows."""
        self._history += answer
        return min(self._load.pause_s * self._random.lognormvariate(0, SPREAD), self._load.longest_pause_s)

    def _tokens(self, count: int) -> Tokens:
        return self._words(self._random, count)


async def drive(lane: VllmLane, load: SessionLoad, live: int, words: Words) -> list[VllmTurn]:
    """Return the turns of `live` sessions that end in the measured time."""
    began = time.perf_counter()
    stop = load.warm_s + load.measured_s
    turns: list[VllmTurn] = []

    async def chat(client: SessionClient) -> None:
        for prompt in client.prompts():
            call = await lane.ask(prompt, load.output)
            turns.append(VllmTurn(time.perf_counter() - began, call))
            if turns[-1].ended >= stop:
                return
            await asyncio.sleep(client.took(call.tokens))

    await asyncio.gather(*(chat(SessionClient(load, words, number)) for number in range(live)))
    return [turn for turn in turns if load.warm_s <= turn.ended < stop]


async def measure_sessions(load: SessionLoad, model: Path, words: Words, progress: Progress) -> Figures:
    """Measure all engines one after the other, each in a process of its own, with each number of live sessions."""
    runs: dict[int, dict[str, list[Sequence[VllmTurn] | None]]] = {
        live: {name: [] for name in LANES} for live in load.live
    }
    for trial, live, name in itertools.product(range(load.trials), load.live, LANES):
        progress(f"sessions: {live} live, {name}, run {trial + 1} of {load.trials}")
        other = replace(load, seed=load.seed + trial)
        runs[live][name].append(await _lane(name, other, model, live, words))
    found = {live: {name: _all_or_none(trials) for name, trials in lanes.items()} for live, lanes in runs.items()}
    return sessions_figures(load, found)


def _all_or_none(trials: Sequence[Sequence[VllmTurn] | None]) -> Trials | None:
    done = [one for one in trials if one is not None]
    return done if len(done) == len(trials) else None


async def _lane(name: str, load: SessionLoad, model: Path, live: int, words: Words) -> Sequence[VllmTurn] | None:
    if name == NATIVE and not can_offload():
        return None
    plugin, arguments = lane_settings(name, load, model)
    with VllmLane(model, load.kv, plugin, **arguments) as lane:
        return await drive(lane, load, live, words)


def lane_settings(name: str, load: SessionLoad, model: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the plug-in's settings and the engine's arguments of a lane. Both host tiers have the same room."""
    host = load.host * load.kv.blocks
    if name == NATIVE:
        return None, {"kv_offloading_size": host * block_bytes(model, 2) / 2**30}
    if name == STOCK:
        return None, {}
    tiers = {"host_memory": f"{host} blocks"} if name == KEDGE_HOST else {}
    return {"reuse": "exact", "tiers": tiers}, {"scheduler_cls": SCHEDULER}


def block_bytes(model: Path, bytes_per_number: int) -> int:
    """Return the bytes of a block's keys and values, all layers together."""
    config = AutoConfig.from_pretrained(model)
    heads, head_dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * BLOCK * bytes_per_number


def can_offload() -> bool:
    """Return whether vLLM's own CPU offloading runs here: it wants a GPU."""
    from vllm.platforms import current_platform

    return current_platform.is_cuda_alike() or current_platform.is_xpu()


CONTROLS = ("no-hints", "no-pressure")
"""Cases in which nothing can be gained."""


def workload(name: str, shape: CaseSizes, vocab: int, seed: int) -> FlowWorkload:
    """Return the calls of a case."""
    if name == "no-pressure":
        return unpressed(shape.sizes, vocab, seed)
    if name == "flows":
        fixed, flows = shape.flows[0]
        sizes = replace(shape.sizes, fixed=fixed, dynamic=shape.new, output=shape.reply)
        return many_flows(sizes, flows, shape.room, vocab, seed)
    if name == "peer":
        encode = HFTokenizer.load(model_path(None)).encode
        return peer(encode, seed, output=shape.answer, rounds=shape.questions)
    return single_flow(shape.sizes, vocab, seed, room=shape.rooms[0])


def flow(name: str, settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> Figures:
    """Measure a case of workflow-aware caching."""
    work = workload(name, QUICK if settings.quick else CaseSizes(), vocab, settings.seed)
    hinted, control = name != "no-hints", name in CONTROLS
    return asyncio.run(measure_flow(name, work, settings, model, progress, hinted=hinted, control=control))


def sessions(settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> Figures:
    """Measure growing sessions in a closed loop: random tokens on random weights, or text on a real model."""
    load = with_given(QUICK_LOAD if settings.quick else SessionLoad(), trials=settings.trials)
    if settings.model is None:
        return asyncio.run(measure_sessions(load, model, random_words(vocab), progress))
    folder = model_path(settings.model, to_compare().dtype)
    return asyncio.run(measure_sessions(load, folder, read_words(folder), progress))


def accuracy(settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> Figures:  # noqa: ARG001
    """Measure how well teams answer, the bundled model's or a real one's."""
    usual = QUICK_ACCURACY if settings.quick else AccuracySettings()
    if settings.model is not None:
        usual = replace(usual, model=settings.model, tasks=READING)
    return measure_accuracy(with_given(usual, questions=settings.questions), progress)


CASES: Mapping[str, Case] = {
    **{name: partial(flow, name) for name in (*CONTROLS, "flows", "peer")},
    "sessions": sessions,
    "accuracy": accuracy,
    "team": team_case,
}
