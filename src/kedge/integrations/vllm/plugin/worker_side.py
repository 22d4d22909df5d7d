"""A rank's half of the plug-in: it copies, translates, captures and learns, as the scheduler orders."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from kedge.errors import KedgeError, TranslationRefused
from kedge.integrations.vllm.plugin.learner import Learner
from kedge.integrations.vllm.plugin.messages import Ended, Orders, Reports, Verdict, Write
from kedge.integrations.vllm.plugin.pages import memory_order
from kedge.kv.copy import PoolCopier
from kedge.types import Miss

logger = logging.getLogger(__name__)
MEASURED = 64
"""Tokens of a pass from which it tells what computing costs"""


class WorkerSide:
    """What of it is switched off was never given."""

    def __init__(self, block_size: int, throttle: float) -> None:
        self._block_size, self._throttle = block_size, throttle
        self._copier: PoolCopier | None = None
        self._learner: Learner | None = None
        self._refusal = "translation is off"
        self._reports = Reports()
        self._bad_blocks: set[int] = set()
        self._began = 0.0
        self._measures = False
        """Whether a pass is over when vLLM says so: on a GPU it has only been started"""
        self._told_learning = False

    def open_host(self, kv_caches: Mapping[str, Tensor], num_blocks: int) -> None:
        """Allocates the host tier: for every layer as many blocks, each as it lies on the device."""
        pools = []
        for pages in kv_caches.values():
            device = memory_order(pages)[None]
            shape = (1, num_blocks + 1, *device.shape[2:])
            pools.append((torch.empty(shape, dtype=device.dtype, pin_memory=device.is_cuda), device))
        self._copier = PoolCopier(pools, 1, self._throttle)
        self._measures = not any(device.is_cuda for _, device in pools)

    def open_translation(self, learner: Learner | TranslationRefused) -> None:
        """Answers what is asked of this rank, or says why it cannot."""
        if isinstance(learner, Learner):
            self._learner = learner
        else:
            self._refusal = learner.why

    # the steps of a pass, in vLLM's order -------------------------------------------------------------------------

    def before(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def load(self, orders: Orders) -> None:
        """Writes translations, and starts copies towards the device. Before the pass where something is translated."""
        if self._learner:
            for write in orders.writes:
                self._write(self._learner, write)
        self._submit(orders, is_load=True)

    def _write(self, learner: Learner, order: Write) -> None:
        """What cannot be written is reported: vLLM computes it, or fails the request, as it is configured."""
        try:
            learner.write(order)
        except KedgeError:
            logger.exception("request %s was not translated", order.request_id)
            first, last = order.start // self._block_size, -(-order.stop // self._block_size)
            self._bad_blocks.update(order.blocks[first:last])

    def save(self, orders: Orders) -> None:
        """After the pass: starts copies to the host, captures, learns and judges."""
        if self._measures and orders.scheduled >= MEASURED:
            self._reports.computed = (orders.scheduled, time.monotonic() - self._began)
        self._submit(orders, is_load=False)
        if self._learner:
            self._attend(self._learner, orders)
        for capture in orders.captures:
            if capture.capture_id is not None:
                self._reports.captured[capture.capture_id] = 1
        for ask in orders.asks:
            refused = Verdict(0, (Miss("*", self._refusal),))
            self._reports.verdicts[ask.request.request_id] = self._learner.judge(ask) if self._learner else refused

    def _attend(self, learner: Learner, orders: Orders) -> None:
        for request_id in orders.dropped:
            learner.drop(request_id)
        for capture in orders.captures:
            learner.capture(capture)
        for run in orders.ended_runs:
            learner.end_run(run)
        learner.learn()
        self._reports.learning = learner.learning

    def _submit(self, orders: Orders, is_load: bool) -> None:
        for copy in orders.copies:
            if self._copier and (copy.direction == "load") is is_load:
                self._copier.submit(copy)

    def take_reports(self) -> Reports | None:
        """What there is to tell of a step."""
        for copied in self._copier.drain() if self._copier else ():
            self._reports.copies[copied.copy_id] = Ended.of(copied)
        reports, self._reports = self._reports, Reports()
        news = not reports.is_empty or self._told_learning != reports.learning
        self._told_learning = reports.learning
        return reports if news else None

    def take_bad_blocks(self) -> set[int]:
        """Blocks that should have been translated and were not."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def close(self) -> None:
        if self._copier:
            self._copier.close()
