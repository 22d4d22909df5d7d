"""Answers: drawing the tokens of requests whose prompts are computed, and finishing them.

Whatever is raised on behalf of one request ends that request, and nothing else.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kedge.cache import CacheManager
from kedge.engine.local.learning import Learning
from kedge.engine.local.preassembly import PromptPreassembler
from kedge.engine.local.sampler import draw_tokens, surprising_rows
from kedge.engine.local.scheduler import Scheduler, Work
from kedge.engine.local.sequence import RequestSequence
from kedge.engine.local.sessions import FixedPrompts
from kedge.errors import GenerationFailed
from kedge.reuse.runtime import Runtime
from kedge.types import FinishReason, ReuseMode

logger = logging.getLogger(__name__)
Drawing = tuple[RequestSequence, Tensor]
"""A request, and the logits [vocab] after its last token"""


class Answers:
    """The answers of one engine's requests, generated token by token. Called by its owner thread only."""

    def __init__(
        self,
        eos_token_ids: Container[int],
        scheduler: Scheduler,
        cache: CacheManager,
        fixed: FixedPrompts,
        runtime: Runtime,
        learning: Learning,
        preassembly: PromptPreassembler,
        end: Callable[[RequestSequence, BaseException], None],
    ) -> None:
        """Build it; `end` ends a request early, with an error."""
        self._eos_token_ids, self._scheduler, self._cache, self._fixed = eos_token_ids, scheduler, cache, fixed
        self._runtime, self._learning, self._preassembly, self._end = runtime, learning, preassembly, end

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
                self._learning.started(sequence)
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
        if read and math.isfinite(self._runtime.surprise):
            rows = surprising_rows(logits[list(read)], list(read.values()), self._runtime.surprise)
            for row, is_surprising in zip(read, rows, strict=True):
                if is_surprising:
                    sequences[row].surprising.append(len(sequences[row].response))

    def _next_token(self, sequence: RequestSequence, token: int, logits: Tensor) -> None:
        sequence.logprobs.read_answer(token, logits)
        if is_first := sequence.first_token is None:
            self._note_first_token(sequence)
        self._scheduler.served(sequence, 1)
        is_end = token in self._eos_token_ids and not sequence.request.sampling.ignore_eos
        if not is_end:
            sequence.tokens.append(token)
            sequence.tell(sequence.text.push(token), (token,))
        if is_first:  # which takes milliseconds: whoever waits for the token has it by now
            self._learning.started(sequence)
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
        return request.produces is not None and self._runtime.learns(request)

    def _note_first_token(self, sequence: RequestSequence) -> None:
        sequence.first_token = time.monotonic()
        spent = sequence.first_token - sequence.arrival
        assert sequence.plan is not None
        name = "last_token" if sequence.plan.translates else "compute"
        sequence.parts[name] = spent - sum(sequence.parts.values())
        if sequence.request.reuse is not ReuseMode.OFF:
            self._cache.commit_prefix(sequence.key, sequence.tokens[: sequence.plan.exact_tokens])
            self._fixed.called(sequence.request, sequence.turn)

    def _finish(self, sequence: RequestSequence) -> None:
        """Complete the request, keep the answer's KV for its readers, and learn from the prompt or free its blocks."""
        held = sequence.text.flush()
        self._keep_response(sequence)
        self._scheduler.done(sequence)
        self._learning.finished(sequence)
        assert sequence.finish is not None
        sequence.finished(held, sequence.finish)

    def _keep_response(self, sequence: RequestSequence) -> None:
        """Keep an answer's KV for its readers, and pass its text to their prepared prompts."""
        request = sequence.request
        if self._is_read(sequence):
            self._learning.keep_response(sequence)
        if request.produces is not None:
            self._preassembly.answered(request.run_key, request.produces, tuple(sequence.response))

    @contextmanager
    def _contained(self, sequence: RequestSequence, when: str) -> Iterator[None]:
        """Contain what is raised on a request's behalf: end that request, and nothing else."""
        try:
            yield
        except Exception as error:
            logger.exception("request %s ends: an error was raised when %s", sequence.request.request_id, when)
            self._end(sequence, GenerationFailed.of(sequence.request.request_id, when, error))
