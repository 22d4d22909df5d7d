"""Stock vLLM against vLLM with the plug-in: agents in a cycle, and teams under load.

Both engines are processes of their own, have prefix caching on and the same room for KV, and take turns. vLLM is
imported where an engine is started: the environment of its processes has to be set before.

In the cycle, trials have new dynamic parts; fixed prompts are warm. Copies from the host are slowed down until loading
a prompt costs the wanted share of computing it, as measured on stock vLLM.

Under load the teams, their questions, the clients and the figures are those of `kedge bench load`; the same code drives
both engines. Each combination of model, number of teams and engine has a fresh engine, and each engine is reported by
its median trial. One team's run before the clock starts warms it up and leaves the agents' own prefixes in the prefix
cache of either.
"""

import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from kedge.bench.flows import Flow, FlowWorkload, Sizes, percentile, single_flow, spread
from kedge.bench.load import USUAL, LoadTeam, drive, random_team, reading_team, warm, word_tokenizer
from kedge.bench.shapes import SHAPES, llama_config, random_llama
from kedge.integrations.follower import Follower
from kedge.integrations.vllm.engine.engine import VLLMEngine
from kedge.settings import EngineSettings
from kedge.types import ReuseMode, Tokens

BLOCK = 32
"""Tokens of a block on every machine; vLLM's CPU attention wants a multiple of 32."""
ROWS = 64
"""Most requests, and parts of a prompt that are computed side by side, in a pass."""
CALIBRATIONS = 5
"""Prefills whose median is the cost of computing a prompt."""
STOCK, KEDGE = "stock", "kedge"
MODES = {STOCK: ReuseMode.EXACT, KEDGE: ReuseMode.TRANSLATE}
"""Engine -> the mode of its requests under load."""
QUICK_SIZES = Sizes(1024, 32, 8)
Progress = Callable[[str], None]
Figures = Mapping[str, Any]
"""What a case has measured, as written to a file of results."""
_ids = itertools.count()


@dataclass(frozen=True)
class KvRoom:
    """The room of both engines in tokens: all KV, and the longest prompt with its answer."""

    tokens: int
    longest: int

    @property
    def blocks(self) -> int:
        """Blocks of KV; vLLM keeps one of them for itself."""
        return -(-max(self.tokens, self.longest) // BLOCK) + 1


@dataclass(frozen=True)
class VllmBenchSettings:
    """What was asked for; None is a case's own number."""

    quick: bool = False
    model_size: str = "32m"
    trials: int | None = None
    """Of each engine, in turn: on a machine that does other things as well, one says little"""
    load_ratio: float = 0.43
    """Seconds to load a fixed prompt over seconds to compute it: 0.43 is the paper's A10G, 0.57 its H100."""
    samples: int | None = None
    clients: Sequence[int] = (1, 8, 16)
    """load: teams at once"""
    seconds: float = 60.0
    """load: of each measurement"""
    seed: int = 0
    model: Path | None = None
    """A real model for the case load, in place of random weights"""


@dataclass(frozen=True)
class VllmCall:
    """One answered request, as its client saw it."""

    prompt: Tokens
    tokens: Tokens
    cached: int
    """Prompt tokens that vLLM did not compute, by its own count."""
    ttft_s: float
    receipt: Mapping[str, Any] | None = None
    """The plug-in's."""


@dataclass(frozen=True)
class VllmTrial:
    """The calls of one trial, and the seconds from the start of the first to the end of the last."""

    seconds: float
    calls: tuple[VllmCall, ...]


def machine_arguments(model: Path | None) -> dict[str, Any]:
    """Return vLLM's arguments by machine: exact on a CPU; on a GPU room for several engines, CUDA graphs of short
    passes without a minute of compiling for each engine, and made-up weights where the folder has none. The variable
    KEDGE_BENCH_VLLM (JSON) has others.
    """
    from vllm.platforms import current_platform

    others = json.loads(os.environ.get("KEDGE_BENCH_VLLM", "{}"))
    if current_platform.is_cpu():
        return {"dtype": "float32", "enforce_eager": True, "block_size": BLOCK, **others}
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    graphs = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": sizes}
    weights = {} if model is None or any(model.glob("*.safetensors")) else {"load_format": "dummy"}
    memory = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 24 << 30}  # the room for KV is given in blocks
    common = {"dtype": "bfloat16", "block_size": BLOCK, "max_num_seqs": ROWS, **memory}
    return {**common, "compilation_config": graphs, **weights, **others}


class VllmLane(AbstractContextManager["VllmLane"]):
    """A vLLM engine. Lanes take turns and keep their state."""

    def __init__(self, model: Path, room: KvRoom, plugin: Mapping[str, Any] | None, **arguments: Any) -> None:
        """Start the engine, for which a prompt is one chunk. Engines differ in these two alone: `plugin`, the plug-in's
        settings (None is stock vLLM), and `arguments`, the engine's own.
        """
        from kedge.integrations.vllm.engine.options import prepare_environment, transfer_config

        prepare_environment()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = AsyncEngineArgs(
            model=str(model),
            max_model_len=room.longest,
            max_num_batched_tokens=max(2048, room.longest),
            num_gpu_blocks_override=room.blocks,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            kv_transfer_config=None if plugin is None else transfer_config(plugin),
            **{**machine_arguments(model), **arguments},
        )
        self.plugged = plugin is not None
        self._engine = AsyncLLM.from_engine_args(engine)

    async def ask(self, prompt: Tokens, max_tokens: int, hints: Mapping[str, Any] | None = None) -> VllmCall:
        """Return a greedy answer of exactly `max_tokens`; `hints` go to the plug-in."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"kedge": dict(hints)}} if hints is not None else None
        asked = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "detokenize": False}
        params = SamplingParams(**asked, extra_args=extra, skip_clone=True)  # as vLLM's own server does
        began, name = time.perf_counter(), f"bench-{next(_ids)}"
        outputs = self._engine.generate({"prompt_token_ids": list(prompt)}, params, name)
        steps = [(time.perf_counter() - began, output) async for output in outputs]
        last = steps[-1][1]
        receipt = (last.kv_transfer_params or {}).get("kedge")
        return VllmCall(prompt, tuple(last.outputs[0].token_ids), last.num_cached_tokens or 0, steps[0][0], receipt)

    async def forget(self) -> None:
        """Empty vLLM's prefix cache."""
        await self._engine.reset_prefix_cache()

    async def prefill_s(self, prompt: Tokens) -> float:
        """Return seconds to compute `prompt` on the otherwise idle engine."""
        seconds = []
        for _ in range(CALIBRATIONS):
            await self.forget()
            seconds.append((await self.ask(prompt, 1)).ttft_s)
        await self.forget()
        return statistics.median(seconds)

    def __exit__(self, *_: object) -> None:
        self._engine.shutdown()
        del self._engine


# agents in a cycle, and other flows -----------------------------------------------------------------------------------


class VllmClients:
    """A workload's clients on one engine. Each calls the agents of its flow one after the other, the plug-in's with the
    run's forecast.
    """

    def __init__(self, lane: VllmLane, workload: FlowWorkload) -> None:
        self._lane, self._workload, self._turn = lane, workload, 0
        self._answers = {flow.run: Tokens() for flow in workload.flows}
        followed = workload.flows if lane.plugged else ()
        self._followers = {
            flow.run: Follower(flow.graph.name, flow.graph, flow.run.run_id, flow.run.client_id) for flow in followed
        }

    async def warm(self) -> None:
        """Call every agent once."""
        await self._drive(max(len(flow.fixed) for flow in self._workload.flows))

    async def trial(self) -> VllmTrial:
        """Run the next calls of all flows at once; the clock starts when every flow has made its lead calls."""
        await self._drive(self._workload.lead)
        began = time.perf_counter()
        calls = await self._drive(self._workload.calls)
        return VllmTrial(time.perf_counter() - began, tuple(calls))

    async def _drive(self, size: int) -> Sequence[VllmCall]:
        turns = range(self._turn, self._turn + size)
        self._turn += size

        async def one(flow: Flow) -> list[VllmCall]:
            return [await self._call(flow, turn) for turn in turns]

        return list(itertools.chain.from_iterable(await asyncio.gather(*map(one, self._workload.flows))))

    async def _call(self, flow: Flow, turn: int) -> VllmCall:
        agent, prompt = flow.agent(turn), flow.request(turn, self._answers[flow.run]).tokens
        if flow.run in self._followers:
            with self._followers[flow.run].calling(agent) as hints:
                extended = {**hints, "reuse": "exact", "fixed_tokens": len(flow.fixed[agent])}
                done = await self._lane.ask(prompt, flow.output, extended)
        else:
            done = await self._lane.ask(prompt, flow.output)
        self._answers[flow.run] = done.tokens
        return done


async def measure_flow(
    name: str, work: FlowWorkload, settings: VllmBenchSettings, model: Path, progress: Progress
) -> Figures:
    """Run all trials of one case, engines each time in another order."""
    count = settings.trials or (3 if settings.quick else 5)
    room, longest = KvRoom(work.room, longest_call(work)), max(work.prompts, key=len)
    with ExitStack() as stack:
        progress(f"{name}: starting vLLM")
        stock = stack.enter_context(VllmLane(model, room, None))
        prefill = await stock.prefill_s(longest)
        throttle = settings.load_ratio * prefill / -(-len(longest) // BLOCK)
        progress(f"{name}: starting vLLM with the plug-in")
        ours = stack.enter_context(VllmLane(model, room, plugin(work, throttle)))
        crowds = {STOCK: VllmClients(stock, work), KEDGE: VllmClients(ours, work)}
        for crowd in crowds.values():
            await crowd.warm()
        trials: dict[str, list[VllmTrial]] = {engine: [] for engine in crowds}
        order = list(crowds)
        for number in range(count):
            for engine in order:
                progress(f"{name}: {engine}, trial {number + 1} of {count}")
                trials[engine].append(await crowds[engine].trial())
            order.append(order.pop(0))
    return flow_figures(name, work, prefill, trials)


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
    return {"reuse": "exact", "tiers": {"host_memory": f"{host} blocks", "throttle": throttle}}


def flow_figures(
    name: str, work: FlowWorkload, prefill_s: float, trials: Mapping[str, Sequence[VllmTrial]]
) -> dict[str, Any]:
    """Return the figures of a case from its trials by engine; `prefill_s` are stock vLLM's seconds to compute the
    longest fixed prompt.

    The gain is stock vLLM's seconds over the plug-in's in each trial.
    """
    answers = [[call.tokens for trial in found for call in trial.calls] for found in trials.values()]
    pairs = zip(trials[STOCK], trials[KEDGE], strict=True)
    return {
        "case": name,
        "workload": work.name,
        "room_tokens": work.room,
        "prefill_s": round(prefill_s, 4),
        "engines": {engine: trial_figures(found) for engine, found in trials.items()},
        "speedup": spread((stock.seconds / ours.seconds for stock, ours in pairs), 3),
        "tokens_identical": all(one == answers[0] for one in answers),
    }


def trial_figures(trials: Sequence[VllmTrial]) -> dict[str, Any]:
    """Return medians of times, and hit rates as shares of all prompt tokens. Those that were loaded from the host while
    the request waited are included in both rates.
    """
    calls = [call for trial in trials for call in trial.calls]
    prompt = sum(len(call.prompt) for call in calls)
    waited = sum(call.receipt["tokens"]["host"] for call in calls if call.receipt)
    firsts = [1e3 * call.ttft_s for call in calls]
    rates = [sum(len(call.tokens) for call in trial.calls) / trial.seconds for trial in trials]
    return {
        "seconds": spread((trial.seconds for trial in trials), 4),
        "hit_rate": round(sum(call.cached for call in calls) / prompt, 4),
        "waited_rate": round(waited / prompt, 4),
        "ttft_p50_ms": round(statistics.median(firsts), 2),
        "ttft_p90_ms": percentile(firsts, 0.9, 2),
        "tokens_per_s": round(statistics.median(rates), 2),
        "all_seconds": [round(trial.seconds, 4) for trial in trials],
    }


# teams under load -----------------------------------------------------------------------------------------------------


def served_team(settings: VllmBenchSettings, folder: Path) -> tuple[Path, LoadTeam]:
    """Return a real model with a team that reads, or the random one in `folder`, where its tokenizer is saved, with
    five agents.
    """
    if settings.model is not None:
        return settings.model, reading_team(settings.seed)
    vocab = SHAPES[settings.model_size]["vocab_size"]
    word_tokenizer(vocab).inner.save_pretrained(folder)
    return folder, random_team(vocab, USUAL, settings.seed)


def measure_load(settings: VllmBenchSettings, folder: Path, progress: Progress) -> Figures:
    """Measure all combinations one after the other. `folder` has the random model.

    Returns model -> clients -> engine -> figures.
    """
    model, team = served_team(settings, folder)
    found: dict[str, dict[str, Figures]] = {}
    for clients in settings.clients:
        pairs: list[dict[str, Figures]] = [{} for _ in range(settings.trials or 1)]
        for number, pair in enumerate(pairs):
            for kind in list(MODES) if number % 2 == 0 else reversed(MODES):  # who goes first takes turns
                progress(f"load: {clients} at once, {kind}, trial {number + 1} of {len(pairs)}")
                with VLLMEngine(model, engine_settings(model, team), plugged=kind == KEDGE) as engine:
                    warm(engine, team)
                    record = drive(engine, team, settings.seconds, clients, MODES[kind])
                pair[kind] = record.as_json()
        found[str(clients)] = pair_figures(pairs)
    return {settings.model_size if settings.model is None else str(settings.model): found}


def pair_figures(pairs: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """Return the figures of each engine's median trial, by teams per minute, and those of the plug-in over stock vLLM's
    in each pair.
    """
    teams = "teams_per_min"
    median = {name: sorted((pair[name] for pair in pairs), key=itemgetter(teams))[len(pairs) // 2] for name in MODES}
    ratios = [round(pair[KEDGE][teams] / pair[STOCK][teams], 3) if pair[STOCK][teams] else None for pair in pairs]
    return {STOCK: median[STOCK], KEDGE: {**median[KEDGE], "times_stock": ratios}}


LOAD_ROOM = KvRoom(32_768, 2048)


def engine_settings(model: Path, team: LoadTeam, room: KvRoom = LOAD_ROOM) -> EngineSettings:
    """Return the settings of both engines: rows beyond the running requests are for the plug-in's lanes. On a GPU there
    is room for the values of all teams at once, 128 KiB a token of an 8B model.
    """
    is_gpu = torch.cuda.is_available()
    arguments: dict[str, Any] = {
        **(machine_arguments(model) if is_gpu else {}),
        "max_model_len": room.longest,
        "num_gpu_blocks_override": room.blocks,
        "max_num_seqs": ROWS,
    }
    anchors = {**team.anchors, **(dict.fromkeys(("max_bytes", "max_base_bytes"), 8 << 30) if is_gpu else {})}
    return EngineSettings(backend="vllm", anchors=anchors, guard=dict(team.guard), vllm=arguments)


# all cases ------------------------------------------------------------------------------------------------------------

Case = Callable[[VllmBenchSettings, Path, int, Progress], Figures]
"""(settings, folder of the random model, its vocabulary, progress) -> figures"""


def cycle(settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> Figures:
    """Measure ten agents in a cycle, with room for four."""
    work = single_flow(QUICK_SIZES if settings.quick else Sizes(), vocab, settings.seed)
    return asyncio.run(measure_flow("cycle", work, settings, model, progress))


CASES: Mapping[str, Case] = {
    "cycle": cycle,
    "load": lambda settings, model, _, progress: measure_load(settings, model, progress),
}


def measure(
    settings: VllmBenchSettings, cases: Mapping[str, Case], progress: Progress = lambda _: None
) -> dict[str, Figures]:
    """Return the figures of cases by name. Raises `ConfigError` for an unknown size of the model."""
    with tempfile.TemporaryDirectory() as folder:
        save_random_llama(settings.model_size, Path(folder))
        vocab = SHAPES[settings.model_size]["vocab_size"]
        return {name: case(settings, Path(folder), vocab, progress) for name, case in cases.items()}


def save_random_llama(size: str, folder: Path) -> None:
    """Save a random model no token of which ends an answer; on a GPU its config alone, with weights that vLLM makes up.

    Raises `ConfigError` for an unknown size.
    """
    if torch.cuda.is_available():
        config = llama_config(size)
        config.architectures, config.dtype, config.eos_token_id = ["LlamaForCausalLM"], "bfloat16", None
        config.save_pretrained(folder)
        return
    model = random_llama(size, torch.device("cpu"), torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
