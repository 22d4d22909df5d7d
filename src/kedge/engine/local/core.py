"""The engine without its thread: admit, run, postprocess, harvest. One owner, no locks."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial

from torch import Tensor

from kedge.anchors.base_store import BaseStore
from kedge.anchors.store import AnchorStore
from kedge.anchors.translator import Translator
from kedge.cache import CacheManager, Changes, Lease
from kedge.engine.base import Quota
from kedge.engine.local.batch import flatten
from kedge.engine.local.fixed import FixedPrompts
from kedge.engine.local.loading import Loading
from kedge.engine.local.model import ModelRunner
from kedge.engine.local.parts import Assembler
from kedge.engine.local.preassembly import Preassembly
from kedge.engine.local.scheduler import Scheduler, Work
from kedge.engine.local.sequence import BaseJob, Preparation, RequestSequence, Sequence
from kedge.errors import EngineClosed, ForwardFailed, KedgeError, OutOfBlocks, TranslationRefused
from kedge.kv.copy import TorchCopier
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.runtime.layout import Placed
from kedge.runtime.runtime import Runtime
from kedge.types import (
    FinishReason,
    GenerateRequest,
    RequestId,
    ReuseMode,
    RunId,
    TenantId,
    Tokens,
    new_request_id,
)
from kedge.workflow.forecast import AgentKey

logger = logging.getLogger(__name__)
MEASURED = 64
"""Tokens of a pass from which it tells what computing costs: below, its fixed cost is most of it."""


@dataclass(frozen=True, slots=True)
class Harvest:
    """A finished dense request whose blocks are kept until its offsets have been measured, step by step."""

    sequence: RequestSequence
    steps: Iterator[Placed]


class EngineCore:
    """Owns the model, the cache, the storage and the anchors."""

    def __init__(
        self,
        runner: ModelRunner,
        cache: CacheManager,
        storage: PagedStorage,
        runtime: Runtime,
        loading: Loading,
        copier: TorchCopier | None,
        assembler: Assembler,
        *,
        max_batch_tokens: int,
        max_running: int,
        capacity: int,
    ) -> None:
        self._runner, self._cache, self._storage, self._runtime = runner, cache, storage, runtime
        self._loading, self._copier, self._assembler = loading, copier, assembler
        self._fixed = FixedPrompts(cache)
        self.scheduler = Scheduler(self._admit, loading, max_batch_tokens, max_running)
        longest, ahead = min(runner.max_positions, capacity), self.scheduler.ahead
        self._preassembly = Preassembly(cache, runtime, Translator(storage), storage.block_size, longest, ahead)
        self._capacity = capacity
        self._harvests: deque[Harvest] = deque()
        self._ended_runs: list[tuple[TenantId, RunId]] = []

    @property
    def idle(self) -> bool:
        """Nothing is left to be done but learning."""
        return self.scheduler.idle and not self._preassembly.pending and not self._runtime.due

    def submit(self, sequence: RequestSequence) -> None:
        sequence.preparation = self._preassembly.claim(sequence.request)
        self.scheduler.waiting.append(sequence)

    def prepare(self, request: GenerateRequest) -> None:
        """Such a request is expected."""
        if self._assembler.works_ahead:
            self._preassembly.expect(request)

    @property
    def transferring(self) -> bool:
        """Whether a copy between the tiers is queued or under way."""
        return self._cache.transferring

    def pump(self) -> None:
        """Lands what has been copied and starts what is to be copied next."""
        if self._cache.pump():
            self._preassembly.wake()
        if self._cache.starved:
            self._preassembly.give_back()

    def step(self) -> bool:
        """One pass over the model, and one piece of what nobody waits for.

        False where all that is left to do waits for a copy.
        """
        self.pump()
        work = self.scheduler.schedule()
        if work:
            self._run(work)
        if self._spare() or work:
            return True
        if self.transferring:
            return False
        if self.scheduler.unadmitted or self.scheduler.jobs:
            self._make_room()
        return True

    def _spare(self) -> bool:
        """While nobody waits for a first token: a piece of what is needed next (anchors and base KV from the host, then
        the prompt itself) or, beside decodes, of learning. Whether there was any.
        """
        if self.scheduler.someone_waits or self.scheduler.jobs:
            return False
        if self._runtime.fetch() or self._preassembly.assemble():
            return True
        learns = bool(self.scheduler.running) and self.can_learn
        if learns:
            self.learn()
        return learns

    @property
    def can_learn(self) -> bool:
        """A finished request is left to learn from, and the base KV that this needs is there."""
        return bool(self._harvests) and not self.scheduler.jobs

    def _run(self, work: list[Work]) -> None:
        began = time.monotonic()
        try:
            logits = self._forward(work)
        except Exception as error:  # out of memory, say: whoever is not in this batch is served all the same
            logger.exception("a batch of %s sequences failed", len(work))
            return self._fail(work, error)
        for item in work:
            del item.sequence.todo[: len(item.positions)]
        ready = [(item.sequence, row) for item, row in zip(work, logits, strict=True) if not item.sequence.todo]
        for sequence, row in ready:
            self._computed(sequence, row)
        tokens = sum(len(item.positions) for item in work)
        if ready and tokens >= MEASURED:  # a GPU is done for certain only once a result has been read
            self._cache.observe_compute(tokens, time.monotonic() - began)
        return None

    def _forward(self, work: list[Work]) -> list[Tensor]:
        """The logits [vocab] after each share's last position; log-probabilities of prompts are noted."""
        logits = self._runner.forward(flatten(work, self._storage)).split([item.logit_rows for item in work])
        for item, rows in zip(work, logits, strict=True):
            if isinstance(item.sequence, RequestSequence):
                item.sequence.logprobs.read_prompt(item.positions, rows)
        return [rows[-1] for rows in logits]

    def _fail(self, work: list[Work], error: Exception) -> None:
        for item in work:
            failure = ForwardFailed("request_id", item.sequence.key, f"the model raised {error!r}")
            if isinstance(item.sequence, RequestSequence):
                self.end(item.sequence, failure)
            elif isinstance(item.sequence, Preparation):
                self._preassembly.failed(item.sequence)
            else:
                self._drop_job(item.sequence)

    # admission ------------------------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> bool:
        """Finds KV and room for a sequence; False where it has to wait for blocks."""
        if isinstance(sequence, RequestSequence):
            return self._admit_request(sequence)
        lease = self._lease(sequence, room=len(sequence.tokens))
        if lease is None:
            return False
        sequence.table = SlotTable.of(lease.blocks, self._storage.block_size)
        sequence.todo = list(range(lease.exact_tokens, len(sequence.tokens)))
        return True

    def _admit_request(self, sequence: RequestSequence) -> bool:
        began = time.monotonic()
        adopted = self._preassembly.adopt(sequence, sequence.room)
        lease = adopted or self._lease(sequence, sequence.room)
        if lease is None:
            return False
        sequence.table = SlotTable.of(lease.blocks, self._storage.block_size)
        waited = self._loading.ended(sequence, began)
        planned = time.monotonic()
        try:
            matched = self._complete(sequence) if adopted else self._plan(sequence, lease)
        except KedgeError as error:
            self.end(sequence, error)
            return False
        assembled = time.monotonic()
        sequence.parts = {
            "queue": began - sequence.arrival - waited,
            "match": matched - planned,
            "assemble": assembled - matched,
            "other": planned - began,
        }
        if sequence.load_asked is not None:
            sequence.parts["load"] = waited
        return True

    def _plan(self, sequence: RequestSequence, lease: Lease) -> float:
        """Decides what is translated, and writes it; the time in between."""
        assert sequence.table is not None
        plan = self._runtime.plan(sequence.request, lease.spans)
        matched = time.monotonic()
        sequence.plan = self._assembler.assemble(sequence.request, sequence.table, plan)
        sequence.todo = sequence.plan.computed
        return matched

    def _complete(self, sequence: RequestSequence) -> float:
        """Does what is left of an adopted preparation; when that begins."""
        began = time.monotonic()
        sequence.plan, sequence.todo = self._preassembly.complete(sequence)
        return began

    def _lease(self, sequence: Sequence, room: int) -> Lease | None:
        """Leases blocks for `room` tokens of a sequence, prompts that nobody has asked for yet giving way; None where
        there is no room now.
        """
        while True:
            try:
                return self._cache.admit(sequence.key, sequence.namespace, sequence.tokens, sequence.exact_limit, room)
            except OutOfBlocks:
                if not self._preassembly.give_back():
                    return None

    # after a pass ---------------------------------------------------------------------------------------------

    def _computed(self, sequence: Sequence, logits: Tensor) -> None:
        if isinstance(sequence, BaseJob):
            self._job_done(sequence)
        elif isinstance(sequence, Preparation):
            self.scheduler.done(sequence)
        elif isinstance(sequence, RequestSequence):
            self._next_token(sequence, logits)

    def _next_token(self, sequence: RequestSequence, logits: Tensor) -> None:
        if sequence.finish:
            return self._finish(sequence)
        if not sequence.max_tokens:
            self._note_first_token(sequence)
            return self._end_response(sequence, FinishReason.LENGTH, computed=len(sequence.tokens))
        token = sequence.sampler(logits)
        sequence.logprobs.read_answer(token, logits)
        if sequence.first_token is None:
            self._note_first_token(sequence)
        if token in self._runner.eos_token_ids and not sequence.request.sampling.ignore_eos:
            return self._end_response(sequence, FinishReason.STOP, computed=len(sequence.tokens))
        sequence.tokens.append(token)
        sequence.tell(sequence.text.push(token), (token,))
        last = len(sequence.tokens) - 1
        if sequence.text.stopped:
            return self._end_response(sequence, FinishReason.STOP, computed=last)
        if len(sequence.response) >= sequence.max_tokens:
            return self._end_response(sequence, FinishReason.LENGTH, computed=last)
        sequence.todo = [last]
        return None

    def _end_response(self, sequence: RequestSequence, reason: FinishReason, computed: int) -> None:
        """Finishes, after one more pass where KV is left behind for others."""
        sequence.end_response(reason, computed, is_read=self._is_read(sequence))
        if not sequence.todo:
            self._finish(sequence)

    def _is_read(self, sequence: RequestSequence) -> bool:
        """Whether others are going to read the response and may have its KV translated."""
        request = sequence.request
        return request.produces is not None and bool(sequence.response) and self._runtime.learns(request)

    def _note_first_token(self, sequence: RequestSequence) -> None:
        sequence.first_token = time.monotonic()
        spent = sequence.first_token - sequence.arrival
        assert sequence.plan is not None
        name = "last_token" if sequence.plan.translates else "compute"
        sequence.parts[name] = spent - sum(sequence.parts.values())
        if sequence.request.reuse is not ReuseMode.OFF:
            self._cache.commit_prefix(sequence.key, sequence.tokens[: sequence.plan.exact_tokens])
            self._fixed.called(sequence.request)
        self._start_jobs(sequence)

    def _finish(self, sequence: RequestSequence) -> None:
        request, table, plan, reason = sequence.request, sequence.table, sequence.plan, sequence.finish
        assert table is not None and plan is not None and reason is not None
        self.scheduler.done(sequence)
        if self._is_read(sequence):
            kv = self._storage.read(table, request.prompt_tokens, len(sequence.tokens))
            said = tuple(sequence.tokens[request.prompt_tokens :])
            self._runtime.keep_response(request, said, kv, exact=not plan.translates)
        if request.produces is not None:
            self._preassembly.answered(request.tenant, request.run, request.produces, tuple(sequence.response))
        if self._runtime.wants_harvest(request, plan):
            steps = self._runtime.observe(request, partial(self._storage.read, table))
            self._harvests.append(Harvest(sequence, steps))
        else:
            self._release(sequence)
        held = sequence.text.flush()
        sequence.tell(held, (), sequence.completion(reason))

    def _release(self, sequence: RequestSequence) -> None:
        """Exact tokens with KV enter the tree, all other blocks are freed."""
        assert sequence.plan is not None
        last = sequence.request.prompt_tokens + len(sequence.response) - 1
        computed = last if not sequence.plan.translates else sequence.plan.exact_tokens
        exact = 0 if sequence.request.reuse is ReuseMode.OFF else computed
        self._cache.finish(sequence.key, sequence.tokens[:exact])
        self._preassembly.wake()

    # learning, off the critical path --------------------------------------------------------------------------

    def _start_jobs(self, sequence: RequestSequence) -> None:
        queued = {tuple(job.tokens) for job in self.scheduler.jobs}
        for need in self._runtime.needs(sequence.request):
            if need.tokens not in queued and len(need.tokens) <= self._capacity:
                self.scheduler.jobs.append(
                    BaseJob(RequestId(f"base-{new_request_id()}"), need.tenant, list(need.tokens), cuts=need.cuts)
                )

    def _job_done(self, job: BaseJob) -> None:
        assert job.table is not None
        self.scheduler.done(job)
        for cut in job.cuts:
            cut.keep(self._storage.read(job.table, cut.start, cut.stop))
        self._cache.finish(job.key, job.tokens)
        self._preassembly.wake()

    def learn(self) -> None:
        """One piece of learning: measures the offsets of one segment of a finished request."""
        if not self._harvests:
            return
        harvest = self._harvests[0]
        if not self._observe_next(harvest):
            self._harvests.popleft()
            self._release(harvest.sequence)
            if not self._harvests:
                self._forget_ended_runs()

    def _observe_next(self, harvest: Harvest) -> bool:
        """False where nothing is left, or where offsets cannot be kept (which changes no pool)."""
        try:
            return next(harvest.steps, None) is not None
        except TranslationRefused as refusal:
            logger.warning("request %s is not learned from: %s", harvest.sequence.key, refusal)
            return False

    def _forget_ended_runs(self) -> None:
        for tenant, run in self._ended_runs:
            self._runtime.end_run(tenant, run)
        self._ended_runs.clear()

    def end_run(self, tenant: TenantId, run: RunId) -> None:
        """Forgets a run, once nothing is left to learn from it."""
        self._preassembly.end_run(tenant, run)
        self._ended_runs.append((tenant, run))
        if not self._harvests:
            self._forget_ended_runs()

    def _make_room(self) -> None:
        """Nothing runs, nothing is copied and nobody can be admitted: gives up what only waits to be learned from, a
        base job, or what the first request waits for.
        """
        if self._harvests:
            self._release(self._harvests.popleft().sequence)
        elif job := next((job for job in self.scheduler.jobs if job.admitted or not self.scheduler.unadmitted), None):
            self._drop_job(job)
        elif (sequence := self.scheduler.unadmitted[0]).load_asked is not None and not sequence.gave_up:
            self._loading.give_up(sequence)
        else:
            self.end(sequence, OutOfBlocks("request_id", sequence.key, "no room, though nothing else runs"))

    def _drop_job(self, job: Sequence) -> None:
        if job.admitted:
            self._cache.abort(job.key)
        self.scheduler.done(job)

    # early ends -----------------------------------------------------------------------------------------------

    def end(self, sequence: RequestSequence, error: BaseException | None = None) -> None:
        """Ends a request early: with an error, or as cancelled. Nothing of it is kept."""
        self.scheduler.done(sequence)
        if sequence.admitted:
            self._cache.abort(sequence.key)
            self._preassembly.wake()
        else:
            self._preassembly.abandon(sequence)
            self._cache.withdraw(sequence.key)
            self._loading.ended(sequence, time.monotonic())
        if error is not None:
            sequence.stream.put(error)
        else:
            held = sequence.text.flush()
            sequence.tell(held, (), sequence.completion(FinishReason.CANCELLED))

    def find(self, request_id: RequestId) -> RequestSequence | None:
        return next((s for s in self._sequences if s.key == request_id), None)

    @property
    def _sequences(self) -> list[RequestSequence]:
        return [*self.scheduler.unadmitted, *self.scheduler.running]

    def stats(self) -> dict[str, object]:
        """Return the figures of the cache, of waiting for loads, of the queues and of the anchors."""
        return {
            "cache": asdict(self._cache.stats()),
            "loading": self._loading.stats(),
            "preassembly": self._preassembly.stats(),
            "scheduler": {
                "running": len(self.scheduler.running),
                "waiting": len(self.scheduler.unadmitted),
                "jobs": len(self.scheduler.jobs),
                "to_learn": len(self._harvests),
            },
            **self._runtime.stats(),
        }

    def tenant_stats(
        self, owns: Callable[[TenantId], bool], prompts: Iterable[tuple[TenantId, Tokens]]
    ) -> dict[str, object]:
        """The anchor pools of some tenants, and how much of the given beginnings of prompts is cached in which tier."""
        found = (self._cache.status((tenant, ""), tokens) for tenant, tokens in prompts)
        cached = [{"device": one.device_tokens, "host": one.host_tokens} for one in found]
        return {"prompts": cached, "pools": self._runtime.pool_stats(owns)}

    def limit(self, tenant: TenantId, quota: Quota) -> None:
        """Bounds what a tenant holds."""
        self.learned[0].limit(tenant, quota.anchors, quota.anchor_bytes)
        self._cache.limit_host(tenant, quota.host_bytes)

    @property
    def learned(self) -> tuple[AnchorStore, BaseStore]:
        """The anchors and the base KV."""
        anchors, bases = self._runtime.learned
        assert isinstance(anchors, AnchorStore) and isinstance(bases, BaseStore)
        return anchors, bases

    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens]) -> None:
        """Takes what has changed in the forecast, and the fixed prompts of agents that are going to call."""
        self._cache.on_forecast(changes)
        self._runtime.on_forecast(changes)
        self._preassembly.forecast(changes)
        self._fixed.known(prompts)

    def clear(self) -> None:
        """Empties the prefix cache and forgets all anchors and base KV; what runs goes on."""
        self._preassembly.clear()
        self._cache.clear_all()
        self._runtime.clear()

    def check_integrity(self) -> None:
        """Raises `PlanError` where a block has not exactly one owner."""
        self._cache.check_integrity()

    def cancel(self, request_id: RequestId) -> bool:
        if sequence := self.find(request_id):
            self.end(sequence)
        return sequence is not None or self._preassembly.cancel(request_id)

    def shut(self, cause: BaseException | None) -> None:
        """Ends everything: as cancelled, or, where the thread died, with `EngineClosed`."""
        error = cause and EngineClosed("engine", cause, "its thread has died")
        for sequence in self._sequences:
            self.end(sequence, error)
        self._preassembly.shut()
        if self._copier:
            self._copier.close()
