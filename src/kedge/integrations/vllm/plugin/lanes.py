"""Lanes: holes in the middle of a prompt, computed in the pass in which its request is admitted.

vLLM takes external KV only as one run behind a computed prefix. So a request claims everything before its last hole
as external, and the base class schedules that hole. For each earlier one the runners are given a request of their own,
which the scheduler does not know: the same prompt and the same blocks, from the beginning of the hole to its end. Since
it ends before the prompt does, it is a chunk of a prefill, for which nothing is sampled. It is finished with the next
step (`scheduler.py`).

In every layer a pass writes the keys and values of all its tokens before it attends, so a hole reads what the holes
before it compute in the same pass. vLLM itself relies on this for prefix hits within a batch.

Other lanes compute base prefills, in blocks of no request: they are none of vLLM's, so no client waits for an output.
They take blocks, rows and tokens that requests leave of a step, over as many steps as it takes: first those that a
request waits for, which is translated then instead of computed; then others, within a share of the step's time. Of
these the latest of each tenant is first: the workers keep captured KV of a few prompts only, and base KV of a prompt
that they have dropped teaches nothing.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from kedge.integrations.vllm.plugin.requests import Capture, LiveRequest
from kedge.reuse.costs import MAX_PENDING
from kedge.reuse.holes import Holes
from kedge.reuse.lanes import LaneBudget, WaitingPrompt, grant, lane_tokens
from kedge.structures.bounded import of_largest
from kedge.types import GenerateRequest, Namespace, Segment, TenantId, Tokens

QUEUED, DONE, DROPPED = "base_prefills_queued", "base_prefills_done", "base_prefills_dropped"
NOTHING = GenerateRequest(())
"""The request of a capture that only frees blocks"""


class HeldLane(NamedTuple):
    """Positions to be computed by a lane in held blocks."""

    tokens: list[int]
    """All tokens before and in the lane, and one more, so that the runner draws none"""
    blocks: list[int]
    span: range


class HeldBlocks:
    """Blocks of no running request: of finished ones, and of base prefills. They are kept until all ranks have captured
    them.
    """

    pool: BlockPool
    """The device's, set once vLLM has one"""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ids = itertools.count()
        self._held: dict[int, tuple[int, list[KVCacheBlock]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, block_ids: Sequence[int]) -> int:
        """Hold blocks. Returns the id of their capture."""
        blocks = [self.pool.blocks[block_id] for block_id in block_ids]
        self.pool.touch(blocks)
        capture_id = next(self._ids)
        self._held[capture_id] = (0, blocks)
        return capture_id

    def blocks_of(self, capture_id: int) -> list[int]:
        """Return the ids of the blocks of a capture, in their order."""
        return [block.block_id for block in self._held[capture_id][1]]

    def grow(self, capture_id: int, count: int, spare: int) -> bool:
        """Hold at least `count` blocks for a capture. Returns False where fewer than `spare` would be left free."""
        blocks = self._held[capture_id][1]
        missing = max(0, count - len(blocks))
        if missing and missing + spare > self.pool.get_num_free_blocks():
            return False
        blocks.extend(self.pool.get_new_blocks(missing) if missing else ())
        return True

    @property
    def block_ids(self) -> list[int]:
        """The ids of the held blocks, each as often as it is held."""
        return [block.block_id for _, blocks in self._held.values() for block in blocks]

    def give_up(self) -> None:
        """Free all blocks."""
        for capture_id in tuple(self._held):
            self.free(capture_id)

    def on_captured(self, capture_id: int, ranks: int) -> None:
        """Free the blocks of a capture once all ranks have read them. One that was given up is ignored."""
        if capture_id not in self._held:
            return
        done, blocks = self._held[capture_id]
        self._held[capture_id] = (done + ranks, blocks)
        if done + ranks == self._ranks:
            self.free(capture_id)

    def free(self, capture_id: int) -> None:
        """Free the blocks of a capture."""
        _, blocks = self._held.pop(capture_id)
        self.pool.free_blocks(reversed(blocks))


class PassLimits(NamedTuple):
    """What a model can compute."""

    limit: int
    """Positions"""
    vocabulary: int
    block_size: int


@dataclass(eq=False, slots=True)
class BasePrefill:
    """Tokens that are computed in held blocks, for base KV of a value or of a template."""

    request: GenerateRequest
    tokens: Tokens
    capture_id: int
    computed: int = 0
    is_awaited: bool = False
    """Whether a request waits for it"""


class BasePrefills:
    """The base prefills of one scheduler."""

    model: PassLimits
    """Set once lanes are granted: nothing comes before"""

    def __init__(self, held: HeldBlocks, order: Callable[[Capture], None]) -> None:
        """`order` takes the captures for the step that is being scheduled, or for the next one."""
        self._held, self._order = held, order
        self.granted: list[HeldLane] = []
        """The lanes of this step"""
        self._jobs: list[BasePrefill] = []
        """Those that were asked for longest ago first"""
        self.counts: Counter[str] = Counter()
        """Since the start, by the names of `metrics.COUNTERS`"""

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def has_awaited(self) -> bool:
        """Whether a request waits for one of them."""
        return any(job.is_awaited for job in self._jobs)

    # what is to be computed -----------------------------------------------------------------------------------

    def add(self, namespace: Namespace, tokens: Tokens, *, is_awaited: bool = False) -> None:
        """Queue a base prefill, unless the model cannot compute it. Of those that have not begun and that no request
        waits for, `MAX_PENDING` at most wait; the oldest one goes of the tenant with the most.
        """
        if not (0 < len(tokens) < self.model.limit and max(tokens) < self.model.vocabulary):
            return
        if job := self._find(namespace, tokens):
            self._jobs.remove(job)
        else:
            self.counts[QUEUED] += 1
            request = GenerateRequest((Segment(tokens, "p0"),), tenant=namespace.tenant, partition=namespace.partition)
            job = BasePrefill(request, tokens, self._held.hold([]))
        self._jobs.append(job)
        job.is_awaited |= is_awaited
        waiting = [one for one in self._jobs if not (one.is_awaited or self._has_begun(one))]
        if len(waiting) > MAX_PENDING:
            self._drop(of_largest(waiting, lambda one: one.request.tenant))

    def _find(self, namespace: Namespace, tokens: Tokens) -> BasePrefill | None:
        alike = (job for job in self._jobs if job.tokens == tokens)
        return next((job for job in alike if job.request.namespace == namespace), None)

    def is_awaited(self, namespace: Namespace, tokens: Tokens) -> bool:
        """Return whether a request that waits for a prefill has to go on: that is neither done nor dropped."""
        job = self._find(namespace, tokens)
        return job is not None and job.is_awaited

    def _has_begun(self, job: BasePrefill) -> bool:
        return bool(self._held.blocks_of(job.capture_id))

    # what a step computes of it -------------------------------------------------------------------------------

    def grant(self, budget: LaneBudget, spare: int, *, most: int, idle: bool) -> LaneBudget:
        """Grant lanes for pieces of base prefills: those that a request waits for first, then those under way, then the
        latest of each tenant, the one before it, and so on. Returns what they take.

        `budget` is what requests leave of a step; prefills that no request waits for take at most `most` tokens of it.
        Where fewer than `spare` blocks are free for requests, the prefills under way are dropped. One without blocks
        is dropped where a request waits for it, which then computes it, or the engine is `idle`: it would step for
        ever.
        """
        self.granted = []
        begun = [job for job in self._jobs if self._has_begun(job)]
        if self._held.pool.get_num_free_blocks() < spare:
            self._drop(*begun)
            begun = []
        awaited = [job for job in self._jobs if job.is_awaited]
        others = [job for job in self._jobs if not (job.is_awaited or job in begun)]
        turns, turn = Counter[TenantId](), dict[BasePrefill, int]()
        for job in reversed(others):
            turns[job.request.tenant] += 1
            turn[job] = turns[job.request.tenant]
        others.sort(key=turn.__getitem__)  # alike are the oldest first, so that one with ever new ones passes over none
        for job in [*awaited, *(job for job in begun if not job.is_awaited), *others]:
            left = budget.less(*self._taken)
            limit = left.tokens if job.is_awaited else min(left.tokens, most)
            if limit <= 0 or left.rows <= 0:
                break
            if self._held.grow(job.capture_id, self._blocks(job.tokens), spare):
                most -= 0 if job.is_awaited else min(limit, len(job.tokens) - job.computed)
                self._compute(job, limit)
            elif idle or job.is_awaited:
                self._drop(job)
            else:
                break
        return self._taken

    @property
    def _taken(self) -> LaneBudget:
        return LaneBudget(sum(len(lane.span) for lane in self.granted), len(self.granted))

    def _compute(self, job: BasePrefill, most: int) -> None:
        """Compute the next piece, and order the capture with the last one."""
        blocks = self._held.blocks_of(job.capture_id)[: self._blocks(job.tokens)]
        span = range(job.computed, min(job.computed + most, len(job.tokens)))
        self.granted.append(HeldLane([*job.tokens, job.tokens[-1]], blocks, span))
        job.computed = span.stop
        if span.stop == len(job.tokens):
            self._jobs.remove(job)
            self.counts[DONE] += 1
            self._capture(job, job.request)

    def _capture(self, job: BasePrefill, request: GenerateRequest) -> None:
        self._order(Capture(request, tuple(self._held.blocks_of(job.capture_id)), job.capture_id))

    def _blocks(self, tokens: Tokens) -> int:
        return -(-len(tokens) // self.model.block_size)

    # what is given up -----------------------------------------------------------------------------------------

    def _drop(self, *jobs: BasePrefill) -> None:
        """Give jobs up. A request that needs one asks again. The last pass of one that has begun may still write: a
        capture of nothing frees its blocks once the next one is over.
        """
        for job in jobs:
            self._jobs.remove(job)
            self.counts[DROPPED] += 1
            if self._has_begun(job):
                self._capture(job, NOTHING)
            else:
                self._held.free(job.capture_id)

    def stop(self) -> None:
        """Drop all jobs: nothing may be computed."""
        self._drop(*self._jobs)

    def give_up(self) -> None:
        """Forget all jobs. The blocks that they hold are freed by the caller."""
        self.counts[DROPPED] += len(self._jobs)
        self._jobs.clear()


class LaneGrants:
    """The lanes of one scheduler's requests. Without `open`, no request gets any."""

    def __init__(self, requests: Mapping[str, LiveRequest], prefills: BasePrefills) -> None:
        """`requests`: all that wait or run, by vLLM's ids. Base `prefills` get lanes too."""
        self._requests, self.prefills = requests, prefills
        self.is_open = False
        self._hold_back: Callable[[], None] = lambda: None
        self._granted: dict[str, Holes] = {}
        self._admitted: dict[str, Holes] = {}
        """Requests that were admitted in this step -> their lanes: all of their holes but the last"""

    def open(self, hold_back: Callable[[], None], model: PassLimits) -> None:
        """Let requests and base prefills have lanes. `hold_back` ends the admissions of the step under way."""
        self.is_open, self._hold_back, self.prefills.model = True, hold_back, model

    @property
    def is_wanted(self) -> bool:
        """Whether lanes may be granted in this step: to a request or to a base prefill."""
        return bool(self.prefills) or self._has_gaps

    @property
    def _has_gaps(self) -> bool:
        return any(len(live.holes) > 1 for live in self._requests.values())

    def grant(
        self, waiting: Iterable[Request], deferred: Collection[Request], budget: LaneBudget, demand: int
    ) -> LaneBudget:
        """Grant lanes for this step, see `kedge.reuse.lanes.grant`. Returns what they take.

        `waiting` are vLLM's requests in the order of service, of which `deferred` were not ready when last looked at.
        """
        self._granted = {}
        if self._has_gaps:
            self._granted = grant(self._prompts(waiting, deferred), budget, demand)
        rows = sum(len(holes) - 1 for holes in self._granted.values())
        return LaneBudget(sum(map(lane_tokens, self._granted.values())), rows)

    def _prompts(self, waiting: Iterable[Request], deferred: Collection[Request]) -> Iterator[WaitingPrompt]:
        for request in waiting:
            live = self._requests.get(request.request_id)
            if live and len(live.holes) > 1:
                yield WaitingPrompt(request.request_id, request.num_tokens, live.holes, live.refusals)
            elif request not in deferred:
                yield WaitingPrompt(request.request_id, request.num_tokens)

    def holes_of(self, live: LiveRequest) -> Holes | None:
        """Return the holes to be computed if a request is admitted now; None where it has to wait for its lanes."""
        if len(live.holes) <= 1:
            return live.holes
        granted = self._granted.get(live.request.request_id)
        if granted is None:
            live.refusals += 1
            self._hold_back()
        return granted

    def admit(self, live: LiveRequest) -> None:
        """Take a request that is admitted with its planned holes."""
        live.holes = ()
        if len(live.planned) > 1:
            self._admitted[live.request.request_id] = live.planned[:-1]

    @property
    def taken(self) -> LaneBudget:
        """What the lanes of this step take of it: of requests admitted in it, and of base prefills."""
        lanes = [lane for admitted in self._admitted.values() for lane in admitted]
        lanes += [lane.span for lane in self.prefills.granted]
        return LaneBudget(sum(map(len, lanes)), len(lanes))

    def take(self) -> tuple[dict[str, Holes], list[HeldLane]]:
        """Return the lanes of this step: of requests that were admitted in it, and in held blocks."""
        taken = self._admitted, self.prefills.granted
        self._admitted, self.prefills.granted = {}, []
        return taken
