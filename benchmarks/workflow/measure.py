"""Workflow-aware caching against its baselines, on a real model with real KV (KVFlow, figures 5, 6 and 8).

All policies run in one process on the same engine code with the same prompts. They take turns, trial by trial and each
time in another order, so that other load on the machine hits all of them alike. A trial has new dynamic parts; the
fixed prompts are warm. The copies between the tiers are slowed down until loading a prompt costs the wanted share of
computing it, as measured on this machine before the trials; the ratio during the trials is in the results.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.workflow.cases import CaseSizes, Control, cases, controls
from benchmarks.workflow.lane import BLOCK, POLICIES, Hints, Lane, LaneTrial, true_hints
from kedge.bench.flows import FlowWorkload, spread
from kedge.bench.shapes import random_runner
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.model.runner import ModelRunner

COMPARED = ("lru_device", "lru_host", "full")
"""Policies that run in a control."""
BASELINES = ("lru_device", "lru_host", "lru_blocking")
"""Policies that the others are compared with."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class WorkflowSettings:
    """The figure, the model and the number of trials."""

    figure: int = 5
    model_size: str = "32m"
    seeds: int = 10
    """Trials of every policy, each with new dynamic parts."""
    load_ratio: float = 0.43
    """Seconds to load a fixed prompt over seconds to compute it: 0.43 is the paper's A10G, 0.57 its H100."""
    shape: CaseSizes = field(default_factory=CaseSizes)
    controls: bool = False
    device: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class CaseResult:
    """The trials of every policy in one case of a figure."""

    workload: FlowWorkload
    prefill_s: float
    """Seconds to compute the longest fixed prompt."""
    throttle_s: float
    """Least seconds that a block takes from one tier to the other."""
    trials: Mapping[str, Sequence[LaneTrial]]

    @property
    def tokens_identical(self) -> bool:
        """Whether all policies gave the same answers."""
        answers = [[trial.tokens for trial in trials] for trials in self.trials.values()]
        return all(one == answers[0] for one in answers)

    def speedup(self, name: str, baseline: str) -> list[float]:
        """Return the latency of `baseline` over that of `name`, trial by trial."""
        pairs = zip(self.trials[baseline], self.trials[name], strict=True)
        return [theirs.latency_s / ours.latency_s for theirs, ours in pairs]

    def load_ratio(self) -> float | None:
        """Return the measured cost of loading a token over that of computing it.

        Loading is what `lru_host` waited for what it loaded, computing the time to first token of what `lru_device`
        computed. None where several flows overlap, or nothing was loaded.
        """
        computed, loaded = (
            _total(self.trials[name], key)
            for name, key in (("lru_device", "computed_tokens"), ("lru_host", "host_hit_tokens"))
        )
        if len(self.workload.flows) > 1 or not loaded:
            return None
        computing = sum(call.ttft_ms / 1e3 for trial in self.trials["lru_device"] for call in trial.completions)
        return _total(self.trials["lru_host"], "stall_s") / loaded / (computing / computed)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        measured = self.load_ratio()
        return {
            "case": self.workload.name,
            "room_tokens": self.workload.room,
            "prefill_s": round(self.prefill_s, 4),
            "throttle_s_per_block": round(self.throttle_s, 6),
            "load_ratio_measured": measured and round(measured, 3),
            "policies": {name: summary(trials) for name, trials in self.trials.items()},
            "speedups": self.speedups(),
            "tokens_identical": self.tokens_identical,
        }

    def speedups(self) -> dict[str, dict[str, Any]]:
        """Return median, minimum and maximum over the trials, by baseline and policy."""
        return {
            baseline: {name: spread(self.speedup(name, baseline), 3) for name in self.trials if name != baseline}
            for baseline in BASELINES
            if baseline in self.trials
        }


@dataclass(frozen=True)
class WorkflowResult:
    """All cases, the figure's main case first, and the controls by name."""

    settings: WorkflowSettings
    cases: Sequence[CaseResult]
    controls: Mapping[str, CaseResult] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        first, *others = [case.as_json() for case in self.cases]
        everything = [*self.cases, *self.controls.values()]
        return {
            "figure": self.settings.figure,
            **first,
            "tokens_identical": all(case.tokens_identical for case in everything),
            "other_cases": others,
            "controls": {name: case.as_json() for name, case in self.controls.items()},
        }


def _total(trials: Sequence[LaneTrial], name: str) -> float:
    return sum(trial.counts[name] for trial in trials)


def summary(trials: Sequence[LaneTrial]) -> dict[str, Any]:
    """Return medians over the trials; the percentiles are of single calls, in seconds."""
    latencies = [trial.latency_s for trial in trials]
    calls = [call for trial in trials for call in trial.completions]
    counts = {name: statistics.median(trial.counts[name] for trial in trials) for name in trials[0].counts}
    seconds = sorted(call.total_ms / 1e3 for call in calls)
    return {
        "latency_s": round(statistics.median(latencies), 4),
        **{name: round(value, 4) for name, value in counts.items()},
        "p50": round(statistics.median(seconds), 4),
        "p99": round(seconds[int(0.99 * (len(seconds) - 1) + 0.5)], 4),
        "ttft_p50": round(statistics.median(call.ttft_ms for call in calls) / 1e3, 4),
        "latency_spread": spread(latencies, 4),
        "all_latency_s": [round(value, 4) for value in latencies],
    }


def measure(settings: WorkflowSettings, progress: Progress = lambda _: None) -> WorkflowResult:
    """Measure the cases of a figure and, if `settings.controls`, its controls. Raises `ConfigError` for an unknown
    figure.
    """
    runner, tokenizer = random_runner(settings.model_size, settings.device)
    bench = _CaseRunner(settings, runner, tokenizer, progress)
    encode = tokenizer.encode
    done = [
        bench.run(workload, policies(workload), settings.seeds)
        for workload in cases(settings.figure, settings.shape, runner.vocab_size, settings.seed, encode)
    ]
    chosen = controls(settings.shape, runner.vocab_size, settings.seed) if settings.controls else {}
    return WorkflowResult(settings, done, {name: bench.control(name, one) for name, one in chosen.items()})


def policies(workload: FlowWorkload) -> tuple[str, ...]:
    """Return the policies of a figure. In a single flow no request is behind a waiting one, so blocking changes
    nothing.
    """
    return tuple(name for name in POLICIES if name != "lru_blocking" or len(workload.flows) > 1)


@dataclass
class _CaseRunner:
    """The model and settings that all cases share."""

    settings: WorkflowSettings
    runner: ModelRunner
    tokenizer: HFTokenizer
    progress: Progress

    def control(self, name: str, control: Control) -> CaseResult:
        self.progress(f"control: {name}")
        return self.run(control.workload, COMPARED, self.settings.seeds, control.hints)

    def run(
        self, workload: FlowWorkload, names: Sequence[str], seeds: int, hints: Callable[[], Hints] = lambda: true_hints
    ) -> CaseResult:
        """Run all trials of one case; `hints` makes a new filter of forecasts for every lane.

        The first lane, which loads nothing, measures the cost of computing; from it follows how slow the others' copies
        are.
        """
        longest = max(workload.prompts, key=len)
        lanes: dict[str, Lane] = {}
        throttle = prefill = 0.0
        with ExitStack() as stack:
            for name in names:
                self.progress(f"{workload.name}: warming {name}")
                lane = Lane(POLICIES[name], workload, self.runner, self.tokenizer, throttle=throttle, hints=hints())
                lanes[name] = stack.enter_context(lane)
                lane.warm()
                if not throttle:
                    prefill = lane.prefill_s(longest)
                    throttle = self.settings.load_ratio * prefill / -(-len(longest) // BLOCK)
            trials = self._trials(workload, lanes, seeds)
        return CaseResult(workload, prefill, throttle, trials)

    def _trials(self, workload: FlowWorkload, lanes: Mapping[str, Lane], seeds: int) -> dict[str, list[LaneTrial]]:
        trials: dict[str, list[LaneTrial]] = {name: [] for name in lanes}
        order = list(lanes)
        for seed in range(seeds):
            for name in order:
                self.progress(f"{workload.name}: {name}, trial {seed + 1} of {seeds}")
                trials[name].append(lanes[name].trial())
            order = [*order[1:], order[0]]
        return trials
