"""The engine without its thread: schedule, forward, sample, finish. One owner, no locks.

An error in one request's own parts (its sampling, its text, what is learned from it) ends that request and no other. A
pass that raises ends the requests in its batch.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping

from torch import Tensor

from kedge.anchors.translator import translate_into
from kedge.cache import CacheManager, Changes
from kedge.discovery import PlainRequests
from kedge.engine.base import Quota
from kedge.engine.local.admission import Admission
from kedge.engine.local.answers import Answers
from kedge.engine.local.batch import flatten
from kedge.engine.local.components import Assembler
from kedge.engine.local.disk_files import DiskFiles
from kedge.engine.local.host_loads import Loading
from kedge.engine.local.inspection import Inspection
from kedge.engine.local.learning import Learning
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.preassembly import PromptPreassembler, PromptWriter
from kedge.engine.local.requests import Requests
from kedge.engine.local.scheduler import Scheduler, ServiceOrders, Work
from kedge.engine.local.sentinel_checks import SentinelChecks
from kedge.engine.local.sentinels import Sentinels
from kedge.engine.local.sequence import BaseJob, PreparedPrompt, RequestSequence, Sequence
from kedge.engine.local.sessions import FixedPrompts, SessionCaching
from kedge.engine.local.shared_writes import SharedWrites
from kedge.engine.local.state_snapshots import StateSnapshots
from kedge.errors import EngineClosed, OutOfBlocks
from kedge.hints.actions import ActionOutcome
from kedge.kv.copy import TorchCopier
from kedge.kv.storage import PagedStorage
from kedge.reuse.costs import EngineCosts
from kedge.reuse.runtime import Runtime
from kedge.settings import EngineSettings
from kedge.types import GenerateRequest, Namespace, RunKey, TenantId, Tokens, TurnHints
from kedge.workflow.forecast import AgentKey

logger = logging.getLogger(__name__)
MEASURED = 64
"""Least tokens of a pass for measuring the cost of computing; the fixed cost dominates smaller ones."""


class EngineCore:
    """Owner of the model, the cache, the storage and the anchors, which runs the passes."""

    def __init__(
        self,
        runner: ModelRunner,
        cache: CacheManager,
        storage: PagedStorage,
        runtime: Runtime,
        loading: Loading,
        carriers: tuple[TorchCopier | DiskFiles, ...],
        assembler: Assembler,
        costs: EngineCosts,
        config: EngineSettings,
        capacity: int,
    ) -> None:
        """Build the engine; `capacity` is the tokens of the device tier, `carriers` move blocks between tiers."""
        self._runner, self._cache, self._storage, self._runtime = runner, cache, storage, runtime
        self._carriers, self._assembler, self._costs, self._loading = carriers, assembler, costs, loading
        self._sessions = SessionCaching(cache, is_on=config.tiers.policy == "sessions")
        self._fixed = FixedPrompts(cache, self._sessions)
        self._states = states = StateSnapshots(runner.recurrent, cache, config.state_memory, self._fixed.length)
        loading.reusable = states.reusable
        self.plain = PlainRequests(config.discovery)
        longest, translate = min(runner.max_positions, capacity), translate_into(storage)
        jobs, ahead, running = deque[BaseJob](), deque[PreparedPrompt](), list[RequestSequence]()
        self.sentinel_checks = SentinelChecks(sentinels := Sentinels(storage))
        writer = PromptWriter(cache, runtime, translate, storage.block_size, ahead, costs, sentinels)
        self._preassembly = PromptPreassembler(cache, runtime, writer, longest, ahead)
        self.requests = requests = Requests(cache, loading, self._preassembly, self._sessions, self.plain, states)
        self._learning = Learning(runtime, cache, storage, jobs, config.learning, longest, requests.release)
        self._admission = Admission(
            *(cache, runtime, loading, assembler, self._preassembly, self._learning, costs, sentinels),
            *(shared := SharedWrites(cache, storage, running), states, requests.preempt, requests.end),
        )
        limits, queues = (config.max_batch_tokens, config.max_running, config.learning.budget), (jobs, ahead, running)
        service = ServiceOrders(cache, self._sessions) if config.tiers.policy == "sessions" else None
        self.scheduler = Scheduler(self._admission.admit, self._admission, costs, *limits, *queues, service)
        parts = cache, self._fixed, runtime, self._learning, self._preassembly
        self._answers = Answers(runner.eos_token_ids, self.scheduler, *parts, requests.end)
        requests.scheduler, requests.learning = self.scheduler, self._learning
        figures = costs, runtime, storage, self.plain, states, shared
        self.inspection = Inspection(self.scheduler, cache, loading, self._preassembly, self._learning, *figures)

    # requests and hints ---------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no work is left except learning."""
        return self.scheduler.idle and not self._preassembly.pending and not self._runtime.due

    def prepare(self, request: GenerateRequest) -> None:
        """Take the hint that such a request is expected."""
        if self._assembler.works_ahead and not self._runner.recurrent:
            self._preassembly.expect(request)

    def end_run(self, run: RunKey) -> None:
        """Forget a run, once nothing is left to learn from it."""
        self._preassembly.end_run(run)
        self._learning.end_run(run)

    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens]) -> None:
        """Take the changes of the forecast, and the fixed prompts of agents that are about to call."""
        self._sessions.on_forecast(changes)
        self._runtime.on_forecast(changes)
        self._preassembly.forecast(changes)
        self._fixed.known(prompts)

    def advise(self, namespace: Namespace, hints: TurnHints) -> tuple[ActionOutcome, ...]:
        """Take what a client says of its sessions without a request. Returns what becomes of each hint."""
        return self._sessions.advise(namespace, hints)

    # steps ----------------------------------------------------------------------------------------------------

    @property
    def transferring(self) -> bool:
        """Whether a copy between the tiers is queued or under way."""
        return self._cache.transferring

    def pump(self) -> None:
        """Complete finished copies, and start the next ones."""
        if found := self.plain.forecasts.take():
            self.forecast(found.next_runs, found.prompts)
        self.plain.log()
        self._sessions.advance()
        if self._cache.pump():
            self._preassembly.wake()
        if self._cache.starved:
            self._preassembly.give_back()

    def step(self) -> bool:
        """Run one forward pass, and one piece of work that no request waits for.

        Returns False if all remaining work waits for a copy.
        """
        self.pump()
        began = time.monotonic()
        work = self.scheduler.schedule()
        if work:
            self._run(work)
        if self._spare(time.monotonic() - began) or work:
            return True
        if self.transferring:
            return False
        if self.scheduler.unadmitted or self.scheduler.jobs:
            self._make_room()
        return True

    def _spare(self, seconds: float) -> bool:
        """Do a piece of work that no request waits for, after a pass of `seconds`. Returns False if there was none.

        While requests run, that is learning, within its budget; while none waits for a first token, also a piece of
        what is needed next: anchors and base KV from the host, then the prepared prompt itself.
        """
        if self.scheduler.running:
            self._learning.spend(seconds)
        if self.scheduler.someone_waits or self.scheduler.jobs:
            return False
        return self._runtime.fetch() or (self.scheduler.works_ahead and self._preassembly.assemble())

    @property
    def can_learn(self) -> bool:
        """Whether a finished request is left to learn from, and the base KV that this needs is there."""
        return not self.scheduler.jobs and self._learning.ready

    def learn(self) -> None:
        """Learn one piece."""
        self._learning.step()

    def _run(self, work: list[Work]) -> None:
        began = time.monotonic()
        try:
            logits = self._forward(work)
        except Exception as error:  # such as out of memory: requests outside of this batch are still served
            logger.exception("a batch of %s sequences failed", len(work))
            return self._fail(work, error)
        for item in work:
            del item.sequence.todo[: len(item.positions)]
            self._states.computed(item.sequence, item.positions[-1] + 1)
        self._answers.read_prompts(work, logits)
        ended = [(item, rows[-1]) for item, rows in zip(work, logits, strict=True) if not item.sequence.todo]
        refuted = self.sentinel_checks.refuted([item.sequence for item, _ in ended])
        for sequence in refuted:
            self.requests.compute_again(sequence)
        ready = [(item, row) for item, row in ended if item.sequence not in refuted]
        self._computed([item.sequence for item, _ in ready], [row for _, row in ready])
        tokens, seconds = sum(len(item.positions) for item in work), time.monotonic() - began
        if ready:  # a GPU has certainly finished only once a result has been read
            self._costs.observe_pass(tokens, len(work), seconds)
            if tokens >= MEASURED:
                self._cache.observe_compute(tokens, seconds)
        return None

    def _forward(self, work: list[Work]) -> tuple[Tensor, ...]:
        """Return the logits [rows, vocab] of each sequence: after its last position, or after all of them."""
        return self._runner.forward(flatten(work, self._storage)).split([item.logit_rows for item in work])

    def _fail(self, work: list[Work], error: Exception) -> None:
        """Drop work that no request waits for from a pass that raised, and run the rest again; without such work, end
        the requests in the pass.
        """
        requests = [item.sequence for item in work if isinstance(item.sequence, RequestSequence)]
        for item in work:
            if isinstance(item.sequence, PreparedPrompt):
                self._preassembly.failed(item.sequence)
            elif isinstance(item.sequence, BaseJob):
                self._learning.drop(item.sequence)
        if requests and len(requests) < len(work):
            return self._run([item for item in work if isinstance(item.sequence, RequestSequence)])
        for sequence in requests:
            self.requests.end_failed(sequence, f"the model raised {error!r}")
        return None

    def recover(self, error: Exception) -> None:
        """End the batch after an error of the engine itself, so that it can continue.

        Raises `PlanError` if the block accounting is inconsistent even then.
        """
        for sequence in tuple(self.scheduler.running):
            self.requests.end_failed(sequence, f"the engine raised {error!r}")
        self._preassembly.clear()
        self._learning.clear()
        self.inspection.check_integrity()

    def _make_room(self) -> None:
        """Drop learning, a base prefill, or what the first request waits for.

        Called when nothing runs, nothing is copied and no request can be admitted.
        """
        waiting = self.scheduler.unadmitted
        if self._learning.reclaim() or self._learning.reclaim_job():
            return
        if not waiting:
            self._learning.drop(self.scheduler.jobs[0])
        elif (sequence := waiting[0]).load_asked is not None and not sequence.gave_up:
            self._loading.give_up(sequence)
        else:
            why = "no room, though nothing else runs"
            self.requests.end(sequence, OutOfBlocks("request_id", sequence.request.request_id, why))

    # after a pass ---------------------------------------------------------------------------------------------

    def _computed(self, sequences: list[Sequence], rows: list[Tensor]) -> None:
        """Continue sequences with all tokens computed; `rows` are their last logits [vocab]."""
        for sequence in sequences:
            if isinstance(sequence, BaseJob):
                self._learning.done(sequence)
                self._preassembly.wake()
            elif isinstance(sequence, PreparedPrompt):
                self.scheduler.done(sequence)
        pairs = zip(sequences, rows, strict=True)
        self._answers.go_on([(one, row) for one, row in pairs if isinstance(one, RequestSequence)])

    # upkeep -----------------------------------------------------------------------------------------------------

    def limit(self, tenant: TenantId, quota: Quota) -> None:
        """Limit what a tenant holds."""
        self.inspection.learned[0].limit(tenant, quota.anchors, quota.anchor_bytes)
        self._cache.limit_host(tenant, quota.host_bytes)

    def clear(self) -> None:
        """Empty the prefix cache and forget all anchors and base KV; running requests go on."""
        self._preassembly.clear()
        self.plain.clear()
        self._cache.clear()
        self._states.clear()
        self._runtime.clear()

    def shut(self, cause: BaseException | None) -> None:
        """End all requests: as cancelled, or, if the thread died, with `EngineClosed`."""
        error = cause and EngineClosed("engine", cause, "its thread has died")
        for sequence in self.requests.sequences:
            self.requests.end(sequence, error)
        self._preassembly.shut()
        for carrier in self._carriers:
            carrier.close()
