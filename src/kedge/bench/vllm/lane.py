"""A vLLM engine in a process of its own, the clients of workflows that drive it, and how both engines compare.

Stock vLLM and vLLM with the plug-in have prefix caching on and the same room for KV, and take turns trial by trial,
each time in another order. Trials have new dynamic parts; fixed prompts are warm. Copies from the host are slowed down
until loading a prompt costs the wanted share of computing it, as measured on stock vLLM. In a control, where nothing
can be gained, stock vLLM runs a second time, started last: its difference is noise.
vLLM is imported where an engine is started: the environment of its processes has to be set before.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kedge.bench.flows import Flow, FlowWorkload, Sizes, spread
from kedge.integrations.follower import Follower
from kedge.integrations.vllm.engine.requests import PluginMessage
from kedge.types import Tokens

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


BLOCK = 32
"""Tokens of a block; vLLM's CPU attention wants a multiple of 32."""
CALIBRATIONS = 5
"""Prefills whose median is the cost of computing a prompt."""
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
class VllmCall:
    """One answered request, as its client saw it."""

    prompt: Tokens
    tokens: Tokens
    cached: int
    """Prompt tokens that vLLM did not compute, by its own count."""
    ttft_s: float
    seconds: float
    receipt: Mapping[str, Any] | None = None
    """The plug-in's."""

    @property
    def waited(self) -> int:
        """The part of `cached` that was loaded from the host while the request waited."""
        return self.receipt["tokens"]["host"] if self.receipt else 0


@dataclass(frozen=True)
class VllmTrial:
    """All flows' calls in one trial."""

    seconds: float
    """From the start of the first call to the end of the last one."""
    calls: tuple[VllmCall, ...]


class VllmLane(AbstractContextManager["VllmLane"]):
    """A vLLM engine. Lanes take turns and keep their state."""

    def __init__(self, model: Path, room: KvRoom, plugin: Mapping[str, Any] | None, **arguments: Any) -> None:
        """Start the engine. `plugin`: the plug-in's settings; None is stock vLLM. `arguments` are the engine's own."""
        self.plugged = plugin is not None
        self._engine = start(model, room, plugin, **arguments)

    async def ask(self, prompt: Tokens, max_tokens: int, hints: Mapping[str, Any] | None = None) -> VllmCall:
        """Return a greedy answer of exactly `max_tokens`; `hints` go to the plug-in."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"kedge": dict(hints)}} if hints is not None else None
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra
        )
        began, name = time.perf_counter(), f"bench-{next(_ids)}"
        outputs = self._engine.generate({"prompt_token_ids": list(prompt)}, params, name)
        steps = [(time.perf_counter() - began, output) async for output in outputs]
        seconds, last = steps[-1]
        receipt = (last.kv_transfer_params or {}).get("kedge")
        return VllmCall(
            prompt, tuple(last.outputs[0].token_ids), last.num_cached_tokens or 0, steps[0][0], seconds, receipt
        )

    async def tell(self, message: PluginMessage) -> None:
        """Send the plug-in hints without a request, as Kedge's engine does."""
        from kedge.integrations.vllm.engine.driver import as_request

        await self._engine.engine_core.add_request_async(as_request(message, next(_ids)))

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.shutdown()
        del self._engine


def start(model: Path, room: KvRoom, plugin: Mapping[str, Any] | None, **arguments: Any) -> AsyncLLM:
    """Start an engine; a prompt is one chunk. All lanes' engines differ in the plug-in and in `arguments` alone."""
    from kedge.integrations.vllm.engine.launch import prepare_environment, transfer_config

    prepare_environment()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    is_cpu = current_platform.is_cpu()
    engine = AsyncEngineArgs(
        model=str(model),
        dtype="float32" if is_cpu else "bfloat16",
        max_model_len=room.longest,
        max_num_batched_tokens=max(2048, room.longest),
        block_size=BLOCK,
        num_gpu_blocks_override=room.blocks,
        enable_prefix_caching=True,
        enforce_eager=is_cpu,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        kv_transfer_config=None if plugin is None else transfer_config(plugin),
        **arguments,
    )
    return AsyncLLM.from_engine_args(engine)


def block_bytes(model: Path, bytes_per_number: int) -> int:
    """Return the bytes of a block's keys and values, all layers together."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    heads, head_dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * BLOCK * bytes_per_number


class VllmFlowClient:
    """A client that calls the agents of one flow one after the other, if hinted with the run's forecast."""

    def __init__(self, lane: VllmLane, flow: Flow, hinted: bool) -> None:
        self._lane, self._flow, self._answer = lane, flow, Tokens()
        run = flow.run
        self._follower = Follower(flow.graph.name, flow.graph, run.run_id, run.client_id) if hinted else None

    async def call(self, turn: int) -> VllmCall:
        """Make the call of one turn and wait for its end."""
        agent, prompt = self._flow.agent(turn), self._flow.request(turn, self._answer).tokens
        if self._follower is None:
            done = await self._lane.ask(prompt, self._flow.output)
        else:
            with self._follower.calling(agent) as hints:
                extended = {**hints, "reuse": "exact", "fixed_tokens": len(self._flow.fixed[agent])}
                done = await self._lane.ask(prompt, self._flow.output, extended)
        self._answer = done.tokens
        return done


class VllmClients:
    """All clients of a workload on one engine."""

    def __init__(self, lane: VllmLane, workload: FlowWorkload, hinted: bool) -> None:
        self._workload, self._turn = workload, 0
        self._clients = [VllmFlowClient(lane, flow, hinted and lane.plugged) for flow in workload.flows]

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

        async def one(client: VllmFlowClient) -> list[VllmCall]:
            return [await client.call(turn) for turn in turns]

        return list(itertools.chain.from_iterable(await asyncio.gather(*map(one, self._clients))))


STOCK, KEDGE, AGAIN = "stock", "kedge", "stock again"
USUAL, QUICK = Sizes(), Sizes(1024, 32, 8)
ROOM = 4
"""Agents of ten that the device has room for."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class FlowSettings:
    """The number of trials of each engine, and what a load costs."""

    trials: int = 5
    load_ratio: float = 0.43
    """Seconds to load a fixed prompt over seconds to compute it: 0.43 is the paper's A10G, 0.57 its H100."""


@dataclass(frozen=True)
class FlowResult:
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


async def measure_flow(
    name: str,
    work: FlowWorkload,
    settings: FlowSettings,
    model: Path,
    progress: Progress,
    *,
    hinted: bool = True,
    control: bool = False,
) -> FlowResult:
    """Run all trials of one case; a `control` has stock vLLM twice."""
    room, longest = KvRoom(work.room, longest_call(work)), max(work.prompts, key=len)
    with ExitStack() as stack:
        progress(f"{name}: starting vLLM")
        stock = stack.enter_context(VllmLane(model, room, None))
        prefill = await stock.prefill_s(longest)
        throttle = settings.load_ratio * prefill / -(-len(longest) // BLOCK)
        progress(f"{name}: starting vLLM with the plug-in")
        ours = stack.enter_context(VllmLane(model, room, plugin(work, throttle)))
        crowds = {STOCK: VllmClients(stock, work, False), KEDGE: VllmClients(ours, work, hinted)}
        if control:
            progress(f"{name}: starting stock vLLM again")
            crowds[AGAIN] = VllmClients(stack.enter_context(VllmLane(model, room, None)), work, False)
        for crowd in crowds.values():
            await crowd.warm()
        trials: dict[str, list[VllmTrial]] = {engine: [] for engine in crowds}
        order = list(crowds)
        for number in range(settings.trials):
            for engine in order:
                progress(f"{name}: {engine}, trial {number + 1} of {settings.trials}")
                trials[engine].append(await crowds[engine].trial())
            order.append(order.pop(0))
        return FlowResult(name, work, prefill, trials)


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
