"""The requests of an engine, from when they are queued until their streams have ended: their admission, which finds KV
and room for a sequence and plans where the tokens of its prompt come from, and their answers.

Whatever is raised on behalf of one request while its answer is drawn ends that request, and nothing else.
"""

import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from itertools import takewhile

import torch
from torch import Tensor

from kedge.cache import Readiness
from kedge.discovery import Served
from kedge.engine.common.guarding.guarded_calls import GuardedCalls
from kedge.engine.common.logprobs import Logprobs
from kedge.engine.local.build import EngineParts
from kedge.engine.local.sampler import draw_tokens
from kedge.engine.local.sequence import BaseJob, RequestSequence, Sequence, Work
from kedge.engine.local.sessions import ending
from kedge.errors import ForwardFailed, GenerationFailed, KedgeError, OutOfBlocks, RequestError, TranslationRefused
from kedge.kv.storage import SlotTable
from kedge.policies.prefetch import MAX_WAIT_S
from kedge.policies.sessions import TurnEnd
from kedge.reuse.guard.comparison import COMPARED_TOKENS
from kedge.reuse.plan import ReusePlan
from kedge.types import FinishReason, RequestId, ReuseMode, Span

logger = logging.getLogger(__name__)
Drawing = tuple[RequestSequence, Tensor]
"""A request, and the logits [vocab] after its last token"""


class Requests:
    """The register of requests: it queues and admits them, draws the tokens of those whose prompts are computed, frees
    their blocks and ends them. Called by the engine's owner thread only.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    @property
    def sequences(self) -> list[RequestSequence]:
        """All requests, waiting and running, in any order."""
        scheduler = self._parts.scheduler
        return [*scheduler.preempted, *scheduler.loading, *scheduler.waiting.unordered(), *scheduler.running]

    def submit(self, sequence: RequestSequence, guard: GuardedCalls | None = None) -> None:
        """Queue a request as it is served: completed by what was found out about plain ones, as the `guard` orders,
        with its prepared prompt and its place in its session. If that fails, end it with the error.
        """
        try:
            asked = self._parts.plain.arrived(sequence.request)
            request, sequence.stream.tap = guard.begin(asked) if guard else (asked, None)
            first = COMPARED_TOKENS if asked.logprobs is None else None  # those that only the guard wants to see
            sequence.request = request
            sequence.logprobs = Logprobs(request.logprobs, request.prompt_logprobs, sequence.tokens, first)
            if request.agent:  # no other prompt is expected
                sequence.preparation = self._parts.preassembly.claim(request)
            sequence.turn = self._parts.sessions.arrived(request)
            sequence.is_check = guard is not None and sequence.stream.tap is None
            self._parts.scheduler.add(sequence)
        except Exception as error:
            logger.exception("request %s could not be queued", sequence.request.request_id)
            self.end(sequence, GenerationFailed.of(sequence.request.request_id, "it was queued", error))

    def cancel(self, request_id: RequestId) -> bool:
        """End a request as cancelled, or withdraw the hint of this id. Returns False if there is neither."""
        if sequence := next((one for one in self.sequences if one.request.request_id == request_id), None):
            self.end(sequence)
        return sequence is not None or self._parts.preassembly.cancel(request_id)

    def preempt(self, sequence: RequestSequence) -> bool:
        """Free the blocks of another tenant's request for `sequence`. Returns False if it may not have any."""
        victim = self._parts.scheduler.victim(sequence)
        if victim is None:
            return False
        self._parts.learning.backlog.forget(victim)
        self.release(victim)
        if victim.waits_for_first_token:
            victim.plan, victim.preassembled = None, 0
            victim.sentinels.clear()
        self._requeue(victim)
        return True

    def compute_again(self, sequence: RequestSequence) -> None:
        """Free the blocks of a running request, and cache nothing: KV computed beside wrong KV may be wrong as well.
        The request is admitted again before all others, and computed.
        """
        self._parts.cache.abort(sequence.key)
        self._requeue(sequence)

    def _requeue(self, sequence: RequestSequence) -> None:
        sequence.table, sequence.todo = None, []
        self._parts.scheduler.preempt(sequence)

    def release(self, sequence: RequestSequence) -> None:
        """Free a request's blocks. Its exact tokens with KV enter the tree."""
        assert sequence.plan is not None
        last = sequence.request.prompt_tokens + len(sequence.response) - 1
        computed = sequence.todo[0] if sequence.todo else last
        exact = min(computed, sequence.plan.exact_tokens) if sequence.plan.translates else computed
        exact = 0 if sequence.request.reuse is ReuseMode.OFF else exact
        segments = sequence.request.segments if sequence.plan.translates else ()
        fixed = sum(len(one.tokens) for one in takewhile(lambda one: not one.is_placeholder, segments))
        self._parts.cache.finish(sequence.key, sequence.tokens[:exact], fixed)
        sequence.table = None  # it holds nothing any more, whatever is raised below
        if sequence.turn and sequence.finish:
            end = TurnEnd(ending(sequence.request.tool_mark, sequence.text.text, sequence.finish))
            self._parts.sessions.answered(sequence.turn, sequence.tokens[:exact], end)
        if sequence.finish:
            served = Served.of(sequence.receipt())
            self._parts.plain.ended(sequence.namespace, sequence.request.request_id, sequence.response, served)
        self._parts.preassembly.wake()

    def end(self, sequence: RequestSequence, error: BaseException | None = None) -> None:
        """End a request early: with an error, or as cancelled. Nothing of it is cached."""
        if sequence.is_over:
            return
        try:
            self._let_go(sequence)
        finally:
            if error is not None:
                sequence.failed(error)
            else:
                sequence.finished(sequence.text.flush(), FinishReason.CANCELLED)

    def _let_go(self, sequence: RequestSequence) -> None:
        """Forget a request that ends early, and free what it holds."""
        self._parts.scheduler.done(sequence)
        self._parts.learning.backlog.forget(sequence)
        if sequence.turn:
            self._parts.sessions.cancelled(sequence.turn)
        self._parts.plain.ended(sequence.namespace, sequence.request.request_id)
        if sequence.admitted:
            self._parts.cache.abort(sequence.key)
            self._parts.preassembly.wake()
        else:
            self._parts.preassembly.abandon(sequence)
            self._parts.cache.withdraw(sequence.key)
            if sequence.load_asked is not None:
                self._parts.loading["stall_s"] += time.monotonic() - sequence.load_asked

    def end_failed(self, sequence: RequestSequence, why: str) -> None:
        """End a request with `ForwardFailed`."""
        self.end(sequence, ForwardFailed("request_id", sequence.request.request_id, why))

    def fail_streams(self, error: BaseException) -> None:
        """End every stream with an error, and change nothing else."""
        for sequence in self.sequences:
            if not sequence.is_over:
                sequence.failed(error)

    # answers --------------------------------------------------------------------------------------------------

    def read_all(self, work: Many[Work], logits: Many[Tensor]) -> None:
        """Record the log-probabilities of prompts, where requested, and the logits of forced answers."""
        for item, rows in zip(work, logits, strict=True):
            sequence = item.sequence
            if not isinstance(sequence, RequestSequence) or not sequence.needs_all_logits:
                continue
            with self._contained(sequence, "all of its logits were read"):
                if sequence.waits_for_first_token:
                    sequence.logprobs.read_prompt(item.positions, rows)
                elif forced := sequence.forced:
                    place = item.positions[0] + 1 - sequence.request.prompt_tokens
                    followed = forced.read(place, rows)
                    places = range(max(0, place), min(len(forced.tokens), sequence.max_tokens))[: len(followed)]
                    for at, row in zip(places, followed, strict=False):
                        if at == len(sequence.logprobs.answer):  # it is read once, also after a preemption
                            sequence.logprobs.read_answer(forced.tokens[at], row)

    def go_on(self, computed: Many[Drawing]) -> None:
        """Draw the next tokens of requests with all tokens computed, at once, or finish them."""
        drawing = [one for sequence, row in computed if not sequence.is_over for one in self._drawing(sequence, row)]
        if not drawing:
            return
        logits = torch.stack([row for _, row in drawing])
        drawn = draw_tokens(logits, [sequence.sampler for sequence, _ in drawing])
        for (sequence, row), token in zip(drawing, drawn, strict=True):
            with self._contained(sequence, "its next token was drawn"):
                if isinstance(token, Exception):
                    raise token
                self._next_token(sequence, token, row)

    def _drawing(self, sequence: RequestSequence, row: Tensor) -> list[Drawing]:
        """Return the sequence and its logits if a token is to be drawn; finish one that needs none."""
        if not sequence.finish and sequence.max_tokens:
            return [(sequence, row)]
        with self._contained(sequence, "it was finished"):
            if sequence.finish:
                self._finish(sequence)
            else:
                self._note_first_token(sequence)
                self._parts.learning.started(sequence)
                self._end_response(sequence, FinishReason.LENGTH, computed=len(sequence.tokens))
        return []

    def _next_token(self, sequence: RequestSequence, token: int, logits: Tensor) -> None:
        sequence.logprobs.read_answer(token, logits)
        if is_first := sequence.first_token is None:
            self._note_first_token(sequence)
        self._parts.scheduler.waiting.charge(sequence.tenant, 1)
        is_end = token in self._parts.runner.eos_token_ids and not sequence.request.sampling.ignore_eos
        if not is_end:
            sequence.tokens.append(token)
            sequence.tell(sequence.text.push(token), (token,))
        if is_first:  # which takes milliseconds: whoever waits for the token has it by now
            self._parts.learning.started(sequence)
        last = len(sequence.tokens) - 1
        if forced := sequence.forced:
            rest = forced.tokens[1 : sequence.max_tokens]
            sequence.tokens += rest
            sequence.tell("".join(map(sequence.text.push, rest)), rest)
        if is_end:
            self._end_response(sequence, FinishReason.STOP, computed=last + 1)
        elif sequence.text.stopped:
            self._end_response(sequence, FinishReason.STOP, computed=last)
        elif forced or len(sequence.response) >= sequence.max_tokens:
            self._end_response(sequence, FinishReason.LENGTH, computed=last)
        else:
            sequence.todo = [last]

    def _end_response(self, sequence: RequestSequence, reason: FinishReason, computed: int) -> None:
        """End the answer. Its first `computed` tokens have KV: the last drawn one is left to its readers. The rest of a
        forced answer is computed next, for its logits.
        """
        sequence.finish, sequence.computed = reason, computed
        if sequence.forced:
            sequence.todo = list(range(computed, len(sequence.tokens)))
            sequence.computed = len(sequence.tokens) - 1
        if not sequence.todo:
            self._finish(sequence)

    def _note_first_token(self, sequence: RequestSequence) -> None:
        sequence.first_token = time.monotonic()
        spent = sequence.first_token - sequence.arrival
        assert sequence.plan is not None
        name = "last_token" if sequence.plan.translates else "compute"
        sequence.parts[name] = spent - sum(sequence.parts.values())
        if sequence.request.reuse is not ReuseMode.OFF:
            self._parts.cache.commit_prefix(sequence.key, sequence.tokens[: sequence.plan.exact_tokens])
            self._parts.sessions.called(sequence.request, sequence.turn)

    def _finish(self, sequence: RequestSequence) -> None:
        """Complete the request, keep the answer's KV for its readers, and learn from the prompt or free its blocks."""
        held, request = sequence.text.flush(), sequence.request
        if request.produces is not None:
            self._parts.learning.keep_response(sequence)
            self._parts.preassembly.answered(request.run_key, request.produces, tuple(sequence.response))
        self._parts.scheduler.done(sequence)
        self._parts.learning.finished(sequence)
        assert sequence.finish is not None
        sequence.finished(held, sequence.finish)

    @contextmanager
    def _contained(self, sequence: RequestSequence, when: str) -> Iterator[None]:
        """Contain what is raised on a request's behalf: end that request, and nothing else."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RequestError):  # the request itself is wrong, as its answer has shown
                return self.end(sequence, error)
            logger.exception("request %s ends: an error was raised when %s", sequence.request.request_id, when)
            self.end(sequence, GenerationFailed.of(sequence.request.request_id, when, error))

    # admission ------------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> bool:
        """Find KV and room for a sequence. Returns False if it has to wait for blocks, or has ended with an error.

        A request takes blocks from speculatively prepared prompts, learning and base prefills; these take free blocks
        only. If there is no other way, the first request of a tenant takes the blocks of another tenant's youngest one,
        which is computed again later.
        """
        parts, began = self._parts, time.monotonic()
        new = sequence if isinstance(sequence, RequestSequence) and sequence.plan is None else None
        try:
            adopted = parts.preassembly.adopt(new, new.preparation) if new and new.preparation else None
            lease = adopted
            while lease is None:
                try:
                    key, space, limit = sequence.key, sequence.namespace, sequence.exact_limit
                    lease = parts.cache.admit(key, space, sequence.tokens, limit, sequence.room)
                except OutOfBlocks:
                    if not self._reclaim(sequence):
                        return False
            sequence.table = SlotTable.of(lease.blocks, parts.cache.block_size)
            if new is None:  # a request that was preempted is computed again, as far as its tokens are not cached
                sequence.todo = list(range(lease.exact_tokens, len(sequence.tokens)))
            else:
                self._plan(new, sequence.table, None if adopted else lease.spans, began)
            return True
        except Exception as error:  # out of memory, say: planning is this request's alone
            if not isinstance(sequence, RequestSequence):
                raise
            is_known = isinstance(error, KedgeError)
            name, when = sequence.request.request_id, "its prompt was planned"
            self.end(sequence, error if is_known else GenerationFailed.of(name, when, error))
            return False

    def is_ready(self, sequence: RequestSequence) -> bool:
        """Return whether to admit a request now: its KV is loaded (always if it was prepared, or without a host tier),
        or it has waited so long that the rest is computed, and, where others run too, base KV of its values is there.
        Alone, its exact prefill delays no other request, and base KV is computed in idle time.
        """
        parts, now, prepared = self._parts, time.monotonic(), sequence.preparation
        if parts.copier and sequence.exact_limit and not (sequence.gave_up or (prepared and prepared.admitted)):
            reusable = sequence.tokens[: sequence.exact_limit]
            if sequence.load_asked is not None and now - sequence.load_asked > MAX_WAIT_S:
                self.give_up(sequence)
            elif parts.cache.demand(sequence.key, sequence.namespace, reusable) is not Readiness.READY:
                if sequence.load_asked is None:
                    sequence.load_asked = now
                    parts.loading["waited"] += 1
                return False
        wants_base = sequence.request.wants_translation
        return not (wants_base and parts.learning.awaits_base(sequence, busy=bool(parts.running)))

    def give_up(self, sequence: RequestSequence) -> None:
        """Stop waiting for KV from the host: use what has been loaded, and compute the rest."""
        sequence.gave_up = True
        self._parts.cache.withdraw(sequence.key)

    def _plan(self, sequence: RequestSequence, table: SlotTable, exact: tuple[Span, ...] | None, began: float) -> None:
        """Plan the prompt of a request behind its `exact` tokens, and write what is translated; without them, complete
        the prepared prompt that it has adopted. Its admission `began` then, in seconds.
        """
        parts, request = self._parts, sequence.request
        asked, sequence.load_asked = sequence.load_asked, None  # it may be planned again
        waited = 0.0 if asked is None else began - asked
        parts.loading["stall_s"] += waited
        planned = matched = time.monotonic()
        if exact is None:
            sequence.plan, sequence.todo = parts.preassembly.complete(sequence)
        else:
            plan = ReusePlan.dense(exact, request.prompt_tokens)
            if request.wants_translation:
                plan = parts.runtime.plan(request, exact)
            matched = time.monotonic()
            if request.guard.recheck and not plan.translates:
                raise TranslationRefused("request_id", sequence.key, "a check that would compute all of its prompt")
            if plan.translations:
                parts.write(request, table, plan.translations)
            sequence.plan, sequence.todo = plan, plan.computed
            if plan.sentinels:
                sequence.sentinels = [parts.sentinels.read(table, plan.sentinels)]
            if plan.translations:
                seconds = time.monotonic() - planned
                parts.costs.observe_translation(len(plan.translations), plan.translated_tokens, seconds)
        sequence.parts = {
            "queue": began - sequence.arrival - waited,
            "match": matched - planned,
            "assemble": time.monotonic() - matched,
            "other": planned - began,
        }
        if asked is not None:
            sequence.parts["load"] = waited

    def _reclaim(self, sequence: Sequence) -> bool:
        """Free blocks for a sequence. Returns False if there are none that it may have."""
        parts = self._parts
        if isinstance(sequence, BaseJob) and not sequence.is_awaited:
            return False
        if parts.preassembly.give_back() or parts.learning.reclaim():  # of work that no request waits for
            return True
        return isinstance(sequence, RequestSequence) and (parts.learning.reclaim_job() or self.preempt(sequence))
