"""What comes with vLLM's statistics: the plug-in's counters, for vLLM's log line and its `/metrics`, and its answers to
messages: what becomes of hints without a prompt, and the report of plain traffic.

A message is sent as a request that is aborted at once, which has no output.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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

from kedge.hints.actions import ActionOutcome, ActionResult
from kedge.integrations.vllm.entry_point import died
from kedge.integrations.vllm.plugin.hints import NO_PROMPT, namespace_of, salt_of
from kedge.types import Namespace

TIMEOUT = 5.0
"""Seconds to wait for an answer: as long as a step may take"""
BEST_FIRST = list(ActionResult)
"""Of what several data-parallel engines answer, the best counts: a session is in one of them"""
REPORT_SECONDS = 1.0
"""Seconds between two reports of counts while requests run"""
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
"""Key of what no output carries, by vLLM's ids: receipts of aborted requests, and answers to messages"""


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

    async def advise(
        self, engine_core: Any, namespace: Namespace, hints: Mapping[str, Any], timeout: float = TIMEOUT
    ) -> list[ActionOutcome] | None:
        """Send hints to every engine of vLLM's client, and return what becomes of them; None: that was not reported.
        Raises `EngineClosed` where vLLM's engine has died.
        """
        found = await self._ask(engine_core, namespace, {**hints, "advice": True}, timeout)
        return _best(map(ActionOutcome.from_dict, one) for one in found) if found else None

    async def report(self, engine_core: Any, timeout: float = TIMEOUT) -> Mapping[str, Any] | None:
        """Return what was found in plain traffic (`PlainRequests.report`), of several engines by the first; None: none
        answered. Raises `EngineClosed` where vLLM's engine has died.
        """
        return next(iter(await self._ask(engine_core, namespace_of(None), {"report": True}, timeout)), None)

    async def _ask(self, engine_core: Any, namespace: Namespace, hints: Mapping[str, Any], timeout: float) -> list[Any]:
        """Return the answers to a message of all engines that give one."""
        count = len(getattr(engine_core, "core_engines", ()))
        ranks = range(count) if count > 1 else [None]
        names = [f"kedge-message-{uuid.uuid4().hex}" for _ in ranks]
        answers = [self.expect(name) for name in names]
        try:
            for name, rank in zip(names, ranks, strict=True):
                await engine_core.add_request_async(message(name, namespace, hints, rank=rank))
            await asyncio.wait(answers, timeout=timeout)
        except EngineDeadError:
            raise died() from None
        finally:
            for name in names:
                self.forget(name)
        return [one.result() for one in answers if one.done()]

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


LATE_ANSWERS = LateAnswers()
"""Of this process: Kedge's engine, or the middleware in vLLM's server"""


class KedgeStats(KVConnectorStats):
    """Counts since the last report by names of `COUNTERS`, with `ANSWERS`."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        answers = {**self.data.get(ANSWERS, {}), **other.data.get(ANSWERS, {})}
        self.data = dict(Counter(_counts(self.data)) + Counter(_counts(other.data)))
        self.data.update({ANSWERS: answers} if answers else {})
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
        LATE_ANSWERS.answered(transfer_stats_data.get(ANSWERS, {}))
        for name, count in _counts(transfer_stats_data).items():
            self._series[name][engine_idx].inc(count)


def _counts(data: dict[str, Any]) -> dict[str, int | float]:
    return {name: count for name, count in data.items() if name != ANSWERS}
