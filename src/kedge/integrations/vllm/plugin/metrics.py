"""What comes with vLLM's statistics: the plug-in's counters, for vLLM's log line and its `/metrics`, the report of
plain traffic, and what becomes of hints without a prompt.

Such hints are sent as a request that is aborted at once, which has no output.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import Counter as PromCounter
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError

from kedge.discovery import PlainRequests
from kedge.hints.actions import ActionOutcome, ActionResult
from kedge.integrations.vllm.entry_point import died
from kedge.integrations.vllm.plugin.hints import NO_PROMPT, salt_of
from kedge.types import Namespace

TIMEOUT = 5.0
"""Seconds to wait for what becomes of hints: as long as a step may take"""
BEST_FIRST = list(ActionResult)
"""Of what several data-parallel engines answer, the best counts: a session is in one of them"""
REPORT_SECONDS, REPORT_SHARE = 1.0, 0.02
"""Seconds between two reports while requests run, and the share of the time that those of plain traffic may take beside
clients that take turns
"""
COUNTERS = {
    "evictions_varying": "Device blocks evicted that followed a fixed prompt.",
    "evictions_labelled": "Device blocks of fixed prompts evicted.",
    "evictions_unlabelled": "Device blocks evicted that belonged to no agent.",
    "host_evictions": "Host blocks evicted.",
    "host_evictions_over_quota": "Host blocks evicted as their tenant held as much as it may.",
    "blocks_loaded": "Blocks copied from the host to the device.",
    "blocks_offloaded": "Blocks copied from the device to the host.",
    "prefetches_completed": "Prefetches that landed before a request waited for them.",
    "prefetches_late": "Prefetches that a request waited for.",
    "prefetches_failed": "Prefetches whose copy failed.",
    "failed_copies": "Copies that failed; their blocks were computed.",
    "denied_loads": "Loads that found no room on the device.",
    "skipped_backups": "Fixed prompts that found no room on the host.",
    "loads_that_do_not_pay": "Loads that would have taken longer than computing.",
    "translated_tokens": "Prompt tokens whose KV was translated.",
    "base_prefills_queued": "Base prefills that the scheduler has been asked for.",
    "base_prefills_done": "Base prefills that it has computed.",
    "base_prefills_dropped": "Base prefills that it has given up: for want of blocks, or as too many waited.",
    "ignored_hints": "Hints with a name or value that is not accepted.",
    "ignored_labels": "Fixed prompts of agents without a forecast.",
    "ignored_forecasts": "Forecasts, or their entries for single agents, that were ignored.",
}
ANSWERS = "answers"
"""Key of what no output carries, by vLLM's ids: receipts of aborted requests, and what became of hints without a prompt
"""
REPORT = "report"
"""Key of the report of plain traffic (`PlainRequests.report`)."""
REPORTS: dict[int, dict[str, Any]] = {}
"""Engine -> its last report, in the process of vLLM's server: `kedge.integrations.vllm.middleware` shows them."""


def message(
    request_id: str,
    namespace: Namespace,
    hints: Mapping[str, Any],
    tokens: Sequence[int] = NO_PROMPT,
    rank: int | None = None,
) -> EngineCoreRequest:
    """Return hints for the plug-in as a request that vLLM aborts at once; `rank` is a data-parallel engine's."""
    extra = {"kv_transfer_params": {"kedge": dict(hints)}}
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1, temperature=0, detokenize=False, extra_args=extra),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=salt_of(namespace) or None,
        data_parallel_rank=rank,
        abort_immediately=True,
    )


class LateAnswers:
    """Who waits for what comes with vLLM's statistics instead of an output. Each entry belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Any]] = {}

    def __len__(self) -> int:
        """Return the number of answers that are waited for."""
        return len(self._waiting)

    def expect(self, name: str) -> asyncio.Future[Any]:
        """Return what will be the answer to a message or a request, until `forget`."""
        self._waiting[name] = found = asyncio.get_running_loop().create_future()
        return found

    def forget(self, name: str) -> None:
        """Drop the answer to a message or a request."""
        self._waiting.pop(name, None)

    async def ask(
        self, engine_core: Any, namespace: Namespace, hints: Mapping[str, Any], timeout: float = TIMEOUT
    ) -> list[ActionOutcome] | None:
        """Send hints to every engine of vLLM's client, and return what becomes of them; None: that was not reported.

        Raises `EngineClosed` where vLLM's engine has died.
        """
        count = len(getattr(engine_core, "core_engines", ()))
        ranks = range(count) if count > 1 else [None]
        name = f"kedge-advice-{uuid.uuid4().hex}"
        answers = [self.expect(f"{name}-{at}") for at in range(len(ranks))]
        try:
            for at, rank in enumerate(ranks):
                given = message(f"{name}-{at}", namespace, {**hints, "advice": True}, rank=rank)
                await engine_core.add_request_async(given)
            done, _ = await asyncio.wait(answers, timeout=timeout)
        except EngineDeadError:
            raise died() from None
        finally:
            for at in range(len(ranks)):
                self.forget(f"{name}-{at}")
        return _best(map(ActionOutcome.from_dict, one.result()) for one in done) if done else None

    def answered(self, answers: Mapping[str, Any]) -> None:
        """Take answers by vLLM's ids; those that nobody waits for are dropped."""
        for name, answer in answers.items():
            # vLLM's id of a request is ours with a hyphen and a random suffix
            future = self._waiting.get(name) or self._waiting.get(name.rpartition("-")[0])
            if future is not None and not future.done():
                future.set_result(answer)


def _best(answers: Iterable[Iterable[ActionOutcome]]) -> list[ActionOutcome]:
    best: dict[tuple[str, str], ActionOutcome] = {}
    for one in (one for outcomes in answers for one in outcomes):
        known = best.setdefault((one.action_id, one.session), one)
        if BEST_FIRST.index(one.outcome) < BEST_FIRST.index(known.outcome):
            best[one.action_id, one.session] = one
    return list(best.values())


class StatReports:
    """What is reported of one engine: counts, and plain traffic where it has changed. Once a second while requests run,
    and in every step once the last has ended, since an idle engine takes no more steps.
    """

    def __init__(
        self, totals: Callable[[], Mapping[str, int]], plain: PlainRequests, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`totals` returns everything since the start; `clock` is in seconds."""
        self._totals, self._plain, self._clock = totals, plain, clock
        self._counted: Counter[str] = Counter()
        self._shown = (0, True)
        self._due = self._plain_due = -math.inf

    def take(self, *, idle: bool) -> dict[str, Any]:
        """Return what is new since the last report; nothing while requests run and the next one is not due."""
        now = self._clock()
        if not idle and now < self._due:
            return {}
        self._due, before = now + REPORT_SECONDS, self._counted
        self._counted = Counter(self._totals())
        data: dict[str, Any] = dict(self._counted - before)
        state = self._plain.totals.requests, self._plain.is_idle
        if state != self._shown and now >= self._plain_due:
            data[REPORT], self._shown = self._plain.report(), state
            ended = self._clock()
            self._plain_due = ended + min(REPORT_SECONDS, (ended - now) / REPORT_SHARE)
        return data


LATE_ANSWERS = LateAnswers()
"""Of this process: Kedge's engine, or the middleware in vLLM's server"""


class KedgeStats(KVConnectorStats):
    """Counts since the last report by names of `COUNTERS`, with `ANSWERS` and `REPORT`."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        others = {
            ANSWERS: {**self.data.get(ANSWERS, {}), **other.data.get(ANSWERS, {})},
            REPORT: other.data.get(REPORT) or self.data.get(REPORT),
        }
        self.data = dict(Counter(_counts(self.data)) + Counter(_counts(other.data)))
        self.data.update({name: value for name, value in others.items() if value})
        return self

    def reduce(self) -> dict[str, int | float]:
        return _counts(self.data)


class KedgePromMetrics(KVConnectorPromMetrics):
    """The counters as `vllm:kedge_…` in Prometheus, one series for each engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters: Any = metric_types[PromCounter]
        self._series: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            counter = counters(name=f"vllm:kedge_{name}", documentation=text, labelnames=labelnames)
            self._series[name] = {one: counter.labels(*values) for one, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if report := transfer_stats_data.get(REPORT):
            REPORTS[engine_idx] = report
        LATE_ANSWERS.answered(transfer_stats_data.get(ANSWERS, {}))
        for name, count in _counts(transfer_stats_data).items():
            self._series[name][engine_idx].inc(count)


def _counts(data: dict[str, Any]) -> dict[str, int | float]:
    return {name: count for name, count in data.items() if name not in (ANSWERS, REPORT)}
