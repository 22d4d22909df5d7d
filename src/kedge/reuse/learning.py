"""Learning from computed prompts in spare time: the backlog of prompts, and the time that it and base prefills take.

An error while learning loses what would have been learned, and nothing else.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kedge.errors import TranslationRefused
from kedge.policies.service import StepTimes
from kedge.reuse.costs import GRACE, LEARNING_SHARE, PATIENCE
from kedge.reuse.layout import Placed
from kedge.structures.bounded import of_largest
from kedge.types import RunKey

PIECE_S = 0.05
"""Seconds of a pass in an idle engine, for which a request that arrives meanwhile has to wait"""
logger = logging.getLogger(__name__)
H = TypeVar("H")


@dataclass(slots=True, eq=False)
class PendingPrompt(Generic[H]):
    """A prompt with offsets to be measured, one segment after the other. `holder` holds its KV until then."""

    holder: H
    run: RunKey
    steps: Iterator[Placed]
    size: int
    is_begun: bool = False


class Backlog(Generic[H]):
    """The prompts of one engine that are to be learned from, oldest first, and the ended runs that wait for them."""

    def __init__(
        self, forget_run: Callable[[RunKey], None], is_ready: Callable[[H], bool], over: Callable[[H], None], most: int
    ) -> None:
        """Keep prompts of `most` in all, by their sizes. `is_ready`: the base KV that learning from a prompt needs is
        there; `over` is called when it is learned from, or never will be. `forget_run` forgets what a run shared.
        """
        self._forget_run, self._is_ready, self._over, self._most = forget_run, is_ready, over, most
        self._waiting: deque[PendingPrompt[H]] = deque()
        self._ended: set[RunKey] = set()
        self.observed = self.given_up = self.failed = 0
        """Prompts that were learned from, that were given up for want of room, and that failed"""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[H]:
        return (one.holder for one in self._waiting)

    def has_room(self, size: int) -> bool:
        """Give up prompts, the oldest of the tenant with the most, until one more of `size` fits; False: none can."""
        while size <= self._most < size + sum(one.size for one in self._waiting):
            self.give_up(of_largest(self._waiting, lambda one: one.run.namespace.tenant).holder)
        return size <= self._most

    def add(self, holder: H, run: RunKey, steps: Iterator[Placed], size: int = 1) -> None:
        """Take a prompt, for which there `has_room`. Each of the `steps` measures a segment."""
        self._waiting.append(PendingPrompt(holder, run, steps, size))

    @property
    def ready(self) -> bool:
        """Whether `step` has work."""
        return self._next() is not None

    def _next(self) -> PendingPrompt[H] | None:
        return next((one for one in self._waiting if one.is_begun or self._is_ready(one.holder)), None)

    def step(self) -> bool:
        """Measure the offsets of one segment of the oldest prompt that is ready. Returns False where none is."""
        one = self._next()
        if one is None:
            return False
        one.is_begun = True
        try:
            if next(one.steps, None) is not None:
                return True
        except TranslationRefused as refusal:
            logger.warning("a prompt of %s is not learned from: %s", one.run, refusal)
        except Exception:  # out of memory, say: what is lost is one sample, and no pool has changed
            self.failed += 1
            logger.exception("a prompt of %s could not be learned from", one.run)
        self.observed += 1
        self._remove(one)
        return True

    def give_up(self, holder: H) -> None:
        """Learn nothing more from a prompt, for want of room."""
        self.given_up += 1
        self.forget(holder)

    def forget(self, holder: H) -> None:
        """Learn nothing more from a prompt, if it is there."""
        for one in [one for one in self._waiting if one.holder is holder]:
            self._remove(one)

    def _remove(self, one: PendingPrompt[H]) -> None:
        self._waiting.remove(one)
        self._over(one.holder)
        self._leave_run(one.run)

    def end_run(self, run: RunKey) -> None:
        """Forget what a run shared, as soon as no prompt of it is left to learn from."""
        self._ended.add(run)
        self._leave_run(run)

    def _leave_run(self, run: RunKey) -> None:
        if run in self._ended and all(one.run != run for one in self._waiting):
            self._ended.remove(run)
            self._forget_run(run)

    def clear(self) -> None:
        """Give up all prompts."""
        for holder in tuple(self):
            self.give_up(holder)


class SpareTime:
    """When background work may be done beside an engine's steps.

    It is held back while somebody waits for a first token, and in the step after that: with asynchronous scheduling the
    token is read once that step has started. Under load there may be no other steps: `PATIENCE` bounds the wait.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is in seconds."""
        self._clock, self._computed = clock, -math.inf
        self._passed, self._was_awaited = 0, False

    def computes(self) -> None:
        """Note that something is computed for requests."""
        self._computed = self._clock()

    @property
    def is_idle(self) -> bool:
        """Whether nothing has been computed for a moment."""
        return self._clock() - self._computed >= GRACE

    def holds_back(self, *, is_awaited: bool) -> bool:
        """Return whether nothing is to be done beside this step."""
        hurries, self._was_awaited = is_awaited or self._was_awaited, is_awaited
        self._passed = self._passed + 1 if hurries and self._passed < PATIENCE else 0
        return self._passed > 0


class LearningBudget(SpareTime):
    """The seconds that one engine, or one rank of it, may learn for."""

    def __init__(self, *, is_timed: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        """Unless `is_timed` it is one piece a step: the clocks of several ranks differ. `clock` is in seconds."""
        super().__init__(clock)
        self._is_timed, self._share, self._credit = is_timed, LEARNING_SHARE, 0.0
        self.settle: Callable[[], object] = lambda: None
        """Waits for a pass that a device has only begun: what that still takes is no time of learning's"""

    def spend(self, learn: Callable[[], bool], seconds: float, *, is_awaited: bool = False) -> None:
        """Learn piece after piece after a pass of so many seconds, within its share, until `learn` returns False. A
        piece that exceeds the share is charged to later passes; shares that were held back are kept.

        A step without a pass is for one piece: a request that arrives meanwhile does not wait for more. While a first
        token is computed or a verdict `is_awaited`, and in the step after, nothing is learned in most steps.
        """
        self._credit += self._share * seconds
        if self.holds_back(is_awaited=is_awaited):
            return
        if not self._is_timed or (not seconds and self.is_idle):
            learn()
        elif seconds and self._credit > 0:
            self.settle()
            began = self._clock()
            while self._credit > 0 and learn():
                ended = self._clock()
                self._credit, began = self._credit - (ended - began), ended
            self._credit = min(self._credit, 0.0)


class BaseShare(SpareTime):
    """The tokens that base prefills may take of a step: within `LEARNING_SHARE` of its time."""

    def __init__(self, times: StepTimes, clock: Callable[[], float] = time.monotonic) -> None:
        """`times` is what steps take. `clock` is in seconds."""
        super().__init__(clock)
        self._times = times

    def idle(self, most: int) -> int:
        """Return the tokens for base prefills in a step without requests, at most `most`."""
        if not self.is_idle:
            return 0
        return min(most, max(1, int(PIECE_S / self._times.per_token))) if self._times.are_known else most

    def beside(self, prefill: int, most: int) -> int:
        """Return the tokens for base prefills in a step with so many tokens of prefills, at most `most`."""
        if self.holds_back(is_awaited=prefill > 0):
            return 0
        if not self._times.are_known:
            return int(most * LEARNING_SHARE)
        own = self._times.decode / self._times.per_token + prefill
        return min(most, int(own * LEARNING_SHARE / (1 - LEARNING_SHARE)))
