"""Base prefills in vLLM's scheduler: prompts whose KV is captured, computed by lanes in blocks of their own.

They are no requests of vLLM's, so no client waits for an output. One at a time is computed, over as many steps as it
takes; while there are requests it takes a share of a step, and only blocks, rows and tokens that those leave. The
latest is computed first: the workers keep captured KV of a few prompts only, and base KV of a prompt that they have
dropped teaches nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kedge.integrations.vllm.plugin.held_blocks import HeldBlocks, HeldLane
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


@dataclass(slots=True)
class _BegunPrefill:
    """A base prefill that holds its blocks."""

    request: GenerateRequest
    capture_id: int
    computed: int = 0


class BaseJobs:
    """The base prefills of one scheduler. Before `open`, it takes none."""

    def __init__(self, held: HeldBlocks, order: Callable[[Capture], None]) -> None:
        """`order` takes the captures for the step that is being scheduled."""
        self._held, self._order = held, order
        self._model: PassLimits | None = None
        self._share = 0.0
        self._wanted: BoundedDict[tuple[Namespace, Tokens], None] = BoundedDict(1)
        self._counts: Counter[str] = Counter()
        self._job: _BegunPrefill | None = None
        self._granted: list[HeldLane] = []

    def open(self, model: PassLimits, share: float, most: int) -> None:
        """Compute base prefills from now on: `share` of a step beside requests. At most `most` wait."""
        self._model, self._share = model, share
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
        return len(self._wanted) + (self._job is not None)

    def add(self, namespace: Namespace, tokens: Tokens) -> None:
        """Queue a base prefill as the next one, unless the model cannot compute it."""
        if self._model is None or not self._model.can_compute(tokens) or self._is_under_way(namespace, tokens):
            return
        self._count(QUEUED, (namespace, tokens) not in self._wanted)
        self._wanted[namespace, tokens] = None

    def _is_under_way(self, namespace: Namespace, tokens: Tokens) -> bool:
        request = self._job.request if self._job else NOTHING
        return (request.namespace, request.tokens) == (namespace, tokens)

    def grant(self, budget: LaneBudget, spare: int, *, idle: bool) -> LaneBudget:
        """Grant a lane for a piece of one base prefill. Returns what it takes.

        `budget` is what requests leave of a step, of which all may be taken where the engine is `idle`. `spare` blocks
        are left free for requests: where those are short, the prefill under way is dropped.
        """
        self._granted = []
        if self._job is not None and self._held.free_blocks < spare:
            self._drop(self._job)
        most = budget.tokens if idle else int(budget.tokens * self._share)
        if most <= 0 or budget.rows <= 0:
            return LaneBudget(0, 0)
        if self._job is None:
            self._start(spare, idle=idle)
        if self._job is not None:
            self._compute(self._job, most)
        return self.taken

    def _start(self, spare: int, *, idle: bool) -> None:
        """Begin the latest prefill if there are blocks for it. One that does not even fit an idle engine is dropped."""
        if not self._wanted or self._model is None:
            return
        key = namespace, tokens = next(reversed(self._wanted))
        capture_id = self._held.hold([])
        if self._held.grow(capture_id, -(-len(tokens) // self._model.block_size), spare):
            segments = (Segment(tokens, "p0"),)
            request = GenerateRequest(segments, tenant=namespace.tenant, partition=namespace.partition)
            self._job = _BegunPrefill(request, capture_id)
        else:
            self._held.free(capture_id)
        if self._job is not None or idle:
            self._wanted.pop(key)
            self._count(DROPPED, self._job is None)

    def _compute(self, job: _BegunPrefill, most: int) -> None:
        """Compute the next piece, and order the capture with the last one."""
        tokens = job.request.tokens
        blocks = self._held.blocks_of(job.capture_id)
        span = range(job.computed, min(job.computed + most, len(tokens)))
        self._granted = [HeldLane([*tokens, tokens[-1]], blocks, span)]
        job.computed = span.stop
        if span.stop == len(tokens):
            self._order(Capture(job.request, tuple(blocks), capture_id=job.capture_id))
            self._job = None
            self._count(DONE)

    def _drop(self, job: _BegunPrefill) -> None:
        """Give up the prefill that is under way. A request that needs it asks again.

        Its last pass may still write: a capture of nothing frees its blocks once the next one is over.
        """
        self._order(Capture(NOTHING, tuple(self._held.blocks_of(job.capture_id)), capture_id=job.capture_id))
        self._job = None
        self._count(DROPPED)

    @property
    def taken(self) -> LaneBudget:
        """What the lane of this step takes of it."""
        return LaneBudget(sum(len(lane.span) for lane in self._granted), len(self._granted))

    def take_granted(self) -> list[HeldLane]:
        """Return the lanes of this step."""
        granted, self._granted = self._granted, []
        return granted

    def stop(self) -> None:
        """Drop all base prefills: nothing may be computed."""
        self._count(DROPPED, len(self._wanted))
        self._wanted.clear()
        if self._job is not None:
            self._drop(self._job)

    def give_up(self) -> None:
        """Forget all base prefills. The blocks of the one that is under way are freed by the caller."""
        self._count(DROPPED, len(self))
        self._job = None
        self._wanted.clear()
