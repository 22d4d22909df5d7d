"""The requests of an engine, from when they are queued until their streams have ended."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import torch
from torch import Tensor

from kedge.discovery import Served
from kedge.engine.local.build import EngineParts
from kedge.engine.local.sampler import draw_tokens, surprising_rows
from kedge.engine.local.scheduler import Work
from kedge.engine.local.sequence import RequestSequence
from kedge.engine.local.sessions import stop_reason
from kedge.errors import ForwardFailed, GenerationFailed
from kedge.policies.sessions import TurnEnd
from kedge.types import FinishReason, GenerateRequest, RequestId, ReuseMode

logger = logging.getLogger(__name__)
Drawing = tuple[RequestSequence, Tensor]
"""A request, and the logits [vocab] after its last token"""


class Requests:
    """The register of requests: it queues them, frees their blocks and ends them. Called by the engine's owner thread
    only.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    @property
    def sequences(self) -> list[RequestSequence]:
        """All requests, waiting and running."""
        return [*self._parts.scheduler.unadmitted, *self._parts.scheduler.running]

    def submit(self, sequence: RequestSequence) -> None:
        """Queue a request, with its prepared prompt, if there is one."""
        sequence.preparation = self._parts.preassembly.claim(sequence.request)
        sequence.turn = self._parts.sessions.arrived(sequence.request)
        self._parts.scheduler.add(sequence)

    def cancel(self, request_id: RequestId) -> bool:
        """End a request as cancelled, or withdraw the hint of this id. Returns False if there is neither."""
        if sequence := self.find(request_id):
            self.end(sequence)
        return sequence is not None or self._parts.preassembly.cancel(request_id)

    def find(self, request_id: RequestId) -> RequestSequence | None:
        """Return the request of this id, or None."""
        return next((one for one in self.sequences if one.request.request_id == request_id), None)

    def preempt(self, sequence: RequestSequence) -> bool:
        """Free the blocks of another tenant's request for `sequence`. Returns False if it may not have any."""
        victim = self._parts.scheduler.victim(sequence)
        if victim is None:
            return False
        self._parts.learning.forget(victim)
        self.release(victim)
        if victim.waits_for_first_token:
            victim.plan = None
            victim.sentinels.clear()
        self._requeue(victim)
        return True

    def compute_again(self, sequence: RequestSequence) -> None:
        """Free the blocks of a running request, of which nothing is cached: what was computed beside wrong KV may be
        wrong as well. It is admitted again before all others, and computed.
        """
        self._parts.cache.abort(sequence.key)
        self._parts.snapshots.ended(sequence, 0)
        self._requeue(sequence)

    def _requeue(self, sequence: RequestSequence) -> None:
        sequence.table, sequence.todo, sequence.written = None, [], ()
        self._parts.scheduler.preempt(sequence)

    def release(self, sequence: RequestSequence) -> None:
        """Free a request's blocks. Its exact tokens with KV enter the tree."""
        assert sequence.plan is not None
        last = sequence.request.prompt_tokens + len(sequence.response) - 1
        computed = sequence.todo[0] if sequence.todo else last
        exact = min(computed, sequence.plan.exact_tokens) if sequence.plan.translates else computed
        exact = 0 if sequence.request.reuse is ReuseMode.OFF else exact
        fixed = _fixed(sequence.request) if sequence.plan.translates else 0
        self._parts.cache.finish(sequence.key, sequence.tokens[:exact], fixed)
        self._parts.snapshots.ended(sequence, exact)
        if sequence.turn and sequence.finish:
            stop = stop_reason(sequence.request.tool_mark, sequence.text.text, sequence.finish)
            self._parts.sessions.answered(sequence.turn, sequence.tokens[:exact], TurnEnd(stop))
        if sequence.finish:
            served = Served.of(sequence.receipt())
            self._parts.plain.ended(sequence.namespace, sequence.request.request_id, sequence.response, served)
        self._parts.preassembly.wake()

    def end(self, sequence: RequestSequence, error: BaseException | None = None) -> None:
        """End a request early: with an error, or as cancelled. Nothing of it is cached."""
        if sequence.is_over:
            return
        self._parts.scheduler.done(sequence)
        self._parts.learning.forget(sequence)
        if sequence.turn:
            self._parts.sessions.cancelled(sequence.turn)
        self._parts.plain.ended(sequence.namespace, sequence.request.request_id)
        if sequence.admitted:
            self._parts.cache.abort(sequence.key)
            self._parts.snapshots.ended(sequence, 0)
            self._parts.preassembly.wake()
        else:
            self._parts.preassembly.abandon(sequence)
            self._parts.cache.withdraw(sequence.key)
            self._parts.loading.ended(sequence, time.monotonic())
        if error is not None:
            sequence.failed(error)
        else:
            sequence.finished(sequence.text.flush(), FinishReason.CANCELLED)

    def end_failed(self, sequence: RequestSequence, why: str) -> None:
        """End a request with `ForwardFailed`."""
        self.end(sequence, ForwardFailed("request_id", sequence.request.request_id, why))

    def fail_streams(self, error: BaseException) -> None:
        """End every stream with an error, and change nothing else."""
        for sequence in self.sequences:
            if not sequence.is_over:
                sequence.failed(error)


def _fixed(request: GenerateRequest) -> int:
    """Return how many tokens a prompt has before its first value."""
    return sum(len(one.tokens) for one in takewhile(lambda one: not one.is_placeholder, request.segments))


class Answers:
    """The answers of one engine's requests, generated token by token. Called by its owner thread only."""

    def __init__(self, parts: EngineParts, requests: Requests) -> None:
        """`requests` ends a request early, with an error."""
        self._parts, self._requests = parts, requests

    def read_prompts(self, work: Sequence[Work], logits: Sequence[Tensor]) -> None:
        """Record the log-probabilities of prompts, where requested."""
        for item, rows in zip(work, logits, strict=True):
            if isinstance(item.sequence, RequestSequence) and item.sequence.needs_all_logits:
                with self._contained(item.sequence, "its prompt's log-probabilities were read"):
                    item.sequence.logprobs.read_prompt(item.positions, rows)

    def go_on(self, computed: Sequence[Drawing]) -> None:
        """Draw the next tokens of requests with all tokens computed, or finish them."""
        drawing = [one for sequence, row in computed if not sequence.is_over for one in self._drawing(sequence, row)]
        if drawing:
            self._draw(drawing)

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

    def _draw(self, drawing: list[Drawing]) -> None:
        """Draw the next tokens of all these at once."""
        logits = torch.stack([row for _, row in drawing])
        drawn = draw_tokens(logits, [sequence.sampler for sequence, _ in drawing])
        self._note_surprises([sequence for sequence, _ in drawing], logits, drawn)
        for (sequence, row), token in zip(drawing, drawn, strict=True):
            with self._contained(sequence, "its next token was drawn"):
                if isinstance(token, Exception):
                    raise token
                self._next_token(sequence, token, row)

    def _note_surprises(
        self, sequences: Sequence[RequestSequence], logits: Tensor, drawn: Sequence[int | Exception]
    ) -> None:
        """Note which of the tokens drawn from logits [sequences, vocab] their readers are to compute."""
        read = {
            row: token
            for row, (sequence, token) in enumerate(zip(sequences, drawn, strict=True))
            if not isinstance(token, Exception) and sequence.sampler.may_surprise and self._will_be_read(sequence)
        }
        if read and math.isfinite(self._parts.runtime.surprise):
            rows = surprising_rows(logits[list(read)], list(read.values()), self._parts.runtime.surprise)
            for row, is_surprising in zip(read, rows, strict=True):
                if is_surprising:
                    sequences[row].surprising.append(len(sequences[row].response))

    def _next_token(self, sequence: RequestSequence, token: int, logits: Tensor) -> None:
        sequence.logprobs.read_answer(token, logits)
        if is_first := sequence.first_token is None:
            self._note_first_token(sequence)
        self._parts.scheduler.served(sequence, 1)
        is_end = token in self._parts.runner.eos_token_ids and not sequence.request.sampling.ignore_eos
        if not is_end:
            sequence.tokens.append(token)
            sequence.tell(sequence.text.push(token), (token,))
        if is_first:  # which takes milliseconds: whoever waits for the token has it by now
            self._parts.learning.started(sequence)
        last = len(sequence.tokens) - 1
        if is_end:
            self._end_response(sequence, FinishReason.STOP, computed=last + 1)
        elif sequence.text.stopped:
            self._end_response(sequence, FinishReason.STOP, computed=last)
        elif len(sequence.response) >= sequence.max_tokens:
            self._end_response(sequence, FinishReason.LENGTH, computed=last)
        else:
            sequence.todo = [last]

    def _end_response(self, sequence: RequestSequence, reason: FinishReason, computed: int) -> None:
        """End the answer, with one more pass if its KV is left for readers."""
        sequence.end_response(reason, computed, is_read=self._is_read(sequence))
        if not sequence.todo:
            self._finish(sequence)

    def _is_read(self, sequence: RequestSequence) -> bool:
        """Return whether other agents are going to read the response and may have its KV translated."""
        return bool(sequence.response) and self._will_be_read(sequence)

    def _will_be_read(self, sequence: RequestSequence) -> bool:
        """Return the same of a response that need not have begun."""
        request = sequence.request
        return request.produces is not None and self._parts.runtime.learns(request)

    def _note_first_token(self, sequence: RequestSequence) -> None:
        sequence.first_token = time.monotonic()
        spent = sequence.first_token - sequence.arrival
        assert sequence.plan is not None
        name = "last_token" if sequence.plan.translates else "compute"
        sequence.parts[name] = spent - sum(sequence.parts.values())
        if sequence.request.reuse is not ReuseMode.OFF:
            self._parts.cache.commit_prefix(sequence.key, sequence.tokens[: sequence.plan.exact_tokens])
            self._parts.fixed.called(sequence.request, sequence.turn)

    def _finish(self, sequence: RequestSequence) -> None:
        """Complete the request, keep the answer's KV for its readers, and learn from the prompt or free its blocks."""
        held = sequence.text.flush()
        self._keep_response(sequence)
        self._parts.scheduler.done(sequence)
        self._parts.learning.finished(sequence)
        assert sequence.finish is not None
        sequence.finished(held, sequence.finish)

    def _keep_response(self, sequence: RequestSequence) -> None:
        """Keep an answer's KV for its readers, and pass its text to their prepared prompts."""
        request = sequence.request
        if self._is_read(sequence):
            self._parts.learning.keep_response(sequence)
        if request.produces is not None:
            self._parts.preassembly.answered(request.run_key, request.produces, tuple(sequence.response))

    @contextmanager
    def _contained(self, sequence: RequestSequence, when: str) -> Iterator[None]:
        """Contain what is raised on a request's behalf: end that request, and nothing else."""
        try:
            yield
        except Exception as error:
            logger.exception("request %s ends: an error was raised when %s", sequence.request.request_id, when)
            self._requests.end(sequence, GenerationFailed.of(sequence.request.request_id, when, error))
