"""The half of the connector in vLLM's workers: it copies, translates, captures and learns, as the scheduler orders."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kedge.anchors.anchor import AnchorId
from kedge.anchors.base_store import BaseStore
from kedge.anchors.offsets import Blend, empty_table
from kedge.anchors.store import AnchorStore
from kedge.anchors.translator import Translation, translate_into
from kedge.cache import Direction
from kedge.engine.common.state.saving import Snapshots
from kedge.engine.common.state.snapshot import EngineState
from kedge.integrations.vllm.plugin.block_layout import blocks_of, memory_order
from kedge.integrations.vllm.plugin.learner import Learner
from kedge.integrations.vllm.plugin.pages import Pages
from kedge.integrations.vllm.plugin.requests import Orders, Reports, TranslationQuery, TranslationVerdict
from kedge.kv.copy import PoolCopier
from kedge.kv.segment import KVSegment
from kedge.reuse.costs import LONGEST, REPEATS, EngineCosts
from kedge.reuse.learning import LearningBudget
from kedge.types import Miss

logger = logging.getLogger(__name__)
T = TypeVar("T")
MIN_MEASURED = 64
"""Tokens of the smallest pass whose time is reported as the cost of computing."""


def pool_views(registered: Iterable[Tensor], num_blocks: int) -> list[Tensor]:
    """Return views [blocks, …] of all bytes of pages, each byte in one where the pages of groups lie over each other.

    Raises `LayoutUnknown` for pages that do not count the blocks.
    """
    views = {}
    for view in sorted((blocks_of(one, num_blocks) for one in registered), key=lambda one: one[0].nbytes):
        is_dense = memory_order(view)[0].is_contiguous()  # then smaller ones that begin there are in it
        views[view.data_ptr(), view.stride(0), None if is_dense else (view.shape, view.stride())] = view
    return list(views.values())


def measure_writes(costs: EngineCosts, pages: Pages) -> None:
    """Translate zeros into pages that are not in use yet. It builds the kernels where there are any."""
    table = pages.first(LONGEST)
    kv = pages.read(table, 0, len(table.slots))
    base = KVSegment(torch.zeros_like(kv.keys), torch.zeros_like(kv.values))
    offsets = empty_table(base)
    offsets.put(AnchorId(0), torch.zeros(1, offsets.width, device=base.device))
    rows = torch.zeros(base.tokens, 1, dtype=torch.int64)
    whole = Translation(0, base, Blend(rows, torch.ones_like(rows, dtype=torch.float32), offsets.version), offsets)
    write = partial(translate_into(pages), table)
    _seconds(pages, write, whole)  # the first use of anything takes longer
    for part in filter(None, (whole.within(0, 1), whole)):
        for _ in range(REPEATS):
            costs.observe_translation(1, part.tokens, _seconds(pages, write, part))
    costs.settle()


def _seconds(pages: Pages, write: Callable[[Sequence[Translation]], None], part: Translation) -> float:
    """Return the seconds until a translation is written, on the device too. Later ones are measured without waiting for
    it: next to the launches, by which a pass begins later, what the device takes is little.
    """
    pages.synchronize()
    began = time.monotonic()
    write([part])
    pages.synchronize()
    return time.monotonic() - began


class PassEvents:
    """The passes that were started on a GPU, with CUDA events around each."""

    def __init__(self) -> None:
        self._started: deque[tuple[int, int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._begin: torch.cuda.Event | None = None
        self._last: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Note that a pass is started from here on."""
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def end(self, tokens: int, rows: int) -> None:
        """Note that a pass over `tokens` tokens of `rows` requests has been started, if its beginning was noted."""
        if self._begin is not None:
            done = torch.cuda.Event(enable_timing=True)
            done.record()
            self._started.append((tokens, rows, self._begin, done))
            self._begin = None

    def take_ended(self) -> list[tuple[int, int, float, float]]:
        """Return tokens, requests, seconds and the gap before it, of each pass that has ended since the last call."""
        ended = []
        while self._started and self._started[0][3].query():
            tokens, rows, begin, done = self._started.popleft()
            waited = self._last.elapsed_time(begin) / 1e3 if self._last else 0.0
            ended.append((tokens, rows, begin.elapsed_time(done) / 1e3, waited))
            self._last = done
        return ended


class WorkerSide:
    """One rank's copies and translations. Parts that are off were never opened."""

    def __init__(self, block_size: int, throttle: float, budget: LearningBudget, costs: EngineCosts) -> None:
        """`throttle` slows copies down, `budget` is the time for learning, and `costs` are those of every pass: by the
        clock on a CPU, by events on a GPU.
        """
        self._block_size, self._throttle, self._budget, self._costs = block_size, throttle, budget, costs
        self._copier: PoolCopier | None = None
        self._learner: Learner | None = None
        self._room = 0
        """Bytes that anchors and base KV may take, until they have them"""
        self._refusal = "translation is off"
        """Why this rank cannot translate"""
        self._reports = Reports()
        self._bad_blocks: set[int] = set()
        self._began = self._not_computing = 0.0
        """When the step began, and how long it was about something else than its pass"""
        self._passes: PassEvents | None = None
        """Set on a GPU, where a pass has only been started when vLLM returns from it"""
        self._reported_learning = False
        self._learning = threading.RLock()
        """Held by whoever uses the learner: a step, or the thread that saves what was learned"""
        self._snapshots: Snapshots | None = None

    def open_host_tier(self, layers: Sequence[Tensor], num_blocks: int) -> None:
        """Allocate the host tier: `num_blocks` blocks for each of `layers`, views [blocks, …] of their pages, in the
        device's memory order.
        """
        pools = []
        for blocks in layers:
            device = memory_order(blocks)[None]
            shape = (1, num_blocks + 1, *device.shape[2:])
            pools.append((torch.empty(shape, dtype=device.dtype), device))
        self._copier = PoolCopier(pools, 1, self._throttle)

    def keep_state(self, state: EngineState) -> None:
        """Go on from what `state` has saved, and keep what is learned in it from now on, where it is to be trusted."""
        assert self._learner
        rotation = self._learner.rotation
        self._snapshots = Snapshots(
            state.folder, state.load, lambda: None if rotation.refusal else state.save(), give_back=state.close
        )
        if self._snapshots.load():
            rotation.trust()
        self._snapshots.start()

    def ask(self, question: Callable[[AnchorStore, BaseStore], T]) -> T:
        """Return the result of a question to what was learned, asked between two steps. Any thread may call; it can
        read what the result refers to.
        """
        assert self._learner
        with self._learning:
            self._learner.pages.synchronize()
            return question(self._learner.anchors, self._learner.bases)

    # a step, in vLLM's order ----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Note the time at which a step begins."""
        self._began = time.monotonic()
        if self._passes:
            self._passes.begin()
            if self._room:
                self._make_room()

    def _make_room(self) -> None:
        """Let the allocator have the room for anchors and base KV at once: from the driver, every text takes it a
        millisecond (H200). Not before the first step, as vLLM empties the allocator once more when it captures graphs.
        """
        torch.empty(min(self._room, torch.cuda.mem_get_info()[0] // 2), dtype=torch.uint8, device="cuda")
        self._room = 0

    def before_pass(self, orders: Orders) -> None:
        """Write translations and start loads. vLLM calls this after the pass where nothing is written."""
        self._not_computing = 0.0
        if orders.is_quiet:
            return
        began = time.monotonic()
        if self._learner and orders.writes:
            with self._learning:
                for write in orders.writes:
                    try:
                        self._learner.write(write)
                    except Exception:  # vLLM fails the request, or computes the blocks
                        logger.exception("request %s was not translated", write.request_id)
                        size, spans = self._block_size, write.spans
                        self._bad_blocks.update(write.blocks[spans[0].start // size : -(-spans[-1].stop // size)])
            if self._passes:
                self._passes.begin()
        self._submit(orders, Direction.LOAD)
        self._not_computing = time.monotonic() - began

    def after_pass(self, orders: Orders) -> None:
        """Start offloads, learn from captured prompts, and answer queries."""
        seconds = time.monotonic() - self._began - self._not_computing if orders.scheduled else 0.0
        if orders.scheduled:
            self._budget.computes()
            ended = [(orders.scheduled, orders.rows, seconds, 0.0)]
            if self._passes:
                self._passes.end(orders.scheduled, orders.rows)
                ended = self._passes.take_ended()
                seconds = sum(taken for _, _, taken, _ in ended)
            for tokens, rows, taken, waited in ended:
                self._costs.observe_pass(tokens, rows, taken, waited)
                if tokens >= MIN_MEASURED:
                    self._reports.computed = (tokens, taken)
        if orders.is_quiet and (self._learner is None or self._learner.is_at_rest):
            return
        self._submit(orders, Direction.OFFLOAD)
        with self._learning:
            if self._learner:
                self._learn_from_step(self._learner, orders, seconds)
            for query in orders.queries:
                self._reports.verdicts[query.request.request_id] = self.answer(query)
        for capture in orders.captures:
            self._reports.captured[capture.capture_id] = 1

    def _learn_from_step(self, learner: Learner, orders: Orders, seconds: float) -> None:
        if orders.forgets:
            learner.clear()
        for capture in orders.captures:  # first, since one that has ended is dropped, and captured by its plan
            try:
                learner.capture(capture)
            except Exception:  # out of memory, say
                logger.exception("capture %s was not read", capture.capture_id)
        for request_id in orders.dropped:
            learner.drop(request_id)
        for prompt in orders.expected:
            learner.expect(prompt)
            self._reported_learning = True  # the scheduler goes on stepping until it hears that nothing is left
        for run in orders.ended_runs:
            learner.end_run(run)
        is_awaited = orders.prefills or bool(orders.queries)
        self._budget.spend(learner.learn, seconds, is_awaited=is_awaited)
        self._reports.learning = learner.is_learning

    def answer(self, query: TranslationQuery) -> TranslationVerdict:
        """Return what of a prompt has to be computed: all of it where that cannot be found out."""
        refusal = self._refusal
        if self._learner:
            try:
                with self._learning:
                    return self._learner.judge(query)
            except Exception:
                logger.exception("request %s was not matched", query.request.request_id)
                refusal = "matching it failed"
        return TranslationVerdict((range(query.request.prompt_tokens),), (Miss("*", refusal),))

    def _submit(self, orders: Orders, direction: Direction) -> None:
        """Start the copies in a direction."""
        for copy in orders.copies:
            if copy.direction is direction:
                assert self._copier  # a copy that nobody carries out would hold its blocks for ever
                self._copier.submit(copy)

    def build_connector_worker_meta(self) -> Reports | None:
        """Return the reports of a step, None where nothing has changed."""
        if self._copier:
            self._reports.copies += self._copier.drain()
        reports = self._reports
        if reports.is_empty and self._reported_learning == reports.learning:
            return None
        self._reports, self._reported_learning = Reports(), reports.learning
        return reports

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose translation has failed since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def close(self) -> None:
        """End the copier's thread, and write the last snapshot of what was learned."""
        if self._copier:
            self._copier.close()
        if self._snapshots:
            self._snapshots.close()
