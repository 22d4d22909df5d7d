"""KVCOMM, Table A.6: anchors in host memory against anchors on the device.

All methods answer the same questions with the same anchors. With anchors on the host, the device has room for half of
them, so that an agent's anchors have mostly been evicted when its turn comes again. On a GPU they are copied over its
link. On a CPU both tiers are the same memory: there every copy is slowed down to the speed of the paper's link, in
units of this machine's dense prefill.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median

from kedge.anchors.sites import OffsetEstimate
from kedge.anchors.store import AnchorStore
from kedge.anchors.tiered_store import HostBound, TieredStoreStats
from kedge.bench.lab.comparison import LabSettings, run_pairs
from kedge.bench.lab.methods import load_model, method_named
from kedge.bench.lab.pairs import MethodRuns
from kedge.bench.lab.studies.study import Note, Plot, Row, Study, StudySettings, asked, team_sizes
from kedge.engine.local.components import EngineComponents
from kedge.reuse.contracts import PlaceholderSite, SampleView
from kedge.settings import AnchorSettings, EngineSettings

_TEAMS, _QUICK_TEAMS = (3, 4), (3,)
_SHARE = 0.5
"""Share of all offsets that fits the device."""
_LOAD_RATIO = 0.045
"""Seconds to load one token's KV over seconds to prefill it densely: 128 KiB of an 8B model at 25 GB/s over a PCIe
link, against the 430 ms for 3,700 tokens of Table 2"""


class SlowLink:
    """A factory of stores whose copies between device and host take at least `seconds_per_byte`."""

    def __init__(self, seconds_per_byte: float = 0.0) -> None:
        self._seconds_per_byte = seconds_per_byte
        self._stores: list[LinkedStore] = []

    def __call__(self, config: AnchorSettings, host: HostBound) -> LinkedStore:
        self._stores.append(LinkedStore(config, host, self._seconds_per_byte))
        return self.made

    @property
    def made(self) -> LinkedStore:
        """The store of the engine that was built last."""
        return self._stores[-1]


class LinkedStore(AnchorStore):
    """An `AnchorStore` behind a slow link."""

    def __init__(self, config: AnchorSettings, host: HostBound, seconds_per_byte: float) -> None:
        super().__init__(config, host)
        self._seconds_per_byte = seconds_per_byte
        self.waited = 0.0
        """Seconds that requests have waited for the link."""

    def estimate(self, slot: PlaceholderSite, sample: SampleView) -> OffsetEstimate:
        before = self.stats().tiers
        estimate = super().estimate(slot, sample)
        after = self.stats().tiers
        copied = after.demand_s - before.demand_s
        self.waited += copied + hold(_moved(before, after), self._seconds_per_byte, copied)
        return estimate

    def fetch(self) -> bool:
        before, began = self.stats().tiers, time.perf_counter()
        fetched = super().fetch()
        hold(_moved(before, self.stats().tiers), self._seconds_per_byte, time.perf_counter() - began)
        return fetched


def hold(moved: int, seconds_per_byte: float, took: float) -> float:
    """Wait as long as a link takes to move so many bytes, less what their copies took. Returns the seconds waited."""
    rest = max(0.0, moved * seconds_per_byte - took)
    time.sleep(rest)
    return rest


def _moved(before: TieredStoreStats, after: TieredStoreStats) -> int:
    return after.bytes_loaded - before.bytes_loaded + after.bytes_offloaded - before.bytes_offloaded


def measure(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return three rows per number of agents: anchors on the device, on the host fetched on demand, and fetched ahead
    by the forecast.

    `match_ms` (waits included) and `ttft_ms` are medians of the calls that translated; `wait_ms`, for the link, and
    `loaded_mib` are means of all calls. Pools fill as they do in use.
    """
    teams = team_sizes(settings, _QUICK_TEAMS if settings.quick else _TEAMS)
    return [row for agents in teams for row in _team(replace(settings, agents=agents), seed, note)]


def _team(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    device, link = _run(settings, seed, note, "device", SlowLink(), {}, {})
    rows = [_row(settings, "device", device, link)]
    slow = _link_seconds(settings, device)
    bound = {"max_bytes": int(_SHARE * link.made.stats().nbytes), "host_bytes": 64 << 30}
    for name, window in (("host", -1.0), ("host, ahead", 2.0)):
        runs, link = _run(settings, seed, note, name, SlowLink(slow), bound, {"prefetch_window": window})
        rows.append(_row(settings, name, runs, link))
    return rows


def _run(
    settings: StudySettings, seed: int, note: Note, name: str, link: SlowLink, anchors: Mapping, tiers: Mapping
) -> tuple[MethodRuns, SlowLink]:
    note(f"{settings.agents} agents, {name}")
    workload, questions = asked(settings, seed, taught=False)
    method = replace(method_named("token"), components=EngineComponents(anchors=link))
    lab = LabSettings(
        agents=settings.agents,
        model=settings.model,
        forced=False,
        kv=False,
        seed=seed,
        anchors=anchors,
        engine={"tiers": tiers},
    )
    return run_pairs(workload, questions, {name: method}, lab)[name], link


def _row(settings: StudySettings, name: str, runs: MethodRuns, link: SlowLink) -> Row:
    summary, moved = runs.summary(), link.made.stats().tiers
    calls = [pair.other.completion for pair in runs.answers]
    translated = [one for one in calls if one.receipt.translated]
    return {
        "agents": settings.agents,
        "anchors": name,
        "match_ms": _median(one.receipt.parts_ms["match"] for one in translated),
        "wait_ms": 1e3 * link.made.waited / len(calls),
        "ttft_ms": _median(one.ttft_ms for one in translated),
        "loaded_mib": moved.bytes_loaded / len(calls) / 2**20,
        "device_mib": moved.device_bytes / 2**20,
        "host_mib": moved.host_bytes / 2**20,
        "accuracy": summary.accuracy,
        "reuse_rate": summary.reuse_rate,
    }


def _median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return median(listed) if listed else None


def _link_seconds(settings: StudySettings, runs: MethodRuns) -> float:
    """Return the link's least seconds per byte: 0 on a GPU, which has a link of its own."""
    runner, _ = load_model(settings.model, EngineSettings())
    if runner.device.type == "cuda":
        return 0.0
    dense = [pair.dense.completion.receipt for pair in runs.answers]
    token = median(one.parts_ms["compute"] / one.prompt_tokens for one in dense) / 1e3
    return _LOAD_RATIO * token / runner.spec.bytes_per_token


STUDY = Study(
    "offload",
    "Anchors in host memory",
    "Table A.6, MMLU, Llama-3.1-8B, 4K-token contexts, all anchors offloaded to the CPU, 3 and 4 agents: softmax 104 "
    "and 122 ms, offloading 1260 and 1300 ms per agent, 66.7 and 68.0 % at 49.7 and 51.0 % reuse, 68.5 and 95.1 GB. "
    "Without offloading (Table A.5) the softmax takes up to 18 ms.",
    measure,
    Plot("agents", ("match_ms", "ttft_ms", "loaded_mib"), "anchors"),
    default={"agents": 0},
    quick={"agents": 0, "questions": 10},
)
