"""Messages between the scheduler and the workers, one each way per step: plain data that pickles."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kedge.cache import Copied, Copy
from kedge.reuse.holes import Holes, joined
from kedge.types import GenerateRequest, Miss, RequestId, RunKey, Tokens


@dataclass(frozen=True, slots=True)
class TranslationQuery:
    """A question to the workers, answered by a `TranslationVerdict`: may this prompt be translated from `exact` on?"""

    request: GenerateRequest
    exact: int
    may_wait: bool = False
    """Whether the request may wait for base KV"""
    has_waited: bool = False
    """Whether it was asked about before, and has waited for base KV since"""


@dataclass(frozen=True, slots=True)
class TranslationWrite:
    """An order to write the translated KV of some positions of a prompt into its blocks, before this step's pass."""

    request_id: RequestId
    blocks: tuple[int, ...]
    spans: Holes
    """The positions: those between the holes that the pass computes"""


@dataclass(frozen=True, slots=True)
class Capture:
    """An order to read the KV of a prompt, or of a response that follows it, after the pass of this step."""

    request: GenerateRequest
    blocks: tuple[int, ...]
    capture_id: int
    """By which the ranks report that they have read the blocks, which the scheduler holds until then"""
    response: Tokens = ()
    """Generated tokens whose KV is there"""


@dataclass
class Orders(KVConnectorMetadata):
    """The scheduler's message to the workers."""

    scheduled: int = 0
    """Number of tokens in this step's pass"""
    rows: int = 0
    """Number of requests and lanes in it"""
    prefills: bool = False
    """Whether a part of a request's prompt is computed in it"""
    copies: tuple[Copy, ...] = ()
    queries: tuple[TranslationQuery, ...] = ()
    writes: tuple[TranslationWrite, ...] = ()
    captures: tuple[Capture, ...] = ()
    dropped: tuple[RequestId, ...] = ()
    """Requests whose verdicts will not be used"""
    ended_runs: tuple[RunKey, ...] = ()
    """Runs whose agents' shared KV may be evicted"""

    @property
    def is_quiet(self) -> bool:
        """Whether they are about nothing but the pass: so they are in most steps."""
        found = self.copies or self.queries or self.writes or self.captures
        return not (found or self.dropped or self.ended_runs)


@dataclass(frozen=True, slots=True)
class TranslationVerdict:
    """What of a prompt has to be computed; everything else is exact or can be translated."""

    holes: Holes
    """Positions to be computed. The last hole ends with the prompt; a single one from 0 on is a dense prefill."""
    misses: tuple[Miss, ...] = ()
    needs: tuple[Tokens, ...] = ()
    """Prompts whose prefill would give missing base KV"""
    awaits: tuple[Tokens, ...] = ()
    """Prompts whose prefill gives base KV that pays before the request itself; then it is asked about again"""

    @property
    def tokens(self) -> int:
        """Number of tokens to be computed."""
        return sum(map(len, self.holes))

    def merged(self, other: TranslationVerdict) -> TranslationVerdict:
        """Return what holds on both ranks: what either of them has to compute is computed."""
        misses = max(self, other, key=lambda one: one.tokens).misses
        holes = joined((*self.holes, *other.holes))
        return TranslationVerdict(holes, misses, self.needs or other.needs, self.awaits or other.awaits)


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """The workers' message to the scheduler. The reports of all ranks for one step are merged into one."""

    copies: list[Copied] = field(default_factory=list)
    """Their ends, on each rank"""
    verdicts: dict[RequestId, TranslationVerdict] = field(default_factory=dict)
    """All ranks answer a query in the same step, so the merged verdict is final"""
    captured: dict[int, int] = field(default_factory=dict)
    """Capture id -> number of ranks that have read the blocks"""
    computed: tuple[int, float] = (0, 0.0)
    """Tokens and seconds of a pass that was long enough for a measurement"""
    learning: bool = False
    """Whether a captured prompt is still being learned from"""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        found = self.copies or self.verdicts or self.captured or self.computed[0]
        return not (found or self.learning)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Reports:
        """Merge another rank's reports into these."""
        assert isinstance(other, Reports)
        self.copies += other.copies
        for request_id, verdict in other.verdicts.items():
            self.verdicts[request_id] = self.verdicts.get(request_id, verdict).merged(verdict)
        for capture_id, ranks in other.captured.items():
            self.captured[capture_id] = self.captured.get(capture_id, 0) + ranks
        self.learning = self.learning or other.learning
        self.computed = max(self.computed, other.computed, key=lambda pass_: pass_[1])
        return self
