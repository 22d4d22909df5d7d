"""What is gained over LRU with hints, and without a word of the client (KVFlow, figures 5, 6 and 8).

All lanes run the same engine on the same prompts and take turns, as in `kedge bench workflow`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.workflow.cases import CaseSizes, cases
from benchmarks.workflow.lane import BLOCK, Lane, LanePolicy, LaneTrial
from kedge.bench.flows import FlowWorkload
from kedge.bench.shapes import random_runner
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.model.runner import ModelRunner

CASES = {"cycle": 5, "flows": 6, "peer": 8}
"""Case -> KVFlow's figure"""
STOCK, HINTED, PLAIN = "stock", "hinted", "plain"
LANES = {
    STOCK: LanePolicy(host=False),
    HINTED: LanePolicy("sessions", prefetch=True),
    PLAIN: LanePolicy("sessions", prefetch=True, plain=True),
}
ROUNDS = 10
"""Calls of every agent before plain traffic is measured: after three it is known, after some more who follows whom"""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class GainSettings:
    """The size of the cases, and how often each lane runs each of them."""

    shape: CaseSizes = CaseSizes()
    model_size: str = "32m"
    trials: int = 4
    load_ratio: float = 0.43
    """Seconds to load a fixed prompt over seconds to compute it."""
    seed: int = 0


@dataclass(frozen=True)
class GainResult:
    """The trials of one case by lane."""

    trials: Mapping[str, Sequence[LaneTrial]]
    agents: tuple[int, int]
    """Agents that were found in plain traffic, and that there are"""

    def speedup(self, lane: str) -> float:
        """Return the median over the trials of how many times as fast as stock a lane was."""
        pairs = zip(self.trials[STOCK], self.trials[lane], strict=True)
        return median(stock.latency_s / ours.latency_s for stock, ours in pairs)

    def as_json(self) -> dict[str, Any]:
        """Return the speedups, and the share of the hinted lane's gain that plain traffic has."""
        hinted, plain = self.speedup(HINTED), self.speedup(PLAIN)
        share = (plain - 1) / (hinted - 1) if hinted > 1 else None
        latencies = {name: [round(one.latency_s, 4) for one in trials] for name, trials in self.trials.items()}
        computed = {
            name: median(one.counts["computed_tokens"] for one in trials) for name, trials in self.trials.items()
        }
        return {
            HINTED: round(hinted, 3),
            PLAIN: round(plain, 3),
            "share": share and round(share, 3),
            "latency_s": latencies,
            "computed_tokens": computed,
        }


def measure_gain(settings: GainSettings, progress: Progress) -> dict[str, GainResult]:
    """Run all cases. The results are by case."""
    runner, tokenizer = random_runner(settings.model_size, "auto")
    found = {}
    for name, figure in CASES.items():
        progress(name)
        workload = cases(figure, settings.shape, runner.vocab_size, settings.seed, tokenizer.encode)[0]
        found[name] = _measure(workload, settings, runner, tokenizer, progress)
    return found


def _measure(
    workload: FlowWorkload, settings: GainSettings, runner: ModelRunner, tokenizer: HFTokenizer, progress: Progress
) -> GainResult:
    throttle, lanes = 0.0, dict[str, Lane]()
    longest = max(workload.prompts, key=len)
    with ExitStack() as stack:
        for name, policy in LANES.items():
            progress(f"{workload.name}: warming {name}")
            lanes[name] = stack.enter_context(Lane(policy, workload, runner, tokenizer, throttle=throttle))
            rounds = ROUNDS if policy.plain else 1
            lanes[name].warm(rounds, skipped=ROUNDS - rounds)  # all lanes go on with the same prompts
            if not throttle:
                throttle = settings.load_ratio * lanes[name].prefill_s(longest) / -(-len(longest) // BLOCK)
        trials: dict[str, list[LaneTrial]] = {name: [] for name in lanes}
        for number in range(settings.trials):
            order = [*lanes][number % 3 :] + [*lanes][: number % 3]
            for name in order:
                progress(f"{workload.name}: {name}, trial {number + 1} of {settings.trials}")
                trials[name].append(lanes[name].trial())
        figures: Any = lanes[PLAIN].engine.inspect()["discovery"]
    return GainResult(trials, (figures["agents"], len(workload.prompts)))
