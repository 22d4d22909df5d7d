"""Workflows on stock vLLM and on vLLM with the plug-in, on the same model and the same calls (KVFlow, figure 5).

Both are engines in processes of their own, with prefix caching on and the same room for KV, and take turns trial by
trial, each time in another order. Trials have new dynamic parts; fixed prompts are warm. Copies from the host are
slowed down until loading a prompt costs the wanted share of computing it, as measured on stock vLLM. In a control,
where nothing can be gained, stock vLLM runs a second time, started last: its difference is noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kedge.bench.flows import FlowWorkload, Sizes, spread
from kedge.bench.vllm.lane import BLOCK, KvRoom, VllmClients, VllmLane, VllmTrial

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
