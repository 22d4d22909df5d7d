"""Base prefills in vLLM's scheduler: prompts whose KV is captured, computed by lanes in blocks of their own.

They are no requests of vLLM's, so no client waits for an output. They take blocks, rows and tokens that requests leave
of a step, over as many steps as it takes: first those that a request waits for, which is translated then instead of
computed; then others, within a share of the step's time. Of these the latest is first: the workers keep captured KV of
a few prompts only, and base KV of a prompt that they have dropped teaches nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kedge.integrations.vllm.plugin.held_blocks import HeldBlocks, HeldLane, HeldLanes
from kedge.integrations.vllm.plugin.messages import Capture
from kedge.reuse.lanes import LaneBudget
from kedge.structures.bounded import BoundedDict
from kedge.types import GenerateRequest, Namespace, Segment, Tokens

QUEUED, DONE, DROPPED = "base_prefills_queued", "base_prefills_done", "base_prefills_dropped"
NOTHING = GenerateRequest(())
"""The request of a capture that only frees blocks"""


class PassLimits(NamedTuple):
    """What a model can compute."""

    limit: int
    """Positions"""
    vocabulary: int
    block_size: int

    def can_compute(self, tokens: Tokens) -> bool:
        """Return whether a lane can compute these tokens."""
        return 0 < len(tokens) < self.limit and max(tokens) < self.vocabulary


BaseKey = tuple[Namespace, Tokens]
"""The prompt of a base prefill, and where its KV belongs"""


@dataclass(slots=True)
class _BegunPrefill:
    """A base prefill that holds its blocks."""

    request: GenerateRequest
    capture_id: int
    computed: int = 0


class BaseJobs(HeldLanes):
    """The base prefills of one scheduler. Before `open`, it takes none."""

    def __init__(self, held: HeldBlocks, order: Callable[[Capture], None]) -> None:
        """`order` takes the captures for the step that is being scheduled."""
        super().__init__()
        self._held, self._order = held, order
        self._model: PassLimits | None = None
        self._wanted: BoundedDict[BaseKey, None] = BoundedDict(1)
        """Those that no request waits for and that have not begun, oldest first"""
        self._awaited: dict[BaseKey, None] = {}
        """Those that a request waits for, oldest first"""
        self._begun: dict[BaseKey, _BegunPrefill] = {}
        self._counts: Counter[str] = Counter()

    def open(self, model: PassLimits, most: int) -> None:
        """Compute base prefills from now on. At most `most` are queued that no request waits for."""
        self._model = model
        self._wanted = BoundedDict(most, lambda *_: self._count(DROPPED))

    def _count(self, name: str, times: int = 1) -> None:
        self._counts.update({name: times} if times else {})

    def counters(self) -> Counter[str]:
        """Return the counts since the start by the names of `metrics.COUNTERS`."""
        return self._counts

    @property
    def is_open(self) -> bool:
        return self._model is not None

    def __len__(self) -> int:
        return len(self._wanted) + len(self._awaited.keys() | self._begun.keys())

    def add(self, namespace: Namespace, tokens: Tokens) -> None:
        """Queue a base prefill as the next one, unless the model cannot compute it."""
        key = namespace, tokens
        if self._model is None or not self._model.can_compute(tokens) or key in self._awaited or key in self._begun:
            return
        self._count(QUEUED, key not in self._wanted)
        self._wanted[key] = None

    def add_awaited(self, namespace: Namespace, tokens: Tokens) -> None:
        """Queue a base prefill that a request waits for, before those that none does."""
        self.add(namespace, tokens)
        self.hurry(namespace, tokens)

    def hurry(self, namespace: Namespace, tokens: Tokens) -> None:
        """Compute a base prefill, if it is queued, before those that no request waits for."""
        key = namespace, tokens
        if key in self._wanted or key in self._begun:
            self._wanted.pop(key, None)
            self._awaited[key] = None

    @property
    def awaited(self) -> int:
        """Number of prefills that requests wait for."""
        return len(self._awaited)

    def is_awaited(self, namespace: Namespace, tokens: Tokens) -> bool:
        """Return whether a request that waits for a prefill has to go on: that is neither done nor dropped."""
        return (namespace, tokens) in self._awaited

    def grant(self, budget: LaneBudget, spare: int, *, most: int, idle: bool) -> LaneBudget:
        """Grant lanes for pieces of base prefills. Returns what they take.

        `budget` is what requests leave of a step; prefills that no request waits for take at most `most` tokens of it.
        `spare` blocks are left free for requests: where those are short, the prefills under way are dropped.
        """
        self._granted = []
        if self._held.free_blocks < spare:
            self._drop(*self._begun)
        for key in self._in_order():
            left = budget.less(*self.taken)
            limit = left.tokens if key in self._awaited else min(left.tokens, most)
            if limit <= 0 or left.rows <= 0:
                break
            if not self._has_begun(key, spare):
                if not idle and key not in self._awaited:
                    break
                self._drop(key)  # the request is computed densely; an idle engine would step for ever
                continue
            most -= 0 if key in self._awaited else min(limit, self._left(key))
            if not self._compute(key, limit):
                break
        return self.taken

    def _in_order(self) -> list[BaseKey]:
        others = [key for key in self._begun if key not in self._awaited]
        return [*self._awaited, *others, *reversed(self._wanted)]

    def _has_begun(self, key: BaseKey, spare: int) -> bool:
        """Give a prefill its blocks, unless it has them. Returns False where there are too few."""
        assert self._model is not None
        if key in self._begun:
            return True
        namespace, tokens = key
        capture_id = self._held.hold([])
        if not self._held.grow(capture_id, -(-len(tokens) // self._model.block_size), spare):
            self._held.free(capture_id)
            return False
        request = GenerateRequest((Segment(tokens, "p0"),), tenant=namespace.tenant, partition=namespace.partition)
        self._begun[key] = _BegunPrefill(request, capture_id)
        self._wanted.pop(key, None)
        return True

    def _left(self, key: BaseKey) -> int:
        return len(key[1]) - self._begun[key].computed

    def _compute(self, key: BaseKey, most: int) -> bool:
        """Compute the next piece, and order the capture with the last one. Returns whether it was the last one."""
        job, tokens = self._begun[key], key[1]
        blocks = self._held.blocks_of(job.capture_id)
        span = range(job.computed, min(job.computed + most, len(tokens)))
        self._granted.append(HeldLane([*tokens, tokens[-1]], blocks, span))
        job.computed = span.stop
        if span.stop < len(tokens):
            return False
        self._order(Capture(job.request, tuple(blocks), job.capture_id))
        self._forget(key)
        self._count(DONE)
        return True

    def _drop(self, *keys: BaseKey) -> None:
        """Give prefills up. A request that needs one asks again.

        The last pass of one that has begun may still write: a capture of nothing frees its blocks once the next one is
        over.
        """
        for key in keys:
            if job := self._begun.get(key):
                blocks = tuple(self._held.blocks_of(job.capture_id))
                self._order(Capture(NOTHING, blocks, job.capture_id))
            self._forget(key)
        self._count(DROPPED, len(keys))

    def _forget(self, key: BaseKey) -> None:
        self._begun.pop(key, None)
        self._awaited.pop(key, None)
        self._wanted.pop(key, None)

    def stop(self) -> None:
        """Drop all base prefills: nothing may be computed."""
        self._drop(*self._in_order())

    def give_up(self) -> None:
        """Forget all base prefills. The blocks of those that are under way are freed by the caller."""
        self._count(DROPPED, len(self))
        for kept in (self._begun, self._awaited, self._wanted):
            kept.clear()
