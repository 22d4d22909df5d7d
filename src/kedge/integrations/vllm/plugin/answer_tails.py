"""Answers that other agents read, and the KV of their ends.

A token is drawn from the KV of those before it, so the last token of an answer has none; nor have the tokens that
follow the answer in its readers' prompts, its trail. Both are computed in the step after the answer's last one, in a
lane over the blocks of the finished request, which takes the row that the request had. Of an answer whose end does not
fit that step, what is there is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.v1.request import Request, RequestStatus

from kedge.integrations.vllm.plugin.held_blocks import HeldBlocks, HeldLane, HeldLanes
from kedge.integrations.vllm.plugin.messages import Capture
from kedge.reuse.lanes import LaneBudget
from kedge.types import GenerateRequest, Tokens

TOKEN_SHARE = 4
"""Of the tokens that running requests leave in a step, the ends of answers take at most one in so many."""
COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
"""Ends of answers that their readers get whole"""


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """An answer that other agents read."""

    request: GenerateRequest
    prompt: Sequence[int]
    tokens: Tokens
    computed: int
    """How many of its tokens have KV"""
    is_exact: bool
    """Whether no token of the prompt was translated"""
    is_complete: bool

    @classmethod
    def of(cls, hinted: GenerateRequest, request: Request, *, is_exact: bool) -> EndedAnswer:
        """Return the answer of a request that has ended; the token that stopped it is not part of it."""
        tokens = answer_of(request)
        computed = min(max(0, request.num_computed_tokens - request.num_prompt_tokens), len(tokens))
        prompt = request.prompt_token_ids or ()
        return cls(hinted, prompt, tokens, computed, is_exact, request.status in COMPLETE)

    def with_trail(self, limit: int, vocabulary: int) -> Tokens:
        """Return the answer and its trail, which is left out where the model has no room for it, or no such tokens."""
        trail = self.request.trail
        fits = len(self.prompt) + len(self.tokens) + len(trail) < limit and all(token < vocabulary for token in trail)
        return self.tokens + trail if fits else self.tokens


def answer_of(request: Request) -> Tokens:
    """Return the answer of a request that has ended, without the token that stopped it."""
    tokens = tuple(request.output_token_ids)
    return tokens[:-1] if request.status is RequestStatus.FINISHED_STOPPED else tokens


class AnswerTails(HeldLanes):
    """The ends of answers of one scheduler. Before `open`, none is computed."""

    def __init__(self, held: HeldBlocks, order: Callable[[Capture], None]) -> None:
        """`order` takes the captures for the step that is being scheduled, or for the next one."""
        super().__init__()
        self._held, self._order = held, order
        self._limit = self._vocabulary = self._block_size = 0
        self._ended: dict[int, EndedAnswer] = {}
        """Answers that ended since the last step, by the ids of their captures"""

    def open(self, limit: int, vocabulary: int, block_size: int) -> None:
        """Let ends be computed by a model with `limit` positions and `vocabulary` tokens."""
        self._limit, self._vocabulary, self._block_size = limit, vocabulary, block_size

    @property
    def is_wanted(self) -> bool:
        """Whether an answer has ended since the last step whose end may be computed."""
        return bool(self._ended)

    @property
    def is_open(self) -> bool:
        """Whether ends are computed."""
        return self._limit > 0

    def add(self, answer: EndedAnswer, block_ids: list[int]) -> None:
        """Hold the blocks of an answer, and order its capture: for the next step if its end may be computed there."""
        if not block_ids or not answer.tokens:
            return
        if self._limit and answer.is_complete:
            self._ended[self._held.hold(block_ids)] = answer
        elif answer.computed:
            self._capture(self._held.hold(block_ids), answer, answer.tokens[: answer.computed])

    def _capture(self, capture_id: int, answer: EndedAnswer, tokens: Tokens, end: int = 0) -> None:
        blocks = tuple(self._held.blocks_of(capture_id))
        self._order(Capture(answer.request, blocks, capture_id, tokens, answer.is_exact, end))

    def grant(self, budget: LaneBudget, running: int) -> LaneBudget:
        """Order the captures of all answers that have ended, and lanes for the ends that fit a step.

        `budget` is what `running` requests leave of it; each of them may need a block in it. Returns what is taken.
        """
        ended, self._ended, self._granted = self._ended, {}, []
        left = LaneBudget(budget.tokens // TOKEN_SHARE, budget.rows)
        for capture_id, answer in ended.items():
            lane = self._lane(capture_id, answer, left, running)
            if lane is not None:
                self._granted.append(lane)
                left = left.less(len(lane.span), 1)
        return self.taken

    def _lane(self, capture_id: int, answer: EndedAnswer, left: LaneBudget, spare: int) -> HeldLane | None:
        """Order the capture of an answer. Returns the lane that its end needs, None where it needs or gets none."""
        kept = answer.with_trail(self._limit, self._vocabulary)
        span = range(len(answer.prompt) + answer.computed, len(answer.prompt) + len(kept))
        has_room = len(span) <= left.tokens and left.rows > 0 and span.stop < self._limit
        if span and has_room and self._held.grow(capture_id, -(-span.stop // self._block_size), spare):
            self._capture(capture_id, answer, kept, len(span))
            tokens = [*answer.prompt, *kept, kept[-1]]
            return HeldLane(tokens, self._held.blocks_of(capture_id)[: -(-span.stop // self._block_size)], span)
        if answer.computed:
            self._capture(capture_id, answer, answer.tokens[: answer.computed])
        else:
            self._held.free(capture_id)
        return None

    def give_up(self) -> None:
        """Forget the answers that have ended since the last step, whose blocks are freed by the caller."""
        self._ended.clear()
