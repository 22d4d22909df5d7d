"""The engine without its thread: schedule, forward, sample, finish. One owner, no locks.

An error in one request's own parts (its sampling, its text, what is learned from it) ends that request and no other. A
pass that raises ends the requests in its batch.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from math import inf

from kedge.engine.local.build import EngineParts
from kedge.engine.local.learning import Learning
from kedge.engine.local.requests import Requests
from kedge.engine.local.scheduler import FEW, CachedFirst, Scheduler
from kedge.engine.local.sequence import BaseJob, PreparedPrompt, RequestSequence, Sequence, Work, flatten
from kedge.errors import EngineClosed, OutOfBlocks
from kedge.reuse.ahead import Ended
from kedge.reuse.plan import Sentinel
from kedge.settings import QuotaSettings
from kedge.types import AgentKey, GenerateRequest, Miss, RunKey, Source, TenantId, Tokens
from kedge.workflow.forecast import Changes

logger = logging.getLogger(__name__)

REFUTED = Miss("*", "the guard computed it: some of its translated KV was far from what the model computes")


class EngineCore:
    """Owner of the model, the cache, the storage and the anchors, which runs the passes."""

    def __init__(self, parts: EngineParts) -> None:
        """Make the parts that end requests, the scheduler and learning, and take over the others."""
        self.parts, config = parts, parts.config
        self.requests = Requests(parts)
        self.judge: Callable[[GenerateRequest, Mapping[Sentinel, float]], bool] = lambda *_: False
        """Returns whether a prompt has to be computed, by the relative errors of its sentinel tokens"""
        parts.learning = Learning(
            parts.runtime, parts.cache, parts.storage, parts.jobs, parts.longest, self.requests.release
        )
        # A layer has some 12 d² weights, and attends by 2 d products a token of context: as many at 6 d.
        is_by_time = not config.max_batch_tokens and not parts.storage.keys.is_cuda
        parts.scheduler = self.scheduler = Scheduler(
            self.requests.admit,
            self.requests.is_ready,
            parts.costs,
            max_batch_tokens=config.max_batch_tokens or (2048 if parts.storage.keys.is_cuda else 512),
            max_running=config.max_running,
            jobs=parts.jobs,
            ahead=parts.ahead,
            running=parts.running,
            service=CachedFirst(parts.cache, parts.sessions) if config.tiers.policy == "sessions" else None,
            reach=6 * getattr(parts.runner.model.config.get_text_config(), "hidden_size", inf) if is_by_time else inf,
        )

    # requests and hints ---------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no work is left except learning."""
        return self.scheduler.idle and not self.parts.preassembly.pending

    def end_run(self, run: RunKey) -> None:
        """Forget a run, once nothing is left to learn from it."""
        self.parts.preassembly.end_run(run)
        self.parts.learning.backlog.end_run(run)

    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens]) -> None:
        """Take the changes of the forecast, and the fixed prompts of agents that are about to call."""
        self.parts.sessions.on_forecast(changes)
        self.parts.preassembly.forecast(changes)
        for agent, tokens in prompts.items():
            self.parts.sessions.label(agent, tokens)

    # steps ----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Complete finished copies, and start the next ones."""
        if found := self.parts.plain.forecasts.take():
            self.forecast(found.next_runs, found.prompts)
        self.parts.sessions.advance()
        if self.parts.cache.pump():
            self.parts.preassembly.wake()
        if self.parts.cache.starved:
            self.parts.preassembly.give_back()

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
        if self.parts.cache.transferring:
            return False
        if self.scheduler.unadmitted or self.scheduler.jobs:
            self._make_room()
        return True

    def _spare(self, seconds: float) -> bool:
        """Do a piece of work that no request waits for, after a pass of `seconds`. Returns False if there was none.

        While requests run, that is learning, within its budget; while none waits for a first token, also a piece of
        the prompt that is expected next.
        """
        if self.scheduler.running:
            self.parts.learning.spend(seconds)
        if self.scheduler.someone_waits or self.scheduler.jobs:
            return False
        return self.scheduler.works_ahead and self.parts.preassembly.assemble()

    @property
    def can_learn(self) -> bool:
        """Whether a finished request is left to learn from, and the base KV that this needs is there."""
        return not self.scheduler.jobs and self.parts.learning.backlog.ready

    def _run(self, work: list[Work]) -> None:
        began = time.monotonic()
        try:
            whole = self.parts.runner.forward(flatten(work, self.parts.storage))
            whole[0, 0].item()  # a GPU has finished only once a result has been read
            logits = whole.split([item.logit_rows for item in work])
        except Exception as error:  # such as out of memory: requests outside of this batch are still served
            logger.exception("a batch of %s sequences failed", len(work))
            return self._fail(work, error)
        for item in work:
            del item.sequence.todo[: len(item.positions)]
        self.requests.read_all(work, logits)
        ended = [(item, rows[-1]) for item, rows in zip(work, logits, strict=True) if not item.sequence.todo]
        refuted = self._refuted([item.sequence for item, _ in ended])
        for wrong in refuted:
            self.requests.compute_again(wrong)
        ready = [(item.sequence, row) for item, row in ended if item.sequence not in refuted]
        for sequence, _ in ready:
            if isinstance(sequence, BaseJob):
                self.parts.learning.done(sequence)
                self.parts.preassembly.wake()
            elif isinstance(sequence, PreparedPrompt):
                self.scheduler.done(sequence)
        self.requests.go_on([(one, row) for one, row in ready if isinstance(one, RequestSequence)])
        tokens, seconds = sum(len(item.positions) for item in work), time.monotonic() - began
        self.parts.costs.observe_pass(tokens, len(work), seconds)
        if tokens >= FEW:  # the fixed cost dominates smaller ones
            self.parts.cache.tiers.transfers.cost.computed(tokens, seconds)
        return None

    def _refuted(self, sequences: Iterable[Sequence]) -> list[RequestSequence]:
        """Compare translated with computed KV of the sentinel tokens of sequences whose prompts are computed. Returns
        the requests where they refute the translation: their plans compute all of it now, in blocks of their own.
        """
        watched = [one for one in sequences if isinstance(one, RequestSequence) and one.sentinels]
        if not watched:
            return []
        errors = iter(self.parts.sentinels.errors([rows for one in watched for rows in one.sentinels]))
        return [one for one in watched if self._is_refuted(one, errors)]

    def _is_refuted(self, sequence: RequestSequence, errors: Iterable[float]) -> bool:
        """Take the errors of one sequence, the next ones. Returns whether its prompt has to be computed."""
        sentinels = [one for rows in sequence.sentinels for one in rows.sentinels]
        sequence.sentinels = []
        found = dict(zip(sentinels, islice(errors, len(sentinels)), strict=True))
        if refuted := self.judge(sequence.request, found):
            assert sequence.plan is not None
            sequence.plan = sequence.plan.without_translation(REFUTED)
            first = next(span.start for span in sequence.plan.spans if span.source is Source.COMPUTED)
            sequence.preassembled = min(sequence.preassembled, first)
            logger.warning(
                "request %s is computed: translated KV was far from computed KV", sequence.request.request_id
            )
        return refuted

    def _fail(self, work: list[Work], error: Exception) -> None:
        """Drop work that no request waits for from a pass that raised, and run the rest again; without such work, end
        the requests in the pass.
        """
        requests = [item.sequence for item in work if isinstance(item.sequence, RequestSequence)]
        for item in work:
            if isinstance(item.sequence, PreparedPrompt):
                self.parts.preassembly.drop(item.sequence, Ended.FAILED)
            elif isinstance(item.sequence, BaseJob):
                self.parts.learning.drop(item.sequence)
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
        self.parts.preassembly.clear()
        self.parts.learning.clear()
        self.parts.cache.check_integrity()

    def _make_room(self) -> None:
        """Drop learning, a base prefill, or what the first request waits for.

        Called when nothing runs, nothing is copied and no request can be admitted.
        """
        waiting = self.scheduler.unadmitted
        if self.parts.learning.reclaim() or self.parts.learning.reclaim_job():
            return
        if not waiting:
            self.parts.learning.drop(self.scheduler.jobs[0])
        elif (sequence := waiting[0]).load_asked is not None and not sequence.gave_up:
            self.requests.give_up(sequence)
        else:
            why = "no room, though nothing else runs"
            self.requests.end(sequence, OutOfBlocks("request_id", sequence.request.request_id, why))

    # upkeep -----------------------------------------------------------------------------------------------------

    def limit(self, tenant: TenantId, quota: QuotaSettings) -> None:
        """Limit what a tenant holds."""
        self.parts.anchors.limit(tenant, quota.anchor_bytes)
        self.parts.cache.limit_host(tenant, quota.host_memory)

    def clear(self) -> None:
        """Empty the prefix cache and forget all anchors and base KV; running requests go on."""
        self.parts.preassembly.clear()
        self.parts.plain.clear()
        self.parts.cache.clear()
        self.parts.runtime.clear()

    def shut(self, cause: BaseException | None) -> None:
        """End all requests: as cancelled, or, if the thread died, with `EngineClosed`."""
        error = cause and EngineClosed("engine", cause, "its thread has died")
        for sequence in self.requests.sequences:
            self.requests.end(sequence, error)
        self.parts.preassembly.shut()
        if self.parts.copier:
            self.parts.copier.close()
